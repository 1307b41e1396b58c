"""flash_attn's functions of dense and packed tensors mean what its documentation says."""

import inspect

import pytest
import torch

from onchip import testing as ot
from onchip.integrations import flash_attn as fa
from onchip.integrations.flash_attn.s_dmask import get_block_size_n
from tests.integrations.flash_attn import plain

COMMON = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
SIGNATURES = {  # of flash_attn 2.8: the arguments without a default, then the others
    "flash_attn_func": (("q", "k", "v"), COMMON),
    "flash_attn_kvpacked_func": (("q", "kv"), COMMON),
    "flash_attn_qkvpacked_func": (("qkv",), COMMON),
    "flash_attn_varlen_func": (("q", "k", "v", *LENGTHS), COMMON | {"block_table": None}),
    "flash_attn_varlen_kvpacked_func": (("q", "kv", *LENGTHS), COMMON),
    "flash_attn_varlen_qkvpacked_func": (("qkv", "cu_seqlens", "max_seqlen"), COMMON),
    "flash_attn_with_kvcache": (
        ("q", "k_cache", "v_cache"),
        dict.fromkeys(("k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx"))
        | dict.fromkeys(("cache_leftpad", "block_table", "softmax_scale"))
        | {"causal": False, "window_size": (-1, -1), "softcap": 0.0, "rotary_interleaved": True}
        | {"alibi_slopes": None, "num_splits": 0, "return_softmax_lse": False},
    ),
}
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"softmax_scale": 0.3},
    "window": {"window_size": (5, 3)},
    "left alone": {"window_size": (5, -1)},
    "right alone": {"window_size": (-1, 4)},
    "causal window": {"causal": True, "window_size": (6, 6)},
    "softcap": {"softcap": 2.5, "causal": True},
    "slopes": {"alibi_slopes": SLOPES},
    "slopes of each": {"alibi_slopes": torch.stack([SLOPES, SLOPES * 3]), "causal": True},
    "all": {"causal": True, "window_size": (9, 0), "softcap": 3.0, "alibi_slopes": SLOPES},
}
THEIRS = {"softmax_scale": "scale", "window_size": "window", "alibi_slopes": "slopes"}


def documented(options):
    return {THEIRS.get(name, name): value for name, value in options.items()}


def qkv(*seqlens, dtype=torch.float64, **options):
    made = ot.make_qkv(2, *seqlens, num_heads=4, num_kv_heads=2, head_dim=20, dtype=dtype)
    return [x.requires_grad_() for x in made]


def grads(out, inputs):
    generator = torch.Generator().manual_seed(3)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return torch.autograd.grad(out, inputs, dout)


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_flash_attns_names_order_and_defaults(name):
    required, optional = SIGNATURES[name]
    parameters = inspect.signature(getattr(fa, name)).parameters.values()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    assert [p.name for p in parameters] == [*required, *optional]
    assert [p.default for p in parameters][len(required) :] == list(optional.values())


@pytest.mark.parametrize("seqlens", [(33, 33), (7, 29), (29, 7), (1, 63)])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_dense_equals_the_documented_formula(options, seqlens):
    """29 queries over 7 keys: bottom-right, some rows see nothing."""
    inputs = qkv(*seqlens)
    out, lse, probs = fa.flash_attn_func(*inputs, **options, return_attn_probs=True)
    want, want_lse = plain.batched(*inputs, **documented(options))
    assert probs.shape == (0,) and probs.dtype == out.dtype
    assert_same([out, lse, *grads(out, inputs)], [want, want_lse, *grads(want, inputs)])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_packed_is_each_sequence_alone(options):
    x = ot.make_packed(
        [7, 0, 33] if options.get("alibi_slopes") is not SLOPES else [17, 1],
        [7, 5, 21] if options.get("alibi_slopes") is not SLOPES else [17, 9],
        num_heads=4,
        num_kv_heads=2,
        head_dim=20,
        dtype=torch.float64,
    )
    slopes = options.get("alibi_slopes")
    if slopes is not None and slopes.dim() == 2:
        options = options | {"alibi_slopes": torch.stack([SLOPES, SLOPES * 2, SLOPES * 3])}
    inputs = [t.requires_grad_() for t in x[:3]]
    lengths = *x[3:], *(int(cu.diff().max()) for cu in x[3:])
    out, lse, _ = fa.flash_attn_varlen_func(*inputs, *lengths, **options, return_attn_probs=True)
    want, want_lse = plain.packed(*inputs, *x[3:], **documented(options))
    assert_same([out, lse, *grads(out, inputs)], [want, want_lse, *grads(want, inputs)])


def test_a_gradient_flows_through_the_lse():
    """Where flash_attn drops it; rows that see no key give none."""
    inputs = qkv(29, 7)
    lse = fa.flash_attn_func(*inputs, causal=True, return_attn_probs=True)[1]
    want = plain.batched(*inputs, causal=True)[1]
    seen = want.isfinite()
    assert torch.equal(seen, lse.isfinite()) and not seen.all()
    pick = lambda t: torch.autograd.grad(t[seen].square().sum(), inputs[:2])
    assert_same(pick(lse), pick(want))


def test_by_position():
    q, k, v = qkv(13, 13)
    given = (0.0, 0.3, True, (4, -1), 2.0, SLOPES, True, True)
    named = dict(zip(COMMON, given, strict=True))
    assert_same(fa.flash_attn_func(q, k, v, *given), fa.flash_attn_func(q, k, v, **named))
    kv, qkv3 = torch.stack([k, v], 2), torch.stack([q, q, q], 2)
    want = fa.flash_attn_func(q, k, v, *given)
    assert_same(fa.flash_attn_kvpacked_func(q, kv, *given), want)
    want = fa.flash_attn_func(q, q, q, *given)
    assert_same(fa.flash_attn_qkvpacked_func(qkv3, *given), want)


def test_packed_tensors_get_their_gradient_in_one_piece():
    q, k, v = (x.detach() for x in ot.make_qkv(2, 19, num_heads=3, dtype=torch.float64))
    qkv3 = torch.stack([q, k, v], 2).requires_grad_()
    loose = [x.clone().requires_grad_() for x in (q, k, v)]
    want = grads(fa.flash_attn_func(*loose, causal=True), loose)
    (got,) = grads(fa.flash_attn_qkvpacked_func(qkv3, causal=True), [qkv3])
    assert_same(got.unbind(2), want)
    kv = torch.stack([k, v], 2).requires_grad_()
    dq, dkv = grads(fa.flash_attn_kvpacked_func(loose[0], kv, causal=True), [loose[0], kv])
    assert_same([dq, *dkv.unbind(2)], want)


def test_packed_and_packed():
    """Sequences one after another, and q, k, v of a token in one tensor."""
    x = ot.make_packed([5, 0, 18], num_heads=3, dtype=torch.float64)
    q, k, v, cu, _ = x
    want = fa.flash_attn_varlen_func(q, k, v, cu, cu, 18, 18, causal=True)
    got = fa.flash_attn_varlen_qkvpacked_func(torch.stack([q, k, v], 1), cu, 18, causal=True)
    assert_same([got], [want])
    kv = torch.stack([k, v], 1)
    got = fa.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 18, 18, causal=True)
    assert_same([got], [want])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_accuracy_rule_holds_through_the_door(dtype):
    def flash(q, k, v, *, causal, window_size):
        return fa.flash_attn_func(q, k, v, causal=causal, window_size=(window_size[0], -1))

    made = ot.make_qkv(1, 111, num_heads=4, num_kv_heads=2, head_dim=40, dtype=dtype)
    ot.assert_accurate(flash, *made, grad=True, causal=True, window_size=(50, None))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_accuracy_rule_holds_on_the_gpu(options, dtype):
    """Dense and packed, forward and backward."""
    size = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": dtype, "device": "cuda"}
    slopes = options.get("alibi_slopes")
    options = options if slopes is None else options | {"alibi_slopes": slopes.cuda()}
    none = lambda side: None if side < 0 else side
    ours = options | {"window_size": tuple(map(none, options.get("window_size", (-1, -1))))}
    dense = lambda q, k, v, **_: fa.flash_attn_func(q, k, v, **options)
    ot.assert_accurate(dense, *ot.make_qkv(2, 111, 203, **size), grad=True, **ours)
    x = ot.make_packed([63, 111], [203, 111], **size)

    def packed(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **_):
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return fa.flash_attn_varlen_func(q, k, v, *lengths, **options)

    ot.assert_accurate(packed, *x[:3], grad=True, **x.options, **ours)


@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True, "window_size": (9, -1)}])
def test_block_tables_of_any_block_size(options, block_size):
    x = ot.make_packed([3, 1, 0, 20], [40, 17, 3, 20], num_heads=4, num_kv_heads=2)
    pages = ot.make_pages(x.k, x.v, x.cu_seqlens_k, block_size)
    lengths = x.cu_seqlens_q, x.cu_seqlens_k, 20, 40
    out, lse, probs = fa.flash_attn_varlen_func(
        x.q,
        pages.k_pages,
        pages.v_pages,
        *lengths,
        **options,
        block_table=pages.page_table,
        return_attn_probs=True,
    )
    want, want_lse = plain.packed(*x, **documented(options))
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-5)
    assert probs.numel() == 0


def normalised(s, p, block):
    """S_dmask (heads, rows, keys) as probabilities; p is attention's, without dropout:
    exp(s - m) * exp(m - lse), and exp(m - lse) is the largest p from the block of a key on.
    """
    blocks = []
    for start in range(0, p.shape[-1], block):
        largest = p[..., start:].amax(-1, keepdim=True)
        blocks.append(s[..., start : start + block] * largest)
    return torch.cat(blocks, -1)


@pytest.mark.parametrize("packed", [False, True])
def test_s_dmask_explains_out(packed):
    """As flash_attn's own tests read it: signs are dropout's, and the probabilities are relative to
    a maximum that runs from the last block of keys to the first. Rounded up to multiples of 128.
    """
    torch.manual_seed(5)
    options = {"causal": True, "alibi_slopes": SLOPES, "return_attn_probs": True}
    if packed:
        x = ot.make_packed([9, 201], num_heads=4, num_kv_heads=2, dtype=torch.float64)
        lengths = x.cu_seqlens_q, x.cu_seqlens_k, 201, 201
        out, lse, s = fa.flash_attn_varlen_func(*x[:3], *lengths, 0.25, **options)
        assert not s[0, :, 9:].any() and not s[0, :, :, 9:].any()
        q, k, v, out, lse = x.q[9:], x.k[9:], x.v[9:], out[9:], lse[:, 9:]
    else:
        q, k, v = (t.detach() for t in qkv(201, 201))
        out, lse, s = fa.flash_attn_func(q, k, v, 0.25, **options)
        q, k, v, out, lse = q[1], k[1], v[1], out[1], lse[1]
    assert s.shape == (2, 4, 256, 256) and not s[..., 201:, :].any() and not s[..., 201:].any()
    _, want_lse = plain.attention(q, k, v, causal=True, slopes=SLOPES)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-12)
    keys = k.repeat_interleave(2, 1)
    ahead = (torch.arange(201)[:, None] - torch.arange(201)).abs()
    scores = torch.einsum("qhd,khd->hqk", q, keys) * q.shape[-1] ** -0.5
    scores = (scores - SLOPES.double()[:, None, None] * ahead).masked_fill(
        torch.ones(201, 201).triu(1).bool(), -torch.inf
    )
    p = torch.softmax(scores, -1)
    got = normalised(s[1, :, :201, :201], p, get_block_size_n(None, q.shape[-1], True, True))
    torch.testing.assert_close(got.abs(), p, rtol=0, atol=1e-12)
    want = torch.einsum("hqk,khd->qhd", got.clamp(min=0) / 0.75, v.repeat_interleave(2, 1))
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    taken = (got < 0).sum() / (got != 0).sum()
    assert 0.2 < taken < 0.3


def test_block_sizes_equal_the_kernels():
    """By head_dim, without and with dropout: A100 and H100."""
    sizes = [(32, 128, 128), (64, 128, 64), (96, 64, 64), (128, 64, 32), (192, 64, 64)]
    for head_dim, alone, dropped in [*sizes, (256, 64, 64)]:
        assert get_block_size_n("cpu", head_dim, False, True) == alone
        assert get_block_size_n("cpu", head_dim, True, True) == dropped
    with pytest.raises(ValueError, match="head_dim=257 must be at most 256"):
        get_block_size_n("cpu", 257, False, False)


def test_dropout_follows_torchs_seed_and_reaches_the_gradient():
    inputs = qkv(33, 33)

    def run(seed, p):
        torch.manual_seed(seed)
        out = fa.flash_attn_func(*inputs, p, causal=True)
        return out, *grads(out, inputs)

    assert_same(run(1, 0.4), run(1, 0.4))
    for other in (run(2, 0.4), run(1, 0.0)):
        assert not any(torch.allclose(a, b) for a, b in zip(run(1, 0.4), other, strict=True))


def test_softcap_counts_from_above_zero_on():
    inputs = qkv(9, 9)
    assert_same([fa.flash_attn_func(*inputs, softcap=-1.0)], [fa.flash_attn_func(*inputs)])


def test_lengths_may_be_tensors_and_last_dimensions_may_be_strided():
    """As transformers passes them, and as flash_attn takes them."""
    q, k, v, cu, _ = ot.make_packed([5, 18], num_heads=3, dtype=torch.float64)
    want = fa.flash_attn_varlen_func(q, k, v, cu, cu, 18, 18)
    longest = cu.diff().max()
    strided = [t.mT.contiguous().mT for t in (q, k, v)]
    assert strided[0].stride(-1) != 1
    assert_same([fa.flash_attn_varlen_func(*strided, cu, cu, longest, longest)], [want])


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda q: fa.flash_attn_func(q, q, q, window_size=3), "must be two ints"),
        (lambda q: fa.flash_attn_func(q, q, q, window_size=(None, 1)), "-1 = no bound"),
        (lambda q: fa.flash_attn_func(q, q, q, 1.0), "dropout_p=1.0"),
        (lambda q: fa.flash_attn_func(q, q.tolist(), q), "k must be a torch.Tensor, got list"),
        (lambda q: fa.flash_attn_qkvpacked_func(q), r"\(batch, seqlen, 3, heads, head_dim\)"),
        (lambda q: fa.flash_attn_kvpacked_func(q, q[:, :, None]), "kv must be"),
        (
            lambda q: fa.flash_attn_varlen_func(
                q[0], q, q, *(torch.tensor([0, 4], dtype=torch.int32),) * 2, 4, 4, 0.1,
                block_table=torch.zeros(1, 1, dtype=torch.int32),
            ),
            "dropout_p=0.1 with block_table",
        ),
    ],
)  # fmt: skip
def test_refusals_are_sentences(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call(torch.randn(1, 4, 2, 8))


def paged_call(cu_k, table, **options):
    q = torch.randn(4, 2, 8, requires_grad=True)
    k, v = torch.randn(2, 3, 4, 2, 8, requires_grad=True)
    cu, table = torch.tensor([0, 4], dtype=torch.int32), torch.tensor([table], dtype=torch.int32)
    cu_k = torch.tensor([0, cu_k], dtype=torch.int32)
    given = {"block_table": table} | options
    return fa.flash_attn_varlen_func(q, k, v, cu, cu_k, 4, 8, **given)


def test_pages_are_served_without_gradient():
    """Inputs that require one change nothing: upstream's backward has no block_table."""
    out = paged_call(8, [2, 0])
    assert out.shape == (4, 2, 8) and not out.requires_grad


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
@pytest.mark.parametrize(
    ("keys", "table", "sentence"),
    [
        (9, [2, 0], "9 keys exceeds block_table: 2 columns of 4 keys hold 8"),
        (8, [2, 3], r"block_table\[0, 1\]=3 is not one of the 3 blocks"),
        (8, [-1, 0], r"block_table\[0, 0\]=-1 is not one of the 3 blocks"),
    ],
)
def test_block_tables_out_of_range_are_named(keys, table, sentence, error):
    """RuntimeError as upstream, ValueError as the rest of onchip."""
    with pytest.raises(error, match=sentence):
        paged_call(keys, table)


def test_blocks_that_a_window_has_left_may_be_anything():
    options = {"causal": True, "window_size": (0, 0)}
    assert torch.isfinite(paged_call(8, [-7, 0], **options)).all()
    assert torch.isfinite(paged_call(4, [1, 99])).all()
