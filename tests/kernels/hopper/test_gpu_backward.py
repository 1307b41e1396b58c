"""The Hopper backward against the oracle, on the GPU it is written for."""

import pytest
import torch

import onchip
from onchip import masks
from onchip.core import torch_op
from onchip.core.problem import Options, Tensors
from onchip.core.validation import describe
from onchip.testing import assert_accurate, make_packed, oracle, rmse
from tests.kernels.gpu import DIMS, inputs, late_writer

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


@pytest.mark.parametrize("dim", [40, 64, 80, 128])
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (100, 20)}], ids=str)
def test_few_keys_are_computed_as_a_deterministic_call(few_keys, dim, options):
    x = inputs(500, dim=dim, num_kv_heads=8)
    assert_accurate(attend, *x, grad=True, **options)
    pairs = zip(gradients(*x, **options), gradients(*x, deterministic=True, **options), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


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


def test_long_rows_in_many_l2_groups():
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
    grads = gradients(*dirty, varlen, **x.options, **options)
    for cu, a, b in zip(bounds, clean, grads, strict=True):
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
        grads = gradients(q, k, v, causal=True)
    for t in grads:
        t.fill_(torch.nan)
    graph.replay()
    assert torch.equal(grads[1], expected[1]) and torch.equal(grads[2], expected[2])
    assert torch.allclose(grads[0].float(), expected[0].float(), rtol=2e-2, atol=2e-3)


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
def test_gradients_in_fp32_round_to_the_16_bit_gradients(options, dim, dim_v, packed):
    """dk and dv to the last bit; of dq the order of sums is not fixed."""
    q, k, v = inputs(333, 444, dim, head_dim_v=dim_v)
    x, lengths = Tensors(q, k, v), ()
    if packed:
        cu = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device="cuda") for n in (333, 444)]
        x, lengths = Tensors(*(t.flatten(0, 1) for t in (q, k, v)), *cu), (333, 444)
    problem = describe(x, Options(**options), lengths)
    out, lse, _ = torch_op.run(torch_op.prepare_checked(x, problem), x, "hopper")
    wide, narrow = (
        torch_op.run_backward(
            torch_op.prepare_checked(x, problem._replace(wide_grads=wide)),
            x,
            "hopper",
            out,
            lse,
            out,
            None,
        )
        for wide in (True, False)
    )
    assert all(g.dtype == torch.float32 for g in wide[:3])
    assert torch.equal(wide.dk.bfloat16(), narrow.dk)
    assert torch.equal(wide.dv.bfloat16(), narrow.dv)
    torch.testing.assert_close(wide.dq.bfloat16(), narrow.dq, rtol=2**-7, atol=1e-4)


def prepare_call(x, max_seqlens, wide_grads, **options):
    problem = describe(x, Options(**options), max_seqlens)._replace(wide_grads=wide_grads)
    return torch_op.prepare_checked(x, problem)


def shares(x, wide_grads=True, max_seqlens=(), saved=None, **options):
    """dq, dk and dv of a part of a larger call; saved: (out, lse) over more keys."""
    call = prepare_call(x, max_seqlens, wide_grads, **options)
    out, lse = saved or torch_op.run(call, x, "hopper")[:2]
    dout = random_like(out).to(x.q.dtype)
    return torch_op.run_backward(call, x, "hopper", out, lse, dout, None)[:3]


def random_like(t):
    return torch.randn(t.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")


def exact_gradients(x, mask, causal=False, window_size=(None, None), softcap=0.0, **_):
    leaves = [t.double().requires_grad_() for t in x[:3]]
    extras = {"sinks": x.sinks, "cu_seqlens_q": x.cu_seqlens_q, "cu_seqlens_k": x.cu_seqlens_k}
    rule = {"causal": causal, "window_size": window_size, "softcap": softcap, "mask": mask}
    out = oracle(*leaves, **extras, **rule).out
    return torch.autograd.grad(out, leaves, random_like(out).to(x.q.dtype).double())


def check_unrounded(x, max_seqlens=(), mask=None, **options):
    """fp32 gradients are more accurate. Sums of one program round to the 16-bit gradients.
    Neighbours would notice what is stored outside of a tile.
    """
    wide = shares(x, True, max_seqlens, **options)
    rounded = shares(x, False, max_seqlens, **options)
    exact = exact_gradients(x, mask, **options)
    for a, b, e in zip(wide, rounded, exact, strict=True):
        assert a.dtype == torch.float32 and a.shape == b.shape and a.isfinite().all()
        assert rmse(a, e) < rmse(b, e)
    ordered = 0 if options.get("deterministic") or x.q.shape[-1] > 128 else 1
    for a, b in zip(wide[ordered:], rounded[ordered:], strict=True):
        assert torch.equal(a.to(b.dtype), b)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_unrounded_gradients(dim, deterministic, dtype):
    x = Tensors(*inputs(799, 1023, dim, dtype))
    check_unrounded(x, causal=True, deterministic=deterministic)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(63, 111), (64, 64), (111, 777), (600, 129)])
def test_unrounded_gradients_of_odd_lengths(dim, seqlen_q, seqlen_k):
    check_unrounded(Tensors(*inputs(seqlen_q, seqlen_k, dim)))


@pytest.mark.parametrize(
    "dim, dim_v", [(80, 48), (40, 128), (64, 128), (8, 8), (24, 40), (192, 128)]
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_unrounded_gradients_of_padded_head_dims(dim, dim_v, deterministic):
    x = Tensors(*inputs(200, 333, dim, head_dim_v=dim_v))
    check_unrounded(x, causal=True, deterministic=deterministic)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("heads", [(4, 4), (6, 1)])
def test_unrounded_gradients_of_groups_of_heads(dim, heads):
    x = Tensors(*inputs(300, 333, dim, num_heads=heads[0], num_kv_heads=heads[1]))
    check_unrounded(x, window_size=(100, 30))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_unrounded_gradients_of_packed_sequences(dim, deterministic):
    packed = make_packed(
        [5, 130, 0, 777, 64, 9], [9, 200, 3, 777, 1, 0], num_heads=4, num_kv_heads=2, head_dim=dim,
        dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    x = Tensors(*packed, sinks=torch.randn(4, device="cuda"))
    check_unrounded(x, (777, 777), causal=True, softcap=7.0, deterministic=deterministic)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kind", ["documents", "bits", "bits of every head"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_unrounded_gradients_of_block_masks(dim, kind, deterministic, make_mask):
    mask = make_mask(kind, 799, 799)
    x = Tensors(*inputs(799, dim=dim), mask=masks.build(mask, 2, 8, 799, 799, "cuda"))
    check_unrounded(x, mask=mask, deterministic=deterministic)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_unrounded_gradients_are_the_same_bits_every_time(dim, deterministic):
    """More tiles than processors: a program's tiles follow one another in its shared memory."""
    x = Tensors(*inputs(5001, dim=dim, batch=1, num_heads=16, num_kv_heads=16))
    first = shares(x, causal=True, deterministic=deterministic)
    ordered = 0 if deterministic or dim == 256 else 1
    for _ in range(50):
        again = shares(x, causal=True, deterministic=deterministic)
        assert all(map(torch.equal, again[ordered:], first[ordered:]))


@pytest.mark.parametrize("dim", DIMS)
def test_gradients_over_parts_of_the_keys_add_up(dim):
    """As in ring attention: out and lse belong to all keys, and out is fp32."""
    q, k, v = inputs(700, 900, dim)
    whole = Tensors(q, k, v)
    saved = torch_op.run(prepare_call(whole, (), True, out_dtype=torch.float32), whole, "hopper")[
        :2
    ]
    dq, dk, dv = shares(whole, saved=saved)
    parts = [Tensors(q, k[:, cut], v[:, cut]) for cut in (slice(0, 333), slice(333, None))]
    grads = [shares(part, saved=saved) for part in parts]
    sums = sum(g[0] for g in grads), *(torch.cat([g[i] for g in grads], 1) for i in (1, 2))
    for a, b in zip(sums, (dq, dk, dv), strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(0, 64), (64, 0)])
def test_unrounded_gradients_without_scores(dim, seqlen_q, seqlen_k):
    for g in shares(Tensors(*inputs(seqlen_q, seqlen_k, dim))):
        assert g.dtype == torch.float32 and g.eq(0).all()


@pytest.mark.parametrize("dim", DIMS)
def test_gradients_of_an_fp32_out(dim):
    q, k, v = inputs(333, 444, dim)
    assert_accurate(attend_lse, q, k, v, causal=True, out_dtype=torch.float32, grad=True)


def test_lengths_are_not_specialised():
    from onchip.kernels.hopper.backward import backward_kernel

    x = inputs(1024, dim=64)
    gradients(*x, causal=True)
    cache = backward_kernel.device_caches[torch.cuda.current_device()][0]
    before = len(cache)
    for n in range(1, 1000, 97):
        gradients(*(t[:, :n] for t in x), causal=True)
    assert len(cache) - before <= 1


@pytest.mark.parametrize("dim", DIMS)
def test_gradients_written_while_the_call_begins(dim):
    """Programs start while the previous kernel ends, and must not read before it has ended."""
    write = late_writer()
    q, k, v = (t.detach().requires_grad_() for t in inputs(300, dim=dim))
    out = attend(q, k, v, causal=True)
    states = [torch.randn_like(out) for _ in range(2)]
    grads = lambda dout: torch.autograd.grad(out, (k, v), dout, retain_graph=True)
    expected = [grads(state) for state in states]
    buffer, results = states[0].clone(), []
    for i in range(50):
        write[(1,)](buffer, states[i % 2], buffer.numel(), NANOSECONDS=30_000)
        results.append(grads(buffer))
    for i, (dk, dv) in enumerate(results):
        assert torch.equal(dk, expected[i % 2][0]) and torch.equal(dv, expected[i % 2][1])
