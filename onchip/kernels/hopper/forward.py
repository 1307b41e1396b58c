"""FlashAttention v3's forward in Gluon: one warp moves tiles by TMA, warpgroups of 64 queries do
the rest.

Each consumer computes the scores of key tile j + 1 while it adds the values of tile j. Programs are
persistent: the producer takes tickets (an atomic counter where tiles differ in length), tells the
consumers whose queries they are, and runs ahead into the next tile of queries while the consumers
store the last.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onchip.kernels.hopper.job import Config, Job, Pipes, Place
from onchip.kernels.hopper.pipe import (
    Ring,
    follow,
    make_baton,
    make_ring,
    make_tickets,
    prefetch,
    store_tile,
    store_wait,
    tensor_descriptor,
)
from onchip.kernels.hopper.producer import produce
from onchip.kernels.hopper.schedule import (
    Blocks,
    Entries,
    Keys,
    Order,
    Shape,
    Share,
    Strips,
    bit_words,
    hide,
    make_pages,
    visible,
)
from onchip.kernels.hopper.softmax import (
    LN2,
    LOG2E,
    Scale,
    approximate,
    beside_lane_sums,
    exp2,
    hold,
    lane_sums,
    rescaled,
    softmax,
    whole_sums,
)


@aggregate
class Out:
    """Where results go: out by TMA through `slots` (STAGED), or straight from registers; lse
    directly; and the sinks that join at the end. MERGE: what lies there, `room` tokens to a
    batch entry and lse in fp64, is the state of the same queries over other keys, and merged in:
    out comes and goes through `totals`, a slot for each consumer.
    SECOND: the call before may still use the memory that they go to, and is waited for.
    """

    ref: gl.tensor | tensor_descriptor
    slots: gl.shared_memory_descriptor
    totals: Ring
    lse: gl.tensor
    sinks: gl.tensor
    dim: gl.tensor
    room: gl.tensor
    HAS_SINKS: gl.constexpr
    STAGED: gl.constexpr
    MERGE: gl.constexpr
    SECOND: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, ref, slots, totals, lse, sinks, dim, room, HAS_SINKS, STAGED, MERGE, SECOND):
        self.ref = ref
        self.slots = slots
        self.totals = totals
        self.lse = lse
        self.sinks = sinks
        self.dim = dim
        self.room = room
        self.HAS_SINKS = gl.constexpr(HAS_SINKS)
        self.STAGED = gl.constexpr(STAGED)
        self.MERGE = gl.constexpr(MERGE)
        self.SECOND = gl.constexpr(SECOND)


@gluon.jit
def words_of(job, place, n, bits):
    """What key tile n has of its bit tile."""
    cfg = job.cfg
    return bit_words(job.blocks.tiles, bits, place.row, n * cfg.TILE_N, cfg.TILE_N, cfg.S)


@gluon.jit
def words_ahead(job, place, n, bits):
    """The same, asked for before the scores of the tile are there. In strips they are not: most
    tiles have no bits, and to find that out ahead costs each of them more than the wait costs those
    that have.
    """
    if job.blocks.ON and not job.STRIPS:
        return words_of(job, place, n, bits)
    else:
        return ()


@gluon.jit
def masked(job, place, s, n, bits, words, hides):
    """s of key tile n with -inf where hidden: by the band and the end, or by a bit tile. hides:
    whether some may be; of blocks, it is found here.
    """
    shape, cfg = job.shape, job.cfg
    seqlen_q, seqlen_k, col = place.seqlen_q, place.seqlen_k, n * cfg.TILE_N
    if job.STRIPS:
        if hides:
            found = words_of(job, place, n, bits)
            s = hide(shape, s, found, place.row, col, seqlen_q, seqlen_k, cfg.S)
    elif job.blocks.ON:
        if shape.HAS_LEFT | shape.HAS_RIGHT | (bits >= 0) | (col + cfg.TILE_N > seqlen_k):
            s = hide(shape, s, words, place.row, col, seqlen_q, seqlen_k, cfg.S)
    elif hides:
        s = visible(shape, s, place.row, col, seqlen_q, seqlen_k, cfg.S)
    return s


@gluon.jit
def score(pipes, cfg, q, i):
    """Start q k of filling i."""
    zero = gl.zeros([64, cfg.TILE_N], gl.float32, cfg.S)
    k = pipes.k.slot(i).permute((1, 0))
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def start_first(pipes, cfg, q, i, C: gl.constexpr):
    """Start q k of filling i, the first key tile of a tile of queries."""
    pipes.k.wait_full(i)
    if cfg.PINGPONG:
        pipes.baton.take(C, i)
    s_next = score(pipes, cfg, q, i)
    if cfg.PINGPONG:
        pipes.baton.pass_on(C)
    return s_next


@gluon.jit
def finish_first(job, place, s, n, bits, hides, dtype: gl.constexpr):
    """(p, m, l) of the first key tile of a tile of queries, from its products."""
    shape, cfg = job.shape, job.cfg
    s = job.scale.apply_softcap(s)
    CUT: gl.constexpr = job.blocks.ON or shape.HAS_LEFT or shape.HAS_RIGHT
    if CUT or (n + 1) * cfg.TILE_N > place.seqlen_k:
        s = masked(job, place, s, n, bits, words_ahead(job, place, n, bits), hides)
    m = job.scale.finite(gl.max(s, 1))
    scale_log2 = job.scale.scale_log2
    p = exp2(s * scale_log2 - (m * scale_log2)[:, None], cfg.POLY)
    return gl.convert_layout(p.to(dtype), cfg.P), m, lane_sums(p)


@gluon.jit
def start_tile(pipes, cfg, q, p, acc, alpha, i, last, C: gl.constexpr):
    """(scores of filling i, sum with the values of filling `last`), both only started. If UNDER,
    acc is still to be multiplied with alpha, which is done under the product of the scores.
    """
    pipes.k.wait_full(i)
    if cfg.PINGPONG:
        pipes.baton.take(C, i)
    s_next = score(pipes, cfg, q, i)
    if cfg.UNDER:
        acc = rescaled(acc, alpha, cfg)
    pipes.v.wait_full(last)
    return s_next, warpgroup_mma(p, pipes.v.slot(last), acc, is_async=True)


@gluon.jit
def finish_tile(pipes, job, place, s_next, acc_next, alpha, m, l, i, n, bits, hides,
                dtype: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """(weights, sum, alpha, maximum, sum of weights) after key tile n, whose scores were started as
    filling i. alpha passes through unless UNDER.
    """
    cfg = job.cfg
    words = words_ahead(job, place, n, bits)
    s_next = warpgroup_mma_wait(num_outstanding=1, deps=(s_next,))
    if cfg.PINGPONG:
        pipes.baton.pass_on(C)
    s = job.scale.apply_softcap(s_next)
    s = masked(job, place, s, n, bits, words, hides)
    p_wide, m, shrink = softmax(s, m, job)
    if cfg.HOLD:
        p_wide = hold(p_wide, cfg.HOLD)
    l = l * beside_lane_sums(shrink, l) + lane_sums(p_wide)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc_next,))
    pipes.k.release(i)
    if cfg.UNDER:
        alpha = shrink
    else:
        acc = rescaled(acc, shrink, cfg)
    return gl.convert_layout(p_wide.to(dtype), cfg.P), acc, alpha, m, l


@gluon.jit
def fold_tile(pipes, job, place, q, p, acc, alpha, m, l, i, n, bits,
              MASKED: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Fold filling i, key tile n: its scores are computed while the values of the filling before it
    are added.
    """
    s_next, acc_next = start_tile(pipes, job.cfg, q, p, acc, alpha, i, i - 1, C)
    return finish_tile(pipes, job, place, s_next, acc_next, alpha, m, l, i, n, bits, MASKED,
                       q.dtype, C)  # fmt: skip


@gluon.jit
def fold_band(pipes, job, place, mine, q, p, acc, m, l, i, C: gl.constexpr):
    """Fold the key tiles of `mine` after the first: cut by the diagonal, whole, cut by the left
    side of the window. Cut tiles are unrolled, not looped: p carried from loop to loop in 16 bits
    would be repacked in every iteration (64 more instructions of 520).
    """
    shape, cfg = job.shape, job.cfg
    ROWS: gl.constexpr = 64 // shape.GROUP * cfg.CONSUMERS
    CUTS: gl.constexpr = (ROWS + cfg.TILE_N - 2) // cfg.TILE_N + 1  # tiles that one edge can cut
    alpha = gl.full_like(m, 1.0)
    for x in gl.static_range(CUTS - 1 if shape.HAS_RIGHT else 0):
        n = mine.hi - 2 - x
        if n >= mine.full_hi:
            p, acc, alpha, m, l = fold_tile(pipes, job, place, q, p, acc, alpha, m, l, i,
                                            n, -1, True, C)  # fmt: skip
            i += 1
    whole_hi = gl.minimum(mine.full_hi, mine.hi - 1)
    for n in range(whole_hi - 1, mine.full_lo - 1, -1):
        p, acc, alpha, m, l = fold_tile(pipes, job, place, q, p, acc, alpha, m, l, i,
                                        n, -1, False, C)  # fmt: skip
        i += 1
    for x in gl.static_range(CUTS if shape.HAS_LEFT else 0):
        n = gl.minimum(mine.full_lo, whole_hi) - 1 - x
        if n >= mine.lo:
            p, acc, alpha, m, l = fold_tile(pipes, job, place, q, p, acc, alpha, m, l, i,
                                            n, -1, True, C)  # fmt: skip
            i += 1
    return p, acc, alpha, m, l, i


@gluon.jit
def fold_blocks(pipes, job, place, entries, count, q, p, acc, m, l, i, C: gl.constexpr):
    """The same for the tiles that a mask lists, of which one look-up runs ahead. That fillings are
    counted from 0 makes finding a slot one instruction instead of four or five; fold_band gains
    nothing by it (and loses 3 % at head_dim 256).
    """
    alpha = gl.full_like(m, 1.0)
    n, bits = job.blocks.tile(entries, 1, job.cfg.TILE_N)
    for j in range(1, count):
        gl.assume(i > 0)
        n_next, bits_next = job.blocks.tile(entries, j + 1, job.cfg.TILE_N)
        p, acc, alpha, m, l = fold_tile(pipes, job, place, q, p, acc, alpha, m, l, i,
                                        n, bits, True, C)  # fmt: skip
        i += 1
        n = n_next
        bits = bits_next
    return p, acc, alpha, m, l, i


@gluon.jit
def fold_strip(pipes, job, place, share, q, p, acc, m, l, last, C: gl.constexpr):
    """The same for a share of a strip, the first tile of which has filling `last`. Between two of
    its own there may be one that is not. It is let pass when the values before it are added; not at
    the end of that turn, where the compiler would pack all weights behind the branch.
    """
    alpha = gl.full_like(m, 1.0)
    at = share.at(share.top)
    far = share.seen(at).far()
    at = share.after(at, far)
    seen = share.seen(at)
    held = far * 0  # 1 if the filling before `last` is another's, and not released yet
    for _ in range(1, share.count):
        if held != 0:
            let_pass(pipes, last - 1)
        i = last + 1 + far
        gl.assume(last >= 0)  # as in fold_blocks
        gl.assume(i >= 0)
        s_next, acc_next = start_tile(pipes, job.cfg, q, p, acc, alpha, i, last, C)
        held = far
        far = seen.far()
        at = share.after(at, far)
        after = share.seen(at)  # under the products: what follows does not wait for it
        n, bits = seen.tile(place.seqlen_k)
        p, acc, alpha, m, l = finish_tile(pipes, job, place, s_next, acc_next, alpha, m, l, i,
                                          n, bits, seen.hides(), q.dtype, C)  # fmt: skip
        last = i
        seen = after
    if held != 0:
        let_pass(pipes, last - 1)
    return p, acc, alpha, m, l, last + 1


@gluon.jit
def let_pass(pipes, i):
    """Let key tile i pass though the one after it is released: its values must have come before it
    is, or the next filling of their slot could come unseen.
    """
    gl.assume(i >= 0)
    pipes.k.wait_full(i)
    pipes.v.wait_full(i)
    pipes.k.release(i)


@gluon.jit
def skip(pipes, cfg, i, count, C: gl.constexpr, turns=0):
    """Let `count` key tiles pass that other consumers see and this one does not. turns: how often
    it has had the baton beside once for each key tile.
    """
    for _ in range(count):
        pipes.k.wait_full(i)
        if cfg.PINGPONG:
            pipes.baton.take(C, i + turns)
            pipes.baton.pass_on(C)
        pipes.k.release(i)
        pipes.v.wait_full(i)  # unseen, it could pass for the next filling of its slot
        i += 1
    return i


@gluon.jit
def close_rows(out, job, place, m_log2, l):
    """(maximum in powers of two, sum, what the accumulator must still be multiplied with) of rows
    whose last key tile was folded: with sinks, they join here.
    """
    shrink = gl.full_like(l, 1.0)
    if out.HAS_SINKS:
        sink = gl.load(out.sinks + job.heads(place, job.cfg.S)).to(gl.float32) * LOG2E
        top = gl.maximum(m_log2, sink)
        # At most 1: the difference may be fused into the product that m_log2 is, and of a row
        # without keys, where that product is near the end of fp32, its rounding is 2^100.
        shrink = gl.exp2(gl.minimum(m_log2 - top, 0.0))
        l = l * shrink + gl.exp2(sink - top)
        m_log2 = top
    return m_log2, l, gl.where(l != 0.0, shrink * approximate("rcp", l), 0.0)


@gluon.jit
def lse_of(m_log2, l):
    """-inf where l = 0, a row without keys; a score of +inf or NaN makes l NaN, and lse, too."""
    return gl.where(l != 0.0, (m_log2 + approximate("lg2", l)) * LN2, float("-inf"))


@gluon.jit
def lse_places(out, job, place):
    """(pointers to the lse of 64 rows, which of them are queries)"""
    shape = job.shape
    rows = place.row + shape.queries_of(64, job.cfg.S)
    head = job.heads(place, job.cfg.S)
    if shape.PACKED:
        first = head.to(gl.int64) * shape.total_q + place.q0
    else:
        first = (place.batch.to(gl.int64) * shape.num_heads + head) * out.room
    return out.lse + first + rows, rows < place.seqlen_q


@gluon.jit
def store_lse(out, job, place, m_log2, l):
    at, exist = lse_places(out, job, place)
    gl.store(at, lse_of(m_log2, l), mask=exist)


@gluon.jit
def expect_lse(out, job, place):
    """Bring what the lse of 64 rows will be merged into nearer: there are no registers to hold it,
    and the producer has none to find it.
    """
    if out.MERGE:
        at, exist = lse_places(out, job, place)
        prefetch(gl.where(exist, at, out.lse))


@gluon.jit
def lse_before(out, job, place):
    """What the lse of 64 rows will be merged into, asked for before it is needed."""
    if out.MERGE:
        at, exist = lse_places(out, job, place)
        return gl.load(at, mask=exist, other=0.0)
    else:
        return ()


@gluon.jit
def merge_lse(out, job, place, before, m_log2, l):
    """Merge into the lse that lies there: (the share of the rows, the share of what lies there).
    Rows that saw no key have none.
    """
    at, exist = lse_places(out, job, place)
    lse = lse_of(m_log2, l).to(gl.float64)
    gap = gl.where(l != 0.0, (lse - before).to(gl.float32), float("-inf"))
    less = gl.exp2(-gl.abs(gap) * LOG2E)
    larger = approximate("rcp", 1.0 + less)
    more = approximate("lg2", 1.0 + less) * LN2
    gl.store(at, gl.where(gap > 0.0, lse, before) + more.to(gl.float64), mask=exist)
    smaller = less * larger
    return gl.where(gap > 0.0, larger, smaller), gl.where(gap > 0.0, smaller, larger)


@gluon.jit
def finish_rows(out, job, place, before, m, l):
    """Store lse: (what the accumulator must still be multiplied with, what the output that lies
    there must be multiplied with)
    """
    m_log2, l, inverse = close_rows(out, job, place, m * job.scale.scale_log2, l)
    if out.SECOND:
        gdc_wait()
    if out.MERGE:
        share, rest = merge_lse(out, job, place, before, m_log2, l)
        return inverse * share, rest
    else:
        store_lse(out, job, place, m_log2, l)
        return inverse, inverse


@gluon.jit
def wide_places(out, job, place, FIRST: gl.constexpr = 0):
    """(pointers to 64 rows of the unrounded output, from one column on, which of its elements
    exist)
    """
    shape, cfg = job.shape, job.cfg
    rows = place.row + shape.queries_of(64, cfg.O)
    cols = FIRST + gl.arange(0, cfg.WIDTH, gl.SliceLayout(0, cfg.O))
    first = place.q0.to(gl.int64)
    if not shape.PACKED:
        first = place.batch.to(gl.int64) * out.room
    places = ((first + rows) * shape.num_heads + job.heads(place, cfg.O)) * out.dim
    inside = (rows < place.seqlen_q)[:, None] & (cols < out.dim)[None, :]
    return out.ref + places[:, None] + cols[None, :], inside


@gluon.jit
def store_out(out, job, place, acc, C: gl.constexpr):
    """64 rows of the output."""
    if out.STAGED:
        store_tile(out.ref, job.rows_at(place), out.slots.index(C), acc.to(out.ref.dtype))
    else:
        at, inside = wide_places(out, job, place)
        gl.store(at, acc, mask=inside)


@gluon.jit
def merge_out(out, job, place, acc_next, inverse, rest, filling):
    """64 rows of the output, into those that have come."""
    out.totals.wait_full(filling)
    before = normalised(out.totals.slot(filling).load(job.cfg.O), rest, job.cfg)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc_next,))
    acc = before + normalised(acc, inverse, job.cfg)
    store_tile(out.ref, job.rows_at(place), out.totals.tile(filling), acc)


@gluon.jit
def release_total(out, cfg, t, C: gl.constexpr):
    """What the t-th tile was merged into has left, if there was such a tile."""
    if out.MERGE:
        store_wait(0)
        if t >= 0:
            out.totals.release(t * cfg.CONSUMERS + C)


@aggregate
class Work:
    """A consumer's part of a ticket: its queries, the key tiles that its program loads for them and
    those of them that it sees, or what a mask lists. `exists`: there was such a ticket.
    """

    exists: gl.tensor
    place: Place
    keys: Keys
    mine: Keys
    entries: Entries | Share

    @gluon.constexpr_function
    def __init__(self, exists, place, keys, mine, entries):
        self.exists = exists
        self.place = place
        self.keys = keys
        self.mine = mine
        self.entries = entries

    @gluon.jit
    def sees(self):
        return self.exists & (self.mine.hi > self.mine.lo)


@gluon.jit
def take_work(pipes, job, t, C: gl.constexpr):
    """What consumer C has to do for the t-th ticket."""
    first = job.told(pipes.tickets.take(t))
    place = job.part(first, C)
    zero = t * 0
    if job.STRIPS:
        entries = job.share(first, place)
        total = entries.total()
        keys = Keys(zero, zero, total, total)
        behind = gl.where(entries.count > 0, entries.bottom, total)
        mine = Keys(behind, behind, behind, entries.top + 1)
    elif job.blocks.ON:
        entries, count = job.listed(first)
        keys = Keys(zero, zero, count, count)
        mine = keys
    else:
        entries = Entries(zero, zero, zero, zero)
        keys = job.keys(first, job.cfg.CONSUMERS)
        mine = job.keys(place, 1)
    return Work(first.row >= 0, place, keys, mine, entries)


@gluon.jit
def finish(out, job, place, before, acc_next, m, l, t, C: gl.constexpr):
    """Store what 64 queries of the t-th tile have come to, once their last values are added."""
    inverse, rest = finish_rows(out, job, place, before, m, l)
    if out.MERGE:
        filling = t * job.cfg.CONSUMERS + C
        merge_out(out, job, place, acc_next, inverse, rest, filling)
    else:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc_next,))
        store_out(out, job, place, normalised(acc, inverse, job.cfg), C)


@gluon.jit
def normalised(acc, inverse, cfg):
    return acc * gl.convert_layout(inverse, gl.SliceLayout(1, cfg.O))[:, None]


@gluon.jit
def first_scores(pipes, cfg, work, filling, i, C: gl.constexpr):
    """(products of the first key tile that a consumer sees, its filling)"""
    i = skip(pipes, cfg, i, work.keys.hi - work.mine.hi, C)
    pipes.q.wait_full(filling)
    s_next = start_first(pipes, cfg, pipes.q.slot(filling), i, C)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s_next,))
    pipes.k.release(i)
    return s, i


@gluon.jit
def fold(pipes, job, work, q, s, i, C: gl.constexpr):
    """All key tiles of `work`, the first of which has the products s and filling i."""
    place, mine = work.place, work.mine
    acc = gl.zeros([64, job.cfg.WIDTH], gl.float32, job.cfg.O)
    if job.STRIPS:
        seen = work.entries.seen(work.entries.at(work.entries.top))
        n, bits = seen.tile(place.seqlen_k)
        p, m, l = finish_first(job, place, s, n, bits, seen.hides(), q.dtype)
        return fold_strip(pipes, job, place, work.entries, q, p, acc, m, l, i, C)
    elif job.blocks.ON:
        n, bits = job.blocks.tile(work.entries, 0, job.cfg.TILE_N)
        p, m, l = finish_first(job, place, s, n, bits, True, q.dtype)
        return fold_blocks(pipes, job, place, work.entries, mine.hi, q, p, acc, m, l, i + 1, C)
    else:
        p, m, l = finish_first(job, place, s, mine.hi - 1, -1, True, q.dtype)
        return fold_band(pipes, job, place, mine, q, p, acc, m, l, i + 1, C)


@gluon.jit
def attend(out, pipes, job, work, t, i, C: gl.constexpr):
    """One consumer's 64 queries, which see keys: (the next work, i)."""
    cfg = job.cfg
    EARLY: gl.constexpr = not (out.STAGED and cfg.OUT_IN_Q)  # nobody writes where the queries lie
    filling = t * cfg.CONSUMERS + C
    s, i = first_scores(pipes, cfg, work, filling, i, C)
    release_total(out, cfg, t - 1, C)
    expect_lse(out, job, work.place)
    p, acc, alpha, m, l, i = fold(pipes, job, work, pipes.q.slot(filling), s, i, C)
    if EARLY:
        pipes.q.release(filling)
    if cfg.UNDER:
        acc = rescaled(acc, alpha, cfg)
    pipes.v.wait_full(i - 1)
    l = whole_sums(l, cfg.S)
    acc_next = warpgroup_mma(p, pipes.v.slot(i - 1), acc, is_async=True)
    before = lse_before(out, job, work.place)
    after = take_work(pipes, job, t + 1, C)
    finish(out, job, work.place, before, acc_next, m, l, t, C)
    i = skip(pipes, cfg, i, work.mine.lo - work.keys.lo, C)
    if not EARLY:
        store_wait(0)
        pipes.q.release(filling)
    return after, i


@gluon.jit
def pass_by(out, pipes, job, work, t, i, C: gl.constexpr):
    """Queries that see no key, though other consumers' may."""
    cfg = job.cfg
    rows: gl.constexpr = gl.SliceLayout(1, cfg.S)
    filling = t * cfg.CONSUMERS + C
    i = skip(pipes, cfg, i, work.keys.hi - work.keys.lo, C)
    pipes.q.wait_full(filling)
    release_total(out, cfg, t - 1, C)
    if out.MERGE:
        out.totals.wait_full(filling)
    else:
        m = job.scale.finite(gl.full([64], float("-inf"), gl.float32, rows))
        finish_rows(out, job, work.place, (), m, gl.zeros([64], gl.float32, rows))
        store_out(out, job, work.place, gl.zeros([64, cfg.WIDTH], gl.float32, cfg.O), C)
    if cfg.OUT_IN_Q:
        store_wait(0)
    pipes.q.release(filling)
    return i


@gluon.jit
def consume(out, pipes, job, C: gl.constexpr):
    i = 0  # key tiles seen
    t = 0  # tiles of queries seen
    work = take_work(pipes, job, 0, C)
    while work.exists:
        if work.sees():
            work, i = attend(out, pipes, job, work, t, i, C)
        else:
            i = pass_by(out, pipes, job, work, t, i, C)
            work = take_work(pipes, job, t + 1, C)
        t += 1
    store_wait(0)


# Lengths must not be specialised, or 200 lengths would be 200 compilations; and a specialised 1
# would not be a tensor.
_RUNTIME = [
    "seqlen_q", "seqlen_k", "total_q", "total_k", "num_heads", "group_size", "left", "right",
    "mask_b", "mask_h", "dim", "room", "tiles_m", "section", "num_tiles",
    "table_stride", "columns", "num_pages", "span_k", "span_v", "batch",
]  # fmt: skip


@gluon.jit(do_not_specialize=_RUNTIME)
def forward_kernel(
    q_desc, k_desc, v_desc, out_ref, lse_ptr, sinks_ptr, cu_seqlens_q, cu_seqlens_k, counter,
    full_offsets, full_indices, partial_offsets, partial_indices, partial_tiles, tiles,
    strip_heads, strip_entries,
    seqlen_q, seqlen_k, total_q, total_k, num_heads, group_size, left, right, mask_b, mask_h, dim,
    room, tiles_m, section, num_tiles, scale_log2, inner,
    page_table, cache_seqlens, table_stride, columns, num_pages, span_k, span_v, batch,
    WIDTH: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_MASK: gl.constexpr, HAS_SINKS: gl.constexpr, SOFTCAP: gl.constexpr, STAGED: gl.constexpr,
    MERGE: gl.constexpr, SECOND: gl.constexpr,
    TILE_N: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    PINGPONG: gl.constexpr, DYNAMIC: gl.constexpr, OUT_IN_Q: gl.constexpr, RESCALE: gl.constexpr,
    POLY: gl.constexpr, UNDER: gl.constexpr, HOLD: gl.constexpr, NUMBERED: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
    PAGE_SIZE: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    cfg = Config(TILE_N, WIDTH, CONSUMERS, PINGPONG, DYNAMIC, OUT_IN_Q, RESCALE, POLY, UNDER, HOLD)
    shape = Shape(cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k, total_q, total_k,
                  num_heads, group_size, left, right, PACKED, HAS_LEFT, HAS_RIGHT,
                  GROUP)  # fmt: skip
    if HAS_MASK and CONSUMERS == 3:
        gl.static_assert(TILE_N == 128 and not PINGPONG)
        blocks = Strips(strip_heads, strip_entries, tiles, mask_b, mask_h, HAS_LEFT or HAS_RIGHT)
    else:
        blocks = Blocks(full_offsets, full_indices, partial_offsets, partial_indices,
                        partial_tiles, tiles, mask_b, mask_h, HAS_MASK)  # fmt: skip
    pages = make_pages(page_table, cache_seqlens, table_stride, columns, num_pages, span_k, span_v,
                       PAGE_SIZE, TILE_N)  # fmt: skip
    LONGEST_FIRST: gl.constexpr = (HAS_RIGHT or HAS_MASK) and not (PACKED and PAGE_SIZE)
    order = Order(tiles_m, section, num_tiles, LONGEST_FIRST)
    job = Job(shape, blocks, pages, order, Scale(scale_log2, inner, SOFTCAP), cfg, batch)
    q = make_ring(q_desc, Q_STAGES * CONSUMERS, 1)
    k = make_ring(k_desc, STAGES, CONSUMERS, pages.PARTS, NUMBERED)
    v = make_ring(v_desc, STAGES, CONSUMERS, pages.PARTS)
    pipes = Pipes(q, k, v, make_tickets(CONSUMERS, job.WORDS), make_baton(CONSUMERS))
    slots = q.slots
    if STAGED and not (OUT_IN_Q or MERGE):
        shape_out: gl.constexpr = [CONSUMERS] + out_ref.block_shape
        slots = gl.allocate_shared_memory(out_ref.dtype, shape_out, out_ref.layout)
    totals = q
    if MERGE:
        totals = make_ring(out_ref, CONSUMERS, 1)
    out = Out(out_ref, slots, totals, lse_ptr, sinks_ptr, dim, room, HAS_SINKS, STAGED,
              MERGE, SECOND)  # fmt: skip
    loader = (q_desc, k_desc, v_desc, out, counter, pipes, job)
    if SECOND:  # each of its programs has a tile, and waits before it is stored
        gdc_launch_dependents()
    else:
        follow()
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (out, pipes, job, 0)),
            (consume, (out, pipes, job, 1)),
            (produce, loader),
        ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (out, pipes, job, 0)),
            (consume, (out, pipes, job, 1)),
            (consume, (out, pipes, job, 2)),
            (produce, loader),
        ], [4, 4, 1], [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    pipes.close()
    if MERGE:
        totals.close()
