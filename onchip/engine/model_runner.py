"""The tensors of a step: what goes to the device, the model's forward, and the draws."""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from onchip.engine.graphs import StepGraphs, fill_in_sampled
from onchip.engine.params import SamplingParams
from onchip.engine.request import Request, Sample, SampledToken
from onchip.engine.sampler import SamplerOutput, SamplingMetadataCache, compute_logprobs, sample
from onchip.engine.step import Chunk, ScheduledStep
from onchip.engine.threads import StepThreads
from onchip.kvcache import KVCache
from onchip.models import Decoder, Model, positions_of

_EMPTY = torch.empty(0)
_WARM_UP_PARAMS = SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.5)
_PROMPT_ROWS = 256  # logits of a prompt that exist at a time: they are vocab_size wide


@dataclass(frozen=True)
class InFlightStep:
    """A step that is queued on the device, and what it sends back. event: when that is there; None
    on the CPU, where it is there already. prompts: log probabilities of chunks of prompts.
    """

    step: ScheduledStep
    sampled: SamplerOutput | None
    prompts: Sequence[tuple[Request, SamplerOutput]]
    event: "torch.cuda.Event | None"
    launched_at: float

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


class ModelRunner:
    """Computes the steps of a scheduler. Nothing here waits for the device except `land`.

    Tokens that a step draws stay on the device: the next step finds those it needs there. So steps
    are launched in order, and a sample whose last token is not known yet is in the next step or in
    none before it is. graphs: replay the steps that `Graphs` takes (of a Decoder, on a GPU).
    """

    def __init__(self, model: Model, cache: KVCache, graphs: bool = True):
        self._model, self._cache, self._device = model, cache, cache.device
        self._last_tokens = torch.zeros(cache.max_seqs, dtype=torch.int64, device=cache.device)
        self._metadata_cache, self._threads = (
            SamplingMetadataCache(cache.device),
            StepThreads(model),
        )
        # Modules of transformers may look at values while they compute: no graph holds that.
        replayed = graphs and isinstance(model, Decoder) and cache.device.type == "cuda"
        self._graphs = StepGraphs(model, cache, self._last_tokens) if replayed else None

    @torch.inference_mode()
    def warm_up(self, most_tokens: int) -> None:
        """Record the graphs of ordinary steps, which have `most_tokens` at most, and have the
        kernels of draws compiled.
        """
        if self._device.type == "cpu":
            return
        if self._graphs is not None:
            self._graphs.record_all(most_tokens)
        model = self._model
        hidden = torch.zeros(1, model.width, dtype=model.dtype, device=model.device)
        for params in _WARM_UP_PARAMS:
            metadata = self._metadata_cache.make([Request("", [0], params).samples[0]])
            sample(model.logits(hidden, wide=False), metadata)

    @torch.inference_mode()
    def graph_bytes(self, most_tokens: int) -> int:
        """What the graphs of `warm_up` would take of a GPU, estimated by recording a few of them:
        to be asked before anything is recorded.
        """
        if self._graphs is None:
            return 0
        return self._graphs.estimate_bytes(most_tokens, partial(_used_bytes, self._device))

    @torch.inference_mode()
    def launch(self, step: ScheduledStep) -> InFlightStep:
        """Queue a step: forward, draws, and their copies to the host."""
        with self._threads.limit_for(step):
            return self._launch(step)

    def _launch(self, step: ScheduledStep) -> InFlightStep:
        started, prompts, sampled = time.monotonic(), [], None
        graphs = self._graphs
        if graphs is not None and _is_decode_only(step):
            hidden = graphs.replay(step, _int32_tensor(_token_ids(step.chunks)))
        elif (
            graphs is not None
            and graphs.has_graph_for(step.num_tokens)
            and not _needs_prompt_logprobs(step)
        ):
            words = _int32_tensor(_token_ids(step.chunks) + _logit_rows(step))
            hidden = graphs.replay_mixed(
                step, *words.split([step.num_tokens, len(step.rows_to_sample)])
            )
        else:
            hidden, prompts = self._forward(step)
        if step.rows_to_sample:
            sampled = self._sample(hidden, [sample for _, sample in step.rows_to_sample])
        return self._copy_results(InFlightStep(step, sampled, prompts, None, started))

    def collect(self, in_flight: InFlightStep) -> list[SampledToken]:
        """Wait for what was drawn, in the order of `step.rows_to_sample`."""
        in_flight.wait()
        for request, logprobs in in_flight.prompts:
            _store_prompt_logprobs(request, logprobs)
        if in_flight.sampled is None:
            return []
        return in_flight.sampled.to_tokens([sample for _, sample in in_flight.step.rows_to_sample])

    def _forward(self, step: ScheduledStep) -> tuple[Tensor, list[tuple[Request, SamplerOutput]]]:
        """Hidden states of the rows that are drawn from (forks draw from one), and what was asked
        about prompts.
        """
        tokens, rows, ends = _token_ids(step.chunks), _logit_rows(step), _chunk_ends(step.chunks)
        batch = self._cache.view(step.sequences, extra=_int32_tensor(tokens + rows))
        ids, at = batch.extra.split([len(tokens), len(rows)])
        if min(tokens) < 0:
            ids = fill_in_sampled(ids, self._last_tokens)
        asked = [
            (chunk, end)
            for chunk, end in zip(step.chunks, ends, strict=True)
            if _prompt_logprob_range(chunk)
        ]
        if not asked:
            return self._model(ids, positions_of(batch), batch, self._cache, at), []
        hidden = self._model(ids, positions_of(batch), batch, self._cache)
        prompts = [
            (
                chunk.sample.request,
                self._prompt_logprobs(chunk, hidden[end - chunk.num_tokens : end]),
            )
            for chunk, end in asked
        ]
        return hidden.index_select(0, at), prompts

    def _sample(self, hidden: Tensor, samples: Sequence[Sample]) -> SamplerOutput:
        for row, one in enumerate(samples):
            one.row = row
        logits = self._model.logits(hidden, wide=False)  # the sampler widens them as it reads
        metadata = self._metadata_cache.make(samples)
        sampled = sample(logits, metadata)
        self._last_tokens[: len(samples)].copy_(sampled.token)
        if metadata.num_top is None:  # nobody asks for more than tokens: nothing more travels
            return SamplerOutput(sampled.token, sampled.logprob, _EMPTY, _EMPTY, _EMPTY)
        return sampled

    def _prompt_logprobs(self, chunk: Chunk, hidden: Tensor) -> SamplerOutput:
        """Of the tokens of the prompt that the rows of a run predict and nobody knows yet."""
        request, asked = chunk.sample.request, _prompt_logprob_range(chunk)
        hidden = hidden[asked.start - 1 - chunk.start : asked.stop - 1 - chunk.start]
        tokens = _int32_tensor(request.prompt_token_ids[asked.start : asked.stop]).long()
        tokens = tokens if self._device.type == "cpu" else tokens.pin_memory()
        tokens = tokens.to(self._device, non_blocking=True)
        parts = [
            compute_logprobs(self._model.logits(rows), some, request.params.prompt_logprobs)
            for rows, some in zip(
                hidden.split(_PROMPT_ROWS), tokens.split(_PROMPT_ROWS), strict=True
            )
        ]
        return SamplerOutput(
            *(torch.cat(columns) for columns in zip(*map(_columns, parts), strict=True))
        )

    def _copy_results(self, in_flight: InFlightStep) -> InFlightStep:
        """What was drawn, on its way to the host."""
        if self._device.type != "cuda":
            return in_flight
        host_output = None if in_flight.sampled is None else _to_host(in_flight.sampled)
        prompts = [(request, _to_host(logprobs)) for request, logprobs in in_flight.prompts]
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return replace(in_flight, sampled=host_output, prompts=prompts, event=event)


def _used_bytes(device: torch.device) -> int:
    """Of a GPU, by whomever, but for what torch keeps for itself."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _is_decode_only(step: ScheduledStep) -> bool:
    """One token for each run, and each draws: rows of hidden states are rows of logits."""
    chunks = step.chunks
    return step.num_tokens == len(chunks) and all([len(chunk.sampled_by) == 1 for chunk in chunks])


def _token_ids(chunks: Sequence[Chunk]) -> list[int]:
    """Token ids of the runs; ~i for the i-th that the last step drew."""
    tokens = []
    for one, start, stop, _ in chunks:
        if one.pending:  # decoding, and its only token was drawn by the last step
            tokens.append(~one.row)
        else:
            tokens += one.tokens(start, stop)
    return tokens


def _int32_tensor(values: Sequence[int]) -> Tensor:
    """int32, which token ids and rows fit into."""
    return torch.frombuffer(array("i", values), dtype=torch.int32)


def _logit_rows(step: ScheduledStep) -> list[int]:
    """Which of its tokens each draw follows."""
    ends = _chunk_ends(step.chunks)
    return [ends[chunk] - 1 for chunk, _ in step.rows_to_sample]


def _chunk_ends(chunks: Sequence[Chunk]) -> list[int]:
    """Where each run ends among the tokens of the step."""
    return list(accumulate(chunk.num_tokens for chunk in chunks))


def _needs_prompt_logprobs(step: ScheduledStep) -> bool:
    return any(_prompt_logprob_range(chunk) for chunk in step.chunks)


def _prompt_logprob_range(chunk: Chunk) -> range:
    """Positions of the prompt whose log probabilities were asked for, are not known yet, and are
    predicted by rows of this run.
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
    """Copies that nobody waits for here."""
    return SamplerOutput(*(_copy_to_host(column) for column in _columns(sampled)))


def _copy_to_host(column: Tensor) -> Tensor:
    if not column.is_cuda:
        return column
    host = torch.empty(column.shape, dtype=column.dtype, pin_memory=column.numel() > 0)
    return host.copy_(column, non_blocking=True)
