"""The tensors of a step: what goes to the device, the model's forward, and the draws."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onchip.engine.request import Drawn, Request, Sample
from onchip.engine.sampler import Sampled, report, rows_of, sample
from onchip.engine.step import Run, Step
from onchip.kvcache import KVCache
from onchip.models import Decoder, positions_of

_PROMPT_ROWS = 256  # logits of a prompt that exist at a time: they are vocab_size wide


@dataclass(frozen=True)
class Flight:
    """A step that is queued on the device, and what it sends back. event: when that is there; None
    on the CPU, where it is there already. prompts: log probabilities of chunks of prompts.
    """

    samples: Sequence[Sample]
    sampled: Sampled | None
    prompts: Sequence[tuple[Request, Sampled]]
    event: "torch.cuda.Event | None"


class Runner:
    """Computes the steps of a scheduler. Nothing here waits for the device except `land`."""

    def __init__(self, model: Decoder, cache: KVCache):
        self._model, self._cache = model, cache
        self._device = cache.device

    @torch.inference_mode()
    def launch(self, step: Step) -> Flight:
        """Queue a step: forward, draws, and their copies to the host."""
        batch = self._cache.view(step.sequences)
        tokens = self._to_device([t for run in step.runs for t in _tokens(run)])
        ends = _ends(step.runs)
        hidden = self._model(tokens, positions_of(batch), batch, self._cache)
        prompts = [
            (run.sample.request, self._prompt_logprobs(run, hidden[end - run.num_tokens : end]))
            for run, end in zip(step.runs, ends, strict=True)
            if _asked(run)
        ]
        draws = step.draws
        sampled = self._draw(hidden, ends, draws) if draws else None
        return self._send([who for _, who in draws], sampled, prompts)

    def land(self, flight: Flight) -> list[Drawn]:
        """Wait for what was drawn, in the order of `step.draws`."""
        if flight.event is not None:
            flight.event.synchronize()
        for request, chunk in flight.prompts:
            _keep_prompt(request, chunk)
        return [] if flight.sampled is None else flight.sampled.drawn(flight.samples)

    def _draw(
        self, hidden: Tensor, ends: Sequence[int], draws: Sequence[tuple[int, Sample]]
    ) -> Sampled:
        """Forks draw from one row of logits."""
        rows = self._to_device([ends[run] - 1 for run, _ in draws])
        logits = self._model.logits(hidden.index_select(0, rows))
        return sample(logits, rows_of([who for _, who in draws], self._device))

    def _prompt_logprobs(self, run: Run, hidden: Tensor) -> Sampled:
        """Of the tokens of the prompt that the rows of a run predict and nobody knows yet."""
        request, asked = run.sample.request, _asked(run)
        hidden = hidden[asked.start - 1 - run.start : asked.stop - 1 - run.start]
        tokens = self._to_device(request.prompt_token_ids[asked.start : asked.stop])
        parts = [
            report(self._model.logits(rows), some, request.params.prompt_logprobs)
            for rows, some in zip(
                hidden.split(_PROMPT_ROWS), tokens.split(_PROMPT_ROWS), strict=True
            )
        ]
        return Sampled(*(torch.cat(columns) for columns in zip(*map(_columns, parts), strict=True)))

    def _send(
        self,
        samples: Sequence[Sample],
        sampled: Sampled | None,
        prompts: Sequence[tuple[Request, Sampled]],
    ) -> Flight:
        if self._device.type != "cuda":
            return Flight(samples, sampled, prompts, None)
        home = None if sampled is None else _to_host(sampled)
        prompts = [(request, _to_host(chunk)) for request, chunk in prompts]
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return Flight(samples, home, prompts, event)

    def _to_device(self, values: Sequence[int]) -> Tensor:
        words = torch.frombuffer(array("q", values or (0,)), dtype=torch.int64)[: len(values)]
        if self._device.type == "cpu":
            return words
        return words.pin_memory().to(self._device, non_blocking=True)


def _tokens(run: Run) -> list[int]:
    return run.sample.tokens(run.start, run.stop)


def _ends(runs: Sequence[Run]) -> list[int]:
    """Where each run ends among the tokens of the step."""
    ends, end = [], 0
    for run in runs:
        end += run.num_tokens
        ends.append(end)
    return ends


def _asked(run: Run) -> range:
    """Positions of the prompt whose log probabilities were asked for, are not known yet, and are
    predicted by rows of this run.
    """
    request = run.sample.request
    if request.prompt_logprobs is None:
        return range(0)
    last = min(run.stop, len(request.prompt_token_ids) - 1)
    return range(max(run.start + 1, len(request.prompt_logprobs)), last + 1)


def _keep_prompt(request: Request, chunk: Sampled) -> None:
    rows = zip(*(column.tolist() for column in _columns(chunk)), strict=True)
    for token, logprob, rank, ids, tops in rows:
        drawn = Drawn(token, logprob, rank, tuple(zip(ids, tops, strict=True)))
        request.prompt_logprobs.append(drawn.logprobs())


def _columns(sampled: Sampled) -> tuple[Tensor, ...]:
    return tuple(vars(sampled).values())


def _to_host(sampled: Sampled) -> Sampled:
    """Copies that nobody waits for here."""
    return Sampled(*(_copy_out(column) for column in _columns(sampled)))


def _copy_out(column: Tensor) -> Tensor:
    host = torch.empty(column.shape, dtype=column.dtype, pin_memory=True)
    return host.copy_(column, non_blocking=True)
