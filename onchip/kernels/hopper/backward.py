"""FlashAttention's backward on Hopper in Gluon: a program owns a tile of keys and walks over the
queries that see it.

Two consumer warpgroups own half of the keys each. Scores are transposed, (keys, queries), so that p
and ds are the left operands of dv += p dout and dk += ds q in the registers they were computed in.
ds also meets in shared memory, where each consumer reads all of it for its part of dq = ds k; that
part leaves by bulk reduce-add into an fp32 accumulator (see launch_backward.finish_kernel).

Tensor cores are kept busy across tiles: scores of tile i + 1 are computed before dq and dk of tile
i, so that its exponentials hide under them; v dout of tile i + 1 follows, and hides the leaving dq.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate

from onchip.kernels.hopper.pipe import (
    Exchange,
    Rider,
    Ring,
    Tickets,
    follow,
    make_exchange,
    make_rider,
    make_ring,
    make_tickets,
    reinterpret,
    store_halves,
    store_tile,
    store_wait,
    tensor_descriptor,
)
from onchip.kernels.hopper.schedule import (
    Blocks,
    Entries,
    Order,
    Shape,
    block_tiles,
    hide_transposed,
    keys_of,
    next_ticket,
    padded_tile,
    visible,
)
from onchip.kernels.hopper.softmax import Scale


@aggregate
class Pipes:
    """What producer and consumers share. Releasing q stands for rows and dout, k for v."""

    q: Ring
    rows: Rider
    dout: Ring
    k: Ring
    v: Ring
    ds: Exchange
    tickets: Tickets

    @gluon.constexpr_function
    def __init__(self, q, rows, dout, k, v, ds, tickets):
        self.q = q
        self.rows = rows
        self.dout = dout
        self.k = k
        self.v = v
        self.ds = ds
        self.tickets = tickets

    @gluon.jit
    def close(self):
        self.q.close()
        self.dout.close()
        self.k.close()
        self.v.close()
        self.ds.close()
        self.tickets.close()


@aggregate
class Config:
    """DQ: dq is computed, too. ADD: dk and dv are added to what is there. S is the layout of scores
    (64 keys, 64 queries) and of a part of dq (64 queries, 64), G that of dk and dv (64 keys,
    WIDTH), A that of p and ds on the left of their products.
    """

    TILE_M: gl.constexpr
    TILE_N: gl.constexpr
    WIDTH: gl.constexpr
    DYNAMIC: gl.constexpr
    DQ: gl.constexpr
    ADD: gl.constexpr
    S: gl.constexpr
    G: gl.constexpr
    A: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, TILE_M, TILE_N, WIDTH, DYNAMIC, DQ, ADD):
        wide = lambda n: gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])
        self.TILE_M = gl.constexpr(TILE_M)
        self.TILE_N = gl.constexpr(TILE_N)
        self.WIDTH = gl.constexpr(WIDTH)
        self.DYNAMIC = gl.constexpr(DYNAMIC)
        self.DQ = gl.constexpr(DQ)
        self.ADD = gl.constexpr(ADD)
        self.S = gl.constexpr(wide(64))
        self.G = gl.constexpr(wide(WIDTH))
        self.A = gl.constexpr(gl.DotOperandLayout(0, wide(WIDTH), 2))


@aggregate
class Job:
    """`mirror` is the shape of the transposed problem: keys ask which queries see them."""

    shape: Shape
    mirror: Shape
    blocks: Blocks
    order: Order
    scale: Scale
    softmax_scale: gl.tensor
    num_sequences: gl.tensor
    cfg: Config

    @gluon.constexpr_function
    def __init__(self, shape, mirror, blocks, order, scale, softmax_scale, num_sequences, cfg):
        self.shape = shape
        self.mirror = mirror
        self.blocks = blocks
        self.order = order
        self.scale = scale
        self.softmax_scale = softmax_scale
        self.num_sequences = num_sequences
        self.cfg = cfg

    @gluon.jit
    def place(self, ticket):
        """(batch, kv_head, first key) of a ticket: the first keys, which causal rows see most of,
        come first.
        """
        tile, plane = self.order.tile(ticket)
        kv_heads = self.shape.num_heads // self.shape.group_size
        tile_n = self.order.tiles_m - 1 - tile
        return plane // kv_heads, plane % kv_heads, tile_n * self.cfg.TILE_N

    @gluon.jit
    def padded_tile(self, batch, head, q0):
        """Number of the first tile of queries in rows (lse and delta) and in the accumulator."""
        shape = self.shape
        return padded_tile(shape, shape.total_q, self.num_sequences, batch, head, q0,
                           shape.seqlen_q, self.cfg.TILE_M)  # fmt: skip


@aggregate
class Out:
    """Where gradients go; `slots` is one consumer's shared memory for each."""

    dq: tensor_descriptor
    dk: tensor_descriptor
    dv: tensor_descriptor
    slots: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, dq, dk, dv, slots):
        self.dq = dq
        self.dk = dk
        self.dv = dv
        self.slots = slots


@aggregate
class Walk:
    """The tiles of queries that see a tile of keys: first the `masked` ones, cut by the band or by
    an end, then the whole ones; or as a mask lists them.
    """

    lo: gl.tensor
    full_lo: gl.tensor
    full_hi: gl.tensor
    masked: gl.tensor
    count: gl.tensor
    entries: Entries

    @gluon.constexpr_function
    def __init__(self, lo, full_lo, full_hi, masked, count, entries):
        self.lo = lo
        self.full_lo = full_lo
        self.full_hi = full_hi
        self.masked = masked
        self.count = count
        self.entries = entries

    @gluon.jit
    def tile(self, job, j):
        """(the tile of queries visited j-th: lo ... full_lo, full_hi ... hi, full_lo ... full_hi;
        its bit tile or -1).
        """
        if job.blocks.ON:
            return job.blocks.tile(self.entries, j, job.cfg.TILE_M)
        else:
            before = self.full_lo - self.lo
            cut = gl.where(j < before, self.lo + j, self.full_hi + j - before)
            return gl.where(j < self.masked, cut, self.full_lo + j - self.masked), self.lo * 0 - 1


@gluon.jit
def walk_of(job, batch, head, col, seqlen_q, seqlen_k):
    """The Walk of the queries of one head over the keys from `col` on."""
    TILE_N: gl.constexpr = job.cfg.TILE_N
    seen = keys_of(job.mirror, col, TILE_N, seqlen_k, seqlen_q, job.cfg.TILE_M)
    # keys past the end are zeros, but exp(0 - lse) may be infinite: mask all tiles of such keys
    inside = col + TILE_N <= seqlen_k
    full_hi = gl.where(inside, seen.full_hi, seen.lo)
    full_lo = gl.where(inside, seen.full_lo, seen.lo)
    count = seen.hi - seen.lo
    entries = Entries(count, count, count, count)
    if job.blocks.ON:
        entries = job.blocks.entries(batch, head, col // 128)
        count = block_tiles(entries, job.cfg.TILE_M)
    return Walk(seen.lo, full_lo, full_hi, count - (full_hi - full_lo), count, entries)


@aggregate
class Place:
    """One head's queries against one consumer's keys, the first of which is `col`."""

    walk: Walk
    col: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    first_tile: gl.tensor

    @gluon.constexpr_function
    def __init__(self, walk, col, seqlen_q, seqlen_k, first_tile):
        self.walk = walk
        self.col = col
        self.seqlen_q = seqlen_q
        self.seqlen_k = seqlen_k
        self.first_tile = first_tile


@gluon.jit
def load_keys(pipes, t, k_desc, v_desc, at):
    pipes.k.wait_empty(t)
    pipes.k.load(t, k_desc, at)
    pipes.v.load(t, v_desc, at)


@gluon.jit
def produce(q_desc, rows_desc, dout_desc, k_desc, v_desc, counter, pipes, job):
    shape, cfg = job.shape, job.cfg
    AHEAD: gl.constexpr = pipes.q.num_stages - pipes.dout.num_stages
    i = 0  # query tiles loaded
    t = 0  # key tiles loaded
    given = 0
    ticket = gl.program_id(0)
    while ticket < job.order.num_tiles:
        if cfg.DYNAMIC:
            pipes.tickets.give(given, (ticket,))
            given += 1
        batch, kv_head, col = job.place(ticket)
        q0, seqlen_q, k0, seqlen_k = shape.sequence(batch)
        keys_at = shape.coord(batch, kv_head, k0, seqlen_k, col)
        walk = walk_of(job, batch, kv_head * shape.group_size, col, seqlen_q, seqlen_k)
        if (col < seqlen_k) & (job.blocks.ON | (walk.count > 0)):
            if job.blocks.ON:
                load_keys(pipes, t, k_desc, v_desc, keys_at)
            for g in range(shape.group_size):
                head = kv_head * shape.group_size + g
                if job.blocks.ON:
                    walk = walk_of(job, batch, head, col, seqlen_q, seqlen_k)
                first_tile = job.padded_tile(batch, head, q0)
                for j in range(walk.count):
                    tile, _ = walk.tile(job, j)
                    at = shape.coord(batch, head, q0, seqlen_q, tile * cfg.TILE_M)
                    pipes.q.wait_empty(i)
                    rows_at = [(first_tile + tile) * (2 * cfg.TILE_M)]
                    pipes.q.load_with(i, q_desc, at, pipes.rows, rows_desc, rows_at)
                    if not job.blocks.ON and g + j == 0:
                        load_keys(pipes, t, k_desc, v_desc, keys_at)
                    pipes.q.wait_empty(i + AHEAD)  # stands for dout: see Pipes
                    pipes.dout.load(i, dout_desc, at)
                    i += 1
            t += 1
        ticket = next_ticket(counter, ticket, job.order.num_tiles, cfg.DYNAMIC)
    if cfg.DYNAMIC:
        pipes.tickets.give(given, (ticket,))


@gluon.jit
def score(pipes, i, SUB: gl.constexpr, C: gl.constexpr, dead):
    """Start k q of 64 queries of filling i, transposed, in the registers of `dead`."""
    k = pipes.k.steady_slot(0, i).slice(C * 64, 64, 0)
    q = pipes.q.slot(i).slice(SUB * 64, 64, 0)
    return warpgroup_mma(k, q.permute((1, 0)), dead, use_acc=False, is_async=True)


@gluon.jit
def value_score(pipes, i, SUB: gl.constexpr, C: gl.constexpr, dead):
    """Start v dout of 64 queries of filling i, transposed, in the registers of `dead`."""
    v = pipes.v.steady_slot(0, i).slice(C * 64, 64, 0)
    dout = pipes.dout.slot(i).slice(SUB * 64, 64, 0)
    return warpgroup_mma(v, dout.permute((1, 0)), dead, use_acc=False, is_async=True)


@gluon.jit
def query_part(pipes, job, i, C: gl.constexpr, dead):
    """Start this consumer's 64 x 64 of dq = ds k, in the registers of `dead`: half of the columns
    of 64 queries, or half of 128 queries.
    """
    k = pipes.k.steady_slot(0, i)
    ds = pipes.ds.take(i)
    if job.cfg.TILE_M == 64:
        k = k.slice(C * 64, 64, 1)
    else:
        ds = ds.slice(C * 64, 64, 1)
    return warpgroup_mma(ds.permute((1, 0)), k, dead, use_acc=False, is_async=True)


@gluon.jit
def fragments(dq):
    """dq (64, 64) as (128, 32) in the order registers hold it: 16 bytes of each lane of a warp
    beside each other, so that shared memory is written without conflicts. Inverse:
    launch_backward.finish_kernel.
    """
    split = dq.reshape([4, 2, 8, 8, 4, 2])  # warp, half, lane // 4 | register, lane % 4, pair
    return split.permute((0, 3, 2, 4, 1, 5)).reshape([128, 32])


@gluon.jit
def row_numbers(pipes, job, i, SUB: gl.constexpr, WHICH: gl.constexpr):
    """lse (0) or delta (1) of 64 queries of filling i, along the columns of transposed scores."""
    cfg = job.cfg
    rows = pipes.rows.slot(i).slice(WHICH * cfg.TILE_M + SUB * 64, 64, 0)
    return rows.load(gl.SliceLayout(0, cfg.S))[None, :]


@gluon.jit
def probabilities(pipes, job, s, i, SUB: gl.constexpr):
    return gl.exp2(s * job.scale.scale_log2 - row_numbers(pipes, job, i, SUB, 0))


@gluon.jit
def masked(job, place, s, row):
    """s of the 64 queries from `row` on with -inf outside the band and past both ends."""
    S: gl.constexpr = job.cfg.S
    s = visible(job.mirror, s, place.col, row, place.seqlen_k, place.seqlen_q, S)
    keys = place.col + gl.arange(0, 64, gl.SliceLayout(1, S))
    return gl.where((keys < place.seqlen_k)[:, None], s, float("-inf"))


@gluon.jit
def carried(pipes, job, place, s, i, tile, bits, SUB: gl.constexpr, MASKED: gl.constexpr):
    """What of the scores is carried on to the gradients: p, or with a softcap the bent scores that
    both p and the slope of the bend follow from.
    """
    s = job.scale.apply_softcap(s)
    row = tile * job.cfg.TILE_M + SUB * 64
    if job.blocks.ON:
        cut = (bits >= 0) | (row + 64 > place.seqlen_q) | (place.col + 64 > place.seqlen_k)
        if job.shape.HAS_LEFT or job.shape.HAS_RIGHT:
            cut = cut | (row >= 0)
        if cut:
            s = masked(job, place, s, row)
            s = hide_transposed(job.blocks, s, bits, place.col, row, job.cfg.S)
    elif MASKED:
        s = masked(job, place, s, row)
    if job.scale.SOFTCAP:
        return s
    else:
        return probabilities(pipes, job, s, i, SUB)


@gluon.jit
def step(out, pipes, job, place, c, dp_next, dk, dv, i, tile, next_tile, next_bits,
         SUB: gl.constexpr, MASKED: gl.constexpr, LAST: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Add 64 queries of filling i to dk, dv and dq, and start the next 64 unless LAST. c is
    `carried`, dp_next the running product v dout of these queries.

    Products run in the order dv, dq, dk, next scores, next v dout: the first hides ds, the third
    the leaving dq, the last the exponentials. Where each result lies in registers is chosen
    (`dead`): left to itself the compiler finds other places, and spills.
    """
    cfg = job.cfg
    dtype: gl.constexpr = pipes.q.slots.dtype
    FINAL: gl.constexpr = SUB == cfg.TILE_M // 64 - 1  # the filling is used up, and its dq complete
    NEXT: gl.constexpr = 0 if FINAL else SUB + 1
    SENDS: gl.constexpr = FINAL and cfg.DQ
    QUERIES: gl.constexpr = 1 if SENDS else 0  # products of dq in flight
    p = c
    if job.scale.SOFTCAP:
        p = probabilities(pipes, job, c, i, SUB)
    p_left = gl.convert_layout(p.to(dtype), cfg.A)
    dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp_next,))
    dout = pipes.dout.slot(i).slice(SUB * 64, 64, 0)
    dv_next = warpgroup_mma(p_left, dout, dv, is_async=True)
    ds = p * (dp - row_numbers(pipes, job, i, SUB, 1))
    if job.scale.SOFTCAP:
        bent = gl.maximum(c, -1.0)  # -inf where hidden
        ds = ds * (1.0 - bent * bent)
    ds = ds.to(dtype)
    if cfg.DQ:
        pipes.ds.put(i, C * 64, SUB * 64, ds)
    if SENDS:
        dq_next = query_part(pipes, job, i, C, dp)
    ds_left = gl.convert_layout(ds, cfg.A)
    q = pipes.q.slot(i).slice(SUB * 64, 64, 0)
    dk_next = warpgroup_mma(ds_left, q, dk, is_async=True)
    dv = warpgroup_mma_wait(num_outstanding=QUERIES + 1, deps=(dv_next,))
    j = i + 1 if FINAL else i
    if not LAST:
        if FINAL:
            pipes.q.wait_full(j)
        zero = gl.zeros([64, 64], gl.float32, cfg.S)
        s_next = score(pipes, j, NEXT, C, zero)
    dead = dp
    if SENDS:
        dead = warpgroup_mma_wait(num_outstanding=1 if LAST else 2, deps=(dq_next,))
        parts: gl.constexpr = cfg.TILE_M * cfg.WIDTH // 4096
        at = ((place.first_tile + tile) * parts + C) * 128
        store_tile(out.dq, [at, 0], out.slots.index(C), fragments(dead), ADD=True)
    if LAST:
        dk = warpgroup_mma_wait(num_outstanding=0, deps=(dk_next,))
    else:
        if FINAL:
            pipes.dout.wait_full(j)
        dp_next = value_score(pipes, j, NEXT, C, dead)
        dk, s = warpgroup_mma_wait(num_outstanding=1, deps=(dk_next, s_next))
    if FINAL:
        pipes.q.release(i)
    if not LAST:
        c = carried(pipes, job, place, s, j, next_tile, next_bits, NEXT, MASKED)
    return c, dp_next, dk, dv


@gluon.jit
def fold_head(out, pipes, job, place, dk, dv, i, C: gl.constexpr):
    """Add all queries of one head that see these keys: fillings i ... i + walk.count."""
    walk, cfg = place.walk, job.cfg
    END: gl.constexpr = cfg.TILE_M // 64 - 1
    tile, bits = walk.tile(job, 0)
    zero = gl.zeros([64, 64], gl.float32, cfg.S)
    pipes.q.wait_full(i)
    s_next = score(pipes, i, 0, C, zero)
    pipes.dout.wait_full(i)
    dp_next = value_score(pipes, i, 0, C, zero)
    s = warpgroup_mma_wait(num_outstanding=1, deps=(s_next,))
    c = carried(pipes, job, place, s, i, tile, bits, 0, True)
    for u in gl.static_range(END):
        c, dp_next, dk, dv = step(out, pipes, job, place, c, dp_next, dk, dv, i, tile, tile, bits,
                                  u, True, False, C)  # fmt: skip
    whole = 1
    if not job.blocks.ON:
        whole = gl.maximum(walk.masked, 1)
        for j in range(1, walk.masked):  # next come tiles cut by the diagonal, the window, an end
            after, bits = walk.tile(job, j)
            c, dp_next, dk, dv = step(out, pipes, job, place, c, dp_next, dk, dv, i, tile, after,
                                      bits, END, True, False, C)  # fmt: skip
            tile = after
            i += 1
            for u in gl.static_range(END):
                c, dp_next, dk, dv = step(out, pipes, job, place, c, dp_next, dk, dv, i, tile, tile,
                                          bits, u, True, False, C)  # fmt: skip
    for j in range(whole, walk.count):  # next come whole tiles, or those that a mask lists
        after, bits = walk.tile(job, j)
        c, dp_next, dk, dv = step(out, pipes, job, place, c, dp_next, dk, dv, i, tile, after, bits,
                                  END, False, False, C)  # fmt: skip
        tile = after
        i += 1
        for u in gl.static_range(END):
            c, dp_next, dk, dv = step(out, pipes, job, place, c, dp_next, dk, dv, i, tile, tile,
                                      bits, u, False, False, C)  # fmt: skip
    c, dp_next, dk, dv = step(out, pipes, job, place, c, dp_next, dk, dv, i, tile, tile, bits,
                              END, False, True, C)  # fmt: skip
    return dk, dv, i + 1


@gluon.jit
def store_keys(desc, at, slot, value, ADD: gl.constexpr):
    """64 keys of dk or dv, through the shared memory of dq; in halves if unrounded."""
    if desc.dtype == gl.float32:
        store_halves(desc, at, slot, value, ADD)
    else:
        store_tile(desc, at, reinterpret(slot, desc), value.to(desc.dtype))


@gluon.jit
def consume(out, pipes, job, C: gl.constexpr):
    shape, cfg = job.shape, job.cfg
    i = 0  # query tiles seen
    t = 0  # key tiles seen
    taken = 0
    ticket = gl.program_id(0)
    if cfg.DYNAMIC:
        (ticket,) = pipes.tickets.take(taken)
    while ticket < job.order.num_tiles:
        batch, kv_head, first = job.place(ticket)
        q0, seqlen_q, k0, seqlen_k = shape.sequence(batch)
        if first < seqlen_k:
            col = first + 64 * C
            walk = walk_of(job, batch, kv_head * shape.group_size, first, seqlen_q, seqlen_k)
            dk = gl.zeros([64, cfg.WIDTH], gl.float32, cfg.G)
            dv = gl.zeros([64, cfg.WIDTH], gl.float32, cfg.G)
            if job.blocks.ON | (walk.count > 0):
                pipes.k.wait_full(t)
                pipes.v.wait_full(t)
                for g in range(shape.group_size):
                    head = kv_head * shape.group_size + g
                    if job.blocks.ON:
                        walk = walk_of(job, batch, head, first, seqlen_q, seqlen_k)
                    first_tile = job.padded_tile(batch, head, q0)
                    place = Place(walk, col, seqlen_q, seqlen_k, first_tile)
                    if walk.count > 0:
                        dk, dv, i = fold_head(out, pipes, job, place, dk, dv, i, C)
                pipes.k.release(t)
                t += 1
            at = shape.coord(batch, kv_head, k0, seqlen_k, col)
            store_keys(out.dv, at, out.slots.index(C), dv, cfg.ADD)
            store_keys(out.dk, at, out.slots.index(C), dk * job.softmax_scale, cfg.ADD)
        if cfg.DYNAMIC:
            taken += 1
            (ticket,) = pipes.tickets.take(taken)
        else:
            ticket += gl.num_programs(0)
    store_wait(0)


_RUNTIME = [
    "seqlen_q", "seqlen_k", "total_q", "total_k", "num_heads", "group_size", "left", "right",
    "mask_b", "mask_h", "tiles_n", "section", "num_tiles", "num_sequences",
]  # fmt: skip


@gluon.jit(do_not_specialize=_RUNTIME)
def backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, rows_desc, dq_desc, dk_desc, dv_desc,
    cu_seqlens_q, cu_seqlens_k, counter,
    full_offsets, full_indices, partial_offsets, partial_indices, partial_tiles, tiles,
    seqlen_q, seqlen_k, total_q, total_k, num_heads, group_size, left, right, mask_b, mask_h,
    tiles_n, section, num_tiles, num_sequences, scale_log2, inner, softmax_scale,
    WIDTH: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_MASK: gl.constexpr, SOFTCAP: gl.constexpr, DYNAMIC: gl.constexpr, DQ: gl.constexpr,
    ADD: gl.constexpr,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, Q_STAGES: gl.constexpr, DOUT_STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    cfg = Config(TILE_M, TILE_N, WIDTH, DYNAMIC, DQ, ADD)
    shape = Shape(cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k, total_q, total_k,
                  num_heads, group_size, left, right, PACKED, HAS_LEFT, HAS_RIGHT)  # fmt: skip
    mirror = Shape(cu_seqlens_k, cu_seqlens_q, seqlen_k, seqlen_q, total_k, total_q,
                   num_heads, group_size, right, left, PACKED, HAS_RIGHT, HAS_LEFT)  # fmt: skip
    blocks = Blocks(full_offsets, full_indices, partial_offsets, partial_indices, partial_tiles,
                    tiles, mask_b, mask_h, HAS_MASK)  # fmt: skip
    order = Order(tiles_n, section, num_tiles, HAS_RIGHT)
    scale = Scale(scale_log2, inner, SOFTCAP)
    job = Job(shape, mirror, blocks, order, scale, softmax_scale, num_sequences, cfg)
    pipes = Pipes(
        make_ring(q_desc, Q_STAGES, 2),
        make_rider(rows_desc, Q_STAGES),
        make_ring(dout_desc, DOUT_STAGES, 2),
        make_ring(k_desc, 1, 2),
        make_ring(v_desc, 1, 2),
        make_exchange(q_desc.dtype, TILE_N, TILE_M, 2),
        make_tickets(2, 1),
    )
    slots = gl.allocate_shared_memory(dq_desc.dtype, [2] + dq_desc.block_shape, dq_desc.layout)
    out = Out(dq_desc, dk_desc, dv_desc, slots)
    follow()
    gl.warp_specialize([
        (consume, (out, pipes, job, 0)),
        (consume, (out, pipes, job, 1)),
        (produce, (q_desc, rows_desc, dout_desc, k_desc, v_desc, counter, pipes, job)),
    ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    pipes.close()
