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

from onchip.parallel.heartbeat import stop_thread
from onchip.parallel.messages import ParallelError


class StreamEvent(Protocol):
    def query(self) -> bool: ...


class NcclWatchdog:
    """Follows one event at a time: streams keep their order, so that later ones can wait."""

    def __init__(
        self, diagnose: Callable[[str], ParallelError], abort: Callable[[], object], beat_s: float
    ):
        self._diagnose, self._abort, self._beat_s = diagnose, abort, beat_s
        self._next: queue.SimpleQueue[tuple[StreamEvent, float] | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self.is_idle = True
        thread = threading.Thread(target=self._run, daemon=True, name="onchip-lookout")
        thread.start()
        atexit.register(stop_thread, thread, self._end)

    def watch(self, event: StreamEvent, timeout_s: float) -> None:
        self.is_idle = False
        self._next.put((event, time.monotonic() + timeout_s))

    def _end(self) -> None:
        self._over.set()
        self._next.put(None)

    def _run(self) -> None:
        while (current := self._next.get()) is not None and self._wait_for_event(*current):
            self.is_idle = True
        if not self._over.is_set():
            error = self._diagnose("a device waits in vain")
            logging.getLogger("onchip").error("%s", error)
            self._abort()

    def _wait_for_event(self, event: StreamEvent, until: float) -> bool:
        while not (came := event.query()) and time.monotonic() < until:
            if self._over.wait(self._beat_s):
                return False
        return came
