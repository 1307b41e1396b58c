"""Few queries over many keys (decoding), and paged keys: split-KV with one merge.

    query heads of one kv head     keys of one sequence, in pages or contiguous

      h0 h1 h2 h3  x  query        | split 0      | split 1      | split 2 |
      = 4 rows of one tile              |              |             |
                                    decode_kernel  decode_kernel  decode_kernel   one program each
                                        |              |             |
                                     slot 0         slot 1        slot 2          fp32 state, lse
                                        +------- merge_kernel -------+            out, lse

The query heads of a group share one tile of rows, so that each key is read once per group. Keys of
a sequence are split over programs (splits.py); merge.py merges their states. A sequence that is not
split stores its result directly.

Keys are read once and multiplied with few rows, so memory bandwidth is the limit. One loop loads
every tile with a mask: a second loop for the masked tiles would drain the pipeline of loads between
the two loops.

Worked shape: batch 1, 300 tokens in pages of 16, one query, 4 query heads on one kv head, tile 128:
rows 0 to 3 of a tile of 16, key tiles at 0, 128 and 256 (44 keys in use), 8 page ids per full tile.

With programmatic dependent launch (PDL), each kernel waits for its predecessor before its first
load. The teaching version of the loop is examples/versions/v2.py.
"""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onchip.core.backend import Result, Stats, empty_result, scale_strides
from onchip.core.problem import Problem, Tensors
from onchip.cost.hardware import HOST, Hardware, planned_for
from onchip.cost.splits import SplitTiles, TileWork, choose, choose_for_unknown_lengths
from onchip.kernels.runtime.launcher import CachedLauncher
from onchip.kernels.tiles import (
    DECODE_ROWS,
    FIXED_KEYS,
    SPLIT_KEYS,
    SPLIT_WAVES,
    TRITON_COLUMNS,
    TRITON_SHORT_KEYS,
    TritonConfig,
    batch_bucket,
)
from onchip.kernels.triton.kv8 import (
    PageScales,
    as_packed_pairs,
    fold_tile_kv8,
    interleave_acc,
    load_queries_kv8,
    load_scales,
    scores_kv8,
)
from onchip.kernels.triton.launch import (
    LENGTHS,
    MIN_E4M3,
    LaunchArgs,
    dependent_options,
    make_contiguous,
    padded,
)
from onchip.kernels.triton.merge import merge_kernel
from onchip.kernels.triton.splits import RECORD, SequenceLengths, SplitPlan, unit_of
from onchip.kernels.triton.tile import (
    FULL,
    LN2,
    LOG2E,
    Band,
    MaskLists,
    ScoreMods,
    TokenPositions,
    add_sink,
    apply_score_mods,
    dot,
    empty_state,
    fold_tile,
    head_ptr,
    is_visible,
    max_logit,
    round_to,
)


class PageTableRow(NamedTuple):
    """One sequence's row of the page table; table is None if keys are contiguous."""

    table: tl.tensor
    num_pages: tl.tensor


class TileRows(NamedTuple):
    """The rows of a tile: query index, head, and whether the row exists."""

    i: tl.tensor
    h: tl.tensor
    exist: tl.tensor


class OutputPtrs(NamedTuple):
    """out, lse and statistics, contiguous; stats is None if the call returns none."""

    out: tl.tensor
    lse: tl.tensor
    stats: tl.tensor
    stride_stats: tl.tensor


class PartialPtrs(NamedTuple):
    """Scratch memory: the states of splits, and the records by which the merge finds them."""

    out: tl.tensor
    lse: tl.tensor
    records: tl.tensor
    num_rows: tl.tensor


class TreeMask(NamedTuple):
    """The tree mask of one sequence, (stride, stride): which new token sees which. mask may be
    None.
    """

    mask: tl.tensor
    stride: tl.tensor


@triton.jit
def page_of(pages, j, stop, PAGE_SIZE: tl.constexpr):
    """The pages of the keys j before `stop`, clamped to the existing pages. 0 if keys are
    contiguous.
    """
    if PAGE_SIZE == 0:
        return 0
    else:
        page = tl.load(pages.table + j // PAGE_SIZE, mask=j < stop, other=0)
        return tl.minimum(tl.maximum(page, 0), pages.num_pages - 1).to(tl.int64)


@triton.jit
def slot_of(n, keys, PAGE_SIZE: tl.constexpr, TILE_N: tl.constexpr):
    """(n + keys) % PAGE_SIZE with as few operations per tile as possible: n is a multiple of
    TILE_N.
    """
    if TILE_N % PAGE_SIZE == 0:
        return keys % PAGE_SIZE
    elif PAGE_SIZE % TILE_N == 0:
        return n % PAGE_SIZE + keys
    else:
        return (n + keys) % PAGE_SIZE


@triton.jit
def offsets_of(
    page, n, keys, stride_page, stride_slot, PAGE_SIZE: tl.constexpr, TILE_N: tl.constexpr
):
    """Offsets of the keys of the tile at n, in elements."""
    if PAGE_SIZE == 0:
        return tl.cast(n, tl.int64) * stride_slot + keys * stride_slot
    else:
        return page * stride_page + slot_of(n, keys, PAGE_SIZE, TILE_N) * stride_slot


@triton.jit
def load_rows_at(ptr, offsets, inside, DIM: tl.constexpr, PAD: tl.constexpr):
    """(len(offsets), PAD), zeros out of bounds."""
    dims = tl.arange(0, PAD)
    cells = ptr + offsets[:, None] + dims[None, :]
    if DIM == PAD:
        return tl.load(cells, mask=inside[:, None], other=0.0)
    else:
        return tl.load(cells, mask=inside[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def tree_visible(tree, at, i, j):
    """bool: whether the tree mask lets query i see key j; True for keys before the new tokens."""
    new = j - (at.seqlen_k - at.seqlen_q)
    size = tl.minimum(at.seqlen_q, tree.stride)  # bad offsets may exceed the declared maximum
    known = (new >= 0) & (new < size) & (i < size)
    return tl.load(tree.mask + i * tree.stride + new, mask=known, other=1) != 0


@triton.jit
def store_rows(ptr, x, row, exist, DIM: tl.constexpr, PAD: tl.constexpr):
    """Store rows of a contiguous (..., DIM) tensor, in its dtype."""
    dims = tl.arange(0, PAD)
    cells = ptr + row.to(tl.int64)[:, None] * DIM + dims[None, :]
    x = round_to(x, ptr.dtype.element_ty)
    tl.store(cells, x, mask=exist[:, None] & (dims < DIM)[None, :])


@triton.jit
def store_result(
    results, state, rows, at, sinks_ptr, num_heads, total_q, DIM: tl.constexpr, PAD: tl.constexpr
):
    token = tl.cast(at.entry, tl.int64) * total_q + at.start_q + rows.i
    place = (tl.cast(at.entry, tl.int64) * num_heads + rows.h) * total_q + at.start_q + rows.i
    if results.stats is not None:
        tl.store(results.stats + place, max_logit(state), mask=rows.exist)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + rows.h, mask=rows.exist, other=0.0)
        state = add_sink(state, sink.to(tl.float32) * LOG2E)
    m, l, acc, w = state
    tl.store(results.lse + place, (m + tl.log2(l)) * LN2, mask=rows.exist)
    l = tl.where(l == 0, 1.0, l)  # a row that saw no key: acc = 0
    if results.stats is not None:
        entropy = (tl.log2(l) - w / l) * LN2
        tl.store(results.stats + results.stride_stats + place, entropy, mask=rows.exist)
    row = token * num_heads + rows.h
    store_rows(results.out, acc / l[:, None], row, rows.exist, DIM, PAD)


@triton.jit
def store_part(parts, state, slot, r, exist, DIM: tl.constexpr, PAD: tl.constexpr):
    """Store (out, lse) of one split. For a row that saw no key only lse = -inf is stored."""
    m, l, acc, _ = state
    row = slot * parts.num_rows + r
    exist = exist & (r < parts.num_rows)  # bad offsets may exceed the declared maximum
    tl.store(parts.lse + row, m + tl.log2(l), mask=exist)
    out = acc / tl.where(l == 0, 1.0, l)[:, None]
    store_rows(parts.out, out, row, exist & (l > 0), DIM, PAD)


@triton.jit
def store_record(parts, unit, token, r0, num_rows):
    record = parts.records + (unit.record + 1) * RECORD
    tl.store(record, token)
    tl.store(record + 1, r0)
    tl.store(record + 2, num_rows)
    tl.store(record + 3, unit.slot)
    tl.store(record + 4, unit.count)


@triton.jit(
    do_not_specialize=(
        *LENGTHS, "stride_table", "stride_tree", "batch", "num_pages",
        "units", "least", "fixed", "num_units", "part_rows",
    )
)  # fmt: skip
def decode_kernel(
    q_ptr, k_ptr, v_ptr, cu_q_ptr, cu_k_ptr, slopes_ptr, table_ptr, cache_ptr, tree_ptr, sinks_ptr,
    k_scales_ptr, v_scales_ptr, out_ptr, lse_ptr, stats_ptr, parts_ptr, part_lses_ptr, records_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
    stride_vh, stride_slopes, stride_table, stride_tree, stride_stats,
    stride_ksp, stride_kss, stride_ksh, stride_vsp, stride_vss, stride_vsh,
    num_heads, group_size, total_q, total_k, left, right, scale_log2, softcap, batch, num_pages,
    units, least, fixed, num_units, part_rows,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, LINEAR: tl.constexpr,
    ALIGN: tl.constexpr, PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr, PAD_REST: tl.constexpr,
    PAGE_SIZE: tl.constexpr, SAME_STRIDES: tl.constexpr, BATCH: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, E4M3: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out and lse of one WorkUnit for one kv head, or if its sequence is split, its partial out and
    lse. Row r of the tile is query r // group_size of head r % group_size. PAD_REST: columns of q
    and k behind PAD_DIM, padded, as tiles of their own; 0: none.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    num_kv_heads = num_heads // group_size
    pid = tl.program_id(0)
    kv = pid % num_kv_heads  # heads of a token are adjacent in memory: they run at the same time
    lengths = SequenceLengths(cu_q_ptr, cu_k_ptr, cache_ptr, total_q, total_k, batch)
    cut = SplitPlan(units, least, fixed, num_units)
    unit, at, num_records = unit_of(
        lengths, cut, pid // num_kv_heads, left, group_size, TILE_M, TILE_N, BATCH
    )
    if parts_ptr is not None and pid == 0:
        tl.store(records_ptr, num_records)
    if unit.exists == 0:
        return
    r0 = unit.tile * TILE_M
    row, keys = r0 + tl.arange(0, TILE_M), tl.arange(0, TILE_N)
    i, h = row // group_size, kv * group_size + row % group_size
    rows = TileRows(i, h, i < at.seqlen_q)
    band = Band(left, right)
    lists = MaskLists(None, None, None, None, None, None, None)
    pages, tree = PageTableRow(None, num_pages), TreeMask(None, stride_tree)
    if PAGE_SIZE > 0:
        pages = PageTableRow(table_ptr + tl.cast(unit.b, tl.int64) * stride_table, num_pages)
    if tree_ptr is not None:
        tree = TreeMask(
            tree_ptr + tl.cast(unit.b, tl.int64) * stride_tree * stride_tree, stride_tree
        )
    slope = None
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + unit.b * stride_slopes + h, mask=rows.exist, other=0.0)
        slope = slope[:, None]
    score = ScoreMods(
        scale_log2, softcap, slope, None, None, None, TokenPositions(None, None, None)
    )
    scale = scale_log2 if LINEAR else 1.0

    KV8: tl.constexpr = k_scales_ptr is not None
    if KV8:
        k_ptr, v_ptr = as_packed_pairs(k_ptr), as_packed_pairs(v_ptr)
    entry_k = 0 if PAGE_SIZE > 0 else at.entry
    q_ptr = head_ptr(q_ptr, at.entry, at.start_q, 0, stride_qb, stride_qs, stride_qh, ALIGN)
    k_ptr = head_ptr(k_ptr, entry_k, at.start_k, kv, stride_kb, stride_ks, stride_kh, ALIGN)
    v_ptr = head_ptr(v_ptr, entry_k, at.start_k, kv, stride_vb, stride_vs, stride_vh, ALIGN)
    at_q = (i.to(tl.int64) * stride_qs + h.to(tl.int64) * stride_qh) * ALIGN
    WIDTH: tl.constexpr = PAD_DIM_V // 2 if KV8 else PAD_DIM_V
    FIRST: tl.constexpr = PAD_DIM if PAD_REST else HEAD_DIM
    state = empty_state(TILE_M, WIDTH)
    k_scales, v_scales = PageScales(None, None, None), PageScales(None, None, None)
    if KV8:
        q = load_queries_kv8(q_ptr, at_q, rows.exist, HEAD_DIM, PAD_DIM)
        acc_odd = state.acc
        head = tl.cast(kv, tl.int64)
        k_scales = PageScales(k_scales_ptr + head * stride_ksh, stride_ksp, stride_kss)
        v_scales = PageScales(v_scales_ptr + head * stride_vsh, stride_vsp, stride_vss)
    else:
        q = load_rows_at(q_ptr, at_q, rows.exist, FIRST, PAD_DIM)
        if PAD_REST:
            q_rest = load_rows_at(q_ptr + FIRST, at_q, rows.exist, HEAD_DIM - FIRST, PAD_REST)
    begin, end = unit.begin, unit.end
    start, stop = at.seqlen_k * 0, at.seqlen_k + 0  # keys that at least one row of the tile sees
    if left is not None:
        start = tl.maximum(r0 // group_size + at.seqlen_k - at.seqlen_q - left, 0)
        begin = tl.maximum(begin, start // TILE_N)
    if right is not None:
        last = tl.minimum((r0 + TILE_M - 1) // group_size + 1, at.seqlen_q) - 1
        stop = tl.minimum(stop, tl.maximum(last + at.seqlen_k - at.seqlen_q + right + 1, 0))
        end = tl.minimum(end, tl.cdiv(stop, TILE_N))
    MASKED: tl.constexpr = left is not None or right is not None or tree_ptr is not None
    for n in range(begin * TILE_N, end * TILE_N, TILE_N):
        j = n + keys
        inside = j < stop
        if left is not None:  # pages before the window may have been freed
            inside = inside & (j >= start)
        page = page_of(pages, j, stop, PAGE_SIZE)
        at_k = offsets_of(page, n, keys, stride_kb * ALIGN, stride_ks * ALIGN, PAGE_SIZE, TILE_N)
        at_v = at_k
        if not SAME_STRIDES:
            at_v = offsets_of(
                page, n, keys, stride_vb * ALIGN, stride_vs * ALIGN, PAGE_SIZE, TILE_N
            )
        if KV8:
            slot = slot_of(n, keys, PAGE_SIZE, TILE_N)
            k = load_rows_at(k_ptr, at_k, inside, HEAD_DIM // 2, PAD_DIM // 2)
            v = load_rows_at(v_ptr, at_v, inside, HEAD_DIM_V // 2, PAD_DIM_V // 2)
            k_scale = load_scales(k_scales, page, slot, inside)
            v_scale = load_scales(v_scales, page, slot, inside)
            s = scores_kv8(q, k, k_scale, E4M3, PTX)
        else:
            k = load_rows_at(k_ptr, at_k, inside, FIRST, PAD_DIM)
            v = load_rows_at(v_ptr, at_v, inside, HEAD_DIM_V, PAD_DIM_V)
            s = dot(q, tl.trans(k), None)
            if PAD_REST:
                k = load_rows_at(k_ptr + FIRST, at_k, inside, HEAD_DIM - FIRST, PAD_REST)
                s = dot(q_rest, tl.trans(k), s)
        s, _ = apply_score_mods(score, s, at, i[:, None], j[None, :], LINEAR)
        seen = inside[None, :]
        if MASKED:
            seen = is_visible(at, band, lists, FULL, i[:, None], j[None, :], n, seen, TILE_N)
        if tree_ptr is not None:
            seen = seen & tree_visible(tree, at, i[:, None], j[None, :])
        s = tl.where(seen, s, float("-inf"))
        if KV8:
            state, acc_odd = fold_tile_kv8(
                state, acc_odd, s, v, v_scale, scale, q.even.dtype, stats_ptr is not None,
                E4M3, PTX,
            )  # fmt: skip
        else:
            state = fold_tile(state, s, v, None, scale, stats_ptr is not None)
    if KV8:
        state = interleave_acc(state, acc_odd)

    if parts_ptr is not None and unit.count > 1:
        parts = PartialPtrs(parts_ptr, part_lses_ptr, records_ptr, part_rows)
        slot = tl.cast(unit.slot * num_kv_heads + kv, tl.int64)
        store_part(parts, state, slot, row - r0, rows.exist, HEAD_DIM_V, PAD_DIM_V)
        if (unit.split == 0) & (kv == 0):
            num_rows = tl.minimum(at.seqlen_q * group_size - r0, TILE_M)
            store_record(parts, unit, at.entry * total_q + at.start_q, r0, num_rows)
    else:
        results = OutputPtrs(out_ptr, lse_ptr, stats_ptr, stride_stats)
        store_result(results, state, rows, at, sinks_ptr, num_heads, total_q, HEAD_DIM_V, PAD_DIM_V)


_decode_kernel = CachedLauncher(decode_kernel)
_merge_kernel = CachedLauncher(merge_kernel)


def serves(problem: Problem) -> bool:
    """Whether keys are paged, or the queries of a group fit one tile, with options that this kernel
    supports.
    """
    unsupported = problem.has_mask or problem.has_bias or problem.dropout_p or problem.return_stats
    unsupported = unsupported or problem.has_positions or problem.score_mod is not None
    few = problem.seqlen_q * problem.group_size <= DECODE_ROWS
    return problem.page_size > 0 or (few and not unsupported)


class SplitLaunch(NamedTuple):
    """Enough units for all lengths that the device may hold, and the scratch memory that they may
    need: slots of part_rows rows, and records. cut: units, least and fixed of splits.SplitPlan.
    """

    num_units: int
    num_slots: int
    num_records: int
    part_rows: int
    cut: tuple[int | None, int | None, int | None]


def decode(problem: Problem, x: Tensors, args: LaunchArgs) -> Result:
    out, lse = empty_result(problem, x)
    stats = lse.new_empty(2, *lse.shape) if problem.return_stats else None
    result = Result(out, lse, stats if stats is None else Stats(*stats))
    if not out.numel() or not problem.batch:
        return result
    hardware = machine(out.device)
    config = choose_config(problem, args, hardware.processors)
    launch = plan_launch(problem, out.shape[-3], config, hardware)
    scratch = make_scratch(launch, problem, out)
    sinks, options = make_contiguous(x.sinks), dependent_options(config, args.use.capability)
    table, tree = _page_table(x), _tree_mask(x)
    _decode_kernel[(launch.num_units * problem.num_kv_heads,)](
        *args.tensors[:6], table, make_contiguous(x.cache_seqlens), tree, sinks,
        x.k_scales, x.v_scales, out, lse, stats, *scratch,
        *args.strides[:10], 0 if table is None else table.stride(0), problem.seqlen_q, lse.numel(),
        *scale_strides(x.k_scales), *scale_strides(x.v_scales),
        *args.scalars[:5], None if problem.seqlen_q == 1 else args.scalars[5], *args.scalars[6:8],
        problem.batch, x.k.shape[0], *launch.cut, launch.num_units, launch.part_rows,
        *args.dims, PAD_REST=_padded_rest(problem), PAGE_SIZE=problem.page_size,
        SAME_STRIDES=same_strides(args), BATCH=_batch_bucket(problem),
        TILE_M=config.tile_m, TILE_N=config.tile_n,
        **_kv8_format(problem, args), **options,
    )  # fmt: skip
    merge_splits(args, launch, scratch, sinks, result)
    return result


def merge_splits(
    args: LaunchArgs,
    launch: SplitLaunch,
    scratch: tuple[Tensor | None, ...],
    sinks: Tensor | None,
    result: Result,
) -> None:
    """Merge the states of splits, if there are any, into the result."""
    if launch.num_records:
        config = args.config("merge")
        num_heads, group_size = args.scalars[:2]
        rows = launch.num_records * num_heads // group_size * launch.part_rows
        _merge_kernel[(rows,)](
            *scratch, sinks, result.out, result.lse,
            *args.scalars[:3], launch.part_rows,
            HEAD_DIM_V=args.dims[1], PAD_DIM_V=args.dims[5], TILE_S=config.tile_n,
            **dependent_options(config, args.use.capability),
        )  # fmt: skip


def choose_config(problem: Problem, args: LaunchArgs, processors: int) -> TritonConfig:
    """The tile. Its rows follow the number of queries in a group, if they are few. Packed calls
    have sequences of many lengths; if results must not depend on the other sequences, the tile must
    not either.
    """
    rows = problem.seqlen_q * problem.group_size
    if rows > DECODE_ROWS or (problem.packed and problem.deterministic):
        return args.config("chunk")
    config = args.config(_tile_row(problem, processors))
    tile_m = min(padded(rows), config.tile_m or DECODE_ROWS)
    if problem.page_dtype is None:
        return config._replace(tile_m=tile_m)
    if tile_m > 16:  # its accumulators do not fit into fewer registers
        config = config._replace(max_registers=0)
    return config._replace(tile_m=min(tile_m, args.config("chunk").tile_m))


def _tile_row(problem: Problem, processors: int) -> str:
    """The row of the tile tables for few queries. With fixed splits (deterministic) tiles are fixed
    too.
    """
    if problem.page_size:
        full = problem.batch * problem.num_kv_heads >= 2 * processors
        return "paged_full" if full else "paged"
    short = problem.seqlen_k <= TRITON_SHORT_KEYS and not problem.deterministic
    return "short" if short else "decode"


def plan_launch(
    problem: Problem,
    total_q: int,
    config: TritonConfig,
    hardware: Hardware,
    waves: tuple[float, ...] = (SPLIT_WAVES,),
) -> SplitLaunch:
    """Sizes of the launch from upper bounds: the host does not read the lengths from the device.
    waves: see choose_for_unknown_lengths.
    """
    rows = problem.seqlen_q * problem.group_size
    tiles_q = problem.batch * triton.cdiv(rows, config.tile_m)
    if problem.packed:
        most = triton.cdiv(total_q * problem.group_size, config.tile_m) + problem.batch
        tiles_q = min(tiles_q, most)
    unsplit = SplitLaunch(tiles_q, 0, 0, min(rows, config.tile_m), (None, None, None))
    if problem.return_stats:  # splits do not store the sums of the entropy
        return unsplit
    if problem.deterministic:
        return _split_fixed(problem, config, unsplit)
    return _split_evenly(problem, config, unsplit, hardware, waves)


def _split_fixed(problem: Problem, config: TritonConfig, unsplit: SplitLaunch) -> SplitLaunch:
    """Splits of FIXED_KEYS keys, for sequences with one tile of queries."""
    tiles = triton.cdiv(problem.seqlen_k, config.tile_n)
    fixed = max(1, FIXED_KEYS // config.tile_n)
    slots = problem.batch * triton.cdiv(tiles, fixed)
    if tiles <= fixed:
        return unsplit
    cut = (1, 1, fixed)
    return SplitLaunch(unsplit.num_units + slots, slots, problem.batch, unsplit.part_rows, cut)


def _split_evenly(
    problem: Problem,
    config: TritonConfig,
    unsplit: SplitLaunch,
    hardware: Hardware,
    waves: tuple[float, ...],
) -> SplitLaunch:
    """Splits of at most W / U tiles, if all sequences together have W tiles for U units; the cost
    model chooses U. So the sequences need U units plus one per tile of queries, and a split
    sequence takes less than twice its share of U.
    """
    tiles, tiles_q = triton.cdiv(problem.seqlen_k, config.tile_n), unsplit.num_units
    least = max(1, SPLIT_KEYS // config.tile_n)
    work, part = TileWork.of(problem, *config[:2]), SplitTiles(tiles_q, tiles)
    if problem.packed or problem.page_size:
        units = choose_for_unknown_lengths(work, part, least, hardware, waves)
    else:
        units = choose(work, part, least, hardware)
    if units is None:
        return unsplit
    num_units = min(units + tiles_q, tiles_q * triton.cdiv(tiles, least))
    slots, records = min(2 * units, num_units), min(units, tiles_q)
    return SplitLaunch(num_units, slots, records, unsplit.part_rows, (units, least, None))


def make_scratch(launch: SplitLaunch, problem: Problem, out: Tensor) -> tuple[Tensor | None, ...]:
    """(out, lse in log2 units, records) of the splits, all None without splits."""
    if not launch.num_slots:
        return None, None, None
    rows = launch.num_slots * problem.num_kv_heads * launch.part_rows
    return (
        out.new_empty(rows, problem.head_dim_v, dtype=torch.float32),
        out.new_empty(rows, dtype=torch.float32),
        out.new_empty((launch.num_records + 1) * RECORD.value, dtype=torch.int32),
    )


def same_strides(args: LaunchArgs) -> bool:
    """Whether a key and its value have the same offset, as in one cache."""
    return args.strides[3:5] == args.strides[6:8]


def _padded_rest(problem: Problem) -> int:
    """The columns of q and k that the tiles of args.dims leave out, padded."""
    rest = problem.head_dim - TRITON_COLUMNS[problem.dtype.itemsize]
    return padded(rest) if rest > 0 else 0


def _page_table(x: Tensors) -> Tensor | None:
    table = x.page_table
    return table if table is None or table.stride(1) == 1 else table.contiguous()


def _kv8_format(problem: Problem, args: LaunchArgs) -> dict[str, bool]:
    """Constants for 8-bit pages. PTX converts e4m3 since compute capability 8.9; the instructions
    for int8 are always there.
    """
    e4m3, capability = problem.page_dtype == torch.float8_e4m3fn, args.use.capability
    ptx = problem.page_dtype is not None and capability is not None
    return {"E4M3": e4m3, "PTX": ptx and (not e4m3 or capability >= MIN_E4M3)}


def _tree_mask(x: Tensors) -> Tensor | None:
    return None if x.tree_mask is None else x.tree_mask.contiguous().view(torch.int8)


def _batch_bucket(problem: Problem) -> int:
    """BATCH, the size of the loop over sequences; 1: all have the same lengths, no loop."""
    return batch_bucket(problem.batch) if problem.packed or problem.page_size else 1


@lru_cache(maxsize=64)
def machine(device: torch.device) -> Hardware:
    """The hardware to plan for. Interpreted: enough processors to split, few enough to be quick."""
    return replace(HOST, processors=4) if device.type == "cpu" else planned_for(device)
