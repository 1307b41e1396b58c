"""precision=...: results, dispatch and gradients. Each kernel has tests of its own."""

import pytest
import torch

import onchip
from onchip import quant
from onchip.core import dispatch
from onchip.core.device import DeviceInfo
from onchip.core.problem import Options, Tensors, UnsupportedError
from onchip.core.validation import describe
from onchip.testing import make_qkv

LOW_PRECISIONS = ("fp8", "int8", "int8_pv16")
HOPPER, AMPERE = DeviceInfo("cuda", "NVIDIA H200", (9, 0)), DeviceInfo("cuda", "A100", (8, 0))


def inputs(**shape):
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16} | shape
    return make_qkv(2, 70, 150, **shape)


@pytest.mark.parametrize("precision", LOW_PRECISIONS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (40, 3)}], ids=str)
def test_the_cpu_runs_the_reference_of_the_recipe(precision, options):
    q, k, v = inputs()
    out, lse = onchip.attention(q, k, v, precision=precision, return_lse=True, **options)
    want = quant.attend(quant.recipes.RECIPES[precision], q, k, v, **options)
    assert torch.equal(out, want[0].bfloat16()) and torch.equal(lse, want[1])
    assert not torch.equal(out, onchip.attention(q, k, v, **options))


def test_packed():
    q, k, v = (t.flatten(0, 1) for t in inputs())
    cu_q, cu_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (70, 150))
    out = onchip.varlen_attention(q, k, v, cu_q, cu_k, 70, 150, causal=True, precision="fp8")
    dense = onchip.attention(*inputs(), causal=True, precision="fp8")
    assert torch.equal(out, dense.flatten(0, 1))


def test_gradients_are_straight_through():
    """The gradients equal those of the 16-bit kernel from the out and lse of the 8-bit one."""
    q, k, v = (t.requires_grad_() for t in inputs(dtype=torch.float32))
    dout = torch.randn(2, 70, 4, 64)
    grads = lambda **o: torch.autograd.grad(onchip.attention(q, k, v, **o), (q, k, v), dout)
    for got, want in zip(grads(precision="fp8"), grads(), strict=True):
        assert 0 < (got - want).norm() < 0.1 * want.norm()


def test_a_compiled_call_equals_an_eager_one():
    q, k, v = inputs()
    compiled = torch.compile(
        lambda *x: onchip.attention(*x, precision="fp8"), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(q, k, v), onchip.attention(q, k, v, precision="fp8"))


def test_auto_is_fp8_where_a_gpu_kernel_is_faster():
    q, k, v = inputs()
    assert torch.equal(onchip.attention(q, k, v, precision="auto"), onchip.attention(q, k, v))
    short = describe(Tensors(q, k, v), Options(precision="auto"))
    problem = short._replace(seqlen_q=8192, seqlen_k=8192)
    assert dispatch.resolve_precision(problem, HOPPER) == "fp8"
    assert dispatch.resolve_precision(problem._replace(softcap=3.0), HOPPER) is None
    assert dispatch.resolve_precision(problem, AMPERE) is None
    assert dispatch.resolve_precision(short, HOPPER) is None
    causal = problem._replace(causal=True)
    assert dispatch.resolve_precision(causal, HOPPER) is None
    assert (
        dispatch.resolve_precision(causal._replace(seqlen_q=16384, seqlen_k=16384), HOPPER) == "fp8"
    )
    window = problem._replace(seqlen_k=65536, window_size=(1024, None))
    assert dispatch.resolve_precision(window, HOPPER) is None


def test_which_kernels_serve():
    problem = describe(Tensors(*inputs()), Options(precision="fp8"))
    assert dispatch.plan(problem, HOPPER).kernel == "hopper"
    few = problem._replace(seqlen_q=1)
    assert dispatch.plan(few, HOPPER).kernel == "hopper"  # no other kernel serves it
    with pytest.raises(
        UnsupportedError, match=r"hopper: needs a Hopper GPU .*'fp8' only on the CPU"
    ):
        dispatch.plan(problem, AMPERE)
    with pytest.raises(UnsupportedError, match="hopper: in precision='fp8' has no softcap"):
        dispatch.plan(problem._replace(softcap=3.0), HOPPER)
    with pytest.raises(UnsupportedError, match="'tiled' cannot .* as they come, not with prec"):
        onchip.attention(*inputs(), precision="fp8", kernel="tiled")
    with pytest.raises(UnsupportedError, match="reference: in precision='int8' has no sinks"):
        onchip.attention(*inputs(), precision="int8", sinks=torch.zeros(4))


def test_unknown_precisions_are_refused():
    with pytest.raises(ValueError, match="precision='fp4' is not one of None, 'fp8', 'int8'"):
        onchip.attention(*inputs(), precision="fp4")


def test_explanation_names_the_precision():
    text = str(onchip.explain(*inputs(), precision="fp8"))
    assert "multiplied in fp8" in text and "served by   reference" in text
    there = onchip.explain(*inputs(), precision="fp8", on="H200")
    assert there.plan.kernel == "hopper" and there.roofline is None
