"""FlashAttention v2's forward in Triton: one program per tile of queries, which loops over the
tiles of keys that its queries see.

    grid: tiles of queries x heads x batch       program of q1 (queries 128 to 255)

             k0   k1   k2                          q = load(q1); m, l, acc = lowest, 0, 0
       q0   mask            <- program 0           unmasked loop (k0): s = q k^T
       q1   full mask       <- program 1                               m, l, acc = fold(s, v)
       q2   full full mask  <- program 2           masked loop (k1):   s = -inf where hidden, then
                                                                       the same
                                                   out = acc / l; lse = m + log2(l)

Worked shape: batch 1, one head, 300 tokens, tiles of 128, causal. Three programs, launched longest
first. q2 (queries 256 to 299, 44 rows of 128 in use) runs two unmasked tiles and one masked; q1 one
and one; q0 one masked tile. Tiles above the diagonal are never loaded.

There is no barrier in this file: Triton pipelines the loads of k and v (num_stages of the tile
table). State stays in registers, so the results do not depend on the order of the programs.

Few queries over many keys, and paged keys, run in decode.py, reproducible calls in fixed_order.py.
The teaching version, without options, is examples/versions/v2.py.
"""

import triton
import triton.language as tl

from onchip.core.backend import Result, Stats, empty_result
from onchip.core.device import DeviceInfo
from onchip.core.problem import Problem, Tensors
from onchip.kernels.runtime.launcher import CachedLauncher
from onchip.kernels.tiles import describe_row, triton_config, triton_table
from onchip.kernels.triton import decode, fixed_order
from onchip.kernels.triton.launch import (
    LENGTHS,
    LaunchArgs,
    forward_use,
    launch_options,
    make_contiguous,
)
from onchip.kernels.triton.tile import (
    LN2,
    LOG2E,
    Band,
    CapturedElements,
    Dropout,
    MaskLists,
    ScoreMods,
    TokenPositions,
    add_sink,
    apply_score_mods,
    dot,
    draw_keep_mask,
    empty_state,
    fold_tile,
    get_masked_tile,
    get_unmasked_tile,
    head_offset,
    head_ptr,
    is_visible,
    load_sequence,
    load_tile,
    locate_program,
    max_logit,
    modify_scores,
    result_ptr,
    row_offset,
    store_tile,
    walk_tiles,
)


@triton.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, cu_q_ptr, cu_k_ptr, slopes_ptr, bias_ptr, seed_ptr,
    positions_q_ptr, positions_k_ptr,
    full_offsets_ptr, full_indices_ptr, partial_offsets_ptr, partial_indices_ptr,
    partial_tiles_ptr, tiles_ptr, sinks_ptr, out_ptr, lse_ptr, stats_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
    stride_vh, stride_slopes, stride_bias_b, stride_bias_h, stride_bias_q, stride_mask_b,
    stride_mask_h, stride_stats,
    num_heads, group_size, total_q, total_k, left, right, scale_log2, softcap, keep_below,
    keep_scale, first_head, num_tiles,
    captured_ptr, captured_ints_ptr, size_0, size_1, size_2, size_3, size_4, size_5, size_6, size_7,
    size_8, size_9, size_10, size_11,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, LINEAR: tl.constexpr,
    ALIGN: tl.constexpr, PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, SCORE_MOD: tl.constexpr,
):  # fmt: skip
    """out, lse and statistics of TILE_M queries of one head."""
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
    q = load_tile(q_ptr, m0, at.seqlen_q, row_q, HEAD_DIM, TILE_M, PAD_DIM, True)
    rows, keys = m0 + tl.arange(0, TILE_M), tl.arange(0, TILE_N)
    i = rows[:, None]
    state = empty_state(TILE_M, PAD_DIM_V)
    walk = walk_tiles(band, lists, m0, m0 + TILE_M, at.seqlen_q, at.seqlen_k, TILE_N)
    for t in range(walk.num_unmasked):  # every key visible to every row
        n = get_unmasked_tile(walk, lists, t, TILE_N)
        k = load_tile(k_ptr, n, at.seqlen_k, row_k, HEAD_DIM, TILE_N, PAD_DIM, False)
        v = load_tile(v_ptr, n, at.seqlen_k, row_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, False)
        s = dot(q, tl.trans(k), None)
        s, _ = apply_score_mods(score, s, at, i, (n + keys)[None, :], LINEAR)
        s, _ = modify_scores(captured, s, i, (n + keys)[None, :], SCORE_MOD)
        keep = (
            draw_keep_mask(dropout, at, rows, n, TILE_M, TILE_N, False)
            if seed is not None
            else None
        )
        state = fold_tile(state, s, v, keep, unit, stats_ptr is not None)
    for t in range(walk.num_masked):  # cut by the diagonal, the window, the mask or the end
        n, bits = get_masked_tile(walk, lists, t, TILE_N)
        k = load_tile(k_ptr, n, at.seqlen_k, row_k, HEAD_DIM, TILE_N, PAD_DIM, True)
        v = load_tile(v_ptr, n, at.seqlen_k, row_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, True)
        s = dot(q, tl.trans(k), None)
        s, _ = apply_score_mods(score, s, at, i, (n + keys)[None, :], LINEAR)
        s, _ = modify_scores(captured, s, i, (n + keys)[None, :], SCORE_MOD)
        inside = (n + keys < at.seqlen_k)[None, :]
        seen = is_visible(at, band, lists, bits, i, (n + keys)[None, :], n, inside, TILE_N)
        s = tl.where(seen, s, float("-inf"))
        keep = (
            draw_keep_mask(dropout, at, rows, n, TILE_M, TILE_N, False)
            if seed is not None
            else None
        )
        state = fold_tile(state, s, v, keep, unit, stats_ptr is not None)

    first = row_offset(at, h, num_heads, total_q)
    inside = rows < at.seqlen_q
    if stats_ptr is not None:
        tl.store(stats_ptr + first + rows, max_logit(state), mask=inside)
    if sinks_ptr is not None:
        state = add_sink(state, tl.load(sinks_ptr + h).to(tl.float32) * LOG2E)
    m, l, acc, w = state
    tl.store(lse_ptr + first + rows, (m + tl.log2(l)) * LN2, mask=inside)
    l = tl.where(l == 0, 1.0, l)  # a row that saw no key: acc = 0
    if stats_ptr is not None:
        tl.store(stats_ptr + stride_stats + first + rows, (tl.log2(l) - w / l) * LN2, mask=inside)
    out_ptr = result_ptr(out_ptr, at.entry, at.start_q, h, total_q, num_heads, HEAD_DIM_V)
    out = acc * (keep_scale / l)[:, None]
    store_tile(out_ptr, out, m0, at.seqlen_q, num_heads * HEAD_DIM_V, HEAD_DIM_V, TILE_M, PAD_DIM_V)


_forward_kernel = CachedLauncher(forward_kernel)


def describe_tiles(problem: Problem, device: DeviceInfo) -> str | None:
    """The launch of a forward that does not split its keys, for `explain`."""
    if decode.serves(problem) or problem.reproducible:
        return None
    use = forward_use(problem, device)
    config = triton_config("forward", use)
    programs = triton.cdiv(problem.seqlen_q, config.tile_m) * problem.num_heads * problem.batch
    tile = f"{config.tile_m} queries, {config.tile_n} keys at a time in {config.num_stages} stages"
    row = describe_row(triton_table("forward", use), ("forward", max(64, use.dim)), device.name)
    return f"{programs} programs of {config.num_warps} warps: {tile}; {row}"


def forward(problem: Problem, x: Tensors) -> Result:
    if problem.reproducible:
        return fixed_order.forward(problem, x)
    args = LaunchArgs.of(problem, x)
    if decode.serves(problem):
        return decode.decode(problem, x, args)
    out, lse = empty_result(problem, x)
    stats = lse.new_empty(2, *lse.shape) if problem.return_stats else None
    config = args.config("forward")
    num_tiles = triton.cdiv(problem.seqlen_q, config.tile_m)
    grid = num_tiles * problem.num_heads * problem.batch
    if grid:
        _forward_kernel[(grid,)](
            *args.tensors, *args.rows, make_contiguous(x.sinks), out, lse, stats,
            *args.strides, *args.row_strides, lse.numel(),
            *args.scalars, num_tiles, *args.captured,
            *args.dims, TILE_M=config.tile_m, TILE_N=config.tile_n, SCORE_MOD=args.score_mod,
            **launch_options(config),
        )  # fmt: skip
    return Result(out, lse, stats if stats is None else Stats(*stats))
