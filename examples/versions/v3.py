"""FlashAttention v3, forward (Shah et al. 2024), in Gluon, for Hopper (sm_90). Read v2.py first.

  producer warp                          consumer warpgroups 0 and 1: 64 queries each
  TMA Q[c] ------- q full -------------> S = Q K[0], P = softmax
  TMA K[j] ------- full, stage 2 j ----> start S' = Q K[j]
  TMA V[j] ------- full, stage 2 j + 1 > start O += P V[j - 1];  softmax of S' meanwhile (OVERLAP)
          <------- empty --------------- release K[j], V[j - 1]

The algorithm is v2's, with the same numbers. What changes is which warps do what, and when.
Hopper's copies and its tensor cores are asynchronous: one instruction starts them, and the threads
that issued it are free. In v2 every warp loads, multiplies and exponentiates in turn; here they
divide the work.

- TMA: a descriptor describes the tensor, one thread starts the copy of a whole tile, and a barrier
  in shared memory completes when it has arrived. Addresses need no registers; rows past the end
  arrive as 0. The output is stored in the same way, and rows past the end are dropped.
- Specialisation: one warp, the producer, only loads tiles; it keeps 24 registers a thread. Two
  warpgroups of 128 threads, the consumers, own 64 queries each and have 240: 64 for the scores with
  128 keys, up to 64 for the accumulator, 32 for P, and the rest for everything else.
- WGMMA: a warpgroup multiplies matrices in shared memory. P is taken from registers, because the
  accumulator of a product has the layout of a left operand.
- OVERLAP: QK of tile j and PV of tile j - 1 are started together. While the tensor cores run the
  second product, the warpgroup computes the softmax of the first.
- PINGPONG: the consumers issue in turns, so that one computes its softmax while the tensor cores
  work for the other. A clock has time for 16 exponentials or 2,048 multiply-adds.

Key tiles are visited from the last to the first. Tiles are square, so the diagonal and the end of
the keys cut the last tile only: it is masked before the loop, and the loop has no mask. Example:
300 causal tokens are three programs of 128 queries; the last one visits the key tiles 2, 1, 0.

onchip/kernels/hopper/forward.py is this kernel with all options.
"""

import math

import hopper as hw
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILE = gl.constexpr(128)  # queries of a program, 64 for each consumer; and keys of a tile
STAGES = gl.constexpr(4)  # key tile j is iteration 2 j, value tile j is iteration 2 j + 1


@gluon.jit
def produce(q_desc, k_desc, v_desc, pipes, work_tile):
    q_pipeline, kv_pipeline, turn = pipes
    batch, head, row, tiles = work_tile
    for c in gl.static_range(2):
        hw.fill(q_desc, [batch, head, row + 64 * c, 0], q_pipeline, c)
    for j in range(tiles):
        at = [batch, head, (tiles - 1 - j) * TILE, 0]
        hw.fill(k_desc, at, kv_pipeline, 2 * j)
        hw.fill(v_desc, at, kv_pipeline, 2 * j + 1)


@gluon.jit
def softmax(s, m, l, scale_log2):
    """v2's fold without its products: P, the new m and l, and alpha, the factor for acc."""
    m_new = gl.maximum(m, gl.max(s, 1))
    alpha = gl.exp2((m - m_new) * scale_log2)
    p = gl.exp2(s * scale_log2 - (m_new * scale_log2)[:, None])
    return p, m_new, l * alpha + gl.sum(p, 1), alpha


@gluon.jit
def consume(o_desc, lse_ptr, pipes, work_tile, seqlen, scale_log2, C: gl.constexpr,
            CAUSAL: gl.constexpr, OVERLAP: gl.constexpr, PINGPONG: gl.constexpr):  # fmt: skip
    q_pipeline, kv_pipeline, turn = pipes
    q_stages, q_full, _ = q_pipeline
    stages, full, empty = kv_pipeline
    batch, head, row, tiles = work_tile
    HEAD_DIM: gl.constexpr = q_stages.shape[-1]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O, k_width=2)
    row = row + 64 * C
    q = hw.matrix(q_stages, C)
    m, l, acc = hw.empty_state(64, HEAD_DIM, S, O)
    hw.wait(q_full, C)
    hw.wait(full, 0)
    s = hw.finish(hw.start_scores(q, stages, 0, S), 0)
    hw.arrive(empty, 0)
    s = hw.mask_scores(s, row, (tiles - 1) * TILE, seqlen, CAUSAL, S)
    p_wide, m, l, alpha = softmax(s, m, l, scale_log2)
    p = gl.convert_layout(p_wide.to(q.dtype), P)
    for j in range(1, tiles):
        hw.wait(full, 2 * j)
        if PINGPONG:
            hw.wait(turn, 2 * (j - 1) + C)
        s_next = hw.start_scores(q, stages, 2 * j, S)
        hw.wait(full, 2 * j - 1)
        acc_next = hw.start_values(p, stages, 2 * j - 1, acc)
        if PINGPONG:
            hw.arrive(turn, 1 - C)
        s = hw.finish(s_next, 1 if OVERLAP else 0)
        p_wide, m, l, alpha = softmax(s, m, l, scale_log2)
        acc = hw.finish(acc_next, 0)
        hw.arrive(empty, 2 * j)
        hw.arrive(empty, 2 * j - 1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]
        p = gl.convert_layout(p_wide.to(q.dtype), P)
    hw.wait(full, 2 * tiles - 1)
    acc = hw.finish(hw.start_values(p, stages, 2 * tiles - 1, acc), 0)
    acc = acc * gl.convert_layout(1.0 / l, gl.SliceLayout(1, O))[:, None]
    hw.store_tile(
        o_desc, [batch, head, row, 0], q_stages, C, acc.to(q.dtype)
    )  # q is not read any more
    hw.store_lse(lse_ptr, gl.program_id(1), row, seqlen, m * scale_log2, l)
    hw.store_wait(0)


@gluon.jit(do_not_specialize=["seqlen", "num_heads"])
def forward_v3(q_desc, k_desc, v_desc, o_desc, lse_ptr, seqlen, num_heads, scale_log2,
               CAUSAL: gl.constexpr, OVERLAP: gl.constexpr, PINGPONG: gl.constexpr):  # fmt: skip
    turn = hw.barriers(2, 1)
    hw.arrive(turn, 0)  # consumer 0 begins
    pipes = (hw.make_pipeline(q_desc, 2, 1), hw.make_pipeline(k_desc, STAGES, 2), turn)
    tile, batch_head = gl.program_id(0), gl.program_id(1)
    tiles = tile + 1 if CAUSAL else gl.num_programs(0)  # of keys
    work_tile = (batch_head // num_heads, batch_head % num_heads, tile * TILE, tiles)
    gl.warp_specialize([
        (consume, (o_desc, lse_ptr, pipes, work_tile, seqlen, scale_log2, 0, CAUSAL, OVERLAP,
                   PINGPONG)),
        (consume, (o_desc, lse_ptr, pipes, work_tile, seqlen, scale_log2, 1, CAUSAL, OVERLAP,
                   PINGPONG)),
        (produce, (q_desc, k_desc, v_desc, pipes, work_tile)),
    ], [4, 1], [240, 24])  # fmt: skip


def attention(q, k, v, causal=False, overlap=True, pingpong=True):
    """As in v1.py; q, k, v may have any strides that are multiples of 16 bytes."""
    batch, seqlen, num_heads, head_dim = q.shape
    out, lse = q.new_empty(q.shape), q.new_empty((batch, num_heads, seqlen), dtype=torch.float32)
    forward_v3[(triton.cdiv(seqlen, TILE.value), batch * num_heads)](
        hw.descriptor(q, 64), hw.descriptor(k, TILE.value), hw.descriptor(v, TILE.value),
        hw.descriptor(out, 64), lse, seqlen, num_heads, math.log2(math.e) / math.sqrt(head_dim),
        causal, overlap, pingpong, num_warps=4, maxnreg=168,
    )  # fmt: skip
    return out, lse


if __name__ == "__main__":
    from check import check

    check(attention)
