"""The inputs of `python -m benchmarks accuracy`, by family, and the measures of errors."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.testing import make_qkv, max_error, rmse

TIES, TIED = 8, 8.0  # keys that share the row maximum, and how far they score above the others
GAPS = (0, 2, 4, 6, 8, 10, 12)
LONG_TOKENS, LONG_QUERIES, LONG_DIM = 1 << 20, 8, 64


class Shape(NamedTuple):
    """(heads, queries, keys, head_dim) of one sequence."""

    num_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int


class AccuracyInputs(NamedTuple):
    """q, k, v as `onchip.attention` takes them, and dout for a backward pass."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None = None

    def to(self, *args) -> "AccuracyInputs":
        return AccuracyInputs(*(None if x is None else x.to(*args) for x in self))


class InputFamily(NamedTuple):
    """draw(shape) gives inputs in fp32, the same numbers everywhere."""

    name: str
    draw: Callable[[Shape], AccuracyInputs]


def drawn(shape: Shape, distribution: str = "normal") -> AccuracyInputs:
    """AccuracyInputs of `onchip.testing.make_qkv`; dout is N(0, 1)."""
    heads, seqlen_q, seqlen_k, head_dim = shape
    size = {"num_heads": heads, "head_dim": head_dim}
    q, k, v = make_qkv(1, seqlen_q, seqlen_k, **size, distribution=distribution)
    return AccuracyInputs(q, k, v, torch.randn(q.shape, generator=torch.Generator().manual_seed(1)))


def channel_bias(shape: Shape) -> AccuracyInputs:
    """Every channel of k has a mean of its own, N(0, 100): each row's scores move together, so
    that exact attention is that of N(0, 1).
    """
    inputs, generator = drawn(shape), torch.Generator().manual_seed(2)
    mean = 10 * torch.randn(shape.num_heads, shape.head_dim, generator=generator)
    return inputs._replace(k=inputs.k + mean)


def sink(shape: Shape, gap: float) -> AccuracyInputs:
    """The first key scores about `gap` above the others' mean, and its value is small."""
    inputs = _looking_for(drawn(shape), gap, 1)
    inputs.v[:, 0] *= 0.05
    return inputs


def _looking_for(inputs: AccuracyInputs, gap: float, keys: int) -> AccuracyInputs:
    """All queries lean in one direction per head, in which the first keys lie. It is random: one
    along the diagonal would round in all channels alike, which no model's keys do.
    """
    heads, head_dim = inputs.q.shape[2:]
    direction = torch.randn(heads, head_dim, generator=torch.Generator().manual_seed(3))
    unit = direction / direction.norm(dim=-1, keepdim=True)
    inputs.k[:, :keys] = gap * unit
    return inputs._replace(q=inputs.q + math.sqrt(head_dim) * unit)


def one_sign(shape: Shape) -> AccuracyInputs:
    """Values of one sign, N(-2, 1): sums of them grow with every key."""
    inputs = drawn(shape)
    return inputs._replace(v=inputs.v - 2.0)


def ties(shape: Shape) -> AccuracyInputs:
    """Keys that tie at the maximum of most rows, where p is exactly 1; values of one sign."""
    return _looking_for(one_sign(shape), TIED, TIES)


FAMILIES = {
    family.name: family
    for family in (
        InputFamily("N(0,1)", drawn),
        InputFamily("outliers", partial(drawn, distribution="outlier")),
        InputFamily("channel bias", channel_bias),
        InputFamily("sink", partial(sink, gap=8.0)),
        InputFamily("ties", ties),
    )
}


ONE_SIGN = InputFamily("V of one sign", one_sign)


def long_row(value: float, tokens: int = LONG_TOKENS) -> AccuracyInputs:
    """Few queries over very many keys with equal values: every weighted mean is that value."""
    q, k, _ = make_qkv(1, LONG_QUERIES, tokens, num_heads=1, head_dim=LONG_DIM)
    return AccuracyInputs(q, k, torch.full_like(k, value))


class Errors(NamedTuple):
    """Against fp64. Ulps are steps of the type at the exact value: rounding alone is a quarter at
    the median, and half at most.
    """

    rmse: float
    relative: float  # RMSE over the root mean square of what is exact
    max_error: float
    ulp_median: float
    ulp_99: float


def errors(got: Tensor, exact: Tensor, dtype: torch.dtype) -> Errors:
    got, exact = got.detach().double().cpu(), exact.detach().double()
    steps = ulp_errors(got, exact, dtype).flatten()
    error = rmse(got, exact)
    size = float(exact.square().mean().sqrt())
    return Errors(
        error,
        error / size if size else 0.0,
        max_error(got, exact),
        _quantile(steps, 0.5),
        _quantile(steps, 0.99),
    )


def _quantile(x: Tensor, share: float) -> float:
    """The least element that this share of them does not exceed; sizes are no limit here."""
    return float(x.kthvalue(max(math.ceil(share * x.numel()), 1)).values)


def ulp_errors(got: Tensor, exact: Tensor, dtype: torch.dtype) -> Tensor:
    """|got - exact| in steps of dtype at the exact value; below the normal numbers steps stay."""
    return (got - exact).abs() / ulps(exact, dtype)


def ulps(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The spacing of dtype's numbers from |x| on."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(x.abs().clamp(min=info.tiny))  # x = m 2^e, m in [1/2, 1)
    return torch.ldexp(torch.full_like(x, info.eps), exponent - 1)
