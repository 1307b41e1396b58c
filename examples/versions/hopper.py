"""Hopper's asynchronous hardware as v3 and v4 use it: pipelines of tiles, filled by TMA.

  producer                        stage i mod n                     consumer
  wait empty   <----------------- barrier `empty` <---------------- arrive(empty, i)
  load(i) ----- TMA ------------> tile, barrier `full` -----------> wait(full, i)

A pipeline has n stages of shared memory with two barriers each: `full` completes when a tile has
arrived, `empty` when every reader has released it. Iterations are counted 0, 1, 2, ...; iteration i
uses stage i mod n. A barrier completes once per pass over the stages, so a wait needs only the
parity of the pass, i div n. onchip/kernels/hopper/pipeline.py is the same for all kernels.
"""

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# the names in Triton 3.9, then in 3.6
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
store_wait = tma.store_wait
LN2 = gl.constexpr(math.log(2))


@gluon.jit
def barriers(n: gl.constexpr, count: gl.constexpr):
    """n barriers that complete at every count-th arrival."""
    bars = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit
def wait(bars, i):
    """Wait until the barrier of iteration i has completed."""
    mbarrier.wait(bars.index(i % bars.shape[0]), (i // bars.shape[0]) & 1)


@gluon.jit
def arrive(bars, i):
    mbarrier.arrive(bars.index(i % bars.shape[0]), count=1)


@gluon.jit
def allocate_tiles(desc, n: gl.constexpr):
    """Shared memory for n tiles of the tensor behind desc."""
    return gl.allocate_shared_memory(desc.dtype, [n] + desc.block_shape, desc.layout)


@gluon.jit
def make_pipeline(desc, n: gl.constexpr, readers: gl.constexpr):
    return allocate_tiles(desc, n), barriers(n, 1), barriers(n, readers)


@gluon.jit
def fill(desc, at, pipeline, i):
    """Start the TMA load of iteration i; elements outside of the tensor arrive as 0."""
    stages, full, empty = pipeline
    n: gl.constexpr = full.shape[0]
    wait(empty, i + n)  # the parity of i - n, which must be released; passes if i < n
    mbarrier.expect(full.index(i % n), desc.block_type.nbytes)
    load(desc, at, full.index(i % n), stages.index(i % n))


@gluon.jit
def matrix(stages, i):
    """The stage of iteration i as a matrix, without the dimensions of 1 for batch and head."""
    stage = stages.index(i % stages.shape[0])
    return stage.reshape([stage.shape[-2], stage.shape[-1]])


@gluon.jit
def empty_state(M: gl.constexpr, HEAD_DIM: gl.constexpr, S: gl.constexpr, O: gl.constexpr):
    """m, l and acc of queries that have seen no key; scores have layout S, acc has layout O."""
    m = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    l = gl.zeros([M], gl.float32, gl.SliceLayout(1, S))
    return m, l, gl.zeros([M, HEAD_DIM], gl.float32, O)


@gluon.jit
def start_scores(q, stages, i, S: gl.constexpr):
    """Start q k^T with the keys of iteration i. The result may be read after finish()."""
    k = matrix(stages, i).permute((1, 0))
    M: gl.constexpr = q.shape[0]
    N: gl.constexpr = k.shape[1]
    zero = gl.zeros([M, N], gl.float32, S)
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def start_values(p, stages, i, acc):
    """Start acc + p v with the values of iteration i."""
    return warpgroup_mma(p, matrix(stages, i), acc, is_async=True)


@gluon.jit
def finish(product, later: gl.constexpr):
    """The product, once at most `later` of the products started since then are running."""
    return warpgroup_mma_wait(num_outstanding=later, deps=(product,))


@gluon.jit
def store_tile(desc, at, stages, c: gl.constexpr, value):
    """Registers -> stage c -> the tensor behind desc; rows outside of it are dropped."""
    matrix(stages, c).store(value)
    fence_async_shared()
    store(desc, at, stages.index(c))


@gluon.jit
def store_lse(lse_ptr, batch_head, row, seqlen, m_log2, l):
    """The natural logarithm of the sum of exponentials of each row, from m in units of log 2."""
    rows = row + gl.arange(0, l.shape[0], l.type.layout)
    lse = (m_log2 + gl.log2(l)) * LN2
    gl.store(lse_ptr + batch_head.to(gl.int64) * seqlen + rows, lse, mask=rows < seqlen)


@gluon.jit
def mask_scores(s, row, col, seqlen, CAUSAL: gl.constexpr, S: gl.constexpr):
    """s with -inf at keys past the end or after the query; (row, col): position of its corner."""
    cols = (col + gl.arange(0, s.shape[1], gl.SliceLayout(0, S)))[None, :]
    if CAUSAL:
        rows = (row + gl.arange(0, s.shape[0], gl.SliceLayout(1, S)))[:, None]
        s = gl.where(cols <= rows, s, float("-inf"))
    return gl.where(cols < seqlen, s, float("-inf"))


@gluon.jit
def make_work_queue():
    """A pipeline of two integers, read by two consumers."""
    stages = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return stages, barriers(2, 1), barriers(2, 2)


@gluon.jit
def push(work_queue, i, work_index):
    """Producer: write the i-th work index."""
    stages, full, empty = work_queue
    wait(empty, i + 2)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    stages.index(i % 2).store(gl.full([1], work_index, gl.int32, one))
    arrive(full, i)


@gluon.jit
def pop(work_queue, i):
    """Consumer: read the i-th work index."""
    stages, full, empty = work_queue
    wait(full, i)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    work_index = gl.max(stages.index(i % 2).load(one), 0)
    arrive(empty, i)
    return work_index


def descriptor(x, rows):
    """For TMA: tiles of `rows` tokens of one head of x (batch, seqlen, num_heads, head_dim)."""
    x, block = x.transpose(1, 2), [1, 1, rows, x.shape[3]]
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[x.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)
