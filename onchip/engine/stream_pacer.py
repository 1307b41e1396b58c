"""When long requests, which read pages from host memory, join a step. No tensors here.

A step that streams n pages lasts at least n * page_bytes / link_bytes_per_s, and every request in
it waits. So while other requests run, the pages stream in a share of the time only:

    step   1      2 3 4 5 6 7 8 9 10 ...                  11
           long   others, for pause_s = step_s * (1 / time_share - 1)   long
"""

from collections.abc import Callable
from dataclasses import dataclass

_WEIGHT = 0.1  # of the newest measurement: about the last twenty steps count


@dataclass
class StreamingCosts:
    """page_bytes: keys and values of a page, all layers. link_bytes_per_s: an initial guess, close
    to what PCIe 5 x16 reaches; replaced by the measurements of `observe`. time_share: the part of
    the time that steps with streamed pages may take while other requests run.
    """

    page_bytes: int
    link_bytes_per_s: float = 50e9
    time_share: float = 1 / 12

    def step_s(self, num_pages: int) -> float:
        """Seconds in which a step streams these pages."""
        return num_pages * self.page_bytes / self.link_bytes_per_s

    def pause_s(self, num_pages: int) -> float:
        """Seconds from the end of such a step to the next one."""
        return self.step_s(num_pages) * (1 / self.time_share - 1)

    def observe(self, num_pages: int, seconds: float) -> None:
        """Record the time of a step that streamed pages."""
        if num_pages > 0 and seconds > 0:
            rate = num_pages * self.page_bytes / seconds
            self.link_bytes_per_s += _WEIGHT * (rate - self.link_bytes_per_s)


class StreamPacer:
    """Decides which steps long requests join while others run or wait: never two in a row, because
    a long prompt may take all pages that are free, and after a step no earlier than `pause_s`.
    """

    def __init__(self, costs: StreamingCosts, clock: Callable[[], float]):
        self._costs, self._clock = costs, clock
        self._joined_last, self._next_s = False, 0.0

    @property
    def is_due(self) -> bool:
        return not self._joined_last and self._clock() >= self._next_s

    def record(self, joined: bool, num_pages: int) -> None:
        """Record a step, whether long requests joined it, and the pages that it streams."""
        self._joined_last = joined
        if joined:
            seconds = self._costs.step_s(num_pages) + self._costs.pause_s(num_pages)
            self._next_s = self._clock() + seconds
