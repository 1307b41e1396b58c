"""Helpers of the tests of GPU kernels."""

import pytest
import torch

from onchip.testing import make_qkv

DIMS = [64, 128, 256]

each_kernel = pytest.mark.parametrize(
    "kernel",
    [
        pytest.param("hopper", marks=pytest.mark.hopper),
        pytest.param("triton", marks=pytest.mark.gpu),
    ],
)


def inputs(seqlen_q, seqlen_k=None, dim=128, dtype=torch.bfloat16, batch=2, **shape):
    """q, k, v on the device, with 8 and 2 heads by default."""
    shape = {"num_heads": 8, "num_kv_heads": 2, "head_dim": dim, "dtype": dtype} | shape
    return make_qkv(batch, seqlen_q, seqlen_k, device="cuda", **shape)


def late_writer():
    """A kernel that lets the next call start early, and writes its numbers after the next call
    could have read them.
    """
    triton = pytest.importorskip("triton")
    import triton.language as tl
    from triton.language.extra.cuda import gdc_launch_dependents, globaltimer

    @triton.jit
    def write(to, source, count, NANOSECONDS: tl.constexpr):
        gdc_launch_dependents()
        start = globaltimer()
        while globaltimer() - start < NANOSECONDS:
            pass
        for i in range(0, count, 1024):
            at = i + tl.arange(0, 1024)
            tl.store(to + at, tl.load(source + at, mask=at < count), mask=at < count)

    return write
