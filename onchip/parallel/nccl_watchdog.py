"""Finds a lost rank under NCCL, where no host waits: operations run on streams, and only the device
hangs.

A thread polls CUDA events recorded after operations. If an event does not complete within the
timeout, the thread makes the same diagnosis as on any backend, logs it, and aborts the
communicator, so that the device continues. Every later operation raises the diagnosis. Results
computed since the hang must not be used.
"""

import atexit
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from onchip.parallel.comm_base import ParallelError
from onchip.parallel.heartbeat import stop_thread


class StreamEvent(Protocol):
    def query(self) -> bool: ...


class NcclWatchdog:
    """Watches one event at a time: a stream completes events in order, so later ones can wait."""

    is_idle: bool

    def __init__(
        self, diagnose: Callable[[str], ParallelError], abort: Callable[[], object], beat_s: float
    ):
        self._diagnose, self._abort, self._beat_s = diagnose, abort, beat_s
        self._next: queue.SimpleQueue[tuple[StreamEvent, float] | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self.is_idle = True
        thread = threading.Thread(target=self._run, daemon=True, name="onchip-nccl-watchdog")
        thread.start()
        atexit.register(stop_thread, thread, self._stop)

    def watch(self, event: StreamEvent, timeout_s: float) -> None:
        self.is_idle = False
        self._next.put((event, time.monotonic() + timeout_s))

    def _stop(self) -> None:
        self._stopped.set()
        self._next.put(None)

    def _run(self) -> None:
        while (current := self._next.get()) is not None and self._wait_for_event(*current):
            self.is_idle = True
        if not self._stopped.is_set():
            error = self._diagnose("a device operation did not complete")
            logging.getLogger("onchip").error("%s", error)
            self._abort()

    def _wait_for_event(self, event: StreamEvent, until: float) -> bool:
        while not (is_complete := event.query()) and time.monotonic() < until:
            if self._stopped.wait(self._beat_s):
                return False
        return is_complete
