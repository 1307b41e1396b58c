"""The backward in Triton: p is recomputed from lse, tile by tile, twice. One kernel owns tiles of
keys and sums dk and dv over the queries, another owns tiles of queries and sums dq over the keys.
Nothing is added atomically: results are the same bit by bit, run after run.
"""

import triton
import triton.language as tl
from torch import Tensor

from onchip.core.backend import Grads, grad_dtype, sink_gradient
from onchip.core.problem import Problem, Tensors
from onchip.kernels.runtime.launcher import Handle
from onchip.kernels.triton.bias import bias_gradient
from onchip.kernels.triton.launch import LENGTHS, Call, launch_options, packed
from onchip.kernels.triton.tile import (
    LN2,
    LOG2E,
    Band,
    Dropout,
    Lists,
    Places,
    Score,
    dot,
    kept,
    load_rows,
    load_tile,
    masked_tile,
    matrix,
    plane_of,
    program_place,
    result_matrix,
    rounded,
    row_offset,
    score_gradient,
    scores,
    sequence_of,
    store_tile,
    unmasked_tile,
    visible,
    walk_tiles,
)


@triton.jit(do_not_specialize=("num_rows", "total_q"))
def delta_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, delta_ptr, lse_log2_ptr,
    num_heads, total_q, num_rows,
    HEAD_DIM_V: tl.constexpr,
    PAD_DIM_V: tl.constexpr, TILE_M: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(out * dout) - dlse, and lse in log2 units, for exp2(s - lse): 0 for a row that
    has seen nothing, whose s is -inf throughout. Rows come in the order of out.
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
    places_q_ptr, places_k_ptr,
    full_offsets_ptr, full_indices_ptr, partial_offsets_ptr, partial_indices_ptr,
    partial_tiles_ptr, tiles_ptr, lse_ptr, delta_ptr, dout_ptr, dk_ptr, dv_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
    stride_vh, stride_slopes, stride_bias_b, stride_bias_h, stride_bias_q, stride_mask_b,
    stride_mask_h,
    num_heads, group_size, total_q, total_k, left, right, scale_log2, softcap, keep_below,
    keep_scale, first_head, num_tiles,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, LINEAR: tl.constexpr,
    ALIGN: tl.constexpr, PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of TILE_N keys of one head, summed over the queries of its group. Scores are
    transposed, (TILE_N, TILE_M), so that p and ds feed the next product from registers.
    """
    num_kv_heads = num_heads // group_size
    row_q, row_k, row_v = stride_qs * ALIGN, stride_ks * ALIGN, stride_vs * ALIGN
    tile, kv, b = program_place(num_tiles, num_kv_heads, False)
    at = sequence_of(cu_q_ptr, cu_k_ptr, total_q, total_k, b)
    n0 = tile * TILE_N
    if n0 >= at.seqlen_k:
        return
    band, mirrored = Band(left, right), Band(right, left)
    seed = tl.load(seed_ptr) if seed_ptr is not None else None
    places = Places(places_q_ptr, places_k_ptr, total_q)
    unit = scale_log2 if LINEAR else 1.0

    k_ptr = matrix(k_ptr, at.entry, at.start_k, kv, stride_kb, stride_ks, stride_kh, ALIGN)
    v_ptr = matrix(v_ptr, at.entry, at.start_k, kv, stride_vb, stride_vs, stride_vh, ALIGN)
    k = load_tile(k_ptr, n0, at.seqlen_k, row_k, HEAD_DIM, TILE_N, PAD_DIM, True)
    v = load_tile(v_ptr, n0, at.seqlen_k, row_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, True)
    rows, j = tl.arange(0, TILE_M), n0 + tl.arange(0, TILE_N)[:, None]
    dk = tl.zeros([TILE_N, PAD_DIM], tl.float32)
    dv = tl.zeros([TILE_N, PAD_DIM_V], tl.float32)
    stride_do = num_heads * HEAD_DIM_V
    for g in range(group_size):
        h = kv * group_size + g
        lists = Lists(
            full_offsets_ptr, full_indices_ptr, partial_offsets_ptr, partial_indices_ptr,
            partial_tiles_ptr, tiles_ptr, b * stride_mask_b + h * stride_mask_h,
        )  # fmt: skip
        slope = tl.load(slopes_ptr + b * stride_slopes + h) if slopes_ptr is not None else None
        plane = plane_of(b, h, stride_bias_b, stride_bias_h)
        score = Score(scale_log2, softcap, slope, bias_ptr, plane, stride_bias_q, places)
        dropout = Dropout(seed, keep_below, b, first_head + h, places)
        q_h = matrix(q_ptr, at.entry, at.start_q, h, stride_qb, stride_qs, stride_qh, ALIGN)
        dout_h = result_matrix(dout_ptr, at.entry, at.start_q, h, total_q, num_heads, HEAD_DIM_V)
        lse_h = lse_ptr + row_offset(at, h, num_heads, total_q)
        delta_h = delta_ptr + row_offset(at, h, num_heads, total_q)
        walk = walk_tiles(mirrored, lists, n0, n0 + TILE_N, at.seqlen_k, at.seqlen_q, TILE_M)
        for t in range(walk.num_unmasked):  # every key visible to every row
            m = unmasked_tile(walk, lists, t, TILE_M)
            q = load_tile(q_h, m, at.seqlen_q, row_q, HEAD_DIM, TILE_M, PAD_DIM, False)
            do = load_tile(dout_h, m, at.seqlen_q, stride_do, HEAD_DIM_V, TILE_M, PAD_DIM_V, False)
            lse = load_rows(lse_h, m, at.seqlen_q, TILE_M, False)
            delta = load_rows(delta_h, m, at.seqlen_q, TILE_M, False)
            s = dot(k, tl.trans(q), None)
            s, bend = scores(score, s, at, (m + rows)[None, :], j, LINEAR)
            keep = None
            if seed is not None:
                keep = kept(dropout, at, m + rows, n0, TILE_M, TILE_N, True)
            dp = dot(v, tl.trans(do), None)
            p, ds = score_gradient(s, dp, lse[None, :], delta[None, :], keep, unit, keep_scale)
            dv = dot(rounded(p, do.dtype), do, dv)
            dk = dot(rounded(ds * bend, q.dtype), q, dk)
        for t in range(walk.num_masked):  # tiles cut by the diagonal, the window, the mask, the end
            m, bits = masked_tile(walk, lists, t, TILE_M)
            q = load_tile(q_h, m, at.seqlen_q, row_q, HEAD_DIM, TILE_M, PAD_DIM, True)
            do = load_tile(dout_h, m, at.seqlen_q, stride_do, HEAD_DIM_V, TILE_M, PAD_DIM_V, True)
            lse = load_rows(lse_h, m, at.seqlen_q, TILE_M, True)
            delta = load_rows(delta_h, m, at.seqlen_q, TILE_M, True)
            s = dot(k, tl.trans(q), None)
            s, bend = scores(score, s, at, (m + rows)[None, :], j, LINEAR)
            inside = (m + rows < at.seqlen_q)[None, :]
            seen = visible(at, band, lists, bits, (m + rows)[None, :], j, n0, inside, TILE_N)
            s = tl.where(seen, s, float("-inf"))
            keep = None
            if seed is not None:
                keep = kept(dropout, at, m + rows, n0, TILE_M, TILE_N, True)
            dp = dot(v, tl.trans(do), None)
            p, ds = score_gradient(s, dp, lse[None, :], delta[None, :], keep, unit, keep_scale)
            dv = dot(rounded(p, do.dtype), do, dv)
            dk = dot(rounded(ds * bend, q.dtype), q, dk)

    dk_ptr = result_matrix(dk_ptr, at.entry, at.start_k, kv, total_k, num_kv_heads, HEAD_DIM)
    dv_ptr = result_matrix(dv_ptr, at.entry, at.start_k, kv, total_k, num_kv_heads, HEAD_DIM_V)
    stride_dk, stride_dv = num_kv_heads * HEAD_DIM, num_kv_heads * HEAD_DIM_V
    dk, dv = dk * (scale_log2 * LN2), dv * keep_scale
    store_tile(dk_ptr, dk, n0, at.seqlen_k, stride_dk, HEAD_DIM, TILE_N, PAD_DIM)
    store_tile(dv_ptr, dv, n0, at.seqlen_k, stride_dv, HEAD_DIM_V, TILE_N, PAD_DIM_V)


@triton.jit(do_not_specialize=LENGTHS)
def dq_kernel(
    q_ptr, k_ptr, v_ptr, cu_q_ptr, cu_k_ptr, slopes_ptr, bias_ptr, seed_ptr,
    places_q_ptr, places_k_ptr,
    full_offsets_ptr, full_indices_ptr, partial_offsets_ptr, partial_indices_ptr,
    partial_tiles_ptr, tiles_ptr, lse_ptr, delta_ptr, dout_ptr, dq_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
    stride_vh, stride_slopes, stride_bias_b, stride_bias_h, stride_bias_q, stride_mask_b,
    stride_mask_h,
    num_heads, group_size, total_q, total_k, left, right, scale_log2, softcap, keep_below,
    keep_scale, first_head, num_tiles,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, LINEAR: tl.constexpr,
    ALIGN: tl.constexpr, PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):  # fmt: skip
    """dq of TILE_M queries of one head: the walk of the forward."""
    tile, h, b = program_place(num_tiles, num_heads, right is not None)
    at = sequence_of(cu_q_ptr, cu_k_ptr, total_q, total_k, b)
    m0 = tile * TILE_M
    if m0 >= at.seqlen_q:
        return
    band = Band(left, right)
    lists = Lists(
        full_offsets_ptr, full_indices_ptr, partial_offsets_ptr, partial_indices_ptr,
        partial_tiles_ptr, tiles_ptr, b * stride_mask_b + h * stride_mask_h,
    )  # fmt: skip
    slope = tl.load(slopes_ptr + b * stride_slopes + h) if slopes_ptr is not None else None
    plane = plane_of(b, h, stride_bias_b, stride_bias_h)
    places = Places(places_q_ptr, places_k_ptr, total_q)
    score = Score(scale_log2, softcap, slope, bias_ptr, plane, stride_bias_q, places)
    seed = tl.load(seed_ptr) if seed_ptr is not None else None
    dropout = Dropout(seed, keep_below, b, first_head + h, places)
    unit = scale_log2 if LINEAR else 1.0

    kv = h // group_size
    row_q, row_k, row_v = stride_qs * ALIGN, stride_ks * ALIGN, stride_vs * ALIGN
    q_ptr = matrix(q_ptr, at.entry, at.start_q, h, stride_qb, stride_qs, stride_qh, ALIGN)
    k_ptr = matrix(k_ptr, at.entry, at.start_k, kv, stride_kb, stride_ks, stride_kh, ALIGN)
    v_ptr = matrix(v_ptr, at.entry, at.start_k, kv, stride_vb, stride_vs, stride_vh, ALIGN)
    dout_ptr = result_matrix(dout_ptr, at.entry, at.start_q, h, total_q, num_heads, HEAD_DIM_V)
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
        n = unmasked_tile(walk, lists, t, TILE_N)
        k = load_tile(k_ptr, n, at.seqlen_k, row_k, HEAD_DIM, TILE_N, PAD_DIM, False)
        v = load_tile(v_ptr, n, at.seqlen_k, row_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, False)
        s = dot(q, tl.trans(k), None)
        s, bend = scores(score, s, at, i, (n + keys)[None, :], LINEAR)
        keep = kept(dropout, at, rows, n, TILE_M, TILE_N, False) if seed is not None else None
        dp = dot(do, tl.trans(v), None)
        _, ds = score_gradient(s, dp, lse, delta, keep, unit, keep_scale)
        dq = dot(rounded(ds * bend, k.dtype), k, dq)
    for t in range(walk.num_masked):  # tiles cut by the diagonal, the window, the mask or the end
        n, bits = masked_tile(walk, lists, t, TILE_N)
        k = load_tile(k_ptr, n, at.seqlen_k, row_k, HEAD_DIM, TILE_N, PAD_DIM, True)
        v = load_tile(v_ptr, n, at.seqlen_k, row_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, True)
        s = dot(q, tl.trans(k), None)
        s, bend = scores(score, s, at, i, (n + keys)[None, :], LINEAR)
        inside = (n + keys < at.seqlen_k)[None, :]
        seen = visible(at, band, lists, bits, i, (n + keys)[None, :], n, inside, TILE_N)
        s = tl.where(seen, s, float("-inf"))
        keep = kept(dropout, at, rows, n, TILE_M, TILE_N, False) if seed is not None else None
        dp = dot(do, tl.trans(v), None)
        _, ds = score_gradient(s, dp, lse, delta, keep, unit, keep_scale)
        dq = dot(rounded(ds * bend, k.dtype), k, dq)

    dq_ptr = result_matrix(dq_ptr, at.entry, at.start_q, h, total_q, num_heads, HEAD_DIM)
    dq = dq * (scale_log2 * LN2)
    store_tile(dq_ptr, dq, m0, at.seqlen_q, num_heads * HEAD_DIM, HEAD_DIM, TILE_M, PAD_DIM)


_delta_kernel = Handle(delta_kernel)
_dkdv_kernel = Handle(dkdv_kernel)
_dq_kernel = Handle(dq_kernel)


def backward(
    problem: Problem, x: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    call = Call.of(problem, x)
    delta, lse_log2 = _delta(call, out, lse, dout, dlse)
    saved = (lse_log2, delta, dout.to(problem.dtype))
    dk, dv = _dkdv(problem, call, x, saved)
    dq = _dq(problem, call, x, saved)
    dbias = None if x.bias is None else bias_gradient(problem, call, saved)
    dsinks = None if x.sinks is None else sink_gradient(x.sinks, lse, delta)
    return Grads(dq, dk, dv, dbias, dsinks)


def _delta(
    call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor]:
    config = call.config("delta")
    delta, lse_log2 = lse.new_empty(2, *lse.shape)
    if lse.numel():
        _delta_kernel[(triton.cdiv(lse.numel(), config.tile_m),)](
            out, dout, lse, packed(dlse), delta, lse_log2,
            out.shape[-2], out.shape[-3], lse.numel(),
            HEAD_DIM_V=call.dims[1], PAD_DIM_V=call.dims[5], TILE_M=config.tile_m,
            **launch_options(config),
        )  # fmt: skip
    return delta, lse_log2


def _dkdv(problem: Problem, call: Call, x: Tensors, saved: tuple) -> tuple[Tensor, Tensor]:
    wide = grad_dtype(problem)
    dk, dv = x.k.new_empty(x.k.shape, dtype=wide), x.v.new_empty(x.v.shape, dtype=wide)
    config = call.config("dkdv")
    num_tiles = triton.cdiv(problem.seqlen_k, config.tile_n)
    grid = num_tiles * problem.num_kv_heads * problem.batch
    if grid:
        _dkdv_kernel[(grid,)](
            *call.tensors, *call.cols, *saved, dk, dv,
            *call.strides, *call.col_strides, *call.scalars, num_tiles,
            *call.dims, TILE_M=config.tile_m, TILE_N=config.tile_n, **launch_options(config),
        )  # fmt: skip
    return dk, dv


def _dq(problem: Problem, call: Call, x: Tensors, saved: tuple) -> Tensor:
    dq = x.q.new_empty(x.q.shape, dtype=grad_dtype(problem))
    config = call.config("dq")
    num_tiles = triton.cdiv(problem.seqlen_q, config.tile_m)
    grid = num_tiles * problem.num_heads * problem.batch
    if grid:
        _dq_kernel[(grid,)](
            *call.tensors, *call.rows, *saved, dq,
            *call.strides, *call.row_strides, *call.scalars, num_tiles,
            *call.dims, TILE_M=config.tile_m, TILE_N=config.tile_n, **launch_options(config),
        )  # fmt: skip
    return dq
