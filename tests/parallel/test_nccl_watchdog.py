"""The watchdog thread finds an operation that hangs on a device."""

import threading

from onchip.parallel.comm import ParallelError
from onchip.parallel.nccl_watchdog import NcclWatchdog


class EventAfter:
    """An event that completes at the n-th query."""

    def __init__(self, n):
        self.n = n

    def query(self):
        self.n -= 1
        return self.n < 0


def test_only_an_event_that_does_not_complete_is_diagnosed(caplog):
    causes, over = [], threading.Event()

    def diagnose(cause):
        causes.append(cause)
        return ParallelError("rank 3 sent no heartbeat", 3)

    watchdog = NcclWatchdog(diagnose, over.set, 0.001)
    assert watchdog.is_idle
    watchdog.watch(EventAfter(3), 60.0)
    while not watchdog.is_idle:
        pass
    assert not causes and not over.is_set()
    watchdog.watch(EventAfter(10**9), 0.05)
    assert over.wait(10) and causes == ["a device operation did not complete"]
    assert "rank 3 sent no heartbeat" in caplog.text
    assert not watchdog.is_idle  # the thread has ended
