"""Memory latency by pointer chasing: each load gives the address of the next.

    ring:  line 0 -> line 7 -> line 3 -> ... -> line 0      one int32 per line of 128 bytes
    chase_kernel: one program, one warp: place = ring[place], `hops` times

Time / hops is the latency of the memory that holds the ring. Worked size: 300 lines are a ring of
38 kB, which fits L2; 128 hops measure 128 dependent loads. Not an attention kernel: no teaching
version.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LINE = 32  # int32 per cache line: entries of the ring are one line apart


@triton.jit(do_not_specialize=["hops"])
def chase_kernel(ring_ptr, last_ptr, hops, STRIDE: tl.constexpr):
    place = tl.load(ring_ptr)
    for _ in range(hops):
        place = tl.load(ring_ptr + place.to(tl.int64) * STRIDE)
    tl.store(last_ptr, place)


def make_ring(order: Tensor) -> Tensor:
    """A ring through all lines in the order of a permutation: line order[i] holds order[i + 1]."""
    ring = torch.zeros(len(order) * LINE, dtype=torch.int32, device=order.device)
    ring[order.long() * LINE] = order.roll(-1)
    return ring


def chase(ring: Tensor, hops: int) -> Tensor:
    """The line after hops + 1 loads from line 0 on; ring: see `make_ring`."""
    last = torch.empty(1, dtype=torch.int32, device=ring.device)
    chase_kernel[(1,)](ring, last, hops, STRIDE=LINE, num_warps=1, enable_fp_fusion=True)
    return last
