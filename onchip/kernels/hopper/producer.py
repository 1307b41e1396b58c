"""The producer warp of the Hopper forward: it draws work, pushes it to the consumers, loads tiles.

Order of the loads for 300 causal tokens, tiles of 128 queries (two consumers) and 128 keys, last
queries first. Kn and Vn are key tile n (K[i] in forward.py: that of iteration i), Qc the 64 queries
of consumer c:
  queries 256..299:  K2 Q0 Q1 V2 K1 V1 K0 V0
  queries 128..255:  K1 Q0 Q1 V1 K0 V0
  queries   0..127:  K0 Q0 Q1 V0
The work item of the next tile is pushed before the last key tile, because a draw from the counter
takes longer than a key tile.
"""

from onchip.kernels.hopper.aggregate import aggregate
from onchip.kernels.hopper.column_tails import load_with_tail
from onchip.kernels.hopper.gluon_types import gl, gluon
from onchip.kernels.hopper.pipeline import PREFETCH_DISTANCE
from onchip.kernels.hopper.tile_scheduler import next_work_index, reset_counter


@gluon.jit
def load_pages(pipeline, i, desc, params, work_tile, n, page_stride):
    """Load key tile n as iteration i, page by page."""
    pages, seqlen = params.pages, params.seqlen
    kv_head = work_tile.head // seqlen.group_size
    start = 0
    if seqlen.HAS_LEFT:
        start = work_tile.row + work_tile.seqlen_k - work_tile.seqlen_q - seqlen.left
    page_ids = pages.page_ids(i)  # all at once: one by one, each would cost a latency
    pipeline.expect_parts(i, desc, pages.PARTS)
    for x in gl.static_range(pages.PARTS):
        at = pages.coord(
            page_ids[x], x, page_stride, n * params.cfg.TILE_N, start, work_tile.seqlen_k, kv_head
        )
        pipeline.load_part(i, desc, at, x)


@gluon.jit
def load_rows(pipeline, tail, desc, tail_desc, params, work_tile, t):
    """Load the rows of the t-th tile, one stage for each consumer. Queries that see no key are
    loaded too: their output may leave through their stages.
    """
    CONSUMERS: gl.constexpr = params.cfg.CONSUMERS
    for c in gl.static_range(CONSUMERS):
        pipeline.wait_empty(t * CONSUMERS + c)
        at = params.tile_coord(params.consumer_tile(work_tile, c))
        load_with_tail(pipeline, tail, t * CONSUMERS + c, desc, tail_desc, at)


@gluon.jit
def load_previous_out(out, params, work_tile, t):
    """MERGE: load the output that the t-th tile is merged into."""
    if out.MERGE:
        tail_ref = out.tail_ref if params.cfg.TAIL else None
        load_rows(out.previous_out, out.previous_tail, out.ref, tail_ref, params, work_tile, t)


@aggregate
class ProducerState:
    """The last work index of a producer, the number of pushed items, and the position of the
    search: see tile_scheduler.find_tile.
    """

    work_index: gl.tensor
    num_pushed: gl.tensor
    block: gl.tensor
    passed: gl.tensor


@gluon.jit
def next_index(counter, params, work_index):
    """The next work index of this program."""
    return next_work_index(
        counter, work_index, params.order.num_tiles, params.cfg.DYNAMIC, params.SPARSE
    )


@gluon.jit
def push_work(counter, pipes, params, work_index, state):
    """(tile, state): push the tile of a work index, or the next one that has queries."""
    block, passed = state.block, state.passed
    if params.SPARSE:
        tile_index, block, passed = params.find_tile(work_index, block, passed)
        work_tile = params.work_tile(tile_index)
    else:
        work_tile = params.work_tile(work_index)
        while work_tile.row >= work_tile.seqlen_q:
            work_index = next_index(counter, params, work_index)
            work_tile = params.work_tile(work_index)
    pipes.work_queue.push(state.num_pushed, params.pack_tile(work_tile))
    return work_tile, ProducerState(work_index, state.num_pushed + 1, block, passed)


@gluon.jit
def push_next_work(counter, pipes, params, state):
    """(tile, state) of the next work index."""
    return push_work(counter, pipes, params, next_index(counter, params, state.work_index), state)


@gluon.jit
def produce(q_desc, k_desc, v_desc, q_tail, k_tail, v_tail, out, counter, pipes, params):
    """The producer's loop over tiles of queries, and over the key tiles of each. q_tail, k_tail,
    v_tail: descriptors, or None.
    """
    seqlen, cfg, pages = params.seqlen, params.cfg, params.pages
    i = 0  # key tiles loaded
    t = 0  # tiles of queries loaded
    zero = params.order.num_tiles * 0  # a tensor, not a constexpr
    work_tile, state = push_work(
        counter, pipes, params, gl.program_id(0), ProducerState(zero, zero, zero, zero)
    )
    while work_tile.row >= 0:
        kv_head = work_tile.head // seqlen.group_size
        if params.blocks.ON:
            entries, count = params.list_blocks(work_tile)
        else:
            blocks = params.block_range(work_tile, cfg.CONSUMERS)
            count = blocks.hi - blocks.lo
        if pages.SIZE:
            for j in range(PREFETCH_DISTANCE):
                tile = blocks.hi - 1 - j
                pages.prefetch_ids(i + j, work_tile.batch, tile * cfg.TILE_N, j < count)
        after = work_tile
        for j in range(count):
            if params.STRIPS:
                n = gl.load(entries.at(count - 1 - j))
            elif params.blocks.ON:
                n, _ = params.blocks.tile(entries, j, cfg.TILE_N)
            else:
                n = blocks.hi - 1 - j
            at = seqlen.coord(
                work_tile.batch, kv_head, work_tile.k0, work_tile.seqlen_k, n * cfg.TILE_N
            )
            if pages.SIZE:
                key = (n - PREFETCH_DISTANCE) * cfg.TILE_N
                pages.prefetch_ids(
                    i + PREFETCH_DISTANCE, work_tile.batch, key, j + PREFETCH_DISTANCE < count
                )
                pages.ids.wait()
            if pages.SIZE:
                load_pages(pipes.k, i, k_desc, params, work_tile, n, pages.page_stride_k)
            else:
                load_with_tail(pipes.k, pipes.k_tail, i, k_desc, k_tail, at)
            if j == 0:
                load_rows(pipes.q, pipes.q_tail, q_desc, q_tail, params, work_tile, t)
            if j == gl.minimum(count - 1, pipes.k.num_stages):  # the last output has been stored
                load_previous_out(out, params, work_tile, t)
            if j == gl.maximum(count - 2, 0):  # a draw takes longer than a key tile
                after, state = push_next_work(counter, pipes, params, state)
            pipes.k.wait_empty(i + 1)  # then V[i]'s stage is free too: see ForwardPipelines
            if pages.SIZE:
                load_pages(pipes.v, i, v_desc, params, work_tile, n, pages.page_stride_v)
            else:
                load_with_tail(pipes.v, pipes.v_tail, i, v_desc, v_tail, at)
            i += 1
        if count == 0:
            load_rows(pipes.q, pipes.q_tail, q_desc, q_tail, params, work_tile, t)
            load_previous_out(out, params, work_tile, t)
            after, state = push_next_work(counter, pipes, params, state)
        work_tile = after
        t += 1
    if params.SPARSE:
        reset_counter(counter, params.order.num_tiles)
