"""What the tests of the GPU kernels share."""

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
    """q, k, v on the device, of 8 and 2 heads unless told otherwise."""
    shape = {"num_heads": 8, "num_kv_heads": 2, "head_dim": dim, "dtype": dtype} | shape
    return make_qkv(batch, seqlen_q, seqlen_k, device="cuda", **shape)
