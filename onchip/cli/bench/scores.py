"""What a score is besides q.k / sqrt(head_dim), for the fp64 references of the benchmarks."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """Options of the score, with the names and the meaning of `onchip.attention`.

    bias: (batch|1, heads|1, seqlen_q, seqlen_k); sinks: (heads). The functions take tensors with
    heads first, (batch, heads, seqlen, head_dim).
    """

    softmax_scale: float | None = None
    softcap: float = 0.0
    bias: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def options(self) -> dict[str, Any]:
        """As keywords of a call."""
        return {name: x for name, x in vars(self).items() if x is not None}

    @property
    def parameters(self) -> dict[str, Tensor]:
        """bias and sinks, as far as they require a gradient."""
        named = {"bias": self.bias, "sinks": self.sinks}
        return {name: x for name, x in named.items() if x is not None and x.requires_grad}

    def pick(self, rows: Tensor | None = None, keys: Tensor | None = None) -> "Scores":
        """The scores of some query rows and of some keys."""
        bias = self.bias
        if bias is not None and rows is not None:
            bias = bias[:, :, rows]
        if bias is not None and keys is not None:
            bias = bias[..., keys]
        return replace(self, bias=bias)

    def first(self, count: int) -> "Scores":
        """The scores of the first sequences."""
        return self if self.bias is None else replace(self, bias=self.bias[:count])

    def scale(self, q: Tensor) -> float:
        return q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale

    def multiply(self, q: Tensor, k: Tensor) -> Tensor:
        """The scaled product, before softcap and bias."""
        return (q @ k.mT).mul_(self.scale(q))

    def finish(self, product: Tensor) -> Tensor:
        """The score of a scaled product."""
        if self.softcap:
            product = self.softcap * torch.tanh(product / self.softcap)
        return product if self.bias is None else product + self.bias.to(product)

    def slope(self, product: Tensor) -> Tensor | float:
        """The derivative of the score by the scaled product."""
        return 1 - torch.tanh(product / self.softcap) ** 2 if self.softcap else 1.0

    def add_sinks(self, lse: Tensor) -> Tensor:
        """lse (batch, heads, rows) with the sink of each head."""
        if self.sinks is None:
            return lse
        return torch.logaddexp(lse, self.sinks.to(lse)[:, None])

    def sum_gradients(self, dscores: Tensor, lse: Tensor, delta: Tensor) -> list[Tensor]:
        """The gradients of the parameters: of bias at the rows of dscores, of sinks by lse and
        delta of all rows. A sink has no value, so its dP is 0.
        """
        gradients = []
        for name, x in self.parameters.items():
            if name == "bias":
                shared = [i for i, n in enumerate(x.shape[:2]) if n == 1]
                gradients.append(dscores.sum(shared, keepdim=True) if shared else dscores)
            else:
                weight = torch.exp(x.to(lse)[:, None] - lse)
                gradients.append(-(weight * delta).sum((0, 2)))
        return gradients
