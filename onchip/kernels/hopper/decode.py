"""Few queries over many keys on Hopper: the query heads of a group share one tile of rows, and keys
stream by, side by side or out of their pages. Memory sets the pace.

The work is all tiles of keys of all sequences, in order, cut into even ranges; a range is one
program for each kv head. Those run side by side, because the heads of a token are neighbours in
memory. A sequence that several ranges share leaves a state in each of them, and the program that
finds all of them there merges them: a second launch would cost more than the merge.

Each warp of the consumer folds its own 16 keys of every tile; their states meet at the end.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onchip.kernels.hopper.pipe import (
    AHEAD,
    LANES,
    LOOKUPS,
    Lookups,
    fetch,
    fetched,
    make_boxes,
    make_lookups,
    meet,
)
from onchip.kernels.hopper.results import WARPS, Out
from onchip.kernels.hopper.schedule import plus
from onchip.kernels.hopper.softmax import Scale
from onchip.kernels.hopper.words import Halves, Scales, add_words, halves, in_order, numbers

ROWS = gl.constexpr(16)  # of a product: queries x heads of a group, the rest is padding
KEYS = gl.constexpr(16)  # of a warp in a tile
TILE_N = gl.constexpr(64)
THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # of the consumer
SWITCH = gl.constexpr(4)  # tiles that stream by while a program turns to another sequence
# What is read before and after the wait for the call before: the L1 would hold on to the first.
PAST_L1 = gl.constexpr(".cg")
ALIGN = gl.constexpr(8)  # numbers of 16 bytes: strides and head_dim are multiples of it


@aggregate
class Lengths:
    """The sequences of a call. Paged ones have the lengths of cache_seqlens, others seqlen_k keys.
    Windows count from the diagonal. `known`: those of cache_seqlens, for all warps to agree on.
    """

    cache_seqlens: gl.tensor
    known: Lookups
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    batch: gl.tensor
    left: gl.tensor
    right: gl.tensor
    PAGED: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, cache_seqlens, known, seqlen_q, seqlen_k, batch, left, right, PAGED, HAS_LEFT,
        HAS_RIGHT,
    ):  # fmt: skip
        self.cache_seqlens = cache_seqlens
        self.known = known
        self.seqlen_q = seqlen_q
        self.seqlen_k = seqlen_k
        self.batch = batch
        self.left = left
        self.right = right
        self.PAGED = gl.constexpr(PAGED)
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)

    @gluon.jit
    def keys(self, b, layout: gl.constexpr):
        """Keys of sequence b, within the tables whatever they say."""
        if self.PAGED:
            return self.known.number_in(b, 0, layout)
        else:
            return self.seqlen_k

    @gluon.jit
    def ask(self, BATCH: gl.constexpr):
        """Those of all pages' sequences as they are now, BATCH is not below their number."""
        e = gl.arange(0, BATCH, THREADS)
        asked = gl.load(self.cache_seqlens + e, e < self.batch, 0, cache_modifier=PAST_L1)
        return gl.minimum(gl.maximum(asked, 0), self.seqlen_k)

    @gluon.jit
    def all(self, BATCH: gl.constexpr):
        """Of all sequences, paged ones as `known`; -1 where there is none. Every warp has them for
        itself, though each asks for a part of them only: one thread would wait for one after
        another.
        """
        each: gl.constexpr = gl.BlockedLayout([BATCH // 32], [32], [WARPS], [0])
        seqlens = gl.full([BATCH], self.seqlen_k, gl.int32, each)
        if self.PAGED:
            seqlens = self.known.kept(BATCH, each)
        return gl.where(gl.arange(0, BATCH, each) < self.batch, seqlens, -1)

    @gluon.jit
    def start(self, seqlen):
        """The first key that any query sees."""
        if self.HAS_LEFT:
            return gl.maximum(seqlen - self.seqlen_q - self.left, 0)
        else:
            return seqlen * 0

    @gluon.jit
    def tiles(self, seqlen):
        """(first tile, tiles) of a sequence."""
        first = self.start(seqlen) // TILE_N
        return first, (seqlen + TILE_N - 1) // TILE_N - first


@aggregate
class Cut:
    """Units cut into `ranges` even ranges: range r begins at unit r * total // ranges. That product
    may need 64 bits, so it is taken apart: total = each * ranges + rest.
    """

    ranges: gl.tensor
    each: gl.tensor
    rest: gl.tensor

    @gluon.constexpr_function
    def __init__(self, ranges, each, rest):
        self.ranges = ranges
        self.each = each
        self.rest = rest

    @gluon.jit
    def start(self, r):
        return r * self.each + r * self.rest // self.ranges

    @gluon.jit
    def stop(self, r):
        """Ranges that there are not are empty."""
        return self.start(gl.where(r < self.ranges, r + 1, r))

    @gluon.jit
    def holder(self, unit):
        """The range that a unit lies in: what fp32 has rounded is at most one beside it."""
        width = self.each.to(gl.float32) + self.rest.to(gl.float32) / self.ranges.to(gl.float32)
        r = (unit.to(gl.float32) / width).to(gl.int32)
        r = gl.where(self.start(r) > unit, r - 1, r)
        return gl.where(self.start(r + 1) <= unit, r + 1, r)


@aggregate
class Range:
    """The tiles of one program: `count` of them from tile `tile` of sequence b on, which has seqlen
    keys. It is one of those of `cut`; `before`: units of all sequences before b. A tile is a unit,
    and to begin another sequence takes as long as SWITCH of them: those come before its tiles.
    """

    b: gl.tensor
    seqlen: gl.tensor
    tile: gl.tensor
    count: gl.tensor
    before: gl.tensor
    cut: Cut
    has_empty: gl.tensor

    @gluon.constexpr_function
    def __init__(self, b, seqlen, tile, count, before, cut, has_empty):
        self.b = b
        self.seqlen = seqlen
        self.tile = tile
        self.count = count
        self.before = before
        self.cut = cut
        self.has_empty = has_empty


@gluon.jit
def switch(b, tiles):
    """Units before the tiles of sequence b. The first one needs none: every range begins once."""
    return gl.where((b > 0) & (tiles > 0), SWITCH, 0)


@gluon.jit
def cut(total, most, least):
    """At most `most` ranges of `least` units at least."""
    ranges = gl.minimum(most, gl.maximum(total // least, 1))
    return Cut(ranges, total // ranges, total % ranges)


@gluon.jit
def range_of(lengths, seqlens, number, most, least):
    """Range `number` of at most `most`, of `least` units at least. seqlens: lengths.all()."""
    if lengths.PAGED:
        e = gl.arange(0, seqlens.shape[0], seqlens.type.layout)
        _, tiles = lengths.tiles(gl.maximum(seqlens, 0))
        lead = switch(e, tiles)
        stops = gl.associative_scan(lead + tiles, 0, plus)
        total = gl.max(stops, 0)
        parts = cut(total, most, least)
        lo, hi = parts.start(number), parts.stop(number)
        starts = stops - tiles
        done = gl.sum(gl.minimum(gl.maximum(lo - starts, 0), tiles), 0)
        count = gl.sum(gl.minimum(gl.maximum(hi - starts, 0), tiles), 0) - done
        b = gl.minimum(gl.sum((stops <= lo).to(gl.int32), 0), lengths.batch - 1)
        before = gl.max(gl.where(stops <= lo, stops, 0), 0)
        tile = gl.maximum(lo - before - gl.sum(gl.where(e == b, lead, 0), 0), 0)
        seqlen = gl.sum(gl.where(e == b, seqlens, 0), 0)
        has_empty = gl.max((seqlens == 0).to(gl.int32), 0) != 0
    else:
        _, tiles = lengths.tiles(lengths.seqlen_k)
        each = tiles + SWITCH
        total = each * lengths.batch - SWITCH
        parts = cut(total, most, least)
        lo, hi = parts.start(number), parts.stop(number)
        b = (lo + SWITCH) // each
        last = (hi + SWITCH) // each
        before = gl.maximum(b * each - SWITCH, 0)
        tile = gl.maximum(lo - b * each, 0)
        count = (last - b) * tiles + gl.maximum(hi - last * each, 0) - tile
        b = gl.minimum(b, lengths.batch - 1)  # of a range that there is not, whose queries are read
        seqlen = lengths.seqlen_k
        has_empty = seqlen == 0
    return Range(b, seqlen, tile, count, before, parts, has_empty)


@gluon.jit
def of_first(lengths, mine):
    """How many tiles of a range are of its first sequence: none if there is no such range, which
    may stand behind the end of a sequence.
    """
    _, tiles = lengths.tiles(mine.seqlen)
    return gl.maximum(gl.minimum(mine.count, tiles - mine.tile), 0)


@gluon.jit
def pass_empty(lengths, b, layout: gl.constexpr):
    """(b, seqlen) of the next sequence that has keys, from sequence b on; of the last if none."""
    b = gl.minimum(b, lengths.batch - 1)
    seqlen = lengths.keys(b, layout)
    while (seqlen == 0) & (b < lengths.batch - 1):
        b += 1
        seqlen = lengths.keys(b, layout)
    return b, seqlen


@aggregate
class Walk:
    """A tile on the way through all tiles: tile n of sequence b, whose tiles end before `stop` and
    whose keys with `last`.
    """

    b: gl.tensor
    n: gl.tensor
    stop: gl.tensor
    last: gl.tensor

    @gluon.constexpr_function
    def __init__(self, b, n, stop, last):
        self.b = b
        self.n = n
        self.stop = stop
        self.last = last

    @gluon.jit
    def next(self, lengths):
        following = Walk(self.b, self.n + 1, self.stop, self.last)
        if self.n + 1 == self.stop:
            b, seqlen = pass_empty(lengths, self.b + 1, LANES)
            following = enter(lengths, b, 0, seqlen)
        return following


@gluon.jit
def enter(lengths, b, tile, seqlen):
    """The walk at a tile of sequence b."""
    first, tiles = lengths.tiles(seqlen)
    return Walk(b, first + tile, first + tiles, gl.maximum(seqlen - 1, 0))


@aggregate
class Pages:
    """Where keys lie: PARTS to a tile, of PART slots within one page each. Noted ahead for each
    filling: its pages, then its tile.
    """

    table: gl.tensor
    stride: gl.tensor
    num_pages: gl.tensor
    ids: Lookups
    tiles: Lookups
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
    def look_up(self, i, at, wanted):
        """Ask for the pages of filling i, the tile `at`. Parts past the last key are those of the
        last one: nobody looks at them.
        """
        x = gl.arange(0, self.PARTS, LANES)
        key = gl.minimum(at.n * TILE_N + x * self.PART, at.last)
        row = self.table + at.b.to(gl.int64) * self.stride
        self.ids.fetch(i, row + key // self.SIZE, wanted)
        self.tiles.note(i, 0, at.n)

    @gluon.jit
    def first(self, lengths, mine):
        """The ids of the first fillings of a range, for every warp."""
        part = gl.arange(0, self.PARTS * LOOKUPS, THREADS)
        first, _ = lengths.tiles(mine.seqlen)
        key = (first + mine.tile) * TILE_N + part * self.PART
        key = gl.minimum(key, gl.maximum(mine.seqlen - 1, 0))
        cells = self.table + mine.b.to(gl.int64) * self.stride + key // self.SIZE
        return gl.load(cells, mask=mine.count > 0, other=0, cache_modifier=PAST_L1)

    @gluon.jit
    def coord(self, i, kv_head, x: gl.constexpr):
        """Where part x of filling i begins."""
        return self.at(self.ids.number(i, x), self.tiles.number(i, 0), kv_head, x)

    @gluon.jit
    def at(self, page, tile, kv_head, x: gl.constexpr):
        """Where part x of a tile begins, in a page. Ids are clamped to pages that there are."""
        page = gl.minimum(gl.maximum(page, 0), self.num_pages - 1)
        key = tile * TILE_N + x * self.PART
        return [page, kv_head, key % self.SIZE, 0]


@gluon.jit
def produce(k_desc, v_desc, boxes, pages, scales, lengths, mine, started, kv_head):
    """The first `started` fillings are on their way."""
    if lengths.PAGED:
        produce_pages(k_desc, v_desc, boxes, pages, scales, lengths, mine, started, kv_head)
    else:
        at = enter(lengths, mine.b, mine.tile, mine.seqlen)
        for i in range(mine.count):
            boxes.announce(i, k_desc, v_desc)
            boxes.load(i, 0, k_desc, v_desc, [at.b, kv_head, at.n * TILE_N, 0])
            at = at.next(lengths)


@gluon.jit
def produce_pages(k_desc, v_desc, boxes, pages, scales, lengths, mine, started, kv_head):
    """As above, with pages looked up on the way, AHEAD tiles before their keys are copied. Those of
    the first tiles are there already, as far as they are of one sequence.
    """
    at = enter(lengths, mine.b, mine.tile, mine.seqlen)
    for i in range(-AHEAD, mine.count):
        wanted = i + AHEAD < mine.count
        pages.look_up(i + AHEAD, at, wanted & ((i >= 0) | (at.b != mine.b)))
        if wanted:
            at = at.next(lengths)
        if i >= started:
            pages.ids.wait()
            boxes.announce(i, k_desc, v_desc)
            for x in gl.static_range(pages.PARTS):
                place = pages.coord(i, kv_head, x)
                boxes.load(i, x, k_desc, v_desc, place)
                if scales.ON:
                    scales.fetch(boxes, i, x, place, pages.PART)
            if scales.ON:
                boxes.scales_fetched(i)


@aggregate
class Fragments:
    """Layouts, with a leading dimension of warps: S of products, A and B of their operands, W of
    the states of all warps in every thread. C, without one, of copies. KV8: keys and values are
    words of two 8-bit numbers, E4M3 or integers.
    """

    D: gl.constexpr
    KV8: gl.constexpr
    E4M3: gl.constexpr
    S: gl.constexpr
    A: gl.constexpr
    B: gl.constexpr
    C: gl.constexpr
    W: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, D, KV8, E4M3):
        S = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
        self.D = gl.constexpr(D)
        self.KV8 = gl.constexpr(KV8)
        self.E4M3 = gl.constexpr(E4M3)
        self.S = gl.constexpr(S)
        self.A = gl.constexpr(gl.DotOperandLayout(0, S, 2))
        self.B = gl.constexpr(gl.DotOperandLayout(1, S, 2))
        self.C = gl.constexpr(gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0]))
        self.W = gl.constexpr(gl.BlockedLayout([4, 1, D // 32], [1, 1, 32], [1, 4, 1], [2, 1, 0]))

    @gluon.constexpr_function
    def line(self, layout, dim):
        """The layout of dimension `dim` of a tensor of three."""
        rest = [x for x in (2, 1, 0) if x != dim]
        return gl.SliceLayout(rest[1], gl.SliceLayout(rest[0], layout))


@aggregate
class Queries:
    """The rows of a kv head's group: row r is query r // GROUP, head r % GROUP. Those of the t-th
    sequence lie in slot t % 2, zeros where there is no row.
    """

    ptr: gl.tensor
    stride_b: gl.tensor
    stride_s: gl.tensor
    stride_h: gl.tensor
    kv_head: gl.tensor
    dim: gl.tensor
    slots: gl.shared_memory_descriptor
    GROUP: gl.constexpr
    f: Fragments

    @gluon.constexpr_function
    def __init__(self, ptr, stride_b, stride_s, stride_h, kv_head, dim, slots, GROUP, f):
        self.ptr = ptr
        self.stride_b = stride_b
        self.stride_s = stride_s
        self.stride_h = stride_h
        self.kv_head = kv_head
        self.dim = dim
        self.slots = slots
        self.GROUP = gl.constexpr(GROUP)
        self.f = f

    @gluon.jit
    def fetch(self, t, b, rows):
        """Start to copy the first `rows` of sequence b. In registers they could not be waited for
        later: what is carried from loop to loop in 16 bits is repacked at once.
        """
        C: gl.constexpr = self.f.C
        r = gl.arange(0, ROWS, gl.SliceLayout(1, C))
        d = gl.arange(0, self.f.D, gl.SliceLayout(0, C))
        head = self.kv_head * self.GROUP + r % self.GROUP
        query = r // self.GROUP
        row = b.to(gl.int64) * self.stride_b + query * self.stride_s + head * self.stride_h
        inside = (r < rows)[:, None] & (d < self.dim)[None, :]
        fetch(self.slots.index(t % 2), self.ptr + row[:, None] + d[None, :], inside)

    @gluon.jit
    def read(self, t):
        """Those of the t-th sequence, for every warp, once they are there."""
        f = self.f
        slot = self.slots.index(t % 2)
        if f.KV8:
            even, odd, short = halves(slot.load(f.C))
            short = gl.convert_layout(short, f.line(f.S, 1))[None, :, None]
            return Halves(self._spread(even), self._spread(odd), short)
        else:
            return self._spread(slot.load(gl.SliceLayout(0, f.A)))

    @gluon.jit
    def _spread(self, q):
        """The same rows for every warp, on the left of a product."""
        A: gl.constexpr = self.f.A
        q = gl.convert_layout(q, gl.SliceLayout(0, A))[None, :, :]
        return gl.broadcast(q, gl.zeros([WARPS, ROWS, q.shape[2]], q.dtype, A))[0]


@gluon.jit
def hide(lengths, s, v, n, seqlen, GROUP: gl.constexpr, f):
    """s of key tile n with -inf at keys that a row does not see, v with zeros at those that no row
    sees: what lies there need not be a number.
    """
    col = n * TILE_N
    j = gl.arange(0, WARPS, f.line(f.S, 0))[:, None, None] * KEYS
    j = col + j + gl.arange(0, KEYS, f.line(f.S, 2))[None, None, :]
    i = seqlen - lengths.seqlen_q + gl.arange(0, ROWS, f.line(f.S, 1)) // GROUP
    i = i[None, :, None]
    keep = j < seqlen
    if lengths.HAS_RIGHT:
        keep = keep & (j <= i + lengths.right)
    if lengths.HAS_LEFT:
        keep = keep & (j >= i - lengths.left)
    jv = gl.arange(0, WARPS, f.line(f.B, 0))[:, None, None] * KEYS
    jv = col + jv + gl.arange(0, KEYS, f.line(f.B, 1))[None, :, None]
    seen = (jv < seqlen) & (jv >= lengths.start(seqlen))
    return gl.where(keep, s, float("-inf")), gl.where(seen, v, gl.zeros_like(v))


@gluon.jit
def hide_scales(lengths, scales, n, seqlen, f):
    """Of the values of key tile n, with zeros at those that no row sees."""
    j = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(1, f.S)))[:, None] * KEYS
    j = n * TILE_N + j + gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(1, f.S)))[None, :]
    return gl.where((j < seqlen) & (j >= lengths.start(seqlen)), scales, 0.0)


@gluon.jit
def fold_tile(boxes, lengths, scale, q, m, l, acc, i, n, seqlen, GROUP: gl.constexpr, f):
    """Every warp folds its 16 keys of filling i, key tile n."""
    boxes.wait_full(i)
    zero = gl.zeros([WARPS, ROWS, KEYS], gl.float32, f.S)
    k = boxes.keys(i).permute((0, 2, 1)).load(f.B)
    if f.KV8:
        v = boxes.values(i).load(f.B)
        k_scales, v_scales = boxes.scales(i, gl.SliceLayout(1, f.S))
        boxes.release(i)
        even, odd = numbers(k, f.E4M3)
        s = mma_v2(q.odd, odd, mma_v2(q.even, even, zero))
        s = s * (q.short * k_scales[:, None, :])
    else:
        s = mma_v2(q, k, zero)
        v = boxes.values(i).load(f.B)
        boxes.release(i)
    s = scale.apply_softcap(s)
    whole = seqlen
    if lengths.HAS_RIGHT:
        whole = gl.minimum(seqlen, seqlen - lengths.seqlen_q + lengths.right + 1)
    cut = n * TILE_N + TILE_N > whole
    if lengths.HAS_LEFT:
        cut = cut | (n * TILE_N < seqlen - 1 - lengths.left)
    if cut:
        s, v = hide(lengths, s, v, n, seqlen, GROUP, f)
        if f.KV8:
            v_scales = hide_scales(lengths, v_scales, n, seqlen, f)
    m_new = gl.maximum(m, gl.max(s, 2) * scale.scale_log2)
    pivot = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(s * scale.scale_log2 - pivot[:, :, None])
    alpha = gl.exp2(m - pivot)
    l = l * alpha + gl.sum(p, 2)
    if f.KV8:
        acc = add_words(acc, alpha, p, v, v_scales, f)
    else:
        acc = mma_v2(gl.convert_layout(p.to(q.dtype), f.A), v, acc * alpha[:, :, None])
    return m_new, l, acc


@aggregate
class Exchange:
    """Where the states of all warps meet."""

    m: gl.shared_memory_descriptor
    l: gl.shared_memory_descriptor
    acc: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, m, l, acc):
        self.m = m
        self.l = l
        self.acc = acc

    @gluon.jit
    def merged(self, m, l, acc, f):
        """(m, l, acc) of all warps together, rows as a slice of f.W. Every thread reads what it
        needs of all of them: sums over warps, one by one, would take a dozen barriers.
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
def make_exchange(D: gl.constexpr):
    spread: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])  # rows over all banks
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    acc = gl.allocate_shared_memory(gl.float32, [WARPS, ROWS, D], spread)
    m = gl.allocate_shared_memory(gl.float32, [WARPS, ROWS], plain)
    return Exchange(m, gl.allocate_shared_memory(gl.float32, [WARPS, ROWS], plain), acc)


@gluon.jit
def answer_empty(out, lengths, number, kv_head, ranges, f):
    """Sequences without keys are no range's: all programs of a kv head share them."""
    R: gl.constexpr = gl.SliceLayout(0, f.W)
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, R))
    l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, R))
    acc = gl.zeros([ROWS, f.D], gl.float32, R)
    for b in range(number, lengths.batch, ranges):
        if lengths.keys(b, THREADS) == 0:
            out.store(b, kv_head, lengths.seqlen_q, 0, m, l, acc, R)


@gluon.jit
def consume(queries, out, boxes, exchange, lengths, scale, mine):
    """Fold the tiles of a range, sequence by sequence. The queries of the next one are on their way
    while the keys of this one stream by.
    """
    f = queries.f
    HELD: gl.constexpr = f.D <= 128  # wider queries leave no registers: read for every tile
    R: gl.constexpr = gl.SliceLayout(0, f.W)
    num_kv_heads = out.num_heads // out.GROUP
    number = gl.program_id(0) // num_kv_heads
    kv_head = queries.kv_head
    rows = lengths.seqlen_q * out.GROUP
    b = mine.b
    tile = mine.tile
    count = mine.count
    before = mine.before
    i = 0
    t = 0
    seqlen = lengths.keys(b, THREADS)
    queries.fetch(0, b, rows)
    if mine.has_empty & (number < mine.cut.ranges):
        answer_empty(out, lengths, number, kv_head, mine.cut.ranges, f)
    boxes.wait_warm()
    while count > 0:
        first, tiles = lengths.tiles(seqlen)
        stop = gl.minimum(tile + count, tiles)
        following = gl.minimum(b + 1, lengths.batch - 1)
        fetched()
        q = queries.read(t)
        if stop - tile < count:
            queries.fetch(t + 1, following, rows)
        else:  # the next call's programs come where this one's end, and wait there for the last
            gdc_launch_dependents()
        m = gl.full([WARPS, ROWS], float("-inf"), gl.float32, gl.SliceLayout(2, f.S))
        l = gl.zeros([WARPS, ROWS], gl.float32, gl.SliceLayout(2, f.S))
        if f.KV8:
            acc = (gl.zeros([WARPS, ROWS, f.D // 2], gl.float32, f.S),) * 2
        else:
            acc = gl.zeros([WARPS, ROWS, f.D], gl.float32, f.S)
        for n in range(first + tile, first + stop):
            if not HELD:
                q = queries.read(t)
            m, l, acc = fold_tile(boxes, lengths, scale, q, m, l, acc, i, n, seqlen,
                                  out.GROUP, f)  # fmt: skip
            i += 1
        count -= stop - tile
        if f.KV8:
            m, l, acc = exchange.merged(m, l, in_order(acc[0], acc[1]), f)
        else:
            m, l, acc = exchange.merged(m, l, acc, f)
        start = before + switch(b, tiles)
        before = start + tiles
        if stop - tile == tiles:
            out.store(b, kv_head, lengths.seqlen_q, 0, m, l, acc, R)
        else:
            slot = (number + b) * num_kv_heads + kv_head
            out.leave(slot, rows, m, l, acc, R)
            holder = mine.cut.holder(start)
            shared = mine.cut.holder(before - 1) - holder + 1
            origin = (holder + b) * num_kv_heads + kv_head
            if out.complete(slot, origin, num_kv_heads, shared):
                out.merge(b, kv_head, lengths.seqlen_q, origin, num_kv_heads, shared, f.D)
        tile = 0
        t += 1
        b, seqlen = pass_empty(lengths, following, THREADS)
        if b != following:
            fetched()
            queries.fetch(t, b, rows)


@gluon.jit
def start(k_desc, v_desc, boxes, pages, lengths, mine, kv_head):
    """Start the first fillings of a range with the page ids that are kept, as many as are of one
    sequence and have room: their number.
    """
    first, _ = lengths.tiles(mine.seqlen)
    started = gl.minimum(of_first(lengths, mine), boxes.num_stages)
    for i in range(started):
        boxes.expect(i, k_desc, v_desc)
        for x in gl.static_range(pages.PARTS):
            page = pages.ids.number_in(i, x, THREADS)
            boxes.load(i, x, k_desc, v_desc, pages.at(page, first + mine.tile + i, kv_head, x))
    return started


@gluon.jit
def differ(numbers, lookups):
    """Whether they are other numbers than those that are kept. All warps find the same: what each
    of them has read before the wait need not be.
    """
    kept = lookups.kept(numbers.shape[0], THREADS)
    return gl.max((numbers != kept).to(gl.int32), 0) != 0


@gluon.jit
def settle(k_desc, v_desc, boxes, lengths, pages, mine, kv_head, number, most, least,
           BATCH: gl.constexpr, KV8: gl.constexpr):  # fmt: skip
    """(the range of a program, how many of its fillings are started) after the wait for the call
    before, which has seldom changed the lengths and page ids that were kept before it: keys come
    while that is checked. If it has, nothing that was started counts. Scales are for the producer
    to fetch, so that of 8-bit pages nothing is started.
    """
    seqlens, first = lengths.ask(BATCH), pages.first(lengths, mine)
    started = mine.count * 0
    if not KV8:
        started = start(k_desc, v_desc, boxes, pages, lengths, mine, kv_head)
    if differ(seqlens, lengths.known) | differ(first, pages.ids):
        boxes.restart(started)
        started = started * 0
        lengths.known.keep(seqlens)
        mine = range_of(lengths, lengths.all(BATCH), number, most, least)
        pages.ids.keep(pages.first(lengths, mine))
    return mine, started


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
    lengths = Lengths(cache_seqlens, make_lookups(1, BATCH), seqlen_q, seqlen_k, batch, left, right,
                      PAGE_SIZE > 0, HAS_LEFT, HAS_RIGHT)  # fmt: skip
    PART: gl.constexpr = k_desc.block_shape[2]
    pages = Pages(page_table, stride_table, num_pages, make_lookups(TILE_N // PART),
                  make_lookups(1), PAGE_SIZE, PART)  # fmt: skip
    boxes = make_boxes(k_desc, v_desc, STAGES, TILE_N, WARPS)
    exchange = make_exchange(D)
    dim *= ALIGN  # so that the compiler knows of it, and of rows, that they lie on 16 bytes
    stride_qb *= ALIGN
    stride_qs *= ALIGN
    stride_qh *= ALIGN
    flags = scratch_ptr + num_slots.to(gl.int64) * (seqlen_q * GROUP * (D // 2))
    part_lses = (flags + num_slots).to(gl.pointer_type(gl.float32))
    parts = scratch_ptr.to(gl.pointer_type(gl.float32))
    out = Out(out_ptr, lse_ptr, sinks_ptr, parts, part_lses, flags, nonce, num_heads, dim, GROUP,
              HAS_SINKS, MOST)  # fmt: skip
    straight: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    q_slots = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [2, ROWS, D], straight)
    boxes.warm_up(k_desc, v_desc, exchange.acc)
    num_kv_heads = num_heads // GROUP
    kv_head = gl.program_id(0) % num_kv_heads
    number = gl.program_id(0) // num_kv_heads
    if PAGE_SIZE:
        lengths.known.keep(lengths.ask(BATCH))  # the call before may still write them
    mine = range_of(lengths, lengths.all(BATCH), number, most, least)
    if PAGE_SIZE:
        pages.ids.keep(pages.first(lengths, mine))
    gdc_wait()
    if FIRST:  # all that was before this call is there, which is all that the next one reads
        gdc_launch_dependents()
    started = 0
    KV8: gl.constexpr = k_desc.dtype.primitive_bitwidth == 8
    if PAGE_SIZE:
        mine, started = settle(k_desc, v_desc, boxes, lengths, pages, mine, kv_head, number, most,
                               least, BATCH, KV8)  # fmt: skip
        # What is handed to the producer lies where all warps have just read whether lengths differ,
        # and the compiler lets none of them wait for the others: some would settle anew, for ever.
        meet()
    scale = Scale(scale_log2, inner, SOFTCAP)
    queries = Queries(q_ptr, stride_qb, stride_qs, stride_qh, kv_head, dim, q_slots, GROUP,
                      Fragments(D, KV8, k_desc.dtype == gl.float8e4nv))  # fmt: skip
    head = kv_head.to(gl.int64)
    scales = Scales(k_scales_ptr + head * stride_ksh, v_scales_ptr + head * stride_vsh,
                    stride_ksp, stride_kss, stride_vsp, stride_vss, KV8)  # fmt: skip
    gl.warp_specialize([
        (consume, (queries, out, boxes, exchange, lengths, scale, mine)),
        (produce, (k_desc, v_desc, boxes, pages, scales, lengths, mine, started, kv_head)),
    ], [1], [PRODUCER_REGS])  # fmt: skip
    boxes.close()
