"""The end of a tile of queries of the forward: sinks, lse, and the output, stored or merged."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from onchip.kernels.hopper.aggregate import aggregate
from onchip.kernels.hopper.pipeline import Ring, prefetch, store_tile, store_wait, tensor_descriptor
from onchip.kernels.hopper.softmax import LN2, LOG2E, approximate


@aggregate
class Out:
    """Where results go: out by TMA through `slots` (STAGED), or straight from registers; lse
    directly; and the sinks that join at the end. MERGE: what lies there, `room` tokens to a
    batch entry and lse in fp64, is the state of the same queries over other keys, and merged in:
    out comes and goes through `totals`, a slot for each consumer.
    SECOND: the call before may still use the memory that they go to, and is waited for.
    """

    ref: gl.tensor | tensor_descriptor
    slots: gl.shared_memory_descriptor
    totals: Ring
    lse: gl.tensor
    sinks: gl.tensor
    dim: gl.tensor
    room: gl.tensor
    HAS_SINKS: gl.constexpr
    STAGED: gl.constexpr
    MERGE: gl.constexpr
    SECOND: gl.constexpr


@gluon.jit
def close_rows(out, job, place, m_log2, l):
    """(maximum in powers of two, sum, what the accumulator must still be multiplied with) of rows
    whose last key tile was folded: with sinks, they join here.
    """
    shrink = gl.full_like(l, 1.0)
    if out.HAS_SINKS:
        sink = gl.load(out.sinks + job.heads(place, job.cfg.S)).to(gl.float32) * LOG2E
        top = gl.maximum(m_log2, sink)
        # At most 1: the difference may be fused into the product that m_log2 is, and of a row
        # without keys, where that product is near the end of fp32, its rounding is 2^100.
        shrink = gl.exp2(gl.minimum(m_log2 - top, 0.0))
        l = l * shrink + gl.exp2(sink - top)
        m_log2 = top
    return m_log2, l, gl.where(l != 0.0, shrink * approximate("rcp", l), 0.0)


@gluon.jit
def lse_of(m_log2, l):
    """-inf where l = 0, a row without keys; a score of +inf or NaN makes l NaN, and lse, too."""
    return gl.where(l != 0.0, (m_log2 + approximate("lg2", l)) * LN2, float("-inf"))


@gluon.jit
def lse_places(out, job, place):
    """(pointers to the lse of 64 rows, which of them are queries)"""
    shape = job.shape
    rows = place.row + shape.queries_of(64, job.cfg.S)
    head = job.heads(place, job.cfg.S)
    if shape.PACKED:
        first = head.to(gl.int64) * shape.total_q + place.q0
    else:
        first = (place.batch.to(gl.int64) * shape.num_heads + head) * out.room
    return out.lse + first + rows, rows < place.seqlen_q


@gluon.jit
def store_lse(out, job, place, m_log2, l):
    at, exist = lse_places(out, job, place)
    gl.store(at, lse_of(m_log2, l), mask=exist)


@gluon.jit
def expect_lse(out, job, place):
    """Bring what the lse of 64 rows will be merged into nearer: there are no registers to hold it,
    and the producer has none to find it.
    """
    if out.MERGE:
        at, exist = lse_places(out, job, place)
        prefetch(gl.where(exist, at, out.lse))


@gluon.jit
def lse_before(out, job, place):
    """What the lse of 64 rows will be merged into, asked for before it is needed."""
    if out.MERGE:
        at, exist = lse_places(out, job, place)
        return gl.load(at, mask=exist, other=0.0)
    else:
        return ()


@gluon.jit
def merge_lse(out, job, place, before, m_log2, l):
    """Merge into the lse that lies there: (the share of the rows, the share of what lies there).
    Rows that saw no key have none.
    """
    at, exist = lse_places(out, job, place)
    lse = lse_of(m_log2, l).to(gl.float64)
    gap = gl.where(l != 0.0, (lse - before).to(gl.float32), float("-inf"))
    less = gl.exp2(-gl.abs(gap) * LOG2E)
    larger = approximate("rcp", 1.0 + less)
    more = approximate("lg2", 1.0 + less) * LN2
    gl.store(at, gl.where(gap > 0.0, lse, before) + more.to(gl.float64), mask=exist)
    smaller = less * larger
    return gl.where(gap > 0.0, larger, smaller), gl.where(gap > 0.0, smaller, larger)


@gluon.jit
def finish_rows(out, job, place, before, m, l):
    """Store lse: (what the accumulator must still be multiplied with, what the output that lies
    there must be multiplied with)
    """
    m_log2, l, inverse = close_rows(out, job, place, m * job.scale.scale_log2, l)
    if out.SECOND:
        gdc_wait()
    if out.MERGE:
        share, rest = merge_lse(out, job, place, before, m_log2, l)
        return inverse * share, rest
    else:
        store_lse(out, job, place, m_log2, l)
        return inverse, inverse


@gluon.jit
def wide_places(out, job, place, FIRST: gl.constexpr = 0):
    """(pointers to 64 rows of the unrounded output, from one column on, which of its elements
    exist)
    """
    shape, cfg = job.shape, job.cfg
    rows = place.row + shape.queries_of(64, cfg.O)
    cols = FIRST + gl.arange(0, cfg.WIDTH, gl.SliceLayout(0, cfg.O))
    first = place.q0.to(gl.int64)
    if not shape.PACKED:
        first = place.batch.to(gl.int64) * out.room
    places = ((first + rows) * shape.num_heads + job.heads(place, cfg.O)) * out.dim
    inside = (rows < place.seqlen_q)[:, None] & (cols < out.dim)[None, :]
    return out.ref + places[:, None] + cols[None, :], inside


@gluon.jit
def store_out(out, job, place, acc, C: gl.constexpr):
    """64 rows of the output."""
    if out.STAGED:
        store_tile(out.ref, job.rows_at(place), out.slots.index(C), acc.to(out.ref.dtype))
    else:
        at, inside = wide_places(out, job, place)
        gl.store(at, acc, mask=inside)


@gluon.jit
def merge_out(out, job, place, acc_next, inverse, rest, filling):
    """64 rows of the output, into those that have come."""
    out.totals.wait_full(filling)
    before = normalised(out.totals.slot(filling).load(job.cfg.O), rest, job.cfg)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc_next,))
    acc = before + normalised(acc, inverse, job.cfg)
    store_tile(out.ref, job.rows_at(place), out.totals.tile(filling), acc)


@gluon.jit
def release_total(out, cfg, t, C: gl.constexpr):
    """What the t-th tile was merged into has left, if there was such a tile."""
    if out.MERGE:
        store_wait(0)
        if t >= 0:
            out.totals.release(t * cfg.CONSUMERS + C)


@gluon.jit
def finish(out, job, place, before, acc_next, m, l, t, C: gl.constexpr):
    """Store what 64 queries of the t-th tile have come to, once their last values are added."""
    inverse, rest = finish_rows(out, job, place, before, m, l)
    if out.MERGE:
        filling = t * job.cfg.CONSUMERS + C
        merge_out(out, job, place, acc_next, inverse, rest, filling)
    else:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc_next,))
        store_out(out, job, place, normalised(acc, inverse, job.cfg), C)


@gluon.jit
def normalised(acc, inverse, cfg):
    return acc * gl.convert_layout(inverse, gl.SliceLayout(1, cfg.O))[:, None]
