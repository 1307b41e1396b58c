"""The five products of the backward, over 64 keys of a consumer and 64 queries.

  S^T  = K Q^T      dP^T = V dO^T       keys by queries, one accumulator over all columns
  dV  += P^T dO     dK  += dS^T Q       keys by columns, an accumulator for the tail too
  dQ   = dS K                           queries by columns, all keys of the program: in two parts

The parts of dQ depend on the tile (tiles.dq_part_columns):

                            consumer 0        consumer 1
  64 queries, 128 columns   columns 0 .. 63   columns 64 .. 127
  64 queries, a tail        the columns       the tail
  128 queries               queries 0 .. 63   queries 64 .. 127, all columns

Worked shape: head_dim 96, 64 columns and a tail of 32. S^T is 4 + 2 wgmma of 64 x 64 x 16, dV 4 of
64 x 64 x 16 and 4 of 64 x 32 x 16; consumer 0 computes dQ by 8 wgmma of 64 x 64 x 16, consumer 1 by
8 of 64 x 32 x 16. Two parts of 48 columns would read dS twice each, in wgmma of 32 and 16 columns.

backward.py has the order of the products; column_tails.py explains tails.
"""

from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from onchip.kernels.hopper.column_tails import (
    get_columns,
    get_opaque_columns,
    slice_rows,
    start_inner_product,
    start_outer_product,
)
from onchip.kernels.hopper.gluon_types import gl, gluon


@gluon.constexpr_function
def product_layout(columns):
    """The layout of a product of 64 rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def start_qk(pipes, cfg, i, SUB: gl.constexpr, C: gl.constexpr, reused):
    """Start S^T = K Q of 64 queries of iteration i, in the registers of `reused`."""
    k = slice_rows(get_opaque_columns(pipes.k, pipes.k_tail, 0, i, cfg.TAIL), C * 64, 64)
    q = slice_rows(get_columns(pipes.q, pipes.q_tail, i, cfg.TAIL), SUB * 64, 64)
    return start_inner_product(k, q, reused)


@gluon.jit
def start_dp(pipes, cfg, i, SUB: gl.constexpr, C: gl.constexpr, reused):
    """Start dP^T = V dO of 64 queries of iteration i, in the registers of `reused`."""
    v = slice_rows(get_opaque_columns(pipes.v, pipes.v_tail, 0, i, cfg.TAIL), C * 64, 64)
    dout = slice_rows(get_columns(pipes.dout, pipes.dout_tail, i, cfg.TAIL), SUB * 64, 64)
    return start_inner_product(v, dout, reused)


@gluon.jit
def start_dv(pipes, cfg, p, dv, i, SUB: gl.constexpr):
    """Start dV += P^T dO of 64 queries of iteration i."""
    dout = slice_rows(get_columns(pipes.dout, pipes.dout_tail, i, cfg.TAIL), SUB * 64, 64)
    return start_outer_product(p, dout, dv, cfg.A_TAIL)


@gluon.jit
def start_dk(pipes, cfg, ds, dk, i, SUB: gl.constexpr):
    """Start dK += dS^T Q of 64 queries of iteration i."""
    q = slice_rows(get_columns(pipes.q, pipes.q_tail, i, cfg.TAIL), SUB * 64, 64)
    return start_outer_product(ds, q, dk, cfg.A_TAIL)


@gluon.jit
def start_dq_part(pipes, cfg, i, C: gl.constexpr, reused):
    """Start this consumer's part of dQ = dS K, in the registers of `reused` if it has its shape."""
    N: gl.constexpr = cfg.DQ_COLUMNS_1 if C == 1 else cfg.DQ_COLUMNS_0
    if reused.shape[1] != N:
        reused = gl.zeros([64, N], gl.float32, product_layout(N))
    k = get_opaque_columns(pipes.k, pipes.k_tail, 0, i, cfg.TAIL)
    ds = pipes.ds.matrix(i)
    if cfg.TILE_M == 128:
        part = k[0]
        ds = ds.slice(C * 64, 64, 1)
    elif cfg.TAIL:
        part = k[C]
    else:
        part = k[0].slice(C * 64, 64, 1)
    return warpgroup_mma(ds.permute((1, 0)), part, reused, use_acc=False, is_async=True)


@gluon.jit
def to_fragment_order(dq):
    """dq (64, n) as (2 n, 32), in the order in which registers hold it: 16 bytes of each lane of a
    warp are neighbours, so that shared memory is written without bank conflicts.
    launch_backward.finish_kernel inverts it.
    """
    N: gl.constexpr = dq.shape[1]
    split = dq.reshape([4, 2, 8, N // 8, 4, 2])  # warp, half, lane // 4 | register, lane % 4, pair
    return split.permute((0, 3, 2, 4, 1, 5)).reshape([2 * N, 32])
