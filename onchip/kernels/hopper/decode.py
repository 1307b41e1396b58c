"""Decoding on Hopper: few queries over many keys (FlashDecoding's split-KV), dense or paged.

  program (range r, kv head h)
  producer warp                                consumer warpgroup, 4 warps
  page ids: IndexPrefetch, 6 tiles ahead       queries of the next sequence: async copy to smem
  TMA K[i], V[i] ------ full ----------------> warp w: S = Q K[i, 16w..16w+15]  (mma.sync)
                 <----- empty ---------------- P = exp2(S - m), O += P V        (mma.sync)
                                               end of a sequence: the states of 4 warps are merged
                                               whole sequence: store; else: store a partial state,
                                               and the last program to finish merges (combine.py)

The query heads of a kv head share one tile of 16 rows, and keys stream past it: memory bandwidth
sets the pace. The work is all key tiles of all sequences, in order, split into even ranges. A range
has one program for each kv head. These run at the same time, because the heads of a token are
neighbours in memory. A sequence that several ranges share leaves a partial state in each of them.
The program that finds all of them complete merges them: a second launch would cost more than the
merge.

Worked shape: batch 1, 1 query, 300 keys, 8 query heads on 2 kv heads: 4 of 16 rows are used. 300
keys are 5 tiles of 64. Ranges have at least 256 keys (4 tiles), so there is one range and no merge.
With 3,000 keys (47 tiles) there would be 11 ranges of 4 or 5 tiles, for each kv head.

examples/versions/v2.py shows the fold over key tiles; docs/kernels.md explains split-KV.
"""

from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onchip.kernels.hopper.aggregate import aggregate
from onchip.kernels.hopper.combine import WARPS, DecodeOutput
from onchip.kernels.hopper.dequant import (
    PageScales,
    QueryHalves,
    accumulate_pv,
    interleave,
    split_query,
    unpack,
)
from onchip.kernels.hopper.gluon_types import gl, gluon
from onchip.kernels.hopper.pipeline import (
    LANES,
    PREFETCH_DISTANCE,
    PREFETCH_STAGES,
    IndexPrefetch,
    fetch,
    make_index_prefetch,
    make_kv_stages,
    sync_partition,
    wait_fetched,
)
from onchip.kernels.hopper.softmax import SoftmaxScale
from onchip.kernels.hopper.tile_scheduler import plus

ROWS = gl.constexpr(16)  # of a product: queries x heads of a group, then padding
KEYS = gl.constexpr(16)  # of one warp in a tile
TILE_N = gl.constexpr(64)
THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # the consumer
SWITCH_COST = gl.constexpr(4)  # tiles that load while a program switches sequences
# Read before and after the wait for the previous kernel. The L1 would keep the older value.
PAST_L1 = gl.constexpr(".cg")
ALIGN = gl.constexpr(8)  # elements in 16 bytes; strides and head_dim are multiples of it


@aggregate
class DecodeSeqlens:
    """The sequences of a call. Paged ones have the lengths in cache_seqlens, dense ones seqlen_k
    keys. Windows count from the diagonal. `cached`: cache_seqlens in shared memory, so that all
    warps use the same values.
    """

    cache_seqlens: gl.tensor
    cached: IndexPrefetch
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    batch: gl.tensor
    left: gl.tensor
    right: gl.tensor
    PAGED: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr

    @gluon.jit
    def keys(self, b, layout: gl.constexpr):
        """Keys of sequence b, clamped to the tables."""
        if self.PAGED:
            return self.cached.get_at(b, 0, layout)
        else:
            return self.seqlen_k

    @gluon.jit
    def load_lengths(self, BATCH: gl.constexpr):
        """The current lengths of all paged sequences; BATCH is at least their number."""
        e = gl.arange(0, BATCH, THREADS)
        loaded = gl.load(self.cache_seqlens + e, e < self.batch, 0, cache_modifier=PAST_L1)
        return gl.minimum(gl.maximum(loaded, 0), self.seqlen_k)

    @gluon.jit
    def load_all_lengths(self, BATCH: gl.constexpr):
        """The lengths of all sequences, paged ones from `cached`, and -1 past the last. Every warp
        has all of them, but each thread loads only some: one thread would wait for one load after
        another.
        """
        each: gl.constexpr = gl.BlockedLayout([BATCH // 32], [32], [WARPS], [0])
        all_seqlens = gl.full([BATCH], self.seqlen_k, gl.int32, each)
        if self.PAGED:
            all_seqlens = self.cached.load_all(BATCH, each)
        return gl.where(gl.arange(0, BATCH, each) < self.batch, all_seqlens, -1)

    @gluon.jit
    def start(self, seqlen):
        """The first key that any query sees."""
        if self.HAS_LEFT:
            return gl.maximum(seqlen - self.seqlen_q - self.left, 0)
        else:
            return seqlen * 0

    @gluon.jit
    def tiles(self, seqlen):
        """(first tile, number of tiles) of a sequence."""
        first = self.start(seqlen) // TILE_N
        return first, (seqlen + TILE_N - 1) // TILE_N - first


@aggregate
class RangeSplit:
    """Units split into `ranges` even ranges: range r begins at unit r * total // ranges. The
    product may need 64 bits, so it is computed from total = each * ranges + rest.
    """

    ranges: gl.tensor
    each: gl.tensor
    rest: gl.tensor

    @gluon.jit
    def start(self, r):
        """The first unit of range r."""
        return r * self.each + r * self.rest // self.ranges

    @gluon.jit
    def stop(self, r):
        """The end of range r. Ranges past the last are empty."""
        return self.start(gl.where(r < self.ranges, r + 1, r))

    @gluon.jit
    def owner(self, unit):
        """The range of a unit. The fp32 estimate is off by at most one, which is corrected."""
        width = self.each.to(gl.float32) + self.rest.to(gl.float32) / self.ranges.to(gl.float32)
        r = (unit.to(gl.float32) / width).to(gl.int32)
        r = gl.where(self.start(r) > unit, r - 1, r)
        return gl.where(self.start(r + 1) <= unit, r + 1, r)


@aggregate
class WorkRange:
    """The tiles of one program: `count` tiles from tile `tile` of sequence b on, which has seqlen
    keys. before: units of all sequences before b. A tile is one unit. Starting another sequence
    takes as long as SWITCH_COST tiles; these units precede its tiles.
    """

    b: gl.tensor
    seqlen: gl.tensor
    tile: gl.tensor
    count: gl.tensor
    before: gl.tensor
    split: RangeSplit
    has_empty: gl.tensor


@gluon.jit
def switch_cost(b, tiles):
    """Units that precede the tiles of sequence b. The first sequence has none: every range starts
    once.
    """
    return gl.where((b > 0) & (tiles > 0), SWITCH_COST, 0)


@gluon.jit
def split(total, most, least):
    """At most `most` ranges of at least `least` units."""
    ranges = gl.minimum(most, gl.maximum(total // least, 1))
    return RangeSplit(ranges, total // ranges, total % ranges)


@gluon.jit
def get_work_range(seqlens, all_seqlens, number, most, least):
    """Range `number` of at most `most`, with at least `least` units each. all_seqlens: from
    load_all_lengths.
    """
    if seqlens.PAGED:
        e = gl.arange(0, all_seqlens.shape[0], all_seqlens.type.layout)
        _, tiles = seqlens.tiles(gl.maximum(all_seqlens, 0))
        lead = switch_cost(e, tiles)
        stops = gl.associative_scan(lead + tiles, 0, plus)
        total = gl.max(stops, 0)
        ranges = split(total, most, least)
        lo, hi = ranges.start(number), ranges.stop(number)
        starts = stops - tiles
        done = gl.sum(gl.minimum(gl.maximum(lo - starts, 0), tiles), 0)
        count = gl.sum(gl.minimum(gl.maximum(hi - starts, 0), tiles), 0) - done
        b = gl.minimum(gl.sum((stops <= lo).to(gl.int32), 0), seqlens.batch - 1)
        before = gl.max(gl.where(stops <= lo, stops, 0), 0)
        tile = gl.maximum(lo - before - gl.sum(gl.where(e == b, lead, 0), 0), 0)
        seqlen = gl.sum(gl.where(e == b, all_seqlens, 0), 0)
        has_empty = gl.max((all_seqlens == 0).to(gl.int32), 0) != 0
    else:
        _, tiles = seqlens.tiles(seqlens.seqlen_k)
        each = tiles + SWITCH_COST
        total = each * seqlens.batch - SWITCH_COST
        ranges = split(total, most, least)
        lo, hi = ranges.start(number), ranges.stop(number)
        b = (lo + SWITCH_COST) // each
        last = (hi + SWITCH_COST) // each
        before = gl.maximum(b * each - SWITCH_COST, 0)
        tile = gl.maximum(lo - b * each, 0)
        count = (last - b) * tiles + gl.maximum(hi - last * each, 0) - tile
        b = gl.minimum(b, seqlens.batch - 1)  # a range past the last still copies queries
        seqlen = seqlens.seqlen_k
        has_empty = seqlen == 0
    return WorkRange(b, seqlen, tile, count, before, ranges, has_empty)


@gluon.jit
def count_first_tiles(seqlens, work):
    """How many tiles of a range belong to its first sequence: 0 for a range past the last, which
    may begin behind the end of a sequence.
    """
    _, tiles = seqlens.tiles(work.seqlen)
    return gl.maximum(gl.minimum(work.count, tiles - work.tile), 0)


@gluon.jit
def skip_empty(seqlens, b, layout: gl.constexpr):
    """(b, seqlen) of the next sequence with keys, from sequence b on; of the last sequence if there
    is none.
    """
    b = gl.minimum(b, seqlens.batch - 1)
    seqlen = seqlens.keys(b, layout)
    while (seqlen == 0) & (b < seqlens.batch - 1):
        b += 1
        seqlen = seqlens.keys(b, layout)
    return b, seqlen


@aggregate
class TileCursor:
    """A position in the sequence of all tiles: tile n of sequence b. Its tiles end before `stop`;
    its last key is `last`.
    """

    b: gl.tensor
    n: gl.tensor
    stop: gl.tensor
    last: gl.tensor

    @gluon.jit
    def next(self, seqlens):
        """The cursor at the next tile."""
        following = TileCursor(self.b, self.n + 1, self.stop, self.last)
        if self.n + 1 == self.stop:
            b, seqlen = skip_empty(seqlens, self.b + 1, LANES)
            following = cursor_at(seqlens, b, 0, seqlen)
        return following


@gluon.jit
def cursor_at(seqlens, b, tile, seqlen):
    """The cursor at a tile of sequence b."""
    first, tiles = seqlens.tiles(seqlen)
    return TileCursor(b, first + tile, first + tiles, gl.maximum(seqlen - 1, 0))


@aggregate
class DecodePages:
    """Paged K and V: PARTS parts to a tile, each of PART slots within one page. Prefetched for each
    iteration: its page ids and its tile.
    """

    table: gl.tensor
    stride: gl.tensor
    num_pages: gl.tensor
    ids: IndexPrefetch
    tiles: IndexPrefetch
    SIZE: gl.constexpr
    PART: gl.constexpr
    PARTS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, table, stride, num_pages, ids, tiles, SIZE, PART):
        self.table = table
        self.stride = stride
        self.num_pages = num_pages
        self.ids = ids
        self.tiles = tiles
        self.SIZE = gl.constexpr(SIZE)
        self.PART = gl.constexpr(PART)
        self.PARTS = gl.constexpr(TILE_N.value // PART)

    @gluon.jit
    def prefetch_ids(self, i, at, is_needed):
        """Start to copy the page ids of iteration i, the tile at cursor `at`. Parts past the last
        key take the page of the last key; their scores are masked.
        """
        x = gl.arange(0, self.PARTS, LANES)
        key = gl.minimum(at.n * TILE_N + x * self.PART, at.last)
        row = self.table + at.b.to(gl.int64) * self.stride
        self.ids.fetch(i, row + key // self.SIZE, is_needed)
        self.tiles.put(i, 0, at.n)

    @gluon.jit
    def first(self, seqlens, work):
        """The page ids of the first iterations of a range, for every warp."""
        part = gl.arange(0, self.PARTS * PREFETCH_STAGES, THREADS)
        first, _ = seqlens.tiles(work.seqlen)
        key = (first + work.tile) * TILE_N + part * self.PART
        key = gl.minimum(key, gl.maximum(work.seqlen - 1, 0))
        cells = self.table + work.b.to(gl.int64) * self.stride + key // self.SIZE
        return gl.load(cells, mask=work.count > 0, other=0, cache_modifier=PAST_L1)

    @gluon.jit
    def coord(self, i, kv_head, x: gl.constexpr):
        """TMA coordinates of part x of iteration i."""
        return self.at(self.ids.get(i, x), self.tiles.get(i, 0), kv_head, x)

    @gluon.jit
    def at(self, page, tile, kv_head, x: gl.constexpr):
        """TMA coordinates of part x of a tile. Bad page ids are clamped to existing pages."""
        page = gl.minimum(gl.maximum(page, 0), self.num_pages - 1)
        key = tile * TILE_N + x * self.PART
        return [page, kv_head, key % self.SIZE, 0]


@gluon.jit
def produce(k_desc, v_desc, kv_stages, pages, scales, seqlens, work, started, kv_head):
    """Load the tiles of a range. The first `started` iterations have been started already."""
    if seqlens.PAGED:
        produce_pages(k_desc, v_desc, kv_stages, pages, scales, seqlens, work, started, kv_head)
    else:
        at = cursor_at(seqlens, work.b, work.tile, work.seqlen)
        for i in range(work.count):
            kv_stages.acquire(i, k_desc, v_desc)
            kv_stages.load(i, 0, k_desc, v_desc, [at.b, kv_head, at.n * TILE_N, 0])
            at = at.next(seqlens)


@gluon.jit
def produce_pages(k_desc, v_desc, kv_stages, pages, scales, seqlens, work, started, kv_head):
    """Load the tiles of a range page by page; page ids are prefetched PREFETCH_DISTANCE tiles
    ahead. Those of the first tiles are in shared memory already, as far as they belong to one
    sequence.
    """
    at = cursor_at(seqlens, work.b, work.tile, work.seqlen)
    for i in range(-PREFETCH_DISTANCE, work.count):
        is_needed = i + PREFETCH_DISTANCE < work.count
        pages.prefetch_ids(i + PREFETCH_DISTANCE, at, is_needed & ((i >= 0) | (at.b != work.b)))
        if is_needed:
            at = at.next(seqlens)
        if i >= started:
            pages.ids.wait()
            kv_stages.acquire(i, k_desc, v_desc)
            for x in gl.static_range(pages.PARTS):
                coord = pages.coord(i, kv_head, x)
                kv_stages.load(i, x, k_desc, v_desc, coord)
                if scales.ON:
                    scales.fetch(kv_stages, i, x, coord, pages.PART)
            if scales.ON:
                kv_stages.arrive_scales(i)


@aggregate
class DecodeLayouts:
    """Layouts with a leading dimension of warps: S of products, A and B of their operands, W of the
    states of all warps in every thread. C, without warps, of copies. EIGHT: K and V are words of
    two 8-bit elements, E4M3 or integers.
    """

    D: gl.constexpr
    EIGHT: gl.constexpr
    E4M3: gl.constexpr
    S: gl.constexpr
    A: gl.constexpr
    B: gl.constexpr
    C: gl.constexpr
    W: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, D, EIGHT, E4M3):
        S = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
        self.D = gl.constexpr(D)
        self.EIGHT = gl.constexpr(EIGHT)
        self.E4M3 = gl.constexpr(E4M3)
        self.S = gl.constexpr(S)
        self.A = gl.constexpr(gl.DotOperandLayout(0, S, 2))
        self.B = gl.constexpr(gl.DotOperandLayout(1, S, 2))
        self.C = gl.constexpr(gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0]))
        self.W = gl.constexpr(gl.BlockedLayout([4, 1, D // 32], [1, 1, 32], [1, 4, 1], [2, 1, 0]))

    @gluon.constexpr_function
    def line(self, layout, dim):
        """The layout of dimension `dim` of a three-dimensional tensor."""
        rest = [x for x in (2, 1, 0) if x != dim]
        return gl.SliceLayout(rest[1], gl.SliceLayout(rest[0], layout))


@aggregate
class QueryStages:
    """The query rows of a kv head: row r is query r // GROUP, head r % GROUP. Those of the t-th
    sequence are in stage t % 2, with zeros where there is no row.
    """

    ptr: gl.tensor
    stride_b: gl.tensor
    stride_s: gl.tensor
    stride_h: gl.tensor
    kv_head: gl.tensor
    dim: gl.tensor
    smem: gl.shared_memory_descriptor
    GROUP: gl.constexpr
    f: DecodeLayouts

    @gluon.jit
    def fetch(self, t, b, rows):
        """Start to copy the first `rows` rows of sequence b to shared memory. A load to registers
        could not be waited for later: 16-bit values carried from loop to loop are repacked at once.
        """
        C: gl.constexpr = self.f.C
        r = gl.arange(0, ROWS, gl.SliceLayout(1, C))
        d = gl.arange(0, self.f.D, gl.SliceLayout(0, C))
        head = self.kv_head * self.GROUP + r % self.GROUP
        query = r // self.GROUP
        row = b.to(gl.int64) * self.stride_b + query * self.stride_s + head * self.stride_h
        inside = (r < rows)[:, None] & (d < self.dim)[None, :]
        fetch(self.smem.index(t % 2), self.ptr + row[:, None] + d[None, :], inside)

    @gluon.jit
    def read(self, t):
        """The rows of the t-th sequence, for every warp, after they have arrived."""
        f = self.f
        slot = self.smem.index(t % 2)
        if f.EIGHT:
            even, odd, short = split_query(slot.load(f.C))
            short = gl.convert_layout(short, f.line(f.S, 1))[None, :, None]
            return QueryHalves(self._spread(even), self._spread(odd), short)
        else:
            return self._spread(slot.load(gl.SliceLayout(0, f.A)))

    @gluon.jit
    def _spread(self, q):
        """The same rows for every warp, as the left operand of a product."""
        A: gl.constexpr = self.f.A
        q = gl.convert_layout(q, gl.SliceLayout(0, A))[None, :, :]
        return gl.broadcast(q, gl.zeros([WARPS, ROWS, q.shape[2]], q.dtype, A))[0]


@gluon.jit
def mask_tile(seqlens, s, v, n, seqlen, GROUP: gl.constexpr, f):
    """s of key tile n with -inf at keys that a row does not see, and v with zeros at keys that no
    row sees: memory there may be NaN.
    """
    col = n * TILE_N
    j = gl.arange(0, WARPS, f.line(f.S, 0))[:, None, None] * KEYS
    j = col + j + gl.arange(0, KEYS, f.line(f.S, 2))[None, None, :]
    i = seqlen - seqlens.seqlen_q + gl.arange(0, ROWS, f.line(f.S, 1)) // GROUP
    i = i[None, :, None]
    store_all = j < seqlen
    if seqlens.HAS_RIGHT:
        store_all = store_all & (j <= i + seqlens.right)
    if seqlens.HAS_LEFT:
        store_all = store_all & (j >= i - seqlens.left)
    jv = gl.arange(0, WARPS, f.line(f.B, 0))[:, None, None] * KEYS
    jv = col + jv + gl.arange(0, KEYS, f.line(f.B, 1))[None, :, None]
    seen = (jv < seqlen) & (jv >= seqlens.start(seqlen))
    return gl.where(store_all, s, float("-inf")), gl.where(seen, v, gl.zeros_like(v))


@gluon.jit
def mask_scales(seqlens, scales, n, seqlen, f):
    """The scales of V of key tile n, with zeros at keys that no row sees."""
    j = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(1, f.S)))[:, None] * KEYS
    j = n * TILE_N + j + gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(1, f.S)))[None, :]
    return gl.where((j < seqlen) & (j >= seqlens.start(seqlen)), scales, 0.0)


@gluon.jit
def fold_tile(kv_stages, seqlens, scale, q, m, l, acc, i, n, seqlen, GROUP: gl.constexpr, f):
    """Fold key tile n as iteration i: each warp folds its 16 keys."""
    kv_stages.wait_full(i)
    zero = gl.zeros([WARPS, ROWS, KEYS], gl.float32, f.S)
    k = kv_stages.keys(i).permute((0, 2, 1)).load(f.B)
    if f.EIGHT:
        v = kv_stages.values(i).load(f.B)
        k_scales, v_scales = kv_stages.scales(i, gl.SliceLayout(1, f.S))
        kv_stages.release(i)
        even, odd = unpack(k, f.E4M3)
        s = mma_v2(q.odd, odd, mma_v2(q.even, even, zero))
        s = s * (q.short * k_scales[:, None, :])
    else:
        s = mma_v2(q, k, zero)
        v = kv_stages.values(i).load(f.B)
        kv_stages.release(i)
    s = scale.apply_softcap(s)
    whole = seqlen
    if seqlens.HAS_RIGHT:
        whole = gl.minimum(seqlen, seqlen - seqlens.seqlen_q + seqlens.right + 1)
    split = n * TILE_N + TILE_N > whole
    if seqlens.HAS_LEFT:
        split = split | (n * TILE_N < seqlen - 1 - seqlens.left)
    if split:
        s, v = mask_tile(seqlens, s, v, n, seqlen, GROUP, f)
        if f.EIGHT:
            v_scales = mask_scales(seqlens, v_scales, n, seqlen, f)
    m_new = gl.maximum(m, gl.max(s, 2) * scale.scale_log2)
    pivot = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s * scale.scale_log2 - pivot[:, :, None])
    alpha = gl.exp2(m - pivot)
    l = l * alpha + gl.sum(p, 2)
    if f.EIGHT:
        acc = accumulate_pv(acc, alpha, p, v, v_scales, f)
    else:
        acc = mma_v2(gl.convert_layout(p.to(q.dtype), f.A), v, acc * alpha[:, :, None])
    return m_new, l, acc


@aggregate
class WarpStates:
    """Shared memory through which the states of the four warps are merged."""

    m: gl.shared_memory_descriptor
    l: gl.shared_memory_descriptor
    acc: gl.shared_memory_descriptor

    @gluon.jit
    def merge_warps(self, m, l, acc, f):
        """(m, l, acc) of all warps together, rows as a slice of f.W. Every thread reads the part it
        needs of all states. Reductions over warps, one by one, would take a dozen barriers.
        """
        self.m.store(m)
        self.l.store(l)
        self.acc.store(acc)
        states: gl.constexpr = gl.SliceLayout(2, f.W)
        m = self.m.load(states)
        top = gl.max(m, 0)
        pivot = gl.where(top == float("-inf"), 0.0, top)
        beta = gl.exp2(m - pivot[None, :])
        l = gl.sum(self.l.load(states) * beta, 0)
        acc = gl.sum(self.acc.load(f.W) * beta[:, :, None], 0)
        rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, f.W))
        return gl.convert_layout(top, rows), gl.convert_layout(l, rows), acc


@gluon.jit
def make_warp_states(D: gl.constexpr):
    spread: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])  # rows over all banks
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    acc = gl.allocate_shared_memory(gl.float32, [WARPS, ROWS, D], spread)
    m = gl.allocate_shared_memory(gl.float32, [WARPS, ROWS], plain)
    return WarpStates(m, gl.allocate_shared_memory(gl.float32, [WARPS, ROWS], plain), acc)


@gluon.jit
def store_empty(out, seqlens, number, kv_head, ranges, f):
    """Store the result of sequences without keys. They belong to no range: all programs of a kv
    head share them.
    """
    R: gl.constexpr = gl.SliceLayout(0, f.W)
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, R))
    l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, R))
    acc = gl.zeros([ROWS, f.D], gl.float32, R)
    for b in range(number, seqlens.batch, ranges):
        if seqlens.keys(b, THREADS) == 0:
            out.store(b, kv_head, seqlens.seqlen_q, 0, m, l, acc, R)


@gluon.jit
def consume(queries, out, kv_stages, warp_states, seqlens, scale, work):
    """Fold the tiles of a range, sequence by sequence. The queries of the next sequence are copied
    while the keys of this one stream past.
    """
    f = queries.f
    Q_IN_REGISTERS: gl.constexpr = f.D <= 128  # wider queries are read again for every tile
    R: gl.constexpr = gl.SliceLayout(0, f.W)
    num_kv_heads = out.num_heads // out.GROUP
    number = gl.program_id(0) // num_kv_heads
    kv_head = queries.kv_head
    rows = seqlens.seqlen_q * out.GROUP
    b = work.b
    tile = work.tile
    count = work.count
    before = work.before
    i = 0
    t = 0
    seqlen = seqlens.keys(b, THREADS)
    queries.fetch(0, b, rows)
    if work.has_empty & (number < work.split.ranges):
        store_empty(out, seqlens, number, kv_head, work.split.ranges, f)
    kv_stages.wait_descriptors()
    while count > 0:
        first, tiles = seqlens.tiles(seqlen)
        stop = gl.minimum(tile + count, tiles)
        following = gl.minimum(b + 1, seqlens.batch - 1)
        wait_fetched()
        q = queries.read(t)
        if stop - tile < count:
            queries.fetch(t + 1, following, rows)
        else:  # programs of the next kernel start where this one's end, and wait for the last
            gdc_launch_dependents()
        m = gl.full([WARPS, ROWS], float("-inf"), gl.float32, gl.SliceLayout(2, f.S))
        l = gl.zeros([WARPS, ROWS], gl.float32, gl.SliceLayout(2, f.S))
        if f.EIGHT:
            acc = (gl.zeros([WARPS, ROWS, f.D // 2], gl.float32, f.S),) * 2
        else:
            acc = gl.zeros([WARPS, ROWS, f.D], gl.float32, f.S)
        for n in range(first + tile, first + stop):
            if not Q_IN_REGISTERS:
                q = queries.read(t)
            m, l, acc = fold_tile(kv_stages, seqlens, scale, q, m, l, acc, i, n, seqlen, out.GROUP,
                                  f)  # fmt: skip
            i += 1
        count -= stop - tile
        if f.EIGHT:
            m, l, acc = warp_states.merge_warps(m, l, interleave(acc[0], acc[1]), f)
        else:
            m, l, acc = warp_states.merge_warps(m, l, acc, f)
        start = before + switch_cost(b, tiles)
        before = start + tiles
        if stop - tile == tiles:
            out.store(b, kv_head, seqlens.seqlen_q, 0, m, l, acc, R)
        else:
            slot = (number + b) * num_kv_heads + kv_head
            out.store_partial(slot, rows, m, l, acc, R)
            owner = work.split.owner(start)
            shared = work.split.owner(before - 1) - owner + 1
            origin = (owner + b) * num_kv_heads + kv_head
            if out.complete(slot, origin, num_kv_heads, shared):
                out.merge(b, kv_head, seqlens.seqlen_q, origin, num_kv_heads, shared, f.D)
        tile = 0
        t += 1
        b, seqlen = skip_empty(seqlens, following, THREADS)
        if b != following:
            wait_fetched()
            queries.fetch(t, b, rows)


@gluon.jit
def start(k_desc, v_desc, kv_stages, pages, seqlens, work, kv_head):
    """Start the first iterations of a range with the cached page ids, as many as belong to one
    sequence and have a stage. Returns their number.
    """
    first, _ = seqlens.tiles(work.seqlen)
    started = gl.minimum(count_first_tiles(seqlens, work), kv_stages.num_stages)
    for i in range(started):
        kv_stages.expect(i, k_desc, v_desc)
        for x in gl.static_range(pages.PARTS):
            page = pages.ids.get_at(i, x, THREADS)
            kv_stages.load(i, x, k_desc, v_desc, pages.at(page, first + work.tile + i, kv_head, x))
    return started


@gluon.jit
def has_changed(unpack, prefetch):
    """Whether values differ from the cached ones. All warps get the same answer, even if the values
    that each of them read before the wait differ.
    """
    load_all = prefetch.load_all(unpack.shape[0], THREADS)
    return gl.max((unpack != load_all).to(gl.int32), 0) != 0


@gluon.jit
def start_after_wait(k_desc, v_desc, kv_stages, seqlens, pages, work, kv_head, number, most, least,
                     BATCH: gl.constexpr, EIGHT: gl.constexpr):  # fmt: skip
    """(range of a program, number of started iterations), after the wait for the previous kernel.
    That kernel seldom changes the lengths and page ids cached before the wait, so loads start while
    this is checked. If they have changed, nothing that was started counts. With 8-bit pages nothing
    is started, because the producer copies the scales.
    """
    all_seqlens, first = seqlens.load_lengths(BATCH), pages.first(seqlens, work)
    started = work.count * 0
    if not EIGHT:
        started = start(k_desc, v_desc, kv_stages, pages, seqlens, work, kv_head)
    if has_changed(all_seqlens, seqlens.cached) | has_changed(first, pages.ids):
        kv_stages.restart(started)
        started = started * 0
        seqlens.cached.store_all(all_seqlens)
        work = get_work_range(seqlens, seqlens.load_all_lengths(BATCH), number, most, least)
        pages.ids.store_all(pages.first(seqlens, work))
    return work, started


_RUNTIME = [
    "stride_qb", "stride_qs", "stride_qh", "stride_table", "seqlen_q", "seqlen_k", "batch",
    "num_pages", "num_heads", "dim", "left", "right", "most", "least", "num_slots", "nonce",
    "stride_ksp", "stride_kss", "stride_ksh", "stride_vsp", "stride_vss", "stride_vsh",
]  # fmt: skip


@gluon.jit(do_not_specialize=_RUNTIME)
def decode_kernel(
    q_ptr, k_desc, v_desc, page_table, cache_seqlens, sinks_ptr, k_scales_ptr, v_scales_ptr,
    out_ptr, lse_ptr, scratch_ptr,
    stride_qb, stride_qs, stride_qh, stride_table,
    stride_ksp, stride_kss, stride_ksh, stride_vsp, stride_vss, stride_vsh,
    seqlen_q, seqlen_k, batch, num_pages, num_heads,
    dim, left, right, most, least, num_slots, nonce, scale_log2, inner,
    D: gl.constexpr, GROUP: gl.constexpr, PAGE_SIZE: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_SINKS: gl.constexpr, SOFTCAP: gl.constexpr, STAGES: gl.constexpr,
    BATCH: gl.constexpr, MOST: gl.constexpr, FIRST: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    seqlens = DecodeSeqlens(cache_seqlens, make_index_prefetch(1, BATCH), seqlen_q, seqlen_k, batch,
                            left, right, PAGE_SIZE > 0, HAS_LEFT, HAS_RIGHT)  # fmt: skip
    PART: gl.constexpr = k_desc.block_shape[2]
    pages = DecodePages(page_table, stride_table, num_pages, make_index_prefetch(TILE_N // PART),
                        make_index_prefetch(1), PAGE_SIZE, PART)  # fmt: skip
    kv_stages = make_kv_stages(k_desc, v_desc, STAGES, TILE_N, WARPS)
    warp_states = make_warp_states(D)
    dim *= ALIGN  # shows the compiler that rows are aligned to 16 bytes
    stride_qb *= ALIGN
    stride_qs *= ALIGN
    stride_qh *= ALIGN
    flags = scratch_ptr + num_slots.to(gl.int64) * (seqlen_q * GROUP * (D // 2))
    partial_lses = (flags + num_slots).to(gl.pointer_type(gl.float32))
    partials = scratch_ptr.to(gl.pointer_type(gl.float32))
    out = DecodeOutput(out_ptr, lse_ptr, sinks_ptr, partials, partial_lses, flags, nonce, num_heads,
                       dim, GROUP, HAS_SINKS, MOST)  # fmt: skip
    straight: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    q_smem = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [2, ROWS, D], straight)
    kv_stages.prefetch_descriptors(k_desc, v_desc, warp_states.acc)
    num_kv_heads = num_heads // GROUP
    kv_head = gl.program_id(0) % num_kv_heads
    number = gl.program_id(0) // num_kv_heads
    if PAGE_SIZE:
        # The previous kernel may still write them: start_after_wait checks.
        seqlens.cached.store_all(seqlens.load_lengths(BATCH))
    work = get_work_range(seqlens, seqlens.load_all_lengths(BATCH), number, most, least)
    if PAGE_SIZE:
        pages.ids.store_all(pages.first(seqlens, work))
    gdc_wait()
    if FIRST:  # the next kernel reads only what kernels before this one wrote
        gdc_launch_dependents()
    started = 0
    EIGHT: gl.constexpr = k_desc.dtype.primitive_bitwidth == 8
    if PAGE_SIZE:
        work, started = start_after_wait(k_desc, v_desc, kv_stages, seqlens, pages, work, kv_head,
                                         number, most, least, BATCH, EIGHT)  # fmt: skip
        # Arguments of the producer use the shared memory from which all warps have just read
        # whether lengths changed, and the compiler inserts no barrier. Without one, some warps
        # would read the arguments instead, and never leave.
        sync_partition()
    scale = SoftmaxScale(scale_log2, inner, SOFTCAP)
    queries = QueryStages(q_ptr, stride_qb, stride_qs, stride_qh, kv_head, dim, q_smem, GROUP,
                          DecodeLayouts(D, EIGHT, k_desc.dtype == gl.float8e4nv))  # fmt: skip
    head = kv_head.to(gl.int64)
    scales = PageScales(k_scales_ptr + head * stride_ksh, v_scales_ptr + head * stride_vsh,
                        stride_ksp, stride_kss, stride_vsp, stride_vss, EIGHT)  # fmt: skip
    gl.warp_specialize([
        (consume, (queries, out, kv_stages, warp_states, seqlens, scale, work)),
        (produce, (k_desc, v_desc, kv_stages, pages, scales, seqlens, work, started, kv_head)),
    ], [1], [PRODUCER_REGS])  # fmt: skip
    kv_stages.close()
