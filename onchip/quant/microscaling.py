"""Microscaling: 4-bit numbers in blocks of a few neighbours, each block with a scale of 8 bits.

    name         block  scale                       scale of the tensor   bits per element
    MXFP4        32     E8M0: a power of two, down  -                     4.25
    MXFP4_CEIL   32     E8M0: a power of two, up    -                     4.25
    NVFP4        16     E4M3, to nearest            fp32                  4.5

MXFP4 follows the OCP MX specification 1.0 (section 6.3): the scale is the largest power of two that
is at most the block's largest magnitude, divided by 4, the largest power of two in E2M1. So the
largest elements of a block lie in [4, 8), and numbers above 6 saturate. MXFP4_CEIL takes the
smallest power of two with which nothing saturates. NVFP4 divides the tensor by one fp32 number
first, so that the scales of its blocks use the range of E4M3, up to 448.

- A block of zeros has the smallest scale and elements 0. Scales are never 0: that of a block far
  below the tensor's largest is 2^-127 or 2^-9, and its elements become small codes or 0.
- A block with NaN or infinity has the scale NaN (E8M0: 255, E4M3: 127) and elements 0, and is NaN
  as a whole; other blocks do not change.
- The last block of a row may be shorter.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from onchip.quant import fp4
from onchip.quant.formats import E4M3, FP4, cast, wide

E8M0_BIAS, E8M0_NAN = 127, 255
LARGEST_POWER = 2  # log2 of the largest power of two in E2M1
SMALLEST_E4M3 = E4M3.steps[0]
TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class BlockFormat:
    """E2M1 elements, `block` of which share a scale of torch's dtype `scales`. rounds_up: the power
    of two is rounded up, so that no element saturates. has_tensor_scale: an fp32 scale, for all
    blocks of a tensor, brings its largest element to `max`.
    """

    name: str
    block: int
    scales: torch.dtype
    rounds_up: bool = False
    has_tensor_scale: bool = False

    @property
    def max(self) -> float:
        """The largest number that an element times a scale can be."""
        return FP4.max * (E4M3.max if self.scales == E4M3.dtype else 2.0**E8M0_BIAS)


MXFP4 = BlockFormat("mxfp4", 32, torch.float8_e8m0fnu)
MXFP4_CEIL = BlockFormat("mxfp4_ceil", 32, torch.float8_e8m0fnu, rounds_up=True)
NVFP4 = BlockFormat("nvfp4", 16, torch.float8_e4m3fn, has_tensor_scale=True)
BLOCK_FORMATS = {fmt.name: fmt for fmt in (MXFP4, MXFP4_CEIL, NVFP4)}


class Microscaled(NamedTuple):
    """x ~ element * scale * tensor_scale, blocks along the last dimension of x (..., length).

    codes: uint8 (..., ceil(length / 2)), two elements a byte (quant/fp4.py). scales, in the dtype
    of the format: (..., ceil(length / block)). tensor_scale: fp32, broadcastable to them, or None.
    """

    codes: Tensor
    scales: Tensor
    tensor_scale: Tensor | None
    format: BlockFormat
    length: int

    def dequantise(self) -> Tensor:
        """x in fp32: the element times its block's scale is exact, the tensor's rounds once."""
        elements = fp4.decode(fp4.unpack(self.codes, self.length))
        return _widen(elements, self.scales, self.tensor_scale, self.format)


def quantise_blocks(
    x: Tensor, fmt: BlockFormat, tensor_scale: Tensor | None = None, dice: Tensor | None = None
) -> Microscaled:
    """x (..., length) in blocks along its last dimension. tensor_scale, broadcastable to the scales
    of the blocks: `choose_tensor_scale`; None: 1. Rounds to nearest even, or at random with dice.
    """
    scales = _choose_scales(x, fmt, tensor_scale)
    codes = fp4.encode(_divide(x, scales, tensor_scale, fmt), dice)
    return Microscaled(fp4.pack(codes), scales, tensor_scale, fmt, x.shape[-1])


def round_blocks(x: Tensor, fmt: BlockFormat, dice: Tensor | None = None) -> Tensor:
    """What `quantise_blocks` and `dequantise` give without a tensor_scale, skipping the codes."""
    scales = _choose_scales(x, fmt, None)
    return _widen(cast(_divide(x, scales, None, fmt), FP4, dice=dice), scales, None, fmt)


def choose_tensor_scale(amax: Tensor, fmt: BlockFormat) -> Tensor:
    """The fp32 scale with which a tensor's largest finite magnitude becomes fmt.max."""
    # Divide by a tensor: on a GPU torch would multiply by a number's reciprocal, and scales differ.
    return (wide(amax) / amax.new_tensor(fmt.max, dtype=wide(amax).dtype)).float().clamp(min=TINY)


def encode_e8m0(exponents: Tensor) -> Tensor:
    """2^exponents, integers, as float8_e8m0fnu; limited to 2^-127 and 2^127."""
    biased = exponents.clamp(-E8M0_BIAS, E8M0_BIAS) + E8M0_BIAS
    return biased.to(torch.uint8).view(torch.float8_e8m0fnu)


def _choose_scales(x: Tensor, fmt: BlockFormat, tensor_scale: Tensor | None) -> Tensor:
    amax = _split(wide(x).abs(), fmt.block).amax(-1)
    finite = amax.isfinite()
    amax = amax.where(finite, 0.0)
    if fmt.scales == torch.float8_e8m0fnu:
        scales = encode_e8m0(_exponents(amax, fmt)).view(torch.uint8)
        return scales.where(finite, E8M0_NAN).to(torch.uint8).view(fmt.scales)
    amax = amax / amax.new_tensor(FP4.max)
    scales = cast(amax if tensor_scale is None else amax / tensor_scale, E4M3)
    return scales.clamp(min=SMALLEST_E4M3).where(finite, torch.nan).to(fmt.scales)


def _exponents(amax: Tensor, fmt: BlockFormat) -> Tensor:
    """log2 of the scales; zeros get the smallest."""
    if fmt.rounds_up:
        fraction, exponent = torch.frexp(amax / amax.new_tensor(FP4.max))
        power = exponent - (fraction == 0.5).int()  # fraction in [0.5, 1)
    else:
        power = torch.frexp(amax).exponent - 1 - LARGEST_POWER
    return power.where(amax > 0, -E8M0_BIAS)


def _divide(x: Tensor, scales: Tensor, tensor_scale: Tensor | None, fmt: BlockFormat) -> Tensor:
    """x by its scales, shaped like x; 0 in blocks without a finite scale."""
    by = _expand(scales if tensor_scale is None else scales.float() * tensor_scale, x, fmt)
    return torch.where(by.isnan(), 0.0, wide(x) / by)


def _widen(
    elements: Tensor, scales: Tensor, tensor_scale: Tensor | None, fmt: BlockFormat
) -> Tensor:
    """The opposite: elements times their scales."""
    x = elements * _expand(scales, elements, fmt)
    return x if tensor_scale is None else x * _expand(tensor_scale.expand(scales.shape), x, fmt)


def _expand(scales: Tensor, x: Tensor, fmt: BlockFormat) -> Tensor:
    """A scale for each element of x, fp32."""
    return scales.float().repeat_interleave(fmt.block, -1)[..., : x.shape[-1]]


def _split(x: Tensor, block: int) -> Tensor:
    """x (..., length) as (..., blocks, block), padded with zeros."""
    return functional.pad(x, (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))
