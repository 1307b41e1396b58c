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

from .errors import Refusal
from .pending import Arrival, Ask, Place, Standing, Ticket

T = TypeVar("T")
LOG = logging.getLogger("onchip.serve")
RETRY_AFTER_S = 1
CLOSE_S = 10.0  # for the step that is under way at the end
TURN_S = 0.02  # of commands between two steps: a flood of requests does not stop those that run


class Engine(Protocol):
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


class State(Enum):
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
        engine: Engine,
        *,
        max_open: int = 16384,
        on_output: Callable[[RequestOutput], None] | None = None,
    ):
        self._engine, self._max_open = engine, max_open
        self.on_output = on_output
        self._commands = queue.SimpleQueue[Callable[[], None] | None]()
        self._released = deque[str]()  # ids to cancel, before any command
        self._places: dict[str, Place] = {}
        self._mail: dict[str, RequestOutput] = {}
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._thread = threading.Thread(target=self._run, name="onchip-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._state = State.READY
        self._death: str | None = None
        self._busy_since: float | None = None
        self._arriving: set[Arrival] = set()
        self.num_steps = 0

    def start(self) -> None:
        """On the loop whose callers it serves."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def state(self) -> State:
        return State.DEAD if self._death is not None else self._state

    @property
    def death(self) -> str | None:
        """The name of what the engine died of; the message may hold what is nobody's business."""
        return self._death

    @property
    def num_open(self) -> int:
        return len(self._places)

    @property
    def num_arriving(self) -> int:
        return len(self._arriving)

    @property
    def standings(self) -> list[Standing]:
        """All that are open, oldest first."""
        return [place.standing for place in self._places.values()]

    @property
    def step_age_s(self) -> float:
        """For how long the step that is under way has been computed; 0 between steps."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    @contextmanager
    def arriving(self) -> Iterator[Arrival]:
        """While a request is read, up to its `submit`. A Refusal: there is no room for it."""
        self._check_open(1)
        arrival = Arrival()
        self._arriving.add(arrival)
        try:
            yield arrival
        finally:
            self._arriving.discard(arrival)

    async def submit(self, asks: Sequence[Ask], arrival: Arrival | None = None) -> Ticket:
        """All of them, or none and a Refusal. A caller that is cancelled meanwhile leaves nothing
        behind. arrival: of this request, which ends here.
        """
        if arrival is not None:
            self._arriving.discard(arrival)
        self._check_open(len(asks))
        ticket = Ticket([f"r{next(self._numbers)}" for _ in asks])
        now = time.monotonic()
        for place, (request_id, ask) in enumerate(zip(ticket.request_ids, asks, strict=True)):
            self._places[request_id] = Place(ticket, place, ask, now)
        self._commands.put(lambda: self._add(asks, ticket))
        try:
            refusal = await ticket.taken
        except BaseException:
            self.release(ticket)
            raise
        if refusal is not None:
            self._forget(ticket)
            raise refusal
        return ticket

    def release(self, ticket: Ticket) -> None:
        """Its caller is gone: what is not finished is cancelled before the next step, what is not
        added yet is dropped.
        """
        self._forget(ticket)
        ticket.released = True
        ids = ticket.unfinished
        if ids and self._death is None:
            self._released.extend(ids)
            self._commands.put(self._cancel_released)  # wakes the thread where it has no work

    async def ask(self, look: Callable[[Any], T], patience_s: float) -> T | None:
        """What `look` sees of the engine between two steps; None: it died, or a step takes longer
        than patience_s.
        """
        answer = asyncio.get_running_loop().create_future()
        self._commands.put(lambda: self._look(look, answer))
        done, _ = await asyncio.wait([answer], timeout=patience_s)
        return answer.result() if done else None

    @property
    def stats(self) -> Any:
        """The engine's Stats at the end of its last step."""
        return self._engine.stats()

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, finish what is open; what is not done in time fails with a sentence."""
        if self._state is State.READY:
            self._state = State.DRAINING
        self._fail_arrivals()
        end = time.monotonic() + timeout_s
        while self._places and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self.fail_all(Refusal(503, "the server shut down before this was done", code="shutdown"))

    def fail_all(self, failure: Refusal) -> None:
        """Everybody who waits is answered with it, and what they waited for is cancelled."""
        for ticket in {id(p.ticket): p.ticket for p in self._places.values()}.values():
            ticket.fail(failure)
            self.release(ticket)

    async def close(self) -> None:
        """After it the thread is gone, and with it the engine's memory, unless a step hangs."""
        self._state = State.CLOSED
        self._fail_arrivals()
        self.fail_all(Refusal(503, "the server is closed", code="shutdown"))
        if self._thread.is_alive():
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join, CLOSE_S)

    def _check_open(self, count: int) -> None:
        if self._death is not None:
            raise _dead(self._death)
        if self._state is not State.READY:
            raise _closing()
        taken = self.num_open + self.num_arriving
        if taken + count > self._max_open:
            raise Refusal(
                429,
                f"{taken} requests are open, at most {self._max_open} may be",
                code="queue_full",
                retry_after_s=RETRY_AFTER_S,
            )

    def _fail_arrivals(self) -> None:
        """A body that is still arriving would be refused in the end: the answer is known now."""
        for arrival in self._arriving:
            arrival.fail(_closing())

    def _forget(self, ticket: Ticket) -> None:
        for request_id in ticket.request_ids:
            self._places.pop(request_id, None)

    def _open_mail(self) -> None:
        """On the loop."""
        with self._lock:
            mail, self._mail = self._mail, {}
        for request_id, output in mail.items():
            if request_id not in self._places:
                continue  # its caller is gone
            found = self._places[request_id]
            if self.on_output:
                self.on_output(output)
            found.ticket.put(found.place, output)
            if output.finished:
                del self._places[request_id]

    def _run(self) -> None:
        """The engine's thread."""
        try:
            while self._obey():
                self._step()
        except BaseException as error:
            self._die(error)
            while (command := self._commands.get()) is not None:
                command()
        finally:
            self._close_engine()

    def _obey(self) -> bool:
        """Do what was asked; with nothing to compute, wait for something. False: close."""
        end = time.monotonic() + TURN_S
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
        self._post(outputs)

    def _post(self, outputs: Sequence[RequestOutput]) -> None:
        if not outputs:
            return
        with self._lock:
            waiting = bool(self._mail)
            self._mail.update((o.request_id, o) for o in outputs)
        if not waiting:
            self._tell(self._open_mail)

    def _add(self, asks: Sequence[Ask], ticket: Ticket) -> None:
        if ticket.released:
            return
        try:
            self._answer(ticket.taken, self._try_all(asks, ticket.request_ids))
        except BaseException as error:  # to take a prompt back is a step, too, and may be the last
            self._answer(ticket.taken, _dead(type(error).__name__))
            raise

    def _answer(self, answer: asyncio.Future, result: Any) -> None:
        self._tell(lambda: None if answer.done() else answer.set_result(result))

    def _try_all(self, asks: Sequence[Ask], request_ids: Sequence[str]) -> Refusal | None:
        for place, (ask, request_id) in enumerate(zip(asks, request_ids, strict=True)):
            if refusal := self._try(ask, request_id):
                self._cancel(request_ids[:place])
                return refusal
        return None

    def _try(self, ask: Ask, request_id: str) -> Refusal | None:
        """A question that the engine cannot take, even one that breaks it, fails alone."""
        if self._death is not None:
            return _dead(self._death)
        try:
            answer = self._engine.add(request_id=request_id, **vars(ask))
        except ValueError as error:
            return Refusal(400, str(error))
        except Exception as error:
            LOG.exception("a request could not be added")
            return Refusal(500, f"the engine could not take the request: {type(error).__name__}")
        if not isinstance(answer, RejectedRequest):
            return None
        if answer.is_retryable:
            return Refusal(429, answer.reason, code="queue_full", retry_after_s=RETRY_AFTER_S)
        return Refusal(400, answer.reason, code="context_length_exceeded")

    def _cancel_released(self) -> None:
        """However many clients have left: none of them is computed for, and no other waits for
        more than this.
        """
        ids = [self._released.popleft() for _ in range(len(self._released))]
        if ids:
            self._cancel(ids)

    def _cancel(self, request_ids: Sequence[str]) -> None:
        if self._death is None:
            for request_id in request_ids:
                self._engine.cancel(request_id)
            if not self._engine.has_work:
                self._step()  # of nothing: Stats are those of the last step

    def _look(self, look: Callable[[Any], T], answer: asyncio.Future[T | None]) -> None:
        seen = None
        if self._death is None:
            try:
                seen = look(self._engine)
            except Exception:  # who only looks does not kill
                LOG.exception("the engine could not be looked at")
        self._answer(answer, seen)

    def _die(self, error: BaseException) -> None:
        LOG.critical("the engine died", exc_info=error)
        self._death = type(error).__name__
        self._busy_since = None
        self._tell(lambda: self.fail_all(_dead(self._death)))

    def _close_engine(self) -> None:
        try:
            self._engine.close()
        except Exception:
            LOG.exception("the engine did not close cleanly")

    def _tell(self, callback: Callable[[], None]) -> None:
        """Run it on the loop, if that still runs: then somebody may be waiting."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            LOG.debug("the event loop is closed")


def _closing() -> Refusal:
    return Refusal(
        503,
        "the server is shutting down",
        code="shutdown",
        retry_after_s=RETRY_AFTER_S,
        closes=True,
    )


def _dead(reason: str | None) -> Refusal:
    return Refusal(
        503, f"the engine died ({reason}); the server's log says more", code="engine_dead"
    )
