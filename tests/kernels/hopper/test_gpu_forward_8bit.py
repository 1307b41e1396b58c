"""The Hopper forward with operands of 8 bits against its recipe and against fp64, on the GPU it is
written for. Small, because the recipes are executed tile by tile.
"""

import pytest
import torch

import onchip
from onchip import quant
from onchip.quant import kv8
from onchip.quant.recipes import RECIPES
from onchip.testing import make_packed, make_pages, oracle, rmse
from tests.kernels.gpu import DIMS, inputs
from tests.kv8 import FORMS, quantise_pages

pytestmark = pytest.mark.hopper

OPTIONS = [{}, {"causal": True}, {"window_size": (150, 20)}, {"window_size": (None, 5)}]


def attend(q, k, v, **options):
    """Unrounded: what bf16 takes away is no error of the recipe."""
    options = {"kernel": "hopper", "precision": "fp8", "out_dtype": torch.float32} | options
    return onchip.attention(q, k, v, return_lse=True, **options)


def assert_follows(recipe, got, q, k, v, **options):
    """As exact as the recipe, and much closer to it than it is to fp64."""
    out, lse = got
    want, want_lse = quant.attend(RECIPES[recipe], q, k, v, **options)
    exact = oracle(q, k, v, **options)
    error = rmse(want, exact.out)
    assert rmse(out, exact.out) <= 1.1 * error + 1e-6
    assert rmse(out, want) <= 0.25 * error + 1e-6
    seen = want_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, seen)
    assert (out.transpose(-2, -3)[~seen] == 0).all()
    torch.testing.assert_close(lse[seen], want_lse[seen], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(
    "seqlen_q, seqlen_k", [(1, 1), (63, 111), (333, 700), (700, 333), (192, 512)]
)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_lengths_and_windows(dim, seqlen_q, seqlen_k, options):
    q, k, v = inputs(seqlen_q, seqlen_k, dim)
    assert_follows("fp8", attend(q, k, v, **options), q, k, v, **options)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outliers(dim, dtype):
    q, k, v = inputs(500, 1023, dim, dtype, distribution="outlier")
    assert_follows("fp8", attend(q, k, v), q, k, v)


INTEGERS = [("int8", dim) for dim in DIMS] + [("int8_pv16", 64), ("int8_pv16", 128)]


@pytest.mark.parametrize("precision, dim", INTEGERS)
@pytest.mark.parametrize(
    "seqlen_k, distribution", [(700, "normal"), (700, "outlier"), (512, "normal")]
)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_integers(precision, dim, seqlen_k, distribution, options):
    q, k, v = inputs(333, seqlen_k, dim, distribution=distribution)
    got = attend(q, k, v, precision=precision, **options)
    assert_follows(precision, got, q, k, v, **options)


@pytest.mark.parametrize("dim", DIMS)
def test_channels_that_all_keys_share(dim):
    """They cost nothing, and lse has them."""
    q, k, v = inputs(300, 900, dim)
    plain = rmse(attend(q, k, v)[0], oracle(q, k, v).out)
    k = k + 10 * torch.randn(k.shape[-2:], device="cuda").to(k)
    got, exact = attend(q, k, v), oracle(q, k, v)
    assert rmse(got[0], exact.out) <= 1.3 * plain  # 16 bits round what is left of larger keys
    assert_follows("fp8", got, q, k, v)


@pytest.mark.parametrize("dim", DIMS)
def test_values_of_one_sign(dim):
    """A sum of 14 bits that is never promoted would fall behind by 8 % of it."""
    q, k, v = inputs(128, 8192, dim, batch=1)
    out, _ = attend(q, k, v + 2)
    assert rmse(out, oracle(q, k, v + 2).out) <= 0.01 * 2


@pytest.mark.parametrize("dim", DIMS)
def test_scales_of_values_that_differ_much(dim):
    """From block to block, zeros among them."""
    q, k, v = inputs(200, 800, dim)
    size = torch.tensor([1e-3, 1e4, 0.0, 1.0, 1e-6, 3.0, 1.0], device="cuda")
    v = v * size.repeat_interleave(128)[:800, None, None].to(v)
    assert_follows("fp8", attend(q, k, v, causal=True), q, k, v, causal=True)


def test_zeros():
    q, k, v = (torch.zeros_like(t) for t in inputs(200, 300))
    out, lse = attend(q, k, v, causal=True)
    assert (out == 0).all() and lse.isfinite().all()


@pytest.mark.parametrize("dim, dim_v", [(80, 48), (40, 128), (128, 64), (192, 128), (8, 256)])
def test_head_dims_are_padded(dim, dim_v):
    q, k, v = inputs(200, 300, dim, head_dim_v=dim_v)
    assert_follows("fp8", attend(q, k, v, causal=True), q, k, v, causal=True)


@pytest.mark.parametrize("precision, dim", [("fp8", dim) for dim in DIMS] + INTEGERS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed(precision, dim, options):
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": dim, "dtype": torch.bfloat16}
    x = make_packed([1, 300, 0, 64, 200], [130, 257, 5, 0, 200], device="cuda", **shape)
    cu = {"cu_seqlens_q": x.cu_seqlens_q, "cu_seqlens_k": x.cu_seqlens_k}
    options_8bit = {"kernel": "hopper", "precision": precision, "return_lse": True}
    options_8bit |= {"out_dtype": torch.float32, **options}
    out, lse = onchip.varlen_attention(x.q, x.k, x.v, *cu.values(), 300, 257, **options_8bit)
    want, want_lse = quant.attend(RECIPES[precision], x.q, x.k, x.v, **cu, **options)
    assert rmse(out, want) <= 0.02 * want.square().mean().sqrt()
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-2)


def test_neighbours_that_are_not_numbers():
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "dtype": torch.bfloat16}
    x = make_packed([70, 65, 90], [130, 65, 200], device="cuda", **shape)
    options_8bit = {"kernel": "hopper", "precision": "fp8"}
    call = lambda: onchip.varlen_attention(*x[:5], 90, 200, **options_8bit)
    before = call()
    for t in (x.q[70:135], x.k[130:195], x.v[130:195]):
        t.fill_(torch.nan)
    after = call()
    assert torch.equal(before[:70], after[:70]) and torch.equal(before[135:], after[135:])
    assert after[70:135].isnan().all()


def test_sinks():
    """One is a key without a value: what is left of the weights is known from lse."""
    q, k, v = inputs(150, 333)
    out, lse = attend(q, k, v)
    sinks = lse.mean((0, 2)) + torch.randn(8, device="cuda")
    got, got_lse = attend(q, k, v, sinks=sinks)
    torch.testing.assert_close(got_lse, torch.logaddexp(lse, sinks[:, None]), rtol=0, atol=1e-4)
    share = torch.exp(lse - got_lse).transpose(1, 2)[..., None]
    torch.testing.assert_close(got, out * share, rtol=1e-3, atol=1e-4)


def test_strides_and_the_same_bits_every_time():
    q, k, v = inputs(400, 700)
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    first = attend(q, k, v, causal=True)
    for _ in range(20):
        again = attend(*heads_first, causal=True)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_many_tiles():
    """More tiles than processors: work indices are drawn."""
    q, k, v = inputs(1500, 1500, batch=4)
    for options in ({}, {"causal": True}):
        got = attend(q, k, v, **options)[0]
        exact = oracle(q[:1, :, :1], k[:1, :, :1], v[:1, :, :1], **options).out
        assert rmse(got[:1, :, :1], exact) <= 0.07 * exact.square().mean().sqrt()
        last = oracle(q[3:, :, 7:], k[3:, :, 1:], v[3:, :, 1:], **options).out
        assert rmse(got[3:, :, 7:], last) <= 0.07 * last.square().mean().sqrt()


def test_a_graph_replays_it():
    q, k, v = inputs(256, 512)
    options_8bit = {"kernel": "hopper", "precision": "fp8"}
    want = onchip.attention(q, k, v, **options_8bit)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = onchip.attention(q, k, v, **options_8bit)
    out.zero_()
    graph.replay()
    assert torch.equal(out, want)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("page_size, form", [(16, None), (5, None), *((64, f) for f in FORMS)])
@pytest.mark.parametrize("new", [1, 200])
def test_pages(dim, page_size, form, new):
    """Dense queries over sequences of several lengths, one without keys; slots and pages that no
    sequence holds have NaN.
    """
    lengths = [new, 0, 333, 1030]
    q, k, v = inputs(new, sum(lengths), dim, batch=len(lengths))
    k, v = k[0], v[0]
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    pages, scales = make_pages(k, v, cu, page_size), {}
    if form is not None:
        held, scales = quantise_pages(*pages[:2], form)
        pages = (*held, *pages[2:])
        k, v = (kv8.dequantise(*kv8.quantise(t, form), torch.float32) for t in (k, v))
    options = {"precision": "fp8", "out_dtype": torch.float32, "return_lse": True, **scales}
    out, lse = onchip.paged_attention(q, *pages, kernel="hopper", **options)
    for b, n in enumerate(lengths):
        keys = (t[None, cu[b] : cu[b + 1]] for t in (k, v))
        if not n:
            assert not out[b].any() and (lse[b] == -torch.inf).all()
            continue
        own = out[b : b + 1], lse[b : b + 1]
        assert_follows("fp8", own, q[b : b + 1].float(), *(t.float() for t in keys), causal=True)


def test_pages_replay_in_a_graph_with_other_lengths():
    q, k, v = inputs(200, 1024, batch=1)
    pages = make_pages(k[0], v[0], torch.tensor([0, 1024], device="cuda").int(), 16)
    options = {"kernel": "hopper", "precision": "fp8"}
    onchip.paged_attention(q, *pages, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = onchip.paged_attention(q, *pages, **options)
    for length in (1024, 700, 200):
        pages.cache_seqlens.fill_(length)
        graph.replay()
        assert torch.equal(out, onchip.paged_attention(q, *pages, **options))


def test_gradients_pass_straight_through():
    q, k, v = (t.requires_grad_() for t in inputs(300, 500))
    dout = torch.randn(2, 300, 8, 128, device="cuda", dtype=torch.bfloat16)
    grads = lambda **o: torch.autograd.grad(onchip.attention(q, k, v, **o), (q, k, v), dout)
    for got, want in zip(grads(precision="fp8", causal=True), grads(causal=True), strict=True):
        assert rmse(got, want) <= 0.1 * want.double().square().mean().sqrt()
