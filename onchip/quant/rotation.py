"""Signed Hadamard rotation over head_dim: it spreads the outliers of a channel over all channels
and leaves q.k unchanged.

"Incoherent processing" of the FlashAttention-3 paper: q' = q M and k' = k M with an orthonormal M,
so that q'.k' = q.k, while one large channel becomes head_dim small ones.
"""

from functools import lru_cache

import torch
from torch import Tensor

from onchip.quant.formats import wide


def rotate(x: Tensor, seed: int = 0) -> Tensor:
    """x M over the last dimension, M = diag(signs) H: signs from the seed, H the Hadamard transform
    divided by the square root of its size. A head_dim that is not a power of two is rotated in
    blocks of powers of two (80 = 64 + 16). fp32, fp64 for fp64.
    """
    return _transform(wide(x) * signs(x.shape[-1], seed).to(x.device))


def unrotate(x: Tensor, seed: int = 0) -> Tensor:
    """The inverse of `rotate` with the same seed."""
    return _transform(wide(x)) * signs(x.shape[-1], seed).to(x.device)


@lru_cache(maxsize=64)
def signs(head_dim: int, seed: int = 0) -> Tensor:
    """+-1 for each channel, fp32 on the CPU, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (head_dim,), generator=generator).mul(2).sub(1).float()


def blocks(head_dim: int) -> list[int]:
    """head_dim as a sum of powers of two, the largest first: the sizes of the rotated blocks."""
    bits = range(head_dim.bit_length() - 1, -1, -1)
    return [1 << bit for bit in bits if head_dim >> bit & 1]


def matrix(head_dim: int, seed: int = 0) -> Tensor:
    """M itself, (head_dim, head_dim) fp32: rotate(x) = x @ M."""
    return rotate(torch.eye(head_dim), seed)


def _transform(x: Tensor) -> Tensor:
    return torch.cat([_hadamard(part) for part in x.split(blocks(x.shape[-1]), -1)], -1)


def _hadamard(x: Tensor) -> Tensor:
    """log2(dim) butterfly steps: orthonormal, symmetric, its own inverse."""
    dim, half = x.shape[-1], 1
    while half < dim:
        pairs = x.unflatten(-1, (-1, 2, half))
        low, high = pairs.unbind(-2)
        x = torch.stack((low + high, low - high), -2).flatten(-3)
        half *= 2
    return x * dim**-0.5
