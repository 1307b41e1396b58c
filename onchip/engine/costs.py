"""What it costs to take a request off the device: its bytes over the link and back, or its tokens
computed again.
"""

from dataclasses import dataclass

_WEIGHT = 0.1  # of the newest measurement: some twenty steps are remembered


@dataclass
class PreemptionCosts:
    """page_bytes: keys and values of a page, all layers. link_bytes_per_s: of copies between host
    and device, both ways alike; the default is what PCIe 5 x16 nearly reaches.
    prefill_tokens_per_s: a first guess, replaced by what `observe` sees.
    """

    page_bytes: int
    link_bytes_per_s: float = 50e9
    prefill_tokens_per_s: float = 20e3

    def __post_init__(self) -> None:
        for name in ("page_bytes", "link_bytes_per_s", "prefill_tokens_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")

    def swap_s(self, num_pages: int) -> float:
        """Out and back."""
        return 2 * num_pages * self.page_bytes / self.link_bytes_per_s

    def recompute_s(self, num_tokens: int) -> float:
        return num_tokens / self.prefill_tokens_per_s

    def prefers_swap(self, num_pages: int, num_tokens: int) -> bool:
        return self.swap_s(num_pages) < self.recompute_s(num_tokens)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step that mostly prefilled computed so many tokens in so many seconds."""
        if num_tokens > 0 and seconds > 0:
            rate = num_tokens / seconds
            self.prefill_tokens_per_s += _WEIGHT * (rate - self.prefill_tokens_per_s)
