"""The gradient of the bias in Triton: one program per tile of the bias and part of the sum.

    bias (1, heads, 1, 300), broadcast over batch and queries:

      tile of keys      k0 (128)   k1 (128)   k2 (44)
      part 0            p0         p1         p2        sums ds over its (entry, query tile)s
      part 1            p3         p4         p5
                         |          |          |
                        parts.sum(0)  ->  dbias (fp32)

A program sums ds = p (dp - delta) over num_summed of the (batch entry, head, tile of queries) in
which the bias broadcasts, in a fixed order. If the bias has few tiles, the sum is split into parts,
so that there are enough programs; the number of parts depends only on shapes.

Worked shape: batch 1, one head, 300 queries and keys, tiles of 128, bias (1, 1, 300, 300). 9 tiles
of the bias, nothing is summed: 9 programs, 1 part. With bias (1, 1, 1, 300): 3 tiles of keys in
3 parts of one tile of queries each, 9 programs, and one sum over the parts.

p is recomputed as in backward.py; the forward loop is taught in examples/versions/v2.py.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.core.problem import Problem
from onchip.kernels.runtime.launcher import CachedLauncher
from onchip.kernels.tiles import BIAS_PROGRAMS, TritonConfig
from onchip.kernels.triton.launch import LENGTHS, LaunchArgs, launch_options
from onchip.kernels.triton.tile import (
    BLOCK,
    EMPTY,
    Band,
    CapturedElements,
    Dropout,
    MaskLists,
    ScoreMods,
    TokenPositions,
    apply_score_mods,
    crosses_band,
    dot,
    draw_keep_mask,
    find_block_bits,
    head_offset,
    head_ptr,
    is_visible,
    load_rows,
    load_sequence,
    load_tile,
    modify_scores,
    result_ptr,
    row_offset,
    score_gradient,
    split_digits,
    times_derivative,
)


@triton.jit(do_not_specialize=(*LENGTHS, "batch", "num_tiles_q", "num_tiles_k", "num_summed"))
def dbias_kernel(
    q_ptr, k_ptr, v_ptr, cu_q_ptr, cu_k_ptr, slopes_ptr, bias_ptr, seed_ptr,
    positions_q_ptr, positions_k_ptr,
    full_offsets_ptr, full_indices_ptr, partial_offsets_ptr, partial_indices_ptr,
    partial_tiles_ptr, tiles_ptr, lse_ptr, delta_ptr, dout_ptr, parts_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
    stride_vh, stride_slopes, stride_bias_b, stride_bias_h, stride_bias_q, stride_mask_b,
    stride_mask_h,
    num_heads, group_size, total_q, total_k, left, right, scale_log2, softcap, keep_below,
    keep_scale, first_head, batch, num_tiles_q, num_tiles_k, num_summed,
    captured_ptr, captured_ints_ptr, size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7,
    size_8, size_9, size_10, size_11,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, LINEAR: tl.constexpr,
    ALIGN: tl.constexpr, PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr, PER_ENTRY: tl.constexpr,
    PER_HEAD: tl.constexpr, PER_QUERY: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    SCORE_MOD: tl.constexpr,
):  # fmt: skip
    """One part of dbias for one tile of the bias: the sum over num_summed of the (entry, head, tile
    of queries) in which the bias broadcasts.
    """
    entries, heads = batch if PER_ENTRY else 1, num_heads if PER_HEAD else 1
    tiles = num_tiles_q if PER_QUERY else 1
    row_q, row_k, row_v = stride_qs * ALIGN, stride_ks * ALIGN, stride_vs * ALIGN
    pid = tl.program_id(0)
    n0 = pid % num_tiles_k * TILE_N
    tile, head, entry, part = split_digits(pid // num_tiles_k, tiles, heads, entries)
    band = Band(left, right)
    seed = tl.load(seed_ptr) if seed_ptr is not None else None
    positions = TokenPositions(positions_q_ptr, positions_k_ptr, total_q)
    sizes = (
        size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7, size_8, size_9, size_10,
        size_11,
    )  # fmt: skip
    unit = scale_log2 if LINEAR else 1.0
    keys = n0 + tl.arange(0, TILE_N)
    dbias = tl.zeros([TILE_M, TILE_N], tl.float32)
    stop = batch // entries * (num_heads // heads) * (num_tiles_q // tiles)
    for c in range(part * num_summed, tl.minimum((part + 1) * num_summed, stop)):
        tile_c, h, b, rest = split_digits(c, num_tiles_q // tiles, num_heads // heads, batch)
        m0, h, b = (tile + tile_c) * TILE_M, head + h, entry + b
        at = load_sequence(cu_q_ptr, cu_k_ptr, total_q, total_k, b)
        lists = MaskLists(
            full_offsets_ptr, full_indices_ptr, partial_offsets_ptr, partial_indices_ptr,
            partial_tiles_ptr, tiles_ptr, b * stride_mask_b + h * stride_mask_h,
        )  # fmt: skip
        bits = find_block_bits(lists, m0 // BLOCK, n0 // BLOCK)
        if crosses_band(at, band, m0, n0, TILE_M, TILE_N) & (bits != EMPTY):
            slope = tl.load(slopes_ptr + b * stride_slopes + h) if slopes_ptr is not None else None
            plane = head_offset(b, h, stride_bias_b, stride_bias_h)
            score = ScoreMods(scale_log2, softcap, slope, bias_ptr, plane, stride_bias_q, positions)
            captured = CapturedElements(b, first_head + h, captured_ptr, captured_ints_ptr, sizes)
            q_h = head_ptr(q_ptr, b, 0, h, stride_qb, stride_qs, stride_qh, ALIGN)
            k_h = head_ptr(k_ptr, b, 0, h // group_size, stride_kb, stride_ks, stride_kh, ALIGN)
            v_h = head_ptr(v_ptr, b, 0, h // group_size, stride_vb, stride_vs, stride_vh, ALIGN)
            do_h = result_ptr(dout_ptr, b, 0, h, total_q, num_heads, HEAD_DIM_V)
            q = load_tile(q_h, m0, total_q, row_q, HEAD_DIM, TILE_M, PAD_DIM, True)
            k = load_tile(k_h, n0, total_k, row_k, HEAD_DIM, TILE_N, PAD_DIM, True)
            v = load_tile(v_h, n0, total_k, row_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, True)
            stride_do = num_heads * HEAD_DIM_V
            do = load_tile(do_h, m0, total_q, stride_do, HEAD_DIM_V, TILE_M, PAD_DIM_V, True)
            first = row_offset(at, h, num_heads, total_q)
            lse = load_rows(lse_ptr + first, m0, total_q, TILE_M, True)[:, None]
            delta = load_rows(delta_ptr + first, m0, total_q, TILE_M, True)[:, None]
            rows = m0 + tl.arange(0, TILE_M)
            i, j = rows[:, None], keys[None, :]
            s = dot(q, tl.trans(k), None)
            s, softcap_grad = apply_score_mods(score, s, at, i, j, LINEAR)
            s, by_score = modify_scores(captured, s, i, j, SCORE_MOD)
            inside = (rows < total_q)[:, None] & (keys < total_k)[None, :]
            seen = is_visible(at, band, lists, bits, i, j, n0, inside, TILE_N)
            s = tl.where(seen, s, float("-inf"))
            dropout = Dropout(seed, keep_below, b, first_head + h, positions)
            keep = (
                draw_keep_mask(dropout, at, rows, n0, TILE_M, TILE_N, False)
                if seed is not None
                else None
            )
            dp = dot(do, tl.trans(v), None)
            p, ds = score_gradient(s, dp, lse, delta, keep, unit, keep_scale)
            dbias += times_derivative(ds, by_score, SCORE_MOD)

    plane = ((part * entries + entry) * heads + head).to(tl.int64)
    if PER_QUERY:
        parts_ptr += plane * total_q * total_k
        rows = tile * TILE_M + tl.arange(0, TILE_M)
        cells = parts_ptr + rows.to(tl.int64)[:, None] * total_k + keys[None, :]
        tl.store(cells, dbias, mask=(rows < total_q)[:, None] & (keys < total_k)[None, :])
    else:
        tl.store(parts_ptr + plane * total_k + keys, tl.sum(dbias, 0), mask=keys < total_k)


_dbias_kernel = CachedLauncher(dbias_kernel)


def bias_gradient(problem: Problem, args: LaunchArgs, saved: tuple[Any, ...]) -> Tensor:
    """dbias in fp32."""
    bias = args.tensors[6]
    if not saved[0].numel() or not bias.numel():
        return bias.new_zeros(bias.shape, dtype=torch.float32)
    config = args.config("dbias")
    split = split_sum(problem, bias, config)
    parts = bias.new_empty(split.num_parts, *bias.shape, dtype=torch.float32)
    _dbias_kernel[(split.num_programs,)](
        *args.tensors, *args.rows, *saved, parts,
        *args.strides, *args.row_strides, *args.scalars,
        problem.batch, split.tiles_q, split.tiles_k, split.num_summed, *args.captured,
        *args.dims, *split.per, TILE_M=config.tile_m, TILE_N=config.tile_n,
        SCORE_MOD=args.score_mod, **launch_options(config),
    )  # fmt: skip
    return parts[0] if split.num_parts == 1 else parts.sum(0)


class SumSplit(NamedTuple):
    """How the sum over the tiles of scores of each tile of the bias is split into parts."""

    tiles_q: int
    tiles_k: int
    per: tuple[bool, ...]  # in which of batch, heads and queries the bias does not broadcast
    num_summed: int  # tiles of scores that a program sums
    num_parts: int
    num_programs: int


def split_sum(problem: Problem, bias: Tensor, config: TritonConfig) -> SumSplit:
    """The SumSplit of a bias that is not empty."""
    tiles_q = triton.cdiv(problem.seqlen_q, config.tile_m)
    tiles_k = triton.cdiv(problem.seqlen_k, config.tile_n)
    per = tuple(n > 1 for n in bias.shape[:3])
    sizes = (problem.batch, problem.num_heads, tiles_q)
    own = math.prod(n for n, mine in zip(sizes, per, strict=True) if mine)
    summed = math.prod(sizes) // own
    num_summed = triton.cdiv(summed * own * tiles_k, max(own * tiles_k, BIAS_PROGRAMS))
    num_parts = triton.cdiv(summed, num_summed)
    return SumSplit(tiles_q, tiles_k, per, num_summed, num_parts, num_parts * own * tiles_k)
