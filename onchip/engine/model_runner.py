"""The tensors of a step: what goes to the device, the model's forward, and the draws."""

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from onchip.engine.graphs import Graphs, filled_in
from onchip.engine.params import SamplingParams
from onchip.engine.request import Drawn, Request, Sample
from onchip.engine.sampler import Drawers, Sampled, report, sample
from onchip.engine.step import Run, Step
from onchip.engine.threads import Threads
from onchip.kvcache import KVCache
from onchip.models import Decoder, Model, positions_of

_NOTHING = torch.empty(0)
_WAYS_TO_DRAW = SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.5)
_PROMPT_ROWS = 256  # logits of a prompt that exist at a time: they are vocab_size wide


@dataclass(frozen=True)
class Flight:
    """A step that is queued on the device, and what it sends back. event: when that is there; None
    on the CPU, where it is there already. prompts: log probabilities of chunks of prompts.
    """

    step: Step
    sampled: Sampled | None
    prompts: Sequence[tuple[Request, Sampled]]
    event: "torch.cuda.Event | None"
    launched_at: float

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


class Runner:
    """Computes the steps of a scheduler. Nothing here waits for the device except `land`.

    Tokens that a step draws stay on the device: the next step finds those it needs there. So steps
    are launched in order, and a sample whose last token is not known yet is in the next step or in
    none before it is. graphs: replay the steps that `Graphs` takes (of a Decoder, on a GPU).
    """

    def __init__(self, model: Model, cache: KVCache, graphs: bool = True):
        self._model, self._cache, self._device = model, cache, cache.device
        self._last = torch.zeros(cache.max_seqs, dtype=torch.int64, device=cache.device)
        self._drawers, self._threads = Drawers(cache.device), Threads(model)
        # Modules of transformers may look at values while they compute: no graph holds that.
        replayed = graphs and isinstance(model, Decoder) and cache.device.type == "cuda"
        self._graphs = Graphs(model, cache, self._last) if replayed else None

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
        for params in _WAYS_TO_DRAW:
            rows = self._drawers.rows([Request("", [0], params).samples[0]])
            sample(model.logits(hidden, wide=False), rows)

    @torch.inference_mode()
    def graph_bytes(self, most_tokens: int) -> int:
        """What the graphs of `warm_up` would take of a GPU, estimated by recording a few of them:
        to be asked before anything is recorded.
        """
        if self._graphs is None:
            return 0
        return self._graphs.estimate_bytes(most_tokens, partial(_used_bytes, self._device))

    @torch.inference_mode()
    def launch(self, step: Step) -> Flight:
        """Queue a step: forward, draws, and their copies to the host."""
        with self._threads.of(step):
            return self._launch(step)

    def _launch(self, step: Step) -> Flight:
        started, prompts, sampled = time.monotonic(), [], None
        graphs = self._graphs
        if graphs is not None and _only_decodes(step):
            hidden = graphs.replay(step, _words(_tokens(step.runs)))
        elif graphs is not None and graphs.takes(step.num_tokens) and not _asks(step):
            words = _words(_tokens(step.runs) + _rows(step))
            hidden = graphs.replay_mixed(step, *words.split([step.num_tokens, len(step.draws)]))
        else:
            hidden, prompts = self._forward(step)
        if step.draws:
            sampled = self._draw(hidden, [sample for _, sample in step.draws])
        return self._send(Flight(step, sampled, prompts, None, started))

    def land(self, flight: Flight) -> list[Drawn]:
        """Wait for what was drawn, in the order of `step.draws`."""
        flight.wait()
        for request, chunk in flight.prompts:
            _keep_prompt(request, chunk)
        if flight.sampled is None:
            return []
        return flight.sampled.drawn([sample for _, sample in flight.step.draws])

    def _forward(self, step: Step) -> tuple[Tensor, list[tuple[Request, Sampled]]]:
        """Hidden states of the rows that are drawn from (forks draw from one), and what was asked
        about prompts.
        """
        tokens, rows, ends = _tokens(step.runs), _rows(step), _ends(step.runs)
        batch = self._cache.view(step.sequences, extra=_words(tokens + rows))
        ids, at = batch.extra.split([len(tokens), len(rows)])
        if min(tokens) < 0:
            ids = filled_in(ids, self._last)
        asked = [(run, end) for run, end in zip(step.runs, ends, strict=True) if _asked(run)]
        if not asked:
            return self._model(ids, positions_of(batch), batch, self._cache, at), []
        hidden = self._model(ids, positions_of(batch), batch, self._cache)
        prompts = [
            (run.sample.request, self._prompt_logprobs(run, hidden[end - run.num_tokens : end]))
            for run, end in asked
        ]
        return hidden.index_select(0, at), prompts

    def _draw(self, hidden: Tensor, samples: Sequence[Sample]) -> Sampled:
        for place, one in enumerate(samples):
            one.place = place
        logits = self._model.logits(hidden, wide=False)  # the sampler widens them as it reads
        rows = self._drawers.rows(samples)
        sampled = sample(logits, rows)
        self._last[: len(samples)].copy_(sampled.token)
        if rows.num_top is None:  # nobody asks for more than tokens: nothing more travels
            return Sampled(sampled.token, sampled.logprob, _NOTHING, _NOTHING, _NOTHING)
        return sampled

    def _prompt_logprobs(self, run: Run, hidden: Tensor) -> Sampled:
        """Of the tokens of the prompt that the rows of a run predict and nobody knows yet."""
        request, asked = run.sample.request, _asked(run)
        hidden = hidden[asked.start - 1 - run.start : asked.stop - 1 - run.start]
        tokens = _words(request.prompt_token_ids[asked.start : asked.stop]).long()
        tokens = tokens if self._device.type == "cpu" else tokens.pin_memory()
        tokens = tokens.to(self._device, non_blocking=True)
        parts = [
            report(self._model.logits(rows), some, request.params.prompt_logprobs)
            for rows, some in zip(
                hidden.split(_PROMPT_ROWS), tokens.split(_PROMPT_ROWS), strict=True
            )
        ]
        return Sampled(*(torch.cat(columns) for columns in zip(*map(_columns, parts), strict=True)))

    def _send(self, flight: Flight) -> Flight:
        """What was drawn, on its way to the host."""
        if self._device.type != "cuda":
            return flight
        home = None if flight.sampled is None else _to_host(flight.sampled)
        prompts = [(request, _to_host(chunk)) for request, chunk in flight.prompts]
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return replace(flight, sampled=home, prompts=prompts, event=event)


def _used_bytes(device: torch.device) -> int:
    """Of a GPU, by whomever, but for what torch keeps for itself."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _only_decodes(step: Step) -> bool:
    """One token for each run, and each draws: rows of hidden states are rows of logits."""
    runs = step.runs
    return step.num_tokens == len(runs) and all([len(run.draws) == 1 for run in runs])


def _tokens(runs: Sequence[Run]) -> list[int]:
    """Token ids of the runs; ~i for the i-th that the last step drew."""
    tokens = []
    for one, start, stop, _ in runs:
        if one.pending:  # decoding, and its only token was drawn by the last step
            tokens.append(~one.place)
        else:
            tokens += one.tokens(start, stop)
    return tokens


def _words(values: Sequence[int]) -> Tensor:
    """int32, which token ids and rows fit into."""
    return torch.frombuffer(array("i", values), dtype=torch.int32)


def _rows(step: Step) -> list[int]:
    """Which of its tokens each draw follows."""
    ends = _ends(step.runs)
    return [ends[run] - 1 for run, _ in step.draws]


def _ends(runs: Sequence[Run]) -> list[int]:
    """Where each run ends among the tokens of the step."""
    return list(accumulate(run.num_tokens for run in runs))


def _asks(step: Step) -> bool:
    return any(_asked(run) for run in step.runs)


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
    if not column.is_cuda:
        return column
    host = torch.empty(column.shape, dtype=column.dtype, pin_memory=column.numel() > 0)
    return host.copy_(column, non_blocking=True)
