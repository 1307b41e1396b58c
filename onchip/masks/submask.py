"""Some rows and columns of a mask, without building the whole mask: one rank's part of a mask over
many ranks.
"""

import torch
from torch import Tensor

from .bits import BLOCK
from .blockmask import BlockMask
from .cells import Cells, Dense, Submask
from .mods import Mask
from .nodes import FULL, PARTIAL, Grid, Interval, Join, Node, Not


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

    def status(self, block_ids: Tensor) -> Tensor:
        tile = self._table.view(-1)[block_ids]
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
