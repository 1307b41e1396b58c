"""score_mod on one tile of scores: the result, and the chain rule through it.

    score, captured  ->  s = f(score, captured)
    ds               ->  d score = ds f_s               d captured[i] += ds f_c    (backward)
    t_score, t_c     ->  ds = f_s t_score + f_c t_c                                (tangents)

f_s and f_c are expressions (onchip/score_mods/derivative.py), c the elements that f reads. Where a
gradient is zero, as in hidden cells, an infinite derivative has no share.
"""

from typing import Any

import torch
from torch import Tensor

from onchip.core.problem import Tensors
from onchip.score_mods.derivative import (
    Derivative,
    FirstDerivatives,
    SecondDerivatives,
    first_derivatives,
    second_derivatives,
)
from onchip.score_mods.evaluate import Cells, Evaluator
from onchip.score_mods.expression import from_text


class ModifiedTile:
    """score_mod of a call on the scores of one tile."""

    def __init__(self, text: str, x: Tensors, score: Tensor, cells: Cells):
        expression = from_text(text)
        self.text = text
        self.evaluator: Evaluator = Evaluator(expression, score, cells, x.captured, x.captured_ints)
        self.result: int = len(expression.operations) - 1

    def scores(self) -> Tensor:
        """The result for every cell. autograd differentiates it, if it records."""
        e = self.evaluator
        tensors = [t for t in (e.score, e.floats) if t is not None]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return _RecordedTile.apply(self, e.score, e.floats)
        return e.tile(self.result)

    def score_gradient(self, ds: Tensor) -> Tensor:
        """The gradient of the score before score_mod, from that of the result."""
        return self._times(ds, self._first().by_score)

    def add_captured_gradient(self, dcaptured: Tensor, ds: Tensor) -> None:
        """Add the gradients of the captured floats, in place."""
        first = self._first()
        for load, derivative in zip(first.loads, first.by_load, strict=True):
            if derivative is not None:
                self._add_at(dcaptured, load, self._times(ds, derivative))

    def tangent(self, t: Tensor, t_captured: Tensor | None) -> Tensor:
        """The tangent of the result, from the tangents of the score and the captured floats."""
        first = self._first()
        ds = self._times(t, first.by_score)
        if t_captured is not None:
            for load, derivative in zip(first.loads, first.by_load, strict=True):
                ds = ds + self._times(self.evaluator.load_from(t_captured, load), derivative)
        return ds

    def second_order(
        self, grad_s: Tensor, grad_ds: Tensor, t: Tensor, t_captured: Tensor | None,
        dcaptured: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The gradients of the score and of its tangent t, from the gradients of the result and of
        the result's tangent. Adds the gradients of the captured floats to dcaptured.
        """
        first, second = self._first(), self._second()
        directions = [t, *(self._load_tangent(t_captured, load) for load in first.loads)]
        rows = [self._times(grad_s, d) for d in (first.by_score, *first.by_load)]
        for i, derivatives in enumerate(second.table):
            curvature = torch.zeros_like(grad_s)
            for direction, derivative in zip(directions, derivatives, strict=True):
                if direction is not None:
                    curvature = curvature + self._times(direction, derivative)
            rows[i] = rows[i] + _multiply(grad_ds, curvature)
        if dcaptured is not None:
            for load, row in zip(first.loads, rows[1:], strict=True):
                self._add_at(dcaptured, load, row)
        return rows[0], self._times(grad_ds, first.by_score)

    def _first(self) -> FirstDerivatives:
        first = first_derivatives(self.text)
        self.evaluator.extend(first.expression)
        return first

    def _second(self) -> SecondDerivatives:
        second = second_derivatives(self.text)
        self.evaluator.extend(second.expression)
        return second

    def _load_tangent(self, t_captured: Tensor | None, load: int) -> Tensor | None:
        return None if t_captured is None else self.evaluator.load_from(t_captured, load)

    def _times(self, grad: Tensor, derivative: Derivative) -> Tensor:
        """A gradient or tangent times a derivative; zero where it is zero."""
        if derivative is None:
            return torch.zeros_like(grad)
        return _multiply(grad, self.evaluator.value(derivative))

    def _add_at(self, total: Tensor, load: int, grad: Tensor) -> None:
        """Add the gradient of a load to the elements that it read."""
        positions = self.evaluator.positions(load)
        shared = [dim for dim in range(4) if positions.shape[dim] == 1 < grad.shape[dim]]
        grad = grad.sum(shared, keepdim=True) if shared else grad
        positions = positions.expand(grad.shape)
        total.index_add_(0, positions.reshape(-1), grad.reshape(-1).to(total.dtype))


def _multiply(grad: Tensor, derivative: Any) -> Tensor:
    return torch.where(grad == 0, 0.0, grad * derivative)


class _RecordedTile(torch.autograd.Function):
    """The result of a ModifiedTile, for the kernel that differentiates its formula by autograd."""

    @staticmethod
    def forward(ctx, tile, score, floats):
        ctx.tile = tile
        return tile.evaluator.tile(tile.result).clone()

    @staticmethod
    def backward(ctx, ds):  # pyright: ignore[reportIncompatibleMethodOverride]
        floats, dcaptured = ctx.tile.evaluator.floats, None
        if ctx.needs_input_grad[2]:
            dcaptured = floats.new_zeros(floats.shape, dtype=ds.dtype)
            ctx.tile.add_captured_gradient(dcaptured, ds)
        return None, ctx.tile.score_gradient(ds), dcaptured
