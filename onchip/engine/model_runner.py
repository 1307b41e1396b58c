"""The tensors of a step: inputs to the device, forward pass, sampling, results back to the host.

    ScheduledStep
      token ids, page table, slots ----one copy----> device
                                                     forward (CUDA graph, or eager)
                                                     logits of the last rows
                                                     sample -> last_tokens (input of the next step)
      SampledToken <------ event, two copies --------+
                                                     hidden states for embeddings (pooling.py)

The host waits for the device in `ModelRunner.collect` only.
"""

import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from onchip.engine.cascade import MOST_TOKENS, BatchRows, CascadeStep, make_planner
from onchip.engine.cpu_threads import StepThreads
from onchip.engine.cuda_graphs import StepGraphs, can_record, fill_in_sampled
from onchip.engine.pooling import PooledRows, add_rows, claim_rows, needs_all_rows
from onchip.engine.prefill_precision import make_prefill_planner
from onchip.engine.request import Request, Sample, SampledToken
from onchip.engine.sampler import (
    SamplerOutput,
    SamplingMetadataCache,
    compile_sampler,
    compute_logprobs,
    sample,
)
from onchip.engine.speculation.tree import TreeShape
from onchip.engine.speculation.verify import rows_for_sampler
from onchip.engine.step import Chunk, ScheduledStep
from onchip.kvcache import KVCache, PagedBatch
from onchip.kvcache.draft_trees import count_tree_numbers, pack_trees
from onchip.kvcache.prefill_chunks import PrefillChunks
from onchip.models import Model, positions_of
from onchip.models.experts import fuse_experts
from onchip.models.products import fuse_products
from onchip.models.reproducible import reproducible_rows

_EMPTY = torch.empty(0)
_PROMPT_ROWS = 256  # rows of prompt logits that exist at a time: each is vocab_size wide


@dataclass(frozen=True)
class InFlightStep:
    """A step queued on the device, and its results. event: set when the results have arrived on the
    host; None on the CPU, where they are complete at once. prompts: prompt logprobs by request.
    unread_tokens: keys that each layer did not read again (cascade.py); 0 without a cascade.
    pooled: sums of hidden states for embeddings. tokens_8bit: those whose attention was computed in
    8 bits.
    """

    step: ScheduledStep
    sampled: SamplerOutput | None
    prompts: Sequence[tuple[Request, SamplerOutput]]
    event: "torch.cuda.Event | None"
    launched_at: float
    unread_tokens: int = 0
    pooled: Sequence[tuple[PooledRows, Tensor]] = ()
    tokens_8bit: int = 0

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


@dataclass(frozen=True)
class _ForwardOutput:
    """hidden: of the rows to sample, then of the last row of each embedding of
    `claimed`. all_hidden: of all rows, if any embedding or prompt logprobs need them. shared: the
    pages that were read once. prefill: the chunks in 8 bits.
    """

    hidden: Tensor
    claimed: Sequence[PooledRows] = ()
    prompts: Sequence[tuple[Request, SamplerOutput]] = ()
    all_hidden: Tensor | None = None
    shared: CascadeStep | None = None
    prefill: PrefillChunks | None = None

    @property
    def tokens_8bit(self) -> int:
        return 0 if self.prefill is None else self.prefill.num_tokens

    @property
    def unread_tokens(self) -> int:
        return 0 if self.shared is None else self.shared.unread_tokens

    def pool(self, num_sampled: int) -> list[tuple[PooledRows, Tensor]]:
        """The fp32 sum of the rows of each embedding."""
        if not self.claimed:
            return []
        last = self.hidden[num_sampled:]
        return [(p, self._sum(p.rows, last[i])) for i, p in enumerate(self.claimed)]

    def _sum(self, rows: range, last: Tensor) -> Tensor:
        if self.all_hidden is None or len(rows) == 1:
            return last.float()
        return self.all_hidden[rows.start : rows.stop].sum(0, dtype=torch.float32)


class ModelRunner:
    """Runs the steps of a scheduler. Only `collect` waits for the device.

    Sampled tokens stay on the device, where the next step reads them. Steps must therefore be
    launched in order, and a sample with an unknown last token may only be in the next step. graphs:
    replay steps from CUDA graphs where `StepGraphs` has one (native decoders on a GPU). cascade:
    "auto" reads the pages that sequences share once where this is predicted to save time, "always"
    wherever two share a page, "off" never. prefill_precision: see prefill_precision.py.
    fused_decode: native decoders compute steps of few rows with `fuse_products`. drafts: steps with
    drafts of this shape have graphs of their own. fused_experts: native decoders compute layers of
    experts with `fuse_experts`. is_reproducible: logits are sampled from row by row, too, as the
    model computes them.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        graphs: bool = True,
        cascade: str = "off",
        prefill_precision: str | None = None,
        fused_decode: bool = True,
        drafts: TreeShape | None = None,
        fused_experts: bool = True,
        is_reproducible: bool = False,
    ):
        self._is_reproducible = is_reproducible
        self._model, self._cache, self._device = model, cache, cache.device
        self._fused_decode, self._fused_experts = fused_decode, fused_experts
        self._last_tokens = torch.zeros(cache.max_seqs, dtype=torch.int64, device=cache.device)
        self._metadata_cache, self._threads = (
            SamplingMetadataCache(cache.device),
            StepThreads(model),
        )
        self._cascade = make_planner(model, cache, cascade)
        self._prefill = make_prefill_planner(model, cache, prefill_precision)
        self._graphs = None
        with fuse_experts(fused_experts):
            is_recordable = graphs and can_record(model, cache)
        if is_recordable:
            lengths = [] if drafts is None else [1 + len(drafts.paths)]
            trees = drafts is not None and not drafts.is_chain
            self._graphs = StepGraphs(
                model, cache, self._last_tokens, self._cascade, lengths, trees
            )

    @property
    def has_graphs(self) -> bool:
        """Whether steps are replayed from CUDA graphs."""
        return self._graphs is not None

    @torch.inference_mode()
    def warm_up(self, most_tokens: int) -> None:
        """Record the graphs of steps with at most `most_tokens` tokens, and compile the sampling
        kernels.
        """
        with self._fuse():
            if self._graphs is not None:
                self._graphs.record_all(most_tokens)
            compile_sampler(self._model)

    @torch.inference_mode()
    def graph_bytes(self, most_tokens: int) -> int:
        """Estimate the GPU memory of `warm_up`'s graphs by recording a few. Call it before anything
        is recorded.
        """
        if self._graphs is None:
            return 0
        with self._fuse():
            return self._graphs.estimate_bytes(most_tokens, partial(_used_bytes, self._device))

    @torch.inference_mode()
    def launch(self, step: ScheduledStep) -> InFlightStep:
        """Queue a step: forward pass, sampling, and the copies to the host."""
        with (
            self._fuse(),
            self._threads.limit_for(step.chunks, len(step.rows_to_sample)),
            reproducible_rows(self._is_reproducible),
        ):
            return self._launch(step)

    @contextmanager
    def _fuse(self) -> Iterator[None]:
        with fuse_products(self._fused_decode), fuse_experts(self._fused_experts):
            yield

    def _launch(self, step: ScheduledStep) -> InFlightStep:
        started, sampled = time.monotonic(), None
        forward = self._forward(step)
        num_sampled = len(step.rows_to_sample)
        if num_sampled:
            hidden = forward.hidden[:num_sampled] if forward.claimed else forward.hidden
            sampled = self._sample(hidden, step)
        pooled = forward.pool(num_sampled)
        counts = {"unread_tokens": forward.unread_tokens, "tokens_8bit": forward.tokens_8bit}
        return self._copy_results(
            InFlightStep(step, sampled, forward.prompts, None, started, pooled=pooled, **counts)
        )

    def _forward(self, step: ScheduledStep) -> "_ForwardOutput":
        # A graph reads pages only: the segments of offloaded pages are copied by the host's code.
        graphs = None if self._reads_host(step) else self._graphs
        if graphs is not None and _is_decode_only(step):
            shared = self._plan_for_graph(graphs, step, is_decode_only=True)
            ids = _int32_tensor(_token_ids(step.chunks))
            return _ForwardOutput(graphs.replay(step.sequences, ids, shared), shared=shared)
        claimed = claim_rows(step, _chunk_ends(step.chunks))
        rows = _logit_rows(step) + [pooled.rows.stop - 1 for pooled in claimed]
        if (
            graphs is not None
            and graphs.has_graph_for(step.sequences, len(rows), step.has_trees)
            and not _needs_prompt_logprobs(step)
            and not needs_all_rows(step)
        ):
            # Graphs with a cascade have no trees, and fewer rows than drafts may have.
            has_space = len(rows) <= self._cache.max_seqs and not step.has_trees
            shared = self._plan_for_graph(graphs, step, is_decode_only=False) if has_space else None
            numbers = _int32_tensor(_token_ids(step.chunks) + rows)
            ids, at = numbers.split([step.num_tokens, len(rows)])
            hidden = graphs.replay_mixed(step.sequences, ids, at, shared, _tree_parents(step))
            return _ForwardOutput(hidden, claimed, shared=shared)
        return self._forward_eagerly(step, rows, claimed, self._plan_cascade(step))

    def _plan_for_graph(
        self, graphs: StepGraphs, step: ScheduledStep, is_decode_only: bool
    ) -> CascadeStep | None:
        return None if self._cascade is None else graphs.plan(_batch_rows(step), is_decode_only)

    def _plan_cascade(self, step: ScheduledStep) -> CascadeStep | None:
        """The cascade of an eager step. Steps that read host memory have none."""
        if self._cascade is None or step.num_tokens > MOST_TOKENS or self._reads_host(step):
            return None
        return self._cascade.plan(_batch_rows(step))

    def collect(self, in_flight: InFlightStep) -> list[SampledToken]:
        """Wait for the sampled tokens, in the order of `step.rows_to_sample`."""
        in_flight.wait()
        for request, logprobs in in_flight.prompts:
            _store_prompt_logprobs(request, logprobs)
        for pooled, rows_sum in in_flight.pooled:
            add_rows(pooled, rows_sum)
        if in_flight.sampled is None:
            return []
        return in_flight.sampled.to_tokens([sample for _, sample in in_flight.step.rows_to_sample])

    def _reads_host(self, step: ScheduledStep) -> bool:
        """Whether a sequence of the step has pages in host memory."""
        return bool(self._cache.offload_pages) and any([s.host_tokens for s in step.sequences])

    def _forward_eagerly(
        self,
        step: ScheduledStep,
        rows: list[int],
        claimed: list[PooledRows],
        shared: CascadeStep | None,
    ) -> "_ForwardOutput":
        """Hidden states of these rows (forks share one), and requested prompt logprobs."""
        tokens, ends = _token_ids(step.chunks), _chunk_ends(step.chunks)
        parents = _tree_parents(step)
        extra = _int32_tensor(tokens + rows + pack_trees(parents or ()))
        extra = extra if shared is None else torch.cat([extra, shared.numbers])
        batch = self._cache.view(step.sequences, extra=extra)
        sizes = accumulate([len(tokens), len(rows), _count_tree_numbers(step)])
        ids, at, trees, numbers = batch.extra.tensor_split(list(sizes))
        if parents is not None:
            batch = batch.grow_trees(trees)
        if shared is not None:
            batch = batch.share(numbers, shared.shape, self._cache.spec.page_size)
        batch = self._plan_prefill(step, batch)
        if min(tokens) < 0:
            ids = fill_in_sampled(ids, self._last_tokens)
        requested = [
            (chunk, end)
            for chunk, end in zip(step.chunks, ends, strict=True)
            if _prompt_logprob_range(chunk)
        ]
        if not requested and not needs_all_rows(step):
            hidden = self._model(ids, positions_of(batch), batch, self._cache, at)
            return _ForwardOutput(hidden, claimed, shared=shared, prefill=batch.prefill)
        hidden = self._model(ids, positions_of(batch), batch, self._cache)
        prompts = [
            (
                chunk.sample.request,
                self._prompt_logprobs(chunk, hidden[end - chunk.num_tokens : end]),
            )
            for chunk, end in requested
        ]
        hidden_at = hidden.index_select(0, at)
        return _ForwardOutput(hidden_at, claimed, prompts, hidden, shared, batch.prefill)

    def _plan_prefill(self, step: ScheduledStep, batch: PagedBatch) -> PagedBatch:
        """The batch with its chunks in 8 bits. Steps that read host memory or have a cascade have
        none.
        """
        if self._prefill is None or batch.shared is not None or self._reads_host(step):
            return batch
        chunks = self._prefill.plan(step.chunks)
        if not chunks:
            return batch
        chosen = {chunk.sequence for chunk in chunks}
        others = [s for i, s in enumerate(step.sequences) if i not in chosen]
        rest = self._cache.view(others) if others else None
        how = self._prefill.precision, self._prefill.kernel
        return batch._replace(prefill=PrefillChunks(*how, chunks, rest))

    def _sample(self, hidden: Tensor, step: ScheduledStep) -> SamplerOutput:
        samples = rows_for_sampler(step)
        logits = self._model.logits(hidden, wide=False)  # the sampler converts to fp32 as it reads
        metadata = self._metadata_cache.make(samples)
        sampled = sample(logits, metadata)
        if not step.num_drafts:  # otherwise the next step is scheduled with known tokens
            self._keep_last_tokens(samples, sampled.token)
        if metadata.num_top is None:  # only tokens were requested: copy nothing else
            return SamplerOutput(sampled.token, sampled.logprob, _EMPTY, _EMPTY, _EMPTY)
        return sampled

    def _keep_last_tokens(self, samples: Sequence[Sample], tokens: Tensor) -> None:
        """Keep the sampled tokens on the device, where the next step reads them."""
        for row, owner in enumerate(samples):
            owner.row = row
        self._last_tokens[: len(samples)].copy_(tokens)

    def _prompt_logprobs(self, chunk: Chunk, hidden: Tensor) -> SamplerOutput:
        """Logprobs of the prompt tokens that this chunk predicts and that are not stored yet."""
        request, requested = chunk.sample.request, _prompt_logprob_range(chunk)
        hidden = hidden[requested.start - 1 - chunk.start : requested.stop - 1 - chunk.start]
        tokens = _int32_tensor(request.prompt_token_ids[requested.start : requested.stop]).long()
        tokens = tokens if self._device.type == "cpu" else tokens.pin_memory()
        tokens = tokens.to(self._device, non_blocking=True)
        parts = [
            compute_logprobs(self._model.logits(rows), predicted, request.params.prompt_logprobs)
            for rows, predicted in zip(
                hidden.split(_PROMPT_ROWS), tokens.split(_PROMPT_ROWS), strict=True
            )
        ]
        return SamplerOutput(
            *(torch.cat(columns) for columns in zip(*map(_columns, parts), strict=True))
        )

    def _copy_results(self, in_flight: InFlightStep) -> InFlightStep:
        """Start the copies of the results to the host."""
        if self._device.type != "cuda":
            return in_flight
        host_output = None if in_flight.sampled is None else _to_host(in_flight.sampled)
        prompts = [(request, _to_host(logprobs)) for request, logprobs in in_flight.prompts]
        pooled = [(rows, _copy_to_host(total)) for rows, total in in_flight.pooled]
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return replace(in_flight, sampled=host_output, prompts=prompts, pooled=pooled, event=event)


def _used_bytes(device: torch.device) -> int:
    """Used GPU memory of all processes, without torch's cache."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _is_decode_only(step: ScheduledStep) -> bool:
    """Each chunk has one token and one sampled row, so hidden states are the rows to sample."""
    chunks = step.chunks
    return step.num_tokens == len(chunks) and all([len(chunk.sampled_by) == 1 for chunk in chunks])


def _batch_rows(step: ScheduledStep) -> BatchRows:
    counts = [chunk.stop - chunk.start for chunk in step.chunks]
    return BatchRows(step.sequences, counts, (len(counts), step.num_tokens))


def _token_ids(chunks: Sequence[Chunk]) -> list[int]:
    """Token ids of the chunks; the id ~i means the i-th token that the last step sampled."""
    tokens = []
    for owner, start, stop, _, drafts, _ in chunks:
        if owner.pending:  # a decode: the last step sampled its only token
            tokens.append(~owner.row)
        else:
            tokens += owner.tokens(start, stop)
            tokens += drafts
    return tokens


def _tree_parents(step: ScheduledStep) -> list[list[int]] | None:
    """For `pack_trees`; None if the drafts of each sample are a chain."""
    return [chunk.token_parents for chunk in step.chunks] if step.has_trees else None


def _count_tree_numbers(step: ScheduledStep) -> int:
    return count_tree_numbers(step.num_tokens) if step.has_trees else 0


def _int32_tensor(values: Sequence[int]) -> Tensor:
    """int32 holds both token ids and row indices."""
    return torch.frombuffer(array("i", values), dtype=torch.int32)


def _logit_rows(step: ScheduledStep) -> list[int]:
    """The index of each sampled row's token among the tokens of the step: the last of its chunk, or
    in turn the drafts and the token before them.
    """
    ends = _chunk_ends(step.chunks)
    if not step.num_drafts:
        return [ends[chunk] - 1 for chunk, _ in step.rows_to_sample]
    return [
        row
        for end, chunk in zip(ends, step.chunks, strict=True)
        for _ in chunk.sampled_by
        for row in range(end - 1 - len(chunk.drafts), end)
    ]


def _chunk_ends(chunks: Sequence[Chunk]) -> list[int]:
    """Where each chunk ends among the tokens of the step."""
    return list(accumulate(chunk.num_tokens for chunk in chunks))


def _needs_prompt_logprobs(step: ScheduledStep) -> bool:
    return any(_prompt_logprob_range(chunk) for chunk in step.chunks)


def _prompt_logprob_range(chunk: Chunk) -> range:
    """Prompt positions with requested logprobs that are not stored yet and that this chunk
    predicts.
    """
    request = chunk.sample.request
    if request.prompt_logprobs is None:
        return range(0)
    last = min(chunk.stop, len(request.prompt_token_ids) - 1)
    return range(max(chunk.start + 1, len(request.prompt_logprobs)), last + 1)


def _store_prompt_logprobs(request: Request, logprobs: SamplerOutput) -> None:
    rows = zip(*(column.tolist() for column in _columns(logprobs)), strict=True)
    for token, logprob, rank, ids, tops in rows:
        sampled = SampledToken(token, logprob, rank, tuple(zip(ids, tops, strict=True)))
        request.prompt_logprobs.append(sampled.logprobs())


def _columns(sampled: SamplerOutput) -> tuple[Tensor, ...]:
    return tuple(vars(sampled).values())


def _to_host(sampled: SamplerOutput) -> SamplerOutput:
    """Start copies to the host without waiting for them."""
    return SamplerOutput(*(_copy_to_host(column) for column in _columns(sampled)))


def _copy_to_host(column: Tensor) -> Tensor:
    if not column.is_cuda:
        return column
    host = torch.empty(column.shape, dtype=column.dtype, pin_memory=column.numel() > 0)
    return host.copy_(column, non_blocking=True)
