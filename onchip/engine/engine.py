"""An engine: a model, its cache, and the requests that are served from it.

One thread drives an engine: `add`, `cancel` and `step` are its calls. Nothing is global, so a
process may have several. `stats` may be called from any thread.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import torch

from onchip.engine.costs import PreemptionCosts
from onchip.engine.model_runner import InFlightStep, ModelRunner
from onchip.engine.params import BeamSearchParams, SamplingParams
from onchip.engine.reports import OutputProcessor
from onchip.engine.request import Request, RequestOutput, Status
from onchip.engine.scheduler import Scheduler
from onchip.engine.stats import EngineStats, StatsRecorder
from onchip.engine.step import Limits, RejectedRequest
from onchip.engine.tokenizer import Tokenizer
from onchip.kvcache import HostTier, KVCache
from onchip.models import Model

_MOSTLY_PREFILL = 8  # tokens for each run of a step whose time is that of its tokens


class EngineError(RuntimeError):
    """A step failed, and with it every request; outputs: what those had so far."""

    def __init__(self, message: str, outputs: Sequence[RequestOutput] = ()):
        super().__init__(message)
        self.outputs = list(outputs)


@dataclass(frozen=True)
class ExecutionConfig:
    """How steps follow one another. overlap: schedule a step while the one before is computed;
    None: where the device is not the host. graphs: replay recorded steps on a GPU. clock: by which
    requests come, and expire.
    """

    overlap: bool | None = None
    graphs: bool = True
    clock: Callable[[], float] = time.monotonic


class Engine:
    """Serves a model. tokenizer: None if prompts are token ids and texts are not wanted.

    num_pages: of the device, page 0 among them is never used; kv_dtype: "fp8" or "int8" for pages
    of 8 bits, None for the model's own dtype; host_pages: room for requests that are preempted, 0:
    they are always computed again. eos_token_ids: None for the tokenizer's and
    the model's own. seed: of requests that bring none; None: another each time.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None,
        *,
        limits: Limits,
        num_pages: int,
        page_size: int = 16,
        kv_dtype: str | None = None,
        host_pages: int = 0,
        prefix_caching: bool = True,
        eos_token_ids: Sequence[int] | None = None,
        seed: int | None = None,
        execution: ExecutionConfig = ExecutionConfig(),  # noqa: B008 (immutable)
    ):
        self.model, self.tokenizer, self.limits = model, tokenizer, limits
        self.eos_token_ids = _find_eos(model, tokenizer, eos_token_ids)
        spec = model.cache_spec(page_size, kv_dtype)
        self.cache = KVCache(
            spec,
            num_pages,
            max_seqs=limits.max_num_seqs,
            max_seqlen=limits.max_model_len,
            prefix_reuse=prefix_caching,
        )
        self.tier = HostTier(self.cache, host_pages) if host_pages else None
        self.costs = PreemptionCosts(spec.page_bytes) if host_pages else None
        self._clock = execution.clock
        self._runner = ModelRunner(model, self.cache, execution.graphs)
        self._overlap = (
            self.cache.device.type == "cuda" if execution.overlap is None else execution.overlap
        )
        self._collected_at = 0.0
        self._seed, self._num_accepted = random.Random(seed).getrandbits(62), 0
        self._names = count()
        self._recorder = StatsRecorder(self.cache.pool, spec.page_bytes)
        self._failed: str | None = None
        self._inconsistent = False
        self._aborted: dict[str, RequestOutput] = {}  # ended by an interrupt, to be told
        self._reset_scheduler()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def has_work(self) -> bool:
        if self._runner is None or self._failed:
            return False
        unfinished = self.scheduler.has_work or self._in_flight is not None
        return unfinished or self._inconsistent or bool(self._aborted)

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
    ) -> Request | RejectedRequest:
        """A request stands in line now, or is refused. ValueError: it asks for what has no answer.

        deadline_s: seconds from now, after which it is cut off. salt: prefixes are shared between
        requests of the same salt alone. stream: False if only its last output is wanted.
        """
        self._check_open()
        self._recover()
        request = Request(
            f"request-{next(self._names)}" if request_id is None else request_id,
            self.encode(prompt) if isinstance(prompt, str) else prompt,
            params,
            priority=priority,
            deadline_s=self._deadline(deadline_s),
            salt=_salt(salt),
            eos_token_ids=self.eos_token_ids,
            vocab_size=self.model.config.vocab_size,
            rng_seed=self._seed + self._num_accepted,
        )
        self._prepare(request, prompt if isinstance(prompt, str) else None)
        with self._changing_state():
            refused = self.scheduler.add(request)
            if refused is None:
                self._num_accepted += 1  # of those that are taken alone: draws can be repeated
                self._output_processor.add_request(request, stream)
        return refused or request

    def encode(self, prompt: str) -> list[int]:
        """The token ids of a prompt."""
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer: give the prompt as token ids")
        return self.tokenizer.encode(prompt)

    def warm_up(self) -> None:
        """Prepare now what the first requests would wait for."""
        self._check_open()
        self._runner.warm_up(self.limits.max_num_batched_tokens)

    def graph_bytes(self) -> int:
        """What `warm_up` would keep on a GPU, estimated from a part of it; none on the CPU."""
        self._check_open()
        return self._runner.graph_bytes(self.limits.max_num_batched_tokens)

    def cancel(self, request_id: str) -> bool:
        """End a request now: its pages are free when this returns, and no step reports it any
        more. False: there is no such request, or it is done.
        """
        if self._runner is None:
            return False
        self._recover()
        self._aborted.pop(request_id, None)
        request = self.scheduler.find(request_id)
        if request is None:
            return False
        with self._changing_state():
            self._output_processor.drop_request(request)
            return self.scheduler.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """One turn: computes something if there is work. Answers the requests that gained tokens
        or ended, cumulative. EngineError: every request has failed, and the engine with them.
        Interrupted (KeyboardInterrupt), it ends every request, as the next step tells, and the
        engine goes on with what is added then.
        """
        self._check_open()
        self._recover()
        started = time.monotonic()
        try:
            with self._changing_state():
                outputs = [*self._aborted.values(), *self._run_step()]
                self._aborted.clear()
                self._recorder.record_turn(self.scheduler, self.cache.pool, started)
        except Exception as error:
            raise self._fail(error) from error
        return outputs

    def stats(self) -> EngineStats:
        """How the engine was at the end of its last step."""
        return self._recorder.latest

    def close(self) -> None:
        """Cancel what there is and give all memory back. The engine is of no use afterwards."""
        if self._runner is None:
            return
        self._recover()
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            self.scheduler.abort(request.request_id)
        on_gpu = self.cache.device.type == "cuda"
        self._in_flight = self._runner = None
        del self.model, self.cache, self.tier, self.scheduler, self._output_processor
        if on_gpu:
            torch.cuda.empty_cache()  # what this process keeps for itself, others may have

    def _check_open(self) -> None:
        if self._runner is None:
            raise ValueError("the engine was closed")
        if self._failed:
            raise EngineError(f"the engine has failed: {self._failed}")

    @contextmanager
    def _changing_state(self) -> Iterator[None]:
        """Inside, lines and pages change. An error leaves them to whoever raised it; where an
        interrupt has cut a change in two, nobody knows, so they are torn.
        """
        self._inconsistent = True
        try:
            yield
        except Exception:
            self._inconsistent = False
            raise
        self._inconsistent = False

    def _recover(self) -> None:
        """If lines and pages are torn, every request is over, and they are as new. Interrupted
        itself, this is done again.
        """
        if not self._inconsistent:
            return
        over = self.scheduler.abandon_all(Status.FINISHED_ABORTED, "a step was interrupted")
        self._aborted |= {request.request_id: request.output() for request in over}
        self.cache.reset()
        if self.tier is not None:
            self.tier.reset()
        before = self.scheduler
        self._reset_scheduler()
        self.scheduler.totals = before.totals
        self.scheduler.num_cached_tokens = before.num_cached_tokens
        self._inconsistent = False

    def _reset_scheduler(self) -> None:
        """Nobody stands in line, nothing is under way."""
        self._in_flight: InFlightStep | None = None
        self.scheduler = Scheduler(
            self.cache, self.limits, tier=self.tier, costs=self.costs, clock=self._clock
        )
        self._output_processor = OutputProcessor(self.tokenizer, self.scheduler.stop)

    def _deadline(self, seconds: float | None) -> float | None:
        """On the scheduler's clock."""
        if seconds is None:
            return None
        if not isinstance(seconds, (int, float)) or not seconds > 0:
            raise ValueError(f"deadline_s={seconds!r:.60} must be a number of seconds above 0")
        return self._clock() + seconds

    def _prepare(self, request: Request, prompt: str | None) -> None:
        request.prompt = prompt
        if request.params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]  # the first token follows nothing
        if request.params.stop and self.tokenizer is None:
            raise ValueError("stop texts need a tokenizer; there is stop_token_ids")

    def _run_step(self) -> list[RequestOutput]:
        """The next step is on its way before the last one is looked at, where that can be."""
        step = self.scheduler.schedule()
        in_flight = self._runner.launch(step) if step.chunks else None
        self.scheduler.mark_launched(step)
        outputs = self._output_processor.make_outputs(step.ended)
        if self._in_flight is not None:
            outputs += self._collect(self._in_flight)
        self._in_flight = in_flight
        if in_flight is None:
            self.scheduler.apply_tokens(step, ())
        elif not self._overlap or self.scheduler.must_collect:
            self._in_flight = None
            outputs += self._collect(in_flight)
        return outputs

    def _collect(self, in_flight: InFlightStep) -> list[RequestOutput]:
        started = time.monotonic()
        in_flight.wait()
        waited_s = time.monotonic() - started
        tokens = self._runner.collect(in_flight)
        self._observe(in_flight, waited_s)
        finished = self.scheduler.apply_tokens(in_flight.step, tokens)
        return self._output_processor.process_sampled(
            [sample for _, sample in in_flight.step.rows_to_sample], finished
        )

    def _observe(self, in_flight: InFlightStep, waited_s: float) -> None:
        """The step has come home: what it did, and how long after the one before."""
        now, tokens = time.monotonic(), in_flight.step.num_tokens
        seconds, self._collected_at = now - max(self._collected_at, in_flight.launched_at), now
        self._recorder.count_step(in_flight.step, waited_s)
        if self.costs is not None and tokens >= _MOSTLY_PREFILL * len(in_flight.step.chunks):
            self.costs.observe(tokens, seconds)

    def _fail(self, error: Exception) -> EngineError:
        self._failed = f"{type(error).__name__}: {error}".removesuffix(": ")
        failed = self.scheduler.abandon_all(Status.FINISHED_ERROR, self._failed)
        outputs = [request.output() for request in failed]
        self._output_processor.clear()
        self._in_flight = None
        return EngineError(f"a step failed, and all requests with it: {self._failed}", outputs)


def _salt(salt: bytes) -> str:
    """As the cache takes it; different bytes are different texts."""
    if not isinstance(salt, bytes):
        raise ValueError(f"salt={salt!r:.60} must be bytes")
    return salt.decode("latin-1")


def _find_eos(
    model: Model, tokenizer: Tokenizer | None, named: Sequence[int] | None
) -> tuple[int, ...]:
    """End tokens, each of which is one of the model's."""
    if named is None:
        named = (*model.config.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ()))
    vocab_size = model.config.vocab_size
    for token in named:
        if not 0 <= token < vocab_size:
            raise ValueError(f"the end token {token} is none of the model's: {vocab_size=}")
    return tuple(dict.fromkeys(named))
