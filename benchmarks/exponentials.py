"""2^x by polynomials, as kernels compute it off the exponential unit, and what that costs.

x = n + f with n = floor(x); p(f) ~ 2^f for f in [0, 1) by fused multiply-adds in fp32, and n added
to its exponent. All polynomials have p(0) = 1, so that powers of two, and with them the largest
weight of a row, are exact.
"""

import struct
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.lab.published.arithmetic import POLYNOMIALS

Exp2 = Callable[[Tensor], Tensor]
DEGREES = (2, 3, 4, 5)
LEAST = -126.0  # smaller powers would leave the exponent of fp32
# The cubic of onchip/kernels/hopper/softmax.py, lowest power first, as the bits of fp32
HOPPER = (0x3F800000, 0x3F31F32D, 0x3E691BC2, 0x3D9DD559)
EXCHANGES = 10  # four are enough up to degree 5
FP32_STRIDE, STEP_LOG2, EVEN_TO = 4093, -14, -16


@cache
def minimax(degree: int) -> tuple[float, ...]:
    """Coefficients of p ~ 2^f on [0, 1], p(0) = 1, lowest power first, with the least largest
    relative error: by Remez' exchange, the error alternates degree + 1 times.
    """
    f = torch.linspace(0, 1, 20_001, dtype=torch.float64)
    powers = f[:, None] ** torch.arange(1, degree + 1) / f.exp2()[:, None]
    signs = (-1.0) ** torch.arange(degree + 1, dtype=torch.float64)
    nodes, c = torch.linspace(0, 20_000, degree + 2).long()[1:], torch.zeros(degree)
    for _ in range(EXCHANGES):
        equations = torch.cat([powers[nodes], signs[:, None]], 1)
        c = torch.linalg.solve(equations, 1 - 1 / f[nodes].exp2())[:-1]
        nodes = _extremes(powers @ c + 1 / f.exp2() - 1)
    return 1.0, *c.tolist()


def _extremes(error: Tensor) -> Tensor:
    """Where |error| is largest between two changes of its sign."""
    changes = (error[1:-1].sign() != error[2:].sign()).nonzero().flatten() + 2
    bounds = [1, *changes.tolist(), len(error)]
    pieces = zip(bounds, bounds[1:], strict=False)
    return torch.tensor([a + int(error[a:b].abs().argmax()) for a, b in pieces])


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of fp32 numbers, rounded once.

    The product is exact in fp64, the sum is rounded to odd there: an inexact sum keeps a last bit
    of 1, so that the rounding to fp32 sees on which side of a tie it was.
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)
    even = total.view(torch.int64) & 1 == 0
    odd = torch.nextafter(total, torch.copysign(torch.full_like(lost, torch.inf), lost))
    return torch.where((lost != 0) & even, odd, total).float()


def by_polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """2^x of fp32 x <= 127 by multiply-adds, bit by bit as the Hopper kernels' instructions."""
    x = x.clamp(min=LEAST)
    whole = x.floor()
    f = x - whole
    *rest, p = (torch.full_like(x, c) for c in coefficients)
    for c in reversed(rest):
        p = fma(p, f, c)
    return (p.view(torch.int32) + (whole.to(torch.int32) << 23)).view(torch.float32)


def hopper_coefficients() -> tuple[float, ...]:
    return struct.unpack("<4f", struct.pack("<4I", *HOPPER))


def variants() -> dict[str, Exp2]:
    """Every way to compute 2^x in fp32 that the table shows."""
    named = {f"degree {n}": minimax(n) for n in DEGREES}
    named |= {
        "FA4's cubic": POLYNOMIALS[3],
        "onchip's cubic (Hopper)": hopper_coefficients(),
    }
    ways: dict[str, Exp2] = {"torch.exp2": torch.exp2}
    return {name: partial(by_polynomial, coefficients=c) for name, c in named.items()} | ways


class ExpTiming(NamedTuple):
    """Relative errors over fp32 at a stride of bit patterns; the rest over even steps of x, and
    over all numbers of a 16-bit type. Shares are of results that another rounding would give.
    """

    max_relative: float
    mean_relative: float  # signed: a bias
    differs_bf16: float
    differs_fp16: float
    all_bf16: float
    all_fp16: float
    at_zero: float
    at_minus_infinity: float


def measure(exp2: Exp2, stride: int = FP32_STRIDE, step_log2: int = STEP_LOG2) -> ExpTiming:
    even = torch.arange(EVEN_TO * 2**-step_log2, 1, dtype=torch.float32) * 2.0**step_log2
    ends = exp2(torch.tensor([0.0, -torch.inf])).tolist()
    return ExpTiming(
        float(_relative(exp2, fp32_numbers(stride)).abs().max()),
        float(_relative(exp2, even).mean()),
        *(differing(exp2, even, dtype) for dtype in (torch.bfloat16, torch.float16)),
        *(differing(exp2, all_numbers(t), t) for t in (torch.bfloat16, torch.float16)),
        *ends,
    )


def _relative(exp2: Exp2, x: Tensor) -> Tensor:
    return exp2(x).double() / x.double().exp2() - 1


def differing(exp2: Exp2, x: Tensor, dtype: torch.dtype) -> float:
    """The share of the results that are not the exact ones rounded to dtype."""
    return float((exp2(x).to(dtype) != x.double().exp2().to(dtype)).double().mean())


def fp32_numbers(stride: int) -> Tensor:
    """Every stride-th fp32 number from -0 down to LEAST."""
    first, last = (int(torch.tensor(x).view(torch.int32)) for x in (-0.0, LEAST))
    return torch.arange(first, last + 1, stride, dtype=torch.int32).view(torch.float32)


def all_numbers(dtype: torch.dtype) -> Tensor:
    """Every number of a 16-bit type from -0 down to LEAST or to where its powers of two are 0, in
    fp32.
    """
    numbers = torch.arange(-(2**15), 0, dtype=torch.int32).to(torch.int16).view(dtype).float()
    least = LEAST if dtype == torch.bfloat16 else -25.0
    return numbers[numbers >= least]
