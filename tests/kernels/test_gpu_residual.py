"""precise_delta on a GPU: every kernel, fused and traced, replayed, and what it keeps."""

from functools import partial

import pytest
import torch

import onchip
from benchmarks import delta_accuracy as bench
from onchip.testing import assert_accurate, make_packed
from tests.kernels.gpu import DIMS, each_kernel, inputs

BF16 = torch.bfloat16


def attend(q, k, v, kernel, **options):
    return onchip.attention(q, k, v, kernel=kernel, precise_delta=True, return_lse=True, **options)


@each_kernel
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients(kernel, dim, deterministic):
    sinks = torch.randn(8, device="cuda", requires_grad=True)
    call = partial(attend, kernel=kernel, deterministic=deterministic)
    assert_accurate(call, *inputs(333, 444, dim), causal=True, sinks=sinks, grad=True)


@each_kernel
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_packed_sequences(kernel, dtype):
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": dtype, "device": "cuda"}
    packed = make_packed([63, 0, 1, 799], **sizes)
    call = partial(onchip.varlen_attention, kernel=kernel, precise_delta=True, return_lse=True)
    assert_accurate(call, *packed[:3], grad=True, causal=True, **packed.options)


def ties(shape=(1, 799, 4, 64)):
    *x, dout = bench.winning_ties(shape).to(BF16).to("cuda")
    return [t.requires_grad_() for t in x], dout


@each_kernel
def test_replayed_calls_are_the_same(kernel):
    """The third call is played from a tape, the residual's launches are not."""
    x, dout = ties()
    call = partial(onchip.attention, *x, precise_delta=True, deterministic=True, kernel=kernel)
    runs = [torch.autograd.grad(call(), x, dout) for _ in range(5)]
    for grads in runs[1:]:
        assert all(map(torch.equal, grads, runs[0]))


@each_kernel
def test_compiled_calls_find_the_same_delta(kernel):
    x, dout = ties()
    call = lambda *x: onchip.attention(*x, precise_delta=True, deterministic=True, kernel=kernel)
    eager = torch.autograd.grad(call(*x), x, dout)
    traced = torch.autograd.grad(torch.compile(call, fullgraph=True)(*x), x, dout)
    for a, b in zip(eager, traced, strict=True):
        assert (a.float() - b.float()).norm() < 1e-3 * a.float().norm()


@each_kernel
def test_one_more_out_is_kept(kernel):
    x, _ = ties((2, 1024, 8, 128))

    def held(precise):
        before = torch.cuda.memory_allocated()
        out = onchip.attention(*x, precise_delta=precise, kernel=kernel)
        return torch.cuda.memory_allocated() - before, out

    for _ in range(3):  # whatever the first calls keep for later ones
        (plain, _), (precise, out) = held(False), held(True)
    assert precise - plain == out.numel() * out.element_size()
