"""The epilogue of the forward: sinks, lse, and the output of a tile, stored or merged."""

from triton.language.extra.cuda import gdc_wait

from onchip.kernels.hopper.aggregate import aggregate
from onchip.kernels.hopper.column_tails import wait_products
from onchip.kernels.hopper.gluon_types import gl, gluon
from onchip.kernels.hopper.pipeline import (
    LinkedStages,
    Pipeline,
    prefetch,
    store_tile,
    store_wait,
    store_with_tail,
    tensor_descriptor,
)
from onchip.kernels.hopper.softmax import LN2, LOG2E, approximate


@aggregate
class ForwardOutput:
    """Where results go. out: by TMA through `smem` (STAGED), or straight from registers. lse:
    straight from registers. Sinks join at the end.

    MERGE: out and lse already have the state of the same queries over other keys, rows_per_batch
    rows for each batch entry and lse in fp64, and the result is merged into it. The previous out is
    loaded into `previous_out`, a stage for each consumer, and the merged out leaves from there.

    SECOND: the previous kernel may still use the memory of out and lse, so this one waits for it
    before the first store.

    The last columns may be a tail (column_tails.py) with its own descriptor and memory.
    """

    ref: gl.tensor | tensor_descriptor
    smem: gl.shared_memory_descriptor
    previous_out: Pipeline
    lse: gl.tensor
    sinks: gl.tensor
    dim: gl.tensor
    rows_per_batch: gl.tensor
    HAS_SINKS: gl.constexpr
    STAGED: gl.constexpr
    MERGE: gl.constexpr
    SECOND: gl.constexpr
    tail_ref: gl.tensor | tensor_descriptor
    tail_smem: gl.shared_memory_descriptor
    previous_tail: LinkedStages


@gluon.jit
def finalize_rows(out, params, work_tile, m_log2, l):
    """(maximum in powers of two, row sum, factor of the accumulator) of rows after their last key
    tile. Sinks are added here.
    """
    shrink = gl.full_like(l, 1.0)
    if out.HAS_SINKS:
        sink = gl.load(out.sinks + params.row_heads(work_tile, params.cfg.S)).to(gl.float32) * LOG2E
        top = gl.maximum(m_log2, sink)
        # At most 1: m_log2 is a product, into which the compiler may fuse this difference. In a
        # row without keys the product is near the limit of fp32, and its rounding error is 2^100.
        shrink = gl.exp2(gl.minimum(m_log2 - top, 0.0))
        l = l * shrink + gl.exp2(sink - top)
        m_log2 = top
    return m_log2, l, gl.where(l != 0.0, shrink * approximate("rcp", l), 0.0)


@gluon.jit
def compute_lse(m_log2, l):
    """lse; -inf where l = 0, a row without keys. A score of +inf or NaN makes l
    NaN, and lse too.
    """
    return gl.where(l != 0.0, (m_log2 + approximate("lg2", l)) * LN2, float("-inf"))


@gluon.jit
def lse_pointers(out, params, work_tile):
    """(pointers to the lse of 64 rows, which of them exist)"""
    seqlen = params.seqlen
    rows = work_tile.row + seqlen.query_rows(64, params.cfg.S)
    head = params.row_heads(work_tile, params.cfg.S)
    if seqlen.PACKED:
        first = head.to(gl.int64) * seqlen.total_q + work_tile.q0
    else:
        first = (work_tile.batch.to(gl.int64) * seqlen.num_heads + head) * out.rows_per_batch
    return out.lse + first + rows, rows < work_tile.seqlen_q


@gluon.jit
def store_lse(out, params, work_tile, m_log2, l):
    """Store the lse of 64 rows."""
    at, exists = lse_pointers(out, params, work_tile)
    gl.store(at, compute_lse(m_log2, l), mask=exists)


@gluon.jit
def prefetch_lse(out, params, work_tile):
    """MERGE: prefetch the previous lse of 64 rows into the L1. There are no registers to hold it,
    and the producer has none to load it.
    """
    if out.MERGE:
        at, exists = lse_pointers(out, params, work_tile)
        prefetch(gl.where(exists, at, out.lse))


@gluon.jit
def load_previous_lse(out, params, work_tile):
    """MERGE: load the previous lse of 64 rows, before it is needed."""
    if out.MERGE:
        at, exists = lse_pointers(out, params, work_tile)
        return gl.load(at, mask=exists, other=0.0)
    else:
        return ()


@gluon.jit
def merge_lse(out, params, work_tile, before, m_log2, l):
    """Merge into the previous lse: (weight of these rows, weight of the previous output). Rows that
    saw no key have weight 0.
    """
    at, exists = lse_pointers(out, params, work_tile)
    lse = compute_lse(m_log2, l).to(gl.float64)
    gap = gl.where(l != 0.0, (lse - before).to(gl.float32), float("-inf"))
    less = gl.exp2(-gl.abs(gap) * LOG2E)
    larger = approximate("rcp", 1.0 + less)
    more = approximate("lg2", 1.0 + less) * LN2
    gl.store(at, gl.where(gap > 0.0, lse, before) + more.to(gl.float64), mask=exists)
    smaller = less * larger
    return gl.where(gap > 0.0, larger, smaller), gl.where(gap > 0.0, smaller, larger)


@gluon.jit
def finalize_lse(out, params, work_tile, before, m, l):
    """Store lse: (factor of the accumulator, factor of the previous output)."""
    m_log2, l, inverse = finalize_rows(out, params, work_tile, m * params.scale.scale_log2, l)
    if out.SECOND:
        gdc_wait()
    if out.MERGE:
        weight, previous_weight = merge_lse(out, params, work_tile, before, m_log2, l)
        return inverse * weight, previous_weight
    else:
        store_lse(out, params, work_tile, m_log2, l)
        return inverse, inverse


@gluon.jit
def out_pointers(out, params, work_tile, acc, FIRST: gl.constexpr = 0):
    """(pointers to acc's elements of the fp32 output, 64 rows from column FIRST on, which elements
    exist)
    """
    seqlen = params.seqlen
    layout: gl.constexpr = acc.type.layout
    rows = work_tile.row + seqlen.query_rows(64, layout)
    cols = FIRST + gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    first = work_tile.q0.to(gl.int64)
    if not seqlen.PACKED:
        first = work_tile.batch.to(gl.int64) * out.rows_per_batch
    places = ((first + rows) * seqlen.num_heads + params.row_heads(work_tile, layout)) * out.dim
    inside = (rows < work_tile.seqlen_q)[:, None] & (cols < out.dim)[None, :]
    return out.ref + places[:, None] + cols[None, :], inside


@gluon.jit
def store_out(out, params, work_tile, acc, C: gl.constexpr):
    """Store 64 rows of the output; acc: its columns, and their tail if there is one."""
    if out.STAGED:
        store_columns(out, params, work_tile, acc, out.smem.index(C), out.tail_smem.index(C))
    else:
        for x in gl.static_range(len(acc)):
            at, inside = out_pointers(out, params, work_tile, acc[x], x * params.cfg.WIDTH)
            gl.store(at, acc[x], mask=inside)


@gluon.jit
def store_columns(out, params, work_tile, acc, smem, tail_smem):
    """Store 64 rows of the output by TMA."""
    at = params.tile_coord(work_tile)
    dtype: gl.constexpr = out.ref.dtype
    if len(acc) == 1:
        store_tile(out.ref, at, smem, acc[0].to(dtype))
    else:
        tail = acc[1].to(dtype)
        store_with_tail(out.ref, at, smem, acc[0].to(dtype), out.tail_ref, tail_smem, tail)


@gluon.jit
def merge_out(out, params, work_tile, acc_next, inverse, previous_weight, iteration):
    """Merge 64 rows into the previous output, which has been loaded to shared memory."""
    cfg = params.cfg
    out.previous_out.wait_full(iteration)
    before = (normalize(out.previous_out.stage(iteration).load(cfg.O), previous_weight),)
    if cfg.TAIL:
        tail = out.previous_tail.matrix(iteration).load(cfg.O_TAIL)
        before = before + (normalize(tail, previous_weight),)
    acc = wait_products(0, acc_next)
    merged = ()
    for x in gl.static_range(len(acc)):
        merged = merged + (before[x] + normalize(acc[x], inverse),)
    stages = out.previous_out.tma_stage(iteration), out.previous_tail.stage(iteration)
    store_columns(out, params, work_tile, merged, stages[0], stages[1])


@gluon.jit
def release_previous_out(out, cfg, t, C: gl.constexpr):
    """Release the previous output of the t-th tile, if there was such a tile, once the merged
    output has been stored.
    """
    if out.MERGE:
        store_wait(0)
        if t >= 0:
            out.previous_out.release(t * cfg.CONSUMERS + C)


@gluon.jit
def finish(out, params, work_tile, before, acc_next, m, l, t, C: gl.constexpr):
    """Store the result of 64 queries of the t-th tile, once their last PV product is complete."""
    inverse, previous_weight = finalize_lse(out, params, work_tile, before, m, l)
    if out.MERGE:
        iteration = t * params.cfg.CONSUMERS + C
        merge_out(out, params, work_tile, acc_next, inverse, previous_weight, iteration)
    else:
        acc = wait_products(0, acc_next)
        rows = ()
        for x in gl.static_range(len(acc)):
            rows = rows + (normalize(acc[x], inverse),)
        store_out(out, params, work_tile, rows, C)


@gluon.jit
def normalize(acc, inverse):
    """acc * inverse, row by row."""
    return acc * gl.convert_layout(inverse, gl.SliceLayout(1, acc.type.layout))[:, None]
