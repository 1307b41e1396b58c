"""The thread that drives the engine, and callers on an event loop that wait for it.

    event loop                                    engine thread
    submit -> commands (queue) ---------------->  cancel released, run commands
                                                  engine.step()
    PendingCall.put <- outbox (newest output) <-  outputs

One thread owns the engine. Between two steps it runs all commands in order, but cancels first: a
request whose client is gone is neither added nor computed. A call with many prompts is added in
parts, with steps in between.

The outputs of a step go into one outbox, by request. Outputs are cumulative, so only the newest is
kept: however slow the loop or a client is, a request has at most one output waiting, and neither
side waits for the other.

If a step raises, the engine is dead: all pending calls fail, and the thread continues only to
reject later requests. Every request gets a response.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from itertools import count
from typing import Any, Protocol, TypeVar

from onchip.engine.request import RequestOutput
from onchip.engine.sampling_params import BeamSearchParams, PoolingParams, SamplingParams
from onchip.engine.step import Limits, RejectedRequest
from onchip.engine.structure.compiler import PendingGrammar
from onchip.engine.tokenizer import Tokenizer

from .errors import APIError
from .pending import (
    EngineRequest,
    IncomingRequest,
    OpenRequest,
    OpenRequestInfo,
    PendingCall,
    track_request,
)

T = TypeVar("T")
LOG = logging.getLogger("onchip.serve")
RETRY_AFTER_S = 1
CLOSE_S = 10.0  # to wait for the current step when closing
COMMANDS_S = 0.02  # time for commands between two steps: new requests cannot stop running ones


class EngineProtocol(Protocol):
    """The interface that the thread drives; see onchip.engine.Engine."""

    tokenizer: Tokenizer | None
    limits: Limits

    @property
    def has_work(self) -> bool: ...

    @property
    def embedding_size(self) -> int | None: ...

    def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | BeamSearchParams | PoolingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        salt: bytes = b"",
        stream: bool = True,
    ) -> Any: ...

    def compile_grammar(self, params: SamplingParams) -> PendingGrammar | None: ...

    def cancel(self, request_id: str) -> bool: ...

    def step(self) -> list[RequestOutput]: ...

    def stats(self) -> Any: ...

    def close(self) -> None: ...


class ServiceState(Enum):
    READY = "ready"
    DRAINING = "draining"
    CLOSED = "closed"
    DEAD = "dead"


class Service:
    """Submits requests and delivers outputs to callers on the event loop on which it was started.

    max_open: most open requests, regardless of the engine's queue; requests that are still being
    read count, too. on_output: called with each output that arrives.
    """

    num_steps: int

    def __init__(
        self,
        engine: EngineProtocol,
        *,
        max_open: int = 16384,
        on_output: Callable[[RequestOutput], None] | None = None,
    ):
        self._engine, self._max_open = engine, max_open
        self.on_output = on_output
        self._commands = queue.SimpleQueue[Callable[[], None] | None]()
        self._released = deque[str]()  # ids to cancel, before any command
        self._open: dict[str, OpenRequest] = {}
        self._outbox: dict[str, RequestOutput] = {}
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._thread = threading.Thread(target=self._run, name="onchip-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._state = ServiceState.READY
        self._death_cause: str | None = None
        self._busy_since: float | None = None
        self._incoming: set[IncomingRequest] = set()
        self.num_steps = 0

    def start(self) -> None:
        """Call this on the event loop of the callers."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def state(self) -> ServiceState:
        return ServiceState.DEAD if self._death_cause is not None else self._state

    @property
    def death_cause(self) -> str | None:
        """The name of the exception that ended the engine. Its message may hold private data."""
        return self._death_cause

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_incoming(self) -> int:
        return len(self._incoming)

    @property
    def open_requests(self) -> list[OpenRequestInfo]:
        """All open requests, oldest first."""
        return [entry.info for entry in self._open.values()]

    @property
    def step_age_s(self) -> float:
        """Seconds since the current step began; 0 between steps."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def track_incoming(self) -> AbstractContextManager[IncomingRequest]:
        """A block around reading a request, until its `submit`. APIError: too many requests are
        open.
        """
        self._check_open(1)
        return track_request(self._incoming)

    async def submit(
        self, requests: Sequence[EngineRequest], incoming: IncomingRequest | None = None
    ) -> PendingCall:
        """Submit all requests, or none and raise an APIError. A caller that is cancelled leaves
        nothing behind. incoming: the tracked HTTP request, which ends here.
        """
        if incoming is not None:
            self._incoming.discard(incoming)
        self._check_open(len(requests))
        pending = PendingCall(
            [f"r{next(self._numbers)}" for _ in requests], sum(len(r.prompt) for r in requests)
        )
        now = time.monotonic()
        for index, (request_id, request) in enumerate(
            zip(pending.request_ids, requests, strict=True)
        ):
            self._open[request_id] = OpenRequest(pending, index, request, now)
        self._commands.put(lambda: self._add(requests, pending))
        try:
            error = await pending.accepted
        except BaseException:
            self.release(pending)
            raise
        if error is not None:
            self._drop(pending)
            raise error
        return pending

    async def compile_grammar(
        self, params: SamplingParams, seconds: float
    ) -> PendingGrammar | None:
        """Wait until the grammar of these parameters, if they have one, is compiled. The engine
        finds it again while the caller holds it. APIError: it is refused. TimeoutError: not done
        in time.
        """
        try:
            grammar = self._engine.compile_grammar(params)
        except ValueError as error:
            raise APIError(400, str(error)) from None
        if grammar is not None:
            done = asyncio.Event()
            grammar.future.add_done_callback(lambda _: self._call_on_loop(done.set))
            async with asyncio.timeout(seconds):
                await done.wait()
            if grammar.error is not None:
                raise APIError(400, grammar.error, code="invalid_grammar")
        return grammar

    def release(self, pending: PendingCall) -> None:
        """The caller is gone: unfinished requests are cancelled before the next step, and requests
        that were not added yet are dropped.
        """
        self._drop(pending)
        pending.released = True
        ids = pending.unfinished
        if ids and self._death_cause is None:
            self._released.extend(ids)
            self._commands.put(self._cancel_released)  # wakes the thread if it has no work

    async def inspect(self, read: Callable[[Any], T], timeout_s: float) -> T | None:
        """Call `read` with the engine between two steps. None: the engine died, or a step takes
        longer than timeout_s.
        """
        future = asyncio.get_running_loop().create_future()
        self._commands.put(lambda: self._inspect(read, future))
        done, _ = await asyncio.wait([future], timeout=timeout_s)
        return future.result() if done else None

    @property
    def stats(self) -> Any:
        """The EngineStats at the end of the last step."""
        return self._engine.stats()

    async def drain(self, timeout_s: float) -> None:
        """Accept no new requests and finish the open ones. Requests that are not done in
        time fail.
        """
        if self._state is ServiceState.READY:
            self._state = ServiceState.DRAINING
        self._fail_incoming()
        end = time.monotonic() + timeout_s
        while self._open and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self.fail_all(APIError(503, "the server shut down before this was done", code="shutdown"))

    def fail_all(self, failure: APIError) -> None:
        """Fail all pending calls and cancel their requests."""
        for pending in {id(p.pending): p.pending for p in self._open.values()}.values():
            pending.fail(failure)
            self.release(pending)

    async def close(self) -> None:
        """Stop the thread and free the engine's memory, unless a step hangs."""
        self._state = ServiceState.CLOSED
        self._fail_incoming()
        self.fail_all(APIError(503, "the server is closed", code="shutdown"))
        if self._thread.is_alive():
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join, CLOSE_S)

    def _check_open(self, count: int) -> None:
        if self._death_cause is not None:
            raise _dead_error(self._death_cause)
        if self._state is not ServiceState.READY:
            raise closing_error()
        if count > self._max_open:
            raise APIError(400, f"{count} prompts exceed the {self._max_open} requests of a server")
        taken = self.num_open + self.num_incoming
        if taken + count > self._max_open:
            raise APIError(
                429,
                f"{taken} requests are open, at most {self._max_open} may be",
                code="queue_full",
                retry_after_s=RETRY_AFTER_S,
            )

    def _fail_incoming(self) -> None:
        """A body that is still being read would be rejected at its end; reject it now."""
        for incoming in self._incoming:
            incoming.fail(closing_error())

    def _drop(self, pending: PendingCall) -> None:
        for request_id in pending.request_ids:
            self._open.pop(request_id, None)

    def _deliver_outputs(self) -> None:
        """Runs on the loop."""
        with self._lock:
            outputs, self._outbox = self._outbox, {}
        for request_id, output in outputs.items():
            if request_id not in self._open:
                continue  # the caller is gone
            entry = self._open[request_id]
            if self.on_output:
                self.on_output(output)
            entry.pending.put(entry.index, output)
            if output.finished:
                del self._open[request_id]

    def _run(self) -> None:
        """The engine's thread."""
        try:
            while self._run_commands():
                self._step()
        except BaseException as error:
            self._mark_dead(error)
            while (command := self._commands.get()) is not None:
                command()
        finally:
            self._close_engine()

    def _run_commands(self) -> bool:
        """Run the queued commands; without work, wait for one. Return False to close."""
        end = time.monotonic() + COMMANDS_S
        while not self._engine.has_work or time.monotonic() < end:
            try:
                command = self._commands.get(block=not self._engine.has_work)
            except queue.Empty:
                break
            if command is None:
                return False
            self._cancel_released()
            command()
        self._cancel_released()
        return True

    def _step(self) -> None:
        self._busy_since = time.monotonic()
        outputs = self._engine.step()
        self._busy_since = None
        self.num_steps += 1
        self._post_outputs(outputs)

    def _post_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        if not outputs:
            return
        with self._lock:
            waiting = bool(self._outbox)
            self._outbox.update((o.request_id, o) for o in outputs)
        if not waiting:
            self._call_on_loop(self._deliver_outputs)

    def _add(self, requests: Sequence[EngineRequest], pending: PendingCall, start: int = 0) -> None:
        """Add the requests from `start` on. After COMMANDS_S the rest follows in another command:
        otherwise a call with many prompts would delay all running requests.
        """
        if pending.released:
            return
        try:
            stop, error = self._add_some(requests, pending.request_ids, start)
        except BaseException as error:  # cancelling may run a step, which may fail
            self._set_result(pending.accepted, _dead_error(type(error).__name__))
            raise
        if error is None and stop < len(requests):
            self._commands.put(lambda: self._add(requests, pending, stop))
        else:
            self._set_result(pending.accepted, error)

    def _set_result(self, future: asyncio.Future, result: Any) -> None:
        self._call_on_loop(lambda: None if future.done() else future.set_result(result))

    def _add_some(
        self, requests: Sequence[EngineRequest], request_ids: Sequence[str], start: int
    ) -> tuple[int, APIError | None]:
        """(the first request that was not added, None), or all are cancelled after an error."""
        end = time.monotonic() + COMMANDS_S
        for index in range(start, len(requests)):
            if index > start and time.monotonic() >= end:
                return index, None
            if error := self._add_one(requests[index], request_ids[index]):
                self._cancel(request_ids[:index])
                return index, error
        return len(requests), None

    def _add_one(self, request: EngineRequest, request_id: str) -> APIError | None:
        """A request that the engine cannot take, even one that raises an unexpected error, fails
        alone.
        """
        if self._death_cause is not None:
            return _dead_error(self._death_cause)
        try:
            added = self._engine.add(request_id=request_id, **request.arguments)
        except ValueError as error:
            return APIError(400, str(error))
        except Exception as error:
            LOG.exception("a request could not be added")
            return APIError(500, f"the engine could not take the request: {type(error).__name__}")
        if not isinstance(added, RejectedRequest):
            return None
        if added.is_retryable:
            return APIError(429, added.reason, code="queue_full", retry_after_s=RETRY_AFTER_S)
        return APIError(400, added.reason, code="context_length_exceeded")

    def _cancel_released(self) -> None:
        """Cancel the requests of all clients that left, before any other work."""
        ids = [self._released.popleft() for _ in range(len(self._released))]
        if ids:
            self._cancel(ids)

    def _cancel(self, request_ids: Sequence[str]) -> None:
        if self._death_cause is None:
            for request_id in request_ids:
                self._engine.cancel(request_id)
            if not self._engine.has_work:
                self._step()  # an empty step, to update the stats

    def _inspect(self, read: Callable[[Any], T], future: asyncio.Future[T | None]) -> None:
        result = None
        if self._death_cause is None:
            try:
                result = read(self._engine)
            except Exception:  # a failed read does not end the engine
                LOG.exception("the engine could not be inspected")
        self._set_result(future, result)

    def _mark_dead(self, error: BaseException) -> None:
        LOG.critical("the engine died", exc_info=error)
        self._death_cause = type(error).__name__
        self._busy_since = None
        self._call_on_loop(lambda: self.fail_all(_dead_error(self._death_cause)))

    def _close_engine(self) -> None:
        try:
            self._engine.close()
        except Exception:
            LOG.exception("the engine did not close cleanly")

    def _call_on_loop(self, callback: Callable[[], None]) -> None:
        """Run the callback on the loop, unless the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            LOG.debug("the event loop is closed")


def closing_error() -> APIError:
    return APIError(
        503,
        "the server is shutting down",
        code="shutdown",
        retry_after_s=RETRY_AFTER_S,
        closes=True,
    )


def _dead_error(reason: str | None) -> APIError:
    return APIError(
        503, f"the engine died ({reason}); the server's log says more", code="engine_dead"
    )
