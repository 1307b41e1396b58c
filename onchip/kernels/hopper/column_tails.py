"""Tiles of a width that is no power of two: their last columns are a second tile, the tail.

Gluon's tiles are powers of two. A head_dim of 80 is therefore a tile of 64 columns and a tail of
16, each with its own TMA box, its own shared memory and its own swizzle (128 and 32 bytes):

  columns  0 ............ 63 | 64 .. 79          S  = Q K^T + Q_tail K_tail^T    one accumulator
  Q, K, V  a tile of 64      | the tail, 16      O  = P V, O_tail = P V_tail     one for each

  producer  expects the bytes of both under one barrier, then starts two copies
  consumer  waits once; a product is one wgmma group, so that O and O_tail are two groups

Worked shape: 128 keys of head_dim 72 in bf16. K's barrier expects 128 * 64 * 2 + 128 * 16 * 2 =
20,480 bytes. The tail's box has 8 columns outside of the tensor, which arrive as zeros and count
like all others; TMA stores nothing there.

tiles.HOPPER_TAIL_WIDTHS has the widths, and the reasons for them.
examples/versions/v3.py teaches the kernel without tails.
"""

from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from onchip.kernels.hopper.gluon_types import gl, gluon
from onchip.kernels.hopper.pipeline import LinkedStages, make_linked_stages
from onchip.kernels.hopper.softmax import rescale


@gluon.jit
def make_tail(pipeline, desc):
    """The stages of the tails of a pipeline's tiles. Without a descriptor, a placeholder."""
    if desc is None:
        return LinkedStages(pipeline.smem, pipeline.num_stages)
    else:
        return make_linked_stages(desc, pipeline.num_stages)


@gluon.jit
def load_with_tail(pipeline, tail, i, desc, tail_desc, coord):
    """Producer: load the tile of iteration i, and its tail if there is one."""
    if tail_desc is None:
        pipeline.load(i, desc, coord)
    else:
        tail_coord = coord[:-1] + (gl.to_tensor(desc.block_shape[-1]),)
        pipeline.load_with(i, desc, coord, tail, tail_desc, tail_coord)


@gluon.jit
def start_qk(pipes, cfg, i_q, i):
    """Start S = Q K of iteration i_q of Q and iteration i of K. OPAQUE_Q: the addresses of Q are
    computed again for each key tile, as in Pipeline.opaque_stage.
    """
    if cfg.OPAQUE_Q:
        i_q += i >> 30
    zero = gl.zeros([64, cfg.TILE_N], gl.float32, cfg.S)
    k = pipes.k.stage(i).permute((1, 0))
    s = warpgroup_mma(pipes.q.stage(i_q), k, zero, use_acc=False, is_async=True)
    if cfg.QK_TAIL:
        k_tail = pipes.k_tail.matrix(i).permute((1, 0))
        s = warpgroup_mma(pipes.q_tail.matrix(i_q), k_tail, s, is_async=True)
    return s


@gluon.jit
def zero_acc(cfg):
    """An accumulator: (columns,) or (columns, tail)."""
    acc = (gl.zeros([64, cfg.WIDTH], gl.float32, cfg.O),)
    if cfg.TAIL:
        acc = acc + (gl.zeros([64, cfg.TAIL], gl.float32, cfg.O_TAIL),)
    return acc


@gluon.jit
def start_pv(pipes, cfg, p, acc, i):
    """Start O += P V of iteration i, which is full: as many wgmma groups as acc has tiles."""
    started = (warpgroup_mma(p, pipes.v.stage(i), acc[0], is_async=True),)
    if cfg.TAIL:
        p_tail = gl.convert_layout(p, cfg.P_TAIL, assert_trivial=True)
        tail = warpgroup_mma(p_tail, pipes.v_tail.matrix(i), acc[1], is_async=True)
        started = started + (tail,)
    return started


@gluon.jit
def wait_pv(started):
    """Wait for all products: the accumulator."""
    if len(started) == 1:
        return (warpgroup_mma_wait(num_outstanding=0, deps=(started[0],)),)
    else:
        acc, tail = warpgroup_mma_wait(num_outstanding=0, deps=(started[0], started[1]))
        return acc, tail


@gluon.jit
def rescale_acc(acc, alpha, cfg):
    """acc * alpha, row by row: see softmax.rescale."""
    scaled = ()
    for x in gl.static_range(len(acc)):
        scaled = scaled + (rescale(acc[x], alpha, cfg),)
    return scaled
