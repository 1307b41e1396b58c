"""The Hopper forward with 8-bit operands, prepared by onchip/kernels/triton/quantise.py.

  producer warp                            consumer warpgroups, in ping-pong order
  TMA Q (e4m3 or int8) --- q.full -------> wait_turn
  TMA K[i] --------------- k.full -------> S = Q K[i], signal_next, release K[i]
  scales: global memory -----------------> P = exp2(S * scale_q * scale_k - m) * 2^8
  TMA V[i] --------------- v.full -------> wait_turn, part = P V[i]
                                           O = O * alpha + part      (fp32, one multiply-add)

Programs, work queue and pipelines are forward.py's. The differences:
- A tile of 128 keys is a block that shares one scale. The scales of q and k are one factor of a
  tile's scores, so maxima are kept in powers of two, not in units of scores.
- p moves from the accumulator of QK to the operand of PV within a thread, because v's keys are
  permuted. It is not carried through the loop: bytes would occupy registers of their own (200 of
  645 instructions). So both products of a tile stay in one iteration, and the consumers overlap one
  another: the consumer with the turn (PINGPONG) computes PV of a tile and starts QK of the next,
  while the others exponentiate.
- FP8 products accumulate with about 14 bits (onchip/quant/accumulator.py). PV of a tile is a sum of
  its own, and one multiply-add takes it into the accumulator in place of the rescaling multiply: a
  promotion every 128 keys at no cost. The accumulator is in units of v's scale.
- p is stored times 2^8. Otherwise small weights would vanish in e4m3. l and acc have the same
  factor.
- q and k may be integers with a scale for each token (INT8_QK): a factor for each row and each
  column of the scores. v, and with it p, may stay in 16 bits (PV16).
- Keys that were in pages (PAGED) are read like those of a dense call: quantisation has copied them
  to blocks. Only their lengths are those of the pages, which are known on the device alone.

Worked shape: batch 1, 1 head, 300 tokens, head_dim 128: q, k and v are 3 blocks of 128 tokens, so
there are 3 scales each. The last block has 44 tokens; the other 84 are zeros.

examples/versions/v3.py teaches the pipeline, docs/numerics.md the recipes.
"""

from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from onchip.kernels.hopper.aggregate import aggregate
from onchip.kernels.hopper.block_sparse import BlockMaskLists
from onchip.kernels.hopper.column_tails import make_tail
from onchip.kernels.hopper.epilogue import (
    ForwardOutput,
    finalize_rows,
    lse_pointers,
    normalize,
    out_pointers,
    store_lse,
)
from onchip.kernels.hopper.forward import pop_work, skip_tiles
from onchip.kernels.hopper.gluon_types import gl, gluon
from onchip.kernels.hopper.mask import BlockRange, apply_window
from onchip.kernels.hopper.paging import make_paged_kv
from onchip.kernels.hopper.params import ForwardConfig, ForwardParams, ForwardPipelines, WorkTile
from onchip.kernels.hopper.pipeline import (
    FORWARD_BARRIER,
    make_pingpong,
    make_pipeline,
    make_work_queue,
    store_tile,
    store_wait,
    sync_with_previous_kernel,
)
from onchip.kernels.hopper.producer import ProducerState, push_next_work, push_work
from onchip.kernels.hopper.seqlen import SeqlenInfo
from onchip.kernels.hopper.softmax import (
    LOWEST,
    SoftmaxScale,
    approximate,
    broadcast_to_lane_sums,
    lane_sums,
    reduce_lane_sums,
)
from onchip.kernels.hopper.tile_scheduler import TileOrder

BLOCK = gl.constexpr(128)  # tokens that share a scale; also a tile of keys
P_SHIFT = gl.constexpr(8.0)  # p is stored times 2^8
MIN_FACTOR = gl.constexpr(
    2.0**-100
)  # least factor of scores: 0, the scale of zeros, times -inf would be NaN


@aggregate
class TileScales:
    """The scales of one key tile and its values."""

    k: gl.tensor
    v: gl.tensor


@aggregate
class QuantBlocks:
    """The scales of a call, and the position of its blocks. A head has blocks_q (blocks_k) blocks:
    of one sequence in a dense call, of all sequences in a packed one. kv_scales: scales of blocks
    of k and v, interleaved. With INT8_QK k has k_tokens instead.
    """

    q_scales: gl.tensor
    kv_scales: gl.tensor
    k_tokens: gl.tensor
    blocks_q: gl.tensor
    blocks_k: gl.tensor
    INT8_QK: gl.constexpr
    PV16: gl.constexpr

    @gluon.jit
    def q_block(self, seqlen, work_tile):
        """The first block of the queries of a sequence and head."""
        if seqlen.PACKED:
            return work_tile.head * self.blocks_q + work_tile.q0 // BLOCK + work_tile.batch
        else:
            return (work_tile.batch * seqlen.num_heads + work_tile.head) * self.blocks_q

    @gluon.jit
    def k_block(self, seqlen, work_tile, k0):
        """The first block of the keys of a sequence and head; the keys begin at k0."""
        head = work_tile.head // seqlen.group_size
        if seqlen.PACKED:
            return head * self.blocks_k + k0 // BLOCK + work_tile.batch
        else:
            kv_heads = seqlen.num_heads // seqlen.group_size
            return (work_tile.batch * kv_heads + head) * self.blocks_k

    @gluon.jit
    def scales(self, first, n):
        """The scales of key tile n, 1 where there is none. Loaded before the products, they have
        arrived after them.
        """
        at = self.kv_scales + 2 * (first + n)
        k = 1.0
        if not self.INT8_QK:
            k = gl.load(at)
        v = 1.0
        if not self.PV16:
            v = gl.load(at + 1)
        return TileScales(gl.to_tensor(k), gl.to_tensor(v))

    @gluon.jit
    def query_scales(self, seqlen, work_tile, layout: gl.constexpr):
        """The scales of 64 queries, one for all or one for each. Rows past the end take the last
        one.
        """
        last = gl.maximum(work_tile.seqlen_q - 1, 0)
        first = self.q_block(seqlen, work_tile)
        if self.INT8_QK:
            rows = work_tile.row + gl.arange(0, 64, gl.SliceLayout(1, layout))
            return gl.load(self.q_scales + first * BLOCK + gl.minimum(rows, last))
        else:
            return gl.load(self.q_scales + first + gl.minimum(work_tile.row, last) // BLOCK)

    @gluon.jit
    def token_scales(self, first, n, layout: gl.constexpr):
        """INT8_QK: the scales of the keys of tile n, as a row."""
        if self.INT8_QK:
            cols = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
            return gl.load(self.k_tokens + (first + n) * BLOCK + cols)[None, :]
        else:
            return ()


@gluon.jit
def produce(q_desc, k_desc, v_desc, counter, pipes, params, quant):
    """The producer's loop: K of a tile, Q once, V of the tile. See producer.produce."""
    seqlen, cfg = params.seqlen, params.cfg
    WIDTH_V: gl.constexpr = v_desc.block_shape[0]
    i = 0  # key tiles loaded
    t = 0  # tiles of queries loaded
    zero = params.order.num_tiles * 0  # a tensor, not a constexpr
    work_tile, state = push_work(
        counter, pipes, params, gl.program_id(0), ProducerState(zero, zero, zero, zero)
    )
    while work_tile.row >= 0:
        blocks = params.block_range(work_tile, cfg.CONSUMERS)
        first = quant.k_block(seqlen, work_tile, work_tile.k0)
        after = work_tile
        for n in range(blocks.hi - 1, blocks.lo - 1, -1):
            pipes.k.load(i, k_desc, [(first + n) * BLOCK, 0])
            if n == blocks.hi - 1:
                load_queries(pipes, q_desc, params, quant, work_tile, t)
            if n == gl.minimum(blocks.lo + 1, blocks.hi - 1):  # a draw takes longer than a key tile
                after, state = push_next_work(counter, pipes, params, state)
            pipes.k.wait_empty(i + 1)  # then V[i]'s stage is free too: see ForwardPipelines
            if quant.PV16:
                kv_head = work_tile.head // seqlen.group_size
                row = n * cfg.TILE_N
                at = seqlen.coord(work_tile.batch, kv_head, work_tile.k0, work_tile.seqlen_k, row)
                pipes.v.load(i, v_desc, at)
            else:
                pipes.v.load(i, v_desc, [(first + n) * WIDTH_V, 0])
            i += 1
        if blocks.hi == blocks.lo:
            load_queries(pipes, q_desc, params, quant, work_tile, t)
            after, state = push_next_work(counter, pipes, params, state)
        work_tile = after
        t += 1


@gluon.jit
def load_queries(pipes, q_desc, params, quant, work_tile, t):
    """Load the queries of the t-th tile, a stage for each consumer."""
    CONSUMERS: gl.constexpr = params.cfg.CONSUMERS
    row = quant.q_block(params.seqlen, work_tile) * BLOCK + work_tile.row
    for c in gl.static_range(CONSUMERS):
        pipes.q.wait_empty(t * CONSUMERS + c)
        pipes.q.load(t * CONSUMERS + c, q_desc, [row + 64 * c, 0])


@gluon.jit
def p_operand(p, cfg, dtype: gl.constexpr):
    """p as the left operand of PV, in the type of v. e4m3 has its columns in the order of v's keys:
    four neighbours belong to one thread.
    """
    if dtype == gl.float8e4nv:
        return _p_operand_fp8(p, cfg)
    else:
        return gl.convert_layout(p.to(dtype), cfg.P)


@gluon.jit
def _p_operand_fp8(p, cfg):
    TILE_N: gl.constexpr = cfg.TILE_N
    p = p.reshape([64, TILE_N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([64, TILE_N])
    return gl.inline_asm_elementwise(
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;"
        " cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }",
        "=r,r,r,r,r", [gl.convert_layout(p, cfg.P)], dtype=gl.float8e4nv, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def softmax_tile(s, m, factor, ROWS: gl.constexpr):
    """(p * 2^P_SHIFT, row maximum, rescale factor). Scores in powers of two are `factor` times s:
    one factor, or one for each row if ROWS.
    """
    m_new = gl.maximum(m, gl.max(s, 1) * factor)
    if ROWS:
        factor = factor[:, None]
    p = gl.exp2(s * factor - (m_new - P_SHIFT)[:, None])
    return p, m_new, gl.exp2(m - m_new)


@gluon.jit
def thread_sums(p):
    """lane_sums with both columns of a thread added, (64, 4), because registers are scarce here."""
    return gl.sum(lane_sums(p).reshape([64, 4, 2]), 2)


@gluon.jit
def add_values(pipes, cfg, p, acc, alpha, i, PV16: gl.constexpr):
    """acc * alpha + p v of iteration i, part by part of v's columns. Each part is a sum of its own
    until it is added.
    """
    PARTS: gl.constexpr = len(acc)
    zero = gl.zeros([64, cfg.WIDTH], gl.float32, cfg.O)
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, cfg.O))[:, None]
    added = ()
    for x in gl.static_range(PARTS):
        part = pipes.v.stage(i)
        if PV16:
            part = part.slice(x * cfg.WIDTH, cfg.WIDTH, 1)
        else:
            part = part.slice(x * cfg.WIDTH, cfg.WIDTH, 0).permute((1, 0))
        more = warpgroup_mma(p, part, zero, use_acc=False, is_async=True)
        more = warpgroup_mma_wait(num_outstanding=0, deps=(more,))
        more = acc[x] * alpha + more
        if x + 1 < PARTS:  # otherwise two sums would be in registers at once
            more = warpgroup_mma_wait(num_outstanding=0, deps=(more,))
        added = added + (more,)
    return added


@aggregate
class QuantTask:
    """64 queries of one head: the iteration of their q pipeline, the factor of their scores (one,
    or one for each row), the first block of their keys. turns: how many more turns than key tiles
    consumer C has had.
    """

    work_tile: WorkTile
    iteration: gl.tensor
    factor: gl.tensor
    first: gl.tensor
    turns: gl.tensor
    C: gl.constexpr


@gluon.jit
def make_task(params, quant, work_tile, t, C: gl.constexpr):
    """Consumer C's part of the t-th tile of queries."""
    seqlen = params.seqlen
    k0, _ = seqlen.k_range(work_tile.batch)
    factor = quant.query_scales(seqlen, work_tile, params.cfg.S) * params.scale.scale_log2
    iteration = t * params.cfg.CONSUMERS + C
    return QuantTask(work_tile, iteration, factor, quant.k_block(seqlen, work_tile, k0), t, C)


@gluon.jit
def compute_qk(pipes, cfg, q, i, INT8_QK: gl.constexpr, C: gl.constexpr):
    """Q K of iteration i, in int32 for integers. Consumer C signals the next one."""
    zero = gl.zeros([64, cfg.TILE_N], gl.int32 if INT8_QK else gl.float32, cfg.S)
    k = pipes.k.stage(i).permute((1, 0))
    s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    if cfg.PINGPONG:
        pipes.pingpong.signal_next(C)
    return warpgroup_mma_wait(num_outstanding=0, deps=(s,))


@gluon.jit
def fold_tile(pipes, params, quant, task, q, acc, m, l, unit, i, n, MASKED: gl.constexpr):
    """Fold key tile n as iteration i. acc arrives in units of the last tile's scale of v, and
    leaves in units of this tile's. The consumer has its turn before and after.
    """
    cfg, work_tile = params.cfg, task.work_tile
    scales = quant.scales(task.first, n)
    tokens = quant.token_scales(task.first, n, cfg.S)
    pipes.k.wait_full(i)
    s = compute_qk(pipes, cfg, q, i, quant.INT8_QK, task.C)
    pipes.k.release(i)
    if quant.INT8_QK:
        s = s.to(gl.float32) * tokens
    if MASKED:
        col = n * cfg.TILE_N
        s = apply_window(
            params.seqlen, s, work_tile.row, col, work_tile.seqlen_q, work_tile.seqlen_k, cfg.S
        )
    factor = gl.maximum(task.factor * scales.k, MIN_FACTOR)
    p, m, alpha = softmax_tile(s, m, factor, quant.INT8_QK)
    l = l * broadcast_to_lane_sums(alpha, l) + thread_sums(p)
    alpha = alpha * (unit * approximate("rcp", scales.v))
    pipes.v.wait_full(i)
    p = p_operand(p, cfg, pipes.v.smem.dtype)
    if cfg.PINGPONG:
        pipes.pingpong.wait_turn(task.C, i + 1 + task.turns)
    return add_values(pipes, cfg, p, acc, alpha, i, quant.PV16), m, l, scales.v


@gluon.jit
def fold_tiles(pipes, params, quant, task, acc, m, l, unit, i, hi, lo, MASKED: gl.constexpr):
    """Fold the key tiles from hi down to lo. Each loop has its own address of the queries, which
    ptxas cannot prove equal to the other loops'. Otherwise ptxas used in one loop what another
    loop, which had no iterations, had not computed (docs/notebook.md, products of nothing).
    """
    q = pipes.q.opaque_stage(task.iteration, i)
    for n in range(hi - 1, lo - 1, -1):
        acc, m, l, unit = fold_tile(pipes, params, quant, task, q, acc, m, l, unit, i, n, MASKED)
        i += 1
    return acc, m, l, unit, i


@gluon.jit
def fold(pipes, params, quant, task, own_blocks, i, PARTS: gl.constexpr):
    """Fold all key tiles that a consumer sees: cut by the diagonal or the end, full, cut by the
    left edge of the window.
    """
    cfg = params.cfg
    acc = (gl.zeros([64, cfg.WIDTH], gl.float32, cfg.O),) * PARTS
    m = gl.full([64], LOWEST, gl.float32, gl.SliceLayout(1, cfg.S))
    l = thread_sums(gl.zeros([64, cfg.TILE_N], gl.float32, cfg.S))
    unit = 1.0
    if cfg.PINGPONG:
        pipes.pingpong.wait_turn(task.C, i + task.turns)
    acc, m, l, unit, i = fold_tiles(pipes, params, quant, task, acc, m, l, unit, i, own_blocks.hi,
                                    own_blocks.full_hi, True)  # fmt: skip
    acc, m, l, unit, i = fold_tiles(pipes, params, quant, task, acc, m, l, unit, i,
                                    own_blocks.full_hi, own_blocks.full_lo, False)  # fmt: skip
    if params.seqlen.HAS_LEFT:
        acc, m, l, unit, i = fold_tiles(pipes, params, quant, task, acc, m, l, unit, i,
                                        own_blocks.full_lo, own_blocks.lo, True)  # fmt: skip
    if cfg.PINGPONG:
        pipes.pingpong.signal_next(task.C)
    return acc, m, reduce_lane_sums(l, cfg.S), unit, i


@gluon.jit
def finish_tile_rows(out, params, work_tile, acc, m, l, unit, C: gl.constexpr):
    """Store the result of 64 queries. lse already has what quantisation subtracted from their
    scores.
    """
    at, exist = lse_pointers(out, params, work_tile)
    m_log2 = m - P_SHIFT + gl.load(at, mask=exist, other=0.0)
    m_log2, l, inverse = finalize_rows(out, params, work_tile, m_log2, l)
    store_lse(out, params, work_tile, m_log2, l)
    inverse = inverse * unit
    for x in gl.static_range(len(acc)):
        store_part(out, params, work_tile, normalize(acc[x], inverse), x, C)


@gluon.jit
def store_part(out, params, work_tile, acc, PART: gl.constexpr, C: gl.constexpr):
    """Store some columns of 64 rows of the output."""
    FIRST: gl.constexpr = PART * params.cfg.WIDTH
    if out.STAGED:
        at = params.tile_coord(work_tile)
        stage = out.smem.index(C)
        store_tile(out.ref, at[:-1] + (gl.to_tensor(FIRST),), stage, acc.to(out.ref.dtype))
    else:
        at, inside = out_pointers(out, params, work_tile, acc, FIRST)
        gl.store(at, acc, mask=inside)


@gluon.jit
def clamp_range(own_blocks, blocks):
    """The key tiles of a consumer, clamped to its program's. Queries past the end see none,
    and their range may lie anywhere.
    """
    lo = gl.minimum(gl.maximum(own_blocks.lo, blocks.lo), blocks.hi)
    hi = gl.maximum(gl.minimum(own_blocks.hi, blocks.hi), lo)
    full_hi = gl.minimum(gl.maximum(own_blocks.full_hi, lo), hi)
    return BlockRange(lo, gl.minimum(gl.maximum(own_blocks.full_lo, lo), full_hi), full_hi, hi)


@gluon.jit
def attend_tile(out, pipes, params, quant, work, t, i, C: gl.constexpr, PARTS: gl.constexpr):
    """Compute one consumer's 64 queries: (the next work, i)."""
    cfg, work_tile, blocks = params.cfg, work.work_tile, work.blocks
    own_blocks = clamp_range(work.own_blocks, blocks)
    i = skip_tiles(pipes, cfg, i, blocks.hi - own_blocks.hi, C, t)
    task = make_task(params, quant, work_tile, t, C)
    pipes.q.wait_full(task.iteration)
    acc, m, l, unit, i = fold(pipes, params, quant, task, own_blocks, i, PARTS)
    pipes.q.release(task.iteration)
    after = pop_work(pipes, params, t + 1, C)
    finish_tile_rows(out, params, work_tile, acc, m, l, unit, C)
    return after, skip_tiles(pipes, cfg, i, own_blocks.lo - blocks.lo, C, t + 1)


@gluon.jit
def consume(out, pipes, params, quant, C: gl.constexpr, PARTS: gl.constexpr):
    """A consumer's loop over work items."""
    i = 0  # key tiles seen
    t = 0  # tiles of queries seen
    work = pop_work(pipes, params, 0, C)
    while work.exists:
        work, i = attend_tile(out, pipes, params, quant, work, t, i, C, PARTS)
        t += 1
    store_wait(0)


_RUNTIME = [
    "seqlen_q", "seqlen_k", "total_q", "total_k", "num_heads", "group_size", "left", "right", "dim",
    "rows_per_batch", "tiles_m", "l2_group", "num_tiles", "blocks_q", "blocks_k", "batch",
]  # fmt: skip


@gluon.jit(do_not_specialize=_RUNTIME)
def forward_8bit_kernel(
    q_desc, k_desc, v_desc, out_ref, lse_ptr, sinks_ptr, q_scales, kv_scales, k_tokens,
    cu_seqlens_q, cu_seqlens_k, cache_seqlens, counter,
    seqlen_q, seqlen_k, total_q, total_k, num_heads, group_size, left, right, dim, rows_per_batch,
    tiles_m, l2_group, num_tiles, blocks_q, blocks_k, batch, scale_log2,
    WIDTH: gl.constexpr, PACKED: gl.constexpr, PAGED: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, HAS_SINKS: gl.constexpr, STAGED: gl.constexpr,
    TILE_N: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    PINGPONG: gl.constexpr, DYNAMIC: gl.constexpr, NAMED_BARRIERS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
):  # fmt: skip
    INT8_QK: gl.constexpr = q_desc.dtype == gl.int8
    PV16: gl.constexpr = v_desc.dtype != gl.float8e4nv
    PARTS: gl.constexpr = v_desc.block_shape[-1 if PV16 else 0] // WIDTH
    cfg = ForwardConfig(TILE_N, WIDTH, CONSUMERS, PINGPONG, DYNAMIC, False, "always", 0, False, 0,
                 16 if PV16 else 8, 8)  # fmt: skip
    seqlen = SeqlenInfo(cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k, total_q, total_k, num_heads,
                        group_size, left, right, PACKED, HAS_LEFT, HAS_RIGHT)  # fmt: skip
    none = counter
    blocks = BlockMaskLists(none, none, none, none, none, none, batch, batch, False)
    SLOTS: gl.constexpr = TILE_N if PAGED else 0  # a block is a page; nothing reads a table
    pages = make_paged_kv(none, cache_seqlens, batch, blocks_k, batch, batch, batch, SLOTS, TILE_N)
    order = TileOrder(tiles_m, l2_group, num_tiles, HAS_RIGHT)
    params = ForwardParams(
        seqlen, blocks, pages, order, SoftmaxScale(scale_log2, scale_log2, False), cfg, batch
    )
    quant = QuantBlocks(q_scales, kv_scales, k_tokens, blocks_q, blocks_k, INT8_QK, PV16)
    q = make_pipeline(q_desc, Q_STAGES * CONSUMERS, 1)
    k = make_pipeline(k_desc, STAGES, CONSUMERS, 1, FORWARD_BARRIER if NAMED_BARRIERS else 0)
    v = make_pipeline(v_desc, STAGES, CONSUMERS)
    pipes = ForwardPipelines(
        q, k, v, make_work_queue(CONSUMERS, params.FIELDS), make_pingpong(CONSUMERS),
        make_tail(q, None), make_tail(k, None), make_tail(v, None),
    )  # fmt: skip
    out_smem = q.smem
    if STAGED:
        shape_out: gl.constexpr = [CONSUMERS] + out_ref.block_shape
        out_smem = gl.allocate_shared_memory(out_ref.dtype, shape_out, out_ref.layout)
    out = ForwardOutput(out_ref, out_smem, q, lse_ptr, sinks_ptr, dim, rows_per_batch, HAS_SINKS,
                        STAGED, False, False, out_ref, out_smem, pipes.q_tail)  # fmt: skip
    loader = (q_desc, k_desc, v_desc, counter, pipes, params, quant)
    sync_with_previous_kernel()
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (out, pipes, params, quant, 0, PARTS)),
            (consume, (out, pipes, params, quant, 1, PARTS)),
            (produce, loader),
        ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (out, pipes, params, quant, 0, PARTS)),
            (consume, (out, pipes, params, quant, 1, PARTS)),
            (consume, (out, pipes, params, quant, 2, PARTS)),
            (produce, loader),
        ], [4, 4, 1], [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    pipes.close()
