"""Masks that depend on the distance between query and key alone: constant along diagonals."""

from collections.abc import Callable
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from .bits import BLOCK, Bits, distinct_rows, pack
from .cells import Cells
from .nodes import Grid


class Diagonals(Cells):
    """Query q sees key k iff rule(p - k); `rule` works on an integer tensor of distances.

    In closed form: the rule is evaluated once per distance, not per cell, and only blocks with a
    visible distance are listed.
    """

    def __init__(self, grid: Grid, rule: Callable[[Tensor], Tensor]):
        super().__init__(grid)
        self._rule = rule

    def visible(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self._rule(q[:, :, None] + self.grid.offset - k[:, None, :])

    def cells(self) -> Tensor:
        grid = self.grid
        q, k = (torch.arange(n, device=grid.device) for n in (grid.seqlen_q, grid.seqlen_k))
        return self._rule(q[:, None] + grid.offset - k)[None, None]

    def identity(self) -> list[Tensor | str]:
        """The rule at all distances within the lengths."""
        seqlen_q, seqlen_k = self.grid[2:4]
        return [self._rule(torch.arange(seqlen_q + seqlen_k)[1:] + self.grid.offset - seqlen_k)]

    @cached_property
    def _hits(self) -> Tensor:
        """The rule at every distance that occurs in a block, ascending. Entry (i - j + key blocks)
        * 128 is the distance in the first cell of block (i, j).
        """
        grid = self.grid
        entries = torch.arange((grid.blocks_q + grid.blocks_k) * BLOCK)
        return self._rule(entries + grid.offset - grid.blocks_k * BLOCK)

    @cached_property
    def _counts(self) -> Tensor:
        """Entry n is the number of visible distances among the first n of `_hits`."""
        return F.pad(self._hits.cumsum(0), (1, 0))

    def candidates(self) -> Tensor:
        """The blocks on every diagonal of blocks that has a visible distance, row by row."""
        grid = self.grid
        behind = torch.arange(grid.blocks_q - 1, -grid.blocks_k, -1)  # i - j: j ascends in a row
        entry = (behind + grid.blocks_k) * BLOCK
        behind = behind[self._counts[entry + BLOCK] > self._counts[entry - BLOCK + 1]]
        rows = torch.arange(grid.batch * grid.heads * grid.blocks_q)[:, None]
        cols = rows % grid.blocks_q - behind
        return (rows * grid.blocks_k + cols)[(cols >= 0) & (cols < grid.blocks_k)]

    def status(self, block_ids: Tensor) -> Tensor:
        """Exact: a block has all the distances from its upper right to its lower left cell."""
        grid = self.grid
        _, _, i, j = grid.split(block_ids)
        height = (grid.seqlen_q - i * BLOCK).clamp_(max=BLOCK)
        width = (grid.seqlen_k - j * BLOCK).clamp_(max=BLOCK)
        entry = (i - j + grid.blocks_k) * BLOCK
        count = self._counts[entry + height] - self._counts[entry - width + 1]
        return (count > 0).to(torch.uint8) + (count == height + width - 1)

    def compute_bits(self, block_ids: Tensor) -> Bits:
        """One tile for all blocks with the same visible distances."""
        _, _, i, j = self.grid.split(block_ids)
        diagonals, index = torch.unique(i - j + self.grid.blocks_k, return_inverse=True)
        around = self._hits[diagonals[:, None] * BLOCK + torch.arange(1 - BLOCK, BLOCK)]
        keep, same = distinct_rows(F.pad(around, (0, 1)).view(torch.int64))
        # The cell in row r and column c has entry 127 + r - c of `around`.
        return Bits(pack(around[keep].unfold(1, BLOCK, 1).flip(-1)), same[index])
