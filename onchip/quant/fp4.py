"""Codes of E2M1, the 4-bit floating-point numbers of the OCP MX specification 1.0 (section 5.3.3),
two in a byte.

    bit     3     2 1        0           code  0    1    2    3    4    5    6    7
            sign  exponent   mantissa          0   0.5   1   1.5   2    3    4    6

Codes 8 to 15 are the same numbers with a minus sign, -0 included. There is no infinity and no NaN.
A byte holds elements 2 i (low four bits) and 2 i + 1 (high four bits) of the last dimension, as in
torch.float4_e2m1fn_x2. After an odd number of elements the high bits of the last byte are 0.
"""

import torch
from torch import Tensor
from torch.nn import functional

from onchip.quant.formats import FP4, cast

NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode(x: Tensor, dice: Tensor | None = None) -> Tensor:
    """The codes of x, uint8: rounded to nearest even, at random with dice (`formats.cast`), and
    saturated at +-6. NaN is refused, because no code stands for it.
    """
    if x.isnan().any():
        raise ValueError("x holds NaN, which no FP4 number stands for; a block's scale does")
    values = cast(x, FP4, dice=dice)
    magnitudes = torch.tensor(NUMBERS, device=x.device)
    codes = torch.searchsorted(magnitudes, values.abs())
    return (codes + 8 * values.signbit()).to(torch.uint8)


def decode(codes: Tensor) -> Tensor:
    """The numbers of codes 0 to 15, fp32."""
    numbers = torch.tensor((*NUMBERS, *(-x for x in NUMBERS)), device=codes.device)
    return numbers[codes.int()]


def pack(codes: Tensor) -> Tensor:
    """uint8 (..., ceil(n / 2)) of codes (..., n)."""
    even = functional.pad(codes, (0, codes.shape[-1] % 2)).unflatten(-1, (-1, 2))
    return even[..., 0] | even[..., 1] << 4


def unpack(packed: Tensor, count: int) -> Tensor:
    """The first `count` codes of each row of packed (..., ceil(count / 2))."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[..., :count]
