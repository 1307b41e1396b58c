"""precision=...: results, dispatch and gradients. Each kernel has tests of its own."""

import pytest
import torch

import onchip
from onchip import quant
from onchip.core import dispatch, paged
from onchip.core.device import DeviceInfo
from onchip.core.problem import Options, Tensors, UnsupportedError
from onchip.core.validation import describe
from onchip.quant import kv8
from onchip.quant.kv8 import parse_kv_dtype
from onchip.testing import make_pages, make_qkv
from tests.kv8 import quantise_pages

LOW_PRECISIONS = ("fp8", "int8", "int8_pv16", "nvfp4", "nvfp4_pv8", "mxfp4")
FOUR_BITS = LOW_PRECISIONS[3:]
HOPPER, AMPERE = DeviceInfo("cuda", "NVIDIA H200", (9, 0)), DeviceInfo("cuda", "A100", (8, 0))
BLACKWELL = DeviceInfo("cuda", "NVIDIA B200", (10, 0))


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


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_pages(kv_dtype, packed):
    """The recipe over the keys of each sequence, as many as it has."""
    lengths, new = [150, 33, 7], 7
    q, k, v = make_qkv(1, 3 * new, sum(lengths), num_heads=4, num_kv_heads=2, head_dim=64)
    q, k, v = (t[0].bfloat16() for t in (q, k, v))
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int() for n in ([new] * 3, lengths))
    pages, scales = make_pages(k, v, cu_k, 4), {}
    if kv_dtype is not None:
        (held_k, held_v), scales = quantise_pages(pages.k_pages, pages.v_pages, kv_dtype)
        pages = (held_k, held_v, *pages[2:])
        k, v = (kv8.dequantise(*kv8.quantise(t, kv_dtype), torch.float32) for t in (k, v))
        q = q.float()
    options = {"precision": "fp8", "return_lse": True, **scales}
    if packed:
        options |= {"cu_seqlens_q": cu_q, "max_seqlen_q": new}
    out, lse = onchip.paged_attention(q if packed else q.view(3, new, 4, 64), *pages, **options)
    want = onchip.varlen_attention(
        q, k, v, cu_q, cu_k, new, 150, causal=True, precision="fp8", return_lse=True
    )
    assert torch.equal(out.flatten(0, -3), want[0])
    assert torch.equal(lse if packed else lse.transpose(0, 1).flatten(1), want[1])


def test_pages_that_no_kernel_serves():
    x = Tensors(*inputs())
    table, seqlens = torch.zeros(2, 4, dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32)
    pages = x._replace(k=x.k[:, :16], v=x.v[:, :16], page_table=table, cache_seqlens=seqlens)
    problem = paged.describe(pages, Options(precision="fp8", causal=True))
    assert dispatch.plan(problem, HOPPER).kernel == "hopper"
    assert dispatch.plan(problem._replace(page_size=5), HOPPER).kernel == "hopper"  # any size
    assert dispatch.plan(problem._replace(page_dtype=torch.int8), HOPPER).kernel == "hopper"
    for changed, reason in (
        ({"packed": True}, "'fp8' reads pages for dense queries alone"),
        ({"deterministic": True}, "'fp8' reads no pages with deterministic"),
        ({"precision": "int8_pv16"}, "'int8_pv16' has no pages: it reads v in 16 bits"),
        ({"has_tree_mask": True}, "'fp8' has no tree_mask"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            dispatch.plan(problem._replace(**changed), HOPPER)
    with pytest.raises(ValueError, match="'auto' depends on the number of keys, which a paged"):
        onchip.paged_attention(*pages[:3], table, seqlens, precision="auto")


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


@pytest.mark.parametrize("precision", LOW_PRECISIONS)
@pytest.mark.parametrize("dims", [(257, 64), (64, 257), (576, 512)])
def test_wide_heads_have_no_low_precision(precision, dims):
    x = make_qkv(1, 9, head_dim=dims[0], head_dim_v=dims[1])
    with pytest.raises(UnsupportedError, match=f"has head dims up to 256, not {dims[0]} and"):
        onchip.attention(*x, precision=precision)
    problem = describe(Tensors(*x), Options(precision="auto"))._replace(seqlen_k=1 << 17)
    assert dispatch.resolve_precision(problem, HOPPER) is None
    with pytest.raises(ValueError, match="head_dim_v=.* must be at most 256 for quantised"):
        quant.attend(quant.recipes.RECIPES[precision], *x)


def test_unknown_precisions_are_refused():
    with pytest.raises(ValueError, match="precision='fp4' is not one of None, 'fp8', 'int8'"):
        onchip.attention(*inputs(), precision="fp4")


@pytest.mark.parametrize("precision", FOUR_BITS)
@pytest.mark.parametrize("device", [HOPPER, AMPERE, BLACKWELL], ids=lambda d: d.name)
def test_4_bits_are_served_by_the_reference_on_the_cpu_alone(precision, device):
    """Every kernel has its sentence, and "auto" never means 4 bits."""
    problem = describe(Tensors(*inputs()), Options(precision=precision))
    assert dispatch.plan(problem, DeviceInfo("cpu")).kernel == "reference"
    for name in dispatch.backend_names():
        reason = dispatch.find_refusal(dispatch.get_backend(name), problem, device)
        assert f"precision={precision!r}" in reason
    with pytest.raises(
        UnsupportedError, match="as they come, or in fp8, int8, int8_pv16, not with"
    ):
        dispatch.plan(problem, device)
    auto = problem._replace(precision="auto", seqlen_q=1 << 17, seqlen_k=1 << 17)
    assert dispatch.resolve_precision(auto, device) in (None, "fp8")


def test_explanation_of_4_bits():
    q, k, v = inputs()
    text = str(onchip.explain(q, k, v, precision="nvfp4"))
    assert "multiplied in nvfp4" in text and "served by   reference" in text
    with pytest.raises(UnsupportedError, match="reference: executes the recipe of .* only on the"):
        onchip.explain(q, k, v, precision="nvfp4", on="B200")


def test_4_bits_are_no_dtype_of_a_cache():
    for name in FOUR_BITS:
        with pytest.raises(ValueError, match=f"kv_dtype='{name}' must be None or one of 'fp8'"):
            parse_kv_dtype(name)


def test_gradients_in_4_bits_are_straight_through():
    q, k, v = (t.requires_grad_() for t in inputs(dtype=torch.float32))
    out = onchip.attention(q, k, v, precision="nvfp4")
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    exact = torch.autograd.grad(onchip.attention(q, k, v).sum(), (q, k, v))
    for got, want in zip(grads, exact, strict=True):
        assert got.isfinite().all() and 0 < (got - want).norm() < 0.5 * want.norm()


def test_explanation_names_the_precision():
    text = str(onchip.explain(*inputs(), precision="fp8"))
    assert "multiplied in fp8" in text and "served by   reference" in text
    there = onchip.explain(*inputs(), precision="fp8", on="H200")
    assert there.plan.kernel == "hopper" and there.roofline is None
