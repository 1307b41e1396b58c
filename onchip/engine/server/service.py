"""The thread that drives the engine, and those who wait for it on an event loop.

The engine belongs to one thread, which does everything that is asked of it between two steps, in
order, but cancels first: a request whose client is gone is neither added nor computed.

What a step gives goes into one mailbox, by request: outputs are cumulative, so the newest one says
it all. However slow the loop or a reader is, a request has at most one output waiting, and nobody
waits for anybody.

If a step raises, the engine is dead: everybody who waits is told, and the thread stays to refuse
whatever comes later. No request is ever left without an answer.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import count
from typing import Any, Protocol, TypeVar

from onchip.engine.params import BeamSearchParams, SamplingParams
from onchip.engine.request import RequestOutput
from onchip.engine.step import Limits, RejectedRequest
from onchip.engine.tokenizer import Tokenizer

from .errors import APIError
from .pending import EngineRequest, IncomingRequest, OpenRequest, OpenRequestInfo, PendingCall

T = TypeVar("T")
LOG = logging.getLogger("onchip.serve")
RETRY_AFTER_S = 1
CLOSE_S = 10.0  # for the step that is under way at the end
COMMANDS_S = 0.02  # of commands between two steps: a flood of requests does not stop those that run


class EngineProtocol(Protocol):
    """What the thread drives; see onchip.engine.Engine."""

    tokenizer: Tokenizer | None
    limits: Limits

    @property
    def has_work(self) -> bool: ...

    def add(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | BeamSearchParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        salt: bytes = b"",
        stream: bool = True,
    ) -> Any: ...

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
    """Requests in, outputs back, for callers on the event loop on which it was started.

    max_open: requests that may be open at a time, whatever the engine would queue; those that
    still arrive are open, too. on_output is told each output that arrives.
    """

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
        """On the loop whose callers it serves."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def state(self) -> ServiceState:
        return ServiceState.DEAD if self._death_cause is not None else self._state

    @property
    def death_cause(self) -> str | None:
        """The name of what the engine died of; the message may hold what is nobody's business."""
        return self._death_cause

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_incoming(self) -> int:
        return len(self._incoming)

    @property
    def open_requests(self) -> list[OpenRequestInfo]:
        """All that are open, oldest first."""
        return [entry.info for entry in self._open.values()]

    @property
    def step_age_s(self) -> float:
        """For how long the step that is under way has been computed; 0 between steps."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    @contextmanager
    def track_incoming(self) -> Iterator[IncomingRequest]:
        """While a request is read, up to its `submit`. A Refusal: there is no room for it."""
        self._check_open(1)
        incoming = IncomingRequest()
        self._incoming.add(incoming)
        try:
            yield incoming
        finally:
            self._incoming.discard(incoming)

    async def submit(
        self, requests: Sequence[EngineRequest], incoming: IncomingRequest | None = None
    ) -> PendingCall:
        """All of them, or none and a Refusal. A caller that is cancelled meanwhile leaves nothing
        behind. arrival: of this request, which ends here.
        """
        if incoming is not None:
            self._incoming.discard(incoming)
        self._check_open(len(requests))
        pending = PendingCall([f"r{next(self._numbers)}" for _ in requests])
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

    def release(self, pending: PendingCall) -> None:
        """Its caller is gone: what is not finished is cancelled before the next step, what is not
        added yet is dropped.
        """
        self._drop(pending)
        pending.released = True
        ids = pending.unfinished
        if ids and self._death_cause is None:
            self._released.extend(ids)
            self._commands.put(self._cancel_released)  # wakes the thread where it has no work

    async def inspect(self, read: Callable[[Any], T], timeout_s: float) -> T | None:
        """What `look` sees of the engine between two steps; None: it died, or a step takes longer
        than patience_s.
        """
        future = asyncio.get_running_loop().create_future()
        self._commands.put(lambda: self._inspect(read, future))
        done, _ = await asyncio.wait([future], timeout=timeout_s)
        return future.result() if done else None

    @property
    def stats(self) -> Any:
        """The engine's Stats at the end of its last step."""
        return self._engine.stats()

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, finish what is open; what is not done in time fails with a sentence."""
        if self._state is ServiceState.READY:
            self._state = ServiceState.DRAINING
        self._fail_incoming()
        end = time.monotonic() + timeout_s
        while self._open and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self.fail_all(APIError(503, "the server shut down before this was done", code="shutdown"))

    def fail_all(self, failure: APIError) -> None:
        """Everybody who waits is answered with it, and what they waited for is cancelled."""
        for pending in {id(p.pending): p.pending for p in self._open.values()}.values():
            pending.fail(failure)
            self.release(pending)

    async def close(self) -> None:
        """After it the thread is gone, and with it the engine's memory, unless a step hangs."""
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
            raise _closing_error()
        taken = self.num_open + self.num_incoming
        if taken + count > self._max_open:
            raise APIError(
                429,
                f"{taken} requests are open, at most {self._max_open} may be",
                code="queue_full",
                retry_after_s=RETRY_AFTER_S,
            )

    def _fail_incoming(self) -> None:
        """A body that is still arriving would be refused in the end: the answer is known now."""
        for incoming in self._incoming:
            incoming.fail(_closing_error())

    def _drop(self, pending: PendingCall) -> None:
        for request_id in pending.request_ids:
            self._open.pop(request_id, None)

    def _deliver_outputs(self) -> None:
        """On the loop."""
        with self._lock:
            outputs, self._outbox = self._outbox, {}
        for request_id, output in outputs.items():
            if request_id not in self._open:
                continue  # its caller is gone
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
        """Do what was asked; with nothing to compute, wait for something. False: close."""
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

    def _add(self, requests: Sequence[EngineRequest], pending: PendingCall) -> None:
        if pending.released:
            return
        try:
            self._set_result(pending.accepted, self._add_all(requests, pending.request_ids))
        except BaseException as error:  # to take a prompt back is a step, too, and may be the last
            self._set_result(pending.accepted, _dead_error(type(error).__name__))
            raise

    def _set_result(self, future: asyncio.Future, result: Any) -> None:
        self._call_on_loop(lambda: None if future.done() else future.set_result(result))

    def _add_all(
        self, requests: Sequence[EngineRequest], request_ids: Sequence[str]
    ) -> APIError | None:
        for index, (request, request_id) in enumerate(zip(requests, request_ids, strict=True)):
            if error := self._add_one(request, request_id):
                self._cancel(request_ids[:index])
                return error
        return None

    def _add_one(self, request: EngineRequest, request_id: str) -> APIError | None:
        """A question that the engine cannot take, even one that breaks it, fails alone."""
        if self._death_cause is not None:
            return _dead_error(self._death_cause)
        try:
            added = self._engine.add(request_id=request_id, **vars(request))
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
        """However many clients have left: none of them is computed for, and no other waits for
        more than this.
        """
        ids = [self._released.popleft() for _ in range(len(self._released))]
        if ids:
            self._cancel(ids)

    def _cancel(self, request_ids: Sequence[str]) -> None:
        if self._death_cause is None:
            for request_id in request_ids:
                self._engine.cancel(request_id)
            if not self._engine.has_work:
                self._step()  # of nothing: Stats are those of the last step

    def _inspect(self, read: Callable[[Any], T], future: asyncio.Future[T | None]) -> None:
        seen = None
        if self._death_cause is None:
            try:
                seen = read(self._engine)
            except Exception:  # who only looks does not kill
                LOG.exception("the engine could not be looked at")
        self._set_result(future, seen)

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
        """Run it on the loop, if that still runs: then somebody may be waiting."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            LOG.debug("the event loop is closed")


def _closing_error() -> APIError:
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
