"""Masks of well-known papers. p is the position of a query among the keys (see `mods`). Blocks have
128 tokens. A query with p < 0 (more queries than keys) sees nothing under a block rule.
"""

from functools import partial

import torch
from torch import Tensor

from .bits import BLOCK
from .cells import BlockPattern
from .mods import Mask, causal, positions, window
from .nodes import Grid, Interval


def block_local(block: int = BLOCK) -> Mask:
    """Local blocks: query q sees key k iff p // block == k // block (block in tokens)."""
    _check_at_least(1, block=block)
    return Mask(f"block_local({block})", partial(_block_band, block, 0))


def longformer(window_size: int, global_tokens: int = 0) -> Mask:
    """Longformer (Beltagy et al. 2020): a window, and global tokens that see and are seen by all.

    Query q sees key k iff |p - k| <= window_size, or 0 <= p < global_tokens, or k < global_tokens.
    """
    _check_at_least(0, window_size=window_size, global_tokens=global_tokens)
    return window(window_size, window_size) | _global_tokens(global_tokens)


def bigbird(
    window_blocks: int = 1, random_blocks: int = 3, global_blocks: int = 1, seed: int = 0
) -> Mask:
    """BigBird (Zaheer et al. 2020) in blocks of 128 tokens.

    With i = p // 128 and j = k // 128, query q sees key k iff |i - j| <= window_blocks, or i or j
    is below global_blocks, or j is one of the random_blocks different key blocks drawn for row i.
    The draw depends on the seed and on the number of key blocks alone, and is the same for every
    batch entry and head.
    """
    _check_at_least(
        0, window_blocks=window_blocks, random_blocks=random_blocks, global_blocks=global_blocks
    )
    near = Mask(f"near({window_blocks})", partial(_block_band, BLOCK, window_blocks))
    drawn = Mask(f"random({random_blocks}, seed={seed})", partial(_random, random_blocks, seed))
    return near | _global_tokens(global_blocks * BLOCK) | drawn


def strided(stride: int) -> Mask:
    """Strided pattern of the Sparse Transformer (Child et al. 2019), in blocks of 128 tokens.

    With the distance d = p // 128 - k // 128, query q sees key k iff k <= p and (d < stride or d is
    a multiple of stride): the last `stride` blocks, and every stride-th block before them.
    """
    _check_at_least(1, stride=stride)
    return causal() & _blocks(f"strided({stride})", partial(_is_strided, stride))


def _is_strided(stride: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= 0) & ((i - j < stride) | ((i - j) % stride == 0))


def butterfly() -> Mask:
    """Flat block butterfly, the sparsity pattern of block-sparse FlashAttention (Dao et al. 2022).

    With i = p // 128 and j = k // 128, query q sees key k iff i = j or i and j differ in exactly
    one binary digit: 1 + log2(blocks) blocks per row.
    """
    return _blocks("butterfly()", _is_butterfly)


def _is_butterfly(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    digits = i ^ j
    return (i >= 0) & (digits & (digits - 1) == 0)


def _blocks(text: str, rule) -> Mask:
    """rule(b, h, p // 128, k // 128)."""
    return Mask(text, partial(_pattern, rule))


def _pattern(rule, grid: Grid) -> BlockPattern:
    return BlockPattern(grid, rule, shift=grid.offset)


def _block_band(block: int, reach: int, grid: Grid) -> Interval:
    """|p // block - k // block| <= reach, for p >= 0."""
    p, block, reach = positions(grid), min(block, grid.seqlen_k + 1), min(reach, grid.blocks_k)
    row = torch.div(p, block, rounding_mode="floor")
    return Interval(grid, (row - reach) * block, ((row + reach + 1) * block).masked_fill(p < 0, 0))


def _global_tokens(count: int) -> Mask:
    """0 <= p < count or k < count."""
    seeing = Mask(f"queries(< {count})", partial(_global_queries, count))
    return seeing | Mask(f"keys(< {count})", partial(_global_keys, count))


def _global_queries(count: int, grid: Grid) -> Interval:
    p = positions(grid)
    return Interval(grid, 0, ((p >= 0) & (p < min(count, grid.seqlen_k))) * grid.seqlen_k)


def _global_keys(count: int, grid: Grid) -> Interval:
    return Interval(grid, 0, min(count, grid.seqlen_k))


def _random(count: int, seed: int, grid: Grid) -> BlockPattern:
    drawn = _draw(grid.blocks_k, min(count, grid.blocks_k), seed)
    return BlockPattern(grid, partial(_is_drawn, drawn), shift=grid.offset)


def _is_drawn(drawn: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return ((i >= 0)[..., None] & (drawn[i.clamp(min=0)] == j[..., None])).any(-1)


def _draw(blocks: int, count: int, seed: int) -> Tensor:
    """For each of `blocks` rows, `count` different numbers below `blocks`: (blocks, count)."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.empty(blocks, 0, dtype=torch.int64)
    for already in range(count):
        pick = torch.randint(blocks - already, (blocks,), generator=generator)
        for taken in drawn.sort(1).values.unbind(1):  # skip the numbers already taken
            pick += pick >= taken
        drawn = torch.cat([drawn, pick[:, None]], 1)
    return drawn


def _check_at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
