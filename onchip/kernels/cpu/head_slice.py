"""Head slices: the dense parts of a call that the CPU kernels compute one after the other.

A packed call has one head slice per sequence. A call with a mask has one per (batch, head) plane of
the mask, and any other call is one head slice. All rows of a head slice have the same visibility
rule, so a head slice is a dense problem over views of the call's tensors.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from onchip.core.problem import Problem, Tensors
from onchip.masks.visibility import Visibility

ALL = slice(None)


class HeadSlice(NamedTuple):
    """The index of one head slice in tensors of layout (batch, seqlen, heads, dim). Packed tensors
    are indexed as a batch of one.
    """

    batch: slice
    rows: slice
    keys: slice
    heads: slice
    kv_heads: slice
    # Index of its first sequence and head in the call: dropout and ALiBi depend on them.
    first_batch: int
    first_head: int
    visibility: Visibility

    def take_queries(self, x: Tensor) -> Tensor:
        """(b, seqlen_q, h, dim) view of q, out, dout or dq."""
        return _dense(x)[self.batch, self.rows, self.heads]

    def take_keys(self, x: Tensor) -> Tensor:
        """(b, seqlen_k, h_kv, dim) view of k, v, dk or dv."""
        return _dense(x)[self.batch, self.keys, self.kv_heads]

    def take_rows(self, x: Tensor) -> Tensor:
        """(b, h, seqlen_q) view of lse, delta or a statistic."""
        return (x if x.dim() == 3 else x[None])[self.batch, self.heads, self.rows]

    def take_slopes(self, x: Tensor) -> Tensor:
        """(b|1, h, 1, 1) view of alibi_slopes."""
        x = x[None] if x.dim() == 1 else x
        if x.shape[0] > 1:
            packed = self.rows != ALL
            x = x[self.first_batch : self.first_batch + 1] if packed else x[self.batch]
        return x[:, self.heads, None, None]

    def take_bias(self, x: Tensor) -> Tensor:
        """(b|1, h|1, seqlen_q|1, seqlen_k) view of bias or dbias."""
        x = x if x.shape[0] == 1 else x[self.batch]
        return x if x.shape[1] == 1 else x[:, self.heads]


def head_slices(problem: Problem, x: Tensors) -> Iterator[HeadSlice]:
    if problem.packed:
        yield from _sequences(problem, x)
    elif x.mask is None:
        yield HeadSlice(ALL, ALL, ALL, ALL, ALL, 0, 0, plane_rule(problem, x, 0, 0))
    else:
        yield from _mask_head_slices(problem, x)


def _sequences(problem: Problem, x: Tensors) -> Iterator[HeadSlice]:
    offsets_q, offsets_k = x.cu_seqlens_q.tolist(), x.cu_seqlens_k.tolist()
    for b in range(problem.batch):
        rows = slice(offsets_q[b], offsets_q[b + 1])
        keys = slice(offsets_k[b], offsets_k[b + 1])
        lengths = rows.stop - rows.start, keys.stop - keys.start
        rule = Visibility(*lengths, problem.causal, problem.window_size)
        yield HeadSlice(ALL, rows, keys, ALL, ALL, b, 0, rule)


def _mask_head_slices(problem: Problem, x: Tensors) -> Iterator[HeadSlice]:
    mask_batch, mask_heads = x.mask.shape[:2]
    for b in range(mask_batch):
        batch = ALL if mask_batch == 1 else slice(b, b + 1)
        for h in range(mask_heads):
            rule = plane_rule(problem, x, b, h)
            if mask_heads == 1:
                yield HeadSlice(batch, ALL, ALL, ALL, ALL, b, 0, rule)
            else:
                kv = h // problem.group_size
                yield HeadSlice(batch, ALL, ALL, slice(h, h + 1), slice(kv, kv + 1), b, h, rule)


def plane_rule(problem: Problem, x: Tensors, b: int, h: int) -> Visibility:
    """The keys that a dense call sees in plane (b, h) of its mask, or without a mask."""
    return Visibility(
        problem.seqlen_q, problem.seqlen_k, problem.causal, problem.window_size, x.mask, b, h
    )


def _dense(x: Tensor) -> Tensor:
    return x if x.dim() == 4 else x[None]
