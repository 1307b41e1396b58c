"""An engine: a model, its cache, and the requests that are served from it.

One thread drives an engine: `add`, `cancel` and `step` are its calls. Nothing is global, so a
process may have several. `stats` may be called from any thread.
"""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import torch

from onchip.engine.costs import Costs
from onchip.engine.params import BeamSearchParams, SamplingParams
from onchip.engine.request import Request, RequestOutput, Sample, Status
from onchip.engine.runner import Flight, Runner
from onchip.engine.scheduler import Scheduler
from onchip.engine.step import Limits, Refused
from onchip.engine.text import Reader, text_of
from onchip.engine.tokenizer import Tokenizer
from onchip.kvcache import HostTier, KVCache
from onchip.models import Decoder

_REFRESH_S = 0.2  # how old what `stats` says about single requests may be
_MOSTLY_PREFILL = 8  # tokens for each run of a step whose time is that of its tokens


class EngineError(RuntimeError):
    """A step failed, and with it every request; outputs: what those had so far."""

    def __init__(self, message: str, outputs: Sequence[RequestOutput] = ()):
        super().__init__(message)
        self.outputs = list(outputs)


@dataclass(frozen=True)
class Stats:
    """An engine at the end of a step. pages_free: those that can be had, pages_cached of them
    hold a prefix; pages_shared: those that sharing saves. request_pages: of those that run, at most
    0.2 s old while there is work. tokens_*: since the start; prefilled are those from which nothing
    was drawn, each time they are computed.
    """

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_shared: int = 0
    request_pages: dict[str, int] = field(default_factory=dict)
    tokens_generated: int = 0
    tokens_prefilled: int = 0
    tokens_cached: int = 0
    preempted_by_swap: int = 0
    preempted_by_recompute: int = 0
    steps: int = 0
    waited_s: float = 0.0  # in all steps, for the device
    last_step_s: float = 0.0  # how long it took
    last_step_at: float = 0.0  # when it ended, time.monotonic()


class Engine:
    """Serves a decoder. tokenizer: None if prompts are token ids and texts are not wanted.

    num_pages: of the device, page 0 among them is never used; host_pages: room for requests that
    are preempted, 0: they are always computed again. eos_token_ids: None for the tokenizer's and
    the model's own. overlap: schedule a step while the one before is computed; None: where the
    device is not the host. graphs: replay decoding steps on a GPU.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None,
        *,
        limits: Limits,
        num_pages: int,
        page_size: int = 16,
        host_pages: int = 0,
        prefix_caching: bool = True,
        eos_token_ids: Sequence[int] | None = None,
        seed: int | None = None,
        overlap: bool | None = None,
        graphs: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.model, self.tokenizer, self.limits = model, tokenizer, limits
        self.eos_token_ids = _ends_of(model, tokenizer) if eos_token_ids is None else eos_token_ids
        spec = model.cache_spec(page_size)
        self.cache = KVCache(
            spec,
            num_pages,
            max_seqs=limits.max_num_seqs,
            max_seqlen=limits.max_model_len,
            prefix_reuse=prefix_caching,
        )
        self.tier = HostTier(self.cache, host_pages) if host_pages else None
        self.costs = Costs(spec.page_bytes) if host_pages else None
        self._clock = clock
        self.scheduler = Scheduler(
            self.cache, limits, tier=self.tier, costs=self.costs, clock=clock
        )
        self._runner = Runner(model, self.cache, graphs)
        self._overlap = self.cache.device.type == "cuda" if overlap is None else overlap
        self._flight: Flight | None = None
        self._landed_at = 0.0
        self._seeds, self._numbers = random.Random(seed), count()
        self._streamed: set[Request] = set()
        self._watched: set[Request] = set()
        self._failed: str | None = None
        self._totals = self._stats = Stats(pages_total=self.cache.pool.capacity)
        self._look(time.monotonic())

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def has_work(self) -> bool:
        if self._runner is None or self._failed:
            return False
        return self.scheduler.has_work or self._flight is not None

    def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | BeamSearchParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        salt: bytes = b"",
        stream: bool = True,
    ) -> Request | Refused:
        """A request stands in line now, or is refused. ValueError: it asks for what has no answer.

        deadline_s: seconds from now, after which it is cut off. salt: prefixes are shared between
        requests of the same salt alone. stream: False if only its last output is wanted.
        """
        self._check_open()
        token_ids = self._encode(prompt) if isinstance(prompt, str) else prompt
        request = Request(
            f"request-{next(self._numbers)}" if request_id is None else request_id,
            token_ids,
            params,
            priority=priority,
            deadline_s=None if deadline_s is None else self._clock() + deadline_s,
            salt=salt.decode("latin-1"),
            eos_token_ids=self.eos_token_ids,
            vocab_size=self.model.config.vocab_size,
            draw_seed=self._seeds.getrandbits(63),
        )
        self._prepare(request, prompt if isinstance(prompt, str) else None)
        refused = self.scheduler.add(request)
        if refused is None:
            self._watch(request, stream)
        return refused or request

    def warm_up(self) -> None:
        """Prepare now what the first requests would wait for."""
        self._check_open()
        self._runner.warm_up()

    def cancel(self, request_id: str) -> bool:
        """End a request now: its pages are free when this returns, and no step reports it any
        more. False: there is no such request, or it is done.
        """
        request = None if self._runner is None else self.scheduler.find(request_id)
        if request is None:
            return False
        self._forget(request)
        return self.scheduler.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """One turn: computes something if there is work. Answers the requests that gained tokens
        or ended, cumulative. EngineError: every request has failed, and the engine with them.
        """
        self._check_open()
        started = time.monotonic()
        try:
            outputs = self._turn()
        except Exception as error:
            raise self._fail(error) from error
        self._look(started)
        return outputs

    def stats(self) -> Stats:
        """How the engine was at the end of its last step."""
        return self._stats

    def close(self) -> None:
        """Cancel what there is and give all memory back. The engine is of no use afterwards."""
        if self._runner is None:
            return
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            self.scheduler.abort(request.request_id)
        self._streamed.clear()
        self._watched.clear()
        self._flight = None
        on_gpu = self.cache.device.type == "cuda"
        del self.model, self.cache, self.tier, self.scheduler
        self._runner = None
        if on_gpu:
            torch.cuda.empty_cache()  # what this process keeps for itself, others may have

    def _check_open(self) -> None:
        if self._runner is None:
            raise ValueError("the engine was closed")
        if self._failed:
            raise EngineError(f"the engine has failed: {self._failed}")

    def _encode(self, prompt: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer: give the prompt as token ids")
        return self.tokenizer.encode(prompt)

    def _prepare(self, request: Request, prompt: str | None) -> None:
        request.prompt = prompt
        if request.params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]  # the first token follows nothing
        if request.params.stop and self.tokenizer is None:
            raise ValueError("stop texts need a tokenizer; there is stop_token_ids")

    def _turn(self) -> list[RequestOutput]:
        """The next step is on its way before the last one is looked at, where that can be."""
        step = self.scheduler.schedule()
        flight = self._runner.launch(step) if step.runs else None
        self.scheduler.advance(step)
        outputs = self._report(step.ended, ())
        if self._flight is not None:
            outputs += self._land(self._flight)
        self._flight = flight
        if flight is None:
            self.scheduler.resolve(step, ())
        elif not self._overlap or self.scheduler.must_resolve:
            self._flight = None
            outputs += self._land(flight)
        return outputs

    def _land(self, flight: Flight) -> list[RequestOutput]:
        step, started = flight.step, time.monotonic()
        flight.wait()
        waited_s = time.monotonic() - started
        drawn = self._runner.land(flight)
        self._observe(flight, waited_s)
        finished = self.scheduler.resolve(step, drawn)
        watched = self._watched and {who.request: None for _, who in step.draws}
        return self._report(finished, [request for request in watched if request in self._watched])

    def _observe(self, flight: Flight, waited_s: float) -> None:
        """The step has come home: what it did, and how long after the one before."""
        now, tokens = time.monotonic(), flight.step.num_tokens
        seconds, self._landed_at = now - max(self._landed_at, flight.launched_at), now
        step = flight.step
        prefilled = tokens - sum([bool(run.draws) for run in step.runs])
        self._totals = replace(
            self._totals,
            tokens_generated=self._totals.tokens_generated + len(step.draws),
            tokens_prefilled=self._totals.tokens_prefilled + prefilled,
            steps=self._totals.steps + 1,
            waited_s=self._totals.waited_s + waited_s,
        )
        if self.costs is not None and tokens >= _MOSTLY_PREFILL * len(step.runs):
            self.costs.observe(tokens, seconds)

    def _watch(self, request: Request, stream: bool) -> None:
        """Whose samples are looked at in every step: they are shown, or a text may end them."""
        if request.chosen_last:
            return
        if stream:
            self._streamed.add(request)
        if stream or request.params.stop:
            self._watched.add(request)

    def _forget(self, request: Request) -> None:
        self._streamed.discard(request)
        self._watched.discard(request)

    def _report(self, ended: Sequence[Request], grown: Iterable[Request]) -> list[RequestOutput]:
        """Texts first: they may end samples, and requests."""
        told = dict.fromkeys(ended)
        for request in grown:
            if self.tokenizer is not None:
                self._read(request)
            if request.finished or request in self._streamed:
                told[request] = None
        for request in told:
            if request.finished:
                self._forget(request)
                self._complete(request)
            if self.tokenizer is not None:
                self._name_tokens(request)
        return [request.output() for request in told]

    def _name_tokens(self, request: Request) -> None:
        """Logprobs that are not shown yet say which texts they are about."""
        for tables in (*(s.logprobs for s in request.samples), request.prompt_logprobs or ()):
            for place in range(len(tables) - 1, -1, -1):
                table = tables[place]
                if table is None or next(iter(table.values())).decoded_token is not None:
                    break
                for token, logprob in table.items():
                    name = self.tokenizer.decode([token])
                    table[token] = logprob._replace(decoded_token=name)

    def _read(self, request: Request) -> None:
        """The texts of the samples that grow."""
        for sample in request.samples:
            stop = self._read_sample(sample)
            if stop is not None:
                self._stop(sample, stop)

    def _read_sample(self, sample: Sample) -> str | None:
        """The stop text that its new tokens complete."""
        reader, request = sample.reader, sample.request
        if reader is None:
            reader = Reader(self.tokenizer, request.prompt_token_ids, request.params.stop)
            sample.reader = reader
        new = sample.token_ids[reader.num_tokens :]
        if not new:
            return None
        stop = reader.push(new, len(sample.token_ids) >= request.params.min_tokens)
        sample.text = reader.text
        return stop

    def _stop(self, sample: Sample, stop: str) -> None:
        if sample.finished:  # by its length, with the same token
            sample.end, sample.stop_reason = Status.FINISHED_STOPPED, stop
        self.scheduler.stop(sample, stop)

    def _complete(self, request: Request) -> None:
        """The whole text of every sample."""
        for sample in request.samples if self.tokenizer is not None else ():
            if sample.reader is None:
                prompt = request.prompt_token_ids
                sample.text = text_of(self.tokenizer, prompt, sample.token_ids)
            elif not isinstance(sample.stop_reason, str):
                sample.reader.finish()
                sample.text = sample.reader.text
            sample.reader = None

    def _fail(self, error: Exception) -> EngineError:
        self._failed = f"{type(error).__name__}: {error}"
        outputs = [request.output() for request in self.scheduler.collapse(self._failed)]
        self._streamed.clear()
        self._watched.clear()
        self._flight = None
        return EngineError(f"a step failed, and all requests with it: {self._failed}", outputs)

    def _look(self, started: float) -> None:
        """What `stats` answers from now on."""
        now, pool, scheduler = time.monotonic(), self.cache.pool, self.scheduler
        if now - self._totals.last_step_at > _REFRESH_S or not scheduler.has_work:
            pages = {r.request_id: _num_pages(r) for r in scheduler.running}
            self._totals = replace(
                self._totals,
                pages_shared=pool.num_shared,
                request_pages=pages,
                last_step_at=now,
            )
        self._stats = replace(
            self._totals,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_free=pool.num_free,
            pages_cached=pool.num_cached,
            tokens_cached=scheduler.num_cached_tokens,
            preempted_by_swap=scheduler.totals["swapped_out"],
            preempted_by_recompute=scheduler.totals["recomputed"],
            last_step_s=now - started,
            last_step_at=now,
        )


def _num_pages(request: Request) -> int:
    """Pages that its samples hold, each once."""
    tables = [sample.sequence.table for sample in request.rooted]
    return len(tables[0]) if len(tables) == 1 else len({p for t in tables for p in t.pages})


def _ends_of(model: Decoder, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    ends = (*model.config.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ()))
    return tuple(dict.fromkeys(ends))
