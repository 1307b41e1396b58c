"""The two levels of memory. An Array is in HBM and is accessed only by load and store; a Tile is on
the chip and counts its own arithmetic. So a ledger always matches the code that it measures.

Tensors are (..., rows, columns); leading dimensions are batch and heads, which all do the same.
"""

from collections.abc import Callable
from typing import Union

import torch
from torch import Tensor

from .ledger import Ledger

Span = tuple[int, int]
Number = Union["Tile", float]


class Tile:
    """A tensor on the chip, in accumulator precision."""

    x: Tensor
    book: Ledger

    def __init__(self, x: Tensor, book: Ledger):
        self.x, self.book = x, book

    def __matmul__(self, other: "Tile") -> "Tile":
        y = self.x @ other.x
        self.book.flops += 2 * y.numel() * self.x.shape[-1]
        return Tile(y, self.book)

    def __add__(self, other: Number) -> "Tile":
        return self.count(self.x + _value(other))

    def __sub__(self, other: Number) -> "Tile":
        return self.count(self.x - _value(other))

    def __mul__(self, other: Number) -> "Tile":
        return self.count(self.x * _value(other))

    def __truediv__(self, other: Number) -> "Tile":
        return self.count(self.x / _value(other))

    def exp(self) -> "Tile":
        self.book.exps += self.x.numel()
        return Tile(self.x.exp(), self.book)

    def log(self) -> "Tile":
        return self.count(self.x.log())

    def maximum(self, other: "Tile") -> "Tile":
        return self.count(torch.maximum(self.x, other.x))

    def rowmax(self) -> "Tile":
        self.book.other_ops += self.x.numel()
        return Tile(self.x.amax(-1, keepdim=True), self.book)

    def rowsum(self) -> "Tile":
        self.book.other_ops += self.x.numel()
        return Tile(self.x.sum(-1, keepdim=True), self.book)

    def below(self, m: "Tile") -> "Tile":
        """self - m, with m = -inf (a row that saw no key) replaced by 0: no NaN."""
        return self.count(self.x - m.x.masked_fill(m.x == -torch.inf, 0.0))

    def over(self, l: "Tile") -> "Tile":
        """self / l, with 0 / 0 = 0 for rows that saw no key."""
        return self.count(self.x / l.x.masked_fill(l.x == 0, 1.0))

    def select(self, choose: Callable[[Tensor], Tensor]) -> "Tile":
        """Masking and dropout."""
        return Tile(choose(self.x), self.book)

    @property
    def T(self) -> "Tile":
        return Tile(self.x.mT, self.book)

    def count(self, y: Tensor) -> "Tile":
        """y, counted as one operation per number."""
        self.book.other_ops += y.numel()
        return Tile(y, self.book)


def accumulate(acc: Tile, a: Tile, b: Tile) -> Tile:
    """acc + a @ b: the addition is part of the product, as in a tensor core."""
    return Tile(acc.x + (a @ b).x, acc.book)


def _value(x: Number) -> Tensor | float:
    return x.x if isinstance(x, Tile) else x


class Array:
    """A tensor in HBM, under its name in the ledger."""

    book: Ledger
    name: str
    data: Tensor
    wide: torch.dtype

    def __init__(self, book: Ledger, name: str, data: Tensor, wide: torch.dtype | None = None):
        self.book, self.name, self.data = book, name, data
        self.wide = wide or data.dtype

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    @property
    def T(self) -> "Array":
        return Array(self.book, self.name, self.data.mT, self.wide)

    def load(self, rows: Span, columns: Span | None = None) -> Tile:
        part = self._part(rows, columns)
        self.book.reads[self.name] += part.numel() * part.element_size()
        return Tile(part.to(self.wide), self.book)

    def store(self, tile: Tile, rows: Span, columns: Span | None = None) -> None:
        part = self._part(rows, columns)
        self.book.writes[self.name] += part.numel() * part.element_size()
        part.copy_(tile.x)

    def fill(self, value: float) -> "Array":
        """Initialise in HBM: counted as a write, under a separate name."""
        self.book.writes[f"{self.name}.init"] += self.data.numel() * self.data.element_size()
        self.data.fill_(value)
        return self

    def zeros(self, rows: Span, columns: Span | None = None) -> Tile:
        """Zeros on the chip, shaped like this part."""
        return Tile(torch.zeros_like(self._part(rows, columns), dtype=self.wide), self.book)

    def _part(self, rows: Span, columns: Span | None) -> Tensor:
        part = self.data[..., rows[0] : rows[1], :]
        return part if columns is None else part[..., columns[0] : columns[1]]
