"""How exponentials are taken and accumulators rescaled: as FlashAttention-2 does, or as
FlashAttention-4 does, whose tensor cores outran the exponential unit.
"""

import math
from typing import NamedTuple

import torch

from .memory import Tile

# p(f) ~ 2^f on [0, 1) with p(0) = 1, so that 2^n is exact: the smallest largest relative error.
# Degree 3 is FlashAttention-4's (flash_attn/cute/utils.py), off by up to 8.8e-5: a twentieth of
# what rounding to bf16 costs. Ours (by Remez' exchange): degree 4 is off by 2.9e-6, degree 6 by
# 2.0e-9, below fp32's rounding.
POLYNOMIALS = {
    3: (1.0, 0.6951461434, 0.2275643945, 0.0771190897),
    4: (1.0, 0.6930448449030171, 0.241280204751324, 0.052242474223804014, 0.013426684271564347),
    6: (
        1.0,
        0.6931470444433242,
        0.24022930555223343,
        0.05548528061864343,
        0.009675451566911129,
        0.001246784644626786,
        0.00021612914953707824,
    ),
}


class Arithmetic(NamedTuple):
    """degree: of the polynomial in place of exp, None for exp itself. threshold_log2: a maximum
    that grew by less keeps its old value, None if it always follows.
    """

    kernel: str
    degree: int | None = None
    threshold_log2: float | None = None

    def exp(self, x: Tile) -> Tile:
        return x.exp() if self.degree is None else exp2(x * math.log2(math.e), self.degree)

    def moved(self, m: Tile, m_new: Tile) -> Tile:
        """The maximum to subtract from now on. A stale one is too small by a factor of at most
        2^threshold in p and l, which the division by l takes out again.
        """
        if self.threshold_log2 is None:
            return m_new
        far = m_new.x - m.x > self.threshold_log2 * math.log(2)  # NaN, both -inf: not far
        return m_new.select(lambda x: torch.where(far, x, m.x))

    def rescaled(self, acc: Tile, alpha: Tile) -> Tile:
        """acc * alpha, where alpha is not 1 if maxima may be stale."""
        if self.threshold_log2 is None:
            acc.book.rescales += alpha.x.numel()
            return acc * alpha
        rows = int((alpha.x != 1).sum())
        acc.book.rescales += rows
        acc.book.other_ops += rows * acc.x.shape[-1]
        return acc.select(lambda x: x * alpha.x)


EXACT = Arithmetic("paper_v2")


def exp2(x: Tile, degree: int) -> Tile:
    """2^x for x <= 127 by multiply-adds: 2^floor(x) goes into the exponent as an integer, p of the
    fraction is Horner's. 0 for x <= -127. Counts 5 + 2 * degree operations a number, and no exp.
    """
    coefficients = POLYNOMIALS[degree]
    x = x.counted(x.x.clamp(min=-127.0))
    whole = x.counted(x.x.floor())
    f = x - whole
    p = f * coefficients[-1] + coefficients[-2]
    for c in coefficients[-3::-1]:
        p = p * f + c
    exponent = whole.counted(whole.x.to(torch.int32) << 23)
    return p.counted((p.x.view(torch.int32) + exponent.x).view(torch.float32))
