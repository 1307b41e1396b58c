"""flash_attn.modules.mlp and flash_attn.ops.activations in torch's operations, not fused."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onchip.core.problem import UnsupportedError
from onchip.integrations.flash_attn.options import round_multiple

WithResidual = Tensor | tuple[Tensor, Tensor]  # (y, x) with return_residual


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    """silu(x) * y, in fp32 and rounded once."""
    return (F.silu(x.float()) * y.float()).to(x.dtype)


def sqrelu_fwd(x: Tensor) -> Tensor:
    """relu(x)**2"""
    return F.relu(x).square()


class Mlp(nn.Module):
    """fc2(activation(fc1(x)))"""

    return_residual: bool
    activation: Callable[[Tensor], Tensor]
    fc1: nn.Linear
    fc2: nn.Linear

    def __init__(
        self, in_features: int, hidden_features: int | None = None, out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = F.gelu, bias1: bool = True, bias2: bool = True,
        return_residual: bool = False, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        hidden = 4 * in_features if hidden_features is None else hidden_features
        out = in_features if out_features is None else out_features
        self.return_residual, self.activation = return_residual, activation
        self.fc1 = nn.Linear(in_features, hidden, bias1, device, dtype)
        self.fc2 = nn.Linear(hidden, out, bias2, device, dtype)

    def forward(self, x: Tensor) -> WithResidual:
        y = self.fc2(self.activation(self.fc1(x)))
        return (y, x) if self.return_residual else y


class GatedMlp(nn.Module):
    """fc2(y * activation(gate)), where fc1(x) holds y, then gate."""

    return_residual: bool
    activation: Callable[[Tensor], Tensor]
    fc1: nn.Linear
    fc2: nn.Linear

    def __init__(
        self, in_features: int, hidden_features: int | None = None, out_features: int | None = None,
        activation: Callable[[Tensor], Tensor] = torch.sigmoid, bias1: bool = True,
        bias2: bool = True, multiple_of: int = 128, return_residual: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        hidden = int(8 * in_features / 3) if hidden_features is None else hidden_features
        hidden = round_multiple(hidden, multiple_of)
        out = in_features if out_features is None else out_features
        self.return_residual, self.activation = return_residual, activation
        self.fc1 = nn.Linear(in_features, 2 * hidden, bias1, device, dtype)
        self.fc2 = nn.Linear(hidden, out, bias2, device, dtype)

    def forward(self, x: Tensor) -> WithResidual:
        y, gate = self.fc1(x).chunk(2, -1)
        y = self.fc2(y * self.activation(gate))
        return (y, x) if self.return_residual else y


_FUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_approx": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sqrelu": sqrelu_fwd,
}


class FusedMLP(Mlp):
    """Mlp with the name of an activation. checkpoint_lvl and heuristic, upstream's fusion
    options, have no effect here.
    """

    def __init__(
        self, in_features: int, hidden_features: int | None = None, out_features: int | None = None,
        bias1: bool = True, bias2: bool = True, activation: str = "gelu_approx",
        return_residual: bool = False, checkpoint_lvl: int = 0, heuristic: str = "auto",
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        if activation not in _FUSED:
            raise ValueError(f"{activation=} must be one of {', '.join(_FUSED)}")
        sizes = in_features, hidden_features, out_features
        rest = bias1, bias2, return_residual, device, dtype
        super().__init__(*sizes, _FUSED[activation], *rest)

    def forward(self, x: Tensor, process_group: object = None) -> WithResidual:
        if process_group is not None:
            raise UnsupportedError("FusedMLP over several ranks is not supported")
        return super().forward(x)


class FusedDense(nn.Linear):
    """A Linear. return_residual: (y, x)."""

    return_residual: bool

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, return_residual: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__(in_features, out_features, bias, device, dtype)
        self.return_residual = return_residual

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor, process_group: object = None
    ) -> WithResidual:
        if process_group is not None:
            raise UnsupportedError("FusedDense over several ranks is not supported")
        y = super().forward(x)
        return (y, x) if self.return_residual else y
