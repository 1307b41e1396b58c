"""Some rows and columns of a mask, without building the whole mask: one rank's part of a mask over
many ranks.
"""

from functools import cached_property

import torch
from torch import Tensor

from .bits import BLOCK
from .blockmask import BlockMask
from .mods import Mask
from .nodes import EMPTY, FULL, PARTIAL, Cells, Dense, Grid, Interval, Join, Node, Not

_NEAR = 2  # a submask's block is decided by blocks of the whole if it touches at most so many


def node_of(
    mask: Mask | BlockMask, planes: tuple[int, int], lengths: tuple[int, int], device: torch.device
) -> Node:
    """The node of a mask: planes are (batch, heads), lengths (seqlen_q, seqlen_k)."""
    if isinstance(mask, BlockMask):
        return BuiltMask(Grid(*mask.shape, torch.device("cpu")), mask)
    return mask.node(*planes, *lengths, device)


def submask(node: Node, rows: Tensor, cols: Tensor) -> Node:
    """Rows and columns of a mask: cell (i, j) of the result is cell (rows[i], cols[j]) of node.
    rows and cols are int64, ascending, on the CPU.
    """
    grid = node.grid._replace(seqlen_q=len(rows), seqlen_k=len(cols))
    if isinstance(node, Interval):
        lo, hi = (x.long()[:, rows] for x in node.bounds)
        return Interval(grid, torch.searchsorted(cols, lo), torch.searchsorted(cols, hi))
    if isinstance(node, Join):
        return type(node)(grid, [submask(each, rows, cols) for each in node.parts])
    if isinstance(node, Not):
        return Not(grid, submask(node.part, rows, cols))
    if isinstance(node, (Cells, Dense)):
        return Submask(grid, node, rows, cols)
    raise TypeError(f"{type(node).__name__} has no submask")


class Submask(Cells):
    """Rows and columns of a mask that is evaluated cell by cell."""

    def __init__(self, grid: Grid, whole: Cells | Dense, rows: Tensor, cols: Tensor):
        super().__init__(grid)
        self.whole, self._rows, self._cols = whole, rows, cols

    def visible(self, b, h, q, k):
        return self.whole.visible(b, h, self._rows[q], self._cols[k])

    def status(self, keys: Tensor) -> Tensor:
        """Decided by the blocks of the whole if a block touches few of them, else PARTIAL."""
        result = super().status(keys)
        b, h, i, j = self.grid.split(keys)
        (first_i, last_i), (first_j, last_j) = self._touched[0][:, i], self._touched[1][:, j]
        near = (last_i - first_i < _NEAR) & (last_j - first_j < _NEAR)
        all_, none = near.clone(), near.clone()
        for step_i in range(_NEAR):
            for step_j in range(_NEAR):
                row = torch.minimum(first_i + step_i, last_i)
                col = torch.minimum(first_j + step_j, last_j)
                status = self._status_of_blocks(b[near], h[near], row[near], col[near])
                all_[near] &= status == FULL
                none[near] &= status == EMPTY
        result[all_], result[none] = FULL, EMPTY
        return result

    def _status_of_blocks(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        grid = self.whole.grid
        return self.whole.status(((b * grid.heads + h) * grid.blocks_q + i) * grid.blocks_k + j)

    @cached_property
    def _touched(self) -> tuple[Tensor, Tensor]:
        """First and last block of the whole that each block of rows, and of columns, touches."""
        return _first_and_last(self._rows), _first_and_last(self._cols)


def _first_and_last(positions: Tensor) -> Tensor:
    starts = torch.arange(0, len(positions), BLOCK)
    ends = (starts + BLOCK - 1).clamp(max=len(positions) - 1)
    return torch.stack([positions[starts], positions[ends]]) // BLOCK


class BuiltMask(Cells):
    """The node of a BlockMask."""

    def __init__(self, grid: Grid, mask: BlockMask):
        super().__init__(grid)
        self._bits = mask.host.tiles
        self._table = _table(mask, grid)

    def visible(self, b, h, q, k):
        b, h, q, k = b[:, None, None], h[:, None, None], q[:, :, None], k[:, None, :]
        tile = self._table[b, h, q // BLOCK, k // BLOCK]
        return (self._bits[tile, q % BLOCK, k % BLOCK // 32] >> (k % 32) & 1).bool()

    def status(self, keys: Tensor) -> Tensor:
        tile = self._table.view(-1)[keys]
        return torch.where(tile > 1, PARTIAL, tile * FULL).to(torch.uint8)


def _table(mask: BlockMask, grid: Grid) -> Tensor:
    """(planes_b, planes_h, query blocks, key blocks): the tile of each block in `HostRows.tiles`,
    where 0 is empty and 1 is full.
    """
    host = mask.host
    table = torch.zeros(grid.batch * grid.heads * grid.blocks_q, grid.blocks_k, dtype=torch.int64)
    rows = torch.arange(len(table))
    owners = lambda ends: rows.repeat_interleave(torch.tensor(ends).diff())
    table[owners(host.full_offsets), torch.tensor(host.full_indices).long()] = 1
    partial = torch.tensor(host.partial_indices).long()
    table[owners(host.partial_offsets), partial] = torch.tensor(host.partial_tiles).long()
    return table.view(grid.batch, grid.heads, grid.blocks_q, grid.blocks_k)
