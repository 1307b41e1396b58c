"""Attention over latent pages on Hopper: the values are the first 512 of the 576 columns of a key.

  producer warp                     consumer warpgroup 0          consumer warpgroup 1
  -------------                     --------------------          --------------------
  TMA 64 keys: low 256 columns
  and the last 64 --- full 0 ---->  S = Q K        (wgmma)        S = Q K        (wgmma)
  high 256 columns -- full 1 ---->  high is released              low is released
                                    m, l, P in registers          m, l, P in registers
                                    O[  0..255] += P V  (wgmma)   O[256..511] += P V  (wgmma)
            <-- empty 0, empty 1 -  low is released               high is released

A tile of 64 rows (queries x heads of a group) has an output of 512 columns, as many registers as
two warpgroups have. So each of them owns half of the output's columns. Both compute all scores,
from the same products in the same order: a third of the work on a key is done twice, and in
exchange neither waits for the other, whose products run under its own exponentials, and P never
leaves the registers. A key is copied to shared memory once, and read there as a key and as a value.

The values of a tile are accumulated right after its scores, so that its stage is empty when the
next tile is needed: while one tile is computed, the other is copied. (Were the scores of a tile
computed under the values of the one before, as in forward.py, both stages would be in use.)
Keys are split over programs by the plan of triton/splits.py, whose slots and records the programs
fill: triton/merge.py merges them.

Worked shape: batch 1, 1 query, 300 keys in pages of 16, 128 heads on one kv head: two tiles of 64
rows, each over five tiles of keys, the last of which has 44 keys. A tile is 4 parts of 16 keys.
Unsplit, these are two programs.

examples/versions/v3.py teaches the pipeline, docs/kernels.md explains split-KV.
"""

from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from onchip.kernels.hopper.aggregate import aggregate
from onchip.kernels.hopper.gluon_types import gl, gluon
from onchip.kernels.hopper.paging import make_paged_kv
from onchip.kernels.hopper.pipeline import (
    PREFETCH_DISTANCE,
    LinkedStages,
    Pipeline,
    make_linked_stages,
    make_pipeline,
    sync_consumers,
    sync_partition,
    sync_with_previous_kernel,
)
from onchip.kernels.hopper.softmax import (
    LN2,
    LOG2E,
    SoftmaxScale,
    broadcast_to_lane_sums,
    exp2,
    lane_sums,
    reduce_lane_sums,
)
from onchip.kernels.hopper.tile_scheduler import plus

ROWS = gl.constexpr(64)  # of a program: queries x heads of a group
TILE_N = gl.constexpr(64)
HALF = gl.constexpr(256)  # columns of the output of a warpgroup
REST = gl.constexpr(64)  # columns of a key that are no values
STAGES = gl.constexpr(2)
RECORD = gl.constexpr(8)  # triton/splits.py
ALIGN = gl.constexpr(8)  # elements in 16 bytes
S = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_N.value, 16]))
O = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF.value, 16]))  # noqa: E741
P = gl.constexpr(gl.DotOperandLayout(0, O.value, 2))


@aggregate
class LatentLengths:
    """The lengths of a call. Packed queries have cu_seqlens_q, others total_q each."""

    cu_seqlens_q: gl.tensor
    cache_seqlens: gl.tensor
    total_q: gl.tensor
    seqlen_k: gl.tensor
    batch: gl.tensor
    left: gl.tensor
    right: gl.tensor
    PACKED: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr

    @gluon.jit
    def keys(self, b):
        """Keys of sequences b, clamped to the page table."""
        return gl.minimum(gl.maximum(gl.load(self.cache_seqlens + b), 0), self.seqlen_k)

    @gluon.jit
    def queries(self, b):
        """(first query, number of queries) of sequences b, clamped to the tensor."""
        if self.PACKED:
            start = gl.minimum(gl.maximum(gl.load(self.cu_seqlens_q + b), 0), self.total_q)
            stop = gl.minimum(gl.load(self.cu_seqlens_q + b + 1), self.total_q)
            return start, gl.maximum(stop - start, 0)
        else:
            return b * 0, b * 0 + self.total_q

    @gluon.jit
    def entry(self, b):
        """The batch entry of the tensors that has sequence b."""
        if self.PACKED:
            return b * 0
        else:
            return b

    @gluon.jit
    def tiles(self, seqlen_q, seqlen_k, GROUP: gl.constexpr):
        """(tiles of queries, first tile of keys that they see, number of tiles from there)"""
        first = seqlen_k * 0
        if self.HAS_LEFT:
            first = gl.maximum(seqlen_k - seqlen_q - self.left, 0) // TILE_N
        tiles_q = (seqlen_q * GROUP + ROWS - 1) // ROWS
        return tiles_q, first, (seqlen_k + TILE_N - 1) // TILE_N - first


@aggregate
class LatentUnit:
    """Rows r0 .. of sequence b and tiles begin : end of its keys, one of `count` splits: see
    triton/splits.py. A unit that does not exist has no queries and no keys.
    """

    b: gl.tensor
    r0: gl.tensor
    start_q: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    split: gl.tensor
    count: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    slot: gl.tensor
    record: gl.tensor
    num_records: gl.tensor


@gluon.jit
def pick(values, at):
    """The element of a vector at which `at` is set."""
    return gl.sum(gl.where(at, values, 0), 0)


@gluon.jit
def find_unit(lengths, unit, units, least, num_units, GROUP: gl.constexpr, SPLIT: gl.constexpr,
              BATCH: gl.constexpr):  # fmt: skip
    """The LatentUnit with index `unit`. BATCH is at least the number of sequences."""
    # Every warp has all sequences: no value crosses warps, which would need shared memory.
    each: gl.constexpr = gl.BlockedLayout([BATCH // 32], [32], [4], [0])
    e = gl.arange(0, BATCH, each)
    b = gl.minimum(e, lengths.batch - 1)
    seqlen_k = lengths.keys(b)
    start_q, seqlen_q = lengths.queries(b)
    tiles_q, first, tiles = lengths.tiles(seqlen_q, seqlen_k, GROUP)
    tiles_q = gl.where(e < lengths.batch, tiles_q, 0)
    count, per = gl.full_like(tiles, 1), gl.maximum(tiles, 1)
    if SPLIT:
        work = gl.sum(tiles_q.to(gl.int64) * tiles, 0)
        most = gl.maximum(((work + units - 1) // units).to(gl.int32), least)
        per = gl.maximum((tiles + most - 1) // most, 1)
        per = gl.maximum((tiles + per - 1) // per, 1)
        count = gl.maximum((tiles + per - 1) // per, 1)
    stop = gl.associative_scan(tiles_q * count, 0, plus)
    passed = stop <= unit
    start = gl.max(gl.where(passed, stop, 0), 0)
    index = gl.sum(passed.to(gl.int32), 0)
    stored = (count > 1) & (stop <= num_units)  # bad offsets may need more than were launched
    at = e == index
    own_tiles_q, own_count, own_per = pick(tiles_q, at), pick(count, at), pick(per, at)
    exists = (index < lengths.batch) & (start + own_tiles_q * own_count <= num_units)
    local = unit - start
    own_count = gl.maximum(own_count, 1)
    tile = own_tiles_q - 1 - local // own_count  # the last queries see the most keys
    begin = pick(first, at) + local % own_count * own_per
    end = gl.minimum(begin + own_per, pick(first + tiles, at))
    return LatentUnit(
        gl.minimum(index, lengths.batch - 1),
        gl.maximum(tile, 0) * ROWS,
        pick(start_q, at),
        gl.where(exists, pick(seqlen_q, at), 0),
        pick(seqlen_k, at),
        local % own_count,
        gl.where(exists, own_count, 1),
        begin,
        gl.where(exists, end, begin),
        gl.sum(gl.where(stored & passed, tiles_q * count, 0), 0) + local,
        gl.sum(gl.where(stored & passed, tiles_q, 0), 0) + tile,
        gl.sum(gl.where(stored, tiles_q, 0), 0),
    )


@aggregate
class LatentStages:
    """Tiles of keys: two halves of the latent columns, and the rest under the barriers of the first
    half.
    """

    low: Pipeline
    high: Pipeline
    rest: LinkedStages

    @gluon.jit
    def wait_full(self, i):
        self.low.wait_full(i)
        self.high.wait_full(i)

    @gluon.jit
    def values(self, i, C: gl.constexpr):
        """The latent columns of warpgroup C of iteration i."""
        return self.low.stage(i) if C == 0 else self.high.stage(i)

    @gluon.jit
    def release(self, i, C: gl.constexpr):
        """Release the latent columns of warpgroup C."""
        if C == 0:
            self.low.release(i)
        else:
            self.high.release(i)

    @gluon.jit
    def load(self, i, latent_desc, rest_desc, pages, unit, start, kv_head):
        """Producer: load iteration i, page by page, as its stages become empty."""
        page_ids = pages.page_ids(i)
        self.low.wait_empty(i)
        self.low.expect_parts(i, latent_desc, pages.PARTS, rest_desc.block_type.nbytes)
        for x in gl.static_range(pages.PARTS):
            at = self.coord(pages, page_ids, x, i, unit, start, kv_head)
            self.low.load_part(i, latent_desc, at, x)
            at = at[:-1] + (gl.to_tensor(2 * HALF),)
            self.low.load_linked_part(i, rest_desc, at, x, self.rest)
        self.high.wait_empty(i)
        self.high.expect_parts(i, latent_desc, pages.PARTS)
        for x in gl.static_range(pages.PARTS):
            at = self.coord(pages, page_ids, x, i, unit, start, kv_head)
            self.high.load_part(i, latent_desc, at[:-1] + (gl.to_tensor(HALF),), x)

    @gluon.jit
    def coord(self, pages, page_ids, x: gl.constexpr, i, unit, start, kv_head):
        """Where part x of iteration i is."""
        key = (unit.begin + i) * TILE_N
        return pages.coord(page_ids[x], x, pages.page_stride_k, key, start, unit.seqlen_k, kv_head)


@aggregate
class LatentQueries:
    """q, and a tile of 64 rows of it in shared memory, in the column blocks of LatentStages, each
    with a leading dimension of 1.
    """

    q: gl.tensor
    stride_b: gl.tensor
    stride_s: gl.tensor
    stride_h: gl.tensor
    low: gl.shared_memory_descriptor
    high: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor
    GROUP: gl.constexpr
    PACKED: gl.constexpr

    @gluon.jit
    def load(self, unit, kv_head, first: gl.constexpr, columns: gl.constexpr):
        """`columns` columns of the rows of a unit; rows that do not exist are zeros."""
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1],
                                                [1, 0])  # fmt: skip
        r = unit.r0 + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        d = first + gl.arange(0, columns, gl.SliceLayout(0, layout))
        query = r // self.GROUP
        head = (kv_head * self.GROUP + r % self.GROUP).to(gl.int64)
        token = (unit.start_q + query).to(gl.int64) * self.stride_s
        if not self.PACKED:
            token += unit.b.to(gl.int64) * self.stride_b
        cells = self.q + (token + head * self.stride_h)[:, None] + d[None, :]
        return gl.load(cells, mask=(query < unit.seqlen_q)[:, None], other=0.0)

    @gluon.jit
    def copy(self, unit, kv_head, C: gl.constexpr):
        """Warpgroup C: copy its share of the columns."""
        half = self.load(unit, kv_head, C * HALF, HALF)
        if C == 0:
            self.low.index(0).store(half)
        else:
            rest = self.load(unit, kv_head, 2 * HALF, REST)
            self.high.index(0).store(half)
            self.rest.index(0).store(rest)


@aggregate
class LatentOutput:
    """Results, and memory for the states of splits with their records, as triton/merge.py reads
    them. Without splits these three are not used.
    """

    out: gl.tensor
    lse: gl.tensor
    sinks: gl.tensor
    parts: gl.tensor
    part_lses: gl.tensor
    records: gl.tensor
    part_rows: gl.tensor
    num_heads: gl.tensor
    GROUP: gl.constexpr
    HAS_SINKS: gl.constexpr
    SPLIT: gl.constexpr

    @gluon.jit
    def store(self, lengths, unit, kv_head, m, l, acc, C: gl.constexpr):
        """Store the columns of warpgroup C, from m in base 2, row sums l and the accumulator."""
        if self.SPLIT:
            if unit.count > 1:
                self.store_part(lengths, unit, kv_head, m, l, acc, C)
            else:
                self.store_result(lengths, unit, kv_head, m, l, acc, C)
        else:
            self.store_result(lengths, unit, kv_head, m, l, acc, C)

    @gluon.jit
    def store_result(self, lengths, unit, kv_head, m, l, acc, C: gl.constexpr):
        r = unit.r0 + gl.arange(0, ROWS, gl.SliceLayout(1, O))
        query, head = r // self.GROUP, kv_head * self.GROUP + r % self.GROUP
        exist = query < unit.seqlen_q
        if self.HAS_SINKS:
            sink = gl.load(self.sinks + head, mask=exist, other=0.0).to(gl.float32) * LOG2E
            top = gl.where(l > 0.0, gl.maximum(m, sink), sink)
            pivot = gl.where(top == float("-inf"), 0.0, top)
            factor = gl.where(l > 0.0, gl.exp2(m - pivot), 0.0)
            l = l * factor + gl.exp2(sink - pivot)
            acc = acc * factor[:, None]
            m = top
        entry = lengths.entry(unit.b).to(gl.int64)
        if C == 0:
            place = (entry * self.num_heads + head) * lengths.total_q + unit.start_q + query
            lse = gl.where(l != 0.0, (m + gl.log2(l)) * LN2, float("-inf"))
            gl.store(self.lse + place, lse, mask=exist)
        token = entry * lengths.total_q + unit.start_q + query
        row = (token * self.num_heads + head) * (2 * HALF)
        acc = acc * (1.0 / gl.where(l == 0.0, 1.0, l))[:, None]
        cells = self.out + row[:, None] + columns_of(C)[None, :]
        gl.store(cells, acc.to(self.out.dtype.element_ty), mask=exist[:, None])

    @gluon.jit
    def store_part(self, lengths, unit, kv_head, m, l, acc, C: gl.constexpr):
        r = gl.arange(0, ROWS, gl.SliceLayout(1, O))
        num_kv_heads = self.num_heads // self.GROUP
        exist = ((unit.r0 + r) // self.GROUP < unit.seqlen_q) & (r < self.part_rows)
        row = (unit.slot * num_kv_heads + kv_head).to(gl.int64) * self.part_rows + r
        if C == 0:
            lse = gl.where(l != 0.0, m + gl.log2(l), float("-inf"))
            gl.store(self.part_lses + row, lse, mask=exist)
            if (unit.split == 0) & (kv_head == 0):
                record = self.records + (unit.record + 1) * RECORD
                token = lengths.entry(unit.b) * lengths.total_q + unit.start_q
                gl.store(record, token)
                gl.store(record + 1, unit.r0)
                rows = unit.seqlen_q * self.GROUP - unit.r0
                gl.store(record + 2, gl.minimum(rows, ROWS))
                gl.store(record + 3, unit.slot)
                gl.store(record + 4, unit.count)
        acc = acc * (1.0 / gl.where(l == 0.0, 1.0, l))[:, None]
        cells = self.parts + (row * (2 * HALF))[:, None] + columns_of(C)[None, :]
        gl.store(cells, acc, mask=exist[:, None])


@gluon.jit
def columns_of(C: gl.constexpr):
    """The output columns of warpgroup C."""
    return C * HALF + gl.arange(0, HALF, gl.SliceLayout(0, O))


@gluon.jit
def start_scores(queries, stages, i):
    """Start S of iteration i."""
    zero = gl.zeros([ROWS, TILE_N], gl.float32, S)
    # 0, which the compiler cannot prove: it would keep the addresses of q in registers.
    hidden = i >> 30
    low, high = stages.low.stage(i).permute((1, 0)), stages.high.stage(i).permute((1, 0))
    rest = stages.rest.matrix(i).permute((1, 0))
    s = warpgroup_mma(queries.low.index(hidden), low, zero, use_acc=False, is_async=True)
    s = warpgroup_mma(queries.high.index(hidden), high, s, is_async=True)
    return warpgroup_mma(queries.rest.index(hidden), rest, s, is_async=True)


@gluon.jit
def mask_scores(lengths, unit, s, n, GROUP: gl.constexpr):
    """s with -inf at keys that a row does not see."""
    whole = unit.seqlen_k
    if lengths.HAS_RIGHT:
        whole = gl.minimum(whole, unit.seqlen_k - unit.seqlen_q + lengths.right + 1)
    is_cut = n * TILE_N + TILE_N > whole
    if lengths.HAS_LEFT:
        is_cut = is_cut | (n * TILE_N < unit.seqlen_k - 1 - lengths.left)
    if is_cut:
        key = n * TILE_N + gl.arange(0, TILE_N, gl.SliceLayout(0, S))
        row = unit.r0 + gl.arange(0, ROWS, gl.SliceLayout(1, S))
        at = row // GROUP + unit.seqlen_k - unit.seqlen_q
        seen = (key < unit.seqlen_k)[None, :] & (row >= 0)[:, None]
        if lengths.HAS_RIGHT:
            seen = seen & (key[None, :] <= (at + lengths.right)[:, None])
        if lengths.HAS_LEFT:
            seen = seen & (key[None, :] >= (at - lengths.left)[:, None])
        s = gl.where(seen, s, float("-inf"))
    return s


@gluon.jit
def fold_scores(lengths, unit, scale, s, m, l, i, GROUP: gl.constexpr):
    """(p, m, l, alpha) after the scores of iteration i."""
    s = mask_scores(lengths, unit, scale.apply_softcap(s), unit.begin + i, GROUP)
    m_new = gl.maximum(m, gl.max(s, 1))
    alpha = gl.exp2((m - m_new) * scale.scale_log2)
    p = exp2(s * scale.scale_log2 - (m_new * scale.scale_log2)[:, None], 0)
    return p, m_new, l * broadcast_to_lane_sums(alpha, l) + lane_sums(p), alpha


@gluon.jit
def consume(queries, stages, out, lengths, unit, scale, kv_head, C: gl.constexpr):
    """Warpgroup C: fold the tiles of a unit, and store its columns of the result."""
    rows: gl.constexpr = gl.SliceLayout(1, S)
    dtype: gl.constexpr = stages.rest.smem.dtype
    m = scale.clamp_maxima(gl.full([ROWS], float("-inf"), gl.float32, rows))
    l = lane_sums(gl.zeros([ROWS, TILE_N], gl.float32, S))
    acc = gl.zeros([ROWS, HALF], gl.float32, O)
    queries.copy(unit, kv_head, C)
    sync_consumers()
    for i in range(unit.end - unit.begin):
        stages.wait_full(i)
        s = warpgroup_mma_wait(0, deps=(start_scores(queries, stages, i),))
        stages.release(i, 1 - C)  # the values of the other warpgroup are only keys to this one
        p, m, l, alpha = fold_scores(lengths, unit, scale, s, m, l, i, out.GROUP)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]
        p = gl.convert_layout(p.to(dtype), P)
        acc = warpgroup_mma(p, stages.values(i, C), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        stages.release(i, C)
    l = gl.convert_layout(reduce_lane_sums(l, S), gl.SliceLayout(1, O))
    m = gl.convert_layout(m * scale.scale_log2, gl.SliceLayout(1, O))
    out.store(lengths, unit, kv_head, m, l, acc, C)


@gluon.jit
def produce(latent_desc, rest_desc, stages, pages, lengths, unit, kv_head):
    """Load the tiles of a unit."""
    count = unit.end - unit.begin
    start = 0
    if lengths.HAS_LEFT:
        start = unit.r0 * 0 + unit.seqlen_k - unit.seqlen_q - lengths.left
    for i in range(PREFETCH_DISTANCE):
        pages.prefetch_ids(i, unit.b, (unit.begin + i) * TILE_N, i < count)
    for i in range(count):
        ahead = i + PREFETCH_DISTANCE
        pages.prefetch_ids(ahead, unit.b, (unit.begin + ahead) * TILE_N, ahead < count)
        pages.ids.wait()
        stages.load(i, latent_desc, rest_desc, pages, unit, start, kv_head)


_RUNTIME = [
    "stride_qb", "stride_qs", "stride_qh", "stride_table", "max_pages", "num_pages", "page_stride",
    "total_q", "seqlen_k", "batch", "num_heads", "left", "right", "units", "least", "num_units",
    "part_rows",
]  # fmt: skip


@gluon.jit(do_not_specialize=_RUNTIME)
def latent_kernel(
    q_ptr, latent_desc, rest_desc, cu_seqlens_q, page_table, cache_seqlens, sinks_ptr, out_ptr,
    lse_ptr, parts_ptr, part_lses_ptr, records_ptr,
    stride_qb, stride_qs, stride_qh, stride_table, max_pages, num_pages, page_stride,
    total_q, seqlen_k, batch, num_heads, left, right, units, least, num_units, part_rows,
    scale_log2, inner,
    GROUP: gl.constexpr, PAGE_SIZE: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_SINKS: gl.constexpr, SOFTCAP: gl.constexpr, SPLIT: gl.constexpr,
    BATCH: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    lengths = LatentLengths(cu_seqlens_q, cache_seqlens, total_q, seqlen_k, batch, left, right,
                            PACKED, HAS_LEFT, HAS_RIGHT)  # fmt: skip
    pages = make_paged_kv(page_table, cache_seqlens, stride_table, max_pages, num_pages,
                          page_stride, page_stride, PAGE_SIZE, TILE_N)  # fmt: skip
    stages = LatentStages(make_pipeline(latent_desc, STAGES, 2, pages.PARTS),
                          make_pipeline(latent_desc, STAGES, 2, pages.PARTS),
                          make_linked_stages(rest_desc, STAGES, pages.PARTS))  # fmt: skip
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HALF], dtype)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, REST], dtype)
    queries = LatentQueries(
        q_ptr, stride_qb * ALIGN, stride_qs * ALIGN, stride_qh * ALIGN,
        gl.allocate_shared_memory(dtype, [1, ROWS, HALF], wide),
        gl.allocate_shared_memory(dtype, [1, ROWS, HALF], wide),
        gl.allocate_shared_memory(dtype, [1, ROWS, REST], narrow),
        GROUP, PACKED,
    )  # fmt: skip
    sync_with_previous_kernel()
    num_kv_heads = num_heads // GROUP
    kv_head = gl.program_id(0) % num_kv_heads
    unit = find_unit(lengths, gl.program_id(0) // num_kv_heads, units, least, num_units, GROUP,
                     SPLIT, BATCH)  # fmt: skip
    out = LatentOutput(out_ptr, lse_ptr, sinks_ptr, parts_ptr, part_lses_ptr, records_ptr,
                       part_rows, num_heads, GROUP, HAS_SINKS, SPLIT)  # fmt: skip
    if SPLIT and gl.program_id(0) == 0:
        gl.store(records_ptr, unit.num_records)
    scale = SoftmaxScale(scale_log2, inner, SOFTCAP)
    sync_partition()  # the captured values replace what find_unit has in shared memory
    gl.warp_specialize([
        (consume, (queries, stages, out, lengths, unit, scale, kv_head, 0)),
        (consume, (queries, stages, out, lengths, unit, scale, kv_head, 1)),
        (produce, (latent_desc, rest_desc, stages, pages, lengths, unit, kv_head)),
    ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    stages.low.close()
    stages.high.close()
