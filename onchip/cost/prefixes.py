"""Cost model of shared prefixes: the prices by which `fold.cascade` plans.

In one call every sequence reads its own prefix. The first read comes from memory, most of the
others hit L2 (again_bytes_s of the hardware). A level of a cascade saves these: it is a separate
call with all queries of a group over the prefix, and its results are merged with the rest. It costs
the call, the queries once more and their partial results, and with many queries the products that
reading no longer hides.

Reading and products can overlap: the sequences' own parts can run on some processors while the
level runs on the others (`PrefixCosts.together`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.device import device_info
from onchip.cost.hardware import Hardware, planned_for
from onchip.cost.roofline import forward_step
from onchip.kernels.tiles import (
    HOPPER_DECODE_ROWS,
    HOPPER_FORWARD_PAGED,
    HOPPER_PAGE_SIZES,
    HOPPER_TILE_ROWS,
    HOPPER_WIDTHS,
    hopper_width,
)

TILE_ROWS = HOPPER_TILE_ROWS  # queries x heads of a group that a program computes at once
SEGMENT_KEYS = 512  # four tiles of keys: starting and ending a program takes the time of two


class Occupancy(NamedTuple):
    """What fills a device: a program takes tile_queries queries of a group, with the heads of one
    kv head, over the keys of one segment.
    """

    num_programs: int = 1  # programs that run at once; 1 if more would not help
    num_kv_heads: int = 1
    tile_queries: int = 1
    segment_pages: int = 1  # fewer are not worth a program and a partial result
    own_queries: int = 0  # most queries of a sequence for its own part to overlap a level; 0: never

    def segments(self, queries: Sequence[int], pages: Tensor) -> Tensor:
        """The number of segments for runs of so many pages, if groups with so many queries read
        them: as many as there are programs for. 1 if tiles are not three quarters full, or if half
        of the device would be idle even so: the attention kernel then does better with whole runs.
        """
        tiles = sum(map(self.tiles, queries)) * self.num_kv_heads
        rows = len(queries) * max(*queries, self.tile_queries)
        is_full = 4 * sum(queries) >= 3 * rows
        most = (pages // self.segment_pages).clamp(max=self.num_programs // tiles if is_full else 1)
        return torch.where(2 * most * tiles > self.num_programs, most, 1)

    def tiles(self, queries: int) -> int:
        """Tiles of `queries` queries of one group and kv head."""
        return -(-queries // self.tile_queries)


class OverlapPlan(NamedTuple):
    """A level in `segments` segments that overlaps with the own parts, each on programs of its own,
    and the time of both with their merge.
    """

    own_programs: int
    level_programs: int
    segments: int
    seconds: float


class MovedBytes(NamedTuple):
    """Bytes of one layer between memory and chip."""

    page: int  # keys and values of one page
    query: int  # added by one query token in one level
    partial: int  # added to one query token's own part because its result is partial
    segment: int  # added by one query token in each further segment of a level

    def of_queries(self, queries: int, segments: int) -> int:
        """Bytes that the queries of a group add in a level of so many segments."""
        return queries * (self.query + (segments - 1) * self.segment)


class PrefixCosts(NamedTuple):
    """Seconds of one layer (or any other unit: plans compare)."""

    page: float  # keys and values of one page, read once more
    query: float  # added by one query token in one level
    partial: float  # added to one query token's own part because its result is partial
    level: float  # a call, its launch and a merge
    segment: float = 0.0  # added by one query token in each further segment of a level
    first: float = 0.0  # keys and values of one page, read for the first time
    products: float = 0.0  # a tile of queries with one page, for all kv heads
    call: float = 0.0  # a call over few queries, without reading
    merge: float = 0.0
    occupancy: Occupancy = Occupancy()

    def one_call(self, pages: int, distinct: int) -> float:
        """One call in which the sequences read `pages` pages, `distinct` of them different."""
        return self.call + distinct * self.first + (pages - distinct) * self.page

    def of_queries(
        self, queries: int, segments: Tensor | int, pages: Tensor | int
    ) -> Tensor | float:
        """Added by the queries of a group in a level of so many segments over so many pages. Of the
        products only the time that exceeds reading the pages counts.
        """
        moved = queries * (self.query + (segments - 1) * self.segment)
        exposed = self.occupancy.tiles(queries) * self.products - self.first
        return moved + pages * max(0.0, exposed)

    def together(self, own_pages: int, queries: int, pages: int) -> OverlapPlan | None:
        """The fastest plan to read own_pages during a level of so many queries over so many pages;
        None if the device cannot hold both.

        Every tile of the level has a program, and the own parts get the rest. Each program has its
        share of the memory bandwidth, so more segments make the level shorter and the own parts
        longer: the best choice lets both end together, as nearly as whole segments allow.
        """
        most = max(1, pages // self.occupancy.segment_pages)
        ways = (self._together(own_pages, queries, pages, n) for n in range(1, most + 1))
        return min(filter(None, ways), key=lambda way: way.seconds, default=None)

    def _together(
        self, own_pages: int, queries: int, pages: int, segments: int
    ) -> OverlapPlan | None:
        """The plan with so many segments."""
        num_programs, num_kv_heads, *_ = self.occupancy
        tiles = self.occupancy.tiles(queries)
        level_programs = tiles * num_kv_heads * segments
        own_programs = (num_programs - level_programs) // num_kv_heads * num_kv_heads
        if own_programs <= 0:
            return None
        own = own_pages * self.first * num_programs / own_programs
        page = max(self.products, self.first / tiles) * num_programs / num_kv_heads
        level = -(-pages // segments) * page
        # Both are launched at once, the merge before they end. Starting and ending takes call_s.
        busy = self.call + max(own, level)
        moved = queries * (self.partial + self.query + (segments - 1) * self.segment)
        return OverlapPlan(own_programs, level_programs, segments, busy + self.merge + moved)


def costs(q: Tensor, k_pages: Tensor, v_pages: Tensor, on: Hardware | None = None) -> PrefixCosts:
    """Prices for tensors like these; only shapes, dtype and device are read. on: plan for this
    hardware instead of q's device.
    """
    hardware, n = on or planned_for(q.device), moved(q, k_pages, v_pages)
    splits = _splits_keys(q, k_pages, v_pages, on)
    seconds = lambda num_bytes: num_bytes / hardware.memory_bytes_s
    return PrefixCosts(
        page=n.page / hardware.repeated_bytes_s,
        query=seconds(n.query),
        partial=seconds(n.partial),
        level=hardware.call_s + hardware.launch_s + hardware.merge_s,
        segment=seconds(n.segment),
        first=seconds(n.page),
        products=_products(q, k_pages, v_pages, hardware, splits),
        call=hardware.call_s,
        merge=hardware.merge_s,
        occupancy=_occupancy(q, k_pages, v_pages, hardware, splits),
    )


def moved(q: Tensor, k_pages: Tensor, v_pages: Tensor) -> MovedBytes:
    if q.dim() < 3 or k_pages.dim() != 4 or v_pages.dim() != 4:
        shapes = [tuple(t.shape) for t in (q, k_pages, v_pages)]
        raise ValueError(f"q must end in (heads, head_dim) and pages have rank 4, got {shapes}")
    num_heads, head_dim = q.shape[-2:]
    page_size, num_kv_heads = k_pages.shape[1:3]
    head_dim_v, item = v_pages.shape[-1], k_pages.element_size()
    scales = 8 if item == 1 else 0  # bytes, for a key and its value
    partial = 2 * num_heads * 4 * (head_dim_v + 1)  # fp32 out and lse, written and read back
    query = num_heads * head_dim * q.element_size()
    return MovedBytes(
        page=page_size * num_kv_heads * ((head_dim + head_dim_v) * item + scales),
        query=3 * query + partial,  # gathered (read, written), read again
        partial=partial,
        segment=2 * query + partial,  # written, read again
    )


def _occupancy(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, hardware: Hardware, splits: bool
) -> Occupancy:
    """The paged Hopper forward fills each processor with one tile, and does not split keys. Kernels
    of other devices and for fp32 split keys by themselves: no segments for them.
    """
    page_size, num_kv_heads = k_pages.shape[1:3]
    group_size = max(1, q.shape[-2] // max(1, num_kv_heads))
    return Occupancy(
        1 if splits else hardware.processors,
        num_kv_heads,
        max(1, TILE_ROWS // group_size),
        -(-SEGMENT_KEYS // max(1, page_size)),
        0 if splits else _own_queries(q, k_pages, v_pages),
    )


def _own_queries(q: Tensor, k_pages: Tensor, v_pages: Tensor) -> int:
    """As many as the Hopper decode kernel takes, if tiles of the Hopper forward hold whole groups
    of heads. Other conditions are checked at every call.
    """
    page_size, num_kv_heads, head_dim = k_pages.shape[1:]
    group_size = max(1, q.shape[-2] // max(1, num_kv_heads))
    fits = page_size in HOPPER_PAGE_SIZES and head_dim == v_pages.shape[-1] and 64 % group_size == 0
    return HOPPER_DECODE_ROWS // group_size if fits else 0


def _splits_keys(q: Tensor, k_pages: Tensor, v_pages: Tensor, on: Hardware | None) -> bool:
    """Whether no kernel of the device (q's, or `on`) needs segments; an unknown device is treated
    as one that does. The Hopper forward, which does, takes no wide heads.
    """
    device = on.as_device if on else device_info(q.device)
    elsewhere = device.type in ("cpu", "hip") or device.capability not in (None, (9, 0))
    is_wide = max(k_pages.shape[-1], v_pages.shape[-1]) > HOPPER_WIDTHS[-1]
    return elsewhere or is_wide or q.element_size() != 2 or k_pages.element_size() != 2


def _products(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, hardware: Hardware, splits: bool
) -> float:
    """Seconds of a tile of queries with a page for all kv heads, on all processors: by the model of
    the Hopper forward's pipeline, or for other kernels by peak rates.
    """
    if not hardware.is_known:
        return 0.0
    page_size, num_kv_heads, head_dim = k_pages.shape[1:]
    width, width_v = hopper_width(head_dim), hopper_width(v_pages.shape[-1])
    config = HOPPER_FORWARD_PAGED.get(max(width, width_v))
    clocks = 2 * (head_dim + v_pages.shape[-1]) / hardware.flops_clock(q.dtype)  # row and key
    if config is not None and not splits:
        step = forward_step(config, width, width_v, hardware, q.dtype)
        clocks = step.response(config.consumers) / (64 * config.consumers * config.tile_n)
    pairs = TILE_ROWS * page_size * num_kv_heads
    return pairs * clocks / hardware.clock_hz / hardware.processors
