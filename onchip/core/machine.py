"""The CPU of this machine: which dtypes it multiplies fast, and how many threads compute."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@cache
def has_fast_matmul(dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of this dtype with CPU instructions for it.

    Without such instructions torch uses scalar loops: bf16 products were measured 270x slower than
    fp32, fp16 products 7x (Neoverse N1, torch 2.13, 2026-11-17). fp16 is fast on x86 alone: ARM
    CPUs report fp16 arithmetic, but oneDNN's fp16 products do not use it.
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
    """dtype if this CPU multiplies it fast, else fp32."""
    return dtype if has_fast_matmul(dtype) else torch.float32


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside this block torch computes with one thread: with more, the bits of an operation may
    depend on where torch divides it among them.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
