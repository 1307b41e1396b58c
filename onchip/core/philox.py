"""Philox-4x32-10 (Salmon et al., 2011): random numbers that depend only on a seed and a position,
so that every kernel, tile size, layout and rank draws the same ones.

key = the 64-bit seed; counter = (column // 4, row, head, batch); lane column % 4 belongs to the
column. In dropout rows are queries and columns keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85
_U32 = 0xFFFFFFFF


class Corner(NamedTuple):
    """The first element of a tile: batch, head, and the positions of its first row and column."""

    batch: int
    head: int
    q: int
    k: int


def draw_tile(seed: Tensor, shape: tuple[int, int, int, int], corner: Corner) -> Tensor:
    """The u32s (in int64) of the tile (batch, heads, rows, columns) at `corner`."""
    batch, heads, rows, columns = shape
    first, skew = divmod(corner.k, 4)
    quads = (skew + columns + 3) // 4
    u32s = draw(
        seed,
        axis(first, quads, 3, seed.device),
        axis(corner.q, rows, 2, seed.device),
        axis(corner.head, heads, 1, seed.device),
        axis(corner.batch, batch, 0, seed.device),
    )
    return torch.stack(u32s, -1).flatten(-2)[..., skew : skew + columns]


def draw(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, ...]:
    """Four u32 (in int64) per broadcast counter."""
    k0, k1 = seed & _U32, (seed >> 32) & _U32
    for _ in range(10):
        hi0, lo0 = _multiply(c0, _ROUND_A)
        hi1, lo1 = _multiply(c2, _ROUND_B)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _WEYL_A) & _U32, (k1 + _WEYL_B) & _U32
    return torch.broadcast_tensors(c0, c1, c2, c3)


def _multiply(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    product = x * factor  # wraps mod 2^64, which leaves both 32-bit halves correct
    return (product >> 32) & _U32, product & _U32


def axis(start: int, length: int, dim: int, device: torch.device) -> Tensor:
    """start, start + 1, ... along dimension `dim` of four, as a part of a counter."""
    shape = [1, 1, 1, 1]
    shape[dim] = length
    return torch.arange(start, start + length, device=device).view(shape)
