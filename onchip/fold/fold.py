"""The fold: attend to one segment at a time with any kernel, and merge the states."""

from collections.abc import Callable, Iterable
from functools import reduce
from typing import TypeVar

from torch import Tensor

from onchip.core.state import finalize, merge, resume

Segment = TypeVar("Segment")


def fold(
    q: Tensor,
    segments: Iterable[Segment],
    attend: Callable[[Tensor, Segment], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """(out, lse) of q over the union of disjoint segments; only one of them is alive at a time.

    attend(q, segment) -> (out (..., seqlen, heads, head_dim_v), lse (..., heads, seqlen)), both in
    fp32 or wider; at least one segment. The result has the same shapes.
    """
    states = (resume(out.transpose(-2, -3), lse) for out, lse in (attend(q, s) for s in segments))
    out, lse = finalize(reduce(merge, states))
    return out.transpose(-2, -3), lse
