"""FlashAttention's backward on Hopper, in Gluon: a program owns a tile of keys and visits the
queries that see it.

  producer warp                            consumer warpgroups 0, 1: 64 keys each
  TMA K, V of the key tile -- k, v.full --> (stay in shared memory)
  TMA Q[i], lse, delta ------ q.full -----> S^T = K Q[i]            P^T = exp2(S^T - lse)
  TMA dO[i] ----------------- dout.full --> dP^T = V dO[i]          dV += P^T dO[i]
            <---- dout.empty -------------  release dO[i]
                                            dS^T = P^T (dP^T - delta) -> smem (TileExchange)
                                            dK += dS^T Q[i]
            <---- q.empty ----------------  release Q[i] (and with it lse, delta)
  storing warp                              dQ part = dS[i - 1] K -> smem (StoreQueue)
  TMA reduce-add (fp32)  <----------------
            <---- k.empty ----------------  after the last query tile: store dK, dV

Scores are transposed, (keys, queries). So p and ds are the left operands of dv += p dout and dk +=
ds q, in the registers in which they were computed. ds is also exchanged through shared memory,
where each consumer reads all of it for its part of dq = ds k, one iteration later: so a consumer
need not wait for the other one. The storing warp adds that part to an fp32 accumulator by bulk
reduce-add (see launch_backward.finish_kernel).

The tensor cores stay busy across tiles: see `step`. A counter profile (ncu, H200, 2026-11-18) of
an earlier version showed consumers waiting for a fifth of their time at fences right after their
writes, and for loads of lse; with fences and loads moved the kernel became 5 to 15 % faster.

Worked shape: batch 1, 1 head, 300 tokens, causal, head_dim 128: key tiles of 128 and query tiles of
64. The keys 0..127 are seen by the 5 query tiles 0..4: 0 and 1 are cut by the diagonal, 4 by the
end (44 of 64 queries exist), 2 and 3 are full. Masked tiles come first: 0, 1, 4, then 2, 3.

examples/versions has no backward; docs/kernels.md derives it. The products are in
backward_products.py; backward_split.py computes one gradient at a time, deterministically, and the
gradients of wide heads.
"""

from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from onchip.kernels.hopper.aggregate import aggregate
from onchip.kernels.hopper.backward_products import (
    start_dk,
    start_dp,
    start_dq_part,
    start_dv,
    start_qk,
    to_fragment_order,
)
from onchip.kernels.hopper.block_sparse import BlockEntries, BlockMaskLists, num_listed_tiles
from onchip.kernels.hopper.column_tails import (
    load_with_tail,
    make_tail,
    scale_columns,
    store_gradient,
    wait_products,
    zero_columns,
)
from onchip.kernels.hopper.gluon_types import gl, gluon
from onchip.kernels.hopper.mask import apply_block_mask_transposed, apply_window, get_block_range
from onchip.kernels.hopper.pipeline import (
    PIPELINE_BARRIER,
    LinkedStages,
    Pipeline,
    StoreQueue,
    TileExchange,
    WorkQueue,
    make_linked_stages,
    make_pipeline,
    make_store_queue,
    make_tile_exchange,
    make_work_queue,
    reinterpret,
    store_wait,
    sync_with_previous_kernel,
    tensor_descriptor,
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
class BackwardPipelines:
    """Pipelines between producer and consumers. Releasing q also releases rows; releasing k also
    releases v. Tails arrive and leave with the columns before them (column_tails.py).
    """

    q: Pipeline
    rows: LinkedStages
    dout: Pipeline
    k: Pipeline
    v: Pipeline
    ds: TileExchange
    work_queue: WorkQueue
    q_tail: LinkedStages
    dout_tail: LinkedStages
    k_tail: LinkedStages
    v_tail: LinkedStages

    @gluon.jit
    def close(self):
        """Invalidate all barriers."""
        self.q.close()
        self.dout.close()
        self.k.close()
        self.v.close()
        self.work_queue.close()


@aggregate
class BackwardConfig:
    """TAIL: columns behind WIDTH, or 0. DQ: dq is computed too. ADD: dk and dv are added to memory.
    Layouts: S of scores (64 keys, 64 queries), G of dk and dv (64 keys, WIDTH), A of p and ds as
    left operands; G_TAIL and A_TAIL of products with a tail. GROUPS: wgmma groups of a product over
    all columns. DQ_COLUMNS_0, DQ_COLUMNS_1: columns of each consumer's part of dq
    (tiles.dq_part_columns).
    """

    TILE_M: gl.constexpr
    TILE_N: gl.constexpr
    WIDTH: gl.constexpr
    TAIL: gl.constexpr
    DYNAMIC: gl.constexpr
    DQ: gl.constexpr
    ADD: gl.constexpr
    DQ_COLUMNS_0: gl.constexpr
    DQ_COLUMNS_1: gl.constexpr
    GROUPS: gl.constexpr
    S: gl.constexpr
    G: gl.constexpr
    A: gl.constexpr
    G_TAIL: gl.constexpr
    A_TAIL: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, TILE_M, TILE_N, WIDTH, TAIL, DYNAMIC, DQ, ADD, DQ_COLUMNS_0, DQ_COLUMNS_1):
        wide = lambda n: gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 16])
        self.TILE_M = gl.constexpr(TILE_M)
        self.TILE_N = gl.constexpr(TILE_N)
        self.WIDTH = gl.constexpr(WIDTH)
        self.TAIL = gl.constexpr(TAIL)
        self.DYNAMIC = gl.constexpr(DYNAMIC)
        self.DQ = gl.constexpr(DQ)
        self.ADD = gl.constexpr(ADD)
        self.DQ_COLUMNS_0 = gl.constexpr(DQ_COLUMNS_0)
        self.DQ_COLUMNS_1 = gl.constexpr(DQ_COLUMNS_1)
        self.GROUPS = gl.constexpr(2 if TAIL else 1)
        self.S = gl.constexpr(wide(64))
        self.G = gl.constexpr(wide(WIDTH))
        self.A = gl.constexpr(gl.DotOperandLayout(0, wide(WIDTH), 2))
        self.G_TAIL = gl.constexpr(wide(TAIL or WIDTH))
        self.A_TAIL = gl.constexpr(gl.DotOperandLayout(0, wide(TAIL or WIDTH), 2))


@aggregate
class BackwardParams:
    """The call. `mirror`: the call with queries and keys exchanged, which gives the queries that
    see a key. The heads of a group are divided into `parts`, which are work items of their own,
    with their own shares of dk and dv.
    """

    seqlen: SeqlenInfo
    mirror: SeqlenInfo
    blocks: BlockMaskLists
    order: TileOrder
    scale: SoftmaxScale
    softmax_scale: gl.tensor
    num_sequences: gl.tensor
    parts: gl.tensor
    cfg: BackwardConfig

    @gluon.jit
    def work_tile(self, work_index):
        """(batch, first of its query heads, first key) of a work index. The first keys come first:
        in a causal call most queries see them.
        """
        tile, item = self.order.locate(work_index)
        items = self.seqlen.num_heads // self.heads()  # of a batch entry
        tile_n = self.order.tiles_m - 1 - tile
        return item // items, item % items * self.heads(), tile_n * self.cfg.TILE_N

    @gluon.jit
    def heads(self):
        """The query heads of a work item."""
        return self.seqlen.group_size // self.parts

    @gluon.jit
    def padded_tile(self, batch, head, q0):
        """Index of the first query tile of a head in `rows` (lse and delta) and in the accumulator
        of dq.
        """
        seqlen = self.seqlen
        return padded_tile(seqlen, seqlen.total_q, self.num_sequences, batch, head, q0,
                           seqlen.seqlen_q, self.cfg.TILE_M)  # fmt: skip


@aggregate
class GradOutput:
    """Descriptors of dk and dv, and the memory through which all gradients leave. Tails of dk and
    dv leave through tail_smem; without tails, these three are placeholders.
    """

    dk: tensor_descriptor
    dv: tensor_descriptor
    dq: StoreQueue
    dk_tail: tensor_descriptor
    dv_tail: tensor_descriptor
    tail_smem: gl.shared_memory_descriptor


@aggregate
class QueryWalk:
    """The query tiles that see a tile of keys: first the num_masked ones, cut by the window or an
    end, then the full ones; or as a mask lists them.
    """

    lo: gl.tensor
    full_lo: gl.tensor
    full_hi: gl.tensor
    num_masked: gl.tensor
    count: gl.tensor
    entries: BlockEntries

    @gluon.jit
    def tile(self, params, j):
        """(the j-th query tile, its bit tile or -1). The order is lo ... full_lo, full_hi ... hi,
        then the full tiles from the last one down: of a causal call all programs start there, and
        read the same queries at the same time.
        """
        if params.blocks.ON:
            return params.blocks.tile(self.entries, j, params.cfg.TILE_M)
        else:
            before = self.full_lo - self.lo
            cut = gl.where(j < before, self.lo + j, self.full_hi + j - before)
            return gl.where(
                j < self.num_masked, cut, self.full_hi - 1 - (j - self.num_masked)
            ), self.lo * 0 - 1


@gluon.jit
def make_walk(params, batch, head, col, seqlen_q, seqlen_k):
    """The query tiles of one head that see the keys from `col` on."""
    TILE_N: gl.constexpr = params.cfg.TILE_N
    blocks = get_block_range(params.mirror, col, TILE_N, seqlen_k, seqlen_q, params.cfg.TILE_M)
    # Keys past the end are zeros, but exp(0 - lse) may be infinite: mask all tiles of such keys.
    inside = col + TILE_N <= seqlen_k
    full_hi = gl.where(inside, blocks.full_hi, blocks.lo)
    full_lo = gl.where(inside, blocks.full_lo, blocks.lo)
    count = blocks.hi - blocks.lo
    entries = BlockEntries(count, count, count, count)
    if params.blocks.ON:
        entries = params.blocks.entries(batch, head, col // 128)
        count = num_listed_tiles(entries, params.cfg.TILE_M)
    return QueryWalk(blocks.lo, full_lo, full_hi, count - (full_hi - full_lo), count, entries)


@aggregate
class BackwardTile:
    """The queries of one head against the keys of one consumer, from key `col` on."""

    walk: QueryWalk
    col: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    first: gl.tensor  # iteration


@gluon.jit
def load_keys(pipes, t, k, v, at):
    """Load the t-th tile of keys and values."""
    pipes.k.wait_empty(t)
    load_with_tail(pipes.k, pipes.k_tail, t, k[0], k[1], at)
    load_with_tail(pipes.v, pipes.v_tail, t, v[0], v[1], at)


@gluon.jit
def produce(q, rows_desc, dout, k, v, counter, pipes, params):
    """The producer's loop over key tiles, and over the query tiles of each. q, dout, k, v:
    (descriptor, descriptor of the tail or None).
    """
    seqlen, cfg = params.seqlen, params.cfg
    i = 0  # query tiles loaded
    t = 0  # key tiles loaded
    num_pushed = 0
    work_index = gl.program_id(0)
    while work_index < params.order.num_tiles:
        push_index(pipes.work_queue, num_pushed, work_index, cfg.DYNAMIC)
        if cfg.DYNAMIC:
            num_pushed += 1
        batch, first_head, col = params.work_tile(work_index)
        q0, seqlen_q, k0, seqlen_k = seqlen.sequence(batch)
        keys_at = seqlen.coord(batch, first_head // seqlen.group_size, k0, seqlen_k, col)
        walk = make_walk(params, batch, first_head, col, seqlen_q, seqlen_k)
        if (col < seqlen_k) & (params.blocks.ON | (walk.count > 0)):
            if params.blocks.ON:
                load_keys(pipes, t, k, v, keys_at)
            for g in range(params.heads()):
                head = first_head + g
                if params.blocks.ON:
                    walk = make_walk(params, batch, head, col, seqlen_q, seqlen_k)
                first_tile = params.padded_tile(batch, head, q0)
                for j in range(walk.count):
                    tile, _ = walk.tile(params, j)
                    at = seqlen.coord(batch, head, q0, seqlen_q, tile * cfg.TILE_M)
                    pipes.q.wait_empty(i)
                    tile_coord = [(first_tile + tile) * (2 * cfg.TILE_M)]
                    linked_bytes: gl.constexpr = rows_desc.block_type.nbytes
                    load_with_tail(pipes.q, pipes.q_tail, i, q[0], q[1], at, linked_bytes)
                    pipes.q.load_linked(i, rows_desc, tile_coord, pipes.rows)
                    if not params.blocks.ON and g + j == 0:
                        load_keys(pipes, t, k, v, keys_at)
                    pipes.dout.wait_empty(i)
                    load_with_tail(pipes.dout, pipes.dout_tail, i, dout[0], dout[1], at)
                    i += 1
            t += 1
        work_index = next_work_index(counter, work_index, params.order.num_tiles, cfg.DYNAMIC)
    push_index(pipes.work_queue, num_pushed, work_index, cfg.DYNAMIC)


@gluon.jit
def load_row_stats(pipes, params, i, SUB: gl.constexpr, WHICH: gl.constexpr):
    """lse (0) or delta (1) of 64 queries of iteration i, along the columns of the transposed
    scores.
    """
    cfg = params.cfg
    rows = pipes.rows.stage(i).slice(WHICH * cfg.TILE_M + SUB * 64, 64, 0)
    return rows.load(gl.SliceLayout(0, cfg.S))[None, :]


@gluon.jit
def compute_p(params, s, lse):
    """p from scores and lse."""
    return gl.exp2(s * params.scale.scale_log2 - lse)


@gluon.jit
def mask_scores(params, work_tile, s, row):
    """s of the 64 queries from `row` on, with -inf outside of the window and past both ends."""
    S: gl.constexpr = params.cfg.S
    s = apply_window(
        params.mirror, s, work_tile.col, row, work_tile.seqlen_k, work_tile.seqlen_q, S
    )
    keys = work_tile.col + gl.arange(0, 64, gl.SliceLayout(1, S))
    return gl.where((keys < work_tile.seqlen_k)[:, None], s, float("-inf"))


@gluon.jit
def finish_scores(params, work_tile, s, lse, tile, bits, SUB: gl.constexpr, MASKED: gl.constexpr):
    """What is carried from the scores to the gradients: p; with softcap the capped scores, from
    which p and the derivative of the cap follow.
    """
    s = params.scale.apply_softcap(s)
    row = tile * params.cfg.TILE_M + SUB * 64
    if params.blocks.ON:
        cut = (
            (bits >= 0)
            | (row + 64 > work_tile.seqlen_q)
            | (work_tile.col + 64 > work_tile.seqlen_k)
        )
        if params.seqlen.HAS_LEFT or params.seqlen.HAS_RIGHT:
            cut = cut | (row >= 0)
        if cut:
            s = mask_scores(params, work_tile, s, row)
            s = apply_block_mask_transposed(
                params.blocks, s, bits, work_tile.col, row, params.cfg.S
            )
    elif MASKED:
        s = mask_scores(params, work_tile, s, row)
    if params.scale.SOFTCAP:
        return s
    else:
        return compute_p(params, s, lse)


@gluon.jit
def step(out, pipes, params, work_tile, c, dp_next, dk, dv, i, next_tile, next_bits,
         SUB: gl.constexpr, MASKED: gl.constexpr, LAST: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Add 64 queries of iteration i to dk, dv and dq, and start the next 64 unless LAST. c is the
    result of finish_scores, dp_next the running product v dout of these queries.

    The products run in the order dv, dk, dq, next scores, next v dout. The first hides ds, the
    fourth the writing of dq, the last the exponentials. dq is that of iteration i - 1, so that no
    consumer waits for the other one's ds. A fence waits for the writes before it: each comes after
    the start of another product, and lse is loaded before the scores are waited for. The registers
    of each result are chosen: otherwise the compiler takes others, and spills.
    """
    cfg = params.cfg
    dtype: gl.constexpr = pipes.q.smem.dtype
    FINAL: gl.constexpr = SUB == cfg.TILE_M // 64 - 1  # the last of the tile: ds is complete
    NEXT: gl.constexpr = 0 if FINAL else SUB + 1
    SENDS: gl.constexpr = FINAL and cfg.DQ
    p = c
    if params.scale.SOFTCAP:
        p = compute_p(params, c, load_row_stats(pipes, params, i, SUB, 0))
    p_left = gl.convert_layout(p.to(dtype), cfg.A)
    dp = warpgroup_mma_wait(num_outstanding=0, deps=(dp_next,))
    dv_next = start_dv(pipes, cfg, p_left, dv, i, SUB)
    if SUB == 0 and cfg.DQ:
        out.dq.send(C, i > work_tile.first + 1)
    ds = params.scale.compute_ds(c, p, dp, load_row_stats(pipes, params, i, SUB, 1)).to(dtype)
    if cfg.DQ:
        if SUB == 0:
            pipes.ds.take(i - 1, C, i > work_tile.first)
        pipes.ds.put(i, C * 64, SUB * 64, ds)
    ds_left = gl.convert_layout(ds, cfg.A)
    dk_next = start_dk(pipes, cfg, ds_left, dk, i, SUB)
    dq_next = ()
    if SENDS:
        before = gl.maximum(i - 1, 0)  # in the first iteration the product is not used
        dq_next = (start_dq_part(pipes, cfg, before, C, dp),)
    if LAST:
        dv, dk = finish_tile(out, pipes, params, work_tile, dv_next, dk_next, dq_next, i, C)
    else:
        j = i + 1 if FINAL else i
        dv = wait_products(cfg.GROUPS + len(dq_next), dv_next)
        if FINAL:
            pipes.dout.release(i)
            pipes.q.wait_full(j)
        zero = gl.zeros([64, 64], gl.float32, cfg.S)
        s_next = start_qk(pipes, cfg, j, NEXT, C, zero)
        reused = dp
        if SENDS:
            pipes.ds.send(i, C)
            done = wait_products(cfg.GROUPS, dk_next + dq_next)
            dk, dq = done[:-1], done[-1]
            pipes.q.release(i)
        lse = load_row_stats(pipes, params, j, NEXT, 0)
        if SENDS:
            out.dq.put(i - 1, C, to_fragment_order(dq), i > work_tile.first)
            if dq.shape[1] == 64:
                reused = dq
        if FINAL:
            pipes.dout.wait_full(j)
        dp_next = start_dp(pipes, cfg, j, NEXT, C, reused)
        if SENDS:
            s = warpgroup_mma_wait(num_outstanding=cfg.GROUPS, deps=(s_next,))
        else:
            done = wait_products(cfg.GROUPS, dk_next + (s_next,))
            dk, s = done[:-1], done[-1]
            if FINAL:
                pipes.q.release(i)
        c = finish_scores(params, work_tile, s, lse, next_tile, next_bits, NEXT, MASKED)
    return c, dp_next, dk, dv


@gluon.jit
def finish_tile(out, pipes, params, work_tile, dv_next, dk_next, dq_next, i, C: gl.constexpr):
    """After the last queries of a head: the products in flight, and dq of iteration i."""
    if params.cfg.DQ:
        pipes.ds.send(i, C)
    done = wait_products(0, dv_next + dk_next + dq_next)
    GROUPS: gl.constexpr = params.cfg.GROUPS
    dv, dk = done[:GROUPS], done[GROUPS : 2 * GROUPS]
    pipes.dout.release(i)
    pipes.q.release(i)
    if params.cfg.DQ:
        dq = done[-1]
        out.dq.put(i - 1, C, to_fragment_order(dq), i > work_tile.first)
        out.dq.send(C, i > work_tile.first)
        pipes.ds.take(i, C)
        dq_next = start_dq_part(pipes, params.cfg, i, C, dq)
        dq = warpgroup_mma_wait(num_outstanding=0, deps=(dq_next,))
        out.dq.put(i, C, to_fragment_order(dq))
        out.dq.send(C)
    return dv, dk


@gluon.jit
def fold_head(out, pipes, params, work_tile, dk, dv, i, C: gl.constexpr):
    """Add all queries of one head that see these keys: iterations i ... i + walk.count - 1."""
    walk, cfg = work_tile.walk, params.cfg
    END: gl.constexpr = cfg.TILE_M // 64 - 1
    tile, bits = walk.tile(params, 0)
    zero = gl.zeros([64, 64], gl.float32, cfg.S)
    pipes.q.wait_full(i)
    s_next = start_qk(pipes, cfg, i, 0, C, zero)
    pipes.dout.wait_full(i)
    dp_next = start_dp(pipes, cfg, i, 0, C, zero)
    lse = load_row_stats(pipes, params, i, 0, 0)
    s = warpgroup_mma_wait(num_outstanding=cfg.GROUPS, deps=(s_next,))
    c = finish_scores(params, work_tile, s, lse, tile, bits, 0, True)
    for u in gl.static_range(END):
        c, dp_next, dk, dv = step(out, pipes, params, work_tile, c, dp_next, dk, dv, i, tile,
                                  bits, u, True, False, C)  # fmt: skip
    whole = 1
    if not params.blocks.ON:
        whole = gl.maximum(walk.num_masked, 1)
        for j in range(1, walk.num_masked):  # tiles cut by the diagonal, the window or an end
            after, bits = walk.tile(params, j)
            c, dp_next, dk, dv = step(out, pipes, params, work_tile, c, dp_next, dk, dv, i,
                                      after, bits, END, True, False, C)  # fmt: skip
            tile = after
            i += 1
            for u in gl.static_range(END):
                c, dp_next, dk, dv = step(out, pipes, params, work_tile, c, dp_next, dk, dv, i,
                                          tile, bits, u, True, False, C)  # fmt: skip
    for j in range(whole, walk.count):  # full tiles, or the tiles that a mask lists
        after, bits = walk.tile(params, j)
        c, dp_next, dk, dv = step(out, pipes, params, work_tile, c, dp_next, dk, dv, i, after,
                                  bits, END, False, False, C)  # fmt: skip
        tile = after
        i += 1
        for u in gl.static_range(END):
            c, dp_next, dk, dv = step(out, pipes, params, work_tile, c, dp_next, dk, dv, i,
                                      tile, bits, u, False, False, C)  # fmt: skip
    c, dp_next, dk, dv = step(out, pipes, params, work_tile, c, dp_next, dk, dv, i, tile,
                              bits, END, False, True, C)  # fmt: skip
    return dk, dv, i + 1


@gluon.jit
def store_keys(desc, tail_desc, at, out, value, C: gl.constexpr, ADD: gl.constexpr):
    """Store 64 keys of dk or dv through the shared memory of dq."""
    stage, tail_stage = reinterpret(out.dq.smem.index(C), desc), out.tail_smem.index(C)
    store_gradient(desc, tail_desc, at, stage, tail_stage, value, ADD)


@gluon.jit
def consume(out, pipes, params, C: gl.constexpr):
    """A consumer's loop over key tiles, and over the query tiles of each."""
    seqlen, cfg = params.seqlen, params.cfg
    i = 0  # query tiles seen
    t = 0  # key tiles seen
    num_popped = 0
    work_index = pop_first_index(pipes.work_queue, num_popped, cfg.DYNAMIC)
    while work_index < params.order.num_tiles:
        batch, first_head, first = params.work_tile(work_index)
        q0, seqlen_q, k0, seqlen_k = seqlen.sequence(batch)
        if first < seqlen_k:
            col = first + 64 * C
            walk = make_walk(params, batch, first_head, first, seqlen_q, seqlen_k)
            dk = zero_columns(cfg.WIDTH, cfg.TAIL, cfg.G, cfg.G_TAIL)
            dv = zero_columns(cfg.WIDTH, cfg.TAIL, cfg.G, cfg.G_TAIL)
            if params.blocks.ON | (walk.count > 0):
                pipes.k.wait_full(t)
                pipes.v.wait_full(t)
                store_wait(0)  # dk and dv of the last tile have left the memory of dq
                for g in range(params.heads()):
                    head = first_head + g
                    if params.blocks.ON:
                        walk = make_walk(params, batch, head, first, seqlen_q, seqlen_k)
                    work_tile = BackwardTile(walk, col, seqlen_q, seqlen_k, i)
                    if walk.count > 0:
                        dk, dv, i = fold_head(out, pipes, params, work_tile, dk, dv, i, C)
                pipes.k.release(t)
                t += 1
            at = seqlen.coord(batch, first_head // params.heads(), k0, seqlen_k, col)
            if cfg.DQ:
                out.dq.wait_empty(i, C)
            store_keys(out.dv, out.dv_tail, at, out, dv, C, cfg.ADD)
            dk = scale_columns(dk, params.softmax_scale)
            store_keys(out.dk, out.dk_tail, at, out, dk, C, cfg.ADD)
        if cfg.DYNAMIC:
            num_popped += 1
        work_index = pop_next_index(pipes.work_queue, num_popped, work_index, cfg.DYNAMIC)
    store_wait(0)


@gluon.jit
def store_dq(dq_descs, out, pipes, params):
    """The storing warp's loop over key tiles, and over the query tiles of each. dq_descs: of each
    consumer's part.
    """
    seqlen, cfg = params.seqlen, params.cfg
    FIRST: gl.constexpr = dq_descs[0].block_shape[0]
    BOTH: gl.constexpr = FIRST + dq_descs[1].block_shape[0]
    num_popped = 0
    work_index = pop_first_index(pipes.work_queue, num_popped, cfg.DYNAMIC, 1)
    while work_index < params.order.num_tiles:
        batch, first_head, col = params.work_tile(work_index)
        q0, seqlen_q, _, seqlen_k = seqlen.sequence(batch)
        if col < seqlen_k:
            for g in range(params.heads()):
                walk = make_walk(params, batch, first_head + g, col, seqlen_q, seqlen_k)
                first_tile = params.padded_tile(batch, first_head + g, q0)
                for j in range(walk.count):
                    tile, _ = walk.tile(params, j)
                    for c in gl.static_range(2):
                        at = (first_tile + tile) * BOTH + c * FIRST
                        out.dq.add(dq_descs[c], [at, 0], c)
        if cfg.DYNAMIC:
            num_popped += 1
        work_index = pop_next_index(pipes.work_queue, num_popped, work_index, cfg.DYNAMIC, 1)


_RUNTIME = [
    "seqlen_q", "seqlen_k", "total_q", "total_k", "num_heads", "group_size", "left", "right",
    "mask_b", "mask_h", "tiles_n", "l2_group", "num_tiles", "num_sequences", "parts",
]  # fmt: skip


@gluon.jit(do_not_specialize=_RUNTIME)
def backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, rows_desc, dq_desc, dk_desc, dv_desc,
    q_tail, k_tail, v_tail, dout_tail, dq_tail, dk_tail, dv_tail,
    cu_seqlens_q, cu_seqlens_k, counter,
    full_offsets, full_indices, partial_offsets, partial_indices, partial_tiles, tiles,
    seqlen_q, seqlen_k, total_q, total_k, num_heads, group_size, left, right, mask_b, mask_h,
    tiles_n, l2_group, num_tiles, num_sequences, parts, scale_log2, inner, softmax_scale,
    WIDTH: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_MASK: gl.constexpr, SOFTCAP: gl.constexpr, DYNAMIC: gl.constexpr, DQ: gl.constexpr,
    ADD: gl.constexpr,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, Q_STAGES: gl.constexpr, DOUT_STAGES: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    """The entry of the kernel: build parameters and pipelines, then split into producer, consumers
    and storing warp. q_tail ... dv_tail: descriptors of the columns behind WIDTH, or None.
    """
    TAIL: gl.constexpr = 0 if q_tail is None else q_tail.block_shape[-1]
    dq_descs = dq_desc, dq_desc
    if TAIL:
        dq_descs = dq_desc, dq_tail
    cfg = BackwardConfig(TILE_M, TILE_N, WIDTH, TAIL, DYNAMIC, DQ, ADD,
                         dq_descs[0].block_shape[0] // 2,
                         dq_descs[1].block_shape[0] // 2)  # fmt: skip
    seqlen = SeqlenInfo(cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k, total_q, total_k, num_heads,
                        group_size, left, right, PACKED, HAS_LEFT, HAS_RIGHT)  # fmt: skip
    mirror = SeqlenInfo(cu_seqlens_k, cu_seqlens_q, seqlen_k, seqlen_q, total_k, total_q, num_heads,
                        group_size, right, left, PACKED, HAS_RIGHT, HAS_LEFT)  # fmt: skip
    blocks = BlockMaskLists(full_offsets, full_indices, partial_offsets, partial_indices,
                            partial_tiles, tiles, mask_b, mask_h, HAS_MASK)  # fmt: skip
    order = TileOrder(tiles_n, l2_group, num_tiles, HAS_RIGHT)
    scale = SoftmaxScale(scale_log2, inner, SOFTCAP)
    params = BackwardParams(
        seqlen, mirror, blocks, order, scale, softmax_scale, num_sequences, parts, cfg
    )
    q = make_pipeline(q_desc, Q_STAGES, 2, 1, PIPELINE_BARRIER)
    rows = make_linked_stages(rows_desc, Q_STAGES)
    dout = make_pipeline(dout_desc, DOUT_STAGES, 2, 1, PIPELINE_BARRIER + Q_STAGES)
    k = make_pipeline(k_desc, 1, 2)
    v = make_pipeline(v_desc, 1, 2)
    pipes = BackwardPipelines(
        q, rows, dout, k, v,
        make_tile_exchange(q_desc.dtype, TILE_N, TILE_M),
        make_work_queue(3 if DQ else 2, 1),
        make_tail(q, q_tail), make_tail(dout, dout_tail), make_tail(k, k_tail),
        make_tail(v, v_tail),
    )  # fmt: skip
    dq = make_store_queue(dq_desc, 2)
    out = GradOutput(dk_desc, dv_desc, dq, dk_desc, dv_desc, dq.smem)
    if TAIL:
        tail_smem = make_linked_stages(dk_tail, 2).smem
        out = GradOutput(dk_desc, dv_desc, dq, dk_tail, dv_tail, tail_smem)
    producer_args = ((q_desc, q_tail), rows_desc, (dout_desc, dout_tail), (k_desc, k_tail),
                     (v_desc, v_tail), counter, pipes, params)  # fmt: skip
    sync_with_previous_kernel()
    if DQ:
        gl.warp_specialize([
            (consume, (out, pipes, params, 0)),
            (consume, (out, pipes, params, 1)),
            (produce, producer_args),
            (store_dq, (dq_descs, out, pipes, params)),
        ], [4, 1, 1], [CONSUMER_REGS, PRODUCER_REGS, PRODUCER_REGS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (out, pipes, params, 0)),
            (consume, (out, pipes, params, 1)),
            (produce, producer_args),
        ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    out.dq.close()
    pipes.close()
