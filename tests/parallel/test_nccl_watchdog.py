"""What hangs on a device is found by a thread."""

import threading

from onchip.parallel.comm import ParallelError
from onchip.parallel.nccl_watchdog import NcclWatchdog


class Late:
    """An event that comes when it is asked for the n-th time."""

    def __init__(self, n):
        self.n = n

    def query(self):
        self.n -= 1
        return self.n < 0


def test_only_what_does_not_come_is_judged(caplog):
    heard, over = [], threading.Event()

    def diagnose(cause):
        heard.append(cause)
        return ParallelError("rank 3 sent no heartbeat", 3)

    watchdog = NcclWatchdog(diagnose, over.set, 0.001)
    assert watchdog.is_idle
    watchdog.watch(Late(3), 60.0)
    while not watchdog.is_idle:
        pass
    assert not heard and not over.is_set()
    watchdog.watch(Late(10**9), 0.05)
    assert over.wait(10) and heard == ["a device operation did not complete"]
    assert "rank 3 sent no heartbeat" in caplog.text
    assert not watchdog.is_idle  # nothing is followed any more
