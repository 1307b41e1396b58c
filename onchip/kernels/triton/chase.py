"""How long a load takes that must be waited for: a ring of places, each of which names the next."""

import torch
import triton
import triton.language as tl
from torch import Tensor

LINE = 32  # int32 of a cache line: places of the ring are lines apart


@triton.jit(do_not_specialize=["hops"])
def chase_kernel(ring_ptr, last_ptr, hops, STRIDE: tl.constexpr):
    place = tl.load(ring_ptr)
    for _ in range(hops):
        place = tl.load(ring_ptr + place.to(tl.int64) * STRIDE)
    tl.store(last_ptr, place)


def lines(order: Tensor) -> Tensor:
    """A ring through all lines in the order of a permutation: line order[i] names order[i + 1]."""
    ring = torch.zeros(len(order) * LINE, dtype=torch.int32, device=order.device)
    ring[order.long() * LINE] = order.roll(-1)
    return ring


def chase(ring: Tensor, hops: int) -> Tensor:
    """The line after so many hops, and one, from line 0 on; ring: see `lines`."""
    last = torch.empty(1, dtype=torch.int32, device=ring.device)
    chase_kernel[(1,)](ring, last, hops, STRIDE=LINE, num_warps=1, enable_fp_fusion=True)
    return last
