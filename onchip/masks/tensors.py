"""Masks that are given as tensors: dense ones, and the lists of a BlockMask."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .bits import BLOCK, WORDS, Bits, pack, unpack
from .blockmask import BlockMask, num_blocks
from .cells import Cells
from .nodes import FULL, PARTIAL, Grid


class Dense(Cells):
    """A bool tensor, as packed words (batch or 1, heads or 1, seqlen_q, key blocks * 4)."""

    def __init__(self, grid: Grid, words: Tensor):
        super().__init__(grid)
        self._words = words.unflatten(-1, (-1, WORDS))

    def compute_bits(self, block_ids: Tensor) -> Bits:
        b, h, i, j = self.grid.split(block_ids)
        if self._words.shape[0] == 1:
            b = torch.zeros_like(b)
        if self._words.shape[1] == 1:
            h = torch.zeros_like(h)
        q = (i[:, None] * BLOCK + torch.arange(BLOCK)).clamp_(max=self.grid.seqlen_q - 1)
        tiles = self._words[b[:, None], h[:, None], q, j[:, None]]
        return Bits(tiles, torch.arange(len(block_ids)))

    def cells(self) -> Tensor:
        cells = unpack(self._words.flatten(-2))[..., : self.grid.seqlen_k]
        return cells.to(self.grid.device)

    def visible(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        planes_b, planes_h = self._words.shape[:2]
        b, h = b[:, None, None] * (planes_b > 1), h[:, None, None] * (planes_h > 1)
        q, k = q[:, :, None], k[:, None, :]
        words = self._words[b, h, q, k // BLOCK, k % BLOCK // 32]
        return (words >> (k % 32) & 1).bool()

    def identity(self) -> list[Tensor | str]:
        return [self._words]


def pack_dense(cells: Tensor) -> Tensor:
    """Bool (..., seqlen_k) to words (..., key blocks * 4) on the CPU, a few rows at a time."""
    seqlen_k = cells.shape[-1]
    rows = cells.reshape(cells.shape[:-1].numel(), seqlen_k)
    pad = num_blocks(seqlen_k) * BLOCK - seqlen_k
    step = max(1, (1 << 22) // max(seqlen_k, 1))
    words = [pack(F.pad(chunk, (0, pad))).cpu() for chunk in rows.split(step)]
    return torch.cat(words).view(*cells.shape[:-1], num_blocks(seqlen_k) * WORDS)


class TracedTensor(Cells):
    """A bool tensor (batch or 1, heads or 1, seqlen_q, seqlen_k) of a graph, not packed."""

    def __init__(self, grid: Grid, visible: Tensor):
        super().__init__(grid)
        self._visible = visible

    def visible(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        planes = self._visible.expand(self.grid[:4])
        return planes[b[:, None, None], h[:, None, None], q[:, :, None], k[:, None, :]]

    def cells(self) -> Tensor:
        return self._visible.to(self.grid.device)


class BuiltMask(Cells):
    """The node of a BlockMask."""

    def __init__(self, mask: BlockMask):
        super().__init__(Grid(*mask.shape, torch.device("cpu")))
        self._bits = mask.host.tiles
        self._table = _table(mask, self.grid)

    def visible(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        b, h, q, k = b[:, None, None], h[:, None, None], q[:, :, None], k[:, None, :]
        tile = self._table[b, h, q // BLOCK, k // BLOCK]
        return (self._bits[tile, q % BLOCK, k % BLOCK // 32] >> (k % 32) & 1).bool()

    def status(self, block_ids: Tensor) -> Tensor:
        tile = self._table.view(-1)[block_ids]
        return torch.where(tile > 1, PARTIAL, tile * FULL).to(torch.uint8)

    def identity(self) -> list[Tensor | str]:
        return [self._table, self._bits]


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
