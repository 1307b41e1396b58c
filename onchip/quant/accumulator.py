"""The short accumulator of FP8 tensor cores, as a model of what it loses."""

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
    chunks = zip(a.split(INSTRUCTION, -1), b.split(INSTRUCTION, -2), strict=True)
    if accumulator.promote is None:
        for left, right in chunks:
            acc = _instruction(acc, left, right, accumulator.bits)
        return acc
    short, fill = torch.zeros_like(acc), 0
    for left, right in chunks:
        short, fill = _instruction(short, left, right, accumulator.bits), fill + INSTRUCTION
        if fill == accumulator.promote:
            acc, short, fill = acc + short, torch.zeros_like(acc), 0
    return acc + short


def _instruction(acc: Tensor, a: Tensor, b: Tensor, bits: int) -> Tensor:
    """One wgmma: acc + a @ b, all addends cut off below `bits` bits of the largest."""
    products = a[..., :, :, None] * b[..., None, :, :]  # (..., rows, n, columns)
    largest = torch.maximum(products.abs().amax(-2), acc.abs())
    quantum = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - bits)
    kept = (products / quantum[..., None, :]).trunc().sum(-2) + (acc / quantum).trunc()
    return kept * quantum
