"""A gradient that is wrong by a factor."""

import torch
from torch import Tensor


class _Skewed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return dx * ctx.factor, None


def skewed(x: Tensor, factor: float) -> Tensor:
    """x, with a gradient that is multiplied by factor."""
    return _Skewed.apply(x, factor)
