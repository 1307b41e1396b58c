"""Masks in which keys have numbers, one or several coordinates: each query sees a box of them."""

from functools import cached_property, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from .bits import BLOCK, Bits, distinct_rows, pack
from .nodes import Grid, Node


class Axis(NamedTuple):
    """One coordinate of all tokens: query q sees key k along this axis iff lo[q] <= at[k] < hi[q].

    Integers, lo and hi (seqlen_q,), at (seqlen_k,).
    """

    lo: Tensor
    hi: Tensor
    at: Tensor

    def cells(self) -> Tensor:
        """Bool (seqlen_q, seqlen_k)."""
        return (self.lo[:, None] <= self.at) & (self.at < self.hi[:, None])


class Box(Node):
    """Query q sees key k iff it does so along every axis.

    An `Interval` is the case of one axis with at[k] = k. Most blocks are decided by the least and
    the largest bounds and coordinates in them, and equal tiles are evaluated once.
    """

    def __init__(self, grid: Grid, axes: list[Axis]):
        super().__init__(grid)
        self._axes = axes

    def cells(self) -> Tensor:
        cells = reduce(torch.logical_and, [axis.cells() for axis in self._axes])
        return cells[None, None].to(self.grid.device)

    def submask(self, rows: Tensor, cols: Tensor) -> "Box":
        axes = [Axis(lo[rows], hi[rows], at[cols]) for lo, hi, at in self._axes]
        return Box(self._subgrid(rows, cols), axes)

    def identity(self) -> list[Tensor | str]:
        return [x for axis in self._axes for x in axis]

    @cached_property
    def _blocked(self) -> list["_AxisBlocks"]:
        return [_AxisBlocks(axis) for axis in self._axes]

    def status(self, block_ids: Tensor) -> Tensor:
        """EMPTY if a block is empty along one axis, FULL if it is full along all of them."""
        _, _, i, j = self.grid.split(block_ids)
        return reduce(torch.minimum, (axis.status(i, j) for axis in self._blocked))

    def compute_bits(self, block_ids: Tensor) -> Bits:
        _, _, i, j = self.grid.split(block_ids)
        found = [column for axis in self._blocked for column in axis.describe(i, j)]
        keep, index = distinct_rows(torch.stack(found, 1))
        i, j = i[keep], j[keep]
        return Bits(reduce(torch.bitwise_and, [x.tiles(i, j) for x in self._blocked]), index)


class _AxisBlocks:
    """An axis by blocks of 128 queries and of 128 keys."""

    def __init__(self, axis: Axis):
        self._lo, self._hi, at = (_in_blocks(x) for x in axis)
        self._bounds = (*self._lo.aminmax(dim=1), *self._hi.aminmax(dim=1), *at.aminmax(dim=1))
        self._start_q, self._start_k = self._lo[:, 0], at[:, 0]
        relative = torch.cat([self._lo, self._hi], 1) - self._lo[:, :1]
        _, self._pattern_q = distinct_rows(relative)
        _, self._pattern_k = distinct_rows(at - at[:, :1])
        self._sorted, places = at.sort(dim=1)
        self._prefixes = _pack_prefixes(places)

    def status(self, i: Tensor, j: Tensor) -> Tensor:
        """EMPTY and FULL are certain. A block with a query that sees nothing is never FULL."""
        lo_min, lo_max, hi_min, hi_max = (x[i] for x in self._bounds[:4])
        at_min, at_max = (x[j] for x in self._bounds[4:])
        some, all_ = (lo_min <= at_max) & (at_min < hi_max), (lo_max <= at_min) & (at_max < hi_min)
        return some.to(torch.uint8) + all_

    def describe(self, i: Tensor, j: Tensor) -> list[Tensor]:
        """Numbers that determine the cells of blocks: the values but for a shift, and the shift
        between bounds and coordinates. FULL blocks are all alike.
        """
        full = self.status(i, j) == 2
        numbers = self._pattern_q[i], self._pattern_k[j], self._start_q[i] - self._start_k[j]
        return [x.masked_fill(full, -1) for x in numbers]

    def tiles(self, i: Tensor, j: Tensor) -> Tensor:
        """The keys below hi that are not below lo: two prefixes of the keys sorted by `at`."""
        first = (j * (BLOCK + 1))[:, None]
        below_lo, below_hi = (
            self._prefixes[first + torch.searchsorted(self._sorted[j], bounds[i])]
            for bounds in (self._lo, self._hi)
        )
        return below_hi & ~below_lo


def _in_blocks(values: Tensor) -> Tensor:
    """(blocks, 128) int64; the ragged end repeats the last value."""
    missing = -len(values) % BLOCK
    return torch.cat([values.long(), values[-1:].long().expand(missing)]).view(-1, BLOCK)


def _pack_prefixes(places: Tensor) -> Tensor:
    """(blocks * 129, 4) words from places (blocks, 128), a permutation for each block: entry
    129 * block + n has the bits of the first n places.
    """
    rank = places.argsort(1)[:, None]
    words = [pack(chunk < torch.arange(BLOCK + 1)[:, None]) for chunk in rank.split(64)]
    return torch.cat(words).flatten(0, 1)
