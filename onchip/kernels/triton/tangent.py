"""Forward mode in Triton: the tangents of out and lse in one pass over the keys, with the programs
and the loop of forward.py.

    grid: tiles of queries x heads x batch

    q1, t_q1 |  s  = q k^T               ds = softmax_scale (t_q k^T + q t_k^T) + ...
             |  p  = exp2(s - m)         computed once for both
             |  l, acc   += p, p v
             |  dl, dacc += p (ds - offset), p (ds - offset) v + p t_v
             |  t_lse = dl / l + offset  t_out = (dacc - acc dl / l) / l

t_ marks tangents, ds is that of the scores. The tangent of a state is a state with the same m, and
merges as a state does (docs/fold.md, "Tangents merge"). The offset of a row is the mean of ds in
its first tile. t_out does not depend on it, and without it a term that all ds have in common would
be rounded with p ds. An input without a tangent is None and generates no code.

Worked shape: batch 1, one head, 300 tokens, tiles of 128, causal. Three programs; that of queries
128 to 255 reads one unmasked and one masked tile of keys, values and their tangents: six products a
tile, of which the forward has two.

With dout, the gradient of t_out, the same kernel is the first pass of second.py: it stores four
numbers per row instead of t_out. The forward loop is taught in examples/versions/v2.py, tangents by
kernels/cpu/tangent.py.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.core.backend import Tangents, empty_result
from onchip.core.problem import Problem, Tensors
from onchip.kernels.runtime.launcher import CachedLauncher
from onchip.kernels.tiles import TritonConfig, TritonUse
from onchip.kernels.triton.launch import (
    LENGTHS,
    LaunchArgs,
    launch_options,
    make_contiguous,
    score_strides,
)
from onchip.kernels.triton.tile import (
    LN2,
    LOG2E,
    LOWEST,
    Band,
    MaskLists,
    ScoreMods,
    TokenPositions,
    apply_score_mods,
    dot,
    get_masked_tile,
    get_unmasked_tile,
    head_offset,
    head_ptr,
    is_visible,
    load_rows,
    load_sequence,
    load_tile,
    locate_program,
    result_ptr,
    round_to,
    row_offset,
    store_tile,
    walk_tiles,
)

TANGENT_LENGTHS = (
    *LENGTHS, "stride_t_slopes", "stride_t_bias_b", "stride_t_bias_h", "stride_t_bias_q",
    "stride_rows",
)  # fmt: skip


class DualSoftmaxState(NamedTuple):
    """m, l, acc of the online softmax, and its tangent relative to an offset of ds: dl is the sum
    of p (ds - offset), dacc that of p (ds - offset) v + p t_v.
    """

    m: tl.tensor
    l: tl.tensor
    acc: tl.tensor
    dl: tl.tensor
    dacc: tl.tensor
    offset: tl.tensor


@triton.jit(do_not_specialize=TANGENT_LENGTHS)
def tangent_kernel(
    q_ptr, k_ptr, v_ptr, cu_q_ptr, cu_k_ptr, slopes_ptr, bias_ptr,
    full_offsets_ptr, full_indices_ptr, partial_offsets_ptr, partial_indices_ptr,
    partial_tiles_ptr, tiles_ptr, sinks_ptr,
    t_q_ptr, t_k_ptr, t_v_ptr, t_slopes_ptr, t_bias_ptr, t_sinks_ptr,
    t_out_ptr, t_lse_ptr, dout_ptr, dlse_ptr, rows_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
    stride_vh, stride_slopes, stride_bias_b, stride_bias_h, stride_bias_q, stride_mask_b,
    stride_mask_h, stride_t_slopes, stride_t_bias_b, stride_t_bias_h, stride_t_bias_q, stride_rows,
    num_heads, group_size, total_q, total_k, left, right, scale_log2, softcap, num_tiles,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, LINEAR: tl.constexpr,
    ALIGN: tl.constexpr, PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """t_out and t_lse of TILE_M queries of one head; with dout_ptr their lse in log2 units, t_lse,
    delta = dout.out - dlse and phi = dout.t_out.
    """
    tile, h, b = locate_program(num_tiles, num_heads, right is not None)
    at = load_sequence(cu_q_ptr, cu_k_ptr, total_q, total_k, b)
    m0 = tile * TILE_M
    if m0 >= at.seqlen_q:
        return
    band = Band(left, right)
    lists = MaskLists(
        full_offsets_ptr, full_indices_ptr, partial_offsets_ptr, partial_indices_ptr,
        partial_tiles_ptr, tiles_ptr, b * stride_mask_b + h * stride_mask_h,
    )  # fmt: skip
    positions = TokenPositions(None, None, total_q)
    slope = tl.load(slopes_ptr + b * stride_slopes + h) if slopes_ptr is not None else None
    plane = head_offset(b, h, stride_bias_b, stride_bias_h)
    score = ScoreMods(scale_log2, softcap, slope, bias_ptr, plane, stride_bias_q, positions)
    t_slope = tl.load(t_slopes_ptr + b * stride_t_slopes + h) if t_slopes_ptr is not None else None
    plane = head_offset(b, h, stride_t_bias_b, stride_t_bias_h)
    t_score = ScoreMods(scale_log2, None, t_slope, t_bias_ptr, plane, stride_t_bias_q, positions)
    unit = scale_log2 if LINEAR else 1.0

    kv = h // group_size
    num_kv = num_heads // group_size
    row_q, row_k, row_v = stride_qs * ALIGN, stride_ks * ALIGN, stride_vs * ALIGN
    q_ptr = head_ptr(q_ptr, at.entry, at.start_q, h, stride_qb, stride_qs, stride_qh, ALIGN)
    k_ptr = head_ptr(k_ptr, at.entry, at.start_k, kv, stride_kb, stride_ks, stride_kh, ALIGN)
    v_ptr = head_ptr(v_ptr, at.entry, at.start_k, kv, stride_vb, stride_vs, stride_vh, ALIGN)
    t_q_ptr = tangent_ptr(t_q_ptr, at.entry, at.start_q, h, total_q, num_heads, HEAD_DIM)
    t_k_ptr = tangent_ptr(t_k_ptr, at.entry, at.start_k, kv, total_k, num_kv, HEAD_DIM)
    t_v_ptr = tangent_ptr(t_v_ptr, at.entry, at.start_k, kv, total_k, num_kv, HEAD_DIM_V)
    row_t, row_t_v = num_kv * HEAD_DIM, num_kv * HEAD_DIM_V
    q = load_tile(q_ptr, m0, at.seqlen_q, row_q, HEAD_DIM, TILE_M, PAD_DIM, True)
    t_q = load_tangent(
        t_q_ptr, m0, at.seqlen_q, num_heads * HEAD_DIM, HEAD_DIM, TILE_M, PAD_DIM, True
    )
    rows, keys = m0 + tl.arange(0, TILE_M), tl.arange(0, TILE_N)
    i = rows[:, None]
    state = empty_dual_state(TILE_M, PAD_DIM_V)
    walk = walk_tiles(band, lists, m0, m0 + TILE_M, at.seqlen_q, at.seqlen_k, TILE_N)
    for t in range(walk.num_unmasked):  # every key visible to every row
        n = get_unmasked_tile(walk, lists, t, TILE_N)
        j = (n + keys)[None, :]
        k = load_tile(k_ptr, n, at.seqlen_k, row_k, HEAD_DIM, TILE_N, PAD_DIM, False)
        t_k = load_tangent(t_k_ptr, n, at.seqlen_k, row_t, HEAD_DIM, TILE_N, PAD_DIM, False)
        v = load_tile(v_ptr, n, at.seqlen_k, row_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, False)
        t_v = load_tangent(t_v_ptr, n, at.seqlen_k, row_t_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, False)
        s = dot(q, tl.trans(k), None)
        s, softcap_grad = apply_score_mods(score, s, at, i, j, LINEAR)
        t_x = None if LATE else product_tangent(q, t_q, k, t_k)
        state, p, weight = fold_values(state, s, v, t_v, unit)
        t_x = product_tangent(q, t_q, k, t_k) if LATE else t_x
        ds = score_tangent(t_score, t_x, softcap_grad, p, at, i, j)
        state = fold_score_tangents(state, p, weight, ds, v)
    for t in range(walk.num_masked):  # cut by the diagonal, the window, the mask or the end
        n, bits = get_masked_tile(walk, lists, t, TILE_N)
        j = (n + keys)[None, :]
        k = load_tile(k_ptr, n, at.seqlen_k, row_k, HEAD_DIM, TILE_N, PAD_DIM, True)
        t_k = load_tangent(t_k_ptr, n, at.seqlen_k, row_t, HEAD_DIM, TILE_N, PAD_DIM, True)
        v = load_tile(v_ptr, n, at.seqlen_k, row_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, True)
        t_v = load_tangent(t_v_ptr, n, at.seqlen_k, row_t_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, True)
        s = dot(q, tl.trans(k), None)
        s, softcap_grad = apply_score_mods(score, s, at, i, j, LINEAR)
        inside = (n + keys < at.seqlen_k)[None, :]
        seen = is_visible(at, band, lists, bits, i, j, n, inside, TILE_N)
        s = tl.where(seen, s, float("-inf"))
        t_x = None if LATE else product_tangent(q, t_q, k, t_k)
        state, p, weight = fold_values(state, s, v, t_v, unit)
        t_x = product_tangent(q, t_q, k, t_k) if LATE else t_x
        ds = score_tangent(t_score, t_x, softcap_grad, p, at, i, j)
        state = fold_score_tangents(state, p, weight, ds, v)

    if sinks_ptr is not None:
        t_sink = tl.load(t_sinks_ptr + h).to(tl.float32) if t_sinks_ptr is not None else 0.0
        state = add_sink_dual(state, tl.load(sinks_ptr + h).to(tl.float32) * LOG2E, t_sink)
    m, l, acc, dl, dacc, offset = state
    first = row_offset(at, h, num_heads, total_q)
    inside = rows < at.seqlen_q
    divisor = tl.where(l == 0, 1.0, l)  # a row that saw no key: the sums and the offset are 0
    mean = dl / divisor
    t_out, t_lse = (dacc - acc * mean[:, None]) / divisor[:, None], offset + mean
    stride_out = num_heads * HEAD_DIM_V
    if dout_ptr is None:
        tl.store(t_lse_ptr + first + rows, t_lse, mask=inside)
        t_out_ptr = result_ptr(t_out_ptr, at.entry, at.start_q, h, total_q, num_heads, HEAD_DIM_V)
        store_tile(t_out_ptr, t_out, m0, at.seqlen_q, stride_out, HEAD_DIM_V, TILE_M, PAD_DIM_V)
    else:
        dout_ptr = result_ptr(dout_ptr, at.entry, at.start_q, h, total_q, num_heads, HEAD_DIM_V)
        do = load_tile(dout_ptr, m0, at.seqlen_q, stride_out, HEAD_DIM_V, TILE_M, PAD_DIM_V, True)
        do = do.to(tl.float32)
        delta = tl.sum(acc * do, 1) / divisor
        if dlse_ptr is not None:
            delta -= load_rows(dlse_ptr + first, m0, at.seqlen_q, TILE_M, True)
        rows_ptr += first + rows
        plane = tl.cast(stride_rows, tl.int64)
        tl.store(rows_ptr, tl.where(l == 0, 0.0, m + tl.log2(divisor)), mask=inside)
        tl.store(rows_ptr + plane, t_lse, mask=inside)
        tl.store(rows_ptr + 2 * plane, delta, mask=inside)
        tl.store(rows_ptr + 3 * plane, tl.sum(t_out * do, 1), mask=inside)


@triton.jit
def tangent_ptr(ptr, entry, start, head, total, num_heads, DIM: tl.constexpr):
    """result_ptr of a contiguous tangent; None if there is none."""
    if ptr is None:
        return  # None, which Triton 3.6 refuses as a value
    else:
        return result_ptr(ptr, entry, start, head, total, num_heads, DIM)


@triton.jit
def load_tangent(
    ptr, row, num_rows, stride, DIM: tl.constexpr, TILE: tl.constexpr, PAD: tl.constexpr,
    RAGGED: tl.constexpr,
):  # fmt: skip
    """load_tile of a tangent; None if there is none."""
    if ptr is None:
        return
    else:
        return load_tile(ptr, row, num_rows, stride, DIM, TILE, PAD, RAGGED)


@triton.jit
def product_tangent(q, t_q, k, t_k):
    """The tangent of q k^T, t_q k^T + q t_k^T; None if neither has one."""
    if t_q is None and t_k is None:
        return
    elif t_k is None:
        return dot(t_q, tl.trans(k), None)
    elif t_q is None:
        return dot(q, tl.trans(t_k), None)
    else:
        return dot(q, tl.trans(t_k), dot(t_q, tl.trans(k), None))


@triton.jit
def score_tangent(t_score, x, softcap_grad, p, at, i, j):
    """ds in natural units from x, the tangent of q k^T, and the tangents of slope and bias in
    t_score; None if there is none of these. They are linear: apply_score_mods has their formula.
    """
    if t_score.slope is None and t_score.bias is None:
        if x is None:
            return
        else:
            return x * softcap_grad * (t_score.scale_log2 * LN2)
    else:
        x = tl.zeros_like(p) if x is None else x * softcap_grad
        ds, _ = apply_score_mods(t_score, x, at, i, j, False)
        return ds * LN2


@triton.jit
def empty_dual_state(TILE_M: tl.constexpr, PAD_DIM_V: tl.constexpr):
    """m as in tile.empty_state."""
    zeros, acc = tl.zeros([TILE_M], tl.float32), tl.zeros([TILE_M, PAD_DIM_V], tl.float32)
    return DualSoftmaxState(zeros + LOWEST, zeros, acc, zeros, acc, zeros)


@triton.jit
def fold_values(state, s, v, t_v, unit):
    """tile.fold_tile, and p t_v added to dacc; t_v is None for zero. Returns the state, which lacks
    the terms of ds of this tile, p and the sum of p.
    """
    m, l, acc, dl, dacc, offset = state
    m_new = tl.maximum(m, tl.max(s, 1) * unit)
    alpha = tl.exp2(m - m_new)
    p = tl.exp2(s * unit - m_new[:, None])
    weight = tl.sum(p, 1)
    p_v, dacc = round_to(p, v.dtype), dacc * alpha[:, None]
    acc = dot(p_v, v, acc * alpha[:, None])
    if t_v is not None:
        dacc = dot(p_v, t_v, dacc)
    return DualSoftmaxState(m_new, l * alpha + weight, acc, dl * alpha, dacc, offset), p, weight


@triton.jit
def fold_score_tangents(state, p, weight, ds, v):
    """The state of fold_values with the terms of ds, None for zero. Where p = 0, ds may have any
    value. The offset is the mean of ds under p in the first tile that counts: where l = weight, no
    tile before it does.
    """
    m, l, acc, dl, dacc, offset = state
    if ds is not None:
        ds = tl.where(p > 0, ds, 0.0)
        total = tl.sum(p * ds, 1)
        offset = tl.where(l == weight, total / tl.where(l == 0, 1.0, l), offset)
        dl += total - offset * weight
        dacc = dot(round_to(p * (ds - offset[:, None]), v.dtype), v, dacc)
    return DualSoftmaxState(m, l, acc, dl, dacc, offset)


@triton.jit
def add_sink_dual(state, sink, t_sink):
    """tile.add_sink with a tangent: a key with ds = t_sink and without a value."""
    m, l, acc, dl, dacc, offset = state
    m_new = tl.maximum(m, sink)
    alpha, p = tl.exp2(m - m_new), tl.exp2(sink - m_new)
    dl = dl * alpha + tl.where(p > 0, p * (t_sink - offset), 0.0)
    scale = alpha[:, None]
    return DualSoftmaxState(m_new, l * alpha + p, acc * scale, dl, dacc * scale, offset)


_tangent_kernel = CachedLauncher(tangent_kernel)


class TangentArgs(NamedTuple):
    """The arguments that the kernels of tangents have in common."""

    inputs: tuple[Any, ...]  # q, k, v, cu_seqlens, alibi_slopes, bias
    tangents: tuple[Any, ...]  # of q, k, v, alibi_slopes and bias, contiguous
    strides: tuple[Any, ...]  # of the tangents of alibi_slopes and bias
    scalars: tuple[Any, ...]

    @classmethod
    def of(cls, args: LaunchArgs, dx: Tangents) -> "TangentArgs":
        tangents = tuple(map(make_contiguous, dx[:5]))
        strides = score_strides(tangents[3], tangents[4])
        return cls(args.tensors[:7], tangents, strides, args.scalars[:8])


def tangents(problem: Problem, x: Tensors, dx: Tangents) -> tuple[Tensor, Tensor]:
    t_out, t_lse = empty_result(problem, x)
    _launch(problem, x, dx, (t_out, t_lse, None, None, None), t_lse)
    return t_out, t_lse


def row_numbers(
    problem: Problem, x: Tensors, dx: Tangents, dout: Tensor, dlse: Tensor | None
) -> Tensor:
    """lse in log2 units (0 for a row without keys), t_lse, delta and phi of all rows, (4, *rows).
    dout is contiguous, in the dtype of q.
    """
    *entries, seqlen, heads, _ = x.q.shape
    rows = x.q.new_empty(4, *entries, heads, seqlen, dtype=torch.float32)
    _launch(problem, x, dx, (None, None, dout, make_contiguous(dlse), rows), rows[0])
    return rows


def _launch(
    problem: Problem, x: Tensors, dx: Tangents, results: tuple[Any, ...], like: Tensor
) -> None:
    args = LaunchArgs.of(problem, x)
    own = TangentArgs.of(args, dx)
    config = args.config("tangent")
    num_tiles = triton.cdiv(problem.seqlen_q, config.tile_m)
    grid = num_tiles * problem.num_heads * problem.batch
    if grid:
        _tangent_kernel[(grid,)](
            *own.inputs, *args.rows, make_contiguous(x.sinks),
            *own.tangents, make_contiguous(dx.sinks), *results,
            *args.strides, *args.row_strides, *own.strides, like.numel(),
            *own.scalars, num_tiles,
            *args.dims, TILE_M=config.tile_m, TILE_N=config.tile_n,
            LATE=_multiplies_late(args.use, config), **launch_options(config),
        )  # fmt: skip


def _multiplies_late(use: TritonUse, config: TritonConfig) -> bool:
    """Whether the tangent of q k^T is computed after p v, which takes fewer registers if products
    read their operands from shared memory, as warpgroup products do. Elsewhere k would stay in
    registers until then. ptxas, 2026-11-19, Triton 3.9, head_dim 128: 9 spills in the loop of sm_90
    instead of 26, but 1,556 in that of sm_80 instead of none.
    """
    has_warpgroups = use.capability is not None and use.capability[0] in (9, 10)
    return has_warpgroups and use.itemsize == 2 and config.tile_m >= 64
