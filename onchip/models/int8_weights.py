"""Checkpoints with matrices in 8 bits, half the size of bf16: the built-in model is stored so.

A matrix NAME is two tensors of a safetensors file: NAME, signed 8-bit integers, and NAME.scale, one
fp32 number per row, the row's largest magnitude / 127. The weights are integer * scale, rounded to
bf16. All other tensors are bf16.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

SCALE = ".scale"


def quantise(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a bf16 checkpoint in the form above. Quantising `dequantise(x)` gives x again:
    bf16 keeps the largest magnitude of a row, and moves a weight by at most a quarter of its scale.
    """
    stored = {}
    for name, tensor in tensors.items():
        if tensor.dtype != torch.bfloat16:
            raise ValueError(f"{name} is {tensor.dtype}, and a checkpoint in 8 bits is of bfloat16")
        if tensor.dim() != 2:
            stored[name] = tensor
            continue
        # At least the smallest normal number: a row of zeros would be divided by 0.
        scale = (tensor.float().abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        stored[name] = (tensor.float() / scale[:, None]).round().to(torch.int8)
        stored[name + SCALE] = scale
    return stored


def dequantise(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in bf16, under the names of the checkpoint."""
    return {
        name: (t * stored[name + SCALE][:, None]).bfloat16() if t.dtype == torch.int8 else t
        for name, t in stored.items()
        if not name.endswith(SCALE)
    }
