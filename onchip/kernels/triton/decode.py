"""Few queries, many keys: the query heads of a group share one tile, and the keys of a sequence are
split over programs, whose states one merge folds.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.kernels.configs import (
    DECODE_ROWS,
    MAX_SPLITS,
    SPLIT_KEYS,
    SPLIT_WAVES,
    TritonConfig,
)
from onchip.kernels.protocol import Result, empty_result
from onchip.kernels.triton.launch import LENGTHS, Call, launch_options, packed, padded
from onchip.kernels.triton.merge import merge_kernel
from onchip.kernels.triton.tile import (
    FULL,
    LN2,
    LOG2E,
    Band,
    Lists,
    Score,
    add_sink,
    dot,
    empty_state,
    fold_tile,
    load_tile,
    masked_tile,
    matrix,
    program_place,
    rounded,
    scores,
    sequence_of,
    split_walk,
    unmasked_tile,
    visible,
    walk_tiles,
)
from onchip.problem import Problem, Tensors


@triton.jit(do_not_specialize=(*LENGTHS, "num_splits", "split_tiles", "stride_split"))
def decode_kernel(
    q_ptr, k_ptr, v_ptr, cu_q_ptr, cu_k_ptr, slopes_ptr, sinks_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
    stride_vh, stride_slopes, stride_split,
    num_heads, group_size, total_q, total_k, left, right, scale_log2, softcap, num_splits,
    split_tiles,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, LINEAR: tl.constexpr,
    ALIGN: tl.constexpr, PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):  # fmt: skip
    """(out, lse) of the queries of one group of heads over one split of the keys: row r of the tile
    is query r // group_size of head r % group_size. Split s is the tiles from s * split_tiles on.
    """
    split, kv, b = program_place(num_splits, num_heads // group_size, False)
    at = sequence_of(cu_q_ptr, cu_k_ptr, total_q, total_k, b)
    rows, keys, dims = tl.arange(0, TILE_M), tl.arange(0, TILE_N), tl.arange(0, PAD_DIM)
    i, h = rows // group_size, kv * group_size + rows % group_size
    exists = i < at.seqlen_q
    band = Band(left, right)
    lists = Lists(None, None, None, None, None, None, None)
    slope = None
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + b * stride_slopes + h, mask=exists, other=0.0)[:, None]
    score = Score(scale_log2, softcap, slope, None, None, None)
    unit = scale_log2 if LINEAR else 1.0

    row_q, row_k, row_v = stride_qs * ALIGN, stride_ks * ALIGN, stride_vs * ALIGN
    q_ptr = matrix(q_ptr, at.entry, at.start_q, 0, stride_qb, stride_qs, stride_qh, ALIGN)
    k_ptr = matrix(k_ptr, at.entry, at.start_k, kv, stride_kb, stride_ks, stride_kh, ALIGN)
    v_ptr = matrix(v_ptr, at.entry, at.start_k, kv, stride_vb, stride_vs, stride_vh, ALIGN)
    q_row = i.to(tl.int64) * row_q + h.to(tl.int64) * stride_qh * ALIGN
    cells = exists[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + q_row[:, None] + dims[None, :], mask=cells, other=0.0)
    state = empty_state(TILE_M, PAD_DIM_V)
    walk = walk_tiles(band, lists, 0, at.seqlen_q, at.seqlen_q, at.seqlen_k, TILE_N)
    walk = split_walk(walk, split * split_tiles, (split + 1) * split_tiles)
    for t in range(walk.num_unmasked):  # every key visible to every row
        n = unmasked_tile(walk, lists, t, TILE_N)
        k = load_tile(k_ptr, n, at.seqlen_k, row_k, HEAD_DIM, TILE_N, PAD_DIM, False)
        v = load_tile(v_ptr, n, at.seqlen_k, row_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, False)
        s = dot(q, tl.trans(k), None)
        s, _ = scores(score, s, at, i[:, None], (n + keys)[None, :], LINEAR)
        state = fold_tile(state, s, v, None, unit, False, False)
    for t in range(walk.num_masked):  # tiles cut by the diagonal, the window or the end
        n, _ = masked_tile(walk, lists, t, TILE_N)
        k = load_tile(k_ptr, n, at.seqlen_k, row_k, HEAD_DIM, TILE_N, PAD_DIM, True)
        v = load_tile(v_ptr, n, at.seqlen_k, row_v, HEAD_DIM_V, TILE_N, PAD_DIM_V, True)
        s = dot(q, tl.trans(k), None)
        s, _ = scores(score, s, at, i[:, None], (n + keys)[None, :], LINEAR)
        inside = (n + keys < at.seqlen_k)[None, :]
        seen = visible(at, band, lists, FULL, i[:, None], (n + keys)[None, :], n, inside, TILE_N)
        s = tl.where(seen, s, float("-inf"))
        state = fold_tile(state, s, v, None, unit, True, False)

    if sinks_ptr is not None:
        state = add_sink(state, tl.load(sinks_ptr + h, mask=exists).to(tl.float32) * LOG2E)
    m, l, acc, _ = state
    place = (tl.cast(at.entry, tl.int64) * num_heads + h) * total_q + at.start_q + i
    split = tl.cast(split, tl.int64) * stride_split
    tl.store(lse_ptr + split + place, (m + tl.log2(l)) * LN2, mask=exists)
    out = acc / tl.where(l == 0, 1.0, l)[:, None]
    row = ((tl.cast(at.entry, tl.int64) * total_q + at.start_q + i) * num_heads + h) + split
    dims_v = tl.arange(0, PAD_DIM_V)
    out_ptr += row[:, None] * HEAD_DIM_V + dims_v[None, :]
    cells_v = exists[:, None] & (dims_v < HEAD_DIM_V)[None, :]
    tl.store(out_ptr, rounded(out, out_ptr.dtype.element_ty), mask=cells_v)


def serves(problem: Problem) -> bool:
    """Whether the queries of a group fit one tile, with options that this kernel knows."""
    foreign = problem.has_mask or problem.has_bias or problem.dropout_p or problem.return_stats
    return not foreign and problem.seqlen_q * problem.group_size <= DECODE_ROWS


def decode(problem: Problem, x: Tensors, call: Call) -> Result:
    out, lse = empty_result(problem, x)
    config = call.config("decode")
    tile_m = padded(problem.seqlen_q * problem.group_size)
    programs = problem.num_kv_heads * problem.batch
    if not out.numel():
        return Result(out, lse)
    num_splits, split_tiles = splits(problem, config, programs, num_processors(out.device))
    sinks = packed(x.sinks)
    alone = num_splits == 1
    parts = (out, lse) if alone else _parts(num_splits, out, lse)
    decode_kernel[(programs * num_splits,)](
        *call.tensors[:6], sinks if alone else None, *parts,
        *call.strides[:10], lse.numel(), *call.scalars[:8], num_splits, split_tiles,
        *call.dims, TILE_M=tile_m, TILE_N=config.tile_n, **launch_options(config),
    )  # fmt: skip
    if not alone:
        merge = call.config("merge")
        merge_kernel[(triton.cdiv(lse.numel(), merge.tile_m),)](
            *parts, sinks, out, lse,
            problem.num_heads, out.shape[-3], lse.numel(), num_splits,
            HEAD_DIM_V=call.dims[1], PAD_DIM_V=call.dims[5], TILE_M=merge.tile_m,
            **launch_options(merge),
        )  # fmt: skip
    return Result(out, lse)


def _parts(num_splits: int, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    wide = out.new_empty(num_splits, *out.shape, dtype=torch.float32)
    return wide, lse.new_empty(num_splits, *lse.shape)


def splits(
    problem: Problem, config: TritonConfig, programs: int, processors: int
) -> tuple[int, int]:
    """(num_splits, tiles per split). As many splits as fill the GPU, none of them tiny. When
    deterministic, cuts do not depend on the batch, and so neither does a sequence's result.
    """
    num_tiles = triton.cdiv(problem.seqlen_k, config.tile_n)
    least = SPLIT_KEYS // config.tile_n
    if problem.deterministic:
        split_tiles = max(4 * least, triton.cdiv(num_tiles, MAX_SPLITS))
    else:
        wanted = min(max(1, SPLIT_WAVES * processors // programs), MAX_SPLITS)
        split_tiles = max(least, triton.cdiv(num_tiles, wanted))
    return max(1, triton.cdiv(num_tiles, split_tiles)), split_tiles


@lru_cache(maxsize=64)
def num_processors(device: torch.device) -> int:
    if device.type == "cpu":
        return 4  # interpreted: enough to split, few enough to be quick
    return torch.cuda.get_device_properties(device).multi_processor_count
