"""Buffers of the gradients in HBM while they are summed."""

from collections.abc import Callable

import torch
from torch import Tensor

from onchip.core.backend import Grads, accumulator_dtype, grad_dtype
from onchip.core.problem import Problem, Tensors

from .call import PaperCall
from .ledger import Ledger
from .memory import Array, Tile


class Gradients:
    """dq, dk and dv of a call. A dq that is summed in HBM has the ledger's scratch dtype, and is
    converted at the end. Each query head of a group has its own dk and dv, summed at the end, as in
    FlashAttention-2.
    """

    book: Ledger
    wide: torch.dtype
    dq: Tensor
    dk: Tensor
    dv: Tensor
    sum_q: Tensor
    sum_k: Tensor
    sum_v: Tensor

    def __init__(self, problem: Problem, x: Tensors, book: Ledger, summed_in_hbm: bool = True):
        self.book, self.wide = book, accumulator_dtype(problem.dtype)
        scratch, dtype = book.scratch or self.wide, grad_dtype(problem)
        self.dq, self.dk, self.dv = (torch.empty_like(t, dtype=dtype) for t in x[:3])
        apart = summed_in_hbm and dtype != scratch
        self.sum_q = torch.empty_like(self.dq, dtype=scratch) if apart else self.dq
        self.sum_k, self.sum_v = self.dk, self.dv
        if problem.group_size > 1:
            self.sum_k, self.sum_v = (
                t.new_empty(*t.shape[:-2], problem.num_heads, t.shape[-1], dtype=scratch)
                for t in (self.dk, self.dv)
            )

    def of(self, call: PaperCall) -> tuple[Array, Array, Array]:
        return (
            call.take_queries("dq", self.sum_q),
            call.of_query_heads("dk", self.sum_k),
            call.of_query_heads("dv", self.sum_v),
        )

    def finish(self) -> Grads:
        if self.sum_q is not self.dq:
            self._pass("dq.convert", self.sum_q, self.dq, lambda t: t)
        if self.sum_k is not self.dk:
            self._sum_groups("dk.heads", self.sum_k, self.dk)
            self._sum_groups("dv.heads", self.sum_v, self.dv)
        return Grads(self.dq, self.dk, self.dv)

    def _sum_groups(self, name: str, parts: Tensor, whole: Tensor) -> None:
        grouped = parts.unflatten(-2, (whole.shape[-2], -1)).mT
        self._pass(name, grouped, whole[..., None], Tile.rowsum)

    def _pass(self, name: str, source: Tensor, target: Tensor, step: Callable) -> None:
        """Load everything, apply `step`, and store it."""
        rows = 0, source.shape[-2]
        tile = Array(self.book, name, source, self.wide).load(rows)
        Array(self.book, name, target, self.wide).store(step(tile), rows)
