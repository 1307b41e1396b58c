"""FlashAttention-3's flash_attn_interface and FlashAttention-4's flash_attn.cute."""

import inspect

import pytest
import torch

import onchip
from onchip import UnsupportedError
from onchip import testing as ot
from onchip.integrations import flash_attn as fa
from onchip.integrations.flash_attn import cute, hopper

I32 = torch.int32
DESCALES = "q_descale k_descale v_descale"
TAIL = f"{DESCALES} window_size attention_chunk softcap num_splits pack_gqa deterministic sm_margin"
LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
SCORE = "softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa deterministic"
MODS = "score_mod score_mod_bwd mask_mod"
SIGNATURES = {  # upstream's, in its order
    hopper.flash_attn_func: f"q k v softmax_scale causal qv {TAIL} return_attn_probs",
    hopper.flash_attn_varlen_func: (
        f"q k v {LENGTHS} seqused_q seqused_k softmax_scale causal qv {TAIL} return_attn_probs"
    ),
    hopper.flash_attn_qkvpacked_func: (
        f"qkv softmax_scale causal {DESCALES} window_size attention_chunk softcap deterministic"
        " num_heads_q sm_margin return_attn_probs"
    ),
    hopper.flash_attn_with_kvcache: (
        "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad"
        f" page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens {DESCALES}"
        " softmax_scale causal window_size attention_chunk softcap rotary_interleaved"
        " scheduler_metadata num_splits pack_gqa sm_margin return_softmax_lse"
    ),
    hopper.flash_attn_forward: (
        "q k v k_new v_new qv out_ cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k"
        " max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin"
        f" seqlens_rotary {DESCALES} softmax_scale causal window_size_left window_size_right"
        " attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa"
        " sm_margin"
    ),
    hopper.flash_attn_backward: (
        "dout q k v out softmax_lse cu_seqlens_q cu_seqlens_k sequed_q sequed_k max_seqlen_q"
        " max_seqlen_k dq dk dv softmax_scale is_causal window_size_left window_size_right softcap"
        " deterministic sm_margin"
    ),
    cute.flash_attn_func: (
        f"q k v qv gather_kv_indices {SCORE} {MODS} aux_tensors aux_scalars block_sparse_tensors"
        " block_sparse_tensors_bwd return_lse"
    ),
    cute.flash_attn_varlen_func: (
        f"q k v qv {LENGTHS} min_seqlen_k seqused_q seqused_k gather_kv_indices page_table {SCORE}"
        f" {MODS} block_sparse_tensors aux_tensors aux_scalars return_lse scheduler_metadata"
        " seqlen_k_per_split disable_scheduler_metadata"
    ),
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_arguments_have_upstreams_names_and_order(function):
    assert " ".join(inspect.signature(function).parameters) == SIGNATURES[function]


def made(*seqlens):
    x = ot.make_qkv(2, *seqlens, num_heads=4, num_kv_heads=2, head_dim=20, dtype=torch.float64)
    return [t.requires_grad_() for t in x]


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_dense_functions_are_attention_with_its_gradient():
    """lse of a row that sees no key is -inf in both, unlike FlashAttention-2's."""
    inputs = made(29, 7)
    want = onchip.attention(*inputs, causal=True, window_size=(5, None), return_lse=True)
    assert (want[1] == -torch.inf).any()
    options = {"causal": True, "window_size": (5, -1)}
    got = hopper.flash_attn_func(*inputs, **options, return_attn_probs=True)
    assert_same(got, want)
    assert isinstance(hopper.flash_attn_func(*inputs), torch.Tensor)
    sink = torch.randn(4)
    options = {"causal": True, "window_size": (5, None)}
    assert_same(cute.flash_attn_func(*inputs, **options, return_lse=True), want)
    assert cute.flash_attn_func(*inputs, **options)[1] is None
    with_sink = cute.flash_attn_func(*inputs, learnable_sink=sink)[0]
    assert_same([with_sink], [onchip.attention(*inputs, sinks=sink)])
    dout = torch.randn_like(want[0])
    grads = torch.autograd.grad(want[0], inputs, dout)
    assert_same(torch.autograd.grad(got[0], inputs, dout), grads)
    passed = [torch.full_like(t, torch.nan) for t in inputs]
    out, lse, *_ = hopper.flash_attn_forward(
        *inputs, causal=True, window_size_left=5, out_=torch.empty_like(want[0])
    )
    buffers = dict(zip(("dq", "dk", "dv"), passed, strict=True))
    hopper.flash_attn_backward(
        dout, *inputs, out, lse, **buffers, is_causal=True, window_size_left=5
    )
    assert_same(passed, grads)


def test_packed_projections():
    q, k, v = (t.detach() for t in made(9))
    want = onchip.attention(q, k, v, causal=True)
    together = torch.cat([q, k, v], 2)
    assert_same([hopper.flash_attn_qkvpacked_func(together, None, True, num_heads_q=4)], [want])
    qkv = torch.stack([q, q, q], 2)
    want = onchip.attention(q, q, q)
    assert_same([hopper.flash_attn_qkvpacked_func(qkv)], [want])


def test_packed_functions_and_keys_that_are_not_used():
    x = ot.make_packed([3, 5], [9, 7], num_heads=4, num_kv_heads=2, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in x[:3]]
    lengths = *x[3:], 5, 9
    want = onchip.varlen_attention(*inputs, *lengths, causal=True, return_lse=True)
    got = hopper.flash_attn_varlen_func(*inputs, *lengths, causal=True, return_attn_probs=True)
    assert_same(got, want)
    named = dict(zip(LENGTHS.split(), (*x[3:], None, None), strict=True))
    assert_same(cute.flash_attn_varlen_func(*inputs, **named, causal=True, return_lse=True), want)
    forward = hopper.flash_attn_forward(*inputs, **(named | {"max_seqlen_q": 5, "max_seqlen_k": 9}))
    assert_same(forward[:1], [onchip.varlen_attention(*inputs, *lengths)])
    passed = [torch.full_like(t, torch.nan) for t in inputs]
    dout = torch.randn_like(want[0])
    hopper.flash_attn_backward(
        *(dout, *inputs, *want, *x[3:], None, None, 5, 9, *passed, None), is_causal=True
    )
    assert_same(passed, torch.autograd.grad(want[0], inputs, dout))
    used = torch.tensor([4, 7], dtype=I32)
    with pytest.raises(UnsupportedError, match="seqused_k has no gradient"):
        hopper.flash_attn_varlen_func(*inputs, *lengths, seqused_k=used)
    short = torch.tensor([0, 4, 11], dtype=I32)
    kept = [torch.cat([t[:4], t[9:]]) for t in inputs[1:]]
    with torch.no_grad():
        got = hopper.flash_attn_varlen_func(*inputs, *lengths, seqused_k=used, causal=True)
        want = onchip.varlen_attention(inputs[0], *kept, x[3], short, 5, 7, causal=True)
    assert_same([got], [want])


def test_caches():
    """Rows and pages, queries of one length and packed; new tokens are written in place."""
    q, k, v = (t.detach() for t in made(3, 16))
    seqlens = torch.tensor([5, 9], dtype=I32)
    new = [t[:, :3].clone() for t in (v, k)]
    caches, others = [k.clone(), v.clone()], [k.clone(), v.clone()]
    given = {"cache_seqlens": seqlens, "causal": True}
    want = fa.flash_attn_with_kvcache(q, *caches, *new, **given, return_softmax_lse=True)
    got = hopper.flash_attn_with_kvcache(q, *others, *new, **given, return_softmax_lse=True)
    assert_same(got[:2], want)
    assert_same(others, caches)
    pages = [t.unflatten(1, (4, 4)).flatten(0, 1) for t in caches]
    table = torch.arange(8, dtype=I32).view(2, 4)
    given |= {"page_table": table, "cache_seqlens": seqlens + 3}
    got = hopper.flash_attn_with_kvcache(q, *pages, **given)
    assert_same([got], want[:1])
    packed = {"cu_seqlens_q": torch.tensor([0, 3, 6], dtype=I32), "max_seqlen_q": 3}
    flat = q.flatten(0, 1)
    got = hopper.flash_attn_with_kvcache(flat, *pages, **given, **packed)
    assert_same([got.unflatten(0, (2, 3))], want[:1])
    out, lse, *_ = hopper.flash_attn_forward(
        flat, *pages, page_table=table, seqused_k=seqlens + 3, **packed, causal=True
    )
    assert_same([out, lse], [flat * 0 + want[0].flatten(0, 1), want[1].transpose(0, 1).flatten(1)])
    out, _ = cute.flash_attn_varlen_func(
        flat, *pages, **packed, page_table=table, seqused_k=seqlens + 3, causal=True
    )
    assert_same([out], [want[0].flatten(0, 1)])
    metadata = hopper.get_scheduler_metadata(2, 3, 16, 4, 2, 20, seqlens)
    assert metadata.dtype == I32 and not metadata.numel()


def test_partial_results_combine():
    q, k, v = (t.detach() for t in made(9, 32))
    want = onchip.attention(q, k, v, return_lse=True)
    cut = [t.chunk(4, 1) for t in (k, v)]
    parts = [onchip.attention(q, *kv, return_lse=True) for kv in zip(*cut, strict=True)]
    outs, lses = (torch.stack(t) for t in zip(*parts, strict=True))
    out, lse = hopper.flash_attn_combine(outs, lses.mT)
    assert_same([out, lse], [want[0], want[1].mT])
    into = torch.empty_like(out, dtype=torch.float32)
    assert hopper.flash_attn_combine(outs, lses.mT, into)[0] is into


REFUSED = [
    (hopper.flash_attn_func, {"qv": 1}, "qv is not supported: pass qv=None"),
    (hopper.flash_attn_func, {"k_descale": 1}, "k_descale is not supported"),
    (hopper.flash_attn_func, {"attention_chunk": 64}, "attention_chunk is not supported"),
    (cute.flash_attn_func, {"mask_mod": len}, "mask_mod is a program for FlashAttention-4's"),
    (cute.flash_attn_func, {"gather_kv_indices": 1}, "gather_kv_indices is not supported"),
    (cute.flash_attn_varlen_func, {"seqused_k": 1}, "need cu_seqlens_q and cu_seqlens_k"),
    (hopper.flash_attn_with_kvcache, {"rotary_seqlens": 1}, "rotary_seqlens is not supported"),
    (hopper.flash_attn_with_kvcache, {"cu_seqlens_q": 1}, "cu_seqlens_q needs page_table"),
    (hopper.flash_attn_with_kvcache, {"cu_seqlens_q": 1, "k": 1}, "k with cu_seqlens_q is not"),
]


@pytest.mark.parametrize(("function", "options", "sentence"), REFUSED)
def test_unsupported_arguments_are_refused(function, options, sentence):
    with pytest.raises(UnsupportedError, match=sentence):
        function(*(t.detach() for t in made(4)), **options)


def test_head_dims_are_checked_as_callers_expect():
    cute.check_head_dims(192, 128, 9, 8)
    with pytest.raises(AssertionError, match="must be between 1 and 256"):
        cute.check_head_dims(64, 512, 10, 8)
