"""Drafts of a smaller model, which has pages of its own.

    known tokens   ... a b c
    catch up             b c             one chunk: tokens that the draft model has not computed
    draft                    d
    draft                      e f ...   one token a step, all samples at a time

The draft model samples with the parameters of the request and with the random number of each
position, as the target will: where both have the same probabilities they sample the same token.
Rejected drafts are dropped from its pages when the sample is next drafted for.

    host     launch   launch   launch   launch   wait for d e f ...
    device            b c -> d    -> e    -> f

Drafts stay on the device, where the next step reads them, so the host waits once for all steps. If
a request needs the values of its tokens (penalties, a grammar), the host waits for each step.

A tree grows by a level a step: the children of a draft are the sampled token, then the other tokens
with the largest logits. If the drafts that have children are a chain, steps are as above. Otherwise
each step computes all of them again, with those of the new level, as a tree; their slots are
dropped at the end.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from onchip.engine.cpu_threads import Span, StepThreads
from onchip.engine.cuda_graphs import StepGraphs, can_record, fill_in_sampled
from onchip.engine.request import Sample
from onchip.engine.sampler import (
    SamplingMetadata,
    SamplingMetadataCache,
    compile_sampler,
    sample,
)
from onchip.engine.speculation.tree import DraftTree, TreeShape, find_path
from onchip.kvcache import KVCache, NoRoom
from onchip.kvcache.draft_trees import pack_trees
from onchip.models import Model, positions_of

# Known tokens that are not computed yet, at most, after a chunk with drafts: the last draft and the
# token after it.
CATCH_UP_TOKENS = 2
_NO_DRAFT = TreeShape(())


@dataclass(eq=False, slots=True)
class DraftSequence:
    """A sample in the cache of the draft model. num_known: its first tokens that were known, not
    drafted, when they were computed. shape: of this step's drafts. places: of the sampled drafts
    among the last tokens on the device. drafts: as many of them as the host has read. view: the
    sample with some drafts as pending tokens, for the sampler.
    """

    owner: Sample
    sequence: Any
    num_known: int = 0
    shape: TreeShape = _NO_DRAFT
    places: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    view: Sample = field(init=False)

    def __post_init__(self) -> None:
        owner = self.owner
        self.view = Sample(owner.request, owner.index, owner.token_ids, rng_key=owner.rng_key)

    def count_right(self) -> int:
        """Computed tokens that the sample has, too; its last token is always left to compute."""
        tokens, most = self.sequence.tokens, min(self.sequence.computed, self.owner.length - 1)
        start = min(self.num_known, most)
        known = self.owner.tokens(start, most)
        for i, token in enumerate(known, start):
            if tokens[i] != token:
                return i
        return most

    def start(self, shape: TreeShape) -> None:
        """Begin a step with at most these drafts."""
        self.shape, self.num_known = shape, self.owner.length
        self.places.clear()
        self.drafts.clear()

    def sampler_row(self, draft: int) -> Sample:
        """The sample as if the drafts up to this one were its last tokens; -1: none of them."""
        path = find_path(self.shape.parents, draft)
        if self.owner.request.needs_tokens:
            return self.owner.row_after([self.drafts[i] for i in path])
        self.view.pending = len(path)
        return self.view


class DraftModelProposer:
    """model: with the vocabulary of the target. cache: its pages. max_tokens: most tokens of one of
    its steps. shape: most drafts of a sample. graphs: replay its steps from CUDA graphs (native
    decoders on a GPU).
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        max_tokens: int,
        shape: TreeShape,
        graphs: bool = False,
    ):
        self.model, self.cache, self._max_tokens, self._shape = model, cache, max_tokens, shape
        self._sequences: dict[Sample, DraftSequence] = {}
        self._drafting: list[DraftSequence] = []
        self._last_tokens, self._num_last, self._num_read = _zeros(cache, shape), 0, 0
        self._metadata = SamplingMetadataCache(cache.device)
        self._graphs: StepGraphs | None = None
        if graphs and can_record(model, cache):
            lengths, trees = [chunk_length(shape)], shape.branches_late
            tokens = self._last_tokens
            self._graphs = StepGraphs(model, cache, tokens, None, lengths, trees)

    @cached_property
    def _threads(self) -> StepThreads:
        return StepThreads(self.model)

    @property
    def has_graphs(self) -> bool:
        """Whether steps are replayed from CUDA graphs."""
        return self._graphs is not None

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Record graphs and compile the sampling kernels."""
        if self._graphs is not None:
            self._graphs.record_all(self._max_tokens)
        compile_sampler(self.model)

    def reset(self) -> None:
        """Forget all samples, also after an interrupt."""
        self._sequences.clear()
        self._drafting.clear()
        self.cache.reset()

    def propose(self, wanted: Sequence[tuple[Sample, int]]) -> list[DraftTree]:
        """Drafts of each (sample, limit); none for a sample that finds no room in the cache. If the
        model fails, all samples are forgotten: their pages may be half written.
        """
        try:
            return self._propose(wanted)
        except Exception:
            self.reset()
            raise

    @torch.inference_mode()
    def _propose(self, wanted: Sequence[tuple[Sample, int]]) -> list[DraftTree]:
        self._release_ended()
        self._num_last = self._num_read = 0
        drafting = [d for owner, limit in wanted if (d := self._catch_up(owner, limit))]
        self._drafting, level = list(drafting), 0
        while drafting:
            drafting = self._append_level(drafting, level)
            self._draft(drafting, level)
            level += 1
            drafting = [d for d in drafting if level < len(d.shape.levels)]
        self._read_drafts()
        found = [self._sequences.get(owner) for owner, _ in wanted]
        return [self._finish(d) if d else DraftTree(()) for d in found]

    def _finish(self, draft: DraftSequence) -> DraftTree:
        """The drafts of a sample. The slots of a tree that was computed again and again are
        dropped.
        """
        if self._shape.branches_late:
            self.cache.truncate(draft.sequence, draft.num_known)
        shape = draft.shape
        return DraftTree(tuple(draft.drafts), () if shape.is_chain else shape.parents)

    def _release_ended(self) -> None:
        """Free the pages of samples that ended or were preempted."""
        for draft in list(self._sequences.values()):
            if draft.owner.sequence is None or draft.owner.request.host_group is not None:
                self._release(draft)

    def _release(self, draft: DraftSequence) -> None:
        del self._sequences[draft.owner]
        self.cache.free(draft.sequence)

    def _catch_up(self, owner: Sample, limit: int) -> DraftSequence | None:
        """Compute the known tokens of a sample up to those that fit into a step of all samples."""
        draft = self._sequences.get(owner) or self._open(owner)
        if draft is None:
            return None
        self.cache.truncate(draft.sequence, draft.count_right())
        draft.start(self._shape.cut(limit))
        most = max(1, self._max_tokens // self.cache.max_seqs)
        while (missing := owner.length - draft.sequence.computed) > most:
            start = draft.sequence.computed
            ids = owner.tokens(start, start + min(missing - 1, self._max_tokens))
            if self.cache.append(draft.sequence, ids) is not None:
                self._release(draft)
                return None
            with self._limit_threads([draft]):
                self._forward([draft.sequence], ids, [1])
            self.cache.commit(draft.sequence)
        return draft

    def _open(self, owner: Sample) -> DraftSequence | None:
        tokens = owner.tokens(0, owner.length)
        sequence = self.cache.open(tokens, salt=owner.request.salt)
        if isinstance(sequence, NoRoom):
            return None
        self._sequences[owner] = DraftSequence(owner, sequence, sequence.length)
        return self._sequences[owner]

    def _append_level(self, drafting: Sequence[DraftSequence], level: int) -> list[DraftSequence]:
        """Reserve slots for the next tokens of each sample. One that finds no page is forgotten,
        and gets no drafts.
        """
        appended = []
        for draft in drafting:
            full = (
                self.cache.reserve(draft.sequence, len(draft.shape.levels[level]))
                if level
                else self.cache.append(draft.sequence, self._next_ids(draft, level))
            )
            if full is None:
                appended.append(draft)
            else:
                self._release(draft)
        return appended

    def _next_ids(self, draft: DraftSequence, level: int) -> list[int]:
        """Ids of the tokens that a step computes, as for `fill_in_sampled`: the known ones, then in
        each step the drafts with children of a level, or of all levels so far.
        """
        if not level:
            return draft.owner.tokens(draft.sequence.computed, draft.num_known)
        return [~draft.places[i] for i in self._computed_drafts(draft, level)]

    def _computed_drafts(self, draft: DraftSequence, level: int) -> list[int]:
        """The drafts that the step of this level computes."""
        levels = draft.shape.levels
        first = 1 if self._shape.branches_late else level
        return [i for nodes in levels[first : level + 1] for i in nodes]

    def _draft(self, drafting: Sequence[DraftSequence], level: int) -> None:
        """Compute the appended tokens and sample the children of a level, on the device."""
        if not drafting:
            return
        rows = [(draft, i) for draft in drafting for i in draft.shape.levels[level]]
        counts = [draft.shape.num_children[i] for draft, i in rows]
        with self._limit_threads(drafting):
            logits = self._compute(drafting, level)
            metadata = self._metadata.make([draft.sampler_row(i) for draft, i in rows])
            children = choose_children(logits, metadata, max(counts))
        firsts = self._keep_last_tokens(children)
        for (draft, _), first, count in zip(rows, firsts, counts, strict=True):
            draft.places += range(first, first + count)
        if any([draft.owner.request.needs_tokens for draft in drafting]):
            self._read_drafts()

    def _keep_last_tokens(self, children: Tensor) -> range:
        """Keep tokens on the device, where the next step reads them: the place of each row."""
        start, (_, width) = self._num_last, children.shape
        self._num_last += children.numel()
        self._last_tokens[start : self._num_last].copy_(children.flatten())
        return range(start, self._num_last, width)

    def _read_drafts(self) -> None:
        """Wait for the drafts on the device, and give the cache the ids of those with a slot."""
        if self._num_read == self._num_last:
            return
        tokens, self._num_read = self._last_tokens[: self._num_last].tolist(), self._num_last
        for draft in self._drafting:
            draft.drafts[:] = [tokens[place] for place in draft.places]
            if not self._shape.branches_late and self._sequences.get(draft.owner) is draft:
                sequence, levels = draft.sequence, draft.shape.levels[1:]
                ids = [draft.drafts[i] for nodes in levels for i in nodes if i < len(draft.drafts)]
                start = len(sequence.tokens) - draft.num_known
                ids = ids[start : sequence.length - draft.num_known]
                self.cache.append_tokens(sequence, ids)

    def _limit_threads(self, drafting: Sequence[DraftSequence]) -> AbstractContextManager[None]:
        spans = [Span(d.sequence.computed, d.sequence.length) for d in drafting]
        return self._threads.limit_for(spans, len(drafting))

    def _compute(self, drafting: Sequence[DraftSequence], level: int) -> Tensor:
        """The logits after each draft of a level, or after the last known token."""
        is_tree = level > 0 and self._shape.branches_late
        parents = [self._parents_in_step(d, level) for d in drafting] if is_tree else None
        sequences = [d.sequence for d in drafting]
        num_rows = [len(d.shape.levels[level]) for d in drafting]
        ids = [token for draft in drafting for token in self._next_ids(draft, level)]
        hidden = self._forward(sequences, ids, num_rows, parents)
        if not is_tree:
            self.cache.commit_all(sequences, [s.length for s in sequences])
        return self.model.logits(hidden, wide=False)

    def _parents_in_step(self, draft: DraftSequence, level: int) -> list[int]:
        """For `pack_trees`."""
        computed = self._computed_drafts(draft, level)
        parents = [draft.shape.parents[i] for i in computed]
        return [-1 if parent < 0 else computed.index(parent) for parent in parents]

    def _forward(
        self,
        sequences: Sequence[Any],
        ids: Sequence[int],
        num_rows: Sequence[int],
        parents: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Hidden states of the last num_rows appended tokens of each sequence. ids: as for
        `fill_in_sampled`; parents: of trees, as for `pack_trees`.
        """
        ends = accumulate(s.length - s.computed for s in sequences)
        rows = [row for end, n in zip(ends, num_rows, strict=True) for row in range(end - n, end)]
        parts = [_int32_tensor(part) for part in (ids, rows, pack_trees(parents or ()))]
        graphs, has_trees = self._graphs, parents is not None
        if graphs is not None and len(ids) == len(sequences) and not has_trees:
            return graphs.replay(sequences, parts[0])
        if graphs is not None and graphs.has_graph_for(sequences, len(rows), has_trees):
            return graphs.replay_mixed(sequences, *parts[:2], parents=parents)
        batch = self.cache.view(sequences, extra=torch.cat(parts))
        tokens, at, trees = batch.extra.split([len(part) for part in parts])
        batch = batch.grow_trees(trees) if has_trees else batch
        tokens = fill_in_sampled(tokens, self._last_tokens)
        return self.model(tokens, positions_of(batch), batch, self.cache, at)


def chunk_length(shape: TreeShape) -> int:
    """Most tokens of a sample in a step of the draft model, but for long chunks of known ones."""
    if not shape.branches_late:
        return CATCH_UP_TOKENS
    return max(1 + shape.depth, sum(map(len, shape.levels[1:])))


def choose_children(logits: Tensor, metadata: SamplingMetadata, count: int) -> Tensor:
    """(rows, count) different tokens: the sampled one, then others with the largest logits."""
    first = sample(logits, metadata).token[:, None]
    if count == 1:
        return first
    ranked = metadata.edits.apply(logits.float()).topk(count).indices
    is_first = torch.cat([torch.zeros_like(first), (ranked == first).long()], 1)
    order = is_first.argsort(stable=True, dim=1)[:, :count]
    return torch.cat([first, ranked], 1).gather(1, order)


def _zeros(cache: KVCache, shape: TreeShape) -> Tensor:
    """Tokens for all drafts of all samples; in a level, each draft has as many children."""
    widths = [max([shape.num_children[i] for i in level]) for level in shape.levels]
    count = sum([len(level) * width for level, width in zip(shape.levels, widths, strict=True)])
    return torch.zeros(cache.max_seqs * count, dtype=torch.int64, device=cache.device)


def _int32_tensor(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
