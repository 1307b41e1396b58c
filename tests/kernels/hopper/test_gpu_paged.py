"""Pages on Hopper, and heads of a group that share a tile: against the oracle, on the GPU they are
written for.
"""

import math

import pytest
import torch

import onchip
from onchip.kernels.tiles import HOPPER_PAGE_SIZES
from onchip.testing import assert_accurate, make_packed, make_pages, make_qkv

pytestmark = [
    pytest.mark.hopper,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DIMS = [64, 128, 256]


def heads(group_size: int, num_kv_heads: int = 2, dim: int = 128, **sizes) -> dict:
    return {
        "num_heads": group_size * num_kv_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": dim,
        **sizes,
    }


def judge(seqlens_q, seqlens_k, page_size, sizes, dtype=BF16, **options) -> None:
    """The accuracy rule for a packed call over pages; unused slots and pages hold NaN."""
    packed = make_packed(seqlens_q, seqlens_k, dtype=dtype, device="cuda", **sizes)
    pages = make_pages(*packed[1:3], packed.cu_seqlens_k, page_size)
    call = {"cu_seqlens_q": packed.cu_seqlens_q, "max_seqlen_q": max(seqlens_q)}

    def attention(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
        return onchip.paged_attention(
            q, *pages, return_lse=True, kernel="hopper", **call, **options
        )

    assert_accurate(attention, *packed[:3], **{"causal": True} | options, **packed.options)


def paged(batch, seqlen_q, lengths, page_size=16, sizes=None):
    """Queries of one length, the same packed, and pages."""
    sizes = sizes or heads(4)
    packed = make_packed([seqlen_q] * batch, lengths, dtype=BF16, device="cuda", **sizes)
    pages = make_pages(*packed[1:3], packed.cu_seqlens_k, page_size)
    return packed.q.unflatten(0, (batch, seqlen_q)), packed, pages


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("page_size", HOPPER_PAGE_SIZES)
@pytest.mark.parametrize("causal", [True, False])
def test_page_sizes(dim, page_size, causal):
    judge([200, 1, 0, 333], [777, 500, 9, 333], page_size, heads(4, dim=dim), causal=causal)


@pytest.mark.parametrize("group_size", [1, 2, 3, 5, 8, 16, 64])
def test_groups(group_size):
    """Groups that divide the 64 rows of a consumer share a tile; others do not."""
    judge([70, 3, 1], [300, 111, 799], 16, heads(group_size, 2))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("window", [(100, None), (3, 0), (0, 0), (200, 37), (None, 5)])
def test_windows(dim, window):
    judge([130, 1, 40], [700, 300, 41], 16, heads(4, dim=dim), window_size=window, causal=False)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("group_size", [1, 4])
def test_softcap_and_sinks(dim, dtype, group_size):
    sinks = torch.randn(2 * group_size, device="cuda")
    judge([90, 7], [333, 444], 32, heads(group_size, dim=dim), dtype, softcap=5.0, sinks=sinks)


@pytest.mark.parametrize("dim", DIMS)
def test_unrounded_results(dim):
    judge([130, 7], [555, 100], 64, heads(4, dim=dim), out_dtype=FP32)


@pytest.mark.parametrize("dim, dim_v", [(80, 48), (40, 128), (192, 128), (8, 256)])
def test_head_dims_are_padded(dim, dim_v):
    judge([130, 7], [300, 99], 16, heads(2, dim=dim, head_dim_v=dim_v))


def test_more_queries_than_keys():
    judge([100, 64, 5], [37, 0, 3], 16, heads(4))


@pytest.mark.parametrize("group_size", [1, 4])
def test_queries_that_are_not_packed(group_size):
    q, packed, pages = paged(3, 70, [100, 70, 555], sizes=heads(group_size))
    call = {"return_lse": True, "kernel": "hopper"}
    out, lse = onchip.paged_attention(q, *pages, **call)
    flat, flat_lse = onchip.paged_attention(
        packed.q, *pages, cu_seqlens_q=packed.cu_seqlens_q, max_seqlen_q=70, **call
    )
    assert torch.equal(out.flatten(0, 1), flat)
    assert torch.equal(lse.transpose(0, 1).flatten(1), flat_lse)


def test_the_same_bits_as_dense_and_at_any_page_size():
    q, packed, _ = paged(2, 200, [700, 333])
    call = {"return_lse": True, "kernel": "hopper", "causal": True}
    out, lse = onchip.varlen_attention(*packed[:3], **packed.options, **call)
    for page_size in HOPPER_PAGE_SIZES:
        pages = make_pages(*packed[1:3], packed.cu_seqlens_k, page_size, seed=page_size)
        mine, mine_lse = onchip.paged_attention(q, *pages, **call)
        assert torch.equal(mine.flatten(0, 1), out)
        assert torch.equal(mine_lse.transpose(0, 1).flatten(1), lse)


def test_a_sequence_does_not_depend_on_the_batch():
    q, _, pages = paged(4, 90, [800, 90, 300, 1000])
    together = onchip.paged_attention(q, *pages, deterministic=True, kernel="hopper")
    for b in range(4):
        mine = (*pages[:2], pages.page_table[b : b + 1], pages.cache_seqlens[b : b + 1])
        alone = onchip.paged_attention(q[b : b + 1], *mine, deterministic=True, kernel="hopper")
        assert torch.equal(alone[0], together[b])


def test_a_window_does_not_read_the_pages_it_has_left_behind():
    """Their entries may be anything, and the pages they name hold NaN."""
    q, _, pages = paged(1, 64, [1000])
    call = {"window_size": (100, None), "kernel": "hopper"}
    expected = onchip.paged_attention(q, *pages, **call)
    hidden = (1000 - 64 - 100) // 16
    table = pages.page_table.clone()
    for page in table[0, :hidden].tolist():
        pages.k_pages[page] = pages.v_pages[page] = math.nan
    table[0, : hidden // 2] = torch.tensor([-7, 10**9] * hidden)[: hidden // 2].to(table)
    left = onchip.paged_attention(q, *pages[:2], table, pages.cache_seqlens, **call)
    assert torch.equal(left, expected)


def test_bad_tables_and_lengths_give_wrong_rows_not_a_wild_access():
    q, packed, pages = paged(3, 100, [300, 200, 100])
    table = torch.full_like(pages.page_table, 10**9)
    table[1] = -(10**9)
    seqlens = torch.tensor([10**9, -5, 100], dtype=torch.int32, device="cuda")
    onchip.paged_attention(q, *pages[:2], table, seqlens, kernel="hopper")
    wild = torch.tensor([0, 10**6, -(10**6), 77], dtype=torch.int32, device="cuda")
    onchip.paged_attention(
        packed.q, *pages[:2], table, seqlens,
        cu_seqlens_q=wild, max_seqlen_q=100, kernel="hopper",
    )  # fmt: skip
    torch.cuda.synchronize()


def test_strides_of_pages_and_table_are_kept():
    """A pool that holds keys and values of a page side by side, heads first."""
    q, _, (k_pages, v_pages, table, seqlens) = paged(2, 130, [300, 155])
    expected = onchip.paged_attention(q, k_pages, v_pages, table, seqlens, kernel="hopper")
    both = torch.stack([k_pages, v_pages], 1).transpose(2, 3).contiguous().transpose(2, 3)
    wide = torch.cat([table, table], 1)[:, : table.shape[1]]
    got = onchip.paged_attention(q, both[:, 0], both[:, 1], wide, seqlens, kernel="hopper")
    assert torch.equal(got, expected)
    tall = table.t().contiguous().t()
    got = onchip.paged_attention(q, k_pages, v_pages, tall, seqlens, kernel="hopper")
    assert torch.equal(got, expected)


def test_page_strides_that_are_not_whole_slots_are_refused():
    q, _, (k_pages, v_pages, table, seqlens) = paged(1, 512, [600], sizes=heads(4, 8))
    wide = k_pages.new_zeros(len(k_pages), k_pages[0].numel() + 8)
    wide[:, :-8] = k_pages.flatten(1)
    odd = wide[:, :-8].unflatten(1, k_pages.shape[1:])
    with pytest.raises(onchip.UnsupportedError, match="whole slots"):
        onchip.paged_attention(q, odd, v_pages, table, seqlens, kernel="hopper")
    got = onchip.paged_attention(q, odd, v_pages, table, seqlens)
    expected = onchip.paged_attention(q, k_pages, v_pages, table, seqlens, kernel="triton")
    assert torch.equal(got, expected)


def test_a_pool_or_a_table_without_pages_is_no_key():
    q = torch.randn(2, 64, 8, 128, device="cuda", dtype=BF16)
    none = torch.zeros(0, 16, 2, 128, device="cuda", dtype=BF16)
    seqlens = torch.zeros(2, dtype=torch.int32, device="cuda")
    for pages, columns in ((none, 3), (none.new_zeros(4, 16, 2, 128), 0)):
        table = torch.zeros(2, columns, dtype=torch.int32, device="cuda")
        out, lse = onchip.paged_attention(
            q, pages, pages, table, seqlens, return_lse=True, kernel="hopper"
        )
        assert out.eq(0).all() and lse.eq(-torch.inf).all()


def test_no_synchronisation_and_lengths_that_change_between_replays():
    q, _, pages = paged(4, 100, [3000, 5000, 117, 900])
    seqlens = pages.cache_seqlens
    call = lambda: onchip.paged_attention(q, *pages, return_lse=True, kernel="hopper")
    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for lengths in ([3000, 5000, 117, 900], [1, 4999, 16, 0], [0, 0, 0, 0], [2999, 100, 1, 899]):
        seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
        for x in captured:
            x.fill_(math.nan)
        graph.replay()
        assert all(map(torch.equal, captured, call()))


def test_every_run_gives_the_same_bits():
    q, _, pages = paged(3, 300, [4097, 300, 900])
    call = lambda: onchip.paged_attention(q, *pages, return_lse=True, kernel="hopper")
    first = call()
    for _ in range(200):
        assert all(map(torch.equal, first, call()))


def test_a_pool_past_two_billion_elements():
    k_pages = torch.empty(2**17 + 64, 16, 8, 128, device="cuda", dtype=BF16).normal_()
    assert k_pages.numel() > 2**31
    q = torch.randn(1, 100, 32, 128, device="cuda", dtype=BF16)
    table = torch.arange(2**17 + 63, 2**17 - 1, -1, dtype=torch.int32, device="cuda")[None]
    seqlens = torch.tensor([1000], dtype=torch.int32, device="cuda")
    got = onchip.paged_attention(q, k_pages, k_pages, table, seqlens, kernel="hopper")
    k = k_pages[table[0].long()].flatten(0, 1)[None, :1000]
    assert_accurate(got, q, k, k, causal=True)


def test_dispatch_of_chunks_and_single_tokens_to_hopper_and_others_to_triton():
    sizes = heads(4, 8)
    for seqlen_q, kernel in ((512, "hopper"), (1, "hopper"), (8, "triton")):
        q, _, pages = paged(1, seqlen_q, [1000], sizes=sizes)
        x = onchip.explain(
            q, pages.k_pages, pages.v_pages,
            page_table=pages.page_table, cache_seqlens=pages.cache_seqlens,
        )  # fmt: skip
        assert x.plan.kernel == kernel


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("group_size", [2, 3, 8, 64])
@pytest.mark.parametrize("seqlen_q", [1, 2, 7, 15])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (70, 3)}], ids=str)
def test_heads_of_a_group_share_a_tile(dim, group_size, seqlen_q, options):
    """Dense calls, where all queries of a group fit one tile."""
    sizes = heads(group_size, dim=dim, dtype=BF16, device="cuda")
    attend = lambda q, k, v, **o: onchip.attention(q, k, v, kernel="hopper", return_lse=True, **o)
    q, k, v = make_qkv(3, seqlen_q, 333, **sizes)
    sinks = torch.randn(2 * group_size, device="cuda")
    assert_accurate(attend, q, k, v, sinks=sinks, **options)


def test_heads_of_a_group_share_a_tile_of_packed_queries():
    x = make_packed([5, 30, 0, 17], [9, 200, 3, 777], dtype=BF16, device="cuda", **heads(4))
    varlen = lambda q, k, v, **o: onchip.varlen_attention(
        q, k, v, kernel="hopper", return_lse=True, **o
    )
    assert_accurate(varlen, *x[:3], **x.options, causal=True)
    assert_accurate(varlen, *x[:3], **x.options, causal=True, out_dtype=FP32)
