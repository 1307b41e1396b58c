"""The cost of preempting a request: copying its pages to the host and back, or recomputing its
tokens.
"""

from dataclasses import dataclass

_WEIGHT = 0.1  # of the newest measurement: about the last twenty steps count


@dataclass
class PreemptionCosts:
    """page_bytes: keys and values of a page, all layers. link_bytes_per_s: copy rate between host
    and device in either direction; the default is close to what PCIe 5 x16 reaches.
    prefill_tokens_per_s: an initial guess, replaced by the measurements of `observe`.
    """

    page_bytes: int
    link_bytes_per_s: float = 50e9
    prefill_tokens_per_s: float = 20e3

    def __post_init__(self) -> None:
        for name in ("page_bytes", "link_bytes_per_s", "prefill_tokens_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")

    def swap_s(self, num_pages: int) -> float:
        """Seconds for the copies out and back."""
        return 2 * num_pages * self.page_bytes / self.link_bytes_per_s

    def recompute_s(self, num_tokens: int) -> float:
        return num_tokens / self.prefill_tokens_per_s

    def prefers_swap(self, num_pages: int, num_tokens: int) -> bool:
        return self.swap_s(num_pages) < self.recompute_s(num_tokens)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Record the time of a step that mostly prefilled."""
        if num_tokens > 0 and seconds > 0:
            rate = num_tokens / seconds
            self.prefill_tokens_per_s += _WEIGHT * (rate - self.prefill_tokens_per_s)
