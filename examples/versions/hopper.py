"""Hopper's asynchronous machinery as v3 and v4 use it: rings of tiles, filled by TMA.

A ring is a few slots of shared memory with two barriers each: `full` flips when a tile has arrived,
`empty` when every reader has released it. Fillings are counted 0, 1, 2, ...; the i-th lies in slot i
mod the number of slots. A barrier flips once per round, so that what to wait for is the parity of
the round, i div the number of slots.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # renamed after 3.6
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


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
def visible(s, row, col, seqlen, CAUSAL: gl.constexpr, S: gl.constexpr):
    """s with -inf at keys past the end or after the query; row, col: the place of its corner."""
    cols = gl.expand_dims(col + gl.arange(0, s.shape[1], gl.SliceLayout(0, S)), 0)
    if CAUSAL:
        rows = gl.expand_dims(row + gl.arange(0, s.shape[0], gl.SliceLayout(1, S)), 1)
        s = gl.where(cols <= rows, s, float("-inf"))
    return gl.where(cols < seqlen, s, float("-inf"))


def descriptor(x, rows):
    """For TMA: tiles of `rows` tokens of one head of x (batch, seqlen, num_heads, head_dim)."""
    x, block = x.transpose(1, 2), [1, 1, rows, x.shape[3]]
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[x.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)
