"""Masks that are evaluated cell by cell: functions of a cell, and rectangles of cells."""

from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from .bits import BLOCK, Bits, pack
from .blockmask import divide
from .nodes import EMPTY, FULL, Grid, Node

_CELL_BLOCKS_AT_ONCE = 64  # blocks evaluated cell by cell: 1M cells, 8 MB per int64 temporary
_NEAR = 2  # a submask's block is decided by blocks of the whole if it touches at most so many
# The identity of a mask has all its cells if it has at most so many blocks of 128 x 128 cells. A
# larger one is sampled in that many random rectangles of 128 queries and 128 keys.
_BLOCKS_OF_IDENTITY = 16


class Cells(Node):
    """A mask that is evaluated cell by cell by `visible`: all that a node of this kind defines."""

    @abstractmethod
    def visible(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Bool (n, rows, cols) from the planes b, h (n) and the indices q (n, rows) and k (n, cols)
        of cells, all within range.
        """

    def compute_bits(self, block_ids: Tensor) -> Bits:
        chunks = [self._tiles(chunk) for chunk in block_ids.split(_CELL_BLOCKS_AT_ONCE)]
        return Bits(torch.cat(chunks), torch.arange(len(block_ids)))

    def _tiles(self, block_ids: Tensor) -> Tensor:
        """One tile per block. Rows and columns past the lengths repeat the last query and key, so
        the tile of such a ragged block must not stand for another block, even one in which the rule
        is the same.
        """
        return pack(self.visible(*self._cells_of(block_ids))).cpu()

    def _cells_of(self, block_ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The arguments of `visible` for whole blocks."""
        grid, steps = self.grid, torch.arange(BLOCK)
        b, h, i, j = grid.split(block_ids)
        q = (i[:, None] * BLOCK + steps).clamp_(max=grid.seqlen_q - 1)
        k = (j[:, None] * BLOCK + steps).clamp_(max=grid.seqlen_k - 1)
        return b, h, q, k

    def cells(self) -> Tensor:
        grid = self.grid
        planes = torch.arange(grid.batch * grid.heads)
        q, k = (torch.arange(n).expand(len(planes), n) for n in (grid.seqlen_q, grid.seqlen_k))
        seen = self.visible(*divide(planes, grid.heads), q, k)
        return seen.view(grid[:4]).to(grid.device)

    def submask(self, rows: Tensor, cols: Tensor) -> "Submask":
        return Submask(self._subgrid(rows, cols), self, rows, cols)

    def identity(self) -> list[Tensor | str]:
        """The cells; of a large mask a sample, the same on all ranks."""
        grid = self.grid
        if not grid.num_blocks:
            return [torch.empty(0, dtype=torch.bool)]
        if grid.num_blocks <= _BLOCKS_OF_IDENTITY:
            return [self.visible(*self._cells_of(torch.arange(grid.num_blocks))).cpu()]
        return [self.visible(*_draw_cells(grid)).cpu()]


def _draw_cells(grid: Grid) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(batch, head, queries, keys) of random rectangles. Half of them are blocks on the diagonal,
    where most masks end; half have queries and keys from anywhere.
    """
    draw, half = torch.Generator().manual_seed(0), _BLOCKS_OF_IDENTITY // 2
    some = lambda end, *shape: torch.randint(end, shape, generator=draw)
    b, h = some(grid.batch, _BLOCKS_OF_IDENTITY), some(grid.heads, _BLOCKS_OF_IDENTITY)
    start, steps = some(max(1, grid.seqlen_q - BLOCK), half, 1), torch.arange(BLOCK)
    near = (start + grid.offset).clamp(min=0) + steps
    q = torch.cat([start + steps, some(grid.seqlen_q, half, BLOCK)])
    k = torch.cat([near, some(grid.seqlen_k, half, BLOCK)])
    return b, h, q.clamp(max=grid.seqlen_q - 1), k.clamp(max=grid.seqlen_k - 1)


class Submask(Cells):
    """Rows and columns of a mask that is evaluated cell by cell."""

    whole: Cells

    def __init__(self, grid: Grid, whole: Cells, rows: Tensor, cols: Tensor):
        super().__init__(grid)
        self.whole, self._rows, self._cols = whole, rows, cols

    def visible(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.whole.visible(b, h, self._rows[q], self._cols[k])

    def status(self, block_ids: Tensor) -> Tensor:
        """Decided by the blocks of the whole if a block touches few of them, else PARTIAL."""
        result = super().status(block_ids)
        b, h, i, j = self.grid.split(block_ids)
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


class Mod(Cells):
    """`fn(b, h, q, k)` on scalar index tensors, as FlexAttention calls it."""

    def __init__(self, grid: Grid, fn: Callable[..., Tensor]):
        super().__init__(grid)
        self._scalar = lambda *at: torch.as_tensor(fn(*at))
        per_key = torch.vmap(self._scalar, in_dims=(None, None, None, 0))
        self._fn = torch.vmap(torch.vmap(per_key, in_dims=(None, None, 0, None)))

    def visible(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self._fn(*(x.to(self.grid.device) for x in (b, h, q, k)))

    def cells(self) -> Tensor:
        fn = self._scalar
        for axis in reversed(range(4)):
            fn = torch.vmap(fn, in_dims=tuple(0 if i == axis else None for i in range(4)))
        at = (torch.arange(n, device=self.grid.device) for n in self.grid[:4])
        cells = fn(*at)
        # vmap expands dimensions that do not depend on an index: undo it.
        cells = cells if cells.stride(0) else cells[:1]
        return cells if cells.stride(1) else cells[:, :1]


class BlockPattern(Cells):
    """Rectangles of block_q x block_k cells, each entirely visible or entirely hidden.

    Cell (q, k) is visible iff rule(b, h, (q + shift) // block_q, k // block_k); `rule` works on
    broadcastable index tensors.

    Meant for rectangles of 128 x 128 cells or larger, which may be shifted against blocks: `status`
    calls the rule once for each rectangle that a block touches, at most 4 times. Smaller ones are
    exact but slow: 32 x 32 takes 16 to 25 calls, 1 x 1 16,384. A rule of single cells is a `Mod`.
    """

    def __init__(
        self,
        grid: Grid,
        rule: Callable[..., Tensor],
        block_q: int = BLOCK,
        block_k: int = BLOCK,
        shift: int = 0,
    ):
        super().__init__(grid)
        self._rule, self._block_q, self._block_k, self._shift = rule, block_q, block_k, shift

    def visible(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        b, h = b[:, None, None], h[:, None, None]
        i, j = (q + self._shift) // self._block_q, k // self._block_k
        return self._rule(b, h, i[:, :, None], j[:, None, :]).expand(len(b), q.shape[1], k.shape[1])

    def cells(self) -> Tensor:
        b, h, q, k = (
            torch.arange(n).view([-1 if i == axis else 1 for i in range(4)])
            for axis, n in enumerate(self.grid[:4])
        )
        i, j = (q + self._shift) // self._block_q, k // self._block_k
        return self._rule(b, h, i, j).to(self.grid.device)

    def status(self, block_ids: Tensor) -> Tensor:
        grid = self.grid
        b, h, i, j = grid.split(block_ids)
        rows = _touched(i * BLOCK, grid.seqlen_q, self._shift, self._block_q)
        cols = _touched(j * BLOCK, grid.seqlen_k, 0, self._block_k)
        some = torch.zeros(len(block_ids), dtype=torch.bool)
        all_ = torch.ones(len(block_ids), dtype=torch.bool)
        for row in rows:
            for col in cols:
                seen = self._rule(b, h, row, col)
                some, all_ = some | seen, all_ & seen
        return some.to(torch.uint8) + all_


def _touched(start: Tensor, seqlen: int, shift: int, size: int) -> list[Tensor]:
    """The rectangles that each block touches along one axis (the last one repeats)."""
    first = (start + shift) // size
    last = ((start + BLOCK - 1).clamp_(max=seqlen - 1) + shift) // size
    most = int((last - first).max()) + 1 if len(start) else 0
    return [torch.minimum(first + step, last) for step in range(most)]
