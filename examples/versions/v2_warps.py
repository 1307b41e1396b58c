"""v2_gluon with one of v2's other two changes undone, to measure what each of them is worth.

v2 is known for the order of its loops. It also does less beside the matrix products, and divides
the work of a program differently among its warps:

- normalise=True: as v1, acc is normalised after every tile of keys: multiplied by l before the
  tile, and by 1 / l after it. Two multiplications for each element of acc, where v2 has one, and a
  division for each row and tile, where v2 has one for each row.
- split_keys=True: as v1, warps share the queries and divide the keys. For 128 queries and 128 keys:

                       warpgroup 0                   warpgroup 1
  v2     S = Q K^T     queries 0..63, all keys       queries 64..127, all keys
         O = P V       queries 0..63, all columns    queries 64..127, all columns
  split  S = Q K^T     all queries, keys 0..63       all queries, keys 64..127
         O = P V       all queries, half of the columns each: P passes through shared memory

  In v2 a row of S belongs to four threads, and its maximum and sum need no other warp. Split, they
  are exchanged through shared memory, and so is all of P. (v1 exchanged sums of O instead of P: on
  Hopper, where two warpgroups multiply at once, P in bf16 is half as many bytes.)

Tiles, copies by TMA and products are those of v2_gluon.py, which is to be read first.
"""

import math

import hopper as hw
import torch
import triton
import v2_gluon
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

TILE, STAGES = v2_gluon.TILE, v2_gluon.STAGES
start_copy, rows_of, sync_threads = v2_gluon.start_copy, v2_gluon.rows_of, v2_gluon.sync_threads


@gluon.jit
def multiply_values(p_wide, p_slot, stages, i, acc, SPLIT_KEYS: gl.constexpr, O: gl.constexpr):
    """acc + p v with the values of iteration i. Split, p passes through p_slot."""
    if SPLIT_KEYS:
        p = p_slot.index(0)
        p.store(p_wide.to(stages.dtype))
        fence_async_shared()
        sync_threads()
        acc = hw.finish(hw.start_values(p, stages, i, acc), 0)
    else:
        p = gl.convert_layout(p_wide.to(stages.dtype), gl.DotOperandLayout(0, O, 2))
        acc = hw.finish(hw.start_values(p, stages, i, acc), 0)
    return acc


@gluon.jit
def step(source, stages, full, work_tile, q, p_slot, state, scale_log2, i, MASKED: gl.constexpr,
         CAUSAL: gl.constexpr, NORMALISE: gl.constexpr, SPLIT_KEYS: gl.constexpr,
         S: gl.constexpr, O: gl.constexpr):  # fmt: skip
    """As in v2_gluon.py. With NORMALISE, acc is the output so far."""
    batch, head, row, tiles, seqlen, stride = work_tile
    m, l, acc = state
    start_copy(source, stages, full, work_tile, i + 1, True)
    hw.wait(full, i)
    s = hw.finish(hw.start_scores(q, stages, 2 * i, S), 0)
    if MASKED:
        s = hw.mask_scores(s, row, (tiles - 1 - i) * TILE, seqlen, CAUSAL, S)
    m_new = gl.maximum(m, gl.max(s, 1))
    alpha = gl.exp2((m - m_new) * scale_log2)
    p_wide = gl.exp2(s * scale_log2 - (m_new * scale_log2)[:, None])
    l_new = l * alpha + gl.sum(p_wide, 1)
    before = alpha
    if NORMALISE:
        before = alpha * l
    acc = acc * gl.convert_layout(before, gl.SliceLayout(1, O))[:, None]
    acc = multiply_values(p_wide, p_slot, stages, 2 * i + 1, acc, SPLIT_KEYS, O)
    if NORMALISE:
        acc = acc * gl.convert_layout(1.0 / l_new, gl.SliceLayout(1, O))[:, None]
    sync_threads()  # is done with tile i, whose slots tile i + 2 will take
    return m_new, l_new, acc


@gluon.jit(do_not_specialize=["seqlen", "num_heads"])
def forward_v2_warps(k_desc, v_desc, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, seqlen, num_heads,
                     scale_log2, CAUSAL: gl.constexpr, NORMALISE: gl.constexpr,
                     SPLIT_KEYS: gl.constexpr):  # fmt: skip
    HEAD_DIM: gl.constexpr = k_desc.block_shape[3]
    WARPS: gl.constexpr = [4, 2] if SPLIT_KEYS else [8, 1]
    KEYS: gl.constexpr = TILE // 2 if SPLIT_KEYS else TILE
    COLUMNS: gl.constexpr = HEAD_DIM // 2 if SPLIT_KEYS else HEAD_DIM
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, KEYS, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], WARPS, [16, COLUMNS, 16])
    tile, batch_head = gl.program_id(0), gl.program_id(1)
    batch, head = batch_head // num_heads, batch_head % num_heads
    stride = num_heads * HEAD_DIM
    start = (batch.to(gl.int64) * seqlen * num_heads + head) * HEAD_DIM
    tiles = tile + 1 if CAUSAL else gl.num_programs(0)
    work_tile = (batch, head, tile * TILE, tiles, seqlen, stride)
    source = (k_desc, v_desc, k_ptr + start, v_ptr + start)
    stages, q_slot, full = (
        hw.allocate_tiles(k_desc, STAGES),
        hw.allocate_tiles(k_desc, 1),
        hw.barriers(2, 1),
    )
    p_slot = q_slot  # a placeholder
    if SPLIT_KEYS:
        P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, TILE], k_desc.dtype)
        p_slot = gl.allocate_shared_memory(k_desc.dtype, [1, TILE, TILE], P)
    q = hw.matrix(q_slot, 0)
    q.store(gl.load(rows_of(q_ptr + start, tile * TILE, seqlen, stride, HEAD_DIM)))
    fence_async_shared()
    sync_threads()
    state = hw.empty_state(TILE, HEAD_DIM, S, O)
    start_copy(source, stages, full, work_tile, 0, True)
    state = step(source, stages, full, work_tile, q, p_slot, state, scale_log2, 0,
                 True, CAUSAL, NORMALISE, SPLIT_KEYS, S, O)  # fmt: skip
    m, l, acc = state
    for i in range(1, tiles):
        m, l, acc = step(source, stages, full, work_tile, q, p_slot, (m, l, acc), scale_log2, i,
                         False, CAUSAL, NORMALISE, SPLIT_KEYS, S, O)  # fmt: skip
    rows = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, O))
    at = rows[:, None] * stride + gl.arange(0, HEAD_DIM, gl.SliceLayout(0, O))[None, :]
    if not NORMALISE:
        acc = acc * gl.convert_layout(1.0 / l, gl.SliceLayout(1, O))[:, None]
    gl.store(out_ptr + start + at, acc.to(q.dtype), mask=rows[:, None] < seqlen)
    hw.store_lse(lse_ptr, batch_head, tile * TILE, seqlen, m * scale_log2, l)


def attention(q, k, v, causal=False, normalise=False, split_keys=False):
    """As in v1.py."""
    batch, seqlen, num_heads, head_dim = q.shape
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out, lse = torch.empty_like(q), q.new_empty((batch, num_heads, seqlen), dtype=torch.float32)
    forward_v2_warps[(triton.cdiv(seqlen, TILE.value), batch * num_heads)](
        hw.descriptor(k, TILE.value), hw.descriptor(v, TILE.value), q, k, v, out, lse,
        seqlen, num_heads, math.log2(math.e) / math.sqrt(head_dim), causal, normalise, split_keys,
        num_warps=8,
    )  # fmt: skip
    return out, lse


if __name__ == "__main__":
    from check import check

    check(attention)
