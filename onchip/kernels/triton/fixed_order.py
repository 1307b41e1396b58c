"""The forward with reproducible=True: every row folds the same tiles of keys in the same order, by
the same instructions.

    sequence of 1,200 keys     splits of SPLIT_KEYS = 512 keys from position 0, of tiles of TILE_N

      |  split 0: 8 tiles  |  split 1: 8 tiles  |  split 2: 3 tiles  |
         m, l, acc            m, l, acc            m, l, acc          each begins empty
            +-------- merge -------- merge --------------+            in this order: out, lse

    many tiles of queries      one program does all of this, the merged state in registers
    few (decoding)             `programs` programs for a tile and kv head, some splits each; they
                               store the states, and merge_splits_kernel merges them in this order

What a call changes is which program computes a split, where keys are loaded from (rows or pages),
and which rows share a tile. It does not change the bits of a row:

    products        one tile for all calls of a dtype and head_dim: one instruction, and its rows
                    are independent. A call with fewer rows leaves rows of the tile empty.
    tiles of keys   begin at multiples of TILE_N. One of which a row sees nothing changes no bit of
                    its state: alpha is 1 and p is 0. Nor does an empty split: see `merge_split`.
    other sums      row by row in the layout of the product. Multiply-adds are written as such, and
                    the compiler may fuse no others (enable_fp_fusion=False): otherwise the code
                    around an expression could change its rounding.

Rows of a tile: row r is query r // group_size of head r % group_size, as in decode.py. Worked
shape: batch 1, 1,200 keys, one query, 4 query heads on one kv head: rows 0 to 3 of a tile of 64,
three splits. With three programs they store three states of 4 rows. The CPU's twin is
kernels/cpu/fixed_order.py; the teaching version of the loop is examples/versions/v2.py.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onchip.core.backend import Result, empty_result
from onchip.core.problem import Problem, Tensors
from onchip.kernels.runtime.launcher import CachedLauncher
from onchip.kernels.tiles import (
    FIXED_ORDER_KEYS,
    FIXED_ORDER_MERGE,
    FIXED_ORDER_SCRATCH_BYTES,
    SPLIT_WAVES,
    TritonConfig,
    batch_bucket,
)
from onchip.kernels.triton.decode import (
    PageTableRow,
    load_rows_at,
    machine,
    offsets_of,
    page_of,
    same_strides,
)
from onchip.kernels.triton.launch import LENGTHS, LaunchArgs, dependent_options, make_contiguous
from onchip.kernels.triton.splits import SequenceLengths, SplitPlan, unit_of
from onchip.kernels.triton.tile import (
    LN2,
    LOG2E,
    LOWEST,
    dot,
    head_ptr,
    round_to,
    tanh,
)


class KeyRange(NamedTuple):
    """The keys that at least one row of a tile sees, start to stop - 1, and those that every row
    sees, full_start to full_stop - 1.
    """

    start: tl.tensor
    stop: tl.tensor
    full_start: tl.tensor
    full_stop: tl.tensor


@triton.jit
def find_keys(at, r0, left, right, group_size, TILE_M: tl.constexpr):
    """The KeyRange of rows r0 : r0 + TILE_M."""
    shift = at.seqlen_k - at.seqlen_q
    first = r0 // group_size + shift
    last = tl.minimum((r0 + TILE_M - 1) // group_size, at.seqlen_q - 1) + shift
    start, full_start = at.seqlen_k * 0, at.seqlen_k * 0
    stop, full_stop = at.seqlen_k + 0, at.seqlen_k + 0
    if left is not None:
        start, full_start = tl.maximum(first - left, 0), tl.maximum(last - left, 0)
    if right is not None:
        stop = tl.minimum(stop, tl.maximum(last + right + 1, 0))
        full_stop = tl.minimum(full_stop, tl.maximum(first + right + 1, 0))
    return KeyRange(start, stop, full_start, full_stop)


@triton.jit
def merge_split(m, l, acc, m_split, l_split, acc_split):
    """The state over the keys of both. An empty split has m = LOWEST, l = 0 and acc = 0: alpha is
    1, and nothing is added.
    """
    m_new = tl.maximum(m, m_split)
    alpha, beta = tl.exp2(m - m_new), tl.exp2(m_split - m_new)
    column = tl.broadcast_to(alpha[:, None], acc.shape)
    acc = tl.fma(acc, column, acc_split * beta[:, None])
    return m_new, tl.fma(l, alpha, l_split * beta), acc


@triton.jit
def fold_keys(m, l, acc, s, v, unit):
    """The state after one more tile of keys. s (TILE_M, TILE_N), -inf where hidden, times `unit` is
    the score in log2 units.
    """
    m_new = tl.maximum(m, tl.max(s, 1) * unit)
    alpha = tl.exp2(m - m_new)
    unit = tl.full(s.shape, 0.0, tl.float32) + unit
    p = tl.exp2(tl.fma(s, unit, tl.broadcast_to(-m_new[:, None], s.shape)))
    l = tl.fma(l, alpha, tl.sum(p, 1))
    return m_new, l, dot(round_to(p, v.dtype), v, acc * alpha[:, None])


@triton.jit
def store_result(
    out_ptr, lse_ptr, sinks_ptr, m, l, acc, at, i, h, exist, num_heads, total_q,
    DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """out and lse of rows: query i of head h."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + h, mask=exist, other=0.0).to(tl.float32) * LOG2E
        m_new = tl.maximum(m, sink)
        alpha = tl.exp2(m - m_new)
        l, acc = tl.fma(l, alpha, tl.exp2(sink - m_new)), acc * alpha[:, None]
        m = m_new
    entry = tl.cast(at.entry, tl.int64)
    tl.store(
        lse_ptr + (entry * num_heads + h) * total_q + at.start_q + i,
        (m + tl.log2(l)) * LN2,
        mask=exist,
    )
    out = acc / tl.where(l == 0, 1.0, l)[:, None]  # a row that saw no key: acc = 0
    dims = tl.arange(0, PAD)
    row = (entry * total_q + at.start_q + i) * num_heads + h
    cells = out_ptr + row[:, None] * DIM + dims[None, :]
    out = round_to(out, out_ptr.dtype.element_ty)
    tl.store(cells, out, mask=exist[:, None] & (dims < DIM)[None, :])


_LENGTHS = (*LENGTHS, "stride_table", "batch", "num_pages", "num_units", "programs", "most_splits")
_LENGTHS += ("part_rows",)


@triton.jit(do_not_specialize=_LENGTHS)
def fixed_order_kernel(
    q_ptr, k_ptr, v_ptr, cu_q_ptr, cu_k_ptr, table_ptr, cache_ptr, sinks_ptr, out_ptr, lse_ptr,
    parts_ptr, part_sums_ptr,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs,
    stride_vh, stride_table,
    num_heads, group_size, total_q, total_k, left, right, scale_log2, softcap, batch, num_pages,
    num_units, programs, most_splits, part_rows,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, LINEAR: tl.constexpr, ALIGN: tl.constexpr,
    PAD_DIM: tl.constexpr, PAD_DIM_V: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SAME_STRIDES: tl.constexpr, BATCH: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, SPLIT_TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out and lse of a tile of rows of one kv head or, with parts_ptr, the states (m, l, acc) of
    its share of the splits of this tile.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    num_kv_heads, pid = num_heads // group_size, tl.program_id(0)
    if parts_ptr is not None:  # heads of a token are adjacent in memory: they run at the same time
        kv, program = pid % num_kv_heads, pid // num_kv_heads % programs
        number = pid // num_kv_heads // programs
    else:  # the tiles of a head share its keys in L2
        kv, program, number = pid // num_units, 0, pid % num_units
    lengths = SequenceLengths(cu_q_ptr, cu_k_ptr, cache_ptr, total_q, total_k, batch)
    plan = SplitPlan(None, None, None, num_units)
    unit, at, _ = unit_of(lengths, plan, number, left, group_size, TILE_M, TILE_N, BATCH)
    if unit.exists == 0:
        return
    r0 = unit.tile * TILE_M
    row, keys = r0 + tl.arange(0, TILE_M), tl.arange(0, TILE_N)
    i, h = row // group_size, kv * group_size + row % group_size
    exist = i < at.seqlen_q
    seen_keys = find_keys(at, r0, left, right, group_size, TILE_M)
    begin, end = seen_keys.start // TILE_N, tl.cdiv(seen_keys.stop, TILE_N)
    if parts_ptr is not None:
        # Bad offsets may exceed the declared maxima, for which there is scratch memory.
        exist, end = exist & (row - r0 < part_rows), tl.minimum(end, most_splits * SPLIT_TILES)
        first_split = begin // SPLIT_TILES
        share = tl.cdiv(tl.cdiv(end, SPLIT_TILES) - first_split, programs)
        split = first_split + program * share
        begin, end = (
            tl.maximum(begin, split * SPLIT_TILES),
            tl.minimum(end, (split + share) * SPLIT_TILES),
        )
    pages = PageTableRow(None, num_pages)
    if PAGE_SIZE > 0:
        pages = PageTableRow(table_ptr + tl.cast(unit.b, tl.int64) * stride_table, num_pages)
    entry_k = 0 if PAGE_SIZE > 0 else at.entry
    q_ptr = head_ptr(q_ptr, at.entry, at.start_q, 0, stride_qb, stride_qs, stride_qh, ALIGN)
    k_ptr = head_ptr(k_ptr, entry_k, at.start_k, kv, stride_kb, stride_ks, stride_kh, ALIGN)
    v_ptr = head_ptr(v_ptr, entry_k, at.start_k, kv, stride_vb, stride_vs, stride_vh, ALIGN)
    at_q = (i.to(tl.int64) * stride_qs + h.to(tl.int64) * stride_qh) * ALIGN
    q = load_rows_at(q_ptr, at_q, exist, HEAD_DIM, PAD_DIM)
    position = (i + (at.seqlen_k - at.seqlen_q))[:, None]
    unit_log2 = scale_log2 if LINEAR else 1.0

    zeros = tl.zeros([TILE_M], tl.float32)
    m, l, acc = zeros + LOWEST, zeros, tl.zeros([TILE_M, PAD_DIM_V], tl.float32)
    m_split, l_split, acc_split = m, l, acc
    for t in range(begin, end):
        n = t * TILE_N
        j = n + keys
        inside = j < seen_keys.stop
        if left is not None:  # pages before the window may have been freed
            inside = inside & (j >= seen_keys.start)
        page = page_of(pages, j, seen_keys.stop, PAGE_SIZE)
        at_k = offsets_of(page, n, keys, stride_kb * ALIGN, stride_ks * ALIGN, PAGE_SIZE, TILE_N)
        at_v = at_k
        if not SAME_STRIDES:
            at_v = offsets_of(
                page, n, keys, stride_vb * ALIGN, stride_vs * ALIGN, PAGE_SIZE, TILE_N
            )
        k = load_rows_at(k_ptr, at_k, inside, HEAD_DIM, PAD_DIM)
        v = load_rows_at(v_ptr, at_v, inside, HEAD_DIM_V, PAD_DIM_V)
        s = dot(q, tl.trans(k), None)
        if not LINEAR:
            s = _apply_softcap(s, scale_log2, softcap)
        if (n < seen_keys.full_start) | (n + TILE_N > seen_keys.full_stop):
            seen = inside[None, :]
            if right is not None:
                seen = seen & (j[None, :] <= position + right)
            if left is not None:
                seen = seen & (j[None, :] >= position - left)
            s = tl.where(seen, s, float("-inf"))
        m_split, l_split, acc_split = fold_keys(m_split, l_split, acc_split, s, v, unit_log2)
        if ((t + 1) % SPLIT_TILES == 0) | (t + 1 == end):
            if parts_ptr is not None:
                slot = (tl.cast(number, tl.int64) * num_kv_heads + kv) * most_splits
                first = (slot + t // SPLIT_TILES) * part_rows + row - r0
                _store_part(
                    parts_ptr, part_sums_ptr, m_split, l_split, acc_split, first, exist,
                    HEAD_DIM_V, PAD_DIM_V,
                )  # fmt: skip
            else:
                m, l, acc = merge_split(m, l, acc, m_split, l_split, acc_split)
            m_split, l_split, acc_split = zeros + LOWEST, zeros, tl.zeros_like(acc_split)
    if parts_ptr is None:
        store_result(
            out_ptr, lse_ptr, sinks_ptr, m, l, acc, at, i, h, exist, num_heads, total_q,
            HEAD_DIM_V, PAD_DIM_V,
        )  # fmt: skip


@triton.jit
def _apply_softcap(s, scale_log2, softcap):
    if softcap is None:
        return s * scale_log2
    else:
        return tanh(s * (scale_log2 * LN2 / softcap)) * (softcap * LOG2E)


@triton.jit
def _store_part(
    parts_ptr, part_sums_ptr, m, l, acc, row, exist, DIM: tl.constexpr, PAD: tl.constexpr
):
    dims = tl.arange(0, PAD)
    tl.store(part_sums_ptr + 2 * row, m, mask=exist)
    tl.store(part_sums_ptr + 2 * row + 1, l, mask=exist)
    cells = parts_ptr + row[:, None] * DIM + dims[None, :]
    tl.store(cells, acc, mask=exist[:, None] & (dims < DIM)[None, :])


@triton.jit(do_not_specialize=_LENGTHS)
def merge_splits_kernel(
    cu_q_ptr, cu_k_ptr, cache_ptr, sinks_ptr, out_ptr, lse_ptr, parts_ptr, part_sums_ptr,
    num_heads, group_size, total_q, total_k, left, right, batch, num_units, most_splits, part_rows,
    HEAD_DIM_V: tl.constexpr, PAD_DIM_V: tl.constexpr, BATCH: tl.constexpr, TILE_M: tl.constexpr,
    SPLIT_KEYS: tl.constexpr, ROWS: tl.constexpr, AT_A_TIME: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out and lse of ROWS rows of a tile from the states of its splits."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    num_kv_heads, pid = num_heads // group_size, tl.program_id(0)
    chunks = tl.cdiv(part_rows, ROWS)
    chunk, kv, number = pid % chunks, pid // chunks % num_kv_heads, pid // chunks // num_kv_heads
    lengths = SequenceLengths(cu_q_ptr, cu_k_ptr, cache_ptr, total_q, total_k, batch)
    plan = SplitPlan(None, None, None, num_units)
    unit, at, _ = unit_of(lengths, plan, number, left, group_size, TILE_M, SPLIT_KEYS, BATCH)
    if unit.exists == 0:
        return
    r0 = unit.tile * TILE_M
    local = chunk * ROWS + tl.arange(0, ROWS)
    i, h = (r0 + local) // group_size, kv * group_size + (r0 + local) % group_size
    exist = (local < part_rows) & (i < at.seqlen_q)
    seen_keys = find_keys(at, r0, left, right, group_size, TILE_M)
    begin = seen_keys.start // SPLIT_KEYS
    end = tl.minimum(tl.cdiv(seen_keys.stop, SPLIT_KEYS), most_splits)
    zeros, dims = tl.zeros([ROWS], tl.float32), tl.arange(0, PAD_DIM_V)
    m, l, acc = zeros + LOWEST, zeros, tl.zeros([ROWS, PAD_DIM_V], tl.float32)
    slot = (tl.cast(number, tl.int64) * num_kv_heads + kv) * most_splits
    for s0 in range(begin, end, AT_A_TIME):
        for s in tl.static_range(AT_A_TIME):  # unrolled: their loads are issued at once
            split = s0 + s + local * 0
            row, stored = (slot + split) * part_rows + local, exist & (split < end)
            m_split = tl.load(part_sums_ptr + 2 * row, mask=stored, other=LOWEST)
            l_split = tl.load(part_sums_ptr + 2 * row + 1, mask=stored, other=0.0)
            cells = parts_ptr + row[:, None] * HEAD_DIM_V + dims[None, :]
            inside = stored[:, None] & (dims < HEAD_DIM_V)[None, :]
            acc_split = tl.load(cells, mask=inside, other=0.0)
            m, l, acc = merge_split(m, l, acc, m_split, l_split, acc_split)
    store_result(
        out_ptr, lse_ptr, sinks_ptr, m, l, acc, at, i, h, exist, num_heads, total_q,
        HEAD_DIM_V, PAD_DIM_V,
    )  # fmt: skip


_fixed_order_kernel = CachedLauncher(fixed_order_kernel)
_merge_splits_kernel = CachedLauncher(merge_splits_kernel)


class ProgramPlan(NamedTuple):
    """Tiles of rows of all sequences at most, programs for each tile and kv head, splits of a
    sequence at most, and rows of a tile in use.
    """

    num_units: int
    programs: int
    most_splits: int
    part_rows: int

    @classmethod
    def of(cls, problem: Problem, total_q: int, tile_m: int, processors: int) -> "ProgramPlan":
        """From upper bounds: the host does not read the lengths from the device."""
        rows = problem.seqlen_q * problem.group_size
        num_units = problem.batch * triton.cdiv(rows, tile_m)
        if problem.packed:
            most = triton.cdiv(total_q * problem.group_size, tile_m) + problem.batch
            num_units = min(num_units, most)
        splits, part_rows = triton.cdiv(problem.seqlen_k, FIXED_ORDER_KEYS), min(rows, tile_m)
        tiles = num_units * problem.num_kv_heads
        programs = min(splits, triton.cdiv(SPLIT_WAVES * processors, max(1, tiles)))
        scratch_bytes = tiles * splits * part_rows * (problem.head_dim_v + 2) * 4
        if scratch_bytes > FIXED_ORDER_SCRATCH_BYTES:
            programs = 1
        return cls(num_units, max(1, programs), splits, part_rows)

    def make_scratch(self, problem: Problem, out: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """acc, and (m, l), of the splits; None if one program computes all of a tile."""
        if self.programs == 1:
            return None, None
        rows = self.num_units * problem.num_kv_heads * self.most_splits * self.part_rows
        empty = lambda *shape: out.new_empty(shape, dtype=torch.float32)
        return empty(rows, problem.head_dim_v), empty(rows, 2)


def forward(problem: Problem, x: Tensors) -> Result:
    out, lse = empty_result(problem, x)
    result = Result(out, lse)
    if not out.numel() or not problem.batch:
        return result
    args = LaunchArgs.of(problem, x)
    config = args.config("fixed_order")
    plan = ProgramPlan.of(problem, out.shape[-3], config.tile_m, machine(out.device).processors)
    scratch, sinks = plan.make_scratch(problem, out), make_contiguous(x.sinks)
    table, cache = make_contiguous(x.page_table), make_contiguous(x.cache_seqlens)
    has_lengths = problem.packed or problem.page_size
    bucket = batch_bucket(problem.batch) if has_lengths else 1
    _fixed_order_kernel[(plan.num_units * problem.num_kv_heads * plan.programs,)](
        *args.tensors[:5], table, cache, sinks, out, lse, *scratch,
        *args.strides[:9], 0 if table is None else table.stride(0),
        *args.scalars[:8], problem.batch, x.k.shape[0], *plan,
        *args.dims, PAGE_SIZE=problem.page_size, SAME_STRIDES=same_strides(args), BATCH=bucket,
        TILE_M=config.tile_m, TILE_N=config.tile_n,
        SPLIT_TILES=FIXED_ORDER_KEYS // config.tile_n, **_options(config, args),
    )  # fmt: skip
    if scratch[0] is not None:
        _merge(problem, args, plan, (cache, sinks, out, lse, *scratch), bucket, config)
    return result


def _merge(
    problem: Problem, args: LaunchArgs, plan: ProgramPlan, tensors: tuple[Any, ...], bucket: int,
    config: TritonConfig,
) -> None:  # fmt: skip
    rows = FIXED_ORDER_MERGE.tile_m
    chunks = plan.num_units * problem.num_kv_heads * triton.cdiv(plan.part_rows, rows)
    _merge_splits_kernel[(chunks,)](
        *args.tensors[3:5], *tensors, *args.scalars[:6], problem.batch, plan.num_units,
        plan.most_splits, plan.part_rows,
        HEAD_DIM_V=args.dims[1], PAD_DIM_V=args.dims[5], BATCH=bucket, TILE_M=config.tile_m,
        SPLIT_KEYS=FIXED_ORDER_KEYS, ROWS=rows, AT_A_TIME=FIXED_ORDER_MERGE.tile_n,
        **_options(FIXED_ORDER_MERGE, args),
    )  # fmt: skip


def _options(config: TritonConfig, args: LaunchArgs) -> dict[str, Any]:
    return dependent_options(config, args.use.capability) | {"enable_fp_fusion": False}
