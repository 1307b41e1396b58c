"""Dropout by Philox-4x32-10. The mask depends only on positions, so that every kernel, tile size
and rank draws the same mask.

key = the 64-bit seed; counter = (k // 4, q, head, batch); lane k % 4 belongs to key k. A
probability is kept iff its u32 < round((1 - p) 2^32).
"""

from typing import NamedTuple

import torch
from torch import Tensor

_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_WEYL_A, _WEYL_B = 0x9E3779B9, 0xBB67AE85
_U32 = 0xFFFFFFFF


class Corner(NamedTuple):
    """The first element of a tile of probabilities: batch, head, and the positions of its first
    query and key.
    """

    batch: int
    head: int
    q: int
    k: int


def keep(
    seed: Tensor, shape: tuple[int, int, int, int], corner: Corner, dropout_p: float
) -> Tensor:
    """bool (batch, heads, rows, keys): which probabilities of the tile at `corner` survive."""
    batch, heads, rows, keys = shape
    first, skew = divmod(corner.k, 4)
    quads = (skew + keys + 3) // 4
    u32s = draw(
        seed,
        _axis(first, quads, 3, seed.device),
        _axis(corner.q, rows, 2, seed.device),
        _axis(corner.head, heads, 1, seed.device),
        _axis(corner.batch, batch, 0, seed.device),
    )
    lanes = torch.stack(u32s, -1).flatten(-2)[..., skew : skew + keys]
    return lanes < round((1.0 - dropout_p) * 2**32)


def keep_at(
    seed: Tensor,
    shape: tuple[int, int, int, int],
    corner: Corner,
    places: tuple[Tensor, Tensor],
    dropout_p: float,
) -> Tensor:
    """The same for queries and keys at given positions: `places` are the tile's rows of
    Tensors.positions_q and its keys of positions_k. Of the corner only batch and head are used.
    """
    batch, heads, rows, keys = shape
    (q, sequence), k = places[0].long(), places[1].long()
    u32s = draw(
        seed,
        k.view(1, 1, 1, keys) // 4,
        q.view(1, 1, rows, 1),
        _axis(corner.head, heads, 1, seed.device),
        _axis(corner.batch, batch, 0, seed.device) + sequence.view(1, 1, rows, 1),
    )
    lane, u32 = k % 4, torch.empty(shape, dtype=torch.int64, device=seed.device)
    for i, of_lane in enumerate(u32s):
        u32 = torch.where(lane == i, of_lane, u32)
    return u32 < round((1.0 - dropout_p) * 2**32)


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


def _axis(start: int, length: int, dim: int, device: torch.device) -> Tensor:
    shape = [1, 1, 1, 1]
    shape[dim] = length
    return torch.arange(start, start + length, device=device).view(shape)
