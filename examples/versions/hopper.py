"""Hopper's asynchronous machinery as v3 and v4 use it: rings of tiles, filled by TMA.

A ring is a few slots of shared memory with two barriers each: `full` flips when a tile has arrived,
`empty` when every reader has released it. Fillings are counted 0, 1, 2, ...; the i-th lies in slot
i mod n of n slots. A barrier flips once per round, so that what to wait for is the parity of the
round, i div n.
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

# the names of Triton 3.9, then those of 3.6
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
store_wait = tma.store_wait
LN2 = gl.constexpr(math.log(2))


@gluon.jit
def barriers(n: gl.constexpr, count: gl.constexpr):
    """n barriers that flip at every count-th arrival."""
    bars = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit
def wait(bars, i):
    """Until the barrier of filling i has flipped in the round of i."""
    mbarrier.wait(bars.index(i % bars.shape[0]), (i // bars.shape[0]) & 1)


@gluon.jit
def arrive(bars, i):
    mbarrier.arrive(bars.index(i % bars.shape[0]), count=1)


@gluon.jit
def tiles_of(desc, n: gl.constexpr):
    """Room for n tiles of the tensor behind desc."""
    return gl.allocate_shared_memory(desc.dtype, [n] + desc.block_shape, desc.layout)


@gluon.jit
def make_ring(desc, n: gl.constexpr, readers: gl.constexpr):
    return tiles_of(desc, n), barriers(n, 1), barriers(n, readers)


@gluon.jit
def fill(desc, at, ring, i):
    """Ask TMA for filling i of a ring; what lies outside of the tensor arrives as 0."""
    slots, full, empty = ring
    n: gl.constexpr = full.shape[0]
    wait(empty, i + n)  # has the parity of i - n, the filling that must be released; or it is new
    mbarrier.expect(full.index(i % n), desc.block_type.nbytes)
    load(desc, at, full.index(i % n), slots.index(i % n))


@gluon.jit
def matrix(slots, i):
    """The slot of filling i without the dimensions of 1 that batch and head have there."""
    slot = slots.index(i % slots.shape[0])
    return slot.reshape([slot.shape[-2], slot.shape[-1]])


@gluon.jit
def empty_state(M: gl.constexpr, HEAD_DIM: gl.constexpr, S: gl.constexpr, O: gl.constexpr):
    """m, l and acc of queries that have seen no key; scores lie in layout S, acc in layout O."""
    m = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    l = gl.zeros([M], gl.float32, gl.SliceLayout(1, S))
    return m, l, gl.zeros([M, HEAD_DIM], gl.float32, O)


@gluon.jit
def start_scores(q, slots, i, S: gl.constexpr):
    """Order q k^T with the keys of filling i. What is returned may be read after finish()."""
    k = matrix(slots, i).permute((1, 0))
    M: gl.constexpr = q.shape[0]
    N: gl.constexpr = k.shape[1]
    zero = gl.zeros([M, N], gl.float32, S)
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def start_values(p, slots, i, acc):
    """Order acc + p v with the values of filling i."""
    return warpgroup_mma(p, matrix(slots, i), acc, is_async=True)


@gluon.jit
def finish(product, later: gl.constexpr):
    """The product, when all but `later` of the orders given since then are done."""
    return warpgroup_mma_wait(num_outstanding=later, deps=(product,))


@gluon.jit
def store_tile(desc, at, slots, c: gl.constexpr, value):
    """Registers -> slot c -> the tensor behind desc; rows outside of it are dropped."""
    matrix(slots, c).store(value)
    fence_async_shared()
    store(desc, at, slots.index(c))


@gluon.jit
def store_lse(lse_ptr, plane, row, seqlen, m_log2, l):
    """The logarithm of the sum of exponentials of each row, natural, from m in units of log 2."""
    rows = row + gl.arange(0, l.shape[0], l.type.layout)
    lse = (m_log2 + gl.log2(l)) * LN2
    gl.store(lse_ptr + plane.to(gl.int64) * seqlen + rows, lse, mask=rows < seqlen)


@gluon.jit
def visible(s, row, col, seqlen, CAUSAL: gl.constexpr, S: gl.constexpr):
    """s with -inf at keys past the end or after the query; row, col: the place of its corner."""
    cols = (col + gl.arange(0, s.shape[1], gl.SliceLayout(0, S)))[None, :]
    if CAUSAL:
        rows = (row + gl.arange(0, s.shape[0], gl.SliceLayout(1, S)))[:, None]
        s = gl.where(cols <= rows, s, float("-inf"))
    return gl.where(cols < seqlen, s, float("-inf"))


@gluon.jit
def make_tickets():
    """A ring of two numbers, read by two consumers."""
    slots = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return slots, barriers(2, 1), barriers(2, 2)


@gluon.jit
def give(tickets, i, ticket):
    """Producer: write the i-th ticket."""
    slots, full, empty = tickets
    wait(empty, i + 2)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slots.index(i % 2).store(gl.full([1], ticket, gl.int32, one))
    arrive(full, i)


@gluon.jit
def take(tickets, i):
    """Consumer: read the i-th ticket."""
    slots, full, empty = tickets
    wait(full, i)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    ticket = gl.max(slots.index(i % 2).load(one), 0)
    arrive(empty, i)
    return ticket


def descriptor(x, rows):
    """For TMA: tiles of `rows` tokens of one head of x (batch, seqlen, num_heads, head_dim)."""
    x, block = x.transpose(1, 2), [1, 1, rows, x.shape[3]]
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[x.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)
