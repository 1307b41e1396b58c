"""The gradients of the tensors that score_mod indexes: one launch for each place that reads one.

    bias[h, q, k]          indexed by b, h, q, k: bias.py's sum, with programs for tiles of the
                           dimensions that occur, each of which sums over those that do not
    table[h, q - k + 99]   other indices: a program per tile of scores adds to the elements it read

      tile of keys      k0 (128)   k1 (128)   k2 (44)       weight[k], summed over b, h and q
      part 0            p0         p1         p2
      part 1            p3         p4         p5
                         |          |          |
                        parts.sum(0)  ->  the gradient (fp32)

The first way has a fixed order. The second one adds atomically, in any order, which deterministic
calls exclude (TritonBackend.supports_backward).

Worked shape: batch 1, one head, 300 queries and keys, tiles of 128. weight[k]: 3 tiles of keys in 3
parts of one tile of queries each, 9 programs, and one sum over the parts. table[h, q - k + 99]: 9
programs, one for each tile of scores.

p is recomputed as in backward.py; the forward loop is taught in examples/versions/v2.py.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.core.problem import Problem
from onchip.kernels.runtime.launcher import CachedLauncher
from onchip.kernels.tiles import BIAS_PROGRAMS
from onchip.kernels.triton.indices import IndexNames, index_names
from onchip.kernels.triton.launch import LENGTHS, LaunchArgs, launch_options
from onchip.kernels.triton.score_mod import load_function
from onchip.kernels.triton.tile import (
    BLOCK,
    EMPTY,
    LN2,
    LOG2E,
    Band,
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
    result_ptr,
    row_offset,
    score_gradient,
    split_digits,
    times_derivative,
)
from onchip.score_mods.derivative import first_derivatives
from onchip.score_mods.expression import Captured

_COUNTS = ("batch", "num_tiles_q", "num_tiles_k", "num_summed", "num_rows", "num_keys")


@triton.jit(do_not_specialize=(*LENGTHS, *_COUNTS))
def dcaptured_kernel(
    q_ptr, k_ptr, v_ptr, cu_q_ptr, cu_k_ptr, slopes_ptr, bias_ptr, seed_ptr,
    positions_q_ptr, positions_k_ptr,
    full_offsets_ptr, full_indices_ptr, partial_offsets_ptr, partial_indices_ptr,
    partial_tiles_ptr, tiles_ptr, lse_ptr, delta_ptr, dout_ptr, sums_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
    stride_vh, stride_slopes, stride_bias_b, stride_bias_h, stride_bias_q, stride_mask_b,
    stride_mask_h,
    num_heads, group_size, total_q, total_k, left, right, scale_log2, softcap, keep_below,
    keep_scale, first_head, batch, num_tiles_q, num_tiles_k, num_summed, num_rows, num_keys,
    captured_ptr, captured_ints_ptr, size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7,
    size_8, size_9, size_10, size_11,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, LINEAR: tl.constexpr,
    ALIGN: tl.constexpr, PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr, PER_ENTRY: tl.constexpr,
    PER_HEAD: tl.constexpr, PER_QUERY: tl.constexpr, PER_KEY: tl.constexpr, SCATTER: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, SCORE_MOD: tl.constexpr,
):  # fmt: skip
    """The gradient of the float that one load of score_mod reads. SCATTER: add that of one tile of
    scores to the elements sums_ptr. Otherwise store one part of the sum over the dimensions that
    are not among PER_*: (part, entry, head, row, key), each of size 1 if it is summed over.
    """
    entries, heads = batch if PER_ENTRY else 1, num_heads if PER_HEAD else 1
    tiles_q, tiles_k = num_tiles_q if PER_QUERY else 1, num_tiles_k if PER_KEY else 1
    row_q, row_k, row_v = stride_qs * ALIGN, stride_ks * ALIGN, stride_vs * ALIGN
    own = tl.program_id(0) // tiles_k
    tile_k = tl.program_id(0) % tiles_k
    tile_q, head, entry, part = split_digits(own, tiles_q, heads, entries)
    band = Band(left, right)
    seed = tl.load(seed_ptr) if seed_ptr is not None else None
    positions = TokenPositions(positions_q_ptr, positions_k_ptr, total_q)
    sizes = (
        size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7, size_8, size_9, size_10,
        size_11,
    )  # fmt: skip
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    summed_k, summed_q = num_tiles_k // tiles_k, num_tiles_q // tiles_q
    stop = batch // entries * (num_heads // heads) * summed_q * summed_k
    for c in range(part * num_summed, tl.minimum((part + 1) * num_summed, stop)):
        tile_c, h, b, rest = split_digits(c // summed_k, summed_q, num_heads // heads, batch)
        m0, n0 = (tile_q + tile_c) * TILE_M, (tile_k + c % summed_k) * TILE_N
        h, b = head + h, entry + b
        at = load_sequence(cu_q_ptr, cu_k_ptr, total_q, total_k, b)
        lists = MaskLists(
            full_offsets_ptr, full_indices_ptr, partial_offsets_ptr, partial_indices_ptr,
            partial_tiles_ptr, tiles_ptr, b * stride_mask_b + h * stride_mask_h,
        )  # fmt: skip
        bits = find_block_bits(lists, m0 // BLOCK, n0 // BLOCK)
        is_inside = (m0 < at.seqlen_q) & crosses_band(at, band, m0, n0, TILE_M, TILE_N)
        if is_inside & (bits != EMPTY):
            slope = tl.load(slopes_ptr + b * stride_slopes + h) if slopes_ptr is not None else None
            plane = head_offset(b, h, stride_bias_b, stride_bias_h)
            score = ScoreMods(scale_log2, softcap, slope, bias_ptr, plane, stride_bias_q, positions)
            kv = h // group_size
            q_h = head_ptr(q_ptr, at.entry, at.start_q, h, stride_qb, stride_qs, stride_qh, ALIGN)
            k_h = head_ptr(k_ptr, at.entry, at.start_k, kv, stride_kb, stride_ks, stride_kh, ALIGN)
            v_h = head_ptr(v_ptr, at.entry, at.start_k, kv, stride_vb, stride_vs, stride_vh, ALIGN)
            do_h = result_ptr(dout_ptr, at.entry, at.start_q, h, total_q, num_heads, HEAD_DIM_V)
            q = load_tile(q_h, m0, at.seqlen_q, row_q, HEAD_DIM, TILE_M, PAD_DIM, True)
            k = load_tile(k_h, n0, at.seqlen_k, row_k, HEAD_DIM, TILE_N, PAD_DIM, True)
            v = load_tile(v_h, n0, at.seqlen_k, row_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, True)
            stride_do = num_heads * HEAD_DIM_V
            do = load_tile(do_h, m0, at.seqlen_q, stride_do, HEAD_DIM_V, TILE_M, PAD_DIM_V, True)
            first = row_offset(at, h, num_heads, total_q)
            lse = load_rows(lse_ptr + first, m0, at.seqlen_q, TILE_M, True)[:, None]
            delta = load_rows(delta_ptr + first, m0, at.seqlen_q, TILE_M, True)[:, None]
            rows = m0 + tl.arange(0, TILE_M)
            i, j = rows[:, None], n0 + tl.arange(0, TILE_N)[None, :]
            s = dot(q, tl.trans(k), None)
            s, softcap_grad = apply_score_mods(score, s, at, i, j, LINEAR)
            s, derivative, position = SCORE_MOD(
                s * LN2, b, first_head + h, i, j, captured_ptr, captured_ints_ptr, sizes
            )
            inside = (i < at.seqlen_q) & (j < at.seqlen_k)
            seen = is_visible(at, band, lists, bits, i, j, n0, inside, TILE_N)
            s = tl.where(seen, s * LOG2E, float("-inf"))
            dropout = Dropout(seed, keep_below, b, first_head + h, positions)
            keep = (
                draw_keep_mask(dropout, at, rows, n0, TILE_M, TILE_N, False)
                if seed is not None
                else None
            )
            dp = dot(do, tl.trans(v), None)
            p, ds = score_gradient(s, dp, lse, delta, keep, 1.0, keep_scale)
            gradient = times_derivative(ds, derivative, SCORE_MOD)
            if SCATTER:
                _add_at(sums_ptr, position, gradient)
            else:
                acc += gradient

    if not SCATTER:
        plane = ((part * entries + entry) * heads + head).to(tl.int64)
        rows = tile_q * TILE_M + tl.arange(0, TILE_M)
        keys = tile_k * TILE_N + tl.arange(0, TILE_N)
        if PER_QUERY and PER_KEY:
            cells = (plane * num_rows + rows[:, None]) * num_keys + keys[None, :]
            inside = (rows < num_rows)[:, None] & (keys < num_keys)[None, :]
            tl.store(sums_ptr + cells, acc, mask=inside)
        elif PER_QUERY:
            tl.store(sums_ptr + plane * num_rows + rows, tl.sum(acc, 1), mask=rows < num_rows)
        elif PER_KEY:
            tl.store(sums_ptr + plane * num_keys + keys, tl.sum(acc, 0), mask=keys < num_keys)
        else:
            tl.store(sums_ptr + plane, tl.sum(tl.sum(acc, 1), 0))


@triton.jit
def _add_at(sums_ptr, position, gradient):
    """Add a tile to the elements at `position`, which broadcasts: what shares an element by that is
    summed first.
    """
    if len(position.shape) == 0:
        tl.atomic_add(sums_ptr + position, tl.sum(tl.sum(gradient, 1), 0), sem="relaxed")
    else:
        if position.shape[0] == 1:
            gradient = tl.sum(gradient, 0, keep_dims=True)
        if position.shape[1] == 1:
            gradient = tl.sum(gradient, 1, keep_dims=True)
        tl.atomic_add(sums_ptr + position, gradient, mask=gradient != 0, sem="relaxed")


_dcaptured_kernel = CachedLauncher(dcaptured_kernel)


def captured_gradient(problem: Problem, args: LaunchArgs, saved: tuple[Any, ...]) -> Tensor:
    """The gradient of x.captured, in fp32."""
    elements = args.captured[0]
    total = elements.new_zeros(elements.shape, dtype=torch.float32)
    first = first_derivatives(problem.score_mod or "")
    for load, derivative in zip(first.loads, first.by_load, strict=True):
        if derivative is None or not saved[0].numel() or not problem.seqlen_k:
            continue
        operation = first.expression.operations[load]
        captured = first.expression.captured[int(operation.value or 0)]
        names = index_names(first.expression, load)
        if names is None:
            _launch(problem, args, saved, load, None, total)
        else:
            own = total[captured.offset :][: captured.numel].view(captured.sizes)
            _add_grid(own, captured, names, _sum_grid(problem, args, saved, load, names), problem)
    return total


def _sum_grid(
    problem: Problem, args: LaunchArgs, saved: tuple, load: int, names: IndexNames
) -> Tensor:
    """The gradient as (b, h, q, k), each of size 1 if the load is not indexed by it."""
    parts = _launch(problem, args, saved, load, tuple(name in names for name in "bhqk"), None)
    return parts[0] if len(parts) == 1 else parts.sum(0)


def _add_grid(
    total: Tensor, captured: Captured, names: IndexNames, grid: Tensor, problem: Problem
) -> None:
    """Add a gradient by (b, h, q, k) to that of a tensor with the indices `names`."""
    kept, dims = [], []
    for name, size in zip(names, captured.sizes, strict=True):
        if isinstance(name, str):
            first = problem.first_head if name == "h" else 0
            dim = "bhqk".index(name)
            grid = grid.narrow(dim, 0, max(0, min(grid.shape[dim], size - first)))
            kept.append(slice(first, first + grid.shape[dim]))
            dims.append(dim)
        else:
            kept.append(min(max(name + size if name < 0 else name, 0), size - 1))
    summed = [dim for dim in range(4) if dim not in dims]
    total[tuple(kept)] += grid.permute(*summed, *dims)[(0,) * len(summed)]


def _launch(
    problem: Problem,
    args: LaunchArgs,
    saved: tuple,
    load: int,
    per: tuple[bool, ...] | None,
    total: Tensor | None,
) -> Tensor:
    """The parts (part, b, h, q, k) of the sum over the dimensions that `per` excludes; without
    `per`, add to `total`.
    """
    config = args.config("dcaptured")
    tiles_q = triton.cdiv(problem.seqlen_q, config.tile_m)
    tiles_k = triton.cdiv(problem.seqlen_k, config.tile_n)
    is_own = per or (True,) * 4
    sizes = (problem.batch, problem.num_heads, tiles_q, tiles_k)
    own = math.prod(n for n, mine in zip(sizes, is_own, strict=True) if mine)
    summed = math.prod(sizes) // own
    num_summed = triton.cdiv(summed * own, max(own, BIAS_PROGRAMS))
    num_parts = triton.cdiv(summed, num_summed)
    if total is None:
        shape = (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k)
        shape = (n if mine else 1 for n, mine in zip(shape, is_own, strict=True))
        total = args.captured[0].new_empty(num_parts, *shape, dtype=torch.float32)
    _dcaptured_kernel[(num_parts * own,)](
        *args.tensors, *args.rows, *saved, total,
        *args.strides, *args.row_strides, *args.scalars,
        problem.batch, tiles_q, tiles_k, num_summed, problem.seqlen_q, problem.seqlen_k,
        *args.captured,
        *args.dims, *is_own, per is None, TILE_M=config.tile_m, TILE_N=config.tile_n,
        SCORE_MOD=load_function(problem.score_mod, load, per is None), **launch_options(config),
    )  # fmt: skip
    return total
