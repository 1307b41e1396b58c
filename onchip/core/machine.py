"""What the CPU of this machine computes at speed."""

import platform
from functools import cache

import torch


@cache
def has_fast_matmul(dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of this dtype on this CPU with instructions for it.

    Without them torch falls back to scalar loops: products of bf16 were measured 270x slower than
    those of fp32, of fp16 7x (Neoverse N1, torch 2.13, 2026-11-17). fp16 has such a path on x86
    alone: ARM reports the arithmetic, which oneDNN's products of fp16 do not use.
    """
    if dtype.itemsize != 2:
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    x86 = platform.machine() in ("x86_64", "AMD64")
    return x86 and torch.ops.mkldnn._is_mkldnn_fp16_supported()


def matmul_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype, or fp32 where this CPU multiplies that much faster."""
    return dtype if has_fast_matmul(dtype) else torch.float32
