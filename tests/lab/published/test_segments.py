"""Keys in segments give the same result as keys in one piece, and traffic predicts the bytes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import onchip.testing as ot
from onchip.core.problem import Options, Tensors
from onchip.core.validation import describe
from onchip.cost import make_problem
from onchip.lab import traffic
from onchip.lab.published import ledger
from onchip.lab.published.segments import cascade, paged, ring, split_kv
from onchip.lab.traffic import Chip

SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "head_dim_v": 8}
BANDS = [{}, {"causal": True}, {"causal": True, "window_size": (20, None)}]
CHIP = Chip(sram=900)


def same(book, want) -> bool:
    names = ("reads", "writes", "flops", "exps", "other_ops")
    return [getattr(book, x) for x in names] == [getattr(want, x) for x in names]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", BANDS)
@pytest.mark.parametrize("num_splits", [1, 3, 7])
def test_split_kv(dtype, options, num_splits):
    q, k, v = ot.make_qkv(2, 5, 111, **SIZES, dtype=dtype)
    x = Tensors(q, k, v)
    problem = describe(x, Options(**options))
    with ledger(CHIP.sram) as book:
        result = split_kv(problem, x, num_splits)
    ot.assert_accurate(result[:2], q, k, v, **options)
    assert same(book, traffic.split_kv(problem, num_splits, CHIP))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", BANDS)
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_ring(dtype, options, num_ranks):
    q, k, v = ot.make_qkv(2, 63, **SIZES, dtype=dtype)
    x = Tensors(q, k, v)
    problem = describe(x, Options(**options))
    with ledger(CHIP.sram) as book:
        result = ring(problem, x, num_ranks)
    ot.assert_accurate(result[:2], q, k, v, **options)
    assert same(book, traffic.ring(problem, num_ranks, CHIP))
    assert book.reads["k.sent"] == book.writes["k.received"] == (num_ranks - 1) * k.nbytes


def test_ring_of_rows_without_keys():
    q, k, v = ot.make_qkv(1, 40, 10, **SIZES)
    x = Tensors(q, k, v)
    problem = describe(x, Options(causal=True))
    with ledger(CHIP.sram) as book:
        result = ring(problem, x, 4)
    ot.assert_accurate(result[:2], q, k, v, causal=True)
    assert same(book, traffic.ring(problem, 4, CHIP)) and book.writes["o.init"]


@settings(max_examples=40)
@given(
    st.sampled_from([(1, 1), (1, 40), (7, 3), (33, 70), (70, 33)]),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([(None, None), (5, None), (None, 3), (0, 0), (12, 2)]),
    st.sampled_from([100, 900, None]),
)
def test_any_split_is_counted_and_exact(lengths, parts, causal, window_size, sram):
    """More shares than keys or queries, shares without visible pairs, windows across them."""
    q, k, v = ot.make_qkv(1, *lengths, num_heads=2, num_kv_heads=1, head_dim=8)
    x, options = Tensors(q, k, v), {"causal": causal, "window_size": window_size}
    problem = describe(x, Options(**options))
    for run, predict in ((split_kv, traffic.split_kv), (ring, traffic.ring)):
        with ledger(sram) as book:
            result = run(problem, x, parts)
        ot.assert_accurate(result[:2], q, k, v, **options)
        assert same(book, predict(problem, parts, Chip(sram)))


@pytest.mark.parametrize("options", BANDS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_paged(options, page_size):
    lengths = [70, 5, 111]
    packed = ot.make_packed([5] * 3, lengths, **SIZES, dtype=torch.float32)
    pages = ot.make_pages(packed.k, packed.v, packed.cu_seqlens_k, page_size)
    x = Tensors(packed.q.unflatten(0, (3, 5)), *pages[:2])
    x = x._replace(page_table=pages.page_table, cache_seqlens=pages.cache_seqlens)
    problem = make_problem(5, 111, batch=3, **SIZES, dtype=torch.float32, **options)
    with ledger(CHIP.sram) as book:
        out, lse, _ = paged(problem, x)
    packed_lse = lse.transpose(0, 1).flatten(1)
    ot.assert_accurate((out.flatten(0, 1), packed_lse), *packed[:3], **packed.options, **options)
    assert same(book, traffic.paged(problem, page_size, lengths, CHIP))


@pytest.mark.parametrize("options", BANDS[:2])
@pytest.mark.parametrize("prefix", [1, 50])
def test_cascade(options, prefix):
    q, k, v = ot.make_qkv(3, 5, 20 + prefix, **SIZES)
    k[:, :prefix], v[:, :prefix] = k[:1, :prefix].clone(), v[:1, :prefix].clone()
    x = Tensors(q, k[:, prefix:], v[:, prefix:])
    problem = describe(x, Options(**options))
    with ledger(CHIP.sram) as book:
        result = cascade(problem, x, (k[0, :prefix], v[0, :prefix]))
    ot.assert_accurate(result[:2], q, k, v, **options)
    assert same(book, traffic.cascade(problem, prefix, CHIP))


def test_heads_packed_as_rows_share_their_keys():
    problem = make_problem(1, 1000, num_heads=8, num_kv_heads=2, causal=True)
    tiles = Chip(tiles=(16, 64))
    apart, packed = traffic.v2(problem, tiles), traffic.v2(traffic.pack_heads(problem), tiles)
    assert apart.reads["k"] == 4 * packed.reads["k"] and apart.flops == packed.flops
    assert packed.reads["k"] == 2 * 1000 * 64 * 2
    with pytest.raises(ValueError, match="got seqlen_q=2, causal=True"):
        traffic.pack_heads(make_problem(2, 1000, num_heads=8, num_kv_heads=2, causal=True))
