"""Paged keys and few queries: by Triton's interpreter on the CPU, in small tiles, and on a GPU if
there is one.
"""

import math

import pytest
import torch

import onchip
import onchip.testing as ot
from onchip.core.problem import Problem
from onchip.cost.hardware import H200
from onchip.cost.prefixes import Occupancy, PrefixCosts
from onchip.fold import cascade
from onchip.kernels.tiles import TritonConfig
from onchip.kernels.triton import entry
from onchip.quant.kv8 import dequantise
from tests.interpreted import DEVICE, INTERPRETED, interpreted_or_gpu, mark_slow_except
from tests.kv8 import FORMS, on_grid, quantise_pages

pytest.importorskip("triton")


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GQA = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "head_dim_v": 24}
LONG = 1 if INTERPRETED else 20  # on a GPU sequences are this much longer


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Much smaller tiles and splits than on a GPU, so that short sequences have several."""
    if INTERPRETED:
        from onchip.kernels.triton import decode, launch

        monkeypatch.setattr(launch, "triton_config", lambda *_: TritonConfig(32, 32, 4, 1))
        monkeypatch.setattr(decode, "SPLIT_KEYS", 32)
        monkeypatch.setattr(decode, "FIXED_KEYS", 64)


def heads(group_size: int, num_kv_heads: int = 1) -> dict:
    return {"num_heads": group_size * num_kv_heads, "num_kv_heads": num_kv_heads, "head_dim": 16}


def tensors(options: dict, batch: int, num_heads: int) -> dict:
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(DEVICE)
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = draw(num_heads)
    if options.pop("alibi", False):
        options["alibi_slopes"] = draw(batch, num_heads).abs() / 4
    return options


def judge(seqlens_q, seqlens_k, page_size, sizes, dtype, options, form=None) -> None:
    """The accuracy rule for a packed call over pages, of 8 bits if there is a form: keys and values
    are then such that these hold them.
    """
    packed = ot.make_packed(seqlens_q, seqlens_k, dtype=dtype, device=DEVICE, **sizes)
    call = {"cu_seqlens_q": packed.cu_seqlens_q, "max_seqlen_q": max(seqlens_q)}
    if form is not None:
        packed = packed._replace(k=on_grid(packed.k, form), v=on_grid(packed.v, form))
    pages = ot.make_pages(*packed[1:3], packed.cu_seqlens_k, page_size)
    if form is not None:
        (k_pages, v_pages), scales = quantise_pages(*pages[:2], form)
        pages, call = pages._replace(k_pages=k_pages, v_pages=v_pages), call | scales

    def attention(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
        return onchip.paged_attention(
            q, *pages, return_lse=True, kernel="triton", **call, **options
        )

    options = tensors({"causal": True} | options, len(seqlens_q), packed.q.shape[1])
    ot.assert_accurate(attention, *packed[:3], **options, **packed.options)


MIXED = [
    ([1, 1, 1], [5, 333, 64], 16, heads(4, 2), BF16, {}),
    ([1], [500 * LONG], 1, heads(8), BF16, {"sinks": True}),
    ([1, 1], [300 * LONG, 1], 256, heads(3), FP16, {}),
    ([1, 1, 1, 1], [400 * LONG, 7, 0, 33], 2, heads(12), FP32, {"sinks": True}),
    ([3, 3], [200 * LONG, 3], 64, GQA, BF16, {}),
    ([5, 2], [99, 3], 16, heads(1, 3), FP32, {"softcap": 5.0, "alibi": True, "sinks": True}),
    ([1, 4], [300 * LONG, 150], 8, GQA, BF16, {"window_size": (70, None)}),
    ([2, 1], [180, 90], 4, GQA, FP32, {"window_size": (40, 3), "causal": False}),
    ([40, 1, 0, 3], [40, 400 * LONG, 9, 77], 16, GQA, BF16, {"sinks": True}),
    ([70, 1], [200, 300], 3, heads(4), FP32, {"window_size": (50, None), "softcap": 3.0}),
    ([33, 2], [20, 50], 16, heads(3), FP32, {"return_stats": True, "sinks": True}),
    ([6, 1], [30, 290 * LONG], 32, heads(2, 2), BF16, {"out_dtype": FP32}),
    ([1, 9], [290, 40], 16, {**heads(2), "head_dim": 40, "head_dim_v": 72}, FP16, {}),
    ([4, 4], [100, 31], 16, GQA, FP32, {"causal": False, "softmax_scale": -0.3}),
]


QUICK = (4, 5, 8, 10)  # cases of MIXED


@interpreted_or_gpu
@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("case", mark_slow_except(QUICK, MIXED))
def test_decode_verify_and_chunks_in_one_call(case, deterministic):
    *sizes, options = case
    judge(*sizes, {**options, "deterministic": deterministic})


WIDE = [
    ([1, 1], [50, 7], 16, {**heads(16), "head_dim": 512}, BF16, {"sinks": True}),
    ([40, 1], [60, 33], 4, {**heads(2), "head_dim": 320, "head_dim_v": 512}, BF16, {}),
    ([5, 5], [60, 9], 16, {**heads(4), "head_dim": 512, "head_dim_v": 64}, FP16, {"softcap": 5.0}),
    ([3, 0], [90, 9], 1, {**heads(40), "head_dim": 300}, FP16, {"window_size": (20, None)}),
    ([1, 1], [50, 7], 16, {**heads(16), "head_dim": 576, "head_dim_v": 512}, BF16, {}),
    ([40, 1], [60, 33], 4, {**heads(2), "head_dim": 530, "head_dim_v": 300}, FP16, {"sinks": True}),
]


@interpreted_or_gpu
@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("case", mark_slow_except((0, 4), WIDE))
def test_wide_heads(monkeypatch, case, deterministic):
    """Their tiles may have fewer rows than a group has queries, which then take several programs.
    The rows are those of a GPU.
    """
    from onchip.kernels import tiles
    from onchip.kernels.triton import launch

    monkeypatch.setattr(launch, "triton_config", tiles.triton_config)
    *sizes, options = case
    judge(*sizes, {**options, "deterministic": deterministic})


KV8 = [(*case, FORMS[i % 2]) for i, case in enumerate(MIXED)]


@interpreted_or_gpu
@pytest.mark.parametrize("case", mark_slow_except((4, 5), KV8))
def test_pages_of_8_bits_keep_the_rule_of_the_queries(case):
    judge(*case)


@interpreted_or_gpu
@pytest.mark.parametrize("batch", [33, pytest.param(300, marks=pytest.mark.slow)])
def test_batches_of_every_bucket(batch):
    """Batches of more than 2,048 sequences run here on Hopper, too."""
    lengths = [300 * LONG] + [1 + 7 * b % 30 * LONG for b in range(batch - 1)]
    judge([1] * batch, lengths, 16, heads(4), BF16, {})


GROUPS, PAGE_SIZES = (1, 3, 4, 8, 12), (1, 2, 16, 64, 256)
PAIRS = [(g, PAGE_SIZES[(i + shift) % 5]) for i, g in enumerate(GROUPS) for shift in (0, 2)]


@interpreted_or_gpu
@pytest.mark.parametrize("pair", mark_slow_except((1, 8), PAIRS))
def test_groups_and_page_sizes(pair):
    group_size, page_size = pair
    judge([1, 2], [150 * LONG, 37], page_size, heads(group_size, 2), BF16, {})


@interpreted_or_gpu
@pytest.mark.parametrize("pair", mark_slow_except((1,), PAIRS[::2]))
def test_groups_and_page_sizes_of_8_bits(pair):
    group_size, page_size = pair
    form = FORMS[(group_size + page_size) % 2]
    judge([1, 2], [90 * LONG, 37], page_size, heads(group_size), FP16, {"sinks": True}, form)


@interpreted_or_gpu
@pytest.mark.parametrize("form", FORMS)
def test_scales_and_queries_of_very_different_magnitudes(form):
    """Keys and values of 2^-20 to 2^20, queries of 1e-3 and 1e6 in bf16: nothing falls below what
    fp16 holds.
    """
    q, k, v = (torch.randn(1, n, 2, 32, device=DEVICE) for n in (2, 90, 90))
    size = torch.exp2(torch.randint(-20, 21, (1, 90, 2, 1), device=DEVICE).float())
    q *= torch.tensor([1e-3, 1e6], device=DEVICE)[:, None, None]
    q, k, v = q.to(BF16), k * size / size.max(), v * size
    cu = torch.tensor([0, 90], dtype=torch.int32)
    *pages, table, seqlens = ot.make_pages(k[0], v[0], cu, 16)
    (k8, v8), scales = quantise_pages(*pages, form)
    call = {"return_lse": True, "softmax_scale": 1e-4, "out_dtype": FP32}
    out, lse = onchip.paged_attention(q, k8, v8, table, seqlens, **scales, kernel="triton", **call)
    wide = (dequantise(t, s, torch.float64) for t, s in zip((k8, v8), scales.values(), strict=True))
    call["out_dtype"] = torch.float64
    tables = table.cpu(), seqlens.cpu()
    wide = [t.cpu() for t in wide]
    want, want_lse = onchip.paged_attention(q.double().cpu(), *wide, *tables, **call)
    torch.testing.assert_close(lse.double().cpu(), want_lse, rtol=1e-5, atol=1e-4)
    close = 2e-3 * float(want.abs().max())
    torch.testing.assert_close(out.double().cpu(), want, rtol=2e-3, atol=close)


@interpreted_or_gpu
def test_an_odd_head_dim_of_8_bits_is_unsupported():
    _, packed, pages = paged(2, 1, [20, 5], 4, heads(2) | {"head_dim": 15})
    (k, v), scales = quantise_pages(*pages[:2], FORMS[0])
    q = packed.q[:, None]
    with pytest.raises(onchip.UnsupportedError, match="by pairs of elements, not head_dim 15"):
        onchip.paged_attention(q, k, v, *pages[2:], **scales, kernel="triton")
    assert onchip.paged_attention(q, k, v, *pages[2:], **scales).isfinite().all()


def paged(batch, seqlen_q, lengths, page_size, sizes, dtype=BF16):
    packed = ot.make_packed([seqlen_q] * batch, lengths, dtype=dtype, device=DEVICE, **sizes)
    pages = ot.make_pages(*packed[1:3], packed.cu_seqlens_k, page_size)
    return packed.q.unflatten(0, (batch, seqlen_q)), packed, pages


@interpreted_or_gpu
def test_dense_queries_equal_packed_ones():
    q, packed, pages = paged(3, 2, [70, 5, 300], 16, GQA)
    call = {"return_lse": True, "kernel": "triton"}
    out, lse = onchip.paged_attention(q, *pages, **call)
    flat, flat_lse = onchip.paged_attention(
        packed.q, *pages, cu_seqlens_q=packed.cu_seqlens_q, max_seqlen_q=2, **call
    )
    assert torch.equal(out.flatten(0, 1), flat)
    assert torch.equal(lse.transpose(0, 1).flatten(1), flat_lse)


@interpreted_or_gpu
def test_fixed_splits_make_a_sequence_independent_of_its_batch():
    lengths, seqlens_q = [150 * LONG, 7, 90 * LONG], [1, 40, 3]
    packed = ot.make_packed(seqlens_q, lengths, dtype=BF16, device=DEVICE, **GQA)
    k_pages, v_pages, table, seqlens = ot.make_pages(*packed[1:3], packed.cu_seqlens_k, 16)
    call = {"deterministic": True, "kernel": "triton"}
    together = onchip.paged_attention(
        packed.q, k_pages, v_pages, table, seqlens,
        cu_seqlens_q=packed.cu_seqlens_q, max_seqlen_q=40, **call,
    )  # fmt: skip
    for b in (0, 2):
        rows = slice(int(packed.cu_seqlens_q[b]), int(packed.cu_seqlens_q[b + 1]))
        cu = torch.tensor([0, seqlens_q[b]], dtype=torch.int32, device=DEVICE)
        alone = onchip.paged_attention(
            packed.q[rows], k_pages, v_pages, table[b : b + 1], seqlens[b : b + 1],
            cu_seqlens_q=cu, max_seqlen_q=seqlens_q[b], **call,
        )  # fmt: skip
        assert torch.equal(together[rows], alone)


@pytest.mark.slow
@interpreted_or_gpu
def test_fixed_splits_give_the_same_bits_for_every_page_size():
    packed = ot.make_packed([1, 3], [150 * LONG, 45], dtype=BF16, device=DEVICE, **GQA)
    results = []
    for page_size in PAGE_SIZES:
        pages = ot.make_pages(*packed[1:3], packed.cu_seqlens_k, page_size, seed=page_size)
        out, lse = onchip.paged_attention(
            packed.q, *pages, cu_seqlens_q=packed.cu_seqlens_q, max_seqlen_q=3,
            deterministic=True, return_lse=True, kernel="triton",
        )  # fmt: skip
        results.append((out, lse))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


@interpreted_or_gpu
@pytest.mark.parametrize("causal", (True, False))
def test_a_tree_of_drafts(causal):
    seqlen_q, lengths = 6, [6, 75, 6 + 130 * LONG]
    q, packed, pages = paged(3, seqlen_q, lengths, 16, GQA, FP32)
    generator = torch.Generator().manual_seed(1)
    tree = torch.rand(3, seqlen_q, seqlen_q, generator=generator) < 0.5
    tree[:, torch.arange(seqlen_q), torch.arange(seqlen_q)] = True
    options = {"causal": causal, "sinks": torch.randn(4).to(DEVICE)}
    got = onchip.paged_attention(
        q, *pages, tree_mask=tree.to(DEVICE), return_lse=True, kernel="triton", **options
    )
    for b, n in enumerate(lengths):
        visible = torch.ones(seqlen_q, n, dtype=torch.bool)
        visible[:, n - seqlen_q :] = tree[b]
        start = int(packed.cu_seqlens_k[b])
        k, v = (x[None, start : start + n] for x in packed[1:3])
        result = tuple(x[b : b + 1] for x in got)
        ot.assert_accurate(result, q[b : b + 1], k, v, mask=visible.to(DEVICE), **options)


@interpreted_or_gpu
def test_a_window_does_not_read_pages_before_it():
    """Entries before the window may be arbitrary, and their pages hold NaN."""
    packed = ot.make_packed([2], [333], dtype=BF16, device=DEVICE, **GQA)
    pages = ot.make_pages(*packed[1:3], packed.cu_seqlens_k, 16)
    call = {"window_size": (100, None), "kernel": "triton"}
    expected = onchip.paged_attention(packed.q[None], *pages, **call)
    hidden = (333 - 2 - 100) // 16
    table = pages.page_table.clone()
    for page in table[0, :hidden].tolist():
        pages.k_pages[page] = pages.v_pages[page] = math.nan
    start = 333 - 2 - 100 - hidden * 16  # slots before the window in the first page that is left
    last = int(table[0, hidden])
    pages.k_pages[last, :start] = pages.v_pages[last, :start] = math.nan
    table[0, :hidden] = torch.tensor([-7, 10**9, 0, 3] * 5)[:hidden]
    left = onchip.paged_attention(packed.q[None], *pages[:2], table, pages.cache_seqlens, **call)
    assert torch.equal(left, expected)


@pytest.mark.slow
@interpreted_or_gpu
def test_bad_values_give_wrong_rows_and_no_access_out_of_bounds():
    """The kernel clamps values to the tensors that a GPU cannot check without a synchronisation."""
    from onchip.core import paged as door
    from onchip.core.problem import Options, Tensors

    packed = ot.make_packed([1, 30, 2], [100, 40, 50], dtype=BF16, device=DEVICE, **GQA)
    k_pages, v_pages, table, _ = ot.make_pages(*packed[1:3], packed.cu_seqlens_k, 16)
    ints = lambda *x: torch.tensor(x, dtype=torch.int32, device=DEVICE)
    table[0] = ints(*([-5, 10**9] * table.shape[1]))[: table.shape[1]]
    x = Tensors(packed.q, k_pages, v_pages, page_table=table)
    x = x._replace(cache_seqlens=ints(-3, 10**9, 70))
    tree = torch.ones(3, 1, 1, dtype=torch.bool, device=DEVICE)
    calls = [
        (x._replace(cu_seqlens_q=ints(0, 33, 0, 33)), 30),
        (x._replace(cu_seqlens_q=ints(-(10**6), 10**9, 3, 5)), 30),
        (x._replace(cu_seqlens_q=ints(0, 30, 31, 33), tree_mask=tree), 1),
    ]
    for call, longest in calls:
        for deterministic in (False, True):
            options = Options(causal=True, deterministic=deterministic)
            entry.backend.forward(door.describe(call, options, longest), call)


@interpreted_or_gpu
def test_a_pool_without_pages_has_no_keys():
    none = torch.empty(0, 16, 2, 16, dtype=BF16, device=DEVICE)
    q = torch.randn(2, 1, 4, 16).to(DEVICE, BF16)
    table, seqlens = (torch.zeros(*n, dtype=torch.int32, device=DEVICE) for n in ((2, 3), (2,)))
    assert onchip.paged_attention(q, none, none, table, seqlens, kernel="triton").eq(0).all()


@interpreted_or_gpu
def test_strides_of_pages_and_page_table():
    """Pages with heads outside slots, keys and values interleaved, and a table that is a view."""
    q, _, (k_pages, v_pages, table, seqlens) = paged(2, 1, [100, 300], 16, heads(2, 2))
    expected = onchip.paged_attention(q, k_pages, v_pages, table, seqlens, kernel="triton")
    both = torch.stack([k_pages, v_pages], 1).transpose(2, 3).contiguous().transpose(2, 3)
    wide = torch.cat([table, table], 1)[:, : table.shape[1]]
    got = onchip.paged_attention(q, both[:, 0], both[:, 1], wide, seqlens, kernel="triton")
    assert torch.equal(got, expected)
    tall = table.t().contiguous().t()
    got = onchip.paged_attention(q, k_pages, v_pages, tall, seqlens, kernel="triton")
    assert torch.equal(got, expected)


PROBLEM = Problem(1, 1, 4096, 32, 8, 128, 128, BF16, BF16, 0.1, causal=True, page_size=16)


@pytest.mark.parametrize("batch", (1, 7, 300))
@pytest.mark.parametrize("seqlen_k", (1, 256, 4096, 2**20))
@pytest.mark.parametrize("deterministic", (False, True))
def test_the_launch_is_large_enough_for_any_lengths(batch, seqlen_k, deterministic):
    """The splits of splits.py, computed here in Python for lengths that the host does not read."""
    from onchip.kernels.triton import decode

    problem = PROBLEM._replace(batch=batch, seqlen_k=seqlen_k, deterministic=deterministic)
    config = TritonConfig(16, 64, 4, 3)
    launch = decode.plan_launch(problem, 1, config, H200)
    units, least, fixed = launch.cut
    generator = torch.Generator().manual_seed(batch)
    for _ in range(50):
        skew = torch.rand(batch, generator=generator) ** float(torch.rand(1) * 30)
        tiles = (-(-(skew * seqlen_k).long() // 64)).clamp(0, -(-seqlen_k // 64))
        if units is None:
            assert launch.num_units >= batch
            continue
        most = fixed or max(least, -(-int(tiles.sum()) // units))
        counts = [max(1, -(-n // max(1, -(-n // max(1, -(-n // most)))))) for n in tiles.tolist()]
        cut = [n for n in counts if n > 1]
        assert sum(counts) <= launch.num_units and sum(cut) <= launch.num_slots
        assert len(cut) <= launch.num_records


@pytest.mark.gpu
def test_no_synchronisation_and_lengths_that_change_between_replays():
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    q, _, pages = paged(4, 1, [3000, 5000, 17, 900], 16, sizes)
    seqlens = pages.cache_seqlens
    call = lambda: onchip.paged_attention(q, *pages, return_lse=True, kernel="triton")
    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for lengths in ([3000, 5000, 17, 900], [1, 4999, 16, 0], [0, 0, 0, 0], [2999, 1, 1, 899]):
        seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
        for x in captured:
            x.fill_(math.nan)
        graph.replay()
        assert all(map(torch.equal, captured, call()))


@pytest.mark.gpu
def test_every_run_gives_the_same_bits():
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    q, _, pages = paged(5, 2, [9000, 5, 17, 900, 4097], 16, sizes)
    call = lambda: onchip.paged_attention(q, *pages, return_lse=True, kernel="triton")
    first = call()
    for _ in range(100):
        assert all(map(torch.equal, first, call()))


@pytest.mark.gpu
def test_a_pool_past_two_billion_elements():
    k_pages = torch.empty(2**17 + 64, 16, 8, 128, device="cuda", dtype=BF16).normal_()
    assert k_pages.numel() > 2**31
    q = torch.randn(1, 1, 32, 128, device="cuda", dtype=BF16)
    table = torch.arange(2**17 + 63, 2**17 - 1, -1, dtype=torch.int32, device="cuda")[None]
    seqlens = torch.tensor([1000], dtype=torch.int32, device="cuda")
    got = onchip.paged_attention(q, k_pages, k_pages, table, seqlens, kernel="triton")
    k = k_pages[table[0].long()].flatten(0, 1)[None, :1000]
    ot.assert_accurate(got, q, k, k)


def stacks(counts, total_q, num_heads=3, dim=24):
    """A state of all queries and stacks of states; of every other stack some queries have no row,
    and the rows are in another order. One query has seen no key anywhere, one none of its own.
    """
    own = torch.randn(total_q, num_heads, dim), torch.randn(num_heads, total_q) * 5
    parts = []
    for i, count in enumerate(counts):
        rows = torch.randperm(total_q)[: total_q * 2 // 3] if i % 2 else torch.arange(total_q)
        out, lse = (
            torch.randn(count, len(rows), num_heads, dim),
            torch.randn(count, num_heads, len(rows)) * 5,
        )
        lse[:, :, rows == 5], out[:, rows == 5] = -math.inf, 0.0
        lse[-1, 1], out[-1, :, 1] = -math.inf, 0.0  # an empty segment
        place = torch.full((total_q,), -1, dtype=torch.int32)
        place[rows] = torch.arange(len(rows), dtype=torch.int32)
        parts.append((out, lse, place if i % 2 else None))
    for b in (5, 7):
        own[0][b], own[1][:, b] = 0.0, -math.inf
    return own, parts


def states_of(own, parts):
    """All of them, of all queries."""
    outs, lses = [own[0]], [own[1]]
    for out, lse, place in parts:
        at = slice(None) if place is None else place.clamp(min=0).long()
        absent = torch.zeros(len(own[0]), dtype=torch.bool) if place is None else place < 0
        outs += out[:, at].masked_fill(absent[:, None, None], 0.0)
        lses += lse[:, :, at].masked_fill(absent, -math.inf)
    return outs, lses


@interpreted_or_gpu
@pytest.mark.parametrize(
    "counts", mark_slow_except((0, 2, 7), [[], [1], [3], [8], [16], [37], [2, 3], [1, 1, 5]])
)
@pytest.mark.parametrize("tokens_first", [False, True])
def test_stacks_of_states_merge_as_in_state_py(counts, tokens_first):
    from onchip.core.state import merge_out_lse
    from onchip.kernels.triton.merge import merge

    torch.manual_seed(len(counts))
    own, parts = stacks(counts, 11)
    outs, lses = states_of(own, parts)
    exact = [out.transpose(0, 1).double() for out in outs], [lse.double() for lse in lses]
    out, lse = merge_out_lse(*exact)
    if tokens_first:
        own = own[0], own[1].t().contiguous().t()
    move = lambda state: tuple(t if t is None else t.to(DEVICE) for t in state)
    got = merge(move(own), [*map(move, parts)], FP32)
    want = out.transpose(0, 1).float().to(DEVICE), lse.float().to(DEVICE)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert got[1].stride() == own[1].stride()
    assert merge(move(own), [*map(move, parts)], BF16)[0].dtype == BF16


@interpreted_or_gpu
@pytest.mark.parametrize(
    "spans", [[(0, 13)], [(5, 13), (0, 1)], [(0, 13), (2, 6), (12, 13), (4, 5)]]
)
@pytest.mark.parametrize("head_dim_v", [20, 64, 300])
def test_states_of_some_tokens_fold_in_place_as_in_state_py(spans, head_dim_v):
    """Rows that saw no key in some of them, or in all; entries of a batch."""
    from onchip.core.state import merge_out_lse
    from onchip.kernels.triton.entry import fold

    generator = torch.Generator().manual_seed(len(spans))
    draw = lambda *shape: torch.randn(shape, generator=generator)

    def state(tokens):
        lse = draw(2, 3, tokens).mul(3).masked_fill(draw(2, 3, tokens) < -0.5, -math.inf)
        out = draw(2, tokens, 3, head_dim_v)
        return out.masked_fill((lse == -math.inf).transpose(1, 2)[..., None], 0.0), lse

    own, parts = state(13), [(lo, *state(hi - lo)) for lo, hi in spans]
    outs, lses = [own[0].transpose(1, 2).double()], [own[1].double()]
    for start, out, lse in parts:
        around = start, 13 - start - out.shape[1]
        pad = torch.nn.functional.pad
        outs.append(pad(out.double(), (0, 0, 0, 0, *around)).transpose(1, 2))
        lses.append(pad(lse.double(), around, value=-math.inf))
    out, lse = merge_out_lse(outs, lses)
    got, first = (own[0].clone().to(DEVICE), own[1].double().to(DEVICE)), (0, *own)
    there = [(start, *(t.to(DEVICE) for t in pair)) for start, *pair in (first, *parts)]
    fold(got, there[1:])
    want = out.transpose(1, 2).float().to(DEVICE), lse.to(DEVICE)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    afresh = tuple(torch.full_like(t, math.nan) for t in got)
    fold(afresh, there[:4], fresh=True)
    fold(afresh, there[4:])
    torch.testing.assert_close(afresh, want, rtol=1e-5, atol=1e-6)


@interpreted_or_gpu
def test_rows_that_are_not_in_a_stack_do_not_change():
    """A stack of NaN states with rows for two queries: the other queries keep their own state."""
    from onchip.kernels.triton.merge import merge

    own = torch.randn(9, 2, 40, device=DEVICE), torch.randn(2, 9, device=DEVICE)
    stack = torch.full((3, 2, 2, 40), math.nan, device=DEVICE)
    place = torch.full((9,), -1, dtype=torch.int32, device=DEVICE)
    place[4], place[8] = 1, 0
    out, lse = merge(own, [(stack, stack[..., 0], place)], FP32)
    kept = place < 0
    torch.testing.assert_close(out[kept], own[0][kept])
    torch.testing.assert_close(lse[:, kept], own[1][:, kept])
    assert out[~kept].isnan().all() and lse[:, ~kept].isnan().all()


@interpreted_or_gpu
def test_a_cascade_of_segments():
    """Pairs that share 4 and 2 pages, read once and in four segments, only by these kernels."""
    q, _, (k_pages, v_pages, table, seqlens) = paged(4, 1, [77, 70, 45, 41], 16, GQA, FP32)
    table[1, :4], table[3, :2] = table[0, :4], table[2, :2]
    programs = Occupancy(16, num_kv_heads=2, tile_queries=2)
    model = PrefixCosts(100, 0, 0, 0, occupancy=programs)
    plan = cascade.plan(table.cpu(), seqlens.cpu(), 16, model).to(DEVICE)
    assert [level.segments for level in plan.levels] == [4]
    args, options = (q, k_pages, v_pages), {"kernel": "triton", "sinks": torch.randn(4).to(DEVICE)}
    own, merge = plan.own(table, seqlens), entry.merge
    attend = onchip.paged_attention
    got = cascade.run(plan, attend, q, args[1:], own, merge=merge, **options)
    want = attend(*args, table, seqlens, return_lse=True, **options)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
