"""Host memory for sequences that are longer than the pool: their first pages.

    sequence   | first tokens              | last tokens          |
    where      | one range of host memory  | pages of the pool    |
               +---- offload moves the border to the right -->

A sequence reserves its range when it is opened, so it never lacks host memory later. A range is
contiguous: a layer of it is one tensor, which `offload_attention` streams past the queries.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from onchip.core.problem import UnsupportedError
from onchip.kvcache.page_tensors import PageTensors, to_device
from onchip.kvcache.pool import NoRoom

# The part of a range that attention takes at a time. A GPU holds two of them; copying one takes
# 1.3 ms over PCIe 5, which hides the cost of starting a copy and a kernel.
PREFIX_SEGMENT_BYTES = 64 << 20


@dataclass(slots=True, eq=False)
class HostRange:
    """Pages first to first + capacity - 1 of the host memory, of which num_pages are in use."""

    first: int
    capacity: int
    num_pages: int = 0

    @property
    def end(self) -> int:
        """The first page behind the range."""
        return self.first + self.capacity


class OffloadMemory:
    """num_pages pages of host memory, pinned if the cache is on a GPU.

    k: (num_layers, num_pages, page_size, num_kv_heads, head_dim); v: the same, head_dim_v. Copies
    to it are queued on the current stream, so pages may be reused as soon as `store` returns.
    """

    k: Tensor
    v: Tensor
    capacity: int

    def __init__(self, pages: PageTensors, num_pages: int):
        if num_pages < 1:
            raise ValueError(f"{num_pages=} must be at least 1")
        if pages.spec.kv_dtype is not None:
            raise UnsupportedError(
                f"pages of {pages.spec.kv_dtype} cannot be offloaded: keys stream from host memory"
                " without scales"
            )
        self._pages, self.capacity = pages, num_pages
        self._held = [self._allocate(t) for t in pages.tensors]
        self.k, self.v = self._held[0], self._held[-1][..., : pages.spec.head_dim_v]
        self.reset()

    def _allocate(self, pages: Tensor) -> Tensor:
        shape = pages.shape[0], self.capacity, *pages.shape[2:]
        try:
            return torch.empty(shape, dtype=pages.dtype, pin_memory=pages.is_cuda)
        except (RuntimeError, MemoryError) as error:
            num_bytes = self.capacity * self._pages.spec.page_bytes
            raise ValueError(
                f"{num_bytes:,} bytes of host memory for offloaded pages cannot be allocated:"
                f" {str(error).splitlines()[0]:.200}"
            ) from error

    def reset(self) -> None:
        """Return to the initial state: no range is reserved."""
        self._ranges: list[HostRange] = []  # by position

    @property
    def num_used(self) -> int:
        """Pages that hold tokens."""
        return sum(held.num_pages for held in self._ranges)

    @property
    def num_reserved(self) -> int:
        """Pages of all ranges, in use or not."""
        return sum(held.capacity for held in self._ranges)

    def find_gap(self, num_pages: int) -> int | None:
        """The first page of the first free range that is long enough; None if there is none."""
        edges = [0, *[edge for r in self._ranges for edge in (r.first, r.end)], self.capacity]
        gaps = zip(edges[::2], edges[1::2], strict=True)
        return next((lo for lo, hi in gaps if hi - lo >= num_pages), None)

    def reserve(self, num_pages: int) -> HostRange | NoRoom:
        """A free range. It raises ValueError if it could never be free."""
        if not 1 <= num_pages <= self.capacity:
            raise ValueError(f"{num_pages=} of host memory must lie in [1, {self.capacity}]")
        first = self.find_gap(num_pages)
        if first is None:
            return NoRoom(num_pages, self.capacity - self.num_reserved, "host pages")
        reserved = HostRange(first, num_pages)
        self._ranges.append(reserved)
        self._ranges.sort(key=lambda held: held.first)
        return reserved

    def release(self, held: HostRange) -> None:
        self._ranges.remove(held)

    def store(self, held: HostRange, pages: list[int]) -> None:
        """Append pages of the device to a range. Layer by layer, which bounds the memory that the
        gathered pages take on the device.
        """
        start = held.first + held.num_pages
        stop = start + len(pages)
        if stop > held.end:
            raise ValueError(f"{len(pages)} pages exceed {held}")
        ids = to_device(torch.tensor(pages, dtype=torch.int64), self._pages.k.device)
        for source, target in zip(self._pages.tensors, self._held, strict=True):
            for layer, host in zip(source, target, strict=True):
                host[start:stop].copy_(layer.index_select(0, ids), non_blocking=True)
        held.num_pages += len(pages)

    def layer(self, layer: int, held: HostRange, num_tokens: int) -> tuple[Tensor, Tensor]:
        """(k, v) of one layer of the first num_tokens tokens of a range: (1, num_tokens,
        num_kv_heads, dim), views.
        """
        pages = slice(held.first, held.first + held.num_pages)
        k, v = (t[layer, pages].flatten(0, 1)[None, :num_tokens] for t in (self.k, self.v))
        return k, v

    def check(self) -> None:
        """Raise AssertionError unless all ranges are disjoint and hold no more than they can."""
        ends = [0, *[held.end for held in self._ranges]]
        starts = [*[held.first for held in self._ranges], self.capacity]
        if any(end > start for end, start in zip(ends, starts, strict=True)):
            raise AssertionError("two ranges of host memory overlap")
        if any(not 0 <= held.num_pages <= held.capacity for held in self._ranges):
            raise AssertionError("a range of host memory holds more pages than it has")
