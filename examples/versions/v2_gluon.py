"""v2 again, in Gluon: the steps between v2.py and v3.py, for the ablation in docs/kernels.md.

v2.py leaves it to the compiler how and when tiles are copied to shared memory. Here the copies are
explicit, with the tiles and products of v3 but without warp specialisation: eight warps do
everything. They start the copy of the next tile of keys and values, then compute on the one that
has arrived.

- TMA=False: every thread computes addresses and copies 16 bytes at a time (cp.async).
- TMA=True: one thread starts the copy of the whole tile, as in v3. That is the only difference.
"""

import math

import hopper as hw
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

TILE, STAGES = gl.constexpr(128), gl.constexpr(4)  # as in v3
copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
sync_threads = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def rows_of(ptr, row, seqlen, stride, HEAD_DIM: gl.constexpr):
    """Pointers to TILE tokens of a head, 16 bytes a thread; past the end, to the last token."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [8, 1], [1, 0])
    rows = gl.minimum(row + gl.arange(0, TILE, gl.SliceLayout(1, L)), seqlen - 1)
    return ptr + rows[:, None] * stride + gl.arange(0, HEAD_DIM, gl.SliceLayout(0, L))[None, :]


@gluon.jit
def start_copy(source, stages, full, work_tile, i, TMA: gl.constexpr):
    """Start to copy key and value tile i into stages 2 i and 2 i + 1, if there is such a tile."""
    k_desc, v_desc, k_ptr, v_ptr = source
    batch, head, row, tiles, seqlen, stride = work_tile
    col = (tiles - 1 - i) * TILE
    if i < tiles:
        if TMA:
            full_i = full.index(i % 2)
            mbarrier.expect(full_i, 2 * k_desc.block_type.nbytes)
            hw.load(k_desc, [batch, head, col, 0], full_i, stages.index(2 * i % STAGES))
            hw.load(v_desc, [batch, head, col, 0], full_i, stages.index((2 * i + 1) % STAGES))
        else:
            HEAD_DIM: gl.constexpr = stages.shape[-1]
            copy(hw.matrix(stages, 2 * i), rows_of(k_ptr, col, seqlen, stride, HEAD_DIM))
            copy(hw.matrix(stages, 2 * i + 1), rows_of(v_ptr, col, seqlen, stride, HEAD_DIM))
    if not TMA:
        async_copy.commit_group()


@gluon.jit
def step(source, stages, full, work_tile, q, state, scale_log2, i, MASKED: gl.constexpr,
         CAUSAL: gl.constexpr, TMA: gl.constexpr, S: gl.constexpr, O: gl.constexpr):  # fmt: skip
    """Start to copy tile i + 1, wait for tile i, fold it into the state, one after another."""
    batch, head, row, tiles, seqlen, stride = work_tile
    m, l, acc = state
    start_copy(source, stages, full, work_tile, i + 1, TMA)
    if TMA:
        hw.wait(full, i)
    else:
        async_copy.wait_group(1)  # all but the copies of tile i + 1
        fence_async_shared()
        sync_threads()
    s = hw.finish(hw.start_scores(q, stages, 2 * i, S), 0)
    if MASKED:
        s = hw.mask_scores(s, row, (tiles - 1 - i) * TILE, seqlen, CAUSAL, S)
    m_new = gl.maximum(m, gl.max(s, 1))
    alpha = gl.exp2((m - m_new) * scale_log2)
    p_wide = gl.exp2(s * scale_log2 - (m_new * scale_log2)[:, None])
    l = l * alpha + gl.sum(p_wide, 1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O))[:, None]
    p = gl.convert_layout(p_wide.to(q.dtype), gl.DotOperandLayout(0, O, 2))
    acc = hw.finish(hw.start_values(p, stages, 2 * i + 1, acc), 0)
    sync_threads()  # is done with tile i, whose slots tile i + 2 will take
    return m_new, l, acc


@gluon.jit(do_not_specialize=["seqlen", "num_heads"])
def forward_v2_gluon(k_desc, v_desc, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, seqlen, num_heads,
                     scale_log2, CAUSAL: gl.constexpr, TMA: gl.constexpr):  # fmt: skip
    HEAD_DIM: gl.constexpr = k_desc.block_shape[3]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, TILE, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, HEAD_DIM, 16])
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
    q = hw.matrix(q_slot, 0)
    q.store(gl.load(rows_of(q_ptr + start, tile * TILE, seqlen, stride, HEAD_DIM)))
    fence_async_shared()
    sync_threads()
    m, l, acc = hw.empty_state(TILE, HEAD_DIM, S, O)
    start_copy(source, stages, full, work_tile, 0, TMA)
    m, l, acc = step(source, stages, full, work_tile, q, (m, l, acc), scale_log2, 0,
                     True, CAUSAL, TMA, S, O)  # fmt: skip
    for i in range(1, tiles):
        m, l, acc = step(source, stages, full, work_tile, q, (m, l, acc), scale_log2, i,
                         False, CAUSAL, TMA, S, O)  # fmt: skip
    rows = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(1, O))
    at = rows[:, None] * stride + gl.arange(0, HEAD_DIM, gl.SliceLayout(0, O))[None, :]
    acc = acc * gl.convert_layout(1.0 / l, gl.SliceLayout(1, O))[:, None]
    gl.store(out_ptr + start + at, acc.to(q.dtype), mask=rows[:, None] < seqlen)
    hw.store_lse(lse_ptr, batch_head, tile * TILE, seqlen, m * scale_log2, l)


def attention(q, k, v, causal=False, tma=True):
    """As in v1.py."""
    batch, seqlen, num_heads, head_dim = q.shape
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out, lse = torch.empty_like(q), q.new_empty((batch, num_heads, seqlen), dtype=torch.float32)
    forward_v2_gluon[(triton.cdiv(seqlen, TILE.value), batch * num_heads)](
        hw.descriptor(k, TILE.value), hw.descriptor(v, TILE.value), q, k, v, out, lse,
        seqlen, num_heads, math.log2(math.e) / math.sqrt(head_dim), causal, tma, num_warps=8,
    )  # fmt: skip
    return out, lse


if __name__ == "__main__":
    from check import check

    check(attention)
