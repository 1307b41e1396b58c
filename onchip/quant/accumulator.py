"""A model of the short accumulator of FP8 tensor cores and its rounding."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

INSTRUCTION = 32  # products of 8 bits that one wgmma adds at once


@dataclass(frozen=True)
class Accumulator:
    """How Hopper adds FP8 products: each instruction aligns 32 of them and the running sum to the
    largest addend, and truncates everything below `bits` bits towards zero. DeepSeek-V3 (arXiv
    2412.19437, section 3.5.2) measured 14 bits, SageAttention2 (arXiv 2411.10958) 13 after the
    leading one.

    After `promote` products, or at the end of the product, the sum is added to one in fp32. None:
    the sum is never promoted.
    """

    bits: int = 14
    promote: int | None = 128

    def __post_init__(self) -> None:
        if self.promote is not None and (self.promote < 1 or self.promote % INSTRUCTION):
            raise ValueError(f"promote={self.promote} must be a multiple of {INSTRUCTION}, or None")


def add_product(acc: Tensor, a: Tensor, b: Tensor, accumulator: Accumulator | None) -> Tensor:
    """acc + a @ b for a (..., rows, n) and b (..., n, columns), n products per sum; without an
    accumulator as torch adds them.
    """
    if accumulator is None:
        return acc + a @ b
    if accumulator.promote is None:
        return _short_sum(acc, a, b, accumulator.bits)
    for left, right in _pieces(a, b, accumulator.promote):
        acc = acc + _short_sum(torch.zeros_like(acc), left, right, accumulator.bits)
    return acc


def _pieces(a: Tensor, b: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(a.split(size, -1), b.split(size, -2), strict=True)


def _short_sum(acc: Tensor, a: Tensor, b: Tensor, bits: int) -> Tensor:
    for left, right in _pieces(a, b, INSTRUCTION):
        acc = _instruction(acc, left, right, bits)
    return acc


def _instruction(acc: Tensor, a: Tensor, b: Tensor, bits: int) -> Tensor:
    """One wgmma: acc + a @ b, all addends truncated below `bits` bits of the largest."""
    products = a[..., :, :, None] * b[..., None, :, :]  # (..., rows, n, columns)
    largest = torch.maximum(products.abs().amax(-2), acc.abs())
    # The next power of two, by an exact division: not every device's exp2 gives exact powers.
    power = torch.where(largest == 0, 1.0, largest / torch.frexp(largest).mantissa)
    quantum = power * 2.0**-bits
    total = (products / quantum[..., None, :]).trunc().sum(-2) + (acc / quantum).trunc()
    return total * quantum
