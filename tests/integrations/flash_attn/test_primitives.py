"""The single passes for programs with a gradient of their own: rings, sequence parallelism."""

import inspect

import pytest
import torch

from onchip import UnsupportedError
from onchip import testing as ot
from onchip.integrations import flash_attn as fa
from onchip.integrations.flash_attn import extension, primitives
from tests.integrations.flash_attn import plain

SCORE = ("dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap")
SAVED = ("dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv")
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
SIGNATURES = {  # of flash_attn 2.8: callers build keyword arguments from them
    "_flash_attn_forward": [*"qkv", *SCORE, "alibi_slopes", "return_softmax"],
    "_flash_attn_varlen_forward": [*"qkv", *LENGTHS, *SCORE, "alibi_slopes", "return_softmax"]
    + ["block_table", "leftpad_k", "seqused_k", "zero_tensors", "num_splits"],
    "_flash_attn_backward": [*SAVED, *SCORE, "alibi_slopes", "deterministic", "rng_state"],
    "_flash_attn_varlen_backward": [*SAVED, *LENGTHS, *SCORE, "alibi_slopes", "deterministic"]
    + ["rng_state", "zero_tensors"],
}
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
OPTIONS = {
    "plain": {},
    "causal window": {"causal": True, "window_size_left": 6},
    "all": {"causal": True, "softcap": 3.0, "alibi_slopes": SLOPES, "softmax_scale": 0.3},
    "dropout": {"causal": True, "dropout_p": 0.25},
}
DEFAULTS = {"dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size_left": -1}
DEFAULTS |= {"window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}


@pytest.fixture
def passes():
    """The module that programs import them from."""
    with fa.installed():
        import flash_attn.flash_attn_interface

        yield flash_attn.flash_attn_interface


def score(options):
    return DEFAULTS | options


def dense(options):
    """The same options for flash_attn_func."""
    named = score(options)
    window = named.pop("window_size_left"), named.pop("window_size_right")
    return named | {"window_size": window}


def empty_like(*tensors):
    return [torch.full_like(t, torch.nan) for t in tensors]


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_upstreams(passes, name):
    assert inspect.getfullargspec(getattr(passes, name)).args == SIGNATURES[name]
    assert getattr(passes, f"_wrapped{name}") is getattr(passes, name)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_dense_passes_equal_the_function_and_its_gradient(passes, options):
    made = ot.make_qkv(2, 21, 33, num_heads=4, num_kv_heads=2, head_dim=20, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in made]
    torch.manual_seed(3)
    want = fa.flash_attn_func(*inputs, **dense(options), return_attn_probs=True)
    dout = torch.randn_like(want[0])
    torch.manual_seed(3)
    out, lse, s_dmask, rng_state = passes._flash_attn_forward(
        *inputs, **score(options), return_softmax=bool(options.get("dropout_p"))
    )
    assert_same([out, lse, s_dmask], want)
    assert not out.requires_grad and rng_state.shape == (2,) and rng_state.dtype == torch.int64
    grads = empty_like(*inputs)
    delta = passes._flash_attn_backward(
        dout, *inputs, out, lse, *grads, **score(options), deterministic=True, rng_state=rng_state
    )
    assert_same(grads, torch.autograd.grad(want[0], inputs, dout))
    assert delta.shape == (2, 4, 128)
    assert_same([delta[..., :21]], [(out * dout).sum(-1).transpose(1, 2)])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_packed_passes_equal_the_function_and_its_gradient(passes, options):
    x = ot.make_packed([7, 0, 20], [7, 5, 30], num_heads=4, num_kv_heads=2, dtype=torch.float64)
    inputs, lengths = [t.requires_grad_() for t in x[:3]], (*x[3:], 20, 30)
    torch.manual_seed(4)
    want = fa.flash_attn_varlen_func(*inputs, *lengths, **dense(options), return_attn_probs=True)
    dout = torch.randn_like(want[0])
    torch.manual_seed(4)
    out, lse, s_dmask, rng_state = passes._flash_attn_varlen_forward(
        *inputs, *lengths, **score(options), return_softmax=True
    )
    assert_same([out, lse, s_dmask], want)
    grads = empty_like(*inputs)
    delta = passes._flash_attn_varlen_backward(
        *(dout, *inputs, out, lse, *grads, *lengths),
        **score(options),
        deterministic=False,
        rng_state=rng_state,
    )
    assert_same(grads, torch.autograd.grad(want[0], inputs, dout))
    rows = (out * dout).sum(-1).T
    assert_same([delta[:, :7], delta[:, 7 + 256 : 27 + 256]], [rows[:, :7], rows[:, 7:]])


def test_a_ring_adds_up_to_one_process(passes):
    """The calls of a ring: arguments by name from the signature, lse merged by sigmoids, gradients
    of a block of keys from the out and lse of all of them, into buffers that are used again.
    """
    q, k, v = (t.requires_grad_() for t in ot.make_qkv(1, 48, num_heads=4, dtype=torch.float64))
    want = fa.flash_attn_func(q, k, v, causal=True)
    dout = torch.randn_like(want)
    ranks = range(3)
    part = lambda t, rank: t.detach()[:, 16 * rank : 16 * (rank + 1)]

    def call(function, **given):
        spec = inspect.getfullargspec(function)
        lengths = len(spec.args) - len(spec.defaults or ())
        named = dict(zip(spec.args, (None,) * lengths + (spec.defaults or ()), strict=True))
        common = {"dropout_p": 0, "softmax_scale": q.shape[-1] ** -0.5, "softcap": 0.0}
        common |= {"window_size_left": -1, "window_size_right": -1, "return_softmax": False}
        common |= {"deterministic": False}
        return function(**{n: (named | common | given)[n] for n in named})

    grads = [torch.zeros_like(t) for t in (q, k, v)]
    buffers = empty_like(*(part(t, 0) for t in (q, k, v)))
    for rank in ranks:
        out = lse = None
        for source in range(rank + 1):
            given = {"q": part(q, rank), "k": part(k, source), "v": part(v, source)}
            given["causal"] = rank == source
            block, block_lse, _, _ = call(passes._flash_attn_forward, **given)
            block_lse = block_lse.transpose(1, 2)[..., None]
            if out is None:
                out, lse = block, block_lse
            else:
                out = out - torch.sigmoid(block_lse - lse) * (out - block)
                lse = lse - torch.nn.functional.logsigmoid(lse - block_lse)
        assert_same([out], [part(want, rank)])
        lse = lse.squeeze(-1).transpose(1, 2)  # not contiguous, as a ring passes it
        for source in range(rank + 1):
            given = {"q": part(q, rank), "k": part(k, source), "v": part(v, source)}
            given |= {"dout": part(dout, rank), "out": out, "softmax_lse": lse}
            given |= dict(zip(("dq", "dk", "dv"), buffers, strict=True), causal=rank == source)
            call(passes._flash_attn_backward, **given)
            for total, buffer, at in zip(grads, buffers, (rank, source, source), strict=True):
                part(total, at).add_(buffer)
    assert_same(grads, torch.autograd.grad(want, (q, k, v), dout))


def test_rows_that_see_no_key_pass_through_both_ways(passes):
    """+inf in softmax_lse on the way out and in: zero gradients, no NaN."""
    q, k, v = ot.make_qkv(1, 9, 4, num_heads=2, dtype=torch.float64)
    options = score({"causal": True})
    out, lse, _, _ = passes._flash_attn_forward(q, k, v, **options, return_softmax=False)
    assert (lse[..., :5] == torch.inf).all()
    dq, dk, dv = grads = empty_like(q, k, v)
    args = torch.ones_like(out), q, k, v, out, lse, *grads
    passes._flash_attn_backward(*args, **options, deterministic=False)
    assert not dq[:, :5].any() and all(g.isfinite().all() for g in (dq, dk, dv))


def test_gradients_without_a_buffer_are_not_written(passes):
    q, k, v = ot.make_qkv(1, 9, num_heads=2, dtype=torch.float64)
    out, lse, _, _ = passes._flash_attn_forward(q, k, v, **score({}), return_softmax=False)
    (dv,) = empty_like(v)
    args = out, q, k, v, out, lse, None, None, dv
    passes._flash_attn_backward(*args, **score({}), deterministic=False)
    assert dv.isfinite().all()


@pytest.mark.parametrize("paged", [False, True])
def test_keys_that_are_not_used(passes, paged):
    """seqused_k, leftpad_k and block_table: each sequence is what plain attention gives of its
    keys; the others hold NaN.
    """
    x = ot.make_packed([3, 1, 4], [9, 12, 7], num_heads=4, num_kv_heads=2, dtype=torch.float64)
    used = torch.tensor([5, 12, 6], dtype=torch.int32)
    pad = torch.tensor([0, 0, 0] if paged else [1, 0, 2], dtype=torch.int32)
    want, want_lse, k, v = [], [], x.k.clone(), x.v.clone()
    for b, (start, end) in enumerate(zip(x.cu_seqlens_k, x.cu_seqlens_k[1:], strict=False)):
        keys = slice(int(start + pad[b]), int(start + used[b]))
        rows = slice(*x.cu_seqlens_q[b : b + 2].tolist())
        out, lse = plain.attention(x.q[rows], k[keys], v[keys], causal=True)
        want.append(out)
        want_lse.append(lse)
        for t in (k, v):
            t[start : keys.start] = t[keys.stop : end] = torch.nan
    given = {"seqused_k": used, "leftpad_k": None if paged else pad}
    if paged:
        pages = ot.make_pages(k, v, x.cu_seqlens_k, 4)
        k, v, given["block_table"] = pages.k_pages, pages.v_pages, pages.page_table
    lengths = x.cu_seqlens_q, x.cu_seqlens_k, 4, 12
    out, lse, _, _ = passes._flash_attn_varlen_forward(
        x.q, k, v, *lengths, **score({"causal": True}), **given
    )
    assert_same([out, lse], [torch.cat(want), torch.cat(want_lse, -1)])


def test_wrong_arguments_of_the_passes_are_refused(passes):
    q, k, v, cu, _ = ot.make_packed([3, 4], num_heads=2)
    args = q, k, v, cu, cu, 4, 4
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported"):
        passes._flash_attn_varlen_forward(*args, **score({}), num_splits=2)
    with pytest.raises(UnsupportedError, match="zero_tensors=True is not supported"):
        passes._flash_attn_varlen_forward(*args, **score({}), zero_tensors=True)
    used = torch.tensor([3, 4], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match=r"dropout_p=0.1 is not supported with block_table"):
        passes._flash_attn_varlen_forward(*args, **score({"dropout_p": 0.1}), seqused_k=used)
    dense = [t[None] for t in (q, q, k, v, q)]
    with pytest.raises(ValueError, match="dropout_p=0.1 needs the rng_state of the forward"):
        lse = torch.zeros(1, 2, 7)
        passes._flash_attn_backward(
            *dense, lse, *dense[:3], **score({"dropout_p": 0.1}), deterministic=False
        )


def test_the_extension_has_the_same_passes_in_its_own_order():
    """flash_attn_2_cuda, which programs call for arguments that flash_attn_interface hides."""
    q, k, v = ot.make_qkv(1, 9, num_heads=2, dtype=torch.float64)
    tail = None, 0.0, 0.3, True, -1, -1, 0.0
    out, lse, _, rng_state = extension.fwd(q, k, v, None, *tail, False, None)
    want = primitives.flash_attn_forward(q, k, v, *tail[1:], None, False)
    assert_same([out, lse], want[:2])
    into = torch.empty_like(out)
    assert extension.fwd(q, k, v, into, *tail, False)[0] is into and torch.equal(into, out)
    got = extension.bwd(out, q, k, v, out, lse, None, None, None, *tail, True, None, rng_state)
    grads = empty_like(q, k, v)
    delta = primitives.flash_attn_backward(out, q, k, v, out, lse, *grads, *tail[1:], None, True)
    assert_same(got, [*grads, delta])
    cu = torch.tensor([0, 9], dtype=torch.int32)
    flat = [t[0] for t in (q, k, v)]
    packed = extension.varlen_fwd(
        *flat,
        None,
        cu,
        cu,
        None,
        None,
        None,
        None,
        9,
        9,
        0.0,
        0.3,
        False,
        *tail[3:],
        False,
        None,
        0,
    )
    assert_same(packed[:2], [out[0], lse[0]])
    back = extension.varlen_bwd(
        *(out[0], *flat, out[0], lse[0], None, None, None, cu, cu, None, 9, 9, 0.0, 0.3, False),
        *(*tail[3:], True, None, rng_state),
    )
    assert_same(back[:3], [g[0] for g in grads])
    with pytest.raises(RuntimeError, match="`generator` argument is no longer supported"):
        extension.fwd(q, k, v, None, *tail, False, torch.empty(1))
    with pytest.raises(UnsupportedError, match="call flash_attn.flash_attn_with_kvcache"):
        extension.fwd_kvcache(q, k, v)


@pytest.mark.gpu
def test_passes_on_a_gpu(passes):
    q, k, v = ot.make_qkv(2, 300, num_heads=4, head_dim=64, dtype=torch.bfloat16, device="cuda")
    inputs = [t.requires_grad_() for t in (q, k, v)]
    torch.manual_seed(5)
    want = fa.flash_attn_func(*inputs, 0.1, causal=True)
    dout = torch.randn_like(want)
    torch.manual_seed(5)
    options = score({"causal": True, "dropout_p": 0.1})
    out, lse, _, rng = passes._flash_attn_forward(*inputs, **options, return_softmax=False)
    grads = empty_like(*inputs)
    passes._flash_attn_backward(
        dout, *inputs, out, lse, *grads, **options, deterministic=True, rng_state=rng
    )
    assert torch.equal(out, want)
    for a, b in zip(grads, torch.autograd.grad(want, inputs, dout), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=float(b.abs().max()) / 128)
