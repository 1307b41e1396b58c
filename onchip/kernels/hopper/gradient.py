"""The gradient of one operand at a time on Hopper: a program owns a tile of queries (dq) or of keys
(dk, dv) and walks over the other side, so that every sum has one owner and one order.

Seven or eight products instead of backward.py's five, but nothing is added in memory: this is the
deterministic backward, and the only one at head_dim 256, where dk and dv of a tile together do not
fit the registers.

`own` is the side whose gradient is computed: 64 rows of it per consumer stay in shared memory, a0
(q or k) and a1 (dout or v); b0 (k or q) and b1 (v or dout) stream by. Scores are (own, other):
  dq += ds k    from s = q k,  dp = dout v      a0, a1 = q, dout    b0, b1 = k, v
  dk += ds q    from s = k q,  dp = v dout      a0, a1 = k, v       b0, b1 = q, dout
  dv += p dout  from s = k q                    a0 = k              b0, b1 = q, dout
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.language.core import _aggregate as aggregate

from onchip.kernels.hopper.pipe import (
    Rider,
    Ring,
    Tickets,
    follow,
    make_rider,
    make_ring,
    make_tickets,
    store_halves,
    store_tile,
    store_wait,
)
from onchip.kernels.hopper.schedule import (
    Blocks,
    Entries,
    Order,
    Shape,
    bit_words,
    block_tiles,
    hide,
    hide_transposed,
    keys_of,
    next_ticket,
    padded_tile,
    visible,
)
from onchip.kernels.hopper.softmax import Scale


@aggregate
class Pipes:
    """What producer and consumers share. rows (lse and delta of streamed queries) ride with b0."""

    a0: Ring
    a1: Ring
    b0: Ring
    b1: Ring
    rows: Rider
    tickets: Tickets

    @gluon.constexpr_function
    def __init__(self, a0, a1, b0, b1, rows, tickets):
        self.a0 = a0
        self.a1 = a1
        self.b0 = b0
        self.b1 = b1
        self.rows = rows
        self.tickets = tickets

    @gluon.jit
    def close(self):
        self.a0.close()
        self.b0.close()
        self.b1.close()
        self.tickets.close()


@aggregate
class Config:
    """KEYS: keys own the tile. VALUES: dv. HELD: a0 and a1 are kept in registers, too. S is the
    layout of scores (64, TILE), G of the gradient (64, WIDTH), A of ds or p on the left of its
    product, H of a0 and a1 on the left of theirs.
    """

    TILE: gl.constexpr
    WIDTH: gl.constexpr
    KEYS: gl.constexpr
    VALUES: gl.constexpr
    HELD: gl.constexpr
    DYNAMIC: gl.constexpr
    S: gl.constexpr
    G: gl.constexpr
    A: gl.constexpr
    H: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, TILE, WIDTH, KEYS, VALUES, HELD, DYNAMIC):
        wide = lambda n: gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])
        self.TILE = gl.constexpr(TILE)
        self.WIDTH = gl.constexpr(WIDTH)
        self.KEYS = gl.constexpr(KEYS)
        self.VALUES = gl.constexpr(VALUES)
        self.HELD = gl.constexpr(HELD)
        self.DYNAMIC = gl.constexpr(DYNAMIC)
        self.S = gl.constexpr(wide(TILE))
        self.G = gl.constexpr(wide(WIDTH))
        self.A = gl.constexpr(gl.DotOperandLayout(0, wide(WIDTH), 2))
        self.H = gl.constexpr(gl.DotOperandLayout(0, wide(TILE), 2))


@aggregate
class Place:
    """Rows of one head from `row` of their sequence on, first of all in the tensor `start`; the
    other side's sequence begins at `start_other`.
    """

    batch: gl.tensor
    head: gl.tensor
    row: gl.tensor
    start: gl.tensor
    length: gl.tensor
    start_other: gl.tensor
    length_other: gl.tensor

    @gluon.constexpr_function
    def __init__(self, batch, head, row, start, length, start_other, length_other):
        self.batch = batch
        self.head = head
        self.row = row
        self.start = start
        self.length = length
        self.start_other = start_other
        self.length_other = length_other


@aggregate
class Job:
    """`shape` is that of the call if queries own the tiles, else its mirror image."""

    shape: Shape
    blocks: Blocks
    order: Order
    scale: Scale
    factor: gl.tensor
    rows: gl.tensor
    num_sequences: gl.tensor
    cfg: Config

    @gluon.constexpr_function
    def __init__(self, shape, blocks, order, scale, factor, rows, num_sequences, cfg):
        self.shape = shape
        self.blocks = blocks
        self.order = order
        self.scale = scale
        self.factor = factor
        self.rows = rows
        self.num_sequences = num_sequences
        self.cfg = cfg

    @gluon.jit
    def place(self, ticket, C: gl.constexpr):
        """The tile of a ticket, or from consumer C on."""
        shape = self.shape
        tile, plane = self.order.tile(ticket)
        heads = shape.num_heads
        if self.cfg.KEYS:
            heads = heads // shape.group_size
            tile = self.order.tiles_m - 1 - tile  # causal: the first keys are seen most
        batch = plane // heads
        start, length, start_other, length_other = shape.sequence(batch)
        return Place(batch, plane % heads, tile * 128 + 64 * C, start, length,
                     start_other, length_other)  # fmt: skip

    @gluon.jit
    def repeats(self):
        """How many heads of the other side meet one of the own."""
        return self.shape.group_size if self.cfg.KEYS else 1

    @gluon.jit
    def other_head(self, place, g):
        if self.cfg.KEYS:
            return place.head * self.shape.group_size + g
        else:
            return place.head // self.shape.group_size

    @gluon.jit
    def query_tile(self, place, g):
        """Number of the first tile of queries in the buffer of lse and delta."""
        shape, TILE = self.shape, self.cfg.TILE
        if self.cfg.KEYS:
            head = place.head * shape.group_size + g
            total, first, length = shape.total_k, place.start_other, place.length_other
        else:
            head, total, first, length = place.head, shape.total_q, place.start, place.length
        return padded_tile(shape, total, self.num_sequences, place.batch, head, first, length, TILE)


@aggregate
class Walk:
    """`count` tiles of the other side that 128 rows see: from `lo` on, or as a mask lists them.
    Those from full_lo up to full_hi are whole.
    """

    lo: gl.tensor
    full_lo: gl.tensor
    full_hi: gl.tensor
    count: gl.tensor

    @gluon.constexpr_function
    def __init__(self, lo, full_lo, full_hi, count):
        self.lo = lo
        self.full_lo = full_lo
        self.full_hi = full_hi
        self.count = count


@gluon.jit
def walk_of(job, place, head):
    """The Walk of the tile of 128 rows that a place lies in, and its block lists."""
    TILE: gl.constexpr = job.cfg.TILE
    first = place.row // 128 * 128
    keys = keys_of(job.shape, first, 128, place.length, place.length_other, TILE)
    count = keys.hi - keys.lo
    entries = Entries(count, count, count, count)
    if job.blocks.ON:
        entries = job.blocks.entries(place.batch, head, first // 128)
        count = block_tiles(entries, TILE)
    return Walk(keys.lo, keys.full_lo, keys.full_hi, count), entries


@gluon.jit
def tile_of(job, walk, entries, j):
    """(the tile visited j-th, its bit tile or -1)."""
    if job.blocks.ON:
        return job.blocks.tile(entries, j, job.cfg.TILE)
    else:
        return walk.lo + j, walk.lo * 0 - 1


@gluon.jit
def mask_head(job, place, g):
    """The head whose plane of the mask counts: that of the queries."""
    if job.cfg.KEYS:
        return job.other_head(place, g)
    else:
        return place.head


@gluon.jit
def produce(a0_desc, a1_desc, b0_desc, b1_desc, rows_desc, counter, pipes, job):
    shape, cfg = job.shape, job.cfg
    i = 0  # tiles of the other side loaded
    t = 0  # own tiles loaded
    given = 0
    ticket = gl.program_id(0)
    while ticket < job.order.num_tiles:
        if cfg.DYNAMIC:
            pipes.tickets.give(given, (ticket,))
            given += 1
        place = job.place(ticket, 0)
        if place.row < place.length:
            for c in gl.static_range(2):
                at = shape.coord(place.batch, place.head, place.start, place.length,
                                 place.row + 64 * c)  # fmt: skip
                pipes.a0.wait_empty(2 * t + c)
                pipes.a0.load(2 * t + c, a0_desc, at)
                if not cfg.VALUES:
                    pipes.a1.load(2 * t + c, a1_desc, at)
            t += 1
            for g in range(job.repeats()):
                walk, entries = walk_of(job, place, mask_head(job, place, g))
                first_tile = job.query_tile(place, g)
                head = job.other_head(place, g)
                for j in range(walk.count):
                    n, _ = tile_of(job, walk, entries, j)
                    at = shape.coord(place.batch, head, place.start_other, place.length_other,
                                     n * cfg.TILE)  # fmt: skip
                    pipes.b0.wait_empty(i)
                    if cfg.KEYS:
                        rows_at = [(first_tile + n) * (2 * cfg.TILE)]
                        pipes.b0.load_with(i, b0_desc, at, pipes.rows, rows_desc, rows_at)
                    else:
                        pipes.b0.load(i, b0_desc, at)
                    pipes.b1.wait_empty(i)
                    pipes.b1.load(i, b1_desc, at)
                    i += 1
        ticket = next_ticket(counter, ticket, job.order.num_tiles, cfg.DYNAMIC)
    if cfg.DYNAMIC:
        pipes.tickets.give(given, (ticket,))


@aggregate
class Rows:
    """lse (base 2) and delta of own queries; without a meaning if keys own the tile."""

    lse: gl.tensor
    delta: gl.tensor

    @gluon.constexpr_function
    def __init__(self, lse, delta):
        self.lse = lse
        self.delta = delta


@gluon.jit
def own_rows(job, place):
    cfg = job.cfg
    rows = place.row + gl.arange(0, 64, gl.SliceLayout(1, cfg.S))
    if cfg.KEYS:
        return Rows(rows, rows)
    else:
        tile = job.query_tile(place, 0) + rows // cfg.TILE
        at = job.rows + tile.to(gl.int64) * (2 * cfg.TILE) + rows % cfg.TILE
        inside = rows < place.length
        lse = gl.load(at, mask=inside, other=float("inf"))
        return Rows(lse, gl.load(at + cfg.TILE, mask=inside, other=0.0))


@gluon.jit
def numbers(pipes, cfg, own, i, WHICH: gl.constexpr):
    """lse (0) or delta (1) of the queries of filling i, or of the own, against scores."""
    if cfg.KEYS:
        streamed = pipes.rows.slot(i).slice(WHICH * cfg.TILE, cfg.TILE, 0)
        return streamed.load(gl.SliceLayout(0, cfg.S))[None, :]
    elif WHICH == 0:
        return own.lse[:, None]
    else:
        return own.delta[:, None]


@gluon.jit
def masked(job, place, walk, s, n, bits):
    """s with -inf where hidden. One branch in one loop: ds, carried in 16 bits from one loop to
    another, would be repacked in every iteration.
    """
    shape, blocks, cfg = job.shape, job.blocks, job.cfg
    col = n * cfg.TILE
    cut = col + cfg.TILE > place.length_other
    if blocks.ON:
        cut = cut | (bits >= 0)
        if shape.HAS_LEFT or shape.HAS_RIGHT:
            cut = cut | (col >= 0)
    else:
        cut = cut | (n < walk.full_lo) | (n >= walk.full_hi)
    if cut:
        if blocks.ON and not cfg.KEYS:
            words = bit_words(blocks.tiles, bits, place.row, col, cfg.TILE, cfg.S)
            s = hide(shape, s, words, place.row, col, place.length, place.length_other, cfg.S)
        else:
            s = visible(shape, s, place.row, col, place.length, place.length_other, cfg.S)
            if blocks.ON:
                s = hide_transposed(blocks, s, bits, place.row, col, cfg.S)
    return s


@gluon.jit
def probabilities(pipes, job, own, s, i):
    return gl.exp2(s * job.scale.scale_log2 - numbers(pipes, job.cfg, own, i, 0))


@gluon.jit
def product(ring, held, filling, b, i, cfg):
    """Start a b of 64 own rows against TILE of the other side; a lies in registers if HELD."""
    zero = gl.zeros([64, cfg.TILE], gl.float32, cfg.S)
    if cfg.HELD:
        return warpgroup_mma(held, b.permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        a = ring.steady_slot(filling, i)
        return warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def score_gradient(pipes, job, place, walk, own, s, dp_next, i, n, bits):
    """ds of filling i, ready for its product; dp_next is the last product in flight."""
    cfg = job.cfg
    t = masked(job, place, walk, job.scale.apply_softcap(s), n, bits)
    p = probabilities(pipes, job, own, t, i)
    dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp_next,))
    pipes.b1.release(i)
    ds = p * (dp - numbers(pipes, cfg, own, i, 1))
    if job.scale.SOFTCAP:
        bent = gl.maximum(t, -1.0)  # -inf where hidden
        ds = ds * (1.0 - bent * bent)
    return gl.convert_layout(ds.to(pipes.b0.slots.dtype), cfg.A)


@gluon.jit
def fold_scores(pipes, job, place, filling, a0, a1, own, acc, i, g):
    """acc + ds b0 over all tiles of one head of the other side: ds b0 of tile i - 1, then s and dp
    of tile i are in flight together; the exponentials run under dp.
    """
    cfg = job.cfg
    walk, entries = walk_of(job, place, mask_head(job, place, g))
    if walk.count > 0:
        n, bits = tile_of(job, walk, entries, 0)
        pipes.b0.wait_full(i)
        s_next = product(pipes.a0, a0, filling, pipes.b0.slot(i), i, cfg)
        pipes.b1.wait_full(i)
        dp_next = product(pipes.a1, a1, filling, pipes.b1.steady_slot(i, i), i, cfg)
        s = warpgroup_mma_wait(num_outstanding=1, deps=(s_next,))
        ds = score_gradient(pipes, job, place, walk, own, s, dp_next, i, n, bits)
        n, bits = tile_of(job, walk, entries, 1)
        for j in range(1, walk.count):
            n_next, bits_next = tile_of(job, walk, entries, j + 1)
            acc_next = warpgroup_mma(ds, pipes.b0.slot(i), acc, is_async=True)
            i += 1
            pipes.b0.wait_full(i)
            s_next = product(pipes.a0, a0, filling, pipes.b0.slot(i), i, cfg)
            pipes.b1.wait_full(i)
            dp_next = product(pipes.a1, a1, filling, pipes.b1.steady_slot(i, i), i, cfg)
            acc = warpgroup_mma_wait(num_outstanding=2, deps=(acc_next,))
            pipes.b0.release(i - 1)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s_next,))
            ds = score_gradient(pipes, job, place, walk, own, s, dp_next, i, n, bits)
            n = n_next
            bits = bits_next
        acc_next = warpgroup_mma(ds, pipes.b0.slot(i), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc_next,))
        pipes.b0.release(i)
        i += 1
    return acc, i


@gluon.jit
def fold_values(pipes, job, place, filling, own, acc, i, g):
    """acc + p b1 over all tiles of one head of the other side."""
    cfg = job.cfg
    walk, entries = walk_of(job, place, mask_head(job, place, g))
    if walk.count > 0:
        n, bits = tile_of(job, walk, entries, 0)
        pipes.b0.wait_full(i)
        s_next = product(pipes.a0, None, filling, pipes.b0.slot(i), i, cfg)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s_next,))
        s = masked(job, place, walk, job.scale.apply_softcap(s), n, bits)
        p = probabilities(pipes, job, own, s, i)
        pipes.b0.release(i)
        p = gl.convert_layout(p.to(pipes.b0.slots.dtype), cfg.A)
        n, bits = tile_of(job, walk, entries, 1)
        for j in range(1, walk.count):
            n_next, bits_next = tile_of(job, walk, entries, j + 1)
            i += 1
            pipes.b0.wait_full(i)
            s_next = product(pipes.a0, None, filling, pipes.b0.slot(i), i, cfg)
            pipes.b1.wait_full(i - 1)
            acc_next = warpgroup_mma(p, pipes.b1.slot(i - 1), acc, is_async=True)
            s = warpgroup_mma_wait(num_outstanding=1, deps=(s_next,))
            s = masked(job, place, walk, job.scale.apply_softcap(s), n, bits)
            p_wide = probabilities(pipes, job, own, s, i)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc_next,))
            pipes.b0.release(i)
            pipes.b1.release(i - 1)
            p = gl.convert_layout(p_wide.to(pipes.b0.slots.dtype), cfg.A)
            n = n_next
            bits = bits_next
        pipes.b1.wait_full(i)
        acc_next = warpgroup_mma(p, pipes.b1.slot(i), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc_next,))
        pipes.b1.release(i)
        i += 1
    return acc, i


@gluon.jit
def consume(out_desc, pipes, job, C: gl.constexpr):
    shape, cfg = job.shape, job.cfg
    i = 0  # tiles of the other side seen
    t = 0  # own tiles seen
    taken = 0
    ticket = gl.program_id(0)
    if cfg.DYNAMIC:
        (ticket,) = pipes.tickets.take(taken)
    while ticket < job.order.num_tiles:
        first = job.place(ticket, 0)
        if first.row < first.length:
            place = job.place(ticket, C)
            acc = gl.zeros([64, cfg.WIDTH], gl.float32, cfg.G)
            own = own_rows(job, place)
            filling = 2 * t + C
            pipes.a0.wait_full(filling)
            if cfg.VALUES:
                for g in range(job.repeats()):
                    acc, i = fold_values(pipes, job, place, filling, own, acc, i, g)
            else:
                pipes.a1.wait_full(filling)
                a0 = pipes.a0.slot(filling)
                a1 = pipes.a1.slot(filling)
                if cfg.HELD:
                    a0 = a0.load(cfg.H)
                    a1 = a1.load(cfg.H)
                for g in range(job.repeats()):
                    acc, i = fold_scores(pipes, job, place, filling, a0, a1, own, acc, i, g)
            at = shape.coord(place.batch, place.head, place.start, place.length, place.row)
            slot = pipes.a0.tile(filling)
            if out_desc.dtype == gl.float32:
                store_halves(out_desc, at, slot, acc * job.factor)
            else:
                store_tile(out_desc, at, slot, (acc * job.factor).to(out_desc.dtype))
            store_wait(0)
            pipes.a0.release(filling)  # and a1: both are loaded together
            t += 1
        if cfg.DYNAMIC:
            taken += 1
            (ticket,) = pipes.tickets.take(taken)
        else:
            ticket += gl.num_programs(0)


_RUNTIME = [
    "length", "length_other", "total", "total_other", "num_heads", "group_size", "left", "right",
    "mask_b", "mask_h", "tiles_m", "section", "num_tiles", "num_sequences",
]  # fmt: skip


@gluon.jit(do_not_specialize=_RUNTIME)
def gradient_kernel(
    a0_desc, a1_desc, b0_desc, b1_desc, rows_desc, rows_ptr, out_desc, cu_seqlens,
    cu_seqlens_other, counter,
    full_offsets, full_indices, partial_offsets, partial_indices, partial_tiles, tiles,
    length, length_other, total, total_other, num_heads, group_size, left, right, mask_b, mask_h,
    tiles_m, section, num_tiles, num_sequences, scale_log2, inner, factor,
    WIDTH: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_MASK: gl.constexpr, SOFTCAP: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr,
    DYNAMIC: gl.constexpr, HELD: gl.constexpr, TILE: gl.constexpr, B0_STAGES: gl.constexpr,
    B1_STAGES: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """left, right and lengths as the own side sees them: for keys, those of queries exchanged."""
    cfg = Config(TILE, WIDTH, KEYS, VALUES, HELD, DYNAMIC)
    shape = Shape(cu_seqlens, cu_seqlens_other, length, length_other, total, total_other,
                  num_heads, group_size, left, right, PACKED, HAS_LEFT, HAS_RIGHT)  # fmt: skip
    blocks = Blocks(full_offsets, full_indices, partial_offsets, partial_indices, partial_tiles,
                    tiles, mask_b, mask_h, HAS_MASK)  # fmt: skip
    order = Order(tiles_m, section, num_tiles, HAS_LEFT if KEYS else HAS_RIGHT)
    job = Job(shape, blocks, order, Scale(scale_log2, inner, SOFTCAP), factor, rows_ptr,
              num_sequences, cfg)  # fmt: skip
    a0 = make_ring(a0_desc, 2, 1)
    a1 = a0
    if not VALUES:
        a1 = make_ring(a1_desc, 2, 1)
    b0 = make_ring(b0_desc, B0_STAGES, 2)
    b1 = make_ring(b1_desc, B1_STAGES, 2)
    pipes = Pipes(a0, a1, b0, b1, make_rider(rows_desc, B0_STAGES), make_tickets(2, 1))
    follow()
    gl.warp_specialize([
        (consume, (out_desc, pipes, job, 0)),
        (consume, (out_desc, pipes, job, 1)),
        (produce, (a0_desc, a1_desc, b0_desc, b1_desc, rows_desc, counter, pipes, job)),
    ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    pipes.close()
    if not VALUES:
        a1.close()
