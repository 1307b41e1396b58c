"""Matrices in MXFP4, as the published files of gpt-oss hold those of its experts.

NAME, a stack of matrices (stacked, rows, columns), is two tensors of bytes:

    NAME_blocks   (stacked, rows, blocks, 16)   E2M1: two elements a byte, the low bits first
    NAME_scales   (stacked, rows, blocks)       E8M0: a power of two for 32 elements

The element times its scale is exact in bf16, so weights in bf16 equal those of the file.
"""

import torch
from torch import Tensor

from onchip.quant import fp4
from onchip.quant.microscaling import MXFP4

DTYPE = "U8"
SUFFIXES = ("_blocks", "_scales")


def stored_shapes(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The two tensors of a stack of matrices of this shape."""
    *rest, columns = shape
    scales = (*rest, -(-columns // MXFP4.block))
    return dict(zip((name + suffix for suffix in SUFFIXES), ((*scales, 16), scales), strict=True))


def dequantise(blocks: Tensor, scales: Tensor, columns: int) -> Tensor:
    """fp32 (rows, columns) of blocks (rows, blocks, 16) and scales (rows, blocks)."""
    every_byte = torch.arange(256, dtype=torch.uint8, device=blocks.device)
    pairs = fp4.decode(fp4.unpack(every_byte[:, None], 2))  # (256, 2)
    elements = pairs.index_select(0, blocks.flatten().int()).view(*scales.shape, MXFP4.block)
    powers = scales.contiguous().view(MXFP4.scales).float()
    return (elements * powers[..., None]).flatten(-2)[:, :columns]
