"""Decoding on Hopper, with keys split over programs: against the oracle, on the GPU."""

import math

import pytest
import torch

import onchip
from onchip.core.problem import Options, Tensors
from onchip.core.validation import describe
from onchip.kernels.hopper.entry import splits_keys
from onchip.kernels.tiles import HOPPER_PAGE_SIZES
from onchip.testing import assert_accurate, make_packed, make_pages
from tests.kernels.gpu import DIMS, inputs, late_writer
from tests.kv8 import FORMS, on_grid, quantise_pages

pytestmark = [
    pytest.mark.hopper,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS = [5, 1, 2049, 0, 333, 64, 4000, 16, 17]


def paged(seqlen_q, lengths, page_size=16, num_heads=8, num_kv_heads=2, dim=128, dtype=BF16):
    """Queries of one length, the packed call they are judged by, and pages full of NaN."""
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": dim}
    packed = make_packed([seqlen_q] * len(lengths), lengths, dtype=dtype, device="cuda", **sizes)
    pages = make_pages(*packed[1:3], packed.cu_seqlens_k, page_size)
    return packed.q.unflatten(0, (len(lengths), seqlen_q)), packed, pages


def judge(seqlen_q, lengths, shape=None, form=None, **options) -> None:
    """The accuracy rule; with a form, over 8-bit pages of numbers that these hold."""
    q, packed, pages = paged(seqlen_q, lengths, **shape or {})
    scales = {}
    if form is not None:
        packed = packed._replace(k=on_grid(packed.k, form), v=on_grid(packed.v, form))
        pages = make_pages(*packed[1:3], packed.cu_seqlens_k, pages.k_pages.shape[1])
        (k_pages, v_pages), scales = quantise_pages(*pages[:2], form)
        pages = pages._replace(k_pages=k_pages, v_pages=v_pages)

    def attention(*_, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
        call = {"return_lse": True, "kernel": "hopper"} | scales | options
        out, lse = onchip.paged_attention(q, *pages, **call)
        return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)

    assert_accurate(attention, *packed[:3], **{"causal": True} | options, **packed.options)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("page_size", HOPPER_PAGE_SIZES)
def test_lengths_and_page_sizes(dim, page_size):
    judge(1, LENGTHS, {"dim": dim, "page_size": page_size})


@pytest.mark.parametrize("seqlen_q, group_size", [(1, 1), (1, 3), (1, 16), (2, 8), (3, 5), (16, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_rows_of_a_tile(seqlen_q, group_size, causal):
    shape = {"num_heads": 2 * group_size}
    judge(seqlen_q, [n + seqlen_q for n in LENGTHS], shape, causal=causal)


@pytest.mark.parametrize("window", [(100, None), (3, 0), (0, 0), (2000, 1), (None, 1)])
@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_windows(window, seqlen_q):
    judge(seqlen_q, [n + 4 for n in LENGTHS], window_size=window, causal=False)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_softcap_and_sinks(dim, dtype):
    sinks = torch.randn(8, device="cuda")
    judge(2, [n + 2 for n in LENGTHS], {"dim": dim, "dtype": dtype}, softcap=5.0, sinks=sinks)


@pytest.mark.parametrize("dim", [8, 80, 200])
def test_head_dims_are_padded(dim):
    judge(1, LENGTHS, {"dim": dim}, out_dtype=FP32)


@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (40, 40), (132, 132), (160, 160)])
def test_heads_more_or_fewer_than_processors(heads):
    judge(1, [700, 300], {"num_heads": heads[0], "num_kv_heads": heads[1]})


@pytest.mark.parametrize("batch", [33, 256, 300])
def test_batches_of_every_bucket(batch):
    judge(1, [5000] + [1 + 7 * b % 90 for b in range(batch - 1)])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("page_size", HOPPER_PAGE_SIZES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_pages_of_8_bits(form, page_size, dtype):
    judge(1, LENGTHS, {"page_size": page_size, "dtype": dtype}, form)
    judge(3, [n + 3 for n in LENGTHS], {"page_size": page_size, "dtype": dtype}, form, causal=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [(100, None), (3, 0), (0, 0), (1000, 2)])
def test_windows_over_pages_of_8_bits(form, window):
    judge(2, [n + 4 for n in LENGTHS], None, form, window_size=window)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", [33, 256, 300])
def test_batches_over_pages_of_8_bits(form, batch):
    judge(1, [5000] + [1 + 7 * b % 90 for b in range(batch - 1)], None, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (40, 40), (160, 160)])
@pytest.mark.parametrize("dim", [80, 128])
def test_heads_over_pages_of_8_bits(form, heads, dim):
    shape = {"num_heads": heads[0], "num_kv_heads": heads[1], "dim": dim}
    sinks = torch.randn(heads[0], device="cuda")
    judge(1, [700, 300, 1], shape, form, softcap=5.0, sinks=sinks, out_dtype=FP32)


@pytest.mark.parametrize("form", FORMS)
def test_8_bit_scales_of_very_different_size(form):
    """Keys and values of 2^-20 to 2^20, queries of 1e-3 and 1e6: as near as triton's kernel is."""
    q, k, v = (torch.randn(1, n, 2, 128, device="cuda") for n in (2, 300, 300))
    size = torch.exp2(torch.randint(-20, 21, (1, 300, 2, 1), device="cuda").float())
    q *= torch.tensor([1e-3, 1e6], device="cuda")[:, None, None]
    cu = torch.tensor([0, 300], dtype=torch.int32)
    *pages, table, seqlens = make_pages((k * size / size.max())[0], (v * size)[0], cu, 16)
    (k8, v8), scales = quantise_pages(*pages, form)
    call = {"return_lse": True, "softmax_scale": 1e-4, "out_dtype": FP32, **scales}
    ours, theirs = (
        onchip.paged_attention(q.to(BF16), k8, v8, table, seqlens, kernel=name, **call)
        for name in ("hopper", "triton")
    )
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-4)
    close = 2e-3 * float(theirs[0].abs().max())
    torch.testing.assert_close(ours[0], theirs[0], rtol=2e-3, atol=close)


def test_scales_of_any_strides_and_a_thousand_repeats():
    q, packed, pages = paged(1, [20000, 3, 17777])
    (k8, v8), scales = quantise_pages(*pages[:2], FORMS[0])
    call = {"return_lse": True, "kernel": "hopper"}
    expected = onchip.paged_attention(q, k8, v8, *pages[2:], **scales, **call)
    turned = {n: s.transpose(1, 2).contiguous().transpose(1, 2) for n, s in scales.items()}
    for _ in range(1000):
        got = onchip.paged_attention(q, k8, v8, *pages[2:], **turned, **call)
        assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 17), (1, 5001), (4, 1023), (3, 64)])
def test_dense_keys(dim, seqlen_q, seqlen_k):
    q, k, v = inputs(seqlen_q, seqlen_k, dim, batch=3)
    assert splits_keys(describe(Tensors(q, k, v), Options(causal=True)))
    call = lambda *x, **o: onchip.attention(*x, return_lse=True, kernel="hopper", **o)
    assert_accurate(call, q, k, v, causal=True)
    assert_accurate(call, q, k, v)


def test_a_million_keys():
    q, k, v = inputs(1, 1_000_003, batch=1)
    assert_accurate(lambda *x: onchip.attention(*x, kernel="hopper"), q, k, v)


def test_strides_are_kept():
    q, k, v = inputs(2, 777, batch=2)
    expected = onchip.attention(q, k, v, kernel="hopper")
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(onchip.attention(*heads_first, kernel="hopper"), expected)


def test_a_thousand_repeats_and_no_state_left_between_calls():
    """Merges happen where the last split ends, wherever that is: the bits are the same."""
    q, _, pages = paged(1, [20000, 3, 17777])
    expected = onchip.paged_attention(q, *pages, return_lse=True, kernel="hopper")
    for _ in range(1000):
        got = onchip.paged_attention(q, *pages, return_lse=True, kernel="hopper")
        assert all(map(torch.equal, got, expected))


def as_kv8(pages, form):
    """The same pages of 8 bits, if there is a form, and their scales."""
    if form is None:
        return pages, {}
    (k_pages, v_pages), scales = quantise_pages(*pages[:2], form)
    return pages._replace(k_pages=k_pages, v_pages=v_pages), scales


@pytest.mark.parametrize("form", [None, *FORMS])
def test_graphs_replay_with_other_lengths_and_reused_scratch_memory(form):
    q, _, pages = paged(1, [3000, 5000, 117, 900])
    pages, scales = as_kv8(pages, form)
    call = lambda: onchip.paged_attention(q, *pages, return_lse=True, kernel="hopper", **scales)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
        junk = torch.full((1 << 22,), -1, dtype=torch.int64, device="cuda")
        del junk
        again, _ = call()
    for lengths in ([3000, 5000, 117, 900], [1, 0, 100, 5], [2999, 64, 117, 0]):
        pages.cache_seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
        for _ in range(3):
            graph.replay()
        expected, expected_lse = call()
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
        assert torch.equal(again, expected)


@pytest.mark.parametrize("form", [None, *FORMS])
@pytest.mark.parametrize("changed", [{"lengths"}, {"pages"}, {"lengths", "pages"}, set()])
def test_lengths_and_pages_written_while_the_call_begins(changed, form):
    """The call has begun to copy keys by what it saw before, and must notice."""
    write = late_writer()
    q, _, pages = paged(1, [9000, 0, 3000, 64, 700, 5])
    double = pages._replace(k_pages=2 * pages.k_pages, v_pages=2 * pages.v_pages)
    both = [as_kv8(p, form) for p in (pages, double)]
    k, v = (torch.cat([p[x] for p, _ in both]) for x in (0, 1))
    scales = {name: torch.cat([s[name] for _, s in both]) for name in both[0][1]}
    other = {"lengths": [17, 0, 2999, 0, 699, 5], "pages": len(pages.k_pages)}
    table, seqlens = pages.page_table, pages.cache_seqlens
    lengths = torch.tensor(other["lengths"]).to(seqlens) if "lengths" in changed else seqlens
    moved = table + other["pages"] if "pages" in changed else table
    buffer = torch.cat([seqlens, table.flatten()])
    states = [buffer.clone(), torch.cat([lengths, moved.flatten()])]
    views = buffer[len(seqlens) :].view(table.shape), buffer[: len(seqlens)]
    expected = []
    for state in states:
        buffer.copy_(state)
        expected.append(onchip.paged_attention(q, k, v, *views, kernel="hopper", **scales))
    outs = []
    for i in range(100):
        write[(1,)](buffer, states[i % 2], len(buffer), NANOSECONDS=30_000)
        outs.append(onchip.paged_attention(q, k, v, *views, kernel="hopper", **scales))
    assert all(torch.equal(out, expected[i % 2]) for i, out in enumerate(outs))


def test_two_streams_do_not_interfere():
    q, _, pages = paged(1, [9000, 12345])
    expected = onchip.paged_attention(q, *pages, kernel="hopper")
    streams, outs = [torch.cuda.Stream() for _ in range(3)], []
    torch.cuda.synchronize()
    for i in range(300):
        with torch.cuda.stream(streams[i % 3]):
            outs.append(onchip.paged_attention(q, *pages, kernel="hopper"))
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)


def test_no_synchronisation():
    q, _, pages = paged(1, [3000, 50])
    onchip.paged_attention(q, *pages)
    torch.cuda.set_sync_debug_mode("error")
    try:
        onchip.paged_attention(q, *pages)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_window_does_not_read_the_pages_it_has_left_behind():
    q, _, pages = paged(1, [1000])
    call = {"window_size": (100, None), "kernel": "hopper"}
    expected = onchip.paged_attention(q, *pages, **call)
    hidden = (1000 - 1 - 100) // 16
    table = pages.page_table.clone()
    for page in table[0, :hidden].tolist():
        pages.k_pages[page] = pages.v_pages[page] = math.nan
    table[0, : hidden // 2] = torch.tensor([-7, 10**9] * hidden)[: hidden // 2].to(table)
    left = onchip.paged_attention(q, *pages[:2], table, pages.cache_seqlens, **call)
    assert torch.equal(left, expected)


@pytest.mark.parametrize("form", [None, *FORMS])
def test_bad_tables_and_lengths_give_wrong_rows_not_a_wild_access(form):
    q, _, pages = paged(1, [300, 200, 100])
    pages, scales = as_kv8(pages, form)
    table = torch.full_like(pages.page_table, 10**9)
    table[1] = -(10**9)
    seqlens = torch.tensor([10**9, -5, 100], dtype=torch.int32, device="cuda")
    onchip.paged_attention(q, *pages[:2], table, seqlens, kernel="hopper", **scales)
    torch.cuda.synchronize()


def test_no_key_and_no_page():
    q = torch.randn(2, 1, 8, 128, device="cuda", dtype=BF16)
    none = torch.zeros(0, 16, 2, 128, device="cuda", dtype=BF16)
    table = torch.zeros(2, 3, dtype=torch.int32, device="cuda")
    seqlens = torch.zeros(2, dtype=torch.int32, device="cuda")
    for pages in (none, none.new_full((4, 16, 2, 128), math.nan)):
        out, lse = onchip.paged_attention(
            q, pages, pages, table, seqlens, return_lse=True, kernel="hopper"
        )
        assert out.eq(0).all() and lse.eq(-torch.inf).all()
