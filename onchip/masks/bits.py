"""Bit tiles: 128 x 128 booleans as (128, 4) int32 words, and operations on them."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128
WORDS = BLOCK // 32

_MASK64 = (1 << 64) - 1


class Bits(NamedTuple):
    """n bit tiles, each distinct one stored once: tile t of the n is `tiles[tile_ids[t]]`."""

    tiles: Tensor  # (distinct, 128, 4) int32
    tile_ids: Tensor  # (n,) int64


def _signed(value: int, width: int) -> int:
    """The integer of `width` bits with the same two's complement pattern."""
    value &= (1 << width) - 1
    return value - (1 << width) if value >> (width - 1) else value


# Eight bools are one (little-endian) int64 of 0 or 1 per byte. Times this constant, byte t is moved
# to bit 56 + t, and no two partial products share a bit, so the top byte is the packed result.
_GATHER = sum(1 << (56 - 7 * t) for t in range(8))

# byte -> its eight bits as the eight bytes of an int64: the inverse table.
_SCATTER = torch.tensor(
    [_signed(sum((byte >> t & 1) << 8 * t for t in range(8)), 64) for byte in range(256)]
)

# _PREFIX[n] has the first n of 128 bits set, so [lo, hi) is _PREFIX[hi] & ~_PREFIX[lo].
_PREFIX = torch.tensor(
    [
        [_signed((((1 << n) - 1) >> 32 * w) & 0xFFFFFFFF, 32) for w in range(WORDS)]
        for n in range(BLOCK + 1)
    ],
    dtype=torch.int32,
)


def pack(cells: Tensor) -> Tensor:
    """Bool (..., 32 n) to int32 (..., n): bit k % 32 of word k // 32 is cell k."""
    octets = cells.contiguous().view(-1).view(torch.int64)
    words = ((octets * _GATHER) >> 56).to(torch.uint8).view(torch.int32)
    return words.view(*cells.shape[:-1], cells.shape[-1] // 32)


def unpack(words: Tensor) -> Tensor:
    """The inverse of `pack`: int32 (..., n) to bool (..., 32 n)."""
    octets = words.contiguous().view(-1).view(torch.uint8)
    cells = _SCATTER.to(words.device).index_select(0, octets.int())
    return cells.view(torch.bool).view(*words.shape[:-1], words.shape[-1] * 32)


def interval_tiles(lo: Tensor, hi: Tensor) -> Tensor:
    """Tiles with the cells [lo, hi) of each row set: two (n, 128) in [0, 128] to (n, 128, 4)."""
    upper = _PREFIX.index_select(0, hi.flatten().int())
    lower = _PREFIX.index_select(0, lo.flatten().int())
    return (upper & ~lower).view(*lo.shape, WORDS)


def constant_tiles() -> Tensor:
    """Two tiles: all zeros and all ones."""
    return torch.tensor([0, -1], dtype=torch.int32).view(2, 1, 1).repeat(1, BLOCK, WORDS)


@cache
def _multipliers(count: int) -> Tensor:
    power, powers = 1, []
    for _ in range(count):
        power = power * 0x9E3779B97F4A7C15 & _MASK64
        powers.append(_signed(power, 64))
    return torch.tensor(powers)


def distinct_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Representatives and inverse of the distinct rows of an int64 matrix (n, w).

    `rows[representatives][inverse]` equals `rows`. Rows are grouped by a 64-bit hash; the groups
    are then compared cell by cell, and after a hash collision an exact (slow) sort takes over.
    """
    count = rows.shape[0]
    # A product keeps the low zeros of its factors: fold the high half down before multiplying.
    hashes = ((rows ^ (rows >> 32 & 0xFFFFFFFF)) * _multipliers(rows.shape[1])).sum(1)
    values, inverse = torch.unique(hashes, return_inverse=True)
    representatives = values.new_empty(values.numel())
    representatives[inverse] = torch.arange(count)
    if torch.equal(rows.index_select(0, representatives[inverse]), rows):
        return representatives, inverse
    values, inverse = torch.unique(rows, dim=0, return_inverse=True)
    representatives = inverse.new_empty(values.shape[0])
    representatives[inverse] = torch.arange(count)
    return representatives, inverse


def distinct_tiles(tiles: Tensor) -> Bits:
    """Store every distinct tile once."""
    if tiles.shape[0] < 2:
        return Bits(tiles, torch.zeros(tiles.shape[0], dtype=torch.int64))
    keep, index = distinct_rows(tiles.reshape(tiles.shape[0], -1).view(torch.int64))
    return Bits(tiles[keep], index)


def distinct_pairs(a: Bits, b: Bits) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs that two lists of n tiles form, each once: left tiles, right tiles, index (n,)."""
    width = len(b.tiles)
    pairs, index = torch.unique(a.tile_ids * width + b.tile_ids, return_inverse=True)
    return a.tiles[pairs // width], b.tiles[pairs % width], index


def combine(op: Callable[[Tensor, Tensor], Tensor], a: Bits, b: Bits) -> Bits:
    """`op` on two lists of n tiles, computed once per distinct pair."""
    left, right, index = distinct_pairs(a, b)
    return Bits(op(left, right), index)
