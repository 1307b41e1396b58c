"""Decoding over pages on the CPU: buckets, tiles and padding do not change results, compared with
fp64.
"""

import pytest
import torch

import onchip
import onchip.testing as ot
from onchip.core import dispatch, paged
from onchip.core.device import DeviceInfo
from onchip.core.problem import Options, Tensors
from onchip.kernels.cpu import pages
from tests.kv8 import FORMS, on_grid, quantise_pages

LENGTHS = [63, 1, 799, 16, 0, 111, 17, 2, 64, 300, 0, 33]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def case(lengths=LENGTHS, seqlen_q=1, page_size=16, **sizes):
    """(queries packed for the oracle, the arguments of a paged call)."""
    sizes = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 40} | sizes
    packed = ot.make_packed([seqlen_q] * len(lengths), lengths, **sizes)
    laid = ot.make_pages(packed.k, packed.v, packed.cu_seqlens_k, page_size)
    return packed, (packed.q.unflatten(0, (-1, seqlen_q)), *laid)


def check(packed, arguments, **options):
    """The kernel, selected by name, keeps the accuracy rule, lse included."""
    options = {"causal": True} | options
    out, lse = onchip.paged_attention(*arguments, **options, return_lse=True, kernel="pages_cpu")
    got = out.flatten(0, 1), lse.movedim(0, 1).flatten(1)
    ot.assert_accurate(got, packed.q, packed.k, packed.v, **options, **packed.options)


OPTIONS = {
    "plain": {},
    "not causal": {"causal": False},
    "window": {"window_size": (20, None)},
    "window on both sides": {"window_size": (9, 2), "causal": False},
    "right alone": {"window_size": (None, 1), "causal": False},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.linspace(-2, 2, 6)},
    "alibi": {"alibi_slopes": torch.linspace(0.01, 0.5, 6)},
    "alibi of each": {"alibi_slopes": torch.linspace(0, 0.5, 6 * len(LENGTHS)).view(-1, 6)},
    "all": {
        **{"window_size": (100, 0), "softcap": 5.0, "softmax_scale": 0.3},
        **{"sinks": torch.linspace(-2, 2, 6), "alibi_slopes": torch.linspace(0.01, 0.5, 6)},
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("seqlen_q", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_option_over_odd_lengths(dtype, seqlen_q, options):
    check(*case(seqlen_q=seqlen_q, dtype=dtype), **options)


@pytest.mark.parametrize("page_size", [1, 5, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (6, 3)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_dims_and_page_sizes(dtype, heads, page_size):
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim_v": 24}
    check(*case(page_size=page_size, dtype=dtype, **sizes))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dims", [(320, 320), (512, 512), (576, 512)])
@pytest.mark.parametrize("seqlen_q, dtype", [(1, torch.bfloat16), (3, torch.float32)])
def test_wide_heads(seqlen_q, dtype, dims, options):
    check(*case(seqlen_q=seqlen_q, dtype=dtype, head_dim=dims[0], head_dim_v=dims[1]), **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seqlen_q, dtype", [(1, torch.bfloat16), (3, torch.float64)])
def test_pages_of_8_bits_keep_the_rule_of_the_queries(seqlen_q, dtype, form, options):
    """Keys and values are exact in 8 bits: only the kernel's own error is left."""
    packed, _ = case(seqlen_q=seqlen_q, dtype=dtype)
    packed = packed._replace(k=on_grid(packed.k, form), v=on_grid(packed.v, form))
    *laid, table, seqlens = ot.make_pages(packed.k, packed.v, packed.cu_seqlens_k, 16)
    laid, scales = quantise_pages(*laid, form)
    q = packed.q.unflatten(0, (-1, seqlen_q))
    options = {"causal": True} | options
    out, lse = onchip.paged_attention(
        q, *laid, table, seqlens, **scales, **options, return_lse=True, kernel="pages_cpu"
    )
    got = out.flatten(0, 1), lse.movedim(0, 1).flatten(1)
    ot.assert_accurate(got, packed.q, packed.k, packed.v, **options, **packed.options)


@pytest.mark.parametrize("distribution", ["normal", "outlier", "sink", "biased"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_enough_rows_for_the_rounding_model(dtype, distribution):
    lengths = [1 + 37 * b % 701 for b in range(24)]
    check(*case(lengths, num_heads=8, head_dim=64, dtype=dtype, distribution=distribution))


@pytest.mark.parametrize("tile, cost", [(1, 0), (999, 0), (40_000, 0), (1 << 20, 1 << 30)])
@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_buckets_and_tiles_of_any_size(monkeypatch, tile, cost, seqlen_q):
    """From one sequence and one key at a time to one bucket for all."""
    lengths = [70, 0, 3, 41, 1, 33]
    monkeypatch.setattr(pages, "_TILE", tile)
    monkeypatch.setattr(pages, "_BUCKET_COST", cost)
    check(*case(lengths, seqlen_q), sinks=torch.zeros(6), window_size=(50, None))


def groups(lengths, seqlen_q=1, **options):
    _, (q, *laid) = case(lengths, seqlen_q)
    x = Tensors(q, *laid[:2], page_table=laid[2], cache_seqlens=laid[3])
    problem = paged.describe(x, Options(causal=True, **options))
    return list(pages._buckets(problem, x))


def test_a_bucket_is_at_most_half_padding_if_keys_cost_more_than_buckets(monkeypatch):
    monkeypatch.setattr(pages, "_BUCKET_COST", 0)
    lengths = [1 + 61 * b % 509 for b in range(40)] + [0, 0]
    buckets = groups(lengths)
    assert sorted(b for group in buckets for b in group.at.tolist()) == list(range(len(lengths)))
    for group in buckets:
        assert len(group.at) * group.longest <= 2 * int(group.seqlen_k.sum())
    assert 2 <= len(buckets) <= 8


def test_copies_are_bounded(monkeypatch):
    monkeypatch.setattr(pages, "_TILE", 100 * 2 * 40)
    for group in groups([30, 60, 50, 20, 99, 700]):
        assert len(group.at) == 1 or len(group.at) * group.longest <= 100
    largest = []
    seen = pages._slots
    monkeypatch.setattr(
        pages, "_slots", lambda x, g, keys: largest.append(keys.numel()) or seen(x, g, keys)
    )
    check(*case([30, 60, 50, 20, 99, 700]))
    assert max(largest) == 100


def test_a_window_reads_only_its_own_keys():
    buckets = groups([700, 650, 90], seqlen_q=2, window_size=(50, None))
    assert [group.longest for group in buckets] == [52]
    assert buckets[0].first.flatten().tolist() == [700 - 52, 650 - 52, 90 - 52]


def test_strided_pages_are_not_copied_whole():
    """Keys and values in one pool: neither is contiguous."""
    packed, (q, k_pages, v_pages, *tables) = case()
    pool = torch.stack([k_pages, v_pages], 1)
    check(packed, (q, pool[:, 0], pool[:, 1], *tables))


def test_without_sequences_or_queries():
    _, (q, *laid) = case([5, 9])
    none = [t[:0] for t in laid[2:]]
    assert onchip.paged_attention(q[:0], *laid[:2], *none, kernel="pages_cpu").shape[0] == 0
    out, lse = onchip.paged_attention(q[:, :0], *laid, return_lse=True, kernel="pages_cpu")
    assert out.shape == (2, 0, 6, 40) and lse.shape == (2, 6, 0)


def test_unrounded_results():
    packed, (q, *laid) = case(dtype=torch.bfloat16)
    out = onchip.paged_attention(q, *laid, out_dtype=torch.float32, kernel="pages_cpu")
    exact = ot.oracle(packed.q, packed.k, packed.v, causal=True, **offsets(packed))
    assert out.dtype == torch.float32
    assert ot.max_error(out.flatten(0, 1), exact.out) < 1e-5


def offsets(packed):
    return {"cu_seqlens_q": packed.cu_seqlens_q, "cu_seqlens_k": packed.cu_seqlens_k}


@pytest.mark.parametrize(
    "match, change",
    [
        ("on the CPU only, not on cuda", {"device": DeviceInfo("cuda")}),
        ("serves paged keys", {"page_size": 0}),
        ("at most 8", {"seqlen_q": 9}),
        ("at most 8", {"packed": True}),
        ("no deterministic", {"deterministic": True}),
        ("no tree_mask", {"has_tree_mask": True}),
        ("no return_stats", {"return_stats": True}),
    ],
)
def test_refusals(match, change):
    _, (q, *laid) = case()
    x = Tensors(q, *laid[:2], page_table=laid[2], cache_seqlens=laid[3])
    problem = paged.describe(x, Options(causal=True))
    device = change.pop("device", DeviceInfo("cpu"))
    assert dispatch.plan(problem, DeviceInfo("cpu")).kernel == "pages_cpu"
    refusal = dispatch.find_refusal(pages.backend, problem._replace(**change), device)
    assert match in (refusal or "")
