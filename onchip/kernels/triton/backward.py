"""The backward in Triton: three kernels, each of which recomputes p = exp2(s - lse) tile by tile.

    delta_kernel    out, dout, lse  ->  delta = rowsum(out * dout) - dlse,  lse in log2 units
    dkdv_kernel     one program per tile of keys     loops over queries:  dv += p^T dout
                                                                          dk += ds^T q
    dq_kernel       one program per tile of queries  loops over keys:     dq += ds k

           q0   q1   q2             ds = p * (dp - delta),  dp = dout v^T
      k0  mask full full   <- dkdv program of k0 runs down this row
      k1       mask full      dq program of q2 runs down the column of q2
      k2            mask

Worked shape: batch 1, one head, 300 tokens, tiles of 128, causal. dkdv: 3 programs; k0 visits q0
masked, then q1 and q2. dq: 3 programs; q2 visits k0 and k1 unmasked, then k2 masked. Every visible
tile of scores is computed twice, once per kernel.

No atomics: every output element is summed by one program in a fixed order, so results are bitwise
reproducible. With grouped heads a dkdv program sums over the query heads of its group.

The loop is that of the forward: examples/versions/v2.py.
"""

import triton
import triton.language as tl
from torch import Tensor

from onchip.core.backend import Grads, grad_dtype, sink_gradient
from onchip.core.problem import Problem, Tensors
from onchip.kernels.runtime.launcher import CachedLauncher
from onchip.kernels.triton.bias import bias_gradient
from onchip.kernels.triton.captured import captured_gradient
from onchip.kernels.triton.launch import LENGTHS, LaunchArgs, launch_options, make_contiguous
from onchip.kernels.triton.tile import (
    LN2,
    LOG2E,
    Band,
    CapturedElements,
    Dropout,
    MaskLists,
    ScoreMods,
    TokenPositions,
    apply_score_mods,
    dot,
    draw_keep_mask,
    get_masked_tile,
    get_unmasked_tile,
    head_offset,
    head_ptr,
    is_visible,
    load_rows,
    load_sequence,
    load_tile,
    locate_program,
    modify_scores,
    result_ptr,
    round_to,
    row_offset,
    score_gradient,
    store_tile,
    times_derivative,
    walk_tiles,
)


@triton.jit(do_not_specialize=("num_rows", "total_q"))
def delta_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, delta_ptr, lse_log2_ptr,
    num_heads, total_q, num_rows,
    HEAD_DIM_V: tl.constexpr,
    PAD_DIM_V: tl.constexpr, TILE_M: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(out * dout) - dlse, and lse in log2 units, for exp2(s - lse). lse is 0 for a
    row that saw no key: all its s are -inf, so p = 0. Rows are in the order of out.
    """
    row = tl.program_id(0).to(tl.int64) * TILE_M
    out = load_tile(out_ptr, row, num_rows, HEAD_DIM_V, HEAD_DIM_V, TILE_M, PAD_DIM_V, True)
    dout = load_tile(dout_ptr, row, num_rows, HEAD_DIM_V, HEAD_DIM_V, TILE_M, PAD_DIM_V, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    rows = row + tl.arange(0, TILE_M)
    token, h = rows // num_heads, rows % num_heads
    place = (token // total_q * num_heads + h) * total_q + token % total_q
    inside = rows < num_rows
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + place, mask=inside, other=0.0)
    tl.store(delta_ptr + place, delta, mask=inside)
    lse = tl.load(lse_ptr + place, mask=inside, other=0.0)
    lse = tl.where(lse == float("-inf"), 0.0, lse * LOG2E)
    tl.store(lse_log2_ptr + place, lse, mask=inside)


@triton.jit(do_not_specialize=LENGTHS)
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, cu_q_ptr, cu_k_ptr, slopes_ptr, bias_ptr, seed_ptr,
    positions_q_ptr, positions_k_ptr,
    full_offsets_ptr, full_indices_ptr, partial_offsets_ptr, partial_indices_ptr,
    partial_tiles_ptr, tiles_ptr, lse_ptr, delta_ptr, dout_ptr, dk_ptr, dv_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
    stride_vh, stride_slopes, stride_bias_b, stride_bias_h, stride_bias_q, stride_mask_b,
    stride_mask_h,
    num_heads, group_size, total_q, total_k, left, right, scale_log2, softcap, keep_below,
    keep_scale, first_head, num_tiles,
    captured_ptr, captured_ints_ptr, size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7,
    size_8, size_9, size_10, size_11,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, LINEAR: tl.constexpr,
    ALIGN: tl.constexpr, PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, SCORE_MOD: tl.constexpr,
):  # fmt: skip
    """dk and dv of TILE_N keys of one kv head, summed over the query heads of its group. Scores are
    transposed, (TILE_N, TILE_M): p and ds are then in registers the left operand of the next
    product.
    """
    num_kv_heads = num_heads // group_size
    row_q, row_k, row_v = stride_qs * ALIGN, stride_ks * ALIGN, stride_vs * ALIGN
    tile, kv, b = locate_program(num_tiles, num_kv_heads, False)
    at = load_sequence(cu_q_ptr, cu_k_ptr, total_q, total_k, b)
    n0 = tile * TILE_N
    if n0 >= at.seqlen_k:
        return
    band, mirrored = Band(left, right), Band(right, left)
    seed = tl.load(seed_ptr) if seed_ptr is not None else None
    positions = TokenPositions(positions_q_ptr, positions_k_ptr, total_q)
    sizes = (
        size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7, size_8, size_9, size_10,
        size_11,
    )  # fmt: skip
    unit = scale_log2 if LINEAR else 1.0

    k_ptr = head_ptr(k_ptr, at.entry, at.start_k, kv, stride_kb, stride_ks, stride_kh, ALIGN)
    v_ptr = head_ptr(v_ptr, at.entry, at.start_k, kv, stride_vb, stride_vs, stride_vh, ALIGN)
    k = load_tile(k_ptr, n0, at.seqlen_k, row_k, HEAD_DIM, TILE_N, PAD_DIM, True)
    v = load_tile(v_ptr, n0, at.seqlen_k, row_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, True)
    rows, j = tl.arange(0, TILE_M), n0 + tl.arange(0, TILE_N)[:, None]
    dk = tl.zeros([TILE_N, PAD_DIM], tl.float32)
    dv = tl.zeros([TILE_N, PAD_DIM_V], tl.float32)
    stride_do = num_heads * HEAD_DIM_V
    for g in range(group_size):
        h = kv * group_size + g
        lists = MaskLists(
            full_offsets_ptr, full_indices_ptr, partial_offsets_ptr, partial_indices_ptr,
            partial_tiles_ptr, tiles_ptr, b * stride_mask_b + h * stride_mask_h,
        )  # fmt: skip
        slope = tl.load(slopes_ptr + b * stride_slopes + h) if slopes_ptr is not None else None
        plane = head_offset(b, h, stride_bias_b, stride_bias_h)
        score = ScoreMods(scale_log2, softcap, slope, bias_ptr, plane, stride_bias_q, positions)
        captured = CapturedElements(b, first_head + h, captured_ptr, captured_ints_ptr, sizes)
        dropout = Dropout(seed, keep_below, b, first_head + h, positions)
        q_h = head_ptr(q_ptr, at.entry, at.start_q, h, stride_qb, stride_qs, stride_qh, ALIGN)
        dout_h = result_ptr(dout_ptr, at.entry, at.start_q, h, total_q, num_heads, HEAD_DIM_V)
        lse_h = lse_ptr + row_offset(at, h, num_heads, total_q)
        delta_h = delta_ptr + row_offset(at, h, num_heads, total_q)
        walk = walk_tiles(mirrored, lists, n0, n0 + TILE_N, at.seqlen_k, at.seqlen_q, TILE_M)
        for t in range(walk.num_unmasked):  # every key visible to every row
            m = get_unmasked_tile(walk, lists, t, TILE_M)
            q = load_tile(q_h, m, at.seqlen_q, row_q, HEAD_DIM, TILE_M, PAD_DIM, False)
            do = load_tile(dout_h, m, at.seqlen_q, stride_do, HEAD_DIM_V, TILE_M, PAD_DIM_V, False)
            lse = load_rows(lse_h, m, at.seqlen_q, TILE_M, False)
            delta = load_rows(delta_h, m, at.seqlen_q, TILE_M, False)
            s = dot(k, tl.trans(q), None)
            s, softcap_grad = apply_score_mods(score, s, at, (m + rows)[None, :], j, LINEAR)
            s, by_score = modify_scores(captured, s, (m + rows)[None, :], j, SCORE_MOD)
            keep = None
            if seed is not None:
                keep = draw_keep_mask(dropout, at, m + rows, n0, TILE_M, TILE_N, True)
            dp = dot(v, tl.trans(do), None)
            p, ds = score_gradient(s, dp, lse[None, :], delta[None, :], keep, unit, keep_scale)
            dv = dot(round_to(p, do.dtype), do, dv)
            ds = times_derivative(ds, by_score, SCORE_MOD)
            dk = dot(round_to(ds * softcap_grad, q.dtype), q, dk)
        for t in range(walk.num_masked):  # cut by the diagonal, the window, the mask or the end
            m, bits = get_masked_tile(walk, lists, t, TILE_M)
            q = load_tile(q_h, m, at.seqlen_q, row_q, HEAD_DIM, TILE_M, PAD_DIM, True)
            do = load_tile(dout_h, m, at.seqlen_q, stride_do, HEAD_DIM_V, TILE_M, PAD_DIM_V, True)
            lse = load_rows(lse_h, m, at.seqlen_q, TILE_M, True)
            delta = load_rows(delta_h, m, at.seqlen_q, TILE_M, True)
            s = dot(k, tl.trans(q), None)
            s, softcap_grad = apply_score_mods(score, s, at, (m + rows)[None, :], j, LINEAR)
            s, by_score = modify_scores(captured, s, (m + rows)[None, :], j, SCORE_MOD)
            inside = (m + rows < at.seqlen_q)[None, :]
            seen = is_visible(at, band, lists, bits, (m + rows)[None, :], j, n0, inside, TILE_N)
            s = tl.where(seen, s, float("-inf"))
            keep = None
            if seed is not None:
                keep = draw_keep_mask(dropout, at, m + rows, n0, TILE_M, TILE_N, True)
            dp = dot(v, tl.trans(do), None)
            p, ds = score_gradient(s, dp, lse[None, :], delta[None, :], keep, unit, keep_scale)
            dv = dot(round_to(p, do.dtype), do, dv)
            ds = times_derivative(ds, by_score, SCORE_MOD)
            dk = dot(round_to(ds * softcap_grad, q.dtype), q, dk)

    dk_ptr = result_ptr(dk_ptr, at.entry, at.start_k, kv, total_k, num_kv_heads, HEAD_DIM)
    dv_ptr = result_ptr(dv_ptr, at.entry, at.start_k, kv, total_k, num_kv_heads, HEAD_DIM_V)
    stride_dk, stride_dv = num_kv_heads * HEAD_DIM, num_kv_heads * HEAD_DIM_V
    dk, dv = dk * (scale_log2 * LN2), dv * keep_scale
    store_tile(dk_ptr, dk, n0, at.seqlen_k, stride_dk, HEAD_DIM, TILE_N, PAD_DIM)
    store_tile(dv_ptr, dv, n0, at.seqlen_k, stride_dv, HEAD_DIM_V, TILE_N, PAD_DIM_V)


@triton.jit(do_not_specialize=LENGTHS)
def dq_kernel(
    q_ptr, k_ptr, v_ptr, cu_q_ptr, cu_k_ptr, slopes_ptr, bias_ptr, seed_ptr,
    positions_q_ptr, positions_k_ptr,
    full_offsets_ptr, full_indices_ptr, partial_offsets_ptr, partial_indices_ptr,
    partial_tiles_ptr, tiles_ptr, lse_ptr, delta_ptr, dout_ptr, dq_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
    stride_vh, stride_slopes, stride_bias_b, stride_bias_h, stride_bias_q, stride_mask_b,
    stride_mask_h,
    num_heads, group_size, total_q, total_k, left, right, scale_log2, softcap, keep_below,
    keep_scale, first_head, num_tiles,
    captured_ptr, captured_ints_ptr, size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7,
    size_8, size_9, size_10, size_11,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, LINEAR: tl.constexpr,
    ALIGN: tl.constexpr, PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, SCORE_MOD: tl.constexpr,
):  # fmt: skip
    """dq of TILE_M queries of one head, with the loop of the forward."""
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
    slope = tl.load(slopes_ptr + b * stride_slopes + h) if slopes_ptr is not None else None
    plane = head_offset(b, h, stride_bias_b, stride_bias_h)
    positions = TokenPositions(positions_q_ptr, positions_k_ptr, total_q)
    score = ScoreMods(scale_log2, softcap, slope, bias_ptr, plane, stride_bias_q, positions)
    sizes = (
        size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7, size_8, size_9, size_10,
        size_11,
    )  # fmt: skip
    captured = CapturedElements(b, first_head + h, captured_ptr, captured_ints_ptr, sizes)
    seed = tl.load(seed_ptr) if seed_ptr is not None else None
    dropout = Dropout(seed, keep_below, b, first_head + h, positions)
    unit = scale_log2 if LINEAR else 1.0

    kv = h // group_size
    row_q, row_k, row_v = stride_qs * ALIGN, stride_ks * ALIGN, stride_vs * ALIGN
    q_ptr = head_ptr(q_ptr, at.entry, at.start_q, h, stride_qb, stride_qs, stride_qh, ALIGN)
    k_ptr = head_ptr(k_ptr, at.entry, at.start_k, kv, stride_kb, stride_ks, stride_kh, ALIGN)
    v_ptr = head_ptr(v_ptr, at.entry, at.start_k, kv, stride_vb, stride_vs, stride_vh, ALIGN)
    dout_ptr = result_ptr(dout_ptr, at.entry, at.start_q, h, total_q, num_heads, HEAD_DIM_V)
    first = row_offset(at, h, num_heads, total_q)
    q = load_tile(q_ptr, m0, at.seqlen_q, row_q, HEAD_DIM, TILE_M, PAD_DIM, True)
    stride_do = num_heads * HEAD_DIM_V
    do = load_tile(dout_ptr, m0, at.seqlen_q, stride_do, HEAD_DIM_V, TILE_M, PAD_DIM_V, True)
    lse = load_rows(lse_ptr + first, m0, at.seqlen_q, TILE_M, True)[:, None]
    delta = load_rows(delta_ptr + first, m0, at.seqlen_q, TILE_M, True)[:, None]
    rows, keys = m0 + tl.arange(0, TILE_M), tl.arange(0, TILE_N)
    i = rows[:, None]
    dq = tl.zeros([TILE_M, PAD_DIM], tl.float32)
    walk = walk_tiles(band, lists, m0, m0 + TILE_M, at.seqlen_q, at.seqlen_k, TILE_N)
    for t in range(walk.num_unmasked):  # every key visible to every row
        n = get_unmasked_tile(walk, lists, t, TILE_N)
        k = load_tile(k_ptr, n, at.seqlen_k, row_k, HEAD_DIM, TILE_N, PAD_DIM, False)
        v = load_tile(v_ptr, n, at.seqlen_k, row_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, False)
        s = dot(q, tl.trans(k), None)
        s, softcap_grad = apply_score_mods(score, s, at, i, (n + keys)[None, :], LINEAR)
        s, by_score = modify_scores(captured, s, i, (n + keys)[None, :], SCORE_MOD)
        keep = (
            draw_keep_mask(dropout, at, rows, n, TILE_M, TILE_N, False)
            if seed is not None
            else None
        )
        dp = dot(do, tl.trans(v), None)
        _, ds = score_gradient(s, dp, lse, delta, keep, unit, keep_scale)
        ds = times_derivative(ds, by_score, SCORE_MOD)
        dq = dot(round_to(ds * softcap_grad, k.dtype), k, dq)
    for t in range(walk.num_masked):  # cut by the diagonal, the window, the mask or the end
        n, bits = get_masked_tile(walk, lists, t, TILE_N)
        k = load_tile(k_ptr, n, at.seqlen_k, row_k, HEAD_DIM, TILE_N, PAD_DIM, True)
        v = load_tile(v_ptr, n, at.seqlen_k, row_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, True)
        s = dot(q, tl.trans(k), None)
        s, softcap_grad = apply_score_mods(score, s, at, i, (n + keys)[None, :], LINEAR)
        s, by_score = modify_scores(captured, s, i, (n + keys)[None, :], SCORE_MOD)
        inside = (n + keys < at.seqlen_k)[None, :]
        seen = is_visible(at, band, lists, bits, i, (n + keys)[None, :], n, inside, TILE_N)
        s = tl.where(seen, s, float("-inf"))
        keep = (
            draw_keep_mask(dropout, at, rows, n, TILE_M, TILE_N, False)
            if seed is not None
            else None
        )
        dp = dot(do, tl.trans(v), None)
        _, ds = score_gradient(s, dp, lse, delta, keep, unit, keep_scale)
        ds = times_derivative(ds, by_score, SCORE_MOD)
        dq = dot(round_to(ds * softcap_grad, k.dtype), k, dq)

    dq_ptr = result_ptr(dq_ptr, at.entry, at.start_q, h, total_q, num_heads, HEAD_DIM)
    dq = dq * (scale_log2 * LN2)
    store_tile(dq_ptr, dq, m0, at.seqlen_q, num_heads * HEAD_DIM, HEAD_DIM, TILE_M, PAD_DIM)


_delta_kernel = CachedLauncher(delta_kernel)
_dkdv_kernel = CachedLauncher(dkdv_kernel)
_dq_kernel = CachedLauncher(dq_kernel)


def backward(
    problem: Problem, x: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    args = LaunchArgs.of(problem, x)
    delta, lse_log2 = _delta(args, out, lse, dout, dlse)
    saved = (lse_log2, delta, dout.to(problem.dtype))
    dk, dv = _dkdv(problem, args, x, saved)
    dq = _dq(problem, args, x, saved)
    dbias = None if x.bias is None else bias_gradient(problem, args, saved)
    dsinks = None if x.sinks is None else sink_gradient(x.sinks, lse, delta)
    has_gradient = x.captured is not None and not problem.captured_is_constant
    dcaptured = captured_gradient(problem, args, saved) if has_gradient else None
    return Grads(dq, dk, dv, dbias, dsinks, dcaptured)


def _delta(
    args: LaunchArgs, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor]:
    config = args.config("delta")
    delta, lse_log2 = lse.new_empty(2, *lse.shape)
    if lse.numel():
        _delta_kernel[(triton.cdiv(lse.numel(), config.tile_m),)](
            out, dout, lse, make_contiguous(dlse), delta, lse_log2,
            out.shape[-2], out.shape[-3], lse.numel(),
            HEAD_DIM_V=args.dims[1], PAD_DIM_V=args.dims[5], TILE_M=config.tile_m,
            **launch_options(config),
        )  # fmt: skip
    return delta, lse_log2


def _dkdv(problem: Problem, args: LaunchArgs, x: Tensors, saved: tuple) -> tuple[Tensor, Tensor]:
    wide = grad_dtype(problem)
    dk, dv = x.k.new_empty(x.k.shape, dtype=wide), x.v.new_empty(x.v.shape, dtype=wide)
    config = args.config("dkdv")
    num_tiles = triton.cdiv(problem.seqlen_k, config.tile_n)
    grid = num_tiles * problem.num_kv_heads * problem.batch
    if grid:
        _dkdv_kernel[(grid,)](
            *args.tensors, *args.cols, *saved, dk, dv,
            *args.strides, *args.col_strides, *args.scalars, num_tiles, *args.captured,
            *args.dims, TILE_M=config.tile_m, TILE_N=config.tile_n, SCORE_MOD=args.score_mod,
            **launch_options(config),
        )  # fmt: skip
    return dk, dv


def _dq(problem: Problem, args: LaunchArgs, x: Tensors, saved: tuple) -> Tensor:
    dq = x.q.new_empty(x.q.shape, dtype=grad_dtype(problem))
    config = args.config("dq")
    num_tiles = triton.cdiv(problem.seqlen_q, config.tile_m)
    grid = num_tiles * problem.num_heads * problem.batch
    if grid:
        _dq_kernel[(grid,)](
            *args.tensors, *args.rows, *saved, dq,
            *args.strides, *args.row_strides, *args.scalars, num_tiles, *args.captured,
            *args.dims, TILE_M=config.tile_m, TILE_N=config.tile_n, SCORE_MOD=args.score_mod,
            **launch_options(config),
        )  # fmt: skip
    return dq
