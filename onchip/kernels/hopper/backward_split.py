"""The backward of one operand at a time on Hopper: a program owns a tile of queries (dq) or of keys
(dk, dv) and visits the other side, so that every sum has one owner and one order.

  producer warp                        consumer warpgroups 0, 1: 64 own rows each
  TMA a0, a1 of own rows - a0.full --> (stay in shared memory, or also in registers)
  TMA b0[i], lse, delta -- b0.full --> s = a0 b0[i]
  TMA b1[i] -------------- b1.full --> dp = a1 b1[i];  p = exp2(s - lse);  ds = p (dp - delta)
            <---- b1.empty ----------  release b1[i]
            <---- b0.empty ----------  acc += ds b0[i] (one iteration later), release b0[i]

There are seven or eight products instead of backward.py's five, but no sum in memory. This is the
deterministic backward, and the only one of more than 128 columns, where dk and dv of a tile
together do not fit the registers. Of 160 and 192 columns, the last 32 and 64 are a tail
(column_tails.py), in each operand and in the gradient.

The own side is the one for which the gradient is computed: 64 rows for each consumer stay in shared
memory, a0 (q or k) and a1 (dout or v). b0 (k or q) and b1 (v or dout) stream past. Scores are (own,
other):
  dq += ds k    from s = q k,  dp = dout v      a0, a1 = q, dout    b0, b1 = k, v
  dk += ds q    from s = k q,  dp = v dout      a0, a1 = k, v       b0, b1 = q, dout
  dv += p dout  from s = k q                    a0 = k              b0, b1 = q, dout

Worked shape: batch 1, 1 head, 300 tokens, causal, dq at head_dim 128: own tiles of 128 queries, key
tiles of 64. The queries 128..255 see the key tiles 0..3: 0 and 1 are full, 2 and 3 cut.

backward.py computes all gradients in one kernel; docs/kernels.md derives both.
"""

from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from onchip.kernels.hopper.aggregate import aggregate
from onchip.kernels.hopper.block_sparse import BlockEntries, BlockMaskLists, num_listed_tiles
from onchip.kernels.hopper.column_tails import (
    get_columns,
    get_opaque_columns,
    load_with_tail,
    make_tail,
    scale_columns,
    start_inner_product,
    start_outer_product,
    store_gradient,
    wait_products,
    zero_columns,
)
from onchip.kernels.hopper.gluon_types import gl, gluon
from onchip.kernels.hopper.mask import (
    apply_block_mask,
    apply_block_mask_transposed,
    apply_window,
    get_block_range,
    load_mask_words,
)
from onchip.kernels.hopper.pipeline import (
    LinkedStages,
    Pipeline,
    WorkQueue,
    make_linked_stages,
    make_pipeline,
    make_work_queue,
    store_wait,
    sync_with_previous_kernel,
)
from onchip.kernels.hopper.seqlen import SeqlenInfo, padded_tile
from onchip.kernels.hopper.softmax import SoftmaxScale
from onchip.kernels.hopper.tile_scheduler import (
    TileOrder,
    next_work_index,
    pop_first_index,
    pop_next_index,
    push_index,
)


@aggregate
class SplitPipelines:
    """Pipelines between producer and consumers. rows (lse and delta of streamed queries) arrive
    with b0. Tails arrive and leave with the columns before them (column_tails.py).
    """

    a0: Pipeline
    a1: Pipeline
    b0: Pipeline
    b1: Pipeline
    rows: LinkedStages
    work_queue: WorkQueue
    a0_tail: LinkedStages
    a1_tail: LinkedStages
    b0_tail: LinkedStages
    b1_tail: LinkedStages

    @gluon.jit
    def close(self):
        """Invalidate all barriers except a1's."""
        self.a0.close()
        self.b0.close()
        self.b1.close()
        self.work_queue.close()


@aggregate
class SplitConfig:
    """KEYS: keys own the tile. VALUES: dv. OWN_IN_REGISTERS: a0 and a1 are kept in registers too.
    TAIL: columns of the gradient behind WIDTH, or 0. TAIL_0, TAIL_1: whether a0 and b0, a1 and b1
    have tails. Layouts: S of scores (64, TILE), G of the gradient (64, WIDTH), A of ds or p as the
    left operand, H of a0 and a1 as left operands; G_TAIL and A_TAIL of a product with a tail.
    """

    TILE: gl.constexpr
    WIDTH: gl.constexpr
    TAIL: gl.constexpr
    TAIL_0: gl.constexpr
    TAIL_1: gl.constexpr
    KEYS: gl.constexpr
    VALUES: gl.constexpr
    OWN_IN_REGISTERS: gl.constexpr
    DYNAMIC: gl.constexpr
    S: gl.constexpr
    G: gl.constexpr
    A: gl.constexpr
    H: gl.constexpr
    G_TAIL: gl.constexpr
    A_TAIL: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, TILE, WIDTH, TAIL, TAIL_0, TAIL_1, KEYS, VALUES, OWN_IN_REGISTERS, DYNAMIC):
        wide = lambda n: gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])
        self.TILE = gl.constexpr(TILE)
        self.WIDTH = gl.constexpr(WIDTH)
        self.TAIL = gl.constexpr(TAIL)
        self.TAIL_0 = gl.constexpr(TAIL_0)
        self.TAIL_1 = gl.constexpr(TAIL_1)
        self.KEYS = gl.constexpr(KEYS)
        self.VALUES = gl.constexpr(VALUES)
        self.OWN_IN_REGISTERS = gl.constexpr(OWN_IN_REGISTERS)
        self.DYNAMIC = gl.constexpr(DYNAMIC)
        self.S = gl.constexpr(wide(TILE))
        self.G = gl.constexpr(wide(WIDTH))
        self.A = gl.constexpr(gl.DotOperandLayout(0, wide(WIDTH), 2))
        self.H = gl.constexpr(gl.DotOperandLayout(0, wide(TILE), 2))
        self.G_TAIL = gl.constexpr(wide(TAIL or WIDTH))
        self.A_TAIL = gl.constexpr(gl.DotOperandLayout(0, wide(TAIL or WIDTH), 2))


@aggregate
class SplitTile:
    """Rows of one head from `row` of their sequence on. The sequence begins at row `start` of the
    tensor, that of the other side at `start_other`.
    """

    batch: gl.tensor
    head: gl.tensor
    row: gl.tensor
    start: gl.tensor
    length: gl.tensor
    start_other: gl.tensor
    length_other: gl.tensor


@aggregate
class SplitParams:
    """The call. `seqlen` is that of the call if queries own the tiles, else with queries and keys
    exchanged.
    """

    seqlen: SeqlenInfo
    blocks: BlockMaskLists
    order: TileOrder
    scale: SoftmaxScale
    factor: gl.tensor
    rows: gl.tensor
    num_sequences: gl.tensor
    cfg: SplitConfig

    @gluon.jit
    def work_tile(self, work_index, C: gl.constexpr):
        """The tile of a work index, from consumer C on."""
        seqlen = self.seqlen
        tile, batch_head = self.order.locate(work_index)
        heads = seqlen.num_heads
        if self.cfg.KEYS:
            heads = heads // seqlen.group_size
            tile = self.order.tiles_m - 1 - tile  # causal: most queries see the first keys
        batch = batch_head // heads
        start, length, start_other, length_other = seqlen.sequence(batch)
        return SplitTile(batch, batch_head % heads, tile * 128 + 64 * C, start, length, start_other,
                         length_other)  # fmt: skip

    @gluon.jit
    def repeats(self):
        """How many heads of the other side belong to one own head."""
        return self.seqlen.group_size if self.cfg.KEYS else 1

    @gluon.jit
    def other_head(self, work_tile, g):
        """Head g of the other side."""
        if self.cfg.KEYS:
            return work_tile.head * self.seqlen.group_size + g
        else:
            return work_tile.head // self.seqlen.group_size

    @gluon.jit
    def query_tile(self, work_tile, g):
        """Index of the first query tile in the buffer of lse and delta."""
        seqlen, TILE = self.seqlen, self.cfg.TILE
        if self.cfg.KEYS:
            head = work_tile.head * seqlen.group_size + g
            total, first, length = seqlen.total_k, work_tile.start_other, work_tile.length_other
        else:
            head, total, first, length = (
                work_tile.head,
                seqlen.total_q,
                work_tile.start,
                work_tile.length,
            )
        return padded_tile(
            seqlen, total, self.num_sequences, work_tile.batch, head, first, length, TILE
        )


@aggregate
class OtherWalk:
    """`count` tiles of the other side that 128 rows see: from `lo` on, or as a mask lists them.
    Those from full_lo to full_hi are full.
    """

    lo: gl.tensor
    full_lo: gl.tensor
    full_hi: gl.tensor
    count: gl.tensor


@gluon.jit
def make_walk(params, work_tile, head):
    """The tiles that the 128 rows around a tile see, and their block lists."""
    TILE: gl.constexpr = params.cfg.TILE
    first = work_tile.row // 128 * 128
    blocks = get_block_range(
        params.seqlen, first, 128, work_tile.length, work_tile.length_other, TILE
    )
    count = blocks.hi - blocks.lo
    entries = BlockEntries(count, count, count, count)
    if params.blocks.ON:
        entries = params.blocks.entries(work_tile.batch, head, first // 128)
        count = num_listed_tiles(entries, TILE)
    return OtherWalk(blocks.lo, blocks.full_lo, blocks.full_hi, count), entries


@gluon.jit
def get_listed_tile(params, walk, entries, j):
    """(the j-th tile, its bit tile or -1)"""
    if params.blocks.ON:
        return params.blocks.tile(entries, j, params.cfg.TILE)
    else:
        return walk.lo + j, walk.lo * 0 - 1


@gluon.jit
def mask_head(params, work_tile, g):
    """The query head, which selects the plane of the mask."""
    if params.cfg.KEYS:
        return params.other_head(work_tile, g)
    else:
        return work_tile.head


@gluon.jit
def produce(a0, a1, b0, b1, rows_desc, counter, pipes, params):
    """The producer's loop over own tiles, and over the tiles of the other side. a0, a1, b0, b1:
    (descriptor, descriptor of the tail or None).
    """
    seqlen, cfg = params.seqlen, params.cfg
    i = 0  # tiles of the other side loaded
    t = 0  # own tiles loaded
    num_pushed = 0
    work_index = gl.program_id(0)
    while work_index < params.order.num_tiles:
        push_index(pipes.work_queue, num_pushed, work_index, cfg.DYNAMIC)
        if cfg.DYNAMIC:
            num_pushed += 1
        work_tile = params.work_tile(work_index, 0)
        if work_tile.row < work_tile.length:
            for c in gl.static_range(2):
                at = seqlen.coord(work_tile.batch, work_tile.head, work_tile.start,
                                  work_tile.length, work_tile.row + 64 * c)  # fmt: skip
                pipes.a0.wait_empty(2 * t + c)
                load_with_tail(pipes.a0, pipes.a0_tail, 2 * t + c, a0[0], a0[1], at)
                if not cfg.VALUES:
                    load_with_tail(pipes.a1, pipes.a1_tail, 2 * t + c, a1[0], a1[1], at)
            t += 1
            for g in range(params.repeats()):
                walk, entries = make_walk(params, work_tile, mask_head(params, work_tile, g))
                first_tile = params.query_tile(work_tile, g)
                head = params.other_head(work_tile, g)
                for j in range(walk.count):
                    n, _ = get_listed_tile(params, walk, entries, j)
                    at = seqlen.coord(work_tile.batch, head, work_tile.start_other,
                                      work_tile.length_other, n * cfg.TILE)  # fmt: skip
                    pipes.b0.wait_empty(i)
                    if cfg.KEYS:
                        linked_bytes: gl.constexpr = rows_desc.block_type.nbytes
                        load_with_tail(pipes.b0, pipes.b0_tail, i, b0[0], b0[1], at, linked_bytes)
                        tile_coord = [(first_tile + n) * (2 * cfg.TILE)]
                        pipes.b0.load_linked(i, rows_desc, tile_coord, pipes.rows)
                    else:
                        load_with_tail(pipes.b0, pipes.b0_tail, i, b0[0], b0[1], at)
                    pipes.b1.wait_empty(i)
                    load_with_tail(pipes.b1, pipes.b1_tail, i, b1[0], b1[1], at)
                    i += 1
        work_index = next_work_index(counter, work_index, params.order.num_tiles, cfg.DYNAMIC)
    push_index(pipes.work_queue, num_pushed, work_index, cfg.DYNAMIC)


@aggregate
class LseDelta:
    """lse (base 2) and delta of own queries; unused if keys own the tile."""

    lse: gl.tensor
    delta: gl.tensor


@gluon.jit
def load_own_stats(params, work_tile):
    """lse and delta of 64 own queries."""
    cfg = params.cfg
    rows = work_tile.row + gl.arange(0, 64, gl.SliceLayout(1, cfg.S))
    if cfg.KEYS:
        return LseDelta(rows, rows)
    else:
        tile = params.query_tile(work_tile, 0) + rows // cfg.TILE
        at = params.rows + tile.to(gl.int64) * (2 * cfg.TILE) + rows % cfg.TILE
        inside = rows < work_tile.length
        lse = gl.load(at, mask=inside, other=float("inf"))
        return LseDelta(lse, gl.load(at + cfg.TILE, mask=inside, other=0.0))


@gluon.jit
def row_stats(pipes, cfg, own, i, WHICH: gl.constexpr):
    """lse (0) or delta (1) against scores: of the queries of iteration i, or of the own queries."""
    if cfg.KEYS:
        streamed = pipes.rows.stage(i).slice(WHICH * cfg.TILE, cfg.TILE, 0)
        return streamed.load(gl.SliceLayout(0, cfg.S))[None, :]
    elif WHICH == 0:
        return own.lse[:, None]
    else:
        return own.delta[:, None]


@gluon.jit
def mask_scores(params, work_tile, walk, s, n, bits):
    """s with -inf at hidden scores. One branch in one loop: ds, carried in 16 bits from one loop to
    another, would be repacked in every iteration.
    """
    seqlen, blocks, cfg = params.seqlen, params.blocks, params.cfg
    col = n * cfg.TILE
    cut = col + cfg.TILE > work_tile.length_other
    if blocks.ON:
        cut = cut | (bits >= 0)
        if seqlen.HAS_LEFT or seqlen.HAS_RIGHT:
            cut = cut | (col >= 0)
    else:
        cut = cut | (n < walk.full_lo) | (n >= walk.full_hi)
    if cut:
        if blocks.ON and not cfg.KEYS:
            words = load_mask_words(blocks.tiles, bits, work_tile.row, col, cfg.TILE, cfg.S)
            s = apply_block_mask(
                seqlen,
                s,
                words,
                work_tile.row,
                col,
                work_tile.length,
                work_tile.length_other,
                cfg.S,
            )
        else:
            s = apply_window(
                seqlen, s, work_tile.row, col, work_tile.length, work_tile.length_other, cfg.S
            )
            if blocks.ON:
                s = apply_block_mask_transposed(blocks, s, bits, work_tile.row, col, cfg.S)
    return s


@gluon.jit
def compute_p(pipes, params, own, s, i):
    """p from scores and lse."""
    return gl.exp2(s * params.scale.scale_log2 - row_stats(pipes, params.cfg, own, i, 0))


@gluon.jit
def start_s(pipes, cfg, a0, iteration, i):
    """Start s = a0 b0 of 64 own rows against iteration i of the other side; a0 is in registers if
    OWN_IN_REGISTERS. Otherwise its address is opaque.
    """
    zero = gl.zeros([64, cfg.TILE], gl.float32, cfg.S)
    b0 = get_columns(pipes.b0, pipes.b0_tail, i, cfg.TAIL_0)
    if cfg.OWN_IN_REGISTERS:
        return start_inner_product(a0, b0, zero)
    else:
        a0 = get_opaque_columns(pipes.a0, pipes.a0_tail, iteration, i, cfg.TAIL_0)
        return start_inner_product(a0, b0, zero)


@gluon.jit
def start_dp(pipes, cfg, a1, iteration, i):
    """Start dp = a1 b1 of 64 own rows against iteration i of the other side."""
    zero = gl.zeros([64, cfg.TILE], gl.float32, cfg.S)
    b1 = get_opaque_columns(pipes.b1, pipes.b1_tail, i, i, cfg.TAIL_1)
    if cfg.OWN_IN_REGISTERS:
        return start_inner_product(a1, b1, zero)
    else:
        a1 = get_opaque_columns(pipes.a1, pipes.a1_tail, iteration, i, cfg.TAIL_1)
        return start_inner_product(a1, b1, zero)


@gluon.jit
def start_sum(pipeline, tail, cfg, left, acc, i):
    """Start acc += left b of iteration i of b0 or b1: as many wgmma groups as acc has tiles."""
    b = get_columns(pipeline, tail, i, cfg.TAIL > 0)
    return start_outer_product(left, b, acc, cfg.A_TAIL)


@gluon.jit
def compute_ds(pipes, params, work_tile, walk, own, s, dp_next, i, n, bits):
    """ds of iteration i as a left operand; dp_next is the last product in flight."""
    cfg = params.cfg
    t = mask_scores(params, work_tile, walk, params.scale.apply_softcap(s), n, bits)
    p = compute_p(pipes, params, own, t, i)
    dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp_next,))
    pipes.b1.release(i)
    ds = params.scale.compute_ds(t, p, dp, row_stats(pipes, cfg, own, i, 1))
    return gl.convert_layout(ds.to(pipes.b0.smem.dtype), cfg.A)


@gluon.jit
def fold_ds(pipes, params, work_tile, iteration, a0, a1, own, acc, i, g):
    """acc + ds b0 over all tiles of one head of the other side. ds b0 of tile i - 1, then s and dp
    of tile i are in flight together; the exponentials run under dp.
    """
    cfg = params.cfg
    S: gl.constexpr = 2 if cfg.TAIL_0 else 1  # wgmma groups
    DP: gl.constexpr = 2 if cfg.TAIL_1 else 1
    walk, entries = make_walk(params, work_tile, mask_head(params, work_tile, g))
    if walk.count > 0:
        n, bits = get_listed_tile(params, walk, entries, 0)
        pipes.b0.wait_full(i)
        s_next = start_s(pipes, cfg, a0, iteration, i)
        pipes.b1.wait_full(i)
        dp_next = start_dp(pipes, cfg, a1, iteration, i)
        s = warpgroup_mma_wait(num_outstanding=DP, deps=(s_next,))
        ds = compute_ds(pipes, params, work_tile, walk, own, s, dp_next, i, n, bits)
        n, bits = get_listed_tile(params, walk, entries, 1)
        for j in range(1, walk.count):
            n_next, bits_next = get_listed_tile(params, walk, entries, j + 1)
            acc_next = start_sum(pipes.b0, pipes.b0_tail, cfg, ds, acc, i)
            i += 1
            pipes.b0.wait_full(i)
            s_next = start_s(pipes, cfg, a0, iteration, i)
            pipes.b1.wait_full(i)
            dp_next = start_dp(pipes, cfg, a1, iteration, i)
            acc = wait_products(S + DP, acc_next)
            pipes.b0.release(i - 1)
            s = warpgroup_mma_wait(num_outstanding=DP, deps=(s_next,))
            ds = compute_ds(pipes, params, work_tile, walk, own, s, dp_next, i, n, bits)
            n = n_next
            bits = bits_next
        acc_next = start_sum(pipes.b0, pipes.b0_tail, cfg, ds, acc, i)
        acc = wait_products(0, acc_next)
        pipes.b0.release(i)
        i += 1
    return acc, i


@gluon.jit
def fold_p(pipes, params, work_tile, iteration, own, acc, i, g):
    """acc + p b1 over all tiles of one head of the other side."""
    cfg = params.cfg
    walk, entries = make_walk(params, work_tile, mask_head(params, work_tile, g))
    if walk.count > 0:
        n, bits = get_listed_tile(params, walk, entries, 0)
        pipes.b0.wait_full(i)
        s_next = start_s(pipes, cfg, None, iteration, i)
        s = warpgroup_mma_wait(num_outstanding=0, deps=(s_next,))
        s = mask_scores(params, work_tile, walk, params.scale.apply_softcap(s), n, bits)
        p = compute_p(pipes, params, own, s, i)
        pipes.b0.release(i)
        p = gl.convert_layout(p.to(pipes.b0.smem.dtype), cfg.A)
        n, bits = get_listed_tile(params, walk, entries, 1)
        for j in range(1, walk.count):
            n_next, bits_next = get_listed_tile(params, walk, entries, j + 1)
            i += 1
            pipes.b0.wait_full(i)
            s_next = start_s(pipes, cfg, None, iteration, i)
            pipes.b1.wait_full(i - 1)
            acc_next = start_sum(pipes.b1, pipes.b1_tail, cfg, p, acc, i - 1)
            s = warpgroup_mma_wait(num_outstanding=len(acc_next), deps=(s_next,))
            s = mask_scores(params, work_tile, walk, params.scale.apply_softcap(s), n, bits)
            p_wide = compute_p(pipes, params, own, s, i)
            acc = wait_products(0, acc_next)
            pipes.b0.release(i)
            pipes.b1.release(i - 1)
            p = gl.convert_layout(p_wide.to(pipes.b0.smem.dtype), cfg.A)
            n = n_next
            bits = bits_next
        pipes.b1.wait_full(i)
        acc_next = start_sum(pipes.b1, pipes.b1_tail, cfg, p, acc, i)
        acc = wait_products(0, acc_next)
        pipes.b1.release(i)
        i += 1
    return acc, i


@gluon.jit
def load_own(pipeline, tail, iteration, cfg, HAS_TAIL: gl.constexpr):
    """a0 or a1 of 64 own rows, in registers if OWN_IN_REGISTERS."""
    own = get_columns(pipeline, tail, iteration, HAS_TAIL)
    if cfg.OWN_IN_REGISTERS:
        loaded = ()
        for x in gl.static_range(len(own)):
            loaded = loaded + (own[x].load(cfg.H),)
        return loaded
    else:
        return own


@gluon.jit
def consume(out_desc, out_tail, pipes, params, C: gl.constexpr):
    """A consumer's loop over own tiles, and over the tiles of the other side."""
    seqlen, cfg = params.seqlen, params.cfg
    i = 0  # tiles of the other side seen
    t = 0  # own tiles seen
    num_popped = 0
    work_index = pop_first_index(pipes.work_queue, num_popped, cfg.DYNAMIC)
    while work_index < params.order.num_tiles:
        first = params.work_tile(work_index, 0)
        if first.row < first.length:
            work_tile = params.work_tile(work_index, C)
            acc = zero_columns(cfg.WIDTH, cfg.TAIL, cfg.G, cfg.G_TAIL)
            own = load_own_stats(params, work_tile)
            iteration = 2 * t + C
            pipes.a0.wait_full(iteration)
            if cfg.VALUES:
                for g in range(params.repeats()):
                    acc, i = fold_p(pipes, params, work_tile, iteration, own, acc, i, g)
            else:
                pipes.a1.wait_full(iteration)
                a0 = load_own(pipes.a0, pipes.a0_tail, iteration, cfg, cfg.TAIL_0)
                a1 = load_own(pipes.a1, pipes.a1_tail, iteration, cfg, cfg.TAIL_1)
                for g in range(params.repeats()):
                    acc, i = fold_ds(pipes, params, work_tile, iteration, a0, a1, own, acc, i, g)
            at = seqlen.coord(
                work_tile.batch, work_tile.head, work_tile.start, work_tile.length, work_tile.row
            )
            stage, tail_stage = pipes.a0.tma_stage(iteration), pipes.a0_tail.stage(iteration)
            acc = scale_columns(acc, params.factor)
            store_gradient(out_desc, out_tail, at, stage, tail_stage, acc)
            store_wait(0)
            pipes.a0.release(iteration)  # and a1, which is loaded with it
            t += 1
        if cfg.DYNAMIC:
            num_popped += 1
        work_index = pop_next_index(pipes.work_queue, num_popped, work_index, cfg.DYNAMIC)


_RUNTIME = [
    "length", "length_other", "total", "total_other", "num_heads", "group_size", "left", "right",
    "mask_b", "mask_h", "tiles_m", "l2_group", "num_tiles", "num_sequences",
]  # fmt: skip


@gluon.jit(do_not_specialize=_RUNTIME)
def backward_split_kernel(
    a0_desc, a1_desc, b0_desc, b1_desc, rows_desc, rows_ptr, out_desc,
    a0_tail, a1_tail, b0_tail, b1_tail, out_tail, cu_seqlens, cu_seqlens_other, counter,
    full_offsets, full_indices, partial_offsets, partial_indices, partial_tiles, tiles,
    length, length_other, total, total_other, num_heads, group_size, left, right, mask_b, mask_h,
    tiles_m, l2_group, num_tiles, num_sequences, scale_log2, inner, factor,
    WIDTH: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_MASK: gl.constexpr, SOFTCAP: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr,
    DYNAMIC: gl.constexpr, OWN_IN_REGISTERS: gl.constexpr, TILE: gl.constexpr,
    B0_STAGES: gl.constexpr, B1_STAGES: gl.constexpr, CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """left, right and lengths belong to the own side: for keys, queries and keys
    are exchanged. a0_tail ... out_tail: descriptors of the columns behind the others, or None.
    """
    TAIL: gl.constexpr = 0 if out_tail is None else (b1_tail if VALUES else b0_tail).block_shape[-1]
    cfg = SplitConfig(TILE, WIDTH, TAIL, b0_tail is not None, b1_tail is not None, KEYS, VALUES,
                      OWN_IN_REGISTERS, DYNAMIC)  # fmt: skip
    seqlen = SeqlenInfo(cu_seqlens, cu_seqlens_other, length, length_other, total, total_other,
                        num_heads, group_size, left, right, PACKED, HAS_LEFT,
                        HAS_RIGHT)  # fmt: skip
    blocks = BlockMaskLists(full_offsets, full_indices, partial_offsets, partial_indices,
                            partial_tiles, tiles, mask_b, mask_h, HAS_MASK)  # fmt: skip
    order = TileOrder(tiles_m, l2_group, num_tiles, HAS_LEFT if KEYS else HAS_RIGHT)
    params = SplitParams(seqlen, blocks, order, SoftmaxScale(scale_log2, inner, SOFTCAP), factor,
                         rows_ptr, num_sequences, cfg)  # fmt: skip
    a0 = make_pipeline(a0_desc, 2, 1)
    a1 = a0
    if not VALUES:
        a1 = make_pipeline(a1_desc, 2, 1)
    b0 = make_pipeline(b0_desc, B0_STAGES, 2)
    b1 = make_pipeline(b1_desc, B1_STAGES, 2)
    pipes = SplitPipelines(
        a0, a1, b0, b1, make_linked_stages(rows_desc, B0_STAGES), make_work_queue(2, 1),
        make_tail(a0, a0_tail), make_tail(a1, None if VALUES else a1_tail), make_tail(b0, b0_tail),
        make_tail(b1, b1_tail),
    )  # fmt: skip
    producer_args = ((a0_desc, a0_tail), (a1_desc, a1_tail), (b0_desc, b0_tail),
                     (b1_desc, b1_tail), rows_desc, counter, pipes, params)  # fmt: skip
    sync_with_previous_kernel()
    gl.warp_specialize([
        (consume, (out_desc, out_tail, pipes, params, 0)),
        (consume, (out_desc, out_tail, pipes, params, 1)),
        (produce, producer_args),
    ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    pipes.close()
    if not VALUES:
        a1.close()
