"""Exponentials and rescaling: as in FlashAttention-2, or as in FlashAttention-4, for tensor cores
that are faster than the exponential unit.
"""

import math
from typing import NamedTuple

import torch

from .memory import Tile

# p(f) ~ 2^f on [0, 1) with p(0) = 1, so that 2^n is exact, and the smallest maximal relative error.
# Degree 3 is FlashAttention-4's (flash_attn/cute/utils.py), off by up to 8.8e-5: a twentieth of the
# error of rounding to bf16. The others are by Remez' exchange: degree 4 is off by 2.9e-6, degree 6
# by 2.0e-9, below fp32's rounding.
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
    """degree: of the polynomial instead of exp, None for exp itself. threshold_log2: a maximum that
    grew by less keeps its old value; None: it is always updated.
    """

    kernel: str
    degree: int | None = None
    threshold_log2: float | None = None

    def exp(self, x: Tile) -> Tile:
        return x.exp() if self.degree is None else exp2(x * math.log2(math.e), self.degree)

    def choose_maximum(self, m: Tile, m_new: Tile) -> Tile:
        """The maximum to subtract from now on. A stale maximum makes p and l too large by a factor
        of at most 2^threshold, which the division by l removes.
        """
        if self.threshold_log2 is None:
            return m_new
        far = m_new.x - m.x > self.threshold_log2 * math.log(2)  # NaN, both -inf: not far
        return m_new.select(lambda x: torch.where(far, x, m.x))

    def rescale(self, acc: Tile, alpha: Tile) -> Tile:
        """acc * alpha; with stale maxima only rows with alpha != 1 are counted."""
        if self.threshold_log2 is None:
            acc.book.rescales += alpha.x.numel()
            return acc * alpha
        rows = int((alpha.x != 1).sum())
        acc.book.rescales += rows
        acc.book.other_ops += rows * acc.x.shape[-1]
        return acc.select(lambda x: x * alpha.x)


EXACT = Arithmetic("paper_v2")


def exp2(x: Tile, degree: int) -> Tile:
    """2^x for x <= 127 by multiply-adds: 2^floor(x) is added to the exponent as an integer, p of
    the fraction is evaluated by Horner's rule. 0 for x <= -127. Counts 5 + 2 * degree operations
    per number, and no exp.
    """
    coefficients = POLYNOMIALS[degree]
    x = x.count(x.x.clamp(min=-127.0))
    whole = x.count(x.x.floor())
    f = x - whole
    p = f * coefficients[-1] + coefficients[-2]
    for c in coefficients[-3::-1]:
        p = p * f + c
    exponent = whole.count(whole.x.to(torch.int32) << 23)
    return p.count((p.x.view(torch.int32) + exponent.x).view(torch.float32))
