"""The norms of a decoder."""

import torch.nn.functional as F
from torch import Tensor, nn

from onchip.models.config import ModelConfig
from onchip.models.linear import ParameterFactory
from onchip.models.pointwise import add_rms_norm, rms_norm


class NormLayer(nn.Module):
    """The norm of a config over the last `size` elements; eps: another one than its norm_eps."""

    eps: float
    offset: float
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, config: ModelConfig, size: int, factory: ParameterFactory, eps: float | None = None
    ):
        super().__init__()
        self.eps = config.norm_eps if eps is None else eps
        self.offset = config.norm_offset
        self.weight = factory.empty(size)
        self.bias = factory.empty(size) if config.norm == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return rms_norm(x, self.weight, self.eps, self.offset)


def add_norm(x: Tensor, y: Tensor | None, norm: NormLayer) -> tuple[Tensor, Tensor]:
    """(x + y, norm(x + y)); no y at the start of the residual stream."""
    if y is not None and norm.bias is None:
        return add_rms_norm(x, y, norm.weight, norm.eps, norm.offset)
    x = x if y is None else x + y
    return x, norm(x)


def optional(norm: NormLayer | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)
