"""The Hopper backward against the oracle, on the GPU it is written for."""

import pytest
import torch

import onchip
from onchip import library
from onchip.problem import Options, Tensors, describe
from onchip.testing import assert_accurate, make_packed
from tests.kernels.gpu import DIMS, inputs

pytestmark = pytest.mark.hopper


def attend(q, k, v, **options):
    return onchip.attention(q, k, v, kernel="hopper", **options)


def attend_lse(q, k, v, **options):
    return onchip.attention(q, k, v, kernel="hopper", return_lse=True, **options)


def varlen(q, k, v, **options):
    return onchip.varlen_attention(q, k, v, kernel="hopper", return_lse=True, **options)


def gradients(q, k, v, call=attend, dout=None, **options):
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    out = call(q, k, v, **options)
    out = out[0] if isinstance(out, tuple) else out
    dout = torch.ones_like(out) if dout is None else dout
    return torch.autograd.grad(out, (q, k, v), dout)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", [63, 64, 111, 128, 512, 799, 1023])
def test_lengths(dim, causal, seqlen):
    assert_accurate(attend, *inputs(seqlen, dim=dim), causal=causal, grad=True)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 1), (1, 777), (63, 111), (799, 1023)])
def test_fewer_queries_than_keys(dim, causal, seqlen_q, seqlen_k):
    assert_accurate(attend, *inputs(seqlen_q, seqlen_k, dim), causal=causal, grad=True)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("causal", [False, True])
def test_rows_that_see_nothing_have_no_gradient(dim, causal):
    q, k, v = inputs(600, 111, dim)
    assert_accurate(attend_lse, q, k, v, causal=causal, grad=True)
    if causal:
        assert gradients(q, k, v, causal=True)[0][:, :489].eq(0).all()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(
    "window", [(200, 37), (3, 0), (0, 0), (None, 5), (1000, None), (100, None)]
)
def test_windows(dim, window):
    assert_accurate(attend, *inputs(700, 1111, dim), window_size=window, grad=True)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 1)])
def test_groups_of_heads(dim, heads):
    q, k, v = inputs(300, 333, dim, num_heads=heads[0], num_kv_heads=heads[1])
    assert_accurate(attend, q, k, v, causal=True, grad=True)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_softcap_sinks_and_lse(dim, dtype, softcap):
    sinks = torch.randn(8, device="cuda", requires_grad=True)
    q, k, v = inputs(333, 444, dim, dtype)
    assert_accurate(attend_lse, q, k, v, causal=True, softcap=softcap, sinks=sinks, grad=True)


@pytest.mark.parametrize(
    "dim, dim_v", [(80, 48), (40, 128), (128, 64), (64, 128), (8, 8), (40, 56), (192, 128)]
)
def test_head_dims_are_padded(dim, dim_v):
    assert_accurate(attend, *inputs(200, 300, dim, head_dim_v=dim_v), causal=True, grad=True)


@pytest.mark.parametrize("distribution", ["outlier", "sink", "biased"])
@pytest.mark.parametrize("dim", DIMS)
def test_hard_inputs(dim, distribution):
    assert_accurate(attend, *inputs(512, dim=dim, distribution=distribution), grad=True)


def test_very_negative_scores_of_a_cut_tile():
    """Keys past the end are zeros and score 0: exp(0 - lse) overflows where lse is -1000."""
    q, k, v = inputs(200, 100)
    dq, dk, dv = gradients(q.abs() * 30, -k.abs() * 30, v)
    assert all(t.isfinite().all() for t in (dq, dk, dv))


def test_heads_first_views():
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs(500))
    assert_accurate(attend, q, k, v, causal=True, grad=True)


def test_long_rows_in_many_sections():
    q, k, v = inputs(5001, batch=1, num_heads=16, num_kv_heads=16)
    assert_accurate(attend, q, k, v, causal=True, grad=True)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (30, 7)}])
def test_packed_with_nan_neighbours(dim, options):
    x = make_packed(
        [5, 130, 0, 777, 64, 9], [9, 200, 3, 777, 1, 0], num_heads=4, num_kv_heads=2, head_dim=dim,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    assert_accurate(varlen, x.q, x.k, x.v, **x.options, **options, grad=True)
    clean = gradients(x.q, x.k, x.v, varlen, **x.options, **options)
    dirty = [t.clone() for t in x[:3]]
    bounds = x.cu_seqlens_q.tolist(), x.cu_seqlens_k.tolist(), x.cu_seqlens_k.tolist()
    for t, cu in zip(dirty, bounds, strict=True):
        t[cu[3] : cu[4]] = torch.nan
    found = gradients(*dirty, varlen, **x.options, **options)
    for cu, a, b in zip(bounds, clean, found, strict=True):
        tight = {"rtol": 1e-2, "atol": 1e-3}  # dq is summed in another order every time
        assert torch.allclose(a[: cu[3]], b[: cu[3]], **tight)
        assert torch.allclose(a[cu[4] :], b[cu[4] :], **tight)


def test_bad_offsets_give_wrong_rows_not_a_wild_access():
    x = make_packed([100, 100], num_heads=2, head_dim=64, dtype=torch.bfloat16, device="cuda")
    wild = torch.tensor([0, 10**6, -(10**6)], dtype=torch.int32, device="cuda")
    options = {"cu_seqlens_q": wild, "cu_seqlens_k": wild, "max_seqlen_q": 100, "max_seqlen_k": 100}
    gradients(x.q, x.k, x.v, varlen, **options)
    torch.cuda.synchronize()


@pytest.mark.parametrize("dim", DIMS)
def test_no_queries_or_no_keys(dim):
    for seqlen_q, seqlen_k in ((0, 64), (64, 0)):
        q, k, v = inputs(seqlen_q, seqlen_k, dim)
        assert all(g.eq(0).all() for g in gradients(q, k, v))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("causal", [False, True])
def test_dk_and_dv_are_the_same_bits_every_time(dim, causal):
    q, k, v = inputs(1500, dim=dim)
    first = gradients(q, k, v, causal=causal)
    for _ in range(100):
        again = gradients(q, k, v, causal=causal)
        assert torch.equal(again[1], first[1]) and torch.equal(again[2], first[2])
        assert torch.allclose(again[0].float(), first[0].float(), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("causal", [False, True])
def test_programs_that_take_several_tiles_give_the_same_bits_every_time(dim, causal):
    """More tiles than processors: what a program leaves behind in one must not reach the next."""
    q, k, v = inputs(5001, dim=dim, batch=1, num_heads=16, num_kv_heads=16)
    first = gradients(q, k, v, causal=causal)
    assert all(t.isfinite().all() for t in first)
    for _ in range(50):
        again = gradients(q, k, v, causal=causal)
        assert torch.equal(again[1], first[1]) and torch.equal(again[2], first[2])


def test_a_dout_that_is_not_aligned():
    q, k, v = inputs(64, dim=64)
    dout = torch.randn(q.numel() + 1, device="cuda", dtype=q.dtype)[1:].view(q.shape)
    for a, b in zip(
        gradients(q, k, v, dout=dout), gradients(q, k, v, dout=dout.clone()), strict=True
    ):
        assert torch.allclose(a.float(), b.float(), rtol=2e-2, atol=2e-3)


def test_a_call_can_be_captured_and_synchronises_nothing():
    q, k, v = inputs(512)
    expected = gradients(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(q, k, v, causal=True)
    for t in found:
        t.fill_(torch.nan)
    graph.replay()
    assert torch.equal(found[1], expected[1]) and torch.equal(found[2], expected[2])
    assert torch.allclose(found[0].float(), expected[0].float(), rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (100, 30)}], ids=str)
def test_deterministic_gradients(dim, options):
    q, k, v = inputs(777, 900, dim)
    assert_accurate(attend, q, k, v, deterministic=True, grad=True, **options)
    first = gradients(q, k, v, deterministic=True, **options)
    for _ in range(50):
        again = gradients(q, k, v, deterministic=True, **options)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


@pytest.mark.parametrize("dim", DIMS)
def test_deterministic_gradients_of_packed_sequences_with_softcap_and_sinks(dim):
    sinks = torch.randn(4, device="cuda", requires_grad=True)
    x = make_packed(
        [5, 130, 0, 777, 64, 9], [9, 200, 3, 777, 1, 0], num_heads=4, num_kv_heads=2, head_dim=dim,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    options = {"deterministic": True, "causal": True, "softcap": 7.0, "sinks": sinks}
    assert_accurate(varlen, x.q, x.k, x.v, **x.options, **options, grad=True)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kind", ["causal", "documents", "bits", "bits of every head", "nothing"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (100, 30)}], ids=str)
def test_block_masks(dim, kind, options, make_mask):
    q, k, v = inputs(799, dim=dim)
    assert_accurate(attend, q, k, v, mask=make_mask(kind, 799, 799), grad=True, **options)


def test_block_masks_of_other_lengths_with_softcap(make_mask):
    q, k, v = inputs(300, 1111)
    mask = make_mask("bits", 300, 1111)
    assert_accurate(attend_lse, q, k, v, mask=mask, softcap=9.0, grad=True)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dim, dim_v", [(64, 64), (128, 128), (80, 48), (40, 128)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (100, 7)}], ids=str)
def test_gradients_in_fp32_are_those_that_are_rounded_otherwise(options, dim, dim_v, packed):
    """dk and dv to the last bit; of dq the order of sums is not fixed."""
    q, k, v = inputs(333, 444, dim, head_dim_v=dim_v)
    x, lengths = Tensors(q, k, v), ()
    if packed:
        cu = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device="cuda") for n in (333, 444)]
        x, lengths = Tensors(*(t.flatten(0, 1) for t in (q, k, v)), *cu), (333, 444)
    problem = describe(x, Options(**options), lengths)
    out, lse, _ = library.run(library.posed(x, problem), x, "hopper")
    wide, narrow = (
        library.run_backward(
            library.posed(x, problem._replace(wide_grads=wide)), x, "hopper", out, lse, out, None
        )
        for wide in (True, False)
    )
    assert all(g.dtype == torch.float32 for g in wide[:3])
    assert torch.equal(wide.dk.bfloat16(), narrow.dk)
    assert torch.equal(wide.dv.bfloat16(), narrow.dv)
    torch.testing.assert_close(wide.dq.bfloat16(), narrow.dq, rtol=2**-7, atol=1e-4)


def test_lengths_are_not_specialised():
    from onchip.kernels.hopper.backward import backward_kernel

    x = inputs(1024, dim=64)
    gradients(*x, causal=True)
    cache = backward_kernel.device_caches[torch.cuda.current_device()][0]
    before = len(cache)
    for n in range(1, 1000, 97):
        gradients(*(t[:, :n] for t in x), causal=True)
    assert len(cache) - before <= 1
