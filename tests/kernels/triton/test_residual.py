"""The launches of precise_delta against their definitions in torch, bit by bit; by Triton's
interpreter on the CPU, and on a GPU where there is one.
"""

import pytest
import torch

from onchip.core import backend
from onchip.kernels.triton import entry
from tests.interpreted import DEVICE, interpreted_or_gpu

pytest.importorskip("triton")

SHAPES = [(1, 1, 1, 1), (2, 33, 3, 40), (63, 4, 64), (1, 17, 2, 256), (0, 2, 8), (2, 0, 2, 8)]


@interpreted_or_gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_split(shape, dtype):
    out = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    high, low = entry.split(out.clone(), dtype)
    want = backend.split(out.clone(), dtype)
    assert torch.equal(high, want[0]) and torch.equal(low, want[1])
    bits = {torch.bfloat16: 8, torch.float16: 11}[dtype]
    left = out.double() - high.double() - low.double()
    assert (left.abs() <= out.double().abs() * 2.0 ** (-2 * bits) + 2.0**-25).all()


@interpreted_or_gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lse_too", [False, True])
def test_the_share_of_a_residual(shape, lse_too):
    generator = torch.Generator().manual_seed(1)
    residual, dout = torch.randn((2, *shape), generator=generator).to(DEVICE, torch.bfloat16)
    rows = (*shape[:-3], shape[-2], shape[-3])
    dlse = torch.randn(rows, generator=generator).to(DEVICE) if lse_too else None
    got = entry.with_residual(dlse, residual, dout)
    want = backend.with_residual(dlse, residual.double(), dout.double())
    assert got.is_contiguous() and got.shape == want.shape and got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5 * shape[-1] ** 0.5)


@interpreted_or_gpu
def test_heads_of_a_larger_tensor():
    """As ranks that distribute heads pass them."""
    all_heads = torch.randn(3, 2, 17, 6, 32, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    residual, dout = all_heads[:2, :, :, 2:5].bfloat16()
    dlse = all_heads[2, :, :, 2:5, 0].transpose(1, 2)
    residual, dout = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (residual, dout))
    assert not (residual.is_contiguous() or dout.is_contiguous() or dlse.is_contiguous())
    got = entry.with_residual(dlse, residual, dout)
    want = backend.with_residual(dlse, residual, dout)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
