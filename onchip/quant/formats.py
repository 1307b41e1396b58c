"""Number formats of at most one byte, as grids of numbers."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NumberFormat:
    """The numbers +-n * 2^(e - mantissa_bits) up to max, with integers e >= min_exponent and n in
    [0, 2 * 2^mantissa_bits). Below 2 * 2^min_exponent they are evenly spaced; for integer formats
    all are. `dtype` stores them: torch's own dtype if it has one, else fp32.
    """

    name: str
    dtype: torch.dtype
    max: float
    mantissa_bits: int
    min_exponent: int

    @property
    def steps(self) -> tuple[float, ...]:
        """The distance between neighbours in each binade, from 2^min_exponent on."""
        top = math.frexp(self.max)[1]
        return tuple(2.0 ** (e - self.mantissa_bits) for e in range(self.min_exponent, top))


E4M3 = NumberFormat("e4m3", torch.float8_e4m3fn, 448.0, 3, -6)
E5M2 = NumberFormat("e5m2", torch.float8_e5m2, 57344.0, 2, -14)
INT8 = NumberFormat("int8", torch.int8, 127.0, 6, 6)  # without -128: -x must exist for every x
FP4 = NumberFormat("fp4", torch.float32, 6.0, 1, 0)  # e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6
FORMATS = {fmt.name: fmt for fmt in (E4M3, E5M2, INT8, FP4)}


def wide(x: Tensor) -> Tensor:
    """x in the precision of this package: fp64 stays, everything else becomes fp32."""
    return x if x.dtype == torch.float64 else x.float()


def cast(
    x: Tensor,
    fmt: NumberFormat,
    generator: torch.Generator | None = None,
    dice: Tensor | None = None,
) -> Tensor:
    """x on the grid of fmt, as fp32. Numbers out of range, infinities too, become +-max (like
    cvt.satfinite on a GPU, where torch's casts give NaN or infinity); NaN stays NaN.

    Rounds to nearest, ties to even. With a generator, or with dice in [0, 1) for each element
    (quant/rounding.py), it rounds at random, up with the probability that makes the mean exact:
    numbers on the grid stay. A CPU generator gives the same numbers on every device.
    """
    x = wide(x).clamp(-fmt.max, fmt.max)
    step = _step(x, fmt)
    n = x / step  # exact: step is a power of two
    if generator is not None:
        dice = torch.rand(n.shape, generator=generator, device=generator.device).to(n.device)
    n = n.round() if dice is None else _round_at_random(n, dice)
    return (n * step).float()


def store(x: Tensor, fmt: NumberFormat) -> Tensor:
    """Numbers of `cast` in the dtype of fmt, exactly. Integers have no NaN: it becomes 0."""
    return (x if fmt.dtype.is_floating_point else x.nan_to_num(nan=0.0)).to(fmt.dtype)


def _step(x: Tensor, fmt: NumberFormat) -> Tensor:
    """The distance of x's neighbours on the grid, from a table: not every device's exp2 gives exact
    powers.
    """
    steps = torch.tensor(fmt.steps, dtype=x.dtype, device=x.device)
    exponent = torch.frexp(x).exponent.long() - 1  # undefined for NaN, 0 for zero
    return steps[(exponent - fmt.min_exponent).clamp(0, len(steps) - 1)]


def _round_at_random(n: Tensor, dice: Tensor) -> Tensor:
    """n or its neighbours among the integers; -0 and what becomes 0 from below keep their sign."""
    floor = n.floor()
    return (floor + (dice < n - floor)).copysign(n)
