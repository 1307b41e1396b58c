"""Masks that are evaluated cell by cell: functions, rectangles, tensors, and selections of them."""

from collections.abc import Callable
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from .bits import BLOCK, WORDS, Bits, pack, unpack
from .blockmask import num_blocks
from .nodes import EMPTY, FULL, Grid, Node

_CELL_BLOCKS_AT_ONCE = 64  # blocks evaluated cell by cell: 1M cells, 8 MB per int64 temporary
_NEAR = 2  # a submask's block is decided by blocks of the whole if it touches at most so many


class Cells(Node):
    """A mask that is evaluated cell by cell by `visible`."""

    def visible(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Bool (n, 128, 128) from b, h (n) and the indices q, k (n, 128), all within range."""
        raise NotImplementedError

    def compute_bits(self, block_ids: Tensor) -> Bits:
        chunks = [self._tiles(chunk) for chunk in block_ids.split(_CELL_BLOCKS_AT_ONCE)]
        return Bits(torch.cat(chunks), torch.arange(len(block_ids)))

    def _tiles(self, block_ids: Tensor) -> Tensor:
        grid, steps = self.grid, torch.arange(BLOCK)
        b, h, i, j = grid.split(block_ids)
        q = (i[:, None] * BLOCK + steps).clamp_(max=grid.seqlen_q - 1)
        k = (j[:, None] * BLOCK + steps).clamp_(max=grid.seqlen_k - 1)
        return pack(self.visible(b, h, q, k)).cpu()


class Mod(Cells):
    """`fn(b, h, q, k)` on scalar index tensors, as FlexAttention calls it."""

    def __init__(self, grid: Grid, fn: Callable):
        super().__init__(grid)
        self._scalar = lambda *at: torch.as_tensor(fn(*at))
        per_key = torch.vmap(self._scalar, in_dims=(None, None, None, 0))
        self._fn = torch.vmap(torch.vmap(per_key, in_dims=(None, None, 0, None)))

    def visible(self, b, h, q, k):
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
    broadcastable index tensors. The rectangles may be smaller, larger or shifted against blocks.
    """

    def __init__(self, grid: Grid, rule: Callable, block_q=BLOCK, block_k=BLOCK, shift=0):
        super().__init__(grid)
        self._rule, self._block_q, self._block_k, self._shift = rule, block_q, block_k, shift

    def visible(self, b, h, q, k):
        b, h = b[:, None, None], h[:, None, None]
        i, j = (q + self._shift) // self._block_q, k // self._block_k
        return self._rule(b, h, i[:, :, None], j[:, None, :]).expand(-1, BLOCK, BLOCK)

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


class Dense(Node):
    """A bool tensor, as packed words (batch or 1, heads or 1, seqlen_q, key blocks * 4)."""

    def __init__(self, grid: Grid, words: Tensor):
        super().__init__(grid)
        self.words = words.unflatten(-1, (-1, WORDS))

    def compute_bits(self, block_ids: Tensor) -> Bits:
        b, h, i, j = self.grid.split(block_ids)
        if self.words.shape[0] == 1:
            b = torch.zeros_like(b)
        if self.words.shape[1] == 1:
            h = torch.zeros_like(h)
        q = (i[:, None] * BLOCK + torch.arange(BLOCK)).clamp_(max=self.grid.seqlen_q - 1)
        tiles = self.words[b[:, None], h[:, None], q, j[:, None]]
        return Bits(tiles, torch.arange(len(block_ids)))

    def cells(self) -> Tensor:
        cells = unpack(self.words.flatten(-2))[..., : self.grid.seqlen_k]
        return cells.to(self.grid.device)

    def visible(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """As `Cells.visible`."""
        plane = (x[:, None, None] * (n > 1) for x, n in zip((b, h), self.words.shape, strict=False))
        k = k[:, None, :]
        words = self.words[(*plane, q[:, :, None], k // BLOCK, k % BLOCK // 32)]
        return (words >> (k % 32) & 1).bool()


class TracedTensor(Node):
    """A bool tensor of a graph, not packed."""

    def __init__(self, grid: Grid, visible: Tensor):
        super().__init__(grid)
        self._visible = visible

    def cells(self) -> Tensor:
        return self._visible.to(self.grid.device)


def pack_dense(cells: Tensor) -> Tensor:
    """Bool (..., seqlen_k) to words (..., key blocks * 4) on the CPU, a few rows at a time."""
    seqlen_k = cells.shape[-1]
    rows = cells.reshape(cells.shape[:-1].numel(), seqlen_k)
    pad = num_blocks(seqlen_k) * BLOCK - seqlen_k
    step = max(1, (1 << 22) // max(seqlen_k, 1))
    words = [pack(F.pad(chunk, (0, pad))).cpu() for chunk in rows.split(step)]
    return torch.cat(words).view(*cells.shape[:-1], num_blocks(seqlen_k) * WORDS)


class Submask(Cells):
    """Rows and columns of a mask that is evaluated cell by cell."""

    def __init__(self, grid: Grid, whole: Cells | Dense, rows: Tensor, cols: Tensor):
        super().__init__(grid)
        self.whole, self._rows, self._cols = whole, rows, cols

    def visible(self, b, h, q, k):
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
