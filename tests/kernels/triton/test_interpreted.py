"""The portable kernels, executed on the CPU by Triton's interpreter and judged by fp64."""

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

import onchip
import onchip.testing as ot
from onchip import masks
from onchip.kernels.tiles import TritonConfig
from tests import random_problems
from tests.interpreted import INTERPRETED, interpreted, mark_slow_except

pytest.importorskip("triton")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
GROUPS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "head_dim_v": 24}
GQA = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "head_dim_v": 24}
MQA = {"num_heads": 3, "num_kv_heads": 1, "head_dim": 40, "head_dim_v": 16}
MOD = masks.mod(lambda b, h, q, k: (q + 2 * k + 3 * h + 5 * b) % 4 != 0)
HOLES = masks.mod(lambda b, h, q, k: (k >= 128) & ((q // 7) % 3 != 0))
DOCUMENT = masks.document(
    torch.tensor([0, 50, 50, 75, 150], dtype=torch.int32),
    torch.tensor([0, 100, 100, 145, 290], dtype=torch.int32),
)
VIDEO = masks.neighborhood((3, 7, 8), (3, 3, 4), tile=(3, 4, 8), text=9)
TILES = masks.sliding_tile((4, 8, 8), (2, 8, 8), (1, 1, 1))
DROPOUT = {"dropout_p": 0.3, "dropout_seed": 2**40 + 17}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Much smaller tiles than on a GPU, so that short sequences have several."""
    if INTERPRETED:
        from onchip.kernels.triton import launch

        config = lambda kernel, use: TritonConfig(32, 64 if use.has_mask else 32, 4, 1)
        monkeypatch.setattr(launch, "triton_config", config)


def _tensors(options: dict, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> dict:
    """The options of a case with their tensors; bias: in which dimensions it does not broadcast."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, generator=generator)
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = draw(heads).requires_grad_()
    if "alibi" in options:
        shape = (batch, heads) if options.pop("alibi") == "batch" else (heads,)
        options["alibi_slopes"] = draw(*shape).abs() / 4
    if "bias" in options:
        own = zip((batch, heads, seqlen_q), options.pop("bias"), strict=True)
        bias = draw(*(n if mine else 1 for n, mine in own), seqlen_k)
        options["bias"] = bias.requires_grad_()
    return options


def _judge(lengths, sizes, dtype, options, batch=1, layout=lambda x: x) -> None:
    q, k, v = map(layout, ot.make_qkv(batch, *lengths, dtype=dtype, **sizes))
    options = _tensors(options, batch, q.shape[2], *lengths)
    mask = options.pop("mask", None)
    if mask is not None:
        mask = masks.build(mask, batch, q.shape[2], *lengths)
        options["mask"] = mask.to_dense()

    def attention(q, k, v, **options):
        options["mask"] = mask
        return onchip.attention(q, k, v, kernel="triton", return_lse=True, **options)

    ot.assert_accurate(attention, q, k, v, grad=True, **options)


heads_first = lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)
DENSE = [
    ((33, 50), {}, FP32, {}),
    ((1, 1), {"head_dim": 1}, FP32, {"causal": True}),
    ((0, 5), {}, FP32, {"sinks": True, "bias": (1, 1, 1)}),
    ((5, 0), {}, BF16, {"sinks": True, "bias": (1, 1, 1), "return_stats": True}),
    ((63, 63), {"head_dim": 64}, BF16, {"causal": True}),
    ((90, 40), GROUPS, BF16, {"causal": True}),
    ((40, 90), GQA, FP16, {"causal": True}),
    ((63, 111), MQA, FP16, {"window_size": (16, 3)}),
    ((100, 60), GQA, FP32, {"window_size": (40, None), "sinks": True}),
    ((60, 100), GQA, FP32, {"window_size": (0, 0)}),
    ((30, 799), {"num_heads": 1}, BF16, {"window_size": (None, 5), "return_stats": True}),
    ((50, 70), GQA, FP32, {"softcap": 5.0, "causal": True}),
    ((50, 70), GQA, BF16, {"alibi": "heads"}),
    ((50, 70), GQA, FP32, {"alibi": "batch", "softcap": 3.0, "sinks": True}, 2),
    ((50, 70), GQA, BF16, {**DROPOUT, "causal": True, "out_dtype": FP32}),
    ((63, 111), GQA, BF16, {"precise_delta": True, "causal": True, "sinks": True}),
    ((50, 40), GQA, FP32, {**DROPOUT, "bias": (0, 1, 1), "softcap": 5.0}),
    ((50, 40), MQA, FP32, {"bias": (0, 0, 0), "causal": True}, 2),
    ((50, 40), MQA, BF16, {"bias": (0, 1, 0), "window_size": (20, 5)}, 2),
    ((50, 40), GQA, FP32, {"bias": (1, 1, 1), "return_stats": True, "sinks": True}, 2),
    ((40, 50), GQA, FP32, {"softmax_scale": -0.7, "return_stats": True}),
    ((40, 50), GQA, FP32, {"softmax_scale": 0.0}),
    ((40, 50), GQA, BF16, {"causal": True}, 2, ot.poison_neighbours),
    ((40, 50), MQA, FP32, {"causal": True}, 2, heads_first),
    ((9, 33), {"head_dim": 3, "head_dim_v": 250}, FP32, {"causal": True}),
    ((150, 290), {"num_heads": 1}, BF16, {"mask": DOCUMENT}),
    ((150, 290), {"num_heads": 1}, FP32, {"mask": DOCUMENT, "causal": True}),
    ((150, 290), {"num_heads": 1}, FP32, {"mask": HOLES, "window_size": (150, 40), "sinks": True}),
    ((70, 290), {"num_heads": 2, "num_kv_heads": 1}, BF16, {"mask": MOD, "bias": (0, 0, 1)}, 2),
    ((140, 100), {"num_heads": 1}, FP16, {"mask": MOD, **DROPOUT, "return_stats": True}),
    ((168, 177), {"num_heads": 1, "head_dim": 16}, BF16, {"mask": VIDEO}),
    ((256, 256), {"num_heads": 1, "head_dim": 16}, FP32, {"mask": TILES}),
]


@interpreted
@pytest.mark.parametrize("case", mark_slow_except((3, 5, 7, 14, 19, 27, 31), DENSE))
def test_dense(case):
    _judge(*case)


WIDE = [  # in 16 bits, up to 512
    ((20, 35), {"head_dim": 320}, BF16, {"causal": True}),
    ((17, 40), {"num_kv_heads": 1, "head_dim": 512}, BF16, {"causal": True, "sinks": True}),
    ((20, 33), {"head_dim": 257, "head_dim_v": 512}, BF16, {"window_size": (9, 3), **DROPOUT}),
    ((20, 33), {"head_dim": 512, "head_dim_v": 64}, FP16, {"softcap": 5.0, "alibi": "heads"}),
    (
        (33, 20),
        {"head_dim": 40, "head_dim_v": 300},
        BF16,
        {"bias": (1, 1, 1), "return_stats": True},
    ),
    ((20, 140), {"num_heads": 1, "head_dim": 400}, FP16, {"mask": MOD}),
]


@interpreted
@pytest.mark.parametrize("case", mark_slow_except((1, 4), WIDE))
def test_wide_heads(monkeypatch, case):
    """With the tiles of a GPU, so that the kernels have the rows of these heads."""
    from onchip.kernels import tiles
    from onchip.kernels.triton import launch

    monkeypatch.setattr(launch, "triton_config", tiles.triton_config)
    _judge(*case)


PACKED = [
    ([63, 1, 0, 40], None, GQA, BF16, {"causal": True}),
    ([5, 30, 1, 7], [0, 63, 50, 3], GROUPS, FP32, {"window_size": (16, 2), "sinks": True}),
    ([40, 17], [30, 60], GQA, FP32, {**DROPOUT, "alibi": "batch", "softcap": 5.0}),
    ([50], [70], GQA, BF16, {"return_stats": True, "out_dtype": FP32}),
    ([33, 0, 17], [40, 5, 30], GQA, FP16, {"precise_delta": True, "sinks": True}),
]


@interpreted
@pytest.mark.parametrize("case", mark_slow_except((0, 1), PACKED))
def test_packed(case):
    seqlens_q, seqlens_k, sizes, dtype, options = case
    packed = ot.make_packed(seqlens_q, seqlens_k, dtype=dtype, **sizes)
    options = _tensors(options, len(seqlens_q), sizes["num_heads"], 0, 0) | packed.options
    attention = lambda *qkv, **o: onchip.varlen_attention(
        *qkv, kernel="triton", return_lse=True, **o
    )
    ot.assert_accurate(attention, *packed[:3], grad=True, **options)


FEW = [
    ([1], [799], {"num_heads": 4, "num_kv_heads": 1, "head_dim": 64}, BF16, {"sinks": True}),
    ([3, 0, 1], [600, 5, 0], GROUPS, FP32, {"causal": True, "sinks": True}),
    ([2, 4], [900, 333], GQA, FP16, {"window_size": (300, 1), "softcap": 5.0, "alibi": "batch"}),
    ([5, 1], [40, 50], MQA, BF16, {"out_dtype": FP32, "causal": True}),
]


@interpreted
@pytest.mark.parametrize("deterministic", (False, True))
@pytest.mark.parametrize("case", mark_slow_except((1, 2), FEW))
def test_few_queries_split_over_programs(monkeypatch, case, deterministic):
    from onchip.kernels.triton import decode, launch

    monkeypatch.setattr(launch, "triton_config", lambda *_: TritonConfig(16, 64, 4, 1))
    monkeypatch.setattr(decode, "SPLIT_KEYS", 64)
    seqlens_q, seqlens_k, sizes, dtype, options = case
    packed = ot.make_packed(seqlens_q, seqlens_k, dtype=dtype, **sizes)
    options = _tensors(options, len(seqlens_q), sizes["num_heads"], 0, 0) | packed.options
    call = {"kernel": "triton", "return_lse": True, "deterministic": deterministic}
    attention = lambda *qkv, **o: onchip.varlen_attention(*qkv, **call, **o)
    ot.assert_accurate(attention, *packed[:3], **options)


@pytest.mark.slow
@interpreted
def test_fixed_splits_make_a_sequence_independent_of_its_batch():
    q, k, v = ot.make_qkv(3, 1, 700, num_heads=2, num_kv_heads=1, dtype=BF16)
    call = lambda *qkv: onchip.attention(*qkv, deterministic=True, kernel="triton")
    together, alone = call(q, k, v), call(q[1:2], k[1:2], v[1:2])
    assert torch.equal(together[1:2], alone)


@interpreted
@pytest.mark.parametrize("distribution", mark_slow_except((1,), ot.DISTRIBUTIONS))
def test_distributions(distribution):
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "distribution": distribution}
    _judge((70, 90), sizes, BF16, {"causal": True, "sinks": True})


@interpreted
@pytest.mark.parametrize(
    "seed", mark_slow_except((1,), (0, -3, 2**62 + 5, torch.tensor(2**33 + 1)))
)
def test_dropout_equals_the_contract(seed):
    q, k, _ = ot.make_qkv(2, 40, 70, num_heads=3, num_kv_heads=1, head_dim=8)
    v = torch.eye(70).view(1, 70, 1, 70).expand(2, -1, -1, -1)
    options = {"dropout_p": 0.4, "dropout_seed": seed, "kernel": "triton"}
    kept = onchip.attention(q, k, v, **options).transpose(1, 2) != 0
    assert torch.equal(kept, ot.philox_keep(seed, 2, 3, 40, 70, 0.4))


def _run(attention, q, k, v, dout: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves)
    return [out, lse, *torch.autograd.grad(out, leaves, dout)]


@interpreted
@pytest.mark.parametrize("dtype", mark_slow_except((1,), (BF16, FP32)))
def test_nan_in_a_neighbouring_sequence(dtype):
    packed = ot.make_packed([33, 20, 47], [40, 21, 47], dtype=dtype, head_dim=16)
    options = packed.options | {"causal": True, "return_lse": True, "kernel": "triton"}
    attention = lambda q, k, v: onchip.varlen_attention(q, k, v, **options)
    dout = torch.randn(100, 2, 16).to(dtype)
    clean = _run(attention, *packed[:3], dout)
    q, k, v = (x.clone() for x in packed[:3])
    k[40:61], v[40:61] = math.nan, math.nan
    dirty = _run(attention, q, k, v, dout)
    rows, keys = [*range(33), *range(53, 100)], [*range(40), *range(61, 108)]
    for name, a, b in zip(("out", "lse", "q", "k", "v"), clean, dirty, strict=True):
        at = (slice(None), rows) if name == "lse" else keys if name in "kv" else rows
        assert torch.equal(a[at], b[at]), name


@interpreted
@pytest.mark.parametrize("dtype", mark_slow_except((0,), (BF16, FP32)))
def test_nan_in_a_block_that_no_row_sees(dtype):
    mask = masks.mod(lambda b, h, q, k: k // 128 != 1)
    q, k, v = ot.make_qkv(1, 20, 300, num_heads=1, head_dim=16, dtype=dtype)
    attention = lambda *qkv: onchip.attention(*qkv, mask=mask, return_lse=True, kernel="triton")
    dout = torch.randn_like(q)
    clean = _run(attention, q, k, v, dout)
    k[:, 128:256], v[:, 128:256] = math.nan, math.nan
    assert all(map(torch.equal, clean, _run(attention, q, k, v, dout)))


@interpreted
def test_bad_offsets_give_wrong_rows_and_no_access_out_of_bounds():
    """The kernels clamp offsets: a GPU cannot check them without a synchronisation."""
    from onchip.core.problem import Options, Tensors
    from onchip.core.validation import describe
    from onchip.kernels.triton.entry import backend

    q, k, v = (x[0] for x in ot.make_qkv(1, 20, 24, head_dim=16))
    bad = torch.tensor([-(10**6), 10**9, 3], dtype=torch.int32)
    x = Tensors(q, k, v, cu_seqlens_q=bad, cu_seqlens_k=bad)
    problem = describe(x, Options(causal=True), (64, 64))
    out, lse, _ = backend.forward(problem, x)
    backend.backward(problem, x, out.nan_to_num(), lse.nan_to_num(), torch.ones_like(out), None)


@interpreted
@pytest.mark.parametrize("tile", mark_slow_except((1,), [(16, 64), (64, 32), (128, 128), (32, 16)]))
def test_tiles_do_not_change_the_result(monkeypatch, tile):
    from onchip.kernels.triton import launch

    monkeypatch.setattr(launch, "triton_config", lambda *_: TritonConfig(*tile, 4, 1))
    options = {"window_size": (60, 10), "softcap": 5.0, "alibi": "heads", "bias": (0, 1, 1)}
    options |= {**DROPOUT, "sinks": True, "return_stats": True, "mask": MOD}
    _judge((40, 70), GQA, FP32, options)


@interpreted
@pytest.mark.parametrize(
    "options", mark_slow_except((1,), [{}, {"causal": True}, {"mask": MOD}, {"sinks": True}])
)
def test_rows_with_only_scores_of_minus_infinity(options):
    """In unmasked as well as in masked tiles: q.k of finite numbers overflows fp32."""
    q, k, v = ot.make_qkv(1, 70, head_dim=8)
    q[..., 0], k[..., 0] = 0.0, 1e20
    q[:, ::7], q[:, ::7, :, 0] = 0.0, -1e20
    sinks = torch.tensor([0.5, -math.inf])
    options = options | {"sinks": sinks} if "sinks" in options else options
    leaves = [t.requires_grad_() for t in (q, k, v)]
    more = {"kernel": "triton", "return_lse": True, "return_stats": True}
    out, lse, stats = onchip.attention(*leaves, **more, **options)
    want = sinks if "sinks" in options else torch.full((2,), -math.inf)
    assert out[:, ::7].eq(0).all() and stats.entropy[:, :, ::7].eq(0).all()
    assert torch.equal(lse[0, :, ::7], want[:, None].expand(2, 10))
    assert stats.max_logit[:, :, ::7].eq(-math.inf).all() and lse[:, :, 1].isfinite().all()
    cotangents = list(map(torch.ones_like, (out, lse)))
    grads = torch.autograd.grad([out, lse], leaves, cotangents)
    assert all(g.isfinite().all() for g in grads) and grads[0][:, ::7].eq(0).all()


@interpreted
@pytest.mark.parametrize("search", mark_slow_except((0,), [(1, 2), (1, 4), (2, 24)]))
def test_random_problems(search):
    seed, count = search
    counts = Counter()
    failures = list(random_problems.search(seed, range(count), counts, kernel="triton"))
    assert not failures, failures
    assert counts["served"] == count, counts
