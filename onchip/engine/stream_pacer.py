"""When long requests, which read pages from host memory, join a step. No tensors here.

A step that streams pages lasts at least as long as their copy, and every request in it waits. So
while other requests run, such steps take a share of the time only:

    step   1      2 3 4 5 6 7 8 9 10 ...                       11
           long   others, for seconds * (1 / time_share - 1)   long
"""

from collections.abc import Callable


class StreamPacer:
    """Decides which steps long requests join while others run or wait: never two in a row, because
    a long prompt may take all pages that are free, and after a step that streamed pages not before
    its pause has passed. time_share: the part of the time that these steps may take.
    """

    def __init__(self, clock: Callable[[], float], time_share: float = 1 / 12):
        self._clock, self._time_share = clock, time_share
        self._joined_last, self._next_s = False, 0.0

    @property
    def is_due(self) -> bool:
        return not self._joined_last and self._clock() >= self._next_s

    def record(self, joined: bool) -> None:
        """Record a scheduled step, and whether long requests joined it."""
        self._joined_last = joined

    def observe(self, seconds: float) -> None:
        """Record that a step ended now that streamed pages, and how long it took. Its pause follows
        from its own time: a rate of the link would need steps that only copy.
        """
        self._next_s = self._clock() + seconds * (1 / self._time_share - 1)
