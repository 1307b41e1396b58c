"""Tiles of a width that is no power of two: their last columns are a second tile, the tail.

Gluon's tiles are powers of two. A head_dim of 80 is therefore a tile of 64 columns and a tail of
16, each with its own TMA box, its own shared memory and its own swizzle (128 and 32 bytes):

  columns  0 ............ 63 | 64 .. 79          S  = Q K^T + Q_tail K_tail^T    one accumulator
  Q, K, V  a tile of 64      | the tail, 16      O  = P V, O_tail = P V_tail     one for each

The backward has the same two kinds of products: S and dP are inner, over the columns; dV, dK and dQ
are outer, one for each tile of columns.

  producer  expects the bytes of both under one barrier, then starts two copies
  consumer  waits once; a product is one wgmma group, so that O and O_tail are two groups

Worked shape: 128 keys of head_dim 72 in bf16. K's barrier expects 128 * 64 * 2 + 128 * 16 * 2 =
20,480 bytes. The tail's box has 8 columns outside of the tensor, which arrive as zeros and count
like all others; TMA stores nothing there.

tiles.HOPPER_WIDTHS has the widths and the reasons for them.
examples/versions/v3.py teaches the kernel without tails.
"""

from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from onchip.kernels.hopper.gluon_types import gl, gluon
from onchip.kernels.hopper.pipeline import (
    LinkedStages,
    make_linked_stages,
    store_halves,
    store_tile,
    store_with_tail,
)
from onchip.kernels.hopper.softmax import rescale


@gluon.jit
def make_tail(pipeline, desc):
    """The stages of the tails of a pipeline's tiles. Without a descriptor, a placeholder."""
    if desc is None:
        return LinkedStages(pipeline.smem, pipeline.num_stages)
    else:
        return make_linked_stages(desc, pipeline.num_stages)


@gluon.jit
def load_with_tail(pipeline, tail, i, desc, tail_desc, coord, linked_bytes: gl.constexpr = 0):
    """Producer: load the tile of iteration i, and its tail if there is one. linked_bytes: of more
    tiles under the same barrier, as in Pipeline.load.
    """
    if tail_desc is None:
        pipeline.load(i, desc, coord, linked_bytes)
    else:
        tail_coord = coord[:-1] + (gl.to_tensor(desc.block_shape[-1]),)
        pipeline.load(i, desc, coord, linked_bytes + tail_desc.block_type.nbytes)
        pipeline.load_linked(i, tail_desc, tail_coord, tail)


@gluon.jit
def get_columns(pipeline, tail, i, HAS_TAIL: gl.constexpr):
    """The tile of iteration i: (columns,) or (columns, tail)."""
    columns = (pipeline.stage(i),)
    if HAS_TAIL:
        columns = columns + (tail.matrix(i),)
    return columns


@gluon.jit
def get_opaque_columns(pipeline, tail, i, loop_index, HAS_TAIL: gl.constexpr):
    """get_columns with addresses as in Pipeline.opaque_stage."""
    columns = (pipeline.opaque_stage(i, loop_index),)
    if HAS_TAIL:
        columns = columns + (tail.opaque_matrix(i, loop_index),)
    return columns


@gluon.jit
def slice_rows(columns, first: gl.constexpr, rows: gl.constexpr):
    """`rows` rows of a tile and of its tail."""
    sliced = ()
    for x in gl.static_range(len(columns)):
        sliced = sliced + (columns[x].slice(first, rows, 0),)
    return sliced


@gluon.jit
def start_inner_product(a, b, reused):
    """Start a b^T over all columns, one accumulator in the registers of `reused`: as many wgmma
    groups as there are tiles.
    """
    s = warpgroup_mma(a[0], b[0].permute((1, 0)), reused, use_acc=False, is_async=True)
    for x in gl.static_range(1, len(a)):
        s = warpgroup_mma(a[x], b[x].permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def start_outer_product(p, b, acc, TAIL_LAYOUT: gl.constexpr):
    """Start acc += p b for each tile of columns of b, as many wgmma groups. TAIL_LAYOUT: of p as
    the left operand of the tail.
    """
    started = (warpgroup_mma(p, b[0], acc[0], is_async=True),)
    for x in gl.static_range(1, len(acc)):
        p_tail = gl.convert_layout(p, TAIL_LAYOUT, assert_trivial=True)
        started = started + (warpgroup_mma(p_tail, b[x], acc[x], is_async=True),)
    return started


@gluon.jit
def wait_products(num_outstanding: gl.constexpr, deps):
    """warpgroup_mma_wait for any number of products: always a tuple."""
    if len(deps) == 1:
        return (warpgroup_mma_wait(num_outstanding=num_outstanding, deps=(deps[0],)),)
    else:
        return warpgroup_mma_wait(num_outstanding=num_outstanding, deps=deps)


@gluon.jit
def zero_columns(WIDTH: gl.constexpr, TAIL: gl.constexpr, LAYOUT: gl.constexpr,
                 TAIL_LAYOUT: gl.constexpr):  # fmt: skip
    """An accumulator of 64 rows: (columns,) or (columns, tail)."""
    acc = (gl.zeros([64, WIDTH], gl.float32, LAYOUT),)
    if TAIL:
        acc = acc + (gl.zeros([64, TAIL], gl.float32, TAIL_LAYOUT),)
    return acc


@gluon.jit
def scale_columns(acc, factor):
    """acc * factor."""
    scaled = ()
    for x in gl.static_range(len(acc)):
        scaled = scaled + (acc[x] * factor,)
    return scaled


@gluon.jit
def store_gradient(desc, tail_desc, at, smem, tail_smem, value, ADD: gl.constexpr = False):
    """Store 64 rows and their tail, if there is one, through shared memory; fp32 in halves. ADD: to
    fp32 in memory.
    """
    if desc.dtype == gl.float32:
        store_halves(desc, at, smem, value[0], ADD)
        if len(value) == 2:
            tail_at = at[:-1] + (gl.to_tensor(value[0].shape[1]),)
            store_halves(tail_desc, tail_at, tail_smem, value[1], ADD)
    elif len(value) == 2:
        rows, tail = value[0].to(desc.dtype), value[1].to(desc.dtype)
        store_with_tail(desc, at, smem, rows, tail_desc, tail_smem, tail)
    else:
        store_tile(desc, at, smem, value[0].to(desc.dtype))


@gluon.jit
def load_q(pipes, cfg, i_q):
    """Q of iteration i_q, as start_qk takes it: the number, or with Q_IN_REGISTERS the columns and
    their tail.
    """
    if cfg.Q_IN_REGISTERS:
        q = (pipes.q.stage(i_q).load(cfg.Q),)
        if cfg.QK_TAIL:
            q = q + (pipes.q_tail.matrix(i_q).load(cfg.Q),)
        return q
    else:
        return i_q


@gluon.jit
def start_qk(pipes, cfg, q, i):
    """Forward: start S = Q K of iteration i of K; q: see load_q. OPAQUE_Q: the addresses of Q are
    computed again for each key tile, as in Pipeline.opaque_stage.
    """
    if cfg.OPAQUE_Q:
        q += i >> 30
    zero = gl.zeros([64, cfg.TILE_N], gl.float32, cfg.S)
    k = pipes.k.stage(i).permute((1, 0))
    columns = q[0] if cfg.Q_IN_REGISTERS else pipes.q.stage(q)
    s = warpgroup_mma(columns, k, zero, use_acc=False, is_async=True)
    if cfg.QK_TAIL:
        k_tail = pipes.k_tail.matrix(i).permute((1, 0))
        tail = q[1] if cfg.Q_IN_REGISTERS else pipes.q_tail.matrix(q)
        s = warpgroup_mma(tail, k_tail, s, is_async=True)
    return s


@gluon.jit
def zero_acc(cfg):
    """Forward: the accumulator of 64 queries."""
    return zero_columns(cfg.WIDTH, cfg.TAIL, cfg.O, cfg.O_TAIL)


@gluon.jit
def start_pv(pipes, cfg, p, acc, i):
    """Forward: start O += P V of iteration i, which is full. Like start_qk, it computes the address
    of a tail after the first product, the order in which these kernels were measured.
    """
    started = (warpgroup_mma(p, pipes.v.stage(i), acc[0], is_async=True),)
    if cfg.TAIL:
        p_tail = gl.convert_layout(p, cfg.P_TAIL, assert_trivial=True)
        tail = warpgroup_mma(p_tail, pipes.v_tail.matrix(i), acc[1], is_async=True)
        started = started + (tail,)
    return started


@gluon.jit
def rescale_acc(acc, alpha, cfg):
    """acc * alpha, row by row: see softmax.rescale."""
    scaled = ()
    for x in gl.static_range(len(acc)):
        scaled = scaled + (rescale(acc[x], alpha, cfg),)
    return scaled
