"""The forward with operands of 8 bits, laid out by onchip/kernels/triton/quantise.py.

Programs, tickets and rings are those of forward.py. What differs:
- A tile of 128 keys is a block that shares a scale. The scales of q and k are one factor of a
  tile's scores, so that maxima are kept in powers of two, not in units of scores.
- p goes from the accumulator of scores to the operand of the next product inside a thread, because
  v's keys are permuted; and not through the loop, where bytes would lie in registers of their own
  (200 of 645 instructions). So the products of a tile stay in one iteration, and consumers overlap
  one another: who has the baton (PINGPONG) adds the values of a tile and starts the scores of the
  next, while the others exponentiate.
- FP8 products are added with about 14 bits (onchip/quant/accumulator.py). The values of a tile come
  to a sum of their own, which one multiply-add takes into the accumulator in place of the rescaling
  multiply: promoted every 128 keys at the price of none. The accumulator is in units of v's scale.
- p is 2^8 times as large as it is, or small weights would vanish in e4m3; so are l and acc.
- q and k may be integers with a scale for each token (INTS): a number for each row and each column
  of scores. v, and with it p, may be of 16 bits, as it came (WIDE).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from onchip.kernels.hopper.aggregate import aggregate
from onchip.kernels.hopper.block_sparse import Blocks
from onchip.kernels.hopper.epilogue import (
    Out,
    close_rows,
    lse_places,
    normalised,
    store_lse,
    wide_places,
)
from onchip.kernels.hopper.forward import score, skip, take_work
from onchip.kernels.hopper.mask import Keys, visible
from onchip.kernels.hopper.paging import make_pages
from onchip.kernels.hopper.params import Config, Job, Pipes, Place
from onchip.kernels.hopper.pipeline import (
    follow,
    make_baton,
    make_ring,
    make_tickets,
    store_tile,
    store_wait,
)
from onchip.kernels.hopper.producer import Drawn, hand_out, hand_out_next
from onchip.kernels.hopper.seqlen import Shape
from onchip.kernels.hopper.softmax import (
    LOWEST,
    Scale,
    approximate,
    beside_lane_sums,
    lane_sums,
    whole_sums,
)
from onchip.kernels.hopper.tile_scheduler import Order

BLOCK = gl.constexpr(128)  # tokens that share a scale, and a tile of keys
LIFT = gl.constexpr(8.0)  # of p, in powers of two
LEAST = gl.constexpr(2.0**-100)  # factor of scores: 0, that of zeros, would make NaN of -inf


@aggregate
class Scales:
    """Those of a tile of keys and its values."""

    k: gl.tensor
    v: gl.tensor


@aggregate
class Narrow:
    """Where the blocks of a call lie, and their scales: blocks_q (blocks_k) of them to a head, of
    one sequence of a dense call, of all `batch` of a packed one. kv_scales: of blocks of k and v in
    turns, of k only where q and k are no integers, which have k_tokens.
    """

    q_scales: gl.tensor
    kv_scales: gl.tensor
    k_tokens: gl.tensor
    blocks_q: gl.tensor
    blocks_k: gl.tensor
    INTS: gl.constexpr
    WIDE: gl.constexpr

    @gluon.jit
    def queries(self, shape, place):
        """The first block of the queries of a sequence and head."""
        if shape.PACKED:
            return place.head * self.blocks_q + place.q0 // BLOCK + place.batch
        else:
            return (place.batch * shape.num_heads + place.head) * self.blocks_q

    @gluon.jit
    def keys(self, shape, place, k0):
        """The same of its keys, which begin at k0."""
        head = place.head // shape.group_size
        if shape.PACKED:
            return head * self.blocks_k + k0 // BLOCK + place.batch
        else:
            kv_heads = shape.num_heads // shape.group_size
            return (place.batch * kv_heads + head) * self.blocks_k

    @gluon.jit
    def scales(self, first, n):
        """Of key tile n; asked for before its products, they are there after them. 1 where there
        is none.
        """
        at = self.kv_scales + 2 * (first + n)
        k = 1.0
        if not self.INTS:
            k = gl.load(at)
        v = 1.0
        if not self.WIDE:
            v = gl.load(at + 1)
        return Scales(gl.to_tensor(k), gl.to_tensor(v))

    @gluon.jit
    def query_scales(self, shape, place, layout: gl.constexpr):
        """Of 64 queries, one for all or one for each; past the end there need not be any."""
        last = gl.maximum(place.seqlen_q - 1, 0)
        first = self.queries(shape, place)
        if self.INTS:
            rows = place.row + gl.arange(0, 64, gl.SliceLayout(1, layout))
            return gl.load(self.q_scales + first * BLOCK + gl.minimum(rows, last))
        else:
            return gl.load(self.q_scales + first + gl.minimum(place.row, last) // BLOCK)

    @gluon.jit
    def token_scales(self, first, n, layout: gl.constexpr):
        """Of the keys of tile n, as a row, where each has one."""
        if self.INTS:
            cols = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
            return gl.load(self.k_tokens + (first + n) * BLOCK + cols)[None, :]
        else:
            return ()


@gluon.jit
def produce(q_desc, k_desc, v_desc, counter, pipes, job, narrow):
    shape, cfg = job.shape, job.cfg
    WIDTH_V: gl.constexpr = v_desc.block_shape[0]
    i = 0  # key tiles loaded
    t = 0  # tiles of queries loaded
    zero = job.order.num_tiles * 0
    place, drawn = hand_out(counter, pipes, job, gl.program_id(0), Drawn(zero, zero, zero, zero))
    while place.row >= 0:
        keys = job.keys(place, cfg.CONSUMERS)
        first = narrow.keys(shape, place, place.k0)
        after = place
        for n in range(keys.hi - 1, keys.lo - 1, -1):
            pipes.k.load(i, k_desc, [(first + n) * BLOCK, 0])
            if n == keys.hi - 1:
                load_queries(pipes, q_desc, job, narrow, place, t)
            if n == gl.minimum(keys.lo + 1, keys.hi - 1):  # a ticket takes longer than a key tile
                after, drawn = hand_out_next(counter, pipes, job, drawn)
            pipes.k.wait_empty(i + 1)  # the next keys' slot, and that of these values: see Pipes
            if narrow.WIDE:
                kv_head = place.head // shape.group_size
                row = n * cfg.TILE_N
                at = shape.coord(place.batch, kv_head, place.k0, place.seqlen_k, row)
                pipes.v.load(i, v_desc, at)
            else:
                pipes.v.load(i, v_desc, [(first + n) * WIDTH_V, 0])
            i += 1
        if keys.hi == keys.lo:
            load_queries(pipes, q_desc, job, narrow, place, t)
            after, drawn = hand_out_next(counter, pipes, job, drawn)
        place = after
        t += 1


@gluon.jit
def load_queries(pipes, q_desc, job, narrow, place, t):
    CONSUMERS: gl.constexpr = job.cfg.CONSUMERS
    row = narrow.queries(job.shape, place) * BLOCK + place.row
    for c in gl.static_range(CONSUMERS):
        pipes.q.wait_empty(t * CONSUMERS + c)
        pipes.q.load(t * CONSUMERS + c, q_desc, [row + 64 * c, 0])


@gluon.jit
def operand(p, cfg, dtype: gl.constexpr):
    """p on the left of its product, in the type of v; e4m3 with its columns in the order of v's
    keys: four neighbours are what a thread has.
    """
    if dtype == gl.float8e4nv:
        return _operand8(p, cfg)
    else:
        return gl.convert_layout(p.to(dtype), cfg.P)


@gluon.jit
def _operand8(p, cfg):
    TILE_N: gl.constexpr = cfg.TILE_N
    p = p.reshape([64, TILE_N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([64, TILE_N])
    return gl.inline_asm_elementwise(
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;"
        " cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }",
        "=r,r,r,r,r", [gl.convert_layout(p, cfg.P)], dtype=gl.float8e4nv, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def weigh(s, m, factor, ROWS: gl.constexpr):
    """(p * 2^LIFT, row maximum, factor for what was folded before) of products whose scores, in
    powers of two, are `factor` times as large: a number, or one for each of the ROWS.
    """
    m_new = gl.maximum(m, gl.max(s, 1) * factor)
    if ROWS:
        factor = factor[:, None]
    p = gl.exp2(s * factor - (m_new - LIFT)[:, None])
    return p, m_new, gl.exp2(m - m_new)


@gluon.jit
def thread_sums(p):
    """lane_sums with both columns of a thread in one, (64, 4): registers are short here."""
    return gl.sum(lane_sums(p).reshape([64, 4, 2]), 2)


@gluon.jit
def add_values(pipes, cfg, p, acc, alpha, i, WIDE: gl.constexpr):
    """acc * alpha + p v of filling i, a part of v's columns after the other: each is a sum of its
    own until it is added.
    """
    PARTS: gl.constexpr = len(acc)
    zero = gl.zeros([64, cfg.WIDTH], gl.float32, cfg.O)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, cfg.O))[:, None]
    added = ()
    for x in gl.static_range(PARTS):
        part = pipes.v.slot(i)
        if WIDE:
            part = part.slice(x * cfg.WIDTH, cfg.WIDTH, 1)
        else:
            part = part.slice(x * cfg.WIDTH, cfg.WIDTH, 0).permute((1, 0))
        more = warpgroup_mma(p, part, zero, use_acc=False, is_async=True)
        more = warpgroup_mma_wait(num_outstanding=0, deps=(more,))
        more = acc[x] * alpha + more
        if x + 1 < PARTS:  # or two sums would be in registers at once
            more = warpgroup_mma_wait(num_outstanding=0, deps=(more,))
        added = added + (more,)
    return added


@aggregate
class Task:
    """64 queries of one head, which filling of their ring they are, what their scores are
    multiplied with (a number, or one for each), and the first block of the keys that they meet.
    Consumer C has had the baton `turns` times beside once for each key tile.
    """

    place: Place
    filling: gl.tensor
    factor: gl.tensor
    first: gl.tensor
    turns: gl.tensor
    C: gl.constexpr


@gluon.jit
def make_task(job, narrow, place, t, C: gl.constexpr):
    """Consumer C's part of the t-th tile of queries."""
    shape = job.shape
    k0, _ = shape.keys(place.batch)
    factor = narrow.query_scales(shape, place, job.cfg.S) * job.scale.scale_log2
    filling = t * job.cfg.CONSUMERS + C
    return Task(place, filling, factor, narrow.keys(shape, place, k0), t, C)


@gluon.jit
def products(pipes, cfg, q, i, INTS: gl.constexpr, C: gl.constexpr):
    """q k of filling i, integers of integers. Consumer C passes the baton on."""
    if INTS:
        zero = gl.zeros([64, cfg.TILE_N], gl.int32, cfg.S)
        k = pipes.k.slot(i).permute((1, 0))
        s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    else:
        s = score(pipes, cfg, q, i)
    if cfg.PINGPONG:
        pipes.baton.pass_on(C)
    return warpgroup_mma_wait(num_outstanding=0, deps=(s,))


@gluon.jit
def fold_tile(pipes, job, narrow, task, q, acc, m, l, unit, i, n, MASKED: gl.constexpr):
    """Fold filling i, key tile n. acc comes in units of the last tile's scale of v, and goes in
    units of this one's. The baton is held before and after.
    """
    cfg, place = job.cfg, task.place
    scales = narrow.scales(task.first, n)
    tokens = narrow.token_scales(task.first, n, cfg.S)
    pipes.k.wait_full(i)
    s = products(pipes, cfg, q, i, narrow.INTS, task.C)
    pipes.k.release(i)
    if narrow.INTS:
        s = s.to(gl.float32) * tokens
    if MASKED:
        col = n * cfg.TILE_N
        s = visible(job.shape, s, place.row, col, place.seqlen_q, place.seqlen_k, cfg.S)
    factor = gl.maximum(task.factor * scales.k, LEAST)
    p, m, alpha = weigh(s, m, factor, narrow.INTS)
    l = l * beside_lane_sums(alpha, l) + thread_sums(p)
    alpha = alpha * (unit * approximate("rcp", scales.v))
    pipes.v.wait_full(i)
    p = operand(p, cfg, pipes.v.slots.dtype)
    if cfg.PINGPONG:
        pipes.baton.take(task.C, i + 1 + task.turns)
    return add_values(pipes, cfg, p, acc, alpha, i, narrow.WIDE), m, l, scales.v


@gluon.jit
def fold_tiles(pipes, job, narrow, task, acc, m, l, unit, i, hi, lo, MASKED: gl.constexpr):
    """Key tiles from hi down to lo. Each loop over them has an address of the queries that ptxas
    cannot know to be the other loops': it took for one what another, which had no tiles, had not
    computed (docs/notebook.md, products of nothing).
    """
    q = pipes.q.steady_slot(task.filling, i)
    for n in range(hi - 1, lo - 1, -1):
        acc, m, l, unit = fold_tile(pipes, job, narrow, task, q, acc, m, l, unit, i, n, MASKED)
        i += 1
    return acc, m, l, unit, i


@gluon.jit
def fold(pipes, job, narrow, task, mine, i, PARTS: gl.constexpr):
    """All key tiles that a consumer sees: cut by the diagonal or the end, whole, cut by the left
    side of the window.
    """
    cfg = job.cfg
    acc = (gl.zeros([64, cfg.WIDTH], gl.float32, cfg.O),) * PARTS
    m = gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, cfg.S))
    l = thread_sums(gl.zeros([64, cfg.TILE_N], gl.float32, cfg.S))
    unit = 1.0
    if cfg.PINGPONG:
        pipes.baton.take(task.C, i + task.turns)
    acc, m, l, unit, i = fold_tiles(pipes, job, narrow, task, acc, m, l, unit, i,
                                    mine.hi, mine.full_hi, True)  # fmt: skip
    acc, m, l, unit, i = fold_tiles(pipes, job, narrow, task, acc, m, l, unit, i,
                                    mine.full_hi, mine.full_lo, False)  # fmt: skip
    if job.shape.HAS_LEFT:
        acc, m, l, unit, i = fold_tiles(pipes, job, narrow, task, acc, m, l, unit, i,
                                        mine.full_lo, mine.lo, True)  # fmt: skip
    if cfg.PINGPONG:
        pipes.baton.pass_on(task.C)
    return acc, m, whole_sums(l, cfg.S), unit, i


@gluon.jit
def finish(out, job, place, acc, m, l, unit, C: gl.constexpr):
    """Store what 64 queries have come to. Where lse goes lies what their scores are short of."""
    at, exist = lse_places(out, job, place)
    m_log2 = m - LIFT + gl.load(at, mask=exist, other=0.0)
    m_log2, l, inverse = close_rows(out, job, place, m_log2, l)
    store_lse(out, job, place, m_log2, l)
    inverse = inverse * unit
    for x in gl.static_range(len(acc)):
        store_part(out, job, place, normalised(acc[x], inverse, job.cfg), x, C)


@gluon.jit
def store_part(out, job, place, acc, PART: gl.constexpr, C: gl.constexpr):
    """Columns of 64 rows of the output."""
    FIRST: gl.constexpr = PART * job.cfg.WIDTH
    if out.STAGED:
        at = job.rows_at(place)
        slot = out.slots.index(C)
        store_tile(out.ref, at[:-1] + (gl.to_tensor(FIRST),), slot, acc.to(out.ref.dtype))
    else:
        at, inside = wide_places(out, job, place, FIRST)
        gl.store(at, acc, mask=inside)


@gluon.jit
def within(mine, keys):
    """Key tiles of a consumer as some of its program's: queries past the end, which see none, may
    count them anywhere.
    """
    lo = gl.minimum(gl.maximum(mine.lo, keys.lo), keys.hi)
    hi = gl.maximum(gl.minimum(mine.hi, keys.hi), lo)
    full_hi = gl.minimum(gl.maximum(mine.full_hi, lo), hi)
    return Keys(lo, gl.minimum(gl.maximum(mine.full_lo, lo), full_hi), full_hi, hi)


@gluon.jit
def attend(out, pipes, job, narrow, work, t, i, C: gl.constexpr, PARTS: gl.constexpr):
    """One consumer's 64 queries: (the next work, i)."""
    cfg, place, keys = job.cfg, work.place, work.keys
    mine = within(work.mine, keys)
    i = skip(pipes, cfg, i, keys.hi - mine.hi, C, t)
    task = make_task(job, narrow, place, t, C)
    pipes.q.wait_full(task.filling)
    acc, m, l, unit, i = fold(pipes, job, narrow, task, mine, i, PARTS)
    pipes.q.release(task.filling)
    after = take_work(pipes, job, t + 1, C)
    finish(out, job, place, acc, m, l, unit, C)
    return after, skip(pipes, cfg, i, mine.lo - keys.lo, C, t + 1)


@gluon.jit
def consume(out, pipes, job, narrow, C: gl.constexpr, PARTS: gl.constexpr):
    i = 0  # key tiles seen
    t = 0  # tiles of queries seen
    work = take_work(pipes, job, 0, C)
    while work.exists:
        work, i = attend(out, pipes, job, narrow, work, t, i, C, PARTS)
        t += 1
    store_wait(0)


_RUNTIME = [
    "seqlen_q", "seqlen_k", "total_q", "total_k", "num_heads", "group_size", "left", "right", "dim",
    "room", "tiles_m", "section", "num_tiles", "blocks_q", "blocks_k", "batch",
]  # fmt: skip


@gluon.jit(do_not_specialize=_RUNTIME)
def forward8_kernel(
    q_desc, k_desc, v_desc, out_ref, lse_ptr, sinks_ptr, q_scales, kv_scales, k_tokens,
    cu_seqlens_q, cu_seqlens_k, counter,
    seqlen_q, seqlen_k, total_q, total_k, num_heads, group_size, left, right, dim, room,
    tiles_m, section, num_tiles, blocks_q, blocks_k, batch, scale_log2,
    WIDTH: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_SINKS: gl.constexpr, STAGED: gl.constexpr,
    TILE_N: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    PINGPONG: gl.constexpr, DYNAMIC: gl.constexpr, NUMBERED: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    INTS: gl.constexpr = q_desc.dtype == gl.int8
    WIDE: gl.constexpr = v_desc.dtype != gl.float8e4nv
    PARTS: gl.constexpr = v_desc.block_shape[-1 if WIDE else 0] // WIDTH
    cfg = Config(TILE_N, WIDTH, CONSUMERS, PINGPONG, DYNAMIC, False, "always", 0, False, 0,
                 16 if WIDE else 8, 8)  # fmt: skip
    shape = Shape(cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k, total_q, total_k,
                  num_heads, group_size, left, right, PACKED, HAS_LEFT, HAS_RIGHT)  # fmt: skip
    none = counter
    blocks = Blocks(none, none, none, none, none, none, batch, batch, False)
    pages = make_pages(none, none, batch, batch, batch, batch, batch, 0, TILE_N)
    order = Order(tiles_m, section, num_tiles, HAS_RIGHT)
    job = Job(shape, blocks, pages, order, Scale(scale_log2, scale_log2, False), cfg, batch)
    narrow = Narrow(q_scales, kv_scales, k_tokens, blocks_q, blocks_k, INTS, WIDE)
    q = make_ring(q_desc, Q_STAGES * CONSUMERS, 1)
    k = make_ring(k_desc, STAGES, CONSUMERS, 1, NUMBERED)
    v = make_ring(v_desc, STAGES, CONSUMERS)
    pipes = Pipes(q, k, v, make_tickets(CONSUMERS, job.WORDS), make_baton(CONSUMERS))
    slots = q.slots
    if STAGED:
        shape_out: gl.constexpr = [CONSUMERS] + out_ref.block_shape
        slots = gl.allocate_shared_memory(out_ref.dtype, shape_out, out_ref.layout)
    out = Out(out_ref, slots, q, lse_ptr, sinks_ptr, dim, room, HAS_SINKS, STAGED, False, False)
    loader = (q_desc, k_desc, v_desc, counter, pipes, job, narrow)
    follow()
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (out, pipes, job, narrow, 0, PARTS)),
            (consume, (out, pipes, job, narrow, 1, PARTS)),
            (produce, loader),
        ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (out, pipes, job, narrow, 0, PARTS)),
            (consume, (out, pipes, job, narrow, 1, PARTS)),
            (consume, (out, pipes, job, narrow, 2, PARTS)),
            (produce, loader),
        ], [4, 4, 1], [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    pipes.close()
