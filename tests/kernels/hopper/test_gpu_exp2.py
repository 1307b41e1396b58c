"""Powers of two by multiply-adds: the GPU computes what `benchmarks.exponentials` emulates."""

import pytest
import torch

from benchmarks import exponentials

triton = pytest.importorskip("triton")
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402

from onchip.kernels.hopper.softmax import exp2  # noqa: E402

EMULATED_EXP2, THREADS = 4, 128


@gluon.jit
def power_kernel(x_ptr, y_ptr, EMULATED_EXP2: gl.constexpr, THREADS: gl.constexpr):
    """A thread has EMULATED_EXP2 neighbours, the last of which is computed by multiply-adds."""
    layout: gl.constexpr = gl.BlockedLayout([EMULATED_EXP2], [32], [THREADS // 32], [0])
    at = gl.program_id(0) * EMULATED_EXP2 * THREADS + gl.arange(
        0, EMULATED_EXP2 * THREADS, layout=layout
    )
    gl.store(y_ptr + at, exp2(gl.load(x_ptr + at), EMULATED_EXP2))


@pytest.mark.hopper
def test_the_emulation_is_right_to_the_last_bit():
    x = torch.cat([exponentials.fp32_numbers(exponentials.FP32_STRIDE), torch.tensor([-torch.inf])])
    rest = -len(x) % THREADS
    x = torch.nn.functional.pad(x, (0, rest))
    given = x.cuda().repeat_interleave(EMULATED_EXP2)
    powers = torch.empty_like(given)
    power_kernel[(len(x) // THREADS,)](
        given, powers, EMULATED_EXP2, THREADS, num_warps=THREADS // 32
    )
    want = exponentials.by_polynomial(x, exponentials.hopper_coefficients())
    got = powers[EMULATED_EXP2 - 1 :: EMULATED_EXP2].cpu()
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))
    unit = (
        powers[::EMULATED_EXP2].cpu().double()
    )  # off by at most 2^-22, and flushed to 0 below 2^-126
    assert ((unit / x.double().exp2() - 1).abs()[x > -126] <= 2**-22).all()
