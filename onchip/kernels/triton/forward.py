"""FlashAttention v2's forward in Triton: a program owns a tile of queries and folds the keys that
they see.
"""

import triton
import triton.language as tl

from onchip.core.backend import Result, Stats, empty_result
from onchip.core.problem import Problem, Tensors
from onchip.kernels.runtime.launcher import Handle
from onchip.kernels.triton import decode
from onchip.kernels.triton.launch import LENGTHS, Call, launch_options, packed
from onchip.kernels.triton.tile import (
    LN2,
    LOG2E,
    Band,
    Dropout,
    Lists,
    Places,
    Score,
    add_sink,
    dot,
    empty_state,
    fold_tile,
    kept,
    load_tile,
    masked_tile,
    matrix,
    max_logit,
    plane_of,
    program_place,
    result_matrix,
    row_offset,
    scores,
    sequence_of,
    store_tile,
    unmasked_tile,
    visible,
    walk_tiles,
)


@triton.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, cu_q_ptr, cu_k_ptr, slopes_ptr, bias_ptr, seed_ptr,
    places_q_ptr, places_k_ptr,
    full_offsets_ptr, full_indices_ptr, partial_offsets_ptr, partial_indices_ptr,
    partial_tiles_ptr, tiles_ptr, sinks_ptr, out_ptr, lse_ptr, stats_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
    stride_vh, stride_slopes, stride_bias_b, stride_bias_h, stride_bias_q, stride_mask_b,
    stride_mask_h, stride_stats,
    num_heads, group_size, total_q, total_k, left, right, scale_log2, softcap, keep_below,
    keep_scale, first_head, num_tiles,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, LINEAR: tl.constexpr,
    ALIGN: tl.constexpr, PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):  # fmt: skip
    """out, lse and statistics of TILE_M queries of one head."""
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
    q = load_tile(q_ptr, m0, at.seqlen_q, row_q, HEAD_DIM, TILE_M, PAD_DIM, True)
    rows, keys = m0 + tl.arange(0, TILE_M), tl.arange(0, TILE_N)
    i = rows[:, None]
    state = empty_state(TILE_M, PAD_DIM_V)
    walk = walk_tiles(band, lists, m0, m0 + TILE_M, at.seqlen_q, at.seqlen_k, TILE_N)
    for t in range(walk.num_unmasked):  # every key visible to every row
        n = unmasked_tile(walk, lists, t, TILE_N)
        k = load_tile(k_ptr, n, at.seqlen_k, row_k, HEAD_DIM, TILE_N, PAD_DIM, False)
        v = load_tile(v_ptr, n, at.seqlen_k, row_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, False)
        s = dot(q, tl.trans(k), None)
        s, _ = scores(score, s, at, i, (n + keys)[None, :], LINEAR)
        keep = kept(dropout, at, rows, n, TILE_M, TILE_N, False) if seed is not None else None
        state = fold_tile(state, s, v, keep, unit, stats_ptr is not None)
    for t in range(walk.num_masked):  # tiles cut by the diagonal, the window, the mask or the end
        n, bits = masked_tile(walk, lists, t, TILE_N)
        k = load_tile(k_ptr, n, at.seqlen_k, row_k, HEAD_DIM, TILE_N, PAD_DIM, True)
        v = load_tile(v_ptr, n, at.seqlen_k, row_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, True)
        s = dot(q, tl.trans(k), None)
        s, _ = scores(score, s, at, i, (n + keys)[None, :], LINEAR)
        inside = (n + keys < at.seqlen_k)[None, :]
        seen = visible(at, band, lists, bits, i, (n + keys)[None, :], n, inside, TILE_N)
        s = tl.where(seen, s, float("-inf"))
        keep = kept(dropout, at, rows, n, TILE_M, TILE_N, False) if seed is not None else None
        state = fold_tile(state, s, v, keep, unit, stats_ptr is not None)

    first = row_offset(at, h, num_heads, total_q)
    inside = rows < at.seqlen_q
    if stats_ptr is not None:
        tl.store(stats_ptr + first + rows, max_logit(state), mask=inside)
    if sinks_ptr is not None:
        state = add_sink(state, tl.load(sinks_ptr + h).to(tl.float32) * LOG2E)
    m, l, acc, w = state
    tl.store(lse_ptr + first + rows, (m + tl.log2(l)) * LN2, mask=inside)
    l = tl.where(l == 0, 1.0, l)  # such a row has seen nothing: acc = 0
    if stats_ptr is not None:
        tl.store(stats_ptr + stride_stats + first + rows, (tl.log2(l) - w / l) * LN2, mask=inside)
    out_ptr = result_matrix(out_ptr, at.entry, at.start_q, h, total_q, num_heads, HEAD_DIM_V)
    out = acc * (keep_scale / l)[:, None]
    store_tile(out_ptr, out, m0, at.seqlen_q, num_heads * HEAD_DIM_V, HEAD_DIM_V, TILE_M, PAD_DIM_V)


_forward_kernel = Handle(forward_kernel)


def forward(problem: Problem, x: Tensors) -> Result:
    call = Call.of(problem, x)
    if decode.serves(problem):
        return decode.decode(problem, x, call)
    out, lse = empty_result(problem, x)
    stats = lse.new_empty(2, *lse.shape) if problem.return_stats else None
    config = call.config("forward")
    num_tiles = triton.cdiv(problem.seqlen_q, config.tile_m)
    grid = num_tiles * problem.num_heads * problem.batch
    if grid:
        _forward_kernel[(grid,)](
            *call.tensors, *call.rows, packed(x.sinks), out, lse, stats,
            *call.strides, *call.row_strides, lse.numel(),
            *call.scalars, num_tiles,
            *call.dims, TILE_M=config.tile_m, TILE_N=config.tile_n, **launch_options(config),
        )  # fmt: skip
    return Result(out, lse, stats if stats is None else Stats(*stats))
