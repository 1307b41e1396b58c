"""The softmax of vectors x (..., n) in HBM: in three passes, in two, and in one together with the
weighted sum. Counted in the open ledger as `x`, `v` and `y`.
"""

import torch
from torch import Tensor

from onchip.core.backend import accumulator_dtype
from onchip.kernels.tiles import paper_sram

from .call import cuts
from .ledger import current
from .memory import Array, Span, Tile, accumulate

ROW = 0, 1  # each vector is the one row of an array


def three_pass(x: Tensor) -> Tensor:
    """The maximum, the sum, the quotients: safe, and x is read three times."""
    source, y, tiles = _arrays(x)
    m, l = _start(source)
    for t in tiles:
        m = m.maximum(source.load(ROW, t).rowmax())
    for t in tiles:
        l = l + source.load(ROW, t).below(m).exp().rowsum()
    return _quotients(source, y, tiles, (m, l))


def two_pass(x: Tensor) -> Tensor:
    """Online (Milakov and Gimelshein, arXiv 1805.02867): maximum and sum in one pass, then the
    quotients.
    """
    source, y, tiles = _arrays(x)
    m, l = _start(source)
    for t in tiles:
        m, l, _, _ = _fold(source.load(ROW, t), m, l)
    return _quotients(source, y, tiles, (m, l))


def one_pass(x: Tensor, v: Tensor) -> Tensor:
    """softmax(x) @ v, (..., d), for v (..., n, d): the division is only needed at the end, so that
    x and v are read once. The softmax alone cannot be done in one pass: its quotients need the last
    sum.
    """
    source, _, tiles = _arrays(x, columns=1 + v.shape[-1])
    values = Array(source.book, "v", v, source.wide)
    out = Array(source.book, "y", v.new_empty(*x.shape[:-1], 1, v.shape[-1]), source.wide)
    (m, l), acc = _start(source), out.zeros(ROW)
    for t in tiles:
        m, l, alpha, p = _fold(source.load(ROW, t), m, l)
        acc = accumulate(acc * alpha, p, values.load(t))
    out.store(acc.over(l), ROW)
    return out.data[..., 0, :]


def _fold(x_t: Tile, m: Tile, l: Tile) -> tuple[Tile, Tile, Tile, Tile]:
    m_new = m.maximum(x_t.rowmax())
    alpha, p = m.below(m_new).exp(), x_t.below(m_new).exp()
    return m_new, l * alpha + p.rowsum(), alpha, p


def _quotients(source: Array, y: Array, tiles: list[Span], state: tuple[Tile, Tile]) -> Tensor:
    m, l = state
    for t in tiles:
        y.store(source.load(ROW, t).below(m).exp().over(l), ROW, t)
    return y.data[..., 0, :]


def _arrays(x: Tensor, columns: int = 1) -> tuple[Array, Array, list[Span]]:
    """x, its softmax, and tiles of which one fits the chip, with so many numbers per entry."""
    wide, book = accumulator_dtype(x.dtype), current()
    x = x[..., None, :]
    tile = max(1, paper_sram(book.sram, x.dtype.itemsize) // columns)
    y = Array(book, "y", torch.empty_like(x), wide)
    return Array(book, "x", x, wide), y, cuts(x.shape[-1], tile, False)


def _start(source: Array) -> tuple[Tile, Tile]:
    zero = source.zeros(ROW, (0, 1))
    return zero.select(lambda x: x - torch.inf), zero
