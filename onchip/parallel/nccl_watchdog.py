"""A lost rank where no host waits: NCCL leaves operations to streams, and only a device hangs.

A thread asks events that lie behind operations. One that does not come within the timeout is judged
as on any backend; the sentence is logged, the communicator is aborted, so that the device goes on,
and every later operation raises it. What was computed since is not to be used.
"""

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from onchip.parallel.heartbeat import end
from onchip.parallel.messages import ParallelError


class Event(Protocol):
    def query(self) -> bool: ...


class Lookout:
    """Follows one event at a time: streams keep their order, so that later ones can wait."""

    def __init__(
        self, judge: Callable[[str], ParallelError], abort: Callable[[], object], beat_s: float
    ):
        self._judge, self._abort, self._beat_s = judge, abort, beat_s
        self._next: queue.SimpleQueue[tuple[Event, float] | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self.idle = True
        thread = threading.Thread(target=self._run, daemon=True, name="onchip-lookout")
        thread.start()
        atexit.register(end, thread, self._end)

    def follow(self, event: Event, timeout_s: float) -> None:
        self.idle = False
        self._next.put((event, time.monotonic() + timeout_s))

    def _end(self) -> None:
        self._over.set()
        self._next.put(None)

    def _run(self) -> None:
        while (current := self._next.get()) is not None and self._comes(*current):
            self.idle = True
        if not self._over.is_set():
            error = self._judge("a device waits in vain")
            logging.getLogger("onchip").error("%s", error)
            self._abort()

    def _comes(self, event: Event, until: float) -> bool:
        while not (came := event.query()) and time.monotonic() < until:
            if self._over.wait(self._beat_s):
                return False
        return came
