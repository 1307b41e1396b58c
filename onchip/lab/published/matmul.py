"""Blocked matrix multiplication: 2 m n k / sqrt(M / 3) elements of the factors, and the result.
(Hong and Kung, 1981: no order of the same products moves fewer than order m n k / sqrt(M).)
"""

from collections.abc import Callable

import torch
from torch import Tensor

from onchip.core.backend import accumulator_dtype
from onchip.kernels.tiles import paper_product_tiles, paper_sram

from .call import cuts
from .ledger import current
from .memory import Array, Span, Tile, accumulate

Change = Callable[[Tile, Span, Span], Tile]  # of a tile at (rows, columns)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a (..., m, k) @ b (..., k, n) in tiles, sums in accumulator precision; counted in the open
    ledger as `a`, `b` and `c`.
    """
    wide, book = accumulator_dtype(a.dtype), current()
    c = a.new_empty(*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    factors = Array(book, "a", a, wide), Array(book, "b", b, wide)
    product(*factors, Array(book, "c", c, wide), sram=paper_sram(book.sram, a.dtype.itemsize))
    return c


def product(
    a: Array,
    b: Array,
    c: Array,
    sram: int,
    of_a: Change | None = None,
    of_c: Change | None = None,
) -> None:
    """c = of_c(of_a(a) @ b); of_a and of_c transform tiles on the chip."""
    tiles = paper_product_tiles(sram, a.shape[-1])
    inner = cuts(a.shape[-1], tiles.tile_k, False)
    for i in cuts(a.shape[-2], tiles.tile_m, False):
        for j in cuts(b.shape[-1], tiles.tile_n, False):
            sums = c.zeros(i, j)
            for t in inner:
                a_it = a.load(i, t)
                a_it = a_it if of_a is None else of_a(a_it, i, t)
                sums = accumulate(sums, a_it, b.load(t, j))
            c.store(sums if of_c is None else of_c(sums, i, j), i, j)
