"""Pages: attention through a page table equals attention over the gathered cache."""

from functools import partial
from itertools import product

import pytest
import torch
from torch.overrides import TorchFunctionMode

import onchip
import onchip.lab  # registers the kernels of the papers
from onchip.core import paged, torch_op
from onchip.core.problem import Options, Tensors
from onchip.cost.prefixes import costs, moved
from onchip.fold import cascade
from onchip.quant.kv8 import dequantise
from onchip.testing import assert_accurate, make_packed, make_pages
from tests.kv8 import FORMS, on_grid, quantise_pages

HEADS, KV_HEADS, DIM = 4, 2, 16


def cache(lengths, page_size, extra_pages=3):
    """Random pages in random order; unused slots and pages hold NaN. Also the contiguous keys and
    values.
    """
    used = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(used) + extra_pages, dtype=torch.int32)
    pages = torch.full((2, len(order), page_size, KV_HEADS, DIM), float("nan"))
    table = torch.full((len(lengths), max(used, default=0) + 1), -1, dtype=torch.int32)
    dense, at = [], 0
    for b, n in enumerate(lengths):
        kv = torch.randn(2, n, KV_HEADS, DIM)
        dense.append(kv)
        for i in range(used[b]):
            page = int(order[at])
            at += 1
            table[b, i] = page
            part = kv[:, i * page_size : (i + 1) * page_size]
            pages[:, page, : part.shape[1]] = part
    return *pages, table, torch.tensor(lengths, dtype=torch.int32), dense


@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_decode_and_verify(page_size, seqlen_q):
    lengths = [5, 33, 16, 300]
    k_pages, v_pages, table, seqlens, dense = cache(lengths, page_size)
    q = torch.randn(4, seqlen_q, HEADS, DIM)
    out, lse = onchip.paged_attention(q, k_pages, v_pages, table, seqlens, return_lse=True)
    for b, (k, v) in enumerate(dense):
        expected = onchip.attention(q[b : b + 1], k[None], v[None], causal=True, return_lse=True)
        torch.testing.assert_close((out[b : b + 1], lse[b : b + 1]), expected)


def test_mixed_batch_in_one_call():
    """A prefill chunk, a decode step and a sequence with no query, packed, with every option."""
    k_pages, v_pages, table, seqlens, dense = cache([40, 17, 9], 8)
    cu = torch.tensor([0, 12, 13, 13], dtype=torch.int32)
    q = torch.randn(13, HEADS, DIM)
    options = {"window_size": (20, None), "softcap": 4.0, "sinks": torch.randn(HEADS)}
    options["alibi_slopes"] = torch.rand(HEADS)
    out, stats = onchip.paged_attention(
        q,
        k_pages,
        v_pages,
        table,
        seqlens,
        cu_seqlens_q=cu,
        max_seqlen_q=12,
        return_stats=True,
        **options,
    )
    for b, (k, v) in enumerate(dense):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        expected, expected_stats = onchip.attention(
            q[None, rows], k[None], v[None], causal=True, return_stats=True, **options
        )
        torch.testing.assert_close(out[None, rows], expected)
        torch.testing.assert_close(stats.entropy[None, :, rows], expected_stats.entropy)


@pytest.mark.parametrize("seqlens_q", [[12, 1, 1, 0, 1, 7, 1, 1], [1] * 5, [3, 1, 1, 1, 2]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_split_batch_equals_the_whole_batch(seqlens_q, dtype):
    """Decodes and other sequences are computed apart; each equals a call of its own."""
    lengths = [40 * b + n for b, n in enumerate(seqlens_q)]
    sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "dtype": dtype}
    packed = make_packed(seqlens_q, lengths, **sizes)
    pages = make_pages(packed.k, packed.v, packed.cu_seqlens_k, 8)
    options = {"window_size": (60, None), "alibi_slopes": torch.rand(len(lengths), HEADS)}
    options |= {"causal": True, "sinks": torch.randn(HEADS), "softcap": 9.0, "return_lse": True}
    queries = {"cu_seqlens_q": packed.cu_seqlens_q, "max_seqlen_q": 12}
    got = onchip.paged_attention(packed.q, *pages, **queries, **options)
    assert_accurate(got, *packed[:3], **packed.options, **options)


@pytest.mark.parametrize("kernel", ["pages_cpu", "aten_cpu", "tiled", "reference"])
@pytest.mark.parametrize("dims", [(320, 320), (512, 512), (576, 512)])
@pytest.mark.parametrize("seqlen_q", [1, 30])
def test_wide_heads(seqlen_q, dims, kernel):
    """Latent attention decodes with 576 columns of keys, of which values are 512."""
    if kernel == "pages_cpu" and seqlen_q > 8:
        pytest.skip("pages_cpu decodes")
    sizes = {"num_heads": HEADS, "num_kv_heads": 1, "head_dim": dims[0], "head_dim_v": dims[1]}
    packed = make_packed([seqlen_q] * 3, [33, 31, 70], **sizes, dtype=torch.bfloat16)
    pages = make_pages(packed.k, packed.v, packed.cu_seqlens_k, 8)
    q = packed.q.unflatten(0, (3, seqlen_q))
    options = {"causal": True, "window_size": (40, None), "return_lse": True}
    out, lse = onchip.paged_attention(q, *pages, **options, kernel=kernel)
    got = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    assert_accurate(got, *packed[:3], **packed.options, **options)


@pytest.mark.parametrize("kernel", ["pages_cpu", "tiled"])
@pytest.mark.parametrize("form", FORMS)
def test_wide_heads_over_pages_of_8_bits(form, kernel):
    sizes = {"num_heads": HEADS, "num_kv_heads": 1, "head_dim": 576, "head_dim_v": 512}
    packed = make_packed([1] * 3, [33, 5, 70], **sizes)
    packed = packed._replace(k=on_grid(packed.k, form), v=on_grid(packed.v, form))
    *laid, table, seqlens = make_pages(packed.k, packed.v, packed.cu_seqlens_k, 16)
    laid, scales = quantise_pages(*laid, form)
    options = {"causal": True, "return_lse": True}
    q = packed.q[:, None]
    out, lse = onchip.paged_attention(q, *laid, table, seqlens, **scales, **options, kernel=kernel)
    got = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    assert_accurate(got, *packed[:3], **packed.options, **options)


def test_a_mixed_batch_is_split_if_enough_sequences_decode():
    k_pages, v_pages, table, seqlens, _ = cache([9, 9, 9, 9, 9, 9], 4)
    cu = torch.tensor([0, 1, 4, 5, 6, 6, 7], dtype=torch.int32)
    x = Tensors(torch.randn(7, HEADS, DIM), k_pages, v_pages, cu)
    x = x._replace(page_table=table, cache_seqlens=seqlens)
    problem = paged.describe(x, Options(causal=True), 3)
    decodes, others = paged.split_mixed_batch(problem, x)
    assert decodes.rows.tolist() == [0, 4, 5, 6] and others.rows.tolist() == [1, 2, 3]
    assert decodes.x.q.shape == (4, 1, HEADS, DIM) and not decodes.problem.packed
    assert others.x.cu_seqlens_q.tolist() == [0, 3, 3] and others.problem.batch == 2
    assert not paged.split_mixed_batch(problem._replace(deterministic=True), x)
    few = x._replace(cu_seqlens_q=torch.tensor([0, 1, 3, 4, 5, 7, 7], dtype=torch.int32))
    assert not paged.split_mixed_batch(problem, few)


@pytest.mark.parametrize("kernel", ["aten_cpu", "tiled", "reference"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_tree_of_drafts(kernel, causal):
    """New query i sees new token j iff tree_mask (AND causal); all earlier tokens are visible."""
    lengths, seqlen_q = [5, 40, 17], 5
    k_pages, v_pages, table, seqlens, dense = cache(lengths, 8)
    q = torch.randn(3, seqlen_q, HEADS, DIM)
    tree = (torch.rand(3, seqlen_q, seqlen_q) < 0.5) | torch.eye(seqlen_q, dtype=torch.bool)
    options = {"causal": causal, "sinks": torch.randn(HEADS), "return_lse": True, "kernel": kernel}
    out, lse = onchip.paged_attention(
        q, k_pages, v_pages, table, seqlens, tree_mask=tree, **options
    )
    for b, (k, v) in enumerate(dense):
        mask = torch.ones(seqlen_q, lengths[b], dtype=torch.bool)
        mask[:, lengths[b] - seqlen_q :] = tree[b]
        expected = onchip.attention(q[b : b + 1], k[None], v[None], mask=mask, **options)
        torch.testing.assert_close((out[b : b + 1], lse[b : b + 1]), expected)


def test_a_tree_over_packed_queries_uses_its_corner():
    k_pages, v_pages, table, seqlens, dense = cache([40, 9, 3], 8)
    cu = torch.tensor([0, 4, 5, 5], dtype=torch.int32)
    q, slopes = torch.randn(5, HEADS, DIM), torch.rand(3, HEADS)
    tree = torch.rand(3, 4, 4) < 0.7
    out, lse, stats = onchip.paged_attention(
        q, k_pages, v_pages, table, seqlens, cu_seqlens_q=cu, max_seqlen_q=4, tree_mask=tree,
        alibi_slopes=slopes, return_lse=True, return_stats=True,
    )  # fmt: skip
    for b, (k, v) in enumerate(dense):
        rows, n = slice(int(cu[b]), int(cu[b + 1])), int(cu[b + 1] - cu[b])
        mask = torch.ones(n, len(k), dtype=torch.bool)
        mask[:, len(k) - n :] = tree[b, :n, :n]
        expected = onchip.attention(
            q[None, rows], k[None], v[None], mask=mask, alibi_slopes=slopes[b], causal=True,
            return_lse=True, return_stats=True,
        )  # fmt: skip
        torch.testing.assert_close(out[None, rows], expected[0])
        torch.testing.assert_close(lse[None, :, rows], expected[1])
        torch.testing.assert_close(stats.max_logit[None, :, rows], expected[2].max_logit)


@pytest.mark.parametrize("kernel", [None, "aten_cpu", "tiled", "reference", "paper_v2"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_pages_of_8_bits_meet_the_accuracy_rule(kernel, form, dtype):
    """Mixed batches, by every kernel of the CPU."""
    seqlens_q, lengths = [12, 1, 1, 0, 1, 7, 1], [40, 17, 9, 3, 130, 60, 1]
    sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "dtype": dtype}
    packed = make_packed(seqlens_q, lengths, **sizes)
    packed = packed._replace(k=on_grid(packed.k, form), v=on_grid(packed.v, form))
    *pages, table, seqlens = make_pages(packed.k, packed.v, packed.cu_seqlens_k, 8)
    pages, scales = quantise_pages(*pages, form)
    options = {"causal": True, "return_lse": True, "window_size": (60, None)}
    if kernel in (None, "tiled", "reference"):
        options |= {"softcap": 9.0, "alibi_slopes": torch.rand(7, HEADS)}
    if kernel != "paper_v2":
        options["sinks"] = torch.randn(HEADS)
    queries = {"cu_seqlens_q": packed.cu_seqlens_q, "max_seqlen_q": 12}
    call = queries | scales | options | {"kernel": kernel}
    got = onchip.paged_attention(packed.q, *pages, table, seqlens, **call)
    assert_accurate(got, *packed[:3], **packed.options, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seqlen_q", [1, 3, 9])
def test_pages_of_8_bits_are_values_times_scales(form, seqlen_q):
    """Any scales, of any strides, with NaN in unused slots."""
    k_pages, v_pages, table, seqlens, _ = cache([5, 33, 16, 300], 16)
    (k, v), scales = quantise_pages(k_pages, v_pages, form)
    scales = {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in scales.items()}
    q = torch.randn(4, seqlen_q, HEADS, DIM)
    got = onchip.paged_attention(q, k, v, table, seqlens, **scales, return_lse=True)
    wide = (dequantise(t, s, torch.float64) for t, s in zip((k, v), scales.values(), strict=True))
    want = onchip.paged_attention(q.double(), *wide, table, seqlens, return_lse=True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_a_tree_of_drafts_over_pages_of_8_bits():
    k_pages, v_pages, table, seqlens, _ = cache([5, 40, 17], 8)
    (k, v), scales = quantise_pages(k_pages, v_pages, torch.int8)
    wide = (dequantise(t, s, torch.float32) for t, s in zip((k, v), scales.values(), strict=True))
    q, tree = torch.randn(3, 5, HEADS, DIM), torch.rand(3, 5, 5) < 0.5
    call = {"tree_mask": tree, "return_lse": True, "return_stats": True}
    got = onchip.paged_attention(q, k, v, table, seqlens, **scales, **call)
    want = onchip.paged_attention(q, *wide, table, seqlens, **call)
    torch.testing.assert_close(got, want)


def test_a_cascade_over_pages_of_8_bits_equals_the_plain_call():
    k_pages, v_pages, table, seqlens, _ = cache([48, 61, 50], 4)
    table[1:, :8] = table[0, :8]
    (k, v), scales = quantise_pages(k_pages, v_pages, torch.float8_e4m3fn)
    args = torch.empty(3, HEADS, DIM), k, v
    assert moved(*args).page == 4 * KV_HEADS * 2 * (DIM + 4)
    model = costs(*args)._replace(level=0, query=0, partial=0)
    plan = cascade.plan(table, seqlens, 4, model, seqlen_q=1)
    assert plan.levels
    q = torch.randn(3, 1, HEADS, DIM)
    got = onchip.cascade_attention(q, k, v, table, seqlens, plan=plan, **scales, return_lse=True)
    want = onchip.paged_attention(q, k, v, table, seqlens, **scales, return_lse=True)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kernel", [None, "aten_cpu", "tiled", "reference"])
@pytest.mark.parametrize("form", [None, *FORMS])
@pytest.mark.parametrize("seqlen_q", [1, 3, 9])
def test_latent_values_are_the_first_columns_of_the_keys(kernel, form, seqlen_q):
    k, _, table, seqlens, _ = cache([5, 33, 16, 300], 16)
    scales = {}
    if form is not None:
        (k, _), scales = quantise_pages(k, k, form)
    q, n = torch.randn(4, seqlen_q, HEADS, DIM), DIM - 5
    v = k[..., :n].contiguous()
    call = {"kernel": kernel, "return_lse": True, "window_size": (20, None)}
    want = onchip.paged_attention(q, k, v, table, seqlens, **scales, **call)
    scales.pop("v_scales", None)
    got = onchip.paged_attention(q, k, None, table, seqlens, latent=n, **scales, **call)
    view = onchip.paged_attention(
        q, k, k[..., :n], table, seqlens, **scales, v_scales=scales.get("k_scales"), **call
    )
    assert got[0].shape == (4, seqlen_q, HEADS, n)
    for a, b, c in zip(got, want, view, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(a, c, rtol=0, atol=0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("head_dim, latent", [(96, 64), (320, 256), (576, 512)])
@pytest.mark.parametrize("seqlen_q", [1, 70])
def test_latent_pages_of_16_bits(seqlen_q, head_dim, latent, device):
    """16 heads over one, by the accuracy rule."""
    lengths = [200, 71, 330]
    sizes = {"num_heads": 16, "num_kv_heads": 1, "head_dim": head_dim, "dtype": torch.bfloat16}
    packed = make_packed([seqlen_q] * 3, lengths, device=device, **sizes)
    k_pages, _, table, seqlens = make_pages(packed.k, packed.k, packed.cu_seqlens_k, 16)
    q = packed.q.unflatten(0, (3, seqlen_q))
    call = {"return_lse": True, "softmax_scale": 0.07}
    out, lse = onchip.paged_attention(q, k_pages, None, table, seqlens, latent=latent, **call)
    got = out.flatten(0, 1), lse.movedim(0, 1).flatten(1)
    call |= packed.options | {"causal": True}
    assert_accurate(got, packed.q, packed.k, packed.k[..., :latent], **call)


def test_absorbed_latent_attention():
    """DeepSeek-V3's sizes: keys and values of each head are products of 512 latent columns; 64
    columns of the keys are rotated and common to all heads.
    """
    heads, own, rotated, latent, seqlen = 4, 16, 64, 512, 37
    x = torch.randn(seqlen, latent + rotated, dtype=torch.float64)
    to_k, to_v = torch.randn(2, heads, own, latent, dtype=torch.float64) * latent**-0.5
    q = torch.randn(1, 1, heads, own + rotated, dtype=torch.float64)
    c, common = x[:, :latent], x[:, None, latent:].expand(-1, heads, -1)
    k = torch.cat([torch.einsum("nc,hdc->nhd", c, to_k), common], -1)
    v = torch.einsum("nc,hdc->nhd", c, to_v)
    want = onchip.attention(q, k[None], v[None], causal=True)

    absorbed = torch.cat([torch.einsum("bshd,hdc->bshc", q[..., :own], to_k), q[..., own:]], -1)
    cu = torch.tensor([0, seqlen], dtype=torch.int32)
    pages, _, table, seqlens = make_pages(x[:, None], x[:, None], cu, 16)
    scale = (own + rotated) ** -0.5
    args = absorbed, pages, None, table, seqlens
    out = onchip.paged_attention(*args, latent=latent, softmax_scale=scale)
    got = torch.einsum("bshc,hdc->bshd", out, to_v)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_a_cascade_over_latent_pages_equals_the_plain_call():
    k, _, table, seqlens, _ = cache([48, 61, 50], 4)
    table[1:, :8] = table[0, :8]
    model = costs(torch.empty(3, HEADS, DIM), k, k)._replace(level=0, query=0, partial=0)
    plan = cascade.plan(table, seqlens, 4, model, seqlen_q=1)
    assert plan.levels
    args, call = (torch.randn(3, 1, HEADS, DIM), k, None, table, seqlens), {"return_lse": True}
    got = onchip.cascade_attention(*args, latent=7, plan=plan, **call)
    torch.testing.assert_close(got, onchip.paged_attention(*args, latent=7, **call))


def test_other_scales_of_the_same_pages_are_other_values():
    """Pages that are passed twice, with other scales for the values, are not taken for latent."""
    k, _, table, seqlens, _ = cache([5, 33], 8)
    (k, _), scales = quantise_pages(k, k, torch.int8)
    q, k_scales = torch.randn(2, 1, HEADS, DIM), scales["k_scales"]
    call = lambda v: onchip.paged_attention(
        q, k, v, table, seqlens, k_scales=k_scales, v_scales=2.0 * k_scales
    )
    torch.testing.assert_close(call(k), call(k.clone()))


@pytest.mark.parametrize(
    "match, change",
    [
        ("v_pages is None: give v_pages, or latent=n", {"latent": None}),
        ("v_pages must be None", {"v_pages": torch.zeros(9, 4, KV_HEADS, DIM)}),
        ("v_scales must be None", {"v_scales": torch.zeros(9, 4, KV_HEADS)}),
        ("latent=17 must be between 1 and head_dim=16", {"latent": 17}),
        ("latent must be an int >= 0, got 2.0", {"latent": 2.0}),
        ("latent=0 must be between", {"latent": 0}),
        ("k_pages must be", {"k_pages": [1.0]}),
    ],
)
@pytest.mark.parametrize("function", [onchip.paged_attention, onchip.cascade_attention])
def test_latent_calls_are_checked(function, match, change):
    k, _, table, seqlens, _ = cache([5, 9], 4)
    args = {"q": torch.randn(2, 1, HEADS, DIM), "k_pages": k, "v_pages": None, "latent": 7}
    args |= {"page_table": table, "cache_seqlens": seqlens, **change}
    with pytest.raises(ValueError, match=match):
        function(**args)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_over_pages_of_8_bits_uses_its_dtype(dtype):
    k_pages, v_pages, table, seqlens, _ = cache([5, 33], 8)
    (k, v), scales = quantise_pages(k_pages, v_pages, torch.int8)
    q = torch.randn(2, 1, HEADS, DIM)
    expected = onchip.paged_attention(q.to(dtype), k, v, table, seqlens, **scales)
    with torch.autocast("cpu", dtype):
        got = onchip.paged_attention(q, k, v, table, seqlens, **scales)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_pages_of_8_bits_compile_without_a_graph_break(form):
    k_pages, v_pages, table, seqlens, _ = cache([5, 33], 8)
    (k, v), scales = quantise_pages(k_pages, v_pages, form)
    q = torch.randn(2, 3, HEADS, DIM)
    fn = lambda *args: onchip.paged_attention(*args, **scales, softcap=5.0, return_lse=True)
    compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
    args = (q, k, v, table, seqlens)
    torch.testing.assert_close(compiled(*args), fn(*args), rtol=0, atol=0)


REFUSALS = {
    "no scales": ({"k_scales": None}, r"pages of torch.int8 need k_scales, float32 \(\d+, 8, 2\)"),
    "no scales of v": ({"v_scales": None}, "need v_scales"),
    "scales of 16 bits": (
        {"k_scales": lambda t: t.half()},
        r"k_scales must be float32 \(num_pages, page_size, num_kv_heads\) = .* got torch.float16",
    ),
    "scales per page": ({"v_scales": lambda t: t[:, 0]}, "v_scales must be float32"),
    "one of 16 bits": ({"v": lambda t: t.half()}, "pages that are both torch.float8_e4m3fn or"),
    "scales for 16 bits": (
        {"k": lambda t: t.half(), "v": lambda t: t.half()},
        "got k_pages torch.float16 and v_pages torch.float16",
    ),
    "queries of 8 bits": ({"q": lambda t: t.to(torch.int8)}, "q.dtype=torch.int8 is not one of"),
}


@pytest.mark.parametrize("change, message", REFUSALS.values(), ids=REFUSALS)
def test_invalid_pages_of_8_bits_are_refused(change, message):
    k_pages, v_pages, table, seqlens, _ = cache([5, 33], 8)
    (k, v), scales = quantise_pages(k_pages, v_pages, torch.int8)
    call = {"q": torch.randn(2, 1, HEADS, DIM), "k": k, "v": v} | scales
    for name, how in change.items():
        call[name] = how if how is None else how(call[name])
    q, k, v, k_scales, v_scales = call.values()
    with pytest.raises(ValueError, match=message):
        onchip.paged_attention(q, k, v, table, seqlens, k_scales=k_scales, v_scales=v_scales)


def test_bytes_of_pages_of_8_bits():
    """A key of 128 elements has 132 bytes; in 16 bits it has 256."""
    x = Tensors(torch.empty(1, 1, 8, 128, dtype=torch.bfloat16), *torch.empty(2, 1, 16, 2, 128))
    x = x._replace(page_table=torch.zeros(1, 1, dtype=torch.int32))
    x = x._replace(cache_seqlens=torch.zeros(1, dtype=torch.int32))
    wide = x._replace(k=x.k.bfloat16(), v=x.v.bfloat16())
    scales = {"k_scales": torch.empty(1, 16, 2), "v_scales": torch.empty(1, 16, 2)}
    narrow = x._replace(k=x.k.to(torch.int8), v=x.v.to(torch.int8), **scales)
    describe = lambda x: paged.describe(x, Options(causal=True))
    assert describe(wide).key_bytes == 2 * 256 and describe(narrow).key_bytes == 2 * 132
    assert describe(wide).min_bytes - describe(narrow).min_bytes == 16 * 2 * 2 * (256 - 132)


def test_pages_before_the_window_are_not_read():
    """Their entries in the table may have any value; here the pages that they name hold NaN."""
    k_pages, v_pages, table, seqlens, ((k, v),) = cache([61], 4)
    q = torch.randn(1, 2, HEADS, DIM)
    options = {"window_size": (20, None)}
    hidden = (61 - 2 - 20) // 4
    for page in table[0, :hidden].tolist():
        k_pages[page] = v_pages[page] = float("nan")
    table[0, :hidden] = -7
    got = onchip.paged_attention(q, k_pages, v_pages, table, seqlens, **options)
    torch.testing.assert_close(got, onchip.attention(q, k[None], v[None], causal=True, **options))


def test_compiles_without_a_graph_break():
    k_pages, v_pages, table, seqlens, _ = cache([5, 33], 8)
    q = torch.randn(2, 3, HEADS, DIM)
    fn = lambda *args: onchip.paged_attention(*args, softcap=5.0, return_lse=True)
    compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
    args = (q, k_pages, v_pages, table, seqlens)
    torch.testing.assert_close(compiled(*args), fn(*args), rtol=0, atol=0)


def test_opcheck():
    k_pages, v_pages, table, seqlens, _ = cache([5, 33], 8)
    q, tree = torch.randn(2, 3, HEADS, DIM), torch.ones(2, 3, 3, dtype=torch.bool)
    x = Tensors(q, k_pages.nan_to_num(), v_pages.nan_to_num(), page_table=table)
    x = x._replace(cache_seqlens=seqlens, tree_mask=tree)
    problem = paged.describe(x, Options(causal=True))
    arguments = torch_op._flatten(problem, x, None)
    torch.library.opcheck(torch.ops.onchip.forward.default, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("call", [onchip.paged_attention, onchip.cascade_attention])
def test_autocast_casts_the_queries_and_copies_no_page(call, dtype):
    k_pages, v_pages, table, seqlens, _ = cache([5, 33], 8)
    args = (k_pages.to(dtype), v_pages.to(dtype), table, seqlens)
    q = torch.randn(2, 1, HEADS, DIM)
    expected = call(q.to(dtype), *args)
    with torch.autocast("cpu", torch.bfloat16), Casts() as casts:
        out = call(q, *args)
        assert str(onchip.explain(q, *args[:2], page_table=table, cache_seqlens=seqlens))
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert not any(shape == k_pages.shape for shape in casts.shapes)


class Casts(TorchFunctionMode):
    """Shapes of the tensors that are converted inside the block."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to:
            self.shapes.append(args[0].shape)
        return func(*args, **(kwargs or {}))


def test_autocast_keeps_fp64():
    k_pages, v_pages, table, seqlens, _ = cache([5, 33], 8)
    q, pages = torch.randn(2, 1, HEADS, DIM).double(), (k_pages.double(), v_pages.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert onchip.paged_attention(q, *pages, table, seqlens).dtype == torch.float64
        with pytest.raises(ValueError, match="share a dtype"):
            onchip.paged_attention(q.float(), *pages, table, seqlens)


@pytest.mark.parametrize("name", ["q", "k_pages", "sinks"])
def test_no_gradient_through_pages(name):
    k_pages, v_pages, table, seqlens, _ = cache([5, 9], 4)
    args = {"q": torch.randn(2, 1, HEADS, DIM), "k_pages": k_pages, "v_pages": v_pages}
    args |= {"page_table": table, "cache_seqlens": seqlens, "sinks": torch.zeros(HEADS)}
    args[name] = args[name].clone().requires_grad_()
    with pytest.raises(onchip.UnsupportedError, match=f"{name} requires one"):
        onchip.paged_attention(**args)
    with torch.no_grad():
        assert onchip.paged_attention(**args).isfinite().all()


def test_an_empty_cache_gives_zeros():
    k_pages, v_pages, table, seqlens, _ = cache([0, 3], 4)
    out = onchip.paged_attention(torch.randn(2, 1, HEADS, DIM), k_pages, v_pages, table, seqlens)
    assert out[0].eq(0).all() and not out.isnan().any()


@pytest.mark.parametrize(
    "match, change",
    [
        ("is not in \\[0, num_pages", {"page_table": torch.full((2, 3), 99, dtype=torch.int32)}),
        ("is not in \\[0, num_pages", {"page_table": torch.full((2, 3), -1, dtype=torch.int32)}),
        ("cache_seqlens", {"cache_seqlens": torch.tensor([5, 1000], dtype=torch.int32)}),
        ("cache_seqlens", {"cache_seqlens": torch.tensor([-1, 3], dtype=torch.int32)}),
        ("int32", {"cache_seqlens": torch.tensor([5, 3])}),
        ("batch 2", {"page_table": torch.zeros(3, 3, dtype=torch.int32)}),
        ("k_pages must have rank 4", {"k_pages": torch.zeros(4, 4, DIM)}),
        ("q must be", {"q": torch.zeros(2, HEADS, DIM)}),
        ("torch.Tensor", {"q": None}),
        ("torch.Tensor", {"page_table": [[0]]}),
        ("page_table is on meta", {"page_table": torch.zeros(2, 3, dtype=torch.int32).to("meta")}),
        ("cache_seqlens is on meta", {"cache_seqlens": torch.zeros(2).int().to("meta")}),
        ("page_table must be int32", {"page_table": torch.zeros(2, 3)}),
        ("without slots", {"k_pages": torch.zeros(4, 0, KV_HEADS, DIM)}),
        ("k and v must agree", {"v_pages": torch.zeros(9, 4, KV_HEADS, DIM)}),
        ("multiple of", {"q": torch.zeros(2, 1, 3, DIM)}),
        ("head_dim 8", {"q": torch.zeros(2, 1, HEADS, 8)}),
        ("share a dtype", {"q": torch.zeros(2, 1, HEADS, DIM).half()}),
    ],
)
def test_invalid_tensors_are_refused(match, change):
    k_pages, v_pages, table, seqlens, _ = cache([5, 9], 4)
    args = {"q": torch.randn(2, 1, HEADS, DIM), "k_pages": k_pages, "v_pages": v_pages}
    args |= {"page_table": table, "cache_seqlens": seqlens} | change
    with pytest.raises(ValueError, match=match) as caught:
        onchip.paged_attention(*args.values())
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "match, options",
    [
        (r"tree_mask must be bool .* = \(2, 1, 1\)", {"tree_mask": torch.ones(2, 2, 2).bool()}),
        ("tree_mask must be bool", {"tree_mask": torch.ones(2, 1, 1)}),
        ("tree_mask must be bool", {"tree_mask": True}),
        ("tree_mask is on meta", {"tree_mask": torch.ones(2, 1, 1).bool().to("meta")}),
        ("q must be", {"max_seqlen_q": 1}),
        ("window_size left=-1", {"window_size": (-1, None)}),
        ("sinks must have shape", {"sinks": torch.zeros(3)}),
        ("kernel 'hopper' cannot serve", {"kernel": "hopper"}),
    ],
)
def test_unsupported_options_are_refused(match, options):
    k_pages, v_pages, table, seqlens, _ = cache([5, 9], 4)
    with pytest.raises(ValueError, match=match):
        onchip.paged_attention(
            torch.randn(2, 1, HEADS, DIM), k_pages, v_pages, table, seqlens, **options
        )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("batch", [44, 150])
def test_deterministic_bits_do_not_depend_on_the_batch(batch, seqlen_q, device):
    """Also across batch sizes at which a kernel changes its splits or its grid."""
    lengths = [3 + (97 * b) % (900 if device == "cpu" else 9000) for b in range(batch)]
    packed = make_packed(
        [seqlen_q] * batch, lengths, dtype=torch.bfloat16, device=device,
        num_heads=8, num_kv_heads=4, head_dim=32,
    )  # fmt: skip
    k_pages, v_pages, table, seqlens = make_pages(packed.k, packed.v, packed.cu_seqlens_k, 16)
    q = packed.q.unflatten(0, (batch, seqlen_q))
    call = lambda rows: onchip.paged_attention(
        q[rows], k_pages, v_pages, table[rows], seqlens[rows], deterministic=True, return_lse=True
    )
    together = call(slice(None))
    for rows in (slice(0, 1), slice(43, 44), slice(7, 9), slice(0, 33), slice(1, batch)):
        assert all(torch.equal(a[rows], b) for a, b in zip(together, call(rows), strict=True))


@pytest.mark.gpu
class TestGraphs:
    """One CUDA graph of calls of several shapes: successive calls use the same scratch memory, and
    a kernel may be launched while its predecessor still runs.
    """

    HEADS = ((32, 8), (8, 8), (12, 2))
    LENGTHS = ([16_000], [4096, 1, 700, 2049], [100] * 40)

    def calls(self):
        """Functions () -> (out, lse) that hold their inputs: a graph keeps no tensor alive."""
        for i, (lengths, (heads, kv_heads)) in enumerate(product(self.LENGTHS, self.HEADS)):
            page_size, sizes = (1, 16, 256)[i % 3], {"num_heads": heads, "num_kv_heads": kv_heads}
            seqlen_q = 1 + i % 2
            packed = make_packed(
                [seqlen_q] * len(lengths), lengths, dtype=torch.bfloat16, device="cuda",
                head_dim=128, seed=i, **sizes,
            )  # fmt: skip
            pages = make_pages(packed.k, packed.v, packed.cu_seqlens_k, page_size)
            q = packed.q.unflatten(0, (-1, seqlen_q))
            options = {"return_lse": True, "deterministic": i % 4 == 3}
            yield partial(onchip.paged_attention, q, *pages, **options)
            dense = (x[None, : lengths[0]] for x in (packed.k, packed.v))
            yield partial(onchip.attention, q[:1], *dense, causal=True, **options)

    def test_replays_give_the_bits_of_eager_calls(self):
        calls = list(self.calls())
        expected = [call() for call in calls]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = [calls[i % len(calls)]() for i in range(20)]
        for replay in range(200):
            if replay % 20 == 0:
                [x.fill_(float("nan")) for pair in captured for x in pair]
                torch.cuda.empty_cache()  # memory that was freed too early is unmapped here
            graph.replay()
            again = calls[replay % len(calls)]()  # eager calls in between must not matter
            assert all(map(torch.equal, again, expected[replay % len(calls)]))
            if replay % 20 in (0, 19):
                for i, pair in enumerate(captured):
                    assert all(map(torch.equal, pair, expected[i % len(calls)])), (replay, i)
