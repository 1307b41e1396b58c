"""Masks of well-known papers. p is the position of a query among the keys (see `mods`). Blocks have
128 tokens. A query with p < 0 (more queries than keys) sees nothing under a block rule.

The sizes of a preset may be SymInts, variables of a compiled function: `as_int` checks them, and
`Mask` prints them. They may be larger than any length: a preset clamps them to its grid.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from onchip.core.arguments import as_int

from . import mods
from .bits import BLOCK
from .cells import BlockPattern
from .diagonals import Diagonals
from .mods import Mask, positions
from .nodes import Grid, Interval

_LEAST_SEED = -(2**63)  # of torch.Generator


def block_local(block: int = BLOCK) -> Mask:
    """Local blocks: query q sees key k iff p // block == k // block (block in tokens). `& causal()`
    makes the chunked attention of Llama 4.
    """
    block = as_int("block_local(): block", block, 1)
    return Mask("block_local({})", (block,), partial(_block_band, block, 0))


def longformer(window_size: int, global_tokens: int = 0) -> Mask:
    """Longformer (Beltagy et al. 2020): a window, and global tokens that see and are seen by all.

    Query q sees key k iff |p - k| <= window_size, or 0 <= p < global_tokens, or k < global_tokens.
    """
    window_size = as_int("longformer(): window_size", window_size)
    global_tokens = as_int("longformer(): global_tokens", global_tokens)
    return mods.window(window_size, window_size) | _global_tokens(global_tokens)


def dilated(window_size: int, dilation: int) -> Mask:
    """Dilated sliding window (Longformer, Beltagy et al. 2020; NATTEN, Hassani and Shi 2022).

    Query q sees key k iff |p - k| <= window_size * dilation and p - k is a multiple of dilation:
    itself and, on each side, every dilation-th key, window_size of them. `& causal()` leaves the
    keys before it.
    """
    window_size = as_int("dilated(): window_size", window_size)
    dilation = as_int("dilated(): dilation", dilation, 1)
    sizes = window_size, dilation
    return Mask("dilated({}, {})", sizes, partial(_dilated, *sizes))


def _dilated(window_size: int, dilation: int, grid: Grid) -> Diagonals:
    most = grid.seqlen_q + grid.seqlen_k  # beyond any distance
    rule = partial(_is_dilated, min(window_size * dilation, most), min(dilation, most))
    return Diagonals(grid, rule)


def _is_dilated(reach: int, dilation: int, distance: Tensor) -> Tensor:
    return (distance.abs() <= reach) & (distance % dilation == 0)


def bigbird(
    window_blocks: int = 1, random_blocks: int = 3, global_blocks: int = 1, seed: int = 0
) -> Mask:
    """BigBird (Zaheer et al. 2020) in blocks of 128 tokens.

    With i = p // 128 and j = k // 128, query q sees key k iff |i - j| <= window_blocks, or i or j
    is below global_blocks, or j is one of the random_blocks different key blocks drawn for row i.
    The draw depends on the seed and on the number of key blocks alone, and is the same for every
    batch entry and head.
    """
    window_blocks = as_int("bigbird(): window_blocks", window_blocks)
    random_blocks = as_int("bigbird(): random_blocks", random_blocks)
    global_blocks = as_int("bigbird(): global_blocks", global_blocks)
    draw = random_blocks, as_int("bigbird(): seed", seed, _LEAST_SEED)
    near = Mask("near({})", (window_blocks,), partial(_block_band, BLOCK, window_blocks))
    fixed = near | _global_tokens(global_blocks * BLOCK)
    if not random_blocks:  # a graph cannot hold a generator
        return fixed
    return fixed | Mask("random({}, seed={})", draw, partial(_random, *draw))


def strided(stride: int) -> Mask:
    """Strided pattern of the Sparse Transformer (Child et al. 2019), in blocks of 128 tokens.

    With the distance d = p // 128 - k // 128, query q sees key k iff k <= p and (d < stride or d is
    a multiple of stride): the last `stride` blocks, and every stride-th block before them.
    """
    stride = as_int("strided(): stride", stride, 1)
    rule = partial(_is_strided, stride)
    return mods.causal() & Mask("strided({})", (stride,), partial(_blocks, rule))


def _is_strided(stride: int, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= 0) & ((i - j < stride) | ((i - j) % stride == 0))


def butterfly() -> Mask:
    """Flat block butterfly, the sparsity pattern of block-sparse FlashAttention (Dao et al. 2022).

    With i = p // 128 and j = k // 128, query q sees key k iff i = j or i and j differ in exactly
    one binary digit: 1 + log2(blocks) blocks per row.
    """
    return Mask("butterfly()", (), partial(_blocks, _is_butterfly))


def _is_butterfly(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    digits = i ^ j
    return (i >= 0) & (digits & (digits - 1) == 0)


def _blocks(rule: Callable, grid: Grid) -> BlockPattern:
    """rule(b, h, p // 128, k // 128)."""
    return BlockPattern(grid, rule, shift=grid.offset)


def _block_band(block: int, reach: int, grid: Grid) -> Interval:
    """|p // block - k // block| <= reach, for p >= 0."""
    p, block, reach = positions(grid), min(block, grid.seqlen_k + 1), min(reach, grid.blocks_k)
    row = torch.div(p, block, rounding_mode="floor")
    return Interval(grid, (row - reach) * block, ((row + reach + 1) * block).masked_fill(p < 0, 0))


def _global_tokens(count: int) -> Mask:
    """0 <= p < count or k < count."""
    seeing = Mask("queries(< {})", (count,), partial(_global_queries, count))
    return seeing | Mask("keys(< {})", (count,), partial(_global_keys, count))


def _global_queries(count: int, grid: Grid) -> Interval:
    p = positions(grid)
    return Interval(grid, 0, ((p >= 0) & (p < min(count, grid.seqlen_k))) * grid.seqlen_k)


def _global_keys(count: int, grid: Grid) -> Interval:
    return Interval(grid, 0, min(count, grid.seqlen_k))


def _random(count: int, seed: int, grid: Grid) -> BlockPattern:
    drawn = _draw(grid.blocks_k, min(count, grid.blocks_k), seed)
    return _blocks(partial(_is_drawn, drawn), grid)


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
