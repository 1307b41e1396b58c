"""From a mask expression to its blocks, without evaluating anything N x N: the contract of a node,
intervals, and nodes that join others. `cells.py` has the nodes that are evaluated cell by cell.

`Node.status` is three-valued logic: AND is the minimum, OR the maximum, NOT the reflection. So bits
are computed only for blocks that the structure leaves undecided, and the result is exact.

A rule of one kind has a node already:

    the keys of a query are one interval         Interval, here
    it depends on p - k alone                    diagonals.Diagonals
    it depends on blocks of 128 x 128 alone      cells.BlockPattern
    it depends on a number of each key, or on    boxes.Box: `k % n == 0` is a box of one axis with
      coordinates of tokens on a grid              at[k] = k % n, lo = 0, hi = 1
    anything else, cell by cell                  cells.Cells
"""

from abc import ABC, abstractmethod
from functools import cached_property, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from .bits import (
    BLOCK,
    Bits,
    combine,
    constant_tiles,
    distinct_pairs,
    distinct_rows,
    distinct_tiles,
    interval_tiles,
)
from .blockmask import BlockMask, assemble, divide, num_blocks

EMPTY, PARTIAL, FULL = 0, 1, 2

_IDS_AT_ONCE = 1 << 18  # where candidates are unknown, all blocks are tried in such chunks
_BLOCKS_AT_ONCE = 8192  # bit tiles alive during a build: 16 MB


class Grid(NamedTuple):
    """The rectangle that a mask is built for. batch and heads count planes: 1 if shared."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int
    device: torch.device  # a mask_mod is evaluated on it; everything else runs on the CPU

    @property
    def blocks_q(self) -> int:
        return num_blocks(self.seqlen_q)

    @property
    def blocks_k(self) -> int:
        return num_blocks(self.seqlen_k)

    @property
    def offset(self) -> int:
        """Query q is at key position q + offset: the last query at the last key."""
        return self.seqlen_k - self.seqlen_q

    @property
    def num_blocks(self) -> int:
        return self.batch * self.heads * self.blocks_q * self.blocks_k

    def split(self, block_ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The (b, h, i, j) of blocks."""
        row, j = divide(block_ids, self.blocks_k)
        plane, i = divide(row, self.blocks_q)
        return *divide(plane, self.heads), i, j

    def inside(self, block_ids: Tensor) -> Bits:
        """The cells of each block that are within the lengths."""
        _, _, i, j = self.split(block_ids)
        rows = torch.tensor([BLOCK, self.seqlen_q - (self.blocks_q - 1) * BLOCK])
        cols = torch.tensor([BLOCK, self.seqlen_k - (self.blocks_k - 1) * BLOCK])
        below = (torch.arange(BLOCK) < rows[:, None])[:, None]
        hi = (below * cols[None, :, None]).reshape(4, BLOCK)
        last_row, last_col = (i == self.blocks_q - 1).long(), (j == self.blocks_k - 1).long()
        return Bits(interval_tiles(torch.zeros_like(hi), hi), last_row * 2 + last_col)


class Node(ABC):
    """A mask on a grid.

    Blocks are given by block_ids, int64 (plane * query_blocks + i) * key_blocks + j. A node defines

    - `compute_bits`: the cells of blocks, for a build;
    - `cells`: all cells, for a graph;
    - `submask`: some of its rows and columns, for one rank of a ring;
    - `identity`: what differs if the mask differs, for the comparison of ranks.

    A node of `cells.Cells` defines `visible` alone. A node that knows its structure also overrides
    `candidates` and `status`: otherwise every block is evaluated cell by cell.
    """

    def __init__(self, grid: Grid):
        self.grid = grid

    @abstractmethod
    def compute_bits(self, block_ids: Tensor) -> Bits:
        """Bit tiles of the given blocks; cells outside the lengths are arbitrary."""

    @abstractmethod
    def cells(self) -> Tensor:
        """Bool (batch or 1, heads or 1, seqlen_q, seqlen_k) on the grid's device, by operations
        that a graph can hold: O(seqlen_q x seqlen_k) memory.
        """

    @abstractmethod
    def submask(self, rows: Tensor, cols: Tensor) -> "Node":
        """Rows and columns of this mask: cell (i, j) of the result is cell (rows[i], cols[j]).
        rows and cols are int64, ascending, on the CPU.
        """

    @abstractmethod
    def identity(self) -> list[Tensor | str]:
        """Tensors and names to be hashed: equal if the expression and its values are, different if
        a cell differs. Cells of a large mask may be sampled.
        """

    def candidates(self) -> Tensor | None:
        """Ascending ids of all blocks that may be non-empty; None: any block may be."""
        return None

    def status(self, block_ids: Tensor) -> Tensor:
        """uint8 per block: EMPTY and FULL are certain, PARTIAL means that only the bits decide."""
        return torch.full(block_ids.shape, PARTIAL, dtype=torch.uint8)

    def bits(self, block_ids: Tensor) -> Bits:
        """As `compute_bits`, which is called only for the blocks that `status` leaves undecided."""
        status = self.status(block_ids)
        known = Bits(constant_tiles(), (status == FULL).long())
        where = (status == PARTIAL).nonzero().flatten()
        if not len(where):
            return known
        tiles, index = self.compute_bits(block_ids[where])
        known.tile_ids[where] = index + len(known.tiles)
        return Bits(torch.cat([known.tiles, tiles]), known.tile_ids)

    def _subgrid(self, rows: Tensor, cols: Tensor) -> Grid:
        return self.grid._replace(seqlen_q=len(rows), seqlen_k=len(cols))


class Interval(Node):
    """Query q sees the keys lo <= k < hi: integer tensors that broadcast to (1 or batch, seqlen_q).

    Values outside of [0, seqlen_k] are allowed. A query with hi < lo sees nothing.
    """

    def __init__(self, grid: Grid, lo: Tensor | int, hi: Tensor | int):
        super().__init__(grid)
        self._lo, self._hi = (torch.as_tensor(x, dtype=torch.int32) for x in (lo, hi))

    def __and__(self, other: "Interval") -> "Interval":
        lo, hi = torch.maximum(self._lo, other._lo), torch.minimum(self._hi, other._hi)
        return Interval(self.grid, lo, hi)

    def __invert__(self) -> "Or":
        """The interval before it or the interval after it."""
        lo, hi = self.find_bounds()
        before = Interval(self.grid, 0, lo)
        return Or(self.grid, [before, Interval(self.grid, hi, self.grid.seqlen_k)])

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """(1 or batch, seqlen_q) each, 0 <= lo <= hi <= seqlen_k; lo = seqlen_k if empty."""
        return self.find_bounds()

    def find_bounds(self) -> tuple[Tensor, Tensor]:
        """The same without caching, for a graph."""
        end = self.grid.seqlen_k
        lo, hi, _ = torch.broadcast_tensors(
            self._lo.clamp(0, end), self._hi.clamp(0, end), torch.empty(1, self.grid.seqlen_q)
        )
        lo = torch.where(lo < hi, lo, end)
        return lo, torch.maximum(lo, hi)

    def cells(self) -> Tensor:
        lo, hi = (x.to(self.grid.device)[:, None, :, None] for x in self.find_bounds())
        k = torch.arange(self.grid.seqlen_k, device=self.grid.device)
        return (lo <= k) & (k < hi)

    def submask(self, rows: Tensor, cols: Tensor) -> "Interval":
        lo, hi = (torch.searchsorted(cols, x.long()[:, rows]) for x in self.bounds)
        return Interval(self._subgrid(rows, cols), lo, hi)

    def identity(self) -> list[Tensor | str]:
        return [*self.bounds]

    @cached_property
    def _blocked(self) -> tuple[Tensor, Tensor]:
        """The bounds as (block rows, 128); the ragged end repeats the last query."""
        lo, hi = self.bounds
        if self.grid.seqlen_q % BLOCK:
            rows = torch.arange(self.grid.blocks_q * BLOCK).clamp_(max=self.grid.seqlen_q - 1)
            lo, hi = lo[:, rows], hi[:, rows]
        return lo.reshape(-1, BLOCK), hi.reshape(-1, BLOCK)

    @cached_property
    def _ranges(self) -> tuple[Tensor, ...]:
        """Per block row: first and end of its candidates, first and end of its FULL blocks."""
        grid = self.grid
        lo, hi = self._blocked
        end = hi.masked_fill(lo == grid.seqlen_k, 0).amax(1)
        full_end = hi.amin(1)
        # The ragged last block is full if it is visible up to the length.
        full_end = torch.where(full_end == grid.seqlen_k, grid.blocks_k, full_end // BLOCK)
        up = BLOCK - 1
        return lo.amin(1) // BLOCK, (end + up) // BLOCK, (lo.amax(1) + up) // BLOCK, full_end

    def _locate(self, block_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The block row of each block in `_blocked` and `_ranges`, and its key block."""
        grid = self.grid
        if len(self._ranges[0]) > grid.blocks_q:
            b, _, i, j = grid.split(block_ids)
            return b * grid.blocks_q + i, j.int()
        row, j = divide(block_ids, grid.blocks_k)
        return row % grid.blocks_q if grid.batch * grid.heads > 1 else row, j.int()

    def candidates(self) -> Tensor:
        grid = self.grid
        planes = (grid.batch, grid.heads, grid.blocks_q)
        first, end = (
            x.long().view(-1, 1, grid.blocks_q).expand(planes).flatten() for x in self._ranges[:2]
        )
        count = (end - first).clamp_(min=0)
        # Entry e of row r is column first[r] + (e - entries before row r).
        base = torch.arange(len(first)) * grid.blocks_k + first - (count.cumsum(0) - count)
        block_ids = torch.repeat_interleave(base, count)
        return block_ids.add_(torch.arange(len(block_ids)))

    def status(self, block_ids: Tensor) -> Tensor:
        row, j = self._locate(block_ids)
        first, end, full_first, full_end = (x.index_select(0, row) for x in self._ranges)
        some, all_ = (first <= j) & (j < end), (full_first <= j) & (j < full_end)
        return some.to(torch.uint8) + all_

    def compute_bits(self, block_ids: Tensor) -> Bits:
        row, j = self._locate(block_ids)
        start = (j * BLOCK)[:, None]
        lo, hi = (
            x.index_select(0, row).sub_(start).clamp_(0, BLOCK).to(torch.uint8)
            for x in self._blocked
        )
        # Equal distances from the block's first key give equal tiles: deduplicate before expanding.
        keep, index = distinct_rows(torch.cat([lo, hi], 1).view(torch.int64))
        return Bits(interval_tiles(lo[keep], hi[keep]), index)


class Join(Node):
    """A mask composed of other masks."""

    def __init__(self, grid: Grid, parts: list[Node]):
        super().__init__(grid)
        self.parts = parts

    def submask(self, rows: Tensor, cols: Tensor) -> "Join":
        parts = [part.submask(rows, cols) for part in self.parts]
        return type(self)(self._subgrid(rows, cols), parts)

    def identity(self) -> list[Tensor | str]:
        return [type(self).__name__, *(x for part in self.parts for x in (*part.identity(), "|"))]


class And(Join):
    """Visible in every part."""

    def candidates(self) -> Tensor | None:
        known = [ids for part in self.parts if (ids := part.candidates()) is not None]
        return min(known, key=len, default=None)

    def status(self, block_ids: Tensor) -> Tensor:
        return reduce(torch.minimum, (part.status(block_ids) for part in self.parts))

    def compute_bits(self, block_ids: Tensor) -> Bits:
        bits = (part.bits(block_ids) for part in self.parts)
        return reduce(lambda a, b: combine(torch.bitwise_and, a, b), bits)

    def cells(self) -> Tensor:
        return reduce(torch.logical_and, [part.cells() for part in self.parts])


class Or(Join):
    """Visible in some part."""

    def candidates(self) -> Tensor | None:
        lists = [part.candidates() for part in self.parts]
        return None if any(ids is None for ids in lists) else torch.unique(torch.cat(lists))

    def status(self, block_ids: Tensor) -> Tensor:
        return reduce(torch.maximum, (part.status(block_ids) for part in self.parts))

    def compute_bits(self, block_ids: Tensor) -> Bits:
        bits = (part.bits(block_ids) for part in self.parts)
        return reduce(lambda a, b: combine(torch.bitwise_or, a, b), bits)

    def cells(self) -> Tensor:
        return reduce(torch.logical_or, [part.cells() for part in self.parts])


class Not(Node):
    """Visible where the part is not."""

    def __init__(self, grid: Grid, part: Node):
        super().__init__(grid)
        self.part = part

    def status(self, block_ids: Tensor) -> Tensor:
        return FULL - self.part.status(block_ids)

    def compute_bits(self, block_ids: Tensor) -> Bits:
        bits = self.part.bits(block_ids)
        return Bits(~bits.tiles, bits.tile_ids)

    def cells(self) -> Tensor:
        return ~self.part.cells()

    def submask(self, rows: Tensor, cols: Tensor) -> "Not":
        return Not(self._subgrid(rows, cols), self.part.submask(rows, cols))

    def identity(self) -> list[Tensor | str]:
        return ["not", *self.part.identity()]


def both(a: Node, b: Node) -> Node:
    """a AND b; all intervals of the conjunction are intersected to one interval."""
    parts = [p for node in (a, b) for p in (node.parts if isinstance(node, And) else [node])]
    intervals = [p for p in parts if isinstance(p, Interval)]
    others = [p for p in parts if not isinstance(p, Interval)]
    parts = [reduce(Interval.__and__, intervals), *others] if intervals else others
    return parts[0] if len(parts) == 1 else And(a.grid, parts)


def either(a: Node, b: Node) -> Node:
    """a OR b."""
    return Or(a.grid, [p for n in (a, b) for p in (n.parts if isinstance(n, Or) else [n])])


def invert(a: Node) -> Node:
    """NOT a; intervals have a closed form."""
    return ~a if isinstance(a, Interval) else Not(a.grid, a)


def build(node: Node) -> BlockMask:
    """The exact EMPTY / PARTIAL / FULL blocks of a node, on the CPU."""
    block_ids, status = _find_blocks(node)
    open_ = (status == PARTIAL).nonzero().flatten()
    tiles, ids, count = [], [], 0
    for chunk in open_.split(_BLOCKS_AT_ONCE) if len(open_) else ():
        partial, status[chunk], index = _classify(node, block_ids[chunk])
        tiles.append(partial)
        ids.append(index + count)
        count += len(partial)
    some = (status != EMPTY).nonzero().flatten()
    full = status[some] == FULL
    if not count:
        nothing = torch.empty(0, dtype=torch.int64)
        return assemble(node.grid, block_ids[some], full, nothing, nothing.int())
    tiles, index = distinct_tiles(torch.cat(tiles))
    return assemble(node.grid, block_ids[some], full, index[torch.cat(ids)], tiles)


def _find_blocks(node: Node) -> tuple[Tensor, Tensor]:
    """Ascending ids of the blocks that may be non-empty, and their status."""
    total = node.grid.num_blocks
    block_ids = node.candidates() if total else torch.empty(0, dtype=torch.int64)
    if block_ids is not None:
        return block_ids, node.status(block_ids) if total else block_ids.to(torch.uint8)
    blocks = []
    for start in range(0, total, _IDS_AT_ONCE):
        block_ids = torch.arange(start, min(start + _IDS_AT_ONCE, total))
        status = node.status(block_ids)
        some = (status != EMPTY).nonzero().flatten()
        blocks.append((block_ids[some], status[some]))
    block_ids, status = zip(*blocks, strict=True)
    return torch.cat(block_ids), torch.cat(status)


def _classify(node: Node, block_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """PARTIAL tiles, the exact status per block, and the tile of each PARTIAL block."""
    tiles, inside, index = distinct_pairs(node.bits(block_ids), node.grid.inside(block_ids))
    tiles = tiles & inside
    some, all_ = (tiles != 0).flatten(1).any(1), (tiles == inside).flatten(1).all(1)
    status = (some.to(torch.uint8) + all_)[index]
    partial = some & ~all_
    number = partial.cumsum(0) - 1
    return tiles[partial], status, number[index[status == PARTIAL]]
