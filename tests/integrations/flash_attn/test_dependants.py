"""Programs that are written for flash_attn: their own attention, and what they do with it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from onchip.integrations import flash_attn as fa

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="diffusers is not here")
def test_backends_of_diffusers():
    """ "flash" and "flash_varlen" of the installed package. A process of its own: diffusers
    looks for flash_attn once, when it is imported.
    """
    program = ROOT / "tests" / "programs" / "flash_dependants.py"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, str(program), "diffusers"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed") == 6


def test_two_sequences_for_each_text_with_its_padding():
    """A video model's call: image and text tokens of a sample are one sequence, the padding behind
    them another, so that nothing is unpacked; max_seqlen is the length of both together.
    """
    lengths, longest = [28, 33], 33
    q, k, v = torch.randn(3, 2, longest, 4, 16, dtype=torch.float64, requires_grad=True)
    ends = [end for b, n in enumerate(lengths) for end in (b * longest + n, (b + 1) * longest)]
    cu = torch.tensor([0, *ends], dtype=torch.int32)
    with fa.installed():
        from flash_attn.flash_attn_interface import _flash_attn_forward, flash_attn_varlen_func

        packed = [t.flatten(0, 1) for t in (q, k, v)]
        out = flash_attn_varlen_func(*packed, cu, cu, longest, longest).unflatten(0, (2, longest))
        padding, *_ = _flash_attn_forward(
            *(t[:1, 28:] for t in (q, k, v)),
            dropout_p=0.0,
            softmax_scale=16**-0.5,
            causal=False,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            return_softmax=False,
        )
    for b, n in enumerate(lengths):
        own = (t[b, :n].transpose(0, 1) for t in (q, k, v))
        want = F.scaled_dot_product_attention(*own).transpose(0, 1)
        torch.testing.assert_close(out[b, :n], want, rtol=0, atol=1e-12)
    torch.testing.assert_close(padding[0], out[0, 28:], rtol=0, atol=1e-12)


def test_an_autograd_function_around_the_passes_compiles():
    """What dependants build: forward and backward of the alias inside an autograd.Function, under
    torch.compile as well as eagerly.
    """
    with fa.installed():
        from flash_attn.flash_attn_interface import (
            _wrapped_flash_attn_backward,
            _wrapped_flash_attn_forward,
        )

    class Attend(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            args = 0.0, q.shape[-1] ** -0.5, True, -1, -1, 0.0, None
            out, lse, _, rng_state = _wrapped_flash_attn_forward(q, k, v, *args, False)
            ctx.save_for_backward(q, k, v, out, lse, rng_state)
            ctx.args = args
            return out

        @staticmethod
        def backward(ctx, dout):
            q, k, v, out, lse, rng_state = ctx.saved_tensors
            dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
            saved = dout, q, k, v, out, lse, dq, dk, dv
            _wrapped_flash_attn_backward(*saved, *ctx.args, False, rng_state)
            return dq, dk, dv

    inputs = [torch.randn(2, 17, 4, 16, requires_grad=True) for _ in range(3)]
    want = fa.flash_attn_func(*inputs, causal=True)
    dout = torch.randn_like(want)
    expected = torch.autograd.grad(want, inputs, dout)
    for function in (Attend.apply, torch.compile(lambda *t: Attend.apply(*t), backend="eager")):
        out = function(*inputs)
        torch.testing.assert_close(out, want, rtol=0, atol=1e-6)
        grads = torch.autograd.grad(out, inputs, dout)
        for a, b in zip(grads, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
