"""FlashAttention v3's forward in Gluon: one warp moves tiles by TMA, warpgroups of 64 queries do
the rest.

Each consumer overlaps the product Q K(j+1) with the softmax of tile j+1's predecessor and P(j)
V(j). Programs are persistent: the producer takes tickets (an atomic counter where tiles differ in
length) and runs ahead into the next tile while the consumers store the last.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate

from onchip.kernels.hopper.pipe import (
    Baton,
    Ring,
    Tickets,
    make_baton,
    make_ring,
    make_tickets,
    store_tile,
    store_wait,
    tensor_descriptor,
)
from onchip.kernels.hopper.schedule import Order, Shape, keys_of, visible

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)


@aggregate
class Pipes:
    """What producer and consumers share."""

    q: Ring
    k: Ring
    v: Ring
    tickets: Tickets
    baton: Baton

    @gluon.constexpr_function
    def __init__(self, q, k, v, tickets, baton):
        self.q = q
        self.k = k
        self.v = v
        self.tickets = tickets
        self.baton = baton


@aggregate
class Config:
    """How it is computed. k releases stand for v too: releasing key tile i says that value tile i -
    1 is free.
    """

    TILE_N: gl.constexpr
    CONSUMERS: gl.constexpr
    PINGPONG: gl.constexpr
    DYNAMIC: gl.constexpr
    OUT_IN_Q: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, TILE_N, CONSUMERS, PINGPONG, DYNAMIC, OUT_IN_Q):
        self.TILE_N = gl.constexpr(TILE_N)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.PINGPONG = gl.constexpr(PINGPONG)
        self.DYNAMIC = gl.constexpr(DYNAMIC)
        self.OUT_IN_Q = gl.constexpr(OUT_IN_Q)


@aggregate
class Scale:
    """scale_log2 turns scores into base-2 logits; with softcap, scores are first bent by softcap *
    tanh(x * inner).
    """

    scale_log2: gl.tensor
    inner: gl.tensor
    SOFTCAP: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, scale_log2, inner, SOFTCAP):
        self.scale_log2 = scale_log2
        self.inner = inner
        self.SOFTCAP = gl.constexpr(SOFTCAP)

    @gluon.jit
    def bend(self, s):
        """s, or tanh(s * inner) if softcap is on (its factor is inside scale_log2)."""
        if self.SOFTCAP:
            return 1.0 - 2.0 / (gl.exp2(s * self.inner) + 1.0)
        else:
            return s


@aggregate
class Job:
    shape: Shape
    order: Order
    scale: Scale
    cfg: Config

    @gluon.constexpr_function
    def __init__(self, shape, order, scale, cfg):
        self.shape = shape
        self.order = order
        self.scale = scale
        self.cfg = cfg


@aggregate
class Out:
    """Where results go: out by TMA through `slots`, lse directly; and the sinks that join at the
    end.
    """

    desc: tensor_descriptor
    slots: gl.shared_memory_descriptor
    lse: gl.tensor
    sinks: gl.tensor
    HEAD_DIM_V: gl.constexpr
    HAS_SINKS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, desc, slots, lse, sinks, HEAD_DIM_V, HAS_SINKS):
        self.desc = desc
        self.slots = slots
        self.lse = lse
        self.sinks = sinks
        self.HEAD_DIM_V = gl.constexpr(HEAD_DIM_V)
        self.HAS_SINKS = gl.constexpr(HAS_SINKS)


@gluon.jit
def produce(q_desc, k_desc, v_desc, counter, pipes, job):
    shape, order, cfg = job.shape, job.order, job.cfg
    ROWS: gl.constexpr = 64 * cfg.CONSUMERS
    i = 0  # key tiles loaded
    t = 0  # query tiles loaded
    given = 0
    ticket = gl.program_id(0)
    while ticket < order.num_tiles:
        if cfg.DYNAMIC:
            pipes.tickets.give(given, ticket)
            given += 1
        tile_m, plane = order.tile(ticket)
        batch = plane // shape.num_heads
        head = plane % shape.num_heads
        kv_head = head // shape.group_size
        q0, seqlen_q, k0, seqlen_k = shape.sequence(batch)
        row = tile_m * ROWS
        keys = keys_of(shape, row, ROWS, seqlen_q, seqlen_k, cfg.TILE_N)
        if row < seqlen_q:
            for j in range(keys.hi - keys.lo):
                col = (keys.hi - 1 - j) * cfg.TILE_N
                pipes.k.wait_empty(i)
                pipes.k.load(i, k_desc, shape.coord(batch, kv_head, k0, seqlen_k, col))
                if j == 0:
                    for c in gl.static_range(cfg.CONSUMERS):
                        filling = t * cfg.CONSUMERS + c
                        pipes.q.wait_empty(filling)
                        at = shape.coord(batch, head, q0, seqlen_q, row + 64 * c)
                        pipes.q.load(filling, q_desc, at)
                    t += 1
                pipes.k.wait_empty(i + 1)  # stands for v: see Config
                pipes.v.load(i, v_desc, shape.coord(batch, kv_head, k0, seqlen_k, col))
                i += 1
        if cfg.DYNAMIC:
            ticket = gl.atomic_add(counter, 1) + gl.num_programs(0)
        else:
            ticket += gl.num_programs(0)
    if cfg.DYNAMIC:
        pipes.tickets.give(given, ticket)


@gluon.jit
def softmax(s, m, scale, MASKED: gl.constexpr):
    """(p, row maximum, factor for what was folded before), in the units of s."""
    m_new = gl.maximum(m, gl.max(s, 1))
    pivot = m_new
    if MASKED:
        pivot = gl.where(m_new == float("-inf"), 0.0, m_new)  # rows that have seen nothing yet
    alpha = gl.exp2((m - pivot) * scale.scale_log2)
    p = gl.exp2(s * scale.scale_log2 - (pivot * scale.scale_log2)[:, None])
    return p, m_new, alpha


@gluon.jit
def fold_tile(pipes, job, q, p, acc, m, l, i, turn, row, n, seqlen_q, seqlen_k,
              MASKED: gl.constexpr, C: gl.constexpr, S: gl.constexpr, O: gl.constexpr):  # fmt: skip
    """Fold filling i, key tile n: its scores are computed while the values of filling i - 1 are
    added.
    """
    shape, scale, cfg = job.shape, job.scale, job.cfg
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O, k_width=2)
    zero = gl.zeros([64, cfg.TILE_N], gl.float32, S)
    pipes.k.wait_full(i)
    if cfg.PINGPONG:
        pipes.baton.take(C, turn)
    k = pipes.k.slot(i).permute((1, 0))
    s_next = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    pipes.v.wait_full(i - 1)
    acc_next = warpgroup_mma(p, pipes.v.slot(i - 1), acc, is_async=True)
    if cfg.PINGPONG:
        pipes.baton.pass_on(C)
    s = scale.bend(warpgroup_mma_wait(num_outstanding=1, deps=(s_next,)))
    if MASKED:
        s = visible(shape, s, row, n * cfg.TILE_N, seqlen_q, seqlen_k, S)
    p_wide, m, alpha = softmax(s, m, scale, MASKED)
    l = l * alpha + gl.sum(p_wide, 1)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc_next,))
    pipes.k.release(i)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]
    p = gl.convert_layout(p_wide.to(q.dtype), P)
    return p, acc, m, l


@gluon.jit
def skip(pipes, cfg, i, turn, count, C: gl.constexpr):
    """Let `count` key tiles pass that other consumers see and this one does not."""
    for _ in range(count):
        pipes.k.wait_full(i)
        if cfg.PINGPONG:
            pipes.baton.take(C, turn)
            pipes.baton.pass_on(C)
        pipes.k.release(i)
        i += 1
        turn += 1
    return i, turn


@gluon.jit
def consume(out, pipes, job, C: gl.constexpr):
    shape, order, scale, cfg = job.shape, job.order, job.scale, job.cfg
    HEAD_DIM_V: gl.constexpr = out.HEAD_DIM_V
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cfg.TILE_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM_V, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O, k_width=2)
    ROWS: gl.constexpr = 64 * cfg.CONSUMERS
    CUTS: gl.constexpr = (
        ROWS + cfg.TILE_N - 2
    ) // cfg.TILE_N + 1  # key tiles that one edge can cut
    i = 0  # key tiles seen
    t = 0  # query tiles seen
    turn = 0
    taken = 0
    ticket = gl.program_id(0)
    if cfg.DYNAMIC:
        ticket = pipes.tickets.take(taken)
    while ticket < order.num_tiles:
        tile_m, plane = order.tile(ticket)
        batch = plane // shape.num_heads
        head = plane % shape.num_heads
        q0, seqlen_q, k0, seqlen_k = shape.sequence(batch)
        first = tile_m * ROWS
        row = first + 64 * C
        if first < seqlen_q:
            keys = keys_of(shape, first, ROWS, seqlen_q, seqlen_k, cfg.TILE_N)
            mine = keys_of(shape, row, 64, seqlen_q, seqlen_k, cfg.TILE_N)
            acc = gl.zeros([64, HEAD_DIM_V], gl.float32, O)
            m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S))
            l = gl.zeros([64], gl.float32, gl.SliceLayout(1, S))
            filling = t * cfg.CONSUMERS + C
            if keys.hi > keys.lo:
                pipes.q.wait_full(filling)
                i, turn = skip(pipes, cfg, i, turn, keys.hi - mine.hi, C)
            if mine.hi > mine.lo:
                q = pipes.q.slot(filling)
                pipes.k.wait_full(i)
                if cfg.PINGPONG:
                    pipes.baton.take(C, turn)
                zero = gl.zeros([64, cfg.TILE_N], gl.float32, S)
                k = pipes.k.slot(i).permute((1, 0))
                s_next = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
                if cfg.PINGPONG:
                    pipes.baton.pass_on(C)
                turn += 1
                s = scale.bend(warpgroup_mma_wait(num_outstanding=0, deps=(s_next,)))
                pipes.k.release(i)
                i += 1
                s = visible(shape, s, row, (mine.hi - 1) * cfg.TILE_N, seqlen_q, seqlen_k, S)
                p_wide, m, alpha = softmax(s, m, scale, True)
                l = gl.sum(p_wide, 1)
                p = gl.convert_layout(p_wide.to(q.dtype), P)
                # Cut tiles are unrolled, not looped: p carried from loop to loop in 16 bits would
                # be repacked in every iteration (64 more instructions of 520).
                for x in gl.static_range(CUTS - 1 if shape.HAS_RIGHT else 0):  # cut by the diagonal
                    n = mine.hi - 2 - x
                    if n >= mine.full_hi:
                        p, acc, m, l = fold_tile(pipes, job, q, p, acc, m, l, i, turn, row, n,
                                                 seqlen_q, seqlen_k, True, C, S, O)  # fmt: skip
                        i += 1
                        turn += 1
                whole_hi = gl.minimum(mine.full_hi, mine.hi - 1)
                for n in range(whole_hi - 1, mine.full_lo - 1, -1):  # every key visible
                    p, acc, m, l = fold_tile(pipes, job, q, p, acc, m, l, i, turn, row, n,
                                             seqlen_q, seqlen_k, False, C, S, O)  # fmt: skip
                    i += 1
                    turn += 1
                if shape.HAS_LEFT:
                    for x in gl.static_range(CUTS):  # cut by the left side of the window
                        n = gl.minimum(mine.full_lo, whole_hi) - 1 - x
                        if n >= mine.lo:
                            p, acc, m, l = fold_tile(pipes, job, q, p, acc, m, l, i, turn, row, n,
                                                     seqlen_q, seqlen_k, True, C, S, O)  # fmt: skip
                            i += 1
                            turn += 1
                pipes.v.wait_full(i - 1)
                acc_next = warpgroup_mma(p, pipes.v.slot(i - 1), acc, is_async=True)
                acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc_next,))
            if keys.hi > keys.lo:
                i, turn = skip(pipes, cfg, i, turn, mine.lo - keys.lo, C)
                if not cfg.OUT_IN_Q:
                    pipes.q.release(filling)
            m_log2 = m * scale.scale_log2
            if out.HAS_SINKS:
                sink = gl.load(out.sinks + head).to(gl.float32) * LOG2E
                top = gl.maximum(m_log2, sink)
                shrink = gl.exp2(m_log2 - top)
                l = l * shrink + gl.exp2(sink - top)
                acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]
                m_log2 = top
            seen = l > 0.0
            inverse = gl.where(seen, 1.0 / l, 0.0)
            lse = gl.where(seen, (m_log2 + gl.log2(l)) * LN2, float("-inf"))
            acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, O))[:, None]
            at = shape.coord(batch, head, q0, seqlen_q, row)
            store_tile(out.desc, at, out.slots.index(C), acc.to(out.desc.dtype))
            rows = row + gl.arange(0, 64, gl.SliceLayout(1, S))
            base = (
                (head.to(gl.int64) * shape.total_q + q0)
                if shape.PACKED
                else plane.to(gl.int64) * seqlen_q
            )
            gl.store(out.lse + base + rows, lse, mask=rows < seqlen_q)
            if keys.hi > keys.lo:
                if cfg.OUT_IN_Q:
                    store_wait(0)
                    pipes.q.release(filling)
                t += 1
        if cfg.DYNAMIC:
            taken += 1
            ticket = pipes.tickets.take(taken)
        else:
            ticket += gl.num_programs(0)
    store_wait(0)


# Lengths must not be specialised, or 200 lengths would be 200 compilations; and a specialised 1
# would not be a tensor.
_RUNTIME = [
    "seqlen_q", "seqlen_k", "total_q", "total_k", "num_heads", "group_size", "left", "right",
    "tiles_m", "section", "num_tiles",
]  # fmt: skip


@gluon.jit(do_not_specialize=_RUNTIME)
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, sinks_ptr, cu_seqlens_q, cu_seqlens_k, counter,
    seqlen_q, seqlen_k, total_q, total_k, num_heads, group_size, left, right,
    tiles_m, section, num_tiles, scale_log2, inner,
    HEAD_DIM_V: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_SINKS: gl.constexpr, SOFTCAP: gl.constexpr,
    TILE_N: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, PINGPONG: gl.constexpr,
    DYNAMIC: gl.constexpr, OUT_IN_Q: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    cfg = Config(TILE_N, CONSUMERS, PINGPONG, DYNAMIC, OUT_IN_Q)
    shape = Shape(cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k, total_q, total_k,
                  num_heads, group_size, left, right, PACKED, HAS_LEFT, HAS_RIGHT)  # fmt: skip
    order = Order(tiles_m, section, num_tiles, HAS_RIGHT)
    scale = Scale(scale_log2, inner, SOFTCAP)
    q = make_ring(q_desc, CONSUMERS, 1)
    k = make_ring(k_desc, STAGES, CONSUMERS)
    v = make_ring(v_desc, STAGES, CONSUMERS)
    pipes = Pipes(q, k, v, make_tickets(CONSUMERS), make_baton(CONSUMERS))
    o_slots = q.slots
    if not OUT_IN_Q:
        o_slots = gl.allocate_shared_memory(
            o_desc.dtype, [CONSUMERS] + o_desc.block_shape, o_desc.layout
        )
    out = Out(o_desc, o_slots, lse_ptr, sinks_ptr, HEAD_DIM_V, HAS_SINKS)
    job = Job(shape, order, scale, cfg)
    loader = (q_desc, k_desc, v_desc, counter, pipes, job)
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
