"""The order of tokens on a grid, such as the pixels of an image or of a video."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.arguments import as_int

_NUM_AXES = (1, 2, 3)


class TokenOrder(NamedTuple):
    """A permutation of tokens. Raster order is the order of a contiguous tensor.

    Place i holds the token with raster index permutation[i]; the token with raster index r is at
    place inverse[r].
    """

    permutation: Tensor
    inverse: Tensor

    def to(self, device: torch.device | str) -> "TokenOrder":
        """This order on the device of the tensors to be arranged."""
        return TokenOrder(self.permutation.to(device), self.inverse.to(device))

    def arrange(self, x: Tensor, dim: int = 1) -> Tensor:
        """The tokens of dimension `dim`, from raster order to this order. Further tokens,
        such as a text, stay behind them.
        """
        return _select(x, self.permutation, dim)

    def restore(self, x: Tensor, dim: int = 1) -> Tensor:
        """The inverse of `arrange`."""
        return _select(x, self.inverse, dim)


def tile_order(
    shape: Sequence[int],
    tile: int | Sequence[int] | None = None,
    dilation: int | Sequence[int] = 1,
) -> TokenOrder:
    """Tokens tile after tile, in raster order within each tile; tiles are in raster order too.

    A tile at the end of an axis may be smaller. With a dilation, tokens with equal coordinates
    modulo the dilation follow one another, tile after tile. tile=None: raster
    order. A tile of 128 tokens, or a multiple, is one block of a mask, or several.
    """
    lengths = as_shape("tile_order()", shape)
    sizes = None if tile is None else per_axis("tile_order(): tile", tile, lengths, least=1)
    dilations = per_axis("tile_order(): dilation", dilation, lengths, least=1)
    if sizes is None:
        return TokenOrder(torch.arange(prod(lengths)), torch.arange(prod(lengths)))
    rank = torch.zeros(prod(lengths), dtype=torch.int64)
    for digit, base in _digits(lengths, sizes, dilations):
        rank = rank * base + digit
    permutation = rank.argsort()
    return TokenOrder(permutation, permutation.argsort())


def _digits(
    lengths: tuple[int, ...], tile: tuple[int, ...], dilation: tuple[int, ...]
) -> list[tuple[Tensor, int]]:
    """The place of each token as a mixed-radix number, first digit first, each with its base."""
    tile, dilation = (tuple(map(min, x, lengths)) for x in (tile, dilation))  # no overflow
    axes = list(zip(coordinates(lengths), lengths, tile, dilation, strict=True))
    groups = [(x % d, d) for x, _, _, d in axes]
    tiles = [(x // d // size, length) for x, length, size, d in axes]
    return [*groups, *tiles, *((x // d % size, size) for x, _, size, d in axes)]


def coordinates(lengths: tuple[int, ...]) -> list[Tensor]:
    """The coordinate of every token in raster order, for each axis."""
    numbers, found = torch.arange(prod(lengths)), []
    for length in reversed(lengths):
        found.append(numbers % length)
        numbers = numbers // length
    return found[::-1]


def as_shape(name: str, shape: Any) -> tuple[int, ...]:
    """The lengths of 1, 2 or 3 axes."""
    if not isinstance(shape, Sequence) or len(shape) not in _NUM_AXES:
        raise ValueError(f"{name}: shape must have 1, 2 or 3 lengths, got {shape!r}")
    return tuple(as_int(f"{name}: a length of shape", length, 1) for length in shape)


def per_axis(name: str, value: Any, shape: tuple[int, ...], least: int) -> tuple[int, ...]:
    """An int for every axis, from one int for all or a sequence."""
    value = value if isinstance(value, Sequence) else (value,) * len(shape)
    if len(value) != len(shape):
        raise ValueError(f"{name} must have {len(shape)} values for shape={shape}, got {value!r}")
    return tuple(as_int(name, x, least) for x in value)


def _select(x: Tensor, index: Tensor, dim: int) -> Tensor:
    if x.shape[dim] < len(index):
        raise ValueError(f"an order of {len(index)} tokens does not fit {x.shape[dim]} tokens")
    rest = torch.arange(len(index), x.shape[dim], device=index.device)
    return x.index_select(dim, torch.cat([index, rest]) if len(rest) else index)
