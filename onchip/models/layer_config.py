"""What may differ between the layers of a decoder: windows, rotations, experts."""

from dataclasses import dataclass
from typing import NamedTuple

from onchip.models.fields import check_size
from onchip.models.rotary import Rotary


class ClampedSwiGLU(NamedTuple):
    """(up + 1) * gate * sigmoid(alpha * gate), of a gate that is at most `limit`, and of up, which
    is limited to [-limit, limit].
    """

    limit: float
    alpha: float


@dataclass(frozen=True)
class Experts:
    """The experts of a layer: gated MLPs. Each token passes through `per_token` of them, chosen by
    the softmax of a router. is_normalised: the weights of a token are divided by their sum.
    shared_size: the intermediate size of one more expert, through which all tokens pass.
    router_jitter_noise: of training. has_bias: the router and both products of an expert have one.
    swiglu: what the experts have in place of the activation of the config.
    """

    num_experts: int
    per_token: int
    intermediate_size: int
    is_normalised: bool = True
    shared_size: int | None = None
    router_jitter_noise: float = 0.0
    has_bias: bool = False
    swiglu: ClampedSwiGLU | None = None

    def __post_init__(self) -> None:
        for size in ("num_experts", "per_token", "intermediate_size"):
            check_size(size, getattr(self, size))
        if self.shared_size is not None:
            check_size("shared_size", self.shared_size)
        if self.per_token > self.num_experts:
            raise ValueError(
                f"a token cannot have {self.per_token} of num_experts={self.num_experts}"
            )
        if self.has_bias and self.shared_size is not None:
            raise ValueError("a shared expert has no biases, nor do the experts beside it")


@dataclass(frozen=True)
class Layer:
    """The differences between layers. window: a token sees itself and window - 1 tokens before it
    (None: all). rotary: None if positions are learned. experts: None if the layer has one MLP.
    """

    window: int | None = None
    rotary: Rotary | None = None
    experts: Experts | None = None
