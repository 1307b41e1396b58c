"""The order of tokens on a grid, such as the pixels of an image or of a video."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.arguments import as_int


class TokenOrder(NamedTuple):
    """A permutation of tokens whose raster order is that of a contiguous tensor.

    Place i holds the token with raster index permutation[i]; the token with raster index r is at
    place inverse[r].
    """

    permutation: Tensor
    inverse: Tensor

    def to(self, device: torch.device | str) -> "TokenOrder":
        """This order on the device of the tensors to be arranged."""
        return TokenOrder(self.permutation.to(device), self.inverse.to(device))

    def arrange(self, x: Tensor, dim: int = 1) -> Tensor:
        """The tokens of dimension `dim`, from raster order to this order. Further tokens, as those
        of a text, stay behind them.
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

    A tile at the end of an axis may be smaller. With a dilation, the tokens whose coordinates are
    equal modulo the dilation come first, tile after tile, then the next ones. tile=None: raster
    order. A tile of 128 tokens, or a multiple, is one block of a mask, or several.
    """
    lengths = as_shape("tile_order()", shape)
    sizes = None if tile is None else per_axis("tile_order(): tile", tile, lengths, least=1)
    dilations = per_axis("tile_order(): dilation", dilation, lengths, least=1)
    if sizes is None:
        return TokenOrder(torch.arange(prod(lengths)), torch.arange(prod(lengths)))
    rank = torch.zeros(prod(lengths), dtype=torch.int64)
    for digit in _digits(lengths, sizes, dilations):
        rank = rank * (int(digit.max()) + 1 if len(digit) else 1) + digit
    permutation = rank.argsort()
    return TokenOrder(permutation, permutation.argsort())


def _digits(
    lengths: tuple[int, ...], tile: tuple[int, ...], dilation: tuple[int, ...]
) -> list[Tensor]:
    """The order as a mixed-radix number of each token in raster order, first digit first."""
    axes = list(zip(coordinates(lengths), tile, dilation, strict=True))
    groups = [at % d for at, _, d in axes]
    tiles = [at // d // size for at, size, d in axes]
    return [*groups, *tiles, *(at // d % size for at, size, d in axes)]


def coordinates(lengths: tuple[int, ...]) -> list[Tensor]:
    """The coordinate of every token in raster order, for each axis."""
    numbers, found = torch.arange(prod(lengths)), []
    for length in reversed(lengths):
        found.append(numbers % length)
        numbers = numbers // length
    return found[::-1]


def as_shape(name: str, shape: Any) -> tuple[int, ...]:
    """The lengths of 1, 2 or 3 axes."""
    if isinstance(shape, (str, bytes)) or not isinstance(shape, Sequence) or len(shape) not in AXES:
        raise ValueError(f"{name}: shape must have 1, 2 or 3 lengths, got {shape!r}")
    return tuple(as_int(f"{name}: a length of shape", length, 1) for length in shape)


def per_axis(name: str, value: Any, shape: tuple[int, ...], least: int) -> tuple[int, ...]:
    """An int for every axis, from one int for all or a sequence."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        value = (value,) * len(shape)
    if len(value) != len(shape):
        raise ValueError(f"{name} must have {len(shape)} values for shape={shape}, got {value!r}")
    return tuple(as_int(name, x, least) for x in value)


AXES = (1, 2, 3)


def _select(x: Tensor, index: Tensor, dim: int) -> Tensor:
    rest = torch.arange(len(index), x.shape[dim], device=index.device)
    return x.index_select(dim, torch.cat([index, rest]) if len(rest) else index)
