"""The short accumulator of FP8 tensor cores, as a model of what it loses."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

INSTRUCTION = 32  # products of 8 bits that one wgmma adds at once


@dataclass(frozen=True)
class Accumulator:
    """How Hopper adds FP8 products: each instruction aligns 32 of them and the sum so far to the
    largest, and cuts off, towards zero, what lies below `bits` bits. DeepSeek-V3 (arXiv 2412.19437,
    section 3.5.2) found 14, SageAttention2 (arXiv 2411.10958) 13 behind the leading one.

    `promote` products later, or where the product ends, the sum is added to one in fp32. None:
    never, the sum stays where it is.
    """

    bits: int = 14
    promote: int | None = 128

    def __post_init__(self):
        if self.promote is not None and (self.promote < 1 or self.promote % INSTRUCTION):
            raise ValueError(f"promote={self.promote} must be a multiple of {INSTRUCTION}, or None")


def add_product(acc: Tensor, a: Tensor, b: Tensor, accumulator: Accumulator | None) -> Tensor:
    """acc + a @ b for a (..., rows, n) and b (..., n, columns), n products to each sum; without an
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
    """One wgmma: acc + a @ b, all addends cut off below `bits` bits of the largest."""
    products = a[..., :, :, None] * b[..., None, :, :]  # (..., rows, n, columns)
    largest = torch.maximum(products.abs().amax(-2), acc.abs())
    # The power of two above it, by an exact division: not every device's exp2 gives exact powers.
    power = torch.where(largest == 0, 1.0, largest / torch.frexp(largest).mantissa)
    quantum = power * 2.0**-bits
    kept = (products / quantum[..., None, :]).trunc().sum(-2) + (acc / quantum).trunc()
    return kept * quantum
