"""How host-side kernels walk a call: one plane per sequence of a packed call, or per (batch, head)
that has a mask of its own.

Inside a plane one visibility rule governs all rows, so a plane is a plain dense problem over views
of the call's tensors.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from onchip.core.problem import Problem, Tensors
from onchip.masks.visibility import Visibility

ALL = slice(None)


class Plane(NamedTuple):
    """Where one plane lies in tensors of layout (batch, seqlen, heads, dim), packed ones seen as a
    batch of one.
    """

    batch: slice
    rows: slice
    keys: slice
    heads: slice
    kv_heads: slice
    first_batch: (
        int  # index of its first sequence and head in the call: dropout and ALiBi depend on them
    )
    first_head: int
    visibility: Visibility

    def of_queries(self, x: Tensor) -> Tensor:
        """(b, seqlen_q, h, dim) view of q, out, dout or dq."""
        return _dense(x)[self.batch, self.rows, self.heads]

    def of_keys(self, x: Tensor) -> Tensor:
        """(b, seqlen_k, h_kv, dim) view of k, v, dk or dv."""
        return _dense(x)[self.batch, self.keys, self.kv_heads]

    def of_rows(self, x: Tensor) -> Tensor:
        """(b, h, seqlen_q) view of lse, delta or a statistic."""
        return (x if x.dim() == 3 else x[None])[self.batch, self.heads, self.rows]

    def of_slopes(self, x: Tensor) -> Tensor:
        """(b|1, h, 1, 1) view of alibi_slopes."""
        x = x[None] if x.dim() == 1 else x
        if x.shape[0] > 1:
            packed = self.rows != ALL
            x = x[self.first_batch : self.first_batch + 1] if packed else x[self.batch]
        return x[:, self.heads, None, None]

    def of_bias(self, x: Tensor) -> Tensor:
        """(b|1, h|1, seqlen_q|1, seqlen_k) view of bias or dbias."""
        x = x if x.shape[0] == 1 else x[self.batch]
        return x if x.shape[1] == 1 else x[:, self.heads]


def planes(problem: Problem, x: Tensors) -> Iterator[Plane]:
    if problem.packed:
        yield from _sequences(problem, x)
    elif x.mask is None:
        yield Plane(ALL, ALL, ALL, ALL, ALL, 0, 0, _rule(problem, x, 0, 0))
    else:
        yield from _mask_planes(problem, x)


def _sequences(problem: Problem, x: Tensors) -> Iterator[Plane]:
    offsets_q, offsets_k = x.cu_seqlens_q.tolist(), x.cu_seqlens_k.tolist()
    for b in range(problem.batch):
        rows = slice(offsets_q[b], offsets_q[b + 1])
        keys = slice(offsets_k[b], offsets_k[b + 1])
        rule = Visibility(
            rows.stop - rows.start,
            keys.stop - keys.start,
            problem.causal,
            problem.window_size,
            None,
            0,
            0,
        )
        yield Plane(ALL, rows, keys, ALL, ALL, b, 0, rule)


def _mask_planes(problem: Problem, x: Tensors) -> Iterator[Plane]:
    mask_batch, mask_heads = x.mask.shape[:2]
    for b in range(mask_batch):
        batch = ALL if mask_batch == 1 else slice(b, b + 1)
        for h in range(mask_heads):
            rule = _rule(problem, x, b, h)
            if mask_heads == 1:
                yield Plane(batch, ALL, ALL, ALL, ALL, b, 0, rule)
            else:
                kv = h // problem.group_size
                yield Plane(batch, ALL, ALL, slice(h, h + 1), slice(kv, kv + 1), b, h, rule)


def _rule(problem: Problem, x: Tensors, b: int, h: int) -> Visibility:
    return Visibility(
        problem.seqlen_q, problem.seqlen_k, problem.causal, problem.window_size, x.mask, b, h
    )


def _dense(x: Tensor) -> Tensor:
    return x if x.dim() == 4 else x[None]
