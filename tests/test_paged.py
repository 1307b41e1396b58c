"""Pages: attention through a page table equals attention over the gathered cache."""

import pytest
import torch

import onchip

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


def test_an_empty_cache_is_no_key():
    k_pages, v_pages, table, seqlens, _ = cache([0, 3], 4)
    out = onchip.paged_attention(torch.randn(2, 1, HEADS, DIM), k_pages, v_pages, table, seqlens)
    assert out[0].eq(0).all() and not out.isnan().any()


@pytest.mark.parametrize(
    "match, change",
    [
        ("leaves", {"page_table": torch.full((2, 3), 99, dtype=torch.int32)}),
        ("leaves", {"page_table": torch.full((2, 3), -1, dtype=torch.int32)}),
        ("cache_seqlens", {"cache_seqlens": torch.tensor([5, 1000], dtype=torch.int32)}),
        ("cache_seqlens", {"cache_seqlens": torch.tensor([-1, 3], dtype=torch.int32)}),
        ("int32", {"cache_seqlens": torch.tensor([5, 3])}),
        ("batch 2", {"page_table": torch.zeros(3, 3, dtype=torch.int32)}),
        ("k_pages must have rank 4", {"k_pages": torch.zeros(4, 4, DIM)}),
        ("q must be", {"q": torch.zeros(2, HEADS, DIM)}),
        ("torch.Tensor", {"q": None}),
    ],
)
def test_refusals(match, change):
    k_pages, v_pages, table, seqlens, _ = cache([5, 9], 4)
    args = {"q": torch.randn(2, 1, HEADS, DIM), "k_pages": k_pages, "v_pages": v_pages}
    args |= {"page_table": table, "cache_seqlens": seqlens} | change
    with pytest.raises(ValueError, match=match):
        onchip.paged_attention(*args.values())
