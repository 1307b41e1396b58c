"""Drafts of a smaller model, which has pages of its own.

    known tokens   ... a b c
    catch up             b c             one chunk: tokens that the draft model has not computed
    draft                    d
    draft                      e f ...   one token a step, all samples at a time

The draft model samples with the parameters of the request and with the random number of each
position, as the target will: where both have the same probabilities they sample the same token.
Rejected drafts are dropped from its pages when the sample is next drafted for.
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
from onchip.engine.request import Sample
from onchip.engine.sampler import make_sampling_metadata, sample
from onchip.kvcache import KVCache, NoRoom
from onchip.models import Model, positions_of


@dataclass(eq=False, slots=True)
class DraftSequence:
    """A sample in the cache of the draft model. num_known: its first tokens that were known, not
    drafted, when they were computed. drafts: of this step, at most `limit`.
    """

    owner: Sample
    sequence: Any
    num_known: int = 0
    limit: int = 0
    drafts: list[int] = field(default_factory=list)

    def count_right(self) -> int:
        """Computed tokens that the sample has, too; its last token is always left to compute."""
        tokens, most = self.sequence.tokens, min(self.sequence.computed, self.owner.length - 1)
        start = min(self.num_known, most)
        known = self.owner.tokens(start, most)
        for i, token in enumerate(known, start):
            if tokens[i] != token:
                return i
        return most


class DraftModelProposer:
    """model: with the vocabulary of the target. cache: its pages. max_tokens: most tokens of one of
    its steps.
    """

    def __init__(self, model: Model, cache: KVCache, max_tokens: int):
        self.model, self.cache, self._max_tokens = model, cache, max_tokens
        self._sequences: dict[Sample, DraftSequence] = {}

    @cached_property
    def _threads(self) -> StepThreads:
        return StepThreads(self.model)

    def reset(self) -> None:
        """Forget all samples, also after an interrupt."""
        self._sequences.clear()
        self.cache.reset()

    def propose(self, wanted: Sequence[tuple[Sample, int]]) -> list[list[int]]:
        """Drafts of each (sample, limit); none for a sample that finds no room in the cache. If the
        model fails, all samples are forgotten: their pages may be half written.
        """
        try:
            return self._propose(wanted)
        except Exception:
            self.reset()
            raise

    @torch.inference_mode()
    def _propose(self, wanted: Sequence[tuple[Sample, int]]) -> list[list[int]]:
        self._release_ended()
        drafting = [d for owner, limit in wanted if (d := self._catch_up(owner, limit))]
        while drafting:
            drafting = [d for d in drafting if self._append_next(d)]
            self._draft(drafting)
            drafting = [d for d in drafting if len(d.drafts) < d.limit]
        found = [self._sequences.get(owner) for owner, _ in wanted]
        return [d.drafts if d else [] for d in found]

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
        draft.limit, draft.num_known = limit, owner.length
        draft.drafts.clear()
        most = max(1, self._max_tokens // self.cache.max_seqs)
        while (lacking := owner.length - draft.sequence.computed) > most:
            start = draft.sequence.computed
            ids = owner.tokens(start, start + min(lacking - 1, self._max_tokens))
            if not self._append(draft, ids):
                return None
            with self._limit_threads([draft]):
                self._compute([draft], ids)
        return draft

    def _open(self, owner: Sample) -> DraftSequence | None:
        tokens = owner.tokens(0, owner.length)
        sequence = self.cache.open(tokens, salt=owner.request.salt)
        if isinstance(sequence, NoRoom):
            return None
        self._sequences[owner] = DraftSequence(owner, sequence, sequence.length)
        return self._sequences[owner]

    def _append_next(self, draft: DraftSequence) -> bool:
        """Append the last draft, or first the known tokens that are not computed yet."""
        owner, computed = draft.owner, draft.sequence.computed
        return self._append(draft, draft.drafts[-1:] or owner.tokens(computed, owner.length))

    def _append(self, draft: DraftSequence, ids: Sequence[int]) -> bool:
        """False if no page is free: the sample is forgotten, and gets no drafts."""
        if self.cache.append(draft.sequence, ids) is None:
            return True
        self._release(draft)
        return False

    def _draft(self, drafting: Sequence[DraftSequence]) -> None:
        """Compute the appended tokens and sample one draft of each sample."""
        if not drafting:
            return
        ids = [t for d in drafting for t in d.sequence.tokens[d.sequence.computed :]]
        with self._limit_threads(drafting):
            logits = self._compute(drafting, ids)
            metadata = make_sampling_metadata(
                [d.owner.row_after(d.drafts) for d in drafting], self.cache.device
            )
            tokens = sample(logits, metadata).token.tolist()
        for draft, token in zip(drafting, tokens, strict=True):
            draft.drafts.append(token)

    def _limit_threads(self, drafting: Sequence[DraftSequence]) -> AbstractContextManager[None]:
        spans = [Span(d.sequence.computed, d.sequence.length) for d in drafting]
        return self._threads.limit_for(spans, len(drafting))

    def _compute(self, drafting: Sequence[DraftSequence], ids: Sequence[int]) -> Tensor:
        """The logits after the last appended token of each sequence."""
        sequences = [d.sequence for d in drafting]
        ends = accumulate(s.length - s.computed for s in sequences)
        numbers = torch.tensor([*ids, *(end - 1 for end in ends)], dtype=torch.int32)
        batch = self.cache.view(sequences, extra=numbers)
        tokens, rows = batch.extra.split([len(ids), len(sequences)])
        hidden = self.model(tokens, positions_of(batch), batch, self.cache, rows)
        self.cache.commit_all(sequences, [s.length for s in sequences])
        return self.model.logits(hidden, wide=False)
