"""Powers of two by multiply-adds: the GPU computes what `benchmarks.exponentials` emulates."""

import pytest
import torch

from benchmarks import exponentials

triton = pytest.importorskip("triton")
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402

from onchip.kernels.hopper.softmax import exp2  # noqa: E402

POLY, THREADS = 4, 128


@gluon.jit
def power_kernel(x_ptr, y_ptr, POLY: gl.constexpr, THREADS: gl.constexpr):
    """A thread has POLY neighbours, the last of which goes by multiply-adds."""
    layout: gl.constexpr = gl.BlockedLayout([POLY], [32], [THREADS // 32], [0])
    at = gl.program_id(0) * POLY * THREADS + gl.arange(0, POLY * THREADS, layout=layout)
    gl.store(y_ptr + at, exp2(gl.load(x_ptr + at), POLY))


@pytest.mark.hopper
def test_the_emulation_is_right_to_the_last_bit():
    x = torch.cat([exponentials.fp32_numbers(exponentials.FP32_STRIDE), torch.tensor([-torch.inf])])
    rest = -len(x) % THREADS
    x = torch.nn.functional.pad(x, (0, rest))
    given = x.cuda().repeat_interleave(POLY)
    found = torch.empty_like(given)
    power_kernel[(len(x) // THREADS,)](given, found, POLY, THREADS, num_warps=THREADS // 32)
    want = exponentials.by_polynomial(x, exponentials.hopper_coefficients())
    got = found[POLY - 1 :: POLY].cpu()
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))
    unit = found[::POLY].cpu().double()  # off by at most 2^-22, and flushed to 0 below 2^-126
    assert ((unit / x.double().exp2() - 1).abs()[x > -126] <= 2**-22).all()
