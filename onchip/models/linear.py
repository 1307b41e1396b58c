"""The parameters of a decoder, not initialised, and its matrix products."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from onchip.core.problem import DTYPES
from onchip.models.products import product


@dataclass(frozen=True)
class ParameterFactory:
    """The device and dtype of new parameters."""

    device: torch.device | str = "cpu"
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype} is not one of {', '.join(map(str, DTYPES))}")

    def wide(self) -> "ParameterFactory":
        """For parameters in at least fp32."""
        return replace(self, dtype=torch.promote_types(self.dtype, torch.float32))

    def empty(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, device=self.device, dtype=self.dtype))


class Linear(nn.Module):
    """x @ weight.T + bias, not initialised: `loader` fills it."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, inner: int, outer: int, bias: bool, factory: ParameterFactory):
        super().__init__()
        self.weight = factory.empty(outer, inner)
        self.bias = factory.empty(outer) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)
