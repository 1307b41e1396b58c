"""FlashAttention-3's forward on Hopper, in Gluon: warp specialisation, TMA, asynchronous wgmma.

  producer warp (producer.py)                 consumer warpgroups 0, 1 (, 2): 64 queries each
  ---------------------------                 ------------------------------------------------
  take a work index --- work_queue ---------> pop_work
  TMA K[0] ---------- k.full ---------------> wait for Q, then for K[0]
  TMA Q[t, c] ------- q.full --------------->           S = Q K[0], P = exp2(S - m), row sums l
            <-------- k.empty ----------------  release K[0]
  TMA K[i] ---------- k.full ---------------> loop over key tiles:
                                                start   S' = Q K[i]      (wgmma, asynchronous)
                                                O *= alpha of tile i - 1 (RESCALE_UNDER_QK)
  TMA V[i] ---------- v.full --------------->   start   O += P V[i-1]    (wgmma, asynchronous)
                                                wait S', P = exp2(S' - m), row sums l
            <-------- k.empty ----------------  wait O, release K[i] (and with it V[i-1])
                                                O *= alpha of tile i     (otherwise)
            <-------- q.empty ----------------  release Q, O += P V[last], O / l
                                                epilogue.py: lse, O -> smem -> TMA store
  K[i], V[i]: the key tile of iteration i, from the last key tile to the first: K[0] is at the
  diagonal. k.empty is an mbarrier, or with NAMED_BARRIERS (head_dim 128) a named barrier.
  PINGPONG (head_dim 64): consumer c signals consumer c + 1 when its scores are complete.
  The first work index is the number of the program, the next ones are drawn from a counter.

Each consumer computes the scores of key tile i while it accumulates the values of tile i - 1, or
with OVERLAP=False after them; then the other consumers alone keep the tensor cores busy.
Programs are persistent: the producer loads the next tile of queries while the consumers store the
last.

Worked shape: batch 1, 1 head, 300 tokens, causal, head_dim 128, two consumers, tiles of 128 keys.
There are three query tiles of 128 rows, computed last first. The tile 256..299 has 44 rows and sees
the key tiles 2 (masked by the diagonal and the end), 1 and 0 (full). Consumer 1 of that tile has
rows 320..383, none of which exist, but its stages are loaded and released all the same.

examples/versions/v3.py teaches this kernel in about 100 lines, v4.py the variants "stale" and
EMULATED_EXP2.
"""

from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents

from onchip.kernels.hopper.aggregate import aggregate
from onchip.kernels.hopper.block_sparse import (
    BlockEntries,
    BlockMaskLists,
    StripMaskLists,
    StripView,
)
from onchip.kernels.hopper.column_tails import (
    load_q,
    make_tail,
    rescale_acc,
    start_pv,
    start_qk,
    wait_products,
    zero_acc,
)
from onchip.kernels.hopper.epilogue import (
    ForwardOutput,
    finalize_lse,
    finish,
    load_previous_lse,
    prefetch_lse,
    release_previous_out,
    store_out,
)
from onchip.kernels.hopper.gluon_types import gl, gluon
from onchip.kernels.hopper.mask import BlockRange, apply_block_mask, apply_window, load_mask_words
from onchip.kernels.hopper.paging import make_paged_kv
from onchip.kernels.hopper.params import ForwardConfig, ForwardParams, ForwardPipelines, WorkTile
from onchip.kernels.hopper.pipeline import (
    FORWARD_BARRIER,
    make_linked_stages,
    make_pingpong,
    make_pipeline,
    make_work_queue,
    store_wait,
    sync_with_previous_kernel,
)
from onchip.kernels.hopper.producer import produce
from onchip.kernels.hopper.seqlen import SeqlenInfo
from onchip.kernels.hopper.softmax import (
    SoftmaxScale,
    broadcast_to_lane_sums,
    delay_wait,
    exp2,
    lane_sums,
    reduce_lane_sums,
    softmax,
)
from onchip.kernels.hopper.tile_scheduler import TileOrder


@gluon.jit
def mask_words(params, work_tile, n, bits):
    """The mask words of key tile n, from its bit tile."""
    cfg = params.cfg
    return load_mask_words(
        params.blocks.tiles, bits, work_tile.row, n * cfg.TILE_N, cfg.TILE_N, cfg.S
    )


@gluon.jit
def prefetch_mask_words(params, work_tile, n, bits):
    """The mask words of key tile n, loaded before its scores are complete. Not in strips: most
    tiles of a strip have no bit tile, and finding that out early costs each of them more than the
    late load costs the others.
    """
    if params.blocks.ON and not params.STRIPS:
        return mask_words(params, work_tile, n, bits)
    else:
        return ()


@gluon.jit
def mask_scores(params, work_tile, s, n, bits, words, is_masked):
    """s of key tile n with -inf at hidden scores: by the window and the end, or by a bit tile.
    is_masked: whether some may be hidden. With block lists this is decided here.
    """
    seqlen, cfg = params.seqlen, params.cfg
    seqlen_q, seqlen_k, col = work_tile.seqlen_q, work_tile.seqlen_k, n * cfg.TILE_N
    if params.STRIPS:
        if is_masked:
            tile_words = mask_words(params, work_tile, n, bits)
            s = apply_block_mask(
                seqlen, s, tile_words, work_tile.row, col, seqlen_q, seqlen_k, cfg.S
            )
    elif params.blocks.ON:
        if seqlen.HAS_LEFT | seqlen.HAS_RIGHT | (bits >= 0) | (col + cfg.TILE_N > seqlen_k):
            s = apply_block_mask(seqlen, s, words, work_tile.row, col, seqlen_q, seqlen_k, cfg.S)
    elif is_masked:
        s = apply_window(seqlen, s, work_tile.row, col, seqlen_q, seqlen_k, cfg.S)
    return s


@gluon.jit
def start_first_qk(pipes, cfg, q, i, C: gl.constexpr):
    """Start S = Q K of iteration i, the first key tile of a tile of queries."""
    pipes.k.wait_full(i)
    if cfg.PINGPONG:
        pipes.pingpong.wait_turn(C, i)
    s_next = start_qk(pipes, cfg, q, i)
    if cfg.PINGPONG:
        pipes.pingpong.signal_next(C)
    return s_next


@gluon.jit
def finish_first_tile(params, work_tile, s, n, bits, is_masked, dtype: gl.constexpr):
    """(p, m, l) of the first key tile of a tile of queries, from its scores."""
    seqlen, cfg = params.seqlen, params.cfg
    s = params.scale.apply_softcap(s)
    CUT: gl.constexpr = params.blocks.ON or seqlen.HAS_LEFT or seqlen.HAS_RIGHT
    if CUT or (n + 1) * cfg.TILE_N > work_tile.seqlen_k:
        s = mask_scores(
            params,
            work_tile,
            s,
            n,
            bits,
            prefetch_mask_words(params, work_tile, n, bits),
            is_masked,
        )
    m = params.scale.clamp_maxima(gl.max(s, 1))
    scale_log2 = params.scale.scale_log2
    p = exp2(s * scale_log2 - (m * scale_log2)[:, None], cfg.EMULATED_EXP2)
    return gl.convert_layout(p.to(dtype), cfg.P), m, lane_sums(p)


@gluon.jit
def start_tile(pipes, cfg, q, p, acc, alpha, i, last, C: gl.constexpr):
    """Start (S = Q K of iteration i, O += P V of iteration `last`). With RESCALE_UNDER_QK, acc is
    multiplied by alpha here, while the tensor cores compute S. Without OVERLAP, O is complete
    before S is started: then S takes the registers of P.
    """
    pipes.k.wait_full(i)
    if cfg.OVERLAP:
        if cfg.PINGPONG:
            pipes.pingpong.wait_turn(C, i)
        s_next = start_qk(pipes, cfg, q, i)
        if cfg.RESCALE_UNDER_QK:
            acc = rescale_acc(acc, alpha, cfg)
        pipes.v.wait_full(last)
        return s_next, start_pv(pipes, cfg, p, acc, last)
    else:
        pipes.v.wait_full(last)
        if cfg.PINGPONG:
            pipes.pingpong.wait_turn(C, i)
        acc = wait_products(0, start_pv(pipes, cfg, p, acc, last))
        return start_qk(pipes, cfg, q, i), acc


@gluon.jit
def finish_tile(pipes, params, work_tile, s_next, acc_next, alpha, m, l, i, n, bits, is_masked,
                dtype: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """(p, acc, alpha, m, l) after key tile n; its scores were started as iteration i. With
    RESCALE_UNDER_QK, acc is returned in units of the maximum before this tile, and alpha is what
    start_tile multiplies it by. Otherwise acc is up to date, and alpha passes through, unused.
    """
    cfg = params.cfg
    words = prefetch_mask_words(params, work_tile, n, bits)
    under_softmax: gl.constexpr = len(acc_next) if cfg.OVERLAP else 0
    s_next = warpgroup_mma_wait(num_outstanding=under_softmax, deps=(s_next,))
    if cfg.PINGPONG:
        pipes.pingpong.signal_next(C)
    if not cfg.OVERLAP:
        pipes.k.release(i)
    s = params.scale.apply_softcap(s_next)
    s = mask_scores(params, work_tile, s, n, bits, words, is_masked)
    p_wide, m, new_alpha = softmax(s, m, params)
    if cfg.DELAY_PV_WAIT:
        p_wide = delay_wait(p_wide, cfg.DELAY_PV_WAIT)
    l = l * broadcast_to_lane_sums(new_alpha, l) + lane_sums(p_wide)
    acc = acc_next
    if cfg.OVERLAP:
        acc = wait_products(0, acc_next)
        pipes.k.release(i)  # not before: V[i - 1], which O has read, is released with it
    if cfg.RESCALE_UNDER_QK:
        alpha = new_alpha
    else:
        acc = rescale_acc(acc, new_alpha, cfg)
    return gl.convert_layout(p_wide.to(dtype), cfg.P), acc, alpha, m, l


@gluon.jit
def fold_tile(pipes, params, work_tile, q, p, acc, alpha, m, l, i, n, bits,
              MASKED: gl.constexpr, C: gl.constexpr):  # fmt: skip
    """Fold key tile n as iteration i: its scores are computed while the values of iteration i - 1
    are accumulated, or with OVERLAP=False after them.
    """
    s_next, acc_next = start_tile(pipes, params.cfg, q, p, acc, alpha, i, i - 1, C)
    return finish_tile(pipes, params, work_tile, s_next, acc_next, alpha, m, l, i, n, bits, MASKED,
                       pipes.q.smem.dtype, C)  # fmt: skip


@gluon.jit
def fold_band(pipes, params, work_tile, own_blocks, q, p, acc, m, l, i, C: gl.constexpr):
    """Fold the key tiles of own_blocks after the first: cut by the diagonal, full, cut by the left
    edge of the window. Cut tiles are unrolled, not looped. Otherwise p, carried from loop to loop
    in 16 bits, would be repacked in every iteration (64 more instructions of 520).
    """
    seqlen, cfg = params.seqlen, params.cfg
    ROWS: gl.constexpr = 64 // seqlen.GROUP * cfg.CONSUMERS
    CUTS: gl.constexpr = (ROWS + cfg.TILE_N - 2) // cfg.TILE_N + 1  # tiles that one edge can cut
    alpha = gl.full_like(m, 1.0)
    for x in gl.static_range(CUTS - 1 if seqlen.HAS_RIGHT else 0):
        n = own_blocks.hi - 2 - x
        if n >= own_blocks.full_hi:
            p, acc, alpha, m, l = fold_tile(pipes, params, work_tile, q, p, acc, alpha, m, l, i,
                                            n, -1, True, C)  # fmt: skip
            i += 1
    whole_hi = gl.minimum(own_blocks.full_hi, own_blocks.hi - 1)
    for n in range(whole_hi - 1, own_blocks.full_lo - 1, -1):
        p, acc, alpha, m, l = fold_tile(pipes, params, work_tile, q, p, acc, alpha, m, l, i, n,
                                        -1, False, C)  # fmt: skip
        i += 1
    for x in gl.static_range(CUTS if seqlen.HAS_LEFT else 0):
        n = gl.minimum(own_blocks.full_lo, whole_hi) - 1 - x
        if n >= own_blocks.lo:
            p, acc, alpha, m, l = fold_tile(pipes, params, work_tile, q, p, acc, alpha, m, l, i,
                                            n, -1, True, C)  # fmt: skip
            i += 1
    return p, acc, alpha, m, l, i


@gluon.jit
def fold_blocks(pipes, params, work_tile, entries, count, q, p, acc, m, l, i, C: gl.constexpr):
    """Fold the tiles that a mask lists; the list is read one tile ahead. gl.assume(i > 0) makes the
    stage of an iteration one instruction instead of four or five. fold_band gains nothing by it
    (and loses 3 % at head_dim 256).
    """
    alpha = gl.full_like(m, 1.0)
    n, bits = params.blocks.tile(entries, 1, params.cfg.TILE_N)
    for j in range(1, count):
        gl.assume(i > 0)
        n_next, bits_next = params.blocks.tile(entries, j + 1, params.cfg.TILE_N)
        p, acc, alpha, m, l = fold_tile(pipes, params, work_tile, q, p, acc, alpha, m, l, i, n,
                                        bits, True, C)  # fmt: skip
        i += 1
        n = n_next
        bits = bits_next
    return p, acc, alpha, m, l, i


@gluon.jit
def fold_strip(pipes, params, work_tile, strip_view, q, p, acc, m, l, last, C: gl.constexpr):
    """Fold the entries that a consumer sees of a strip, the first of which is iteration `last`.
    Between two of its own there may be one entry of the other side. It is skipped when the values
    before it are accumulated; not at the end of that loop iteration, where the compiler would pack
    all of p behind the branch.
    """
    alpha = gl.full_like(m, 1.0)
    at = strip_view.at(strip_view.top)
    far = strip_view.entry(at).far()
    at = strip_view.after(at, far)
    entry = strip_view.entry(at)
    pending = far * 0  # 1 if iteration last - 1 is the other side's, and not released yet
    for _ in range(1, strip_view.count):
        if pending != 0:
            skip_linked_tile(pipes, last - 1)
        i = last + 1 + far
        gl.assume(last >= 0)  # see fold_blocks
        gl.assume(i >= 0)
        s_next, acc_next = start_tile(pipes, params.cfg, q, p, acc, alpha, i, last, C)
        pending = far
        far = entry.far()
        at = strip_view.after(at, far)
        after = strip_view.entry(at)  # loads while the tensor cores work
        n, bits = entry.tile(work_tile.seqlen_k)
        p, acc, alpha, m, l = finish_tile(pipes, params, work_tile, s_next, acc_next, alpha, m, l,
                                          i, n, bits, entry.is_masked(), pipes.q.smem.dtype,
                                          C)  # fmt: skip
        last = i
        entry = after
    if pending != 0:
        skip_linked_tile(pipes, last - 1)
    return p, acc, alpha, m, l, last + 1


@gluon.jit
def skip_linked_tile(pipes, i):
    """Skip K/V tile i, which only other warpgroups use, after K[i + 1] was released. Wait for V[i]
    before releasing K[i]: otherwise V's stage could be refilled, and its barrier complete a second
    phase before this warpgroup has seen the first. (skip_tiles releases K[i] first: it has not
    released K[i + 1] yet, without which V[i]'s stage is not refilled.)
    """
    gl.assume(i >= 0)
    pipes.k.wait_full(i)
    pipes.v.wait_full(i)
    pipes.k.release(i)


@gluon.jit
def skip_tiles(pipes, cfg, i, count, C: gl.constexpr, turns=0):
    """Skip `count` key tiles that only other consumers see. turns: how many more turns than key
    tiles this consumer has had in the ping-pong order.
    """
    for _ in range(count):
        pipes.k.wait_full(i)
        if cfg.PINGPONG:
            pipes.pingpong.wait_turn(C, i + turns)
            pipes.pingpong.signal_next(C)
        pipes.k.release(i)
        pipes.v.wait_full(i)  # otherwise its next phase could be taken for this one
        i += 1
    return i


@aggregate
class ConsumerWork:
    """A consumer's part of a work item: its queries, the key tiles that the program loads and
    that this consumer sees, and the lists of a mask. exists: there was a work item.
    """

    exists: gl.tensor
    work_tile: WorkTile
    blocks: BlockRange
    own_blocks: BlockRange
    entries: BlockEntries | StripView

    @gluon.jit
    def sees(self):
        """Whether this consumer sees any key."""
        return self.exists & (self.own_blocks.hi > self.own_blocks.lo)


@gluon.jit
def pop_work(pipes, params, t, C: gl.constexpr):
    """The work of consumer C for the t-th item."""
    program_tile = params.unpack_tile(pipes.work_queue.pop(t))
    work_tile = params.consumer_tile(program_tile, C)
    zero = t * 0  # a tensor, not a constexpr
    if params.STRIPS:
        entries = params.strip_view(program_tile, work_tile)
        total = entries.total()
        blocks = BlockRange(zero, zero, total, total)
        behind = gl.where(entries.count > 0, entries.bottom, total)
        own_blocks = BlockRange(behind, behind, behind, entries.top + 1)
    elif params.blocks.ON:
        entries, count = params.list_blocks(program_tile)
        blocks = BlockRange(zero, zero, count, count)
        own_blocks = blocks
    else:
        entries = BlockEntries(zero, zero, zero, zero)
        blocks = params.block_range(program_tile, params.cfg.CONSUMERS)
        own_blocks = params.block_range(work_tile, 1)
    return ConsumerWork(program_tile.row >= 0, work_tile, blocks, own_blocks, entries)


@gluon.jit
def compute_first_qk(pipes, cfg, work, i_q, i, C: gl.constexpr):
    """(scores of the first key tile that a consumer sees, its iteration, Q: see load_q)"""
    i = skip_tiles(pipes, cfg, i, work.blocks.hi - work.own_blocks.hi, C)
    pipes.q.wait_full(i_q)
    q = load_q(pipes, cfg, i_q)
    s_next = start_first_qk(pipes, cfg, q, i, C)
    s = warpgroup_mma_wait(num_outstanding=0, deps=(s_next,))
    pipes.k.release(i)
    return s, i, q


@gluon.jit
def fold(pipes, params, work, q, s, i, C: gl.constexpr):
    """Fold all key tiles of `work`. s: the scores of the first one, iteration i."""
    work_tile, own_blocks = work.work_tile, work.own_blocks
    acc = zero_acc(params.cfg)
    dtype: gl.constexpr = pipes.q.smem.dtype
    if params.STRIPS:
        entry = work.entries.entry(work.entries.at(work.entries.top))
        n, bits = entry.tile(work_tile.seqlen_k)
        p, m, l = finish_first_tile(params, work_tile, s, n, bits, entry.is_masked(), dtype)
        return fold_strip(pipes, params, work_tile, work.entries, q, p, acc, m, l, i, C)
    elif params.blocks.ON:
        n, bits = params.blocks.tile(work.entries, 0, params.cfg.TILE_N)
        p, m, l = finish_first_tile(params, work_tile, s, n, bits, True, dtype)
        return fold_blocks(
            pipes, params, work_tile, work.entries, own_blocks.hi, q, p, acc, m, l, i + 1, C
        )
    else:
        p, m, l = finish_first_tile(params, work_tile, s, own_blocks.hi - 1, -1, True, dtype)
        return fold_band(pipes, params, work_tile, own_blocks, q, p, acc, m, l, i + 1, C)


@gluon.jit
def attend_tile(out, pipes, params, work, t, i, C: gl.constexpr):
    """Compute 64 queries that see keys: (the next work, i)."""
    cfg = params.cfg
    EARLY: gl.constexpr = not (out.STAGED and cfg.OUT_IN_Q)  # the output does not overwrite Q
    iteration = t * cfg.CONSUMERS + C
    s, i, q = compute_first_qk(pipes, cfg, work, iteration, i, C)
    if EARLY and cfg.Q_IN_REGISTERS:
        pipes.q.release(iteration)
    release_previous_out(out, cfg, t - 1, C)
    prefetch_lse(out, params, work.work_tile)
    p, acc, alpha, m, l, i = fold(pipes, params, work, q, s, i, C)
    if EARLY and not cfg.Q_IN_REGISTERS:
        pipes.q.release(iteration)
    if cfg.RESCALE_UNDER_QK:
        acc = rescale_acc(acc, alpha, cfg)
    pipes.v.wait_full(i - 1)
    l = reduce_lane_sums(l, cfg.S)
    acc_next = start_pv(pipes, cfg, p, acc, i - 1)
    before = load_previous_lse(out, params, work.work_tile)
    after = pop_work(pipes, params, t + 1, C)
    finish(out, params, work.work_tile, before, acc_next, m, l, t, C)
    i = skip_tiles(pipes, cfg, i, work.own_blocks.lo - work.blocks.lo, C)
    if not EARLY:
        store_wait(0)
        pipes.q.release(iteration)
    return after, i


@gluon.jit
def skip_queries_without_keys(out, pipes, params, work, t, i, C: gl.constexpr):
    """Store zeros and lse = -inf for queries that see no key, though queries of other
    consumers may.
    """
    cfg = params.cfg
    rows: gl.constexpr = gl.SliceLayout(1, cfg.S)
    iteration = t * cfg.CONSUMERS + C
    i = skip_tiles(pipes, cfg, i, work.blocks.hi - work.blocks.lo, C)
    pipes.q.wait_full(iteration)
    release_previous_out(out, cfg, t - 1, C)
    if out.MERGE:
        out.previous_out.wait_full(iteration)
    else:
        m = params.scale.clamp_maxima(gl.full([64], float("-inf"), gl.float32, rows))
        finalize_lse(out, params, work.work_tile, (), m, gl.zeros([64], gl.float32, rows))
        store_out(out, params, work.work_tile, zero_acc(cfg), C)
    if cfg.OUT_IN_Q:
        store_wait(0)
    pipes.q.release(iteration)
    return i


@gluon.jit
def consume(out, pipes, params, C: gl.constexpr):
    """A consumer's loop over work items."""
    i = 0  # key tiles seen
    t = 0  # tiles of queries seen
    work = pop_work(pipes, params, 0, C)
    while work.exists:
        if work.sees():
            work, i = attend_tile(out, pipes, params, work, t, i, C)
        else:
            i = skip_queries_without_keys(out, pipes, params, work, t, i, C)
            work = pop_work(pipes, params, t + 1, C)
        t += 1
    store_wait(0)


# Lengths are not specialised: otherwise 200 lengths would be 200 compilations, and a length of 1
# would be a constexpr, not a tensor.
_RUNTIME = [
    "seqlen_q", "seqlen_k", "total_q", "total_k", "num_heads", "group_size", "left", "right",
    "mask_b", "mask_h", "dim", "rows_per_batch", "tiles_m", "l2_group", "num_tiles",
    "table_stride", "max_pages", "num_pages", "page_stride_k", "page_stride_v", "batch",
]  # fmt: skip


@gluon.jit(do_not_specialize=_RUNTIME)
def forward_kernel(
    q_desc, k_desc, v_desc, out_ref, q_tail, k_tail, v_tail, out_tail, lse_ptr, sinks_ptr,
    cu_seqlens_q, cu_seqlens_k, counter,
    full_offsets, full_indices, partial_offsets, partial_indices, partial_tiles, tiles,
    strip_heads, strip_entries,
    seqlen_q, seqlen_k, total_q, total_k, num_heads, group_size, left, right, mask_b, mask_h, dim,
    rows_per_batch, tiles_m, l2_group, num_tiles, scale_log2, inner,
    page_table, cache_seqlens, table_stride, max_pages, num_pages, page_stride_k, page_stride_v,
    batch,
    WIDTH: gl.constexpr, PACKED: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HAS_MASK: gl.constexpr, HAS_SINKS: gl.constexpr, SOFTCAP: gl.constexpr, STAGED: gl.constexpr,
    MERGE: gl.constexpr, SECOND: gl.constexpr,
    TILE_N: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
    PINGPONG: gl.constexpr, DYNAMIC: gl.constexpr, OUT_IN_Q: gl.constexpr, RESCALE: gl.constexpr,
    EMULATED_EXP2: gl.constexpr, RESCALE_UNDER_QK: gl.constexpr, DELAY_PV_WAIT: gl.constexpr,
    OVERLAP: gl.constexpr, Q_IN_REGISTERS: gl.constexpr,
    NAMED_BARRIERS: gl.constexpr, CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr,
    PAGE_SIZE: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The entry of the kernel: build parameters and pipelines, then split into producer and
    consumers. q_tail, k_tail, v_tail, out_tail: descriptors of the columns behind WIDTH, or None.
    """
    QK_TAIL: gl.constexpr = 0 if q_tail is None else q_tail.block_shape[-1]
    TAIL: gl.constexpr = 0 if v_tail is None else v_tail.block_shape[-1]
    cfg = ForwardConfig(
        TILE_N,
        WIDTH,
        CONSUMERS,
        PINGPONG,
        DYNAMIC,
        OUT_IN_Q,
        RESCALE,
        EMULATED_EXP2,
        RESCALE_UNDER_QK,
        DELAY_PV_WAIT,
        QK_TAIL=QK_TAIL,
        TAIL=TAIL,
        OVERLAP=OVERLAP,
        Q_IN_REGISTERS=Q_IN_REGISTERS,
    )
    seqlen = SeqlenInfo(cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k, total_q, total_k, num_heads,
                        group_size, left, right, PACKED, HAS_LEFT, HAS_RIGHT, GROUP)  # fmt: skip
    if HAS_MASK and CONSUMERS == 3:
        gl.static_assert(TILE_N == 128 and not PINGPONG)
        blocks = StripMaskLists(
            strip_heads, strip_entries, tiles, mask_b, mask_h, HAS_LEFT or HAS_RIGHT
        )
    else:
        blocks = BlockMaskLists(full_offsets, full_indices, partial_offsets, partial_indices,
                                partial_tiles, tiles, mask_b, mask_h, HAS_MASK)  # fmt: skip
    pages = make_paged_kv(page_table, cache_seqlens, table_stride, max_pages, num_pages,
                          page_stride_k, page_stride_v, PAGE_SIZE, TILE_N)  # fmt: skip
    LONGEST_FIRST: gl.constexpr = (HAS_RIGHT or HAS_MASK) and not (PACKED and PAGE_SIZE)
    order = TileOrder(tiles_m, l2_group, num_tiles, LONGEST_FIRST)
    params = ForwardParams(
        seqlen, blocks, pages, order, SoftmaxScale(scale_log2, inner, SOFTCAP), cfg, batch
    )
    q = make_pipeline(q_desc, Q_STAGES * CONSUMERS, 1)
    k = make_pipeline(
        k_desc, STAGES, CONSUMERS, pages.PARTS, FORWARD_BARRIER if NAMED_BARRIERS else 0
    )
    v = make_pipeline(v_desc, STAGES, CONSUMERS, pages.PARTS)
    pipes = ForwardPipelines(
        q, k, v, make_work_queue(CONSUMERS, params.FIELDS), make_pingpong(CONSUMERS),
        make_tail(q, q_tail), make_tail(k, k_tail), make_tail(v, v_tail),
    )  # fmt: skip
    out_smem, tail_smem = q.smem, pipes.q_tail.smem  # used if OUT_IN_Q, otherwise placeholders
    if STAGED and not (OUT_IN_Q or MERGE):
        shape_out: gl.constexpr = [CONSUMERS] + out_ref.block_shape
        out_smem = gl.allocate_shared_memory(out_ref.dtype, shape_out, out_ref.layout)
        if out_tail is not None:
            tail_smem = make_linked_stages(out_tail, CONSUMERS).smem
    previous_out, previous_tail = q, pipes.q_tail  # placeholders: used if MERGE
    if MERGE:
        previous_out = make_pipeline(out_ref, CONSUMERS, 1)
        previous_tail = make_tail(previous_out, out_tail)
    tail_ref = out_ref if out_tail is None else out_tail
    out = ForwardOutput(out_ref, out_smem, previous_out, lse_ptr, sinks_ptr, dim, rows_per_batch,
                        HAS_SINKS, STAGED, MERGE, SECOND, tail_ref, tail_smem,
                        previous_tail)  # fmt: skip
    producer_args = (q_desc, k_desc, v_desc, q_tail, k_tail, v_tail, out, counter, pipes, params)
    if SECOND:  # each program has one tile, and waits before it stores it
        gdc_launch_dependents()
    else:
        sync_with_previous_kernel()
    # The lists of warps and registers begin with the second function. The first runs in the 4 warps
    # of the launch and gets the registers that are left; the producer's warp counts as 4.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (out, pipes, params, 0)),
            (consume, (out, pipes, params, 1)),
            (produce, producer_args),
        ], [4, 1], [CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (out, pipes, params, 0)),
            (consume, (out, pipes, params, 1)),
            (consume, (out, pipes, params, 2)),
            (produce, producer_args),
        ], [4, 4, 1], [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGS])  # fmt: skip
    pipes.close()
    if MERGE:
        previous_out.close()
