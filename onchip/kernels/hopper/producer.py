"""The one warp of a program of the Hopper forward that draws tickets and moves tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onchip.kernels.hopper.aggregate import aggregate
from onchip.kernels.hopper.pipeline import AHEAD
from onchip.kernels.hopper.tile_scheduler import end_sparse, next_ticket


@gluon.jit
def load_pages(ring, i, desc, job, place, n, span):
    """Fill slot i with key tile n, out of its pages."""
    pages, shape = job.pages, job.shape
    kv_head = place.head // shape.group_size
    start = 0
    if shape.HAS_LEFT:
        start = place.row + place.seqlen_k - place.seqlen_q - shape.left
    found = pages.found(i)  # all at once: each would cost a latency
    ring.announce(i, desc, pages.PARTS)
    for x in gl.static_range(pages.PARTS):
        at = pages.at(found[x], x, span, n * job.cfg.TILE_N, start, place.seqlen_k, kv_head)
        ring.load_part(i, desc, at, x)


@gluon.jit
def load_rows(ring, desc, job, place, t):
    """The rows of the t-th tile behind desc, a slot for each consumer. Queries are loaded even if
    they see no key: their output may leave through their slots.
    """
    CONSUMERS: gl.constexpr = job.cfg.CONSUMERS
    for c in gl.static_range(CONSUMERS):
        ring.wait_empty(t * CONSUMERS + c)
        ring.load(t * CONSUMERS + c, desc, job.rows_at(job.part(place, c)))


@gluon.jit
def load_totals(out, job, place, t):
    """What the output of the t-th tile is merged into."""
    if out.MERGE:
        load_rows(out.totals, out.ref, job, place, t)


@aggregate
class Drawn:
    """The last ticket of a producer, how many it has given, and where it searches: see
    tile_scheduler.find_tile.
    """

    ticket: gl.tensor
    given: gl.tensor
    block: gl.tensor
    passed: gl.tensor


@gluon.jit
def following(counter, job, ticket):
    return next_ticket(counter, ticket, job.order.num_tiles, job.cfg.DYNAMIC, job.SPARSE)


@gluon.jit
def hand_out(counter, pipes, job, ticket, drawn):
    """(place, drawn): the consumers are told where the queries of a ticket are, or those of the
    next one that has any.
    """
    block, passed = drawn.block, drawn.passed
    if job.SPARSE:
        found, block, passed = job.find(ticket, block, passed)
        place = job.place(found)
    else:
        place = job.place(ticket)
        while place.row >= place.seqlen_q:
            ticket = following(counter, job, ticket)
            place = job.place(ticket)
    pipes.tickets.give(drawn.given, job.words(place))
    return place, Drawn(ticket, drawn.given + 1, block, passed)


@gluon.jit
def hand_out_next(counter, pipes, job, drawn):
    return hand_out(counter, pipes, job, following(counter, job, drawn.ticket), drawn)


@gluon.jit
def produce(q_desc, k_desc, v_desc, out, counter, pipes, job):
    shape, cfg, pages = job.shape, job.cfg, job.pages
    i = 0  # key tiles loaded
    t = 0  # tiles of queries loaded
    zero = job.order.num_tiles * 0
    place, drawn = hand_out(counter, pipes, job, gl.program_id(0), Drawn(zero, zero, zero, zero))
    while place.row >= 0:
        kv_head = place.head // shape.group_size
        if job.blocks.ON:
            entries, count = job.listed(place)
        else:
            keys = job.keys(place, cfg.CONSUMERS)
            count = keys.hi - keys.lo
        if pages.SIZE:
            for j in range(AHEAD):
                tile = keys.hi - 1 - j
                pages.look_up(i + j, place.batch, tile * cfg.TILE_N, j < count)
        after = place
        for j in range(count):
            if job.STRIPS:
                n = gl.load(entries.at(count - 1 - j))
            elif job.blocks.ON:
                n, _ = job.blocks.tile(entries, j, cfg.TILE_N)
            else:
                n = keys.hi - 1 - j
            at = shape.coord(place.batch, kv_head, place.k0, place.seqlen_k, n * cfg.TILE_N)
            if pages.SIZE:
                key = (n - AHEAD) * cfg.TILE_N
                pages.look_up(i + AHEAD, place.batch, key, j + AHEAD < count)
                pages.ids.wait()
            if pages.SIZE:
                load_pages(pipes.k, i, k_desc, job, place, n, pages.span_k)
            else:
                pipes.k.load(i, k_desc, at)
            if j == 0:
                load_rows(pipes.q, q_desc, job, place, t)
            if j == gl.minimum(count - 1, pipes.k.num_stages):  # the last total can have left
                load_totals(out, job, place, t)
            if j == gl.maximum(count - 2, 0):  # a ticket takes longer than a key tile
                after, drawn = hand_out_next(counter, pipes, job, drawn)
            pipes.k.wait_empty(i + 1)  # the next keys' slot, and that of these values: see Pipes
            if pages.SIZE:
                load_pages(pipes.v, i, v_desc, job, place, n, pages.span_v)
            else:
                pipes.v.load(i, v_desc, at)
            i += 1
        if count == 0:
            load_rows(pipes.q, q_desc, job, place, t)
            load_totals(out, job, place, t)
            after, drawn = hand_out_next(counter, pipes, job, drawn)
        place = after
        t += 1
    if job.SPARSE:
        end_sparse(counter, job.order.num_tiles)
