"""Second derivatives in Triton: the gradients of the tangents of out and lse, in two passes.

    tangent_kernel   pass 1, one program per tile of queries: lse, t_lse, delta, phi of each row
    second_dkdv      pass 2, one program per tile of keys     loops over queries:  dk, dv
    second_dq        pass 2, one program per tile of queries  loops over keys:     dq

    one tile:  p = exp2(s - lse)   r = ds - t_lse   g = dout . v - delta   h = dout . t_v
               dL/d(ds) = p g      dL/ds = p (r g + h - phi)               dv += (p r)^T dout
               dq += dL/ds k + dL/d(ds) t_k         dk += (dL/ds)^T q + (dL/d(ds))^T t_q

t_ marks tangents, ds is that of the scores, and L = dout . t_out + dlse . t_lse. docs/fold.md
("Second derivatives") derives the formulas. The loops are the loops of backward.py, in which each
tile of q, k and v comes with the tile of its tangent. Nothing is saved. There are no atomics, so
results are bitwise reproducible.

Worked shape: batch 1, one head, 300 tokens, tiles of 128, causal. Three programs of each kernel;
the program of keys 0 to 127 visits queries 0 to 127 masked, then all others: eight products a tile,
of which the backward has four.

kernels/cpu/second.py teaches these passes, examples/versions/v2.py the loop.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.core.backend import Grads, Tangents, grad_dtype
from onchip.core.problem import Problem, Tensors
from onchip.kernels.runtime.launcher import CachedLauncher
from onchip.kernels.triton.bias import split_sum
from onchip.kernels.triton.launch import LOG2E, LaunchArgs, launch_options
from onchip.kernels.triton.tangent import (
    TANGENT_LENGTHS,
    TangentArgs,
    load_tangent,
    product_tangent,
    row_numbers,
    score_tangent,
    tangent_ptr,
)
from onchip.kernels.triton.tile import (
    BLOCK,
    EMPTY,
    LN2,
    Band,
    MaskLists,
    ScoreMods,
    TokenPositions,
    apply_score_mods,
    crosses_band,
    dot,
    find_block_bits,
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
    split_digits,
    store_tile,
    tanh,
    walk_tiles,
)


@triton.jit(do_not_specialize=TANGENT_LENGTHS)
def second_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, cu_q_ptr, cu_k_ptr, slopes_ptr, bias_ptr,
    full_offsets_ptr, full_indices_ptr, partial_offsets_ptr, partial_indices_ptr,
    partial_tiles_ptr, tiles_ptr, t_q_ptr, t_k_ptr, t_v_ptr, t_slopes_ptr, t_bias_ptr,
    rows_ptr, dout_ptr, dk_ptr, dv_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
    stride_vh, stride_slopes, stride_bias_b, stride_bias_h, stride_bias_q, stride_mask_b,
    stride_mask_h, stride_t_slopes, stride_t_bias_b, stride_t_bias_h, stride_t_bias_q, stride_rows,
    num_heads, group_size, total_q, total_k, left, right, scale_log2, softcap, num_tiles,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, LINEAR: tl.constexpr,
    ALIGN: tl.constexpr, PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):  # fmt: skip
    """dk and dv of TILE_N keys of one kv head, summed over the query heads of its group. Scores are
    transposed, (TILE_N, TILE_M), as in backward.dkdv_kernel.
    """
    num_kv = num_heads // group_size
    row_q, row_k, row_v = stride_qs * ALIGN, stride_ks * ALIGN, stride_vs * ALIGN
    tile, kv, b = locate_program(num_tiles, num_kv, False)
    at = load_sequence(cu_q_ptr, cu_k_ptr, total_q, total_k, b)
    n0 = tile * TILE_N
    if n0 >= at.seqlen_k:
        return
    band, mirrored = Band(left, right), Band(right, left)
    positions = TokenPositions(None, None, total_q)
    unit = scale_log2 if LINEAR else 1.0

    k_ptr = head_ptr(k_ptr, at.entry, at.start_k, kv, stride_kb, stride_ks, stride_kh, ALIGN)
    v_ptr = head_ptr(v_ptr, at.entry, at.start_k, kv, stride_vb, stride_vs, stride_vh, ALIGN)
    t_k_ptr = tangent_ptr(t_k_ptr, at.entry, at.start_k, kv, total_k, num_kv, HEAD_DIM)
    t_v_ptr = tangent_ptr(t_v_ptr, at.entry, at.start_k, kv, total_k, num_kv, HEAD_DIM_V)
    row_t, row_t_v = num_kv * HEAD_DIM, num_kv * HEAD_DIM_V
    k = load_tile(k_ptr, n0, at.seqlen_k, row_k, HEAD_DIM, TILE_N, PAD_DIM, True)
    v = load_tile(v_ptr, n0, at.seqlen_k, row_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, True)
    t_k = load_tangent(t_k_ptr, n0, at.seqlen_k, row_t, HEAD_DIM, TILE_N, PAD_DIM, True)
    t_v = load_tangent(t_v_ptr, n0, at.seqlen_k, row_t_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, True)
    queries, j = tl.arange(0, TILE_M), n0 + tl.arange(0, TILE_N)[:, None]
    dk = tl.zeros([TILE_N, PAD_DIM], tl.float32)
    dv = tl.zeros([TILE_N, PAD_DIM_V], tl.float32)
    row_t_q, row_do = num_heads * HEAD_DIM, num_heads * HEAD_DIM_V
    for g in range(group_size):
        h = kv * group_size + g
        lists = MaskLists(
            full_offsets_ptr, full_indices_ptr, partial_offsets_ptr, partial_indices_ptr,
            partial_tiles_ptr, tiles_ptr, b * stride_mask_b + h * stride_mask_h,
        )  # fmt: skip
        slope = tl.load(slopes_ptr + b * stride_slopes + h) if slopes_ptr is not None else None
        t_slope = (
            tl.load(t_slopes_ptr + b * stride_t_slopes + h) if t_slopes_ptr is not None else None
        )
        plane = head_offset(b, h, stride_bias_b, stride_bias_h)
        score = ScoreMods(scale_log2, softcap, slope, bias_ptr, plane, stride_bias_q, positions)
        plane = head_offset(b, h, stride_t_bias_b, stride_t_bias_h)
        t_score = ScoreMods(
            scale_log2, None, t_slope, t_bias_ptr, plane, stride_t_bias_q, positions
        )
        q_h = head_ptr(q_ptr, at.entry, at.start_q, h, stride_qb, stride_qs, stride_qh, ALIGN)
        t_q_h = tangent_ptr(t_q_ptr, at.entry, at.start_q, h, total_q, num_heads, HEAD_DIM)
        dout_h = result_ptr(dout_ptr, at.entry, at.start_q, h, total_q, num_heads, HEAD_DIM_V)
        rows_h = rows_ptr + row_offset(at, h, num_heads, total_q)
        walk = walk_tiles(mirrored, lists, n0, n0 + TILE_N, at.seqlen_k, at.seqlen_q, TILE_M)
        for t in range(walk.num_unmasked):  # every key visible to every row
            m = get_unmasked_tile(walk, lists, t, TILE_M)
            i = (m + queries)[None, :]
            q = load_tile(q_h, m, at.seqlen_q, row_q, HEAD_DIM, TILE_M, PAD_DIM, False)
            t_q = load_tangent(t_q_h, m, at.seqlen_q, row_t_q, HEAD_DIM, TILE_M, PAD_DIM, False)
            do = load_tile(dout_h, m, at.seqlen_q, row_do, HEAD_DIM_V, TILE_M, PAD_DIM_V, False)
            lse, t_lse, delta, phi = load_row_numbers(
                rows_h, stride_rows, m, at.seqlen_q, TILE_M, False
            )
            x = dot(k, tl.trans(q), None)
            t_x = product_tangent(k, t_k, q, t_q)
            s, softcap_grad = apply_score_mods(score, x, at, i, j, LINEAR)
            p = tl.exp2(s * unit - lse[None, :])
            ds = score_tangent(t_score, t_x, softcap_grad, p, at, i, j)
            dp = dot(v, tl.trans(do), None)
            h_dout = value_tangent(t_v, do)
            pr, grad_s, grad_ds = second_gradients(
                p, ds, dp, h_dout, t_lse[None, :], delta[None, :], phi[None, :]
            )
            grad_x, grad_t_x = chain_softcap(score, x, t_x, softcap_grad, grad_s, grad_ds)
            dv = dot(round_to(pr, do.dtype), do, dv)
            dk = dot(round_to(grad_x, q.dtype), q, dk)
            if t_q is not None:
                dk = dot(round_to(grad_t_x, q.dtype), t_q, dk)
        for t in range(walk.num_masked):  # cut by the diagonal, the window, the mask or the end
            m, bits = get_masked_tile(walk, lists, t, TILE_M)
            i = (m + queries)[None, :]
            q = load_tile(q_h, m, at.seqlen_q, row_q, HEAD_DIM, TILE_M, PAD_DIM, True)
            t_q = load_tangent(t_q_h, m, at.seqlen_q, row_t_q, HEAD_DIM, TILE_M, PAD_DIM, True)
            do = load_tile(dout_h, m, at.seqlen_q, row_do, HEAD_DIM_V, TILE_M, PAD_DIM_V, True)
            lse, t_lse, delta, phi = load_row_numbers(
                rows_h, stride_rows, m, at.seqlen_q, TILE_M, True
            )
            x = dot(k, tl.trans(q), None)
            t_x = product_tangent(k, t_k, q, t_q)
            s, softcap_grad = apply_score_mods(score, x, at, i, j, LINEAR)
            inside = (m + queries < at.seqlen_q)[None, :]
            seen = is_visible(at, band, lists, bits, i, j, n0, inside, TILE_N)
            p = tl.exp2(tl.where(seen, s * unit, float("-inf")) - lse[None, :])
            ds = score_tangent(t_score, t_x, softcap_grad, p, at, i, j)
            dp = dot(v, tl.trans(do), None)
            h_dout = value_tangent(t_v, do)
            pr, grad_s, grad_ds = second_gradients(
                p, ds, dp, h_dout, t_lse[None, :], delta[None, :], phi[None, :]
            )
            grad_x, grad_t_x = chain_softcap(score, x, t_x, softcap_grad, grad_s, grad_ds)
            dv = dot(round_to(pr, do.dtype), do, dv)
            dk = dot(round_to(grad_x, q.dtype), q, dk)
            if t_q is not None:
                dk = dot(round_to(grad_t_x, q.dtype), t_q, dk)

    dk_ptr = result_ptr(dk_ptr, at.entry, at.start_k, kv, total_k, num_kv, HEAD_DIM)
    dv_ptr = result_ptr(dv_ptr, at.entry, at.start_k, kv, total_k, num_kv, HEAD_DIM_V)
    dk *= scale_log2 * LN2
    store_tile(dk_ptr, dk, n0, at.seqlen_k, row_t, HEAD_DIM, TILE_N, PAD_DIM)
    store_tile(dv_ptr, dv, n0, at.seqlen_k, row_t_v, HEAD_DIM_V, TILE_N, PAD_DIM_V)


@triton.jit(do_not_specialize=TANGENT_LENGTHS)
def second_dq_kernel(
    q_ptr, k_ptr, v_ptr, cu_q_ptr, cu_k_ptr, slopes_ptr, bias_ptr,
    full_offsets_ptr, full_indices_ptr, partial_offsets_ptr, partial_indices_ptr,
    partial_tiles_ptr, tiles_ptr, t_q_ptr, t_k_ptr, t_v_ptr, t_slopes_ptr, t_bias_ptr,
    rows_ptr, dout_ptr, dq_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
    stride_vh, stride_slopes, stride_bias_b, stride_bias_h, stride_bias_q, stride_mask_b,
    stride_mask_h, stride_t_slopes, stride_t_bias_b, stride_t_bias_h, stride_t_bias_q, stride_rows,
    num_heads, group_size, total_q, total_k, left, right, scale_log2, softcap, num_tiles,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, LINEAR: tl.constexpr,
    ALIGN: tl.constexpr, PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
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
    positions = TokenPositions(None, None, total_q)
    slope = tl.load(slopes_ptr + b * stride_slopes + h) if slopes_ptr is not None else None
    t_slope = tl.load(t_slopes_ptr + b * stride_t_slopes + h) if t_slopes_ptr is not None else None
    plane = head_offset(b, h, stride_bias_b, stride_bias_h)
    score = ScoreMods(scale_log2, softcap, slope, bias_ptr, plane, stride_bias_q, positions)
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
    dout_ptr = result_ptr(dout_ptr, at.entry, at.start_q, h, total_q, num_heads, HEAD_DIM_V)
    row_t, row_t_v = num_kv * HEAD_DIM, num_kv * HEAD_DIM_V
    row_t_q, row_do = num_heads * HEAD_DIM, num_heads * HEAD_DIM_V
    q = load_tile(q_ptr, m0, at.seqlen_q, row_q, HEAD_DIM, TILE_M, PAD_DIM, True)
    t_q = load_tangent(t_q_ptr, m0, at.seqlen_q, row_t_q, HEAD_DIM, TILE_M, PAD_DIM, True)
    do = load_tile(dout_ptr, m0, at.seqlen_q, row_do, HEAD_DIM_V, TILE_M, PAD_DIM_V, True)
    rows_ptr += row_offset(at, h, num_heads, total_q)
    lse, t_lse, delta, phi = load_row_numbers(rows_ptr, stride_rows, m0, at.seqlen_q, TILE_M, True)
    i, keys = m0 + tl.arange(0, TILE_M)[:, None], tl.arange(0, TILE_N)
    dq = tl.zeros([TILE_M, PAD_DIM], tl.float32)
    walk = walk_tiles(band, lists, m0, m0 + TILE_M, at.seqlen_q, at.seqlen_k, TILE_N)
    for t in range(walk.num_unmasked):  # every key visible to every row
        n = get_unmasked_tile(walk, lists, t, TILE_N)
        j = (n + keys)[None, :]
        k = load_tile(k_ptr, n, at.seqlen_k, row_k, HEAD_DIM, TILE_N, PAD_DIM, False)
        t_k = load_tangent(t_k_ptr, n, at.seqlen_k, row_t, HEAD_DIM, TILE_N, PAD_DIM, False)
        v = load_tile(v_ptr, n, at.seqlen_k, row_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, False)
        t_v = load_tangent(t_v_ptr, n, at.seqlen_k, row_t_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, False)
        x = dot(q, tl.trans(k), None)
        t_x = product_tangent(q, t_q, k, t_k)
        s, softcap_grad = apply_score_mods(score, x, at, i, j, LINEAR)
        p = tl.exp2(s * unit - lse[:, None])
        ds = score_tangent(t_score, t_x, softcap_grad, p, at, i, j)
        dp = dot(do, tl.trans(v), None)
        h_dout = value_tangent(do, t_v)
        _, grad_s, grad_ds = second_gradients(
            p, ds, dp, h_dout, t_lse[:, None], delta[:, None], phi[:, None]
        )
        grad_x, grad_t_x = chain_softcap(score, x, t_x, softcap_grad, grad_s, grad_ds)
        dq = dot(round_to(grad_x, k.dtype), k, dq)
        if t_k is not None:
            dq = dot(round_to(grad_t_x, k.dtype), t_k, dq)
    for t in range(walk.num_masked):  # cut by the diagonal, the window, the mask or the end
        n, bits = get_masked_tile(walk, lists, t, TILE_N)
        j = (n + keys)[None, :]
        k = load_tile(k_ptr, n, at.seqlen_k, row_k, HEAD_DIM, TILE_N, PAD_DIM, True)
        t_k = load_tangent(t_k_ptr, n, at.seqlen_k, row_t, HEAD_DIM, TILE_N, PAD_DIM, True)
        v = load_tile(v_ptr, n, at.seqlen_k, row_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, True)
        t_v = load_tangent(t_v_ptr, n, at.seqlen_k, row_t_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, True)
        x = dot(q, tl.trans(k), None)
        t_x = product_tangent(q, t_q, k, t_k)
        s, softcap_grad = apply_score_mods(score, x, at, i, j, LINEAR)
        inside = (n + keys < at.seqlen_k)[None, :]
        seen = is_visible(at, band, lists, bits, i, j, n, inside, TILE_N)
        p = tl.exp2(tl.where(seen, s * unit, float("-inf")) - lse[:, None])
        ds = score_tangent(t_score, t_x, softcap_grad, p, at, i, j)
        dp = dot(do, tl.trans(v), None)
        h_dout = value_tangent(do, t_v)
        _, grad_s, grad_ds = second_gradients(
            p, ds, dp, h_dout, t_lse[:, None], delta[:, None], phi[:, None]
        )
        grad_x, grad_t_x = chain_softcap(score, x, t_x, softcap_grad, grad_s, grad_ds)
        dq = dot(round_to(grad_x, k.dtype), k, dq)
        if t_k is not None:
            dq = dot(round_to(grad_t_x, k.dtype), t_k, dq)

    dq_ptr = result_ptr(dq_ptr, at.entry, at.start_q, h, total_q, num_heads, HEAD_DIM)
    dq *= scale_log2 * LN2
    store_tile(dq_ptr, dq, m0, at.seqlen_q, row_t_q, HEAD_DIM, TILE_M, PAD_DIM)


@triton.jit(
    do_not_specialize=(*TANGENT_LENGTHS, "batch", "num_tiles_q", "num_tiles_k", "num_summed")
)
def second_dbias_kernel(
    q_ptr, k_ptr, v_ptr, cu_q_ptr, cu_k_ptr, slopes_ptr, bias_ptr,
    full_offsets_ptr, full_indices_ptr, partial_offsets_ptr, partial_indices_ptr,
    partial_tiles_ptr, tiles_ptr, t_q_ptr, t_k_ptr, t_v_ptr, t_slopes_ptr, t_bias_ptr,
    rows_ptr, dout_ptr, parts_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
    stride_vh, stride_slopes, stride_bias_b, stride_bias_h, stride_bias_q, stride_mask_b,
    stride_mask_h, stride_t_slopes, stride_t_bias_b, stride_t_bias_h, stride_t_bias_q, stride_rows,
    num_heads, group_size, total_q, total_k, left, right, scale_log2, softcap,
    batch, num_tiles_q, num_tiles_k, num_summed,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, LINEAR: tl.constexpr,
    ALIGN: tl.constexpr, PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr, PER_ENTRY: tl.constexpr,
    PER_HEAD: tl.constexpr, PER_QUERY: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """One part of dbias for one tile of the bias, the sum of dL/ds: see bias.dbias_kernel."""
    entries, heads = batch if PER_ENTRY else 1, num_heads if PER_HEAD else 1
    tiles = num_tiles_q if PER_QUERY else 1
    num_kv = num_heads // group_size
    row_q, row_k, row_v = stride_qs * ALIGN, stride_ks * ALIGN, stride_vs * ALIGN
    row_t, row_t_v = num_kv * HEAD_DIM, num_kv * HEAD_DIM_V
    row_t_q, row_do = num_heads * HEAD_DIM, num_heads * HEAD_DIM_V
    pid = tl.program_id(0)
    n0 = pid % num_tiles_k * TILE_N
    tile, head, entry, part = split_digits(pid // num_tiles_k, tiles, heads, entries)
    band = Band(left, right)
    positions = TokenPositions(None, None, total_q)
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
            t_slope = (
                tl.load(t_slopes_ptr + b * stride_t_slopes + h)
                if t_slopes_ptr is not None
                else None
            )
            plane = head_offset(b, h, stride_bias_b, stride_bias_h)
            score = ScoreMods(scale_log2, softcap, slope, bias_ptr, plane, stride_bias_q, positions)
            plane = head_offset(b, h, stride_t_bias_b, stride_t_bias_h)
            t_score = ScoreMods(
                scale_log2, None, t_slope, t_bias_ptr, plane, stride_t_bias_q, positions
            )
            kv = h // group_size
            q_h = head_ptr(q_ptr, b, 0, h, stride_qb, stride_qs, stride_qh, ALIGN)
            k_h = head_ptr(k_ptr, b, 0, kv, stride_kb, stride_ks, stride_kh, ALIGN)
            v_h = head_ptr(v_ptr, b, 0, kv, stride_vb, stride_vs, stride_vh, ALIGN)
            t_q_h = tangent_ptr(t_q_ptr, b, 0, h, total_q, num_heads, HEAD_DIM)
            t_k_h = tangent_ptr(t_k_ptr, b, 0, kv, total_k, num_kv, HEAD_DIM)
            t_v_h = tangent_ptr(t_v_ptr, b, 0, kv, total_k, num_kv, HEAD_DIM_V)
            do_h = result_ptr(dout_ptr, b, 0, h, total_q, num_heads, HEAD_DIM_V)
            q = load_tile(q_h, m0, total_q, row_q, HEAD_DIM, TILE_M, PAD_DIM, True)
            t_q = load_tangent(t_q_h, m0, total_q, row_t_q, HEAD_DIM, TILE_M, PAD_DIM, True)
            do = load_tile(do_h, m0, total_q, row_do, HEAD_DIM_V, TILE_M, PAD_DIM_V, True)
            k = load_tile(k_h, n0, total_k, row_k, HEAD_DIM, TILE_N, PAD_DIM, True)
            t_k = load_tangent(t_k_h, n0, total_k, row_t, HEAD_DIM, TILE_N, PAD_DIM, True)
            v = load_tile(v_h, n0, total_k, row_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, True)
            t_v = load_tangent(t_v_h, n0, total_k, row_t_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, True)
            lse, t_lse, delta, phi = load_row_numbers(
                rows_ptr + row_offset(at, h, num_heads, total_q),
                stride_rows, m0, total_q, TILE_M, True,
            )  # fmt: skip
            rows = m0 + tl.arange(0, TILE_M)
            i, j = rows[:, None], keys[None, :]
            x = dot(q, tl.trans(k), None)
            t_x = product_tangent(q, t_q, k, t_k)
            s, softcap_grad = apply_score_mods(score, x, at, i, j, LINEAR)
            inside = (rows < total_q)[:, None] & (keys < total_k)[None, :]
            seen = is_visible(at, band, lists, bits, i, j, n0, inside, TILE_N)
            p = tl.exp2(tl.where(seen, s * unit, float("-inf")) - lse[:, None])
            ds = score_tangent(t_score, t_x, softcap_grad, p, at, i, j)
            dp = dot(do, tl.trans(v), None)
            h_dout = value_tangent(do, t_v)
            _, grad_s, _ = second_gradients(
                p, ds, dp, h_dout, t_lse[:, None], delta[:, None], phi[:, None]
            )
            dbias += grad_s

    plane = ((part * entries + entry) * heads + head).to(tl.int64)
    if PER_QUERY:
        parts_ptr += plane * total_q * total_k
        rows = tile * TILE_M + tl.arange(0, TILE_M)
        cells = parts_ptr + rows.to(tl.int64)[:, None] * total_k + keys[None, :]
        tl.store(cells, dbias, mask=(rows < total_q)[:, None] & (keys < total_k)[None, :])
    else:
        tl.store(parts_ptr + plane * total_k + keys, tl.sum(dbias, 0), mask=keys < total_k)


@triton.jit
def load_row_numbers(rows_ptr, stride, row, num_rows, TILE: tl.constexpr, RAGGED: tl.constexpr):
    """lse in log2 units, t_lse, delta and phi of a tile of rows: the planes of row_numbers."""
    plane = tl.cast(stride, tl.int64)
    return (
        load_rows(rows_ptr, row, num_rows, TILE, RAGGED),
        load_rows(rows_ptr + plane, row, num_rows, TILE, RAGGED),
        load_rows(rows_ptr + 2 * plane, row, num_rows, TILE, RAGGED),
        load_rows(rows_ptr + 3 * plane, row, num_rows, TILE, RAGGED),
    )


@triton.jit
def value_tangent(a, b):
    """h = dout . t_v of a tile, a b^T; None if t_v is None."""
    if a is None or b is None:
        return  # None, which Triton 3.6 refuses as a value
    else:
        return dot(a, tl.trans(b), None)


@triton.jit
def second_gradients(p, ds, dp, h, t_lse, delta, phi):
    """(p r, dL/ds, dL/d(ds)) of a tile. ds and h are None for zero. Where p = 0, ds may have any
    value.
    """
    if ds is None:
        ds = tl.zeros_like(p)
    r = tl.where(p > 0, ds - t_lse, 0.0)
    grad_ds = p * (dp - delta)
    terms = -phi if h is None else h - phi
    return p * r, grad_ds * r + p * terms, grad_ds


@triton.jit
def chain_softcap(score, x, t_x, softcap_grad, grad_s, grad_ds):
    """The gradients of softmax_scale x and of its tangent from those of s and ds."""
    if score.softcap is None:
        return grad_s, grad_ds
    else:
        grad_x = grad_s * softcap_grad
        if t_x is not None:
            t = tanh(x * (score.scale_log2 * LN2 / score.softcap))
            curvature = softcap_grad * t * (-2.0 / score.softcap)
            grad_x += grad_ds * curvature * (t_x * (score.scale_log2 * LN2))
        return grad_x, grad_ds * softcap_grad


_second_dkdv_kernel = CachedLauncher(second_dkdv_kernel)
_second_dq_kernel = CachedLauncher(second_dq_kernel)
_second_dbias_kernel = CachedLauncher(second_dbias_kernel)


def tangent_gradients(
    problem: Problem, x: Tensors, dx: Tangents, dout: Tensor, dlse: Tensor | None
) -> Grads:
    dout = dout.to(problem.dtype).contiguous()
    rows = row_numbers(problem, x, dx, dout, dlse)
    args = LaunchArgs.of(problem, x)
    own = TangentArgs.of(args, dx)
    dk, dv = _dkdv(problem, x, args, own, (rows, dout))
    dq = _dq(problem, x, args, own, (rows, dout))
    dbias = None if x.bias is None else _dbias(problem, args, own, (rows, dout))
    dsinks = None if x.sinks is None else _dsinks(x.sinks, dx.sinks, rows)
    return Grads(dq, dk, dv, dbias, dsinks)


def _dkdv(
    problem: Problem, x: Tensors, args: LaunchArgs, own: TangentArgs, saved: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    wide = grad_dtype(problem)
    dk, dv = x.k.new_empty(x.k.shape, dtype=wide), x.v.new_empty(x.v.shape, dtype=wide)
    config = args.config("second_dkdv")
    num_tiles = triton.cdiv(problem.seqlen_k, config.tile_n)
    grid = num_tiles * problem.num_kv_heads * problem.batch
    if grid:
        _second_dkdv_kernel[(grid,)](
            *own.inputs, *args.cols, *own.tangents, *saved, dk, dv,
            *args.strides, *args.col_strides, *own.strides, saved[0][0].numel(),
            *own.scalars, num_tiles,
            *args.dims, TILE_M=config.tile_m, TILE_N=config.tile_n, **launch_options(config),
        )  # fmt: skip
    return dk, dv


def _dq(
    problem: Problem, x: Tensors, args: LaunchArgs, own: TangentArgs, saved: tuple[Tensor, Tensor]
) -> Tensor:
    dq = x.q.new_empty(x.q.shape, dtype=grad_dtype(problem))
    config = args.config("second_dq")
    num_tiles = triton.cdiv(problem.seqlen_q, config.tile_m)
    grid = num_tiles * problem.num_heads * problem.batch
    if grid:
        _second_dq_kernel[(grid,)](
            *own.inputs, *args.rows, *own.tangents, *saved, dq,
            *args.strides, *args.row_strides, *own.strides, saved[0][0].numel(),
            *own.scalars, num_tiles,
            *args.dims, TILE_M=config.tile_m, TILE_N=config.tile_n, **launch_options(config),
        )  # fmt: skip
    return dq


def _dbias(
    problem: Problem, args: LaunchArgs, own: TangentArgs, saved: tuple[Tensor, Tensor]
) -> Tensor:
    """dbias in fp32."""
    bias = args.tensors[6]
    if not saved[0].numel() or not bias.numel():
        return bias.new_zeros(bias.shape, dtype=torch.float32)
    config = args.config("second_dbias")
    split = split_sum(problem, bias, config)
    parts = bias.new_empty(split.num_parts, *bias.shape, dtype=torch.float32)
    _second_dbias_kernel[(split.num_programs,)](
        *own.inputs, *args.rows, *own.tangents, *saved, parts,
        *args.strides, *args.row_strides, *own.strides, saved[0][0].numel(), *own.scalars,
        problem.batch, split.tiles_q, split.tiles_k, split.num_summed,
        *args.dims, *split.per, TILE_M=config.tile_m, TILE_N=config.tile_n,
        **launch_options(config),
    )  # fmt: skip
    return parts[0] if split.num_parts == 1 else parts.sum(0)


def _dsinks(sinks: Tensor, t_sinks: Tensor | None, rows: Tensor) -> Tensor:
    """dsinks (heads): a sink is a key with g = -delta and h = 0."""
    lse, t_lse, delta, phi = rows
    t_sinks = torch.zeros_like(sinks) if t_sinks is None else t_sinks
    sink, t_sink = (t.to(rows.dtype)[:, None] for t in (sinks, t_sinks))
    p = torch.exp2(sink * LOG2E - lse)
    r = (t_sink - t_lse).masked_fill(p == 0, 0.0)
    per_row = -p * (r * delta + phi)
    return per_row.sum(-1) if per_row.dim() == 2 else per_row.sum((0, 2))
