"""The contract over the option grid: every kernel, judged by fp64 under the one accuracy rule.

The grids are pairwise: every value of every factor meets every value of every other one in some
case, which is where options that do not know of each other go wrong.
"""

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

import onchip
import onchip.testing as ot
from onchip import masks
from onchip.kernels import tiled
from onchip.kernels.configs import TileConfig

KERNELS = ["tiled", "aten_cpu", "reference"]
NOT_IN_ATEN = ("softcap", "alibi", "bias", "dropout_p", "return_stats")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def pairwise(factors: dict[str, tuple], seed: int = 0) -> list[dict]:
    """Rows of one value per factor that contain every pair of values of every two factors."""
    names = list(factors)
    pairs = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(range(len(factors[a])), range(len(factors[b])))
    }
    draw, rows = random.Random(seed), []
    while pairs:
        (a, x), (b, y) = min(pairs)
        trials = []
        for _ in range(30):
            row = {name: draw.randrange(len(factors[name])) for name in names} | {a: x, b: y}
            trials.append((row, set(itertools.combinations(row.items(), 2)) & pairs))
        row, covered = max(trials, key=lambda trial: len(trial[1]))
        pairs -= covered
        rows.append({name: factors[name][i] for name, i in row.items()})
    return rows


COMMON = {
    "dtype": DTYPES,
    "heads": ((2, 2), (4, 2), (3, 1)),
    "dims": ((64, 64), (40, 24), (16, 72)),
    "causal": (False, True),
    "window_size": ((None, None), (16, 0), (None, 5), (0, 0), (40, 70)),
    "sinks": (False, True),
    "layout": ("contiguous", "heads first", "poisoned"),
    "distribution": ("normal", "outlier", "sink", "biased"),
    "out_dtype": (False, True),
}
EXTRA = {
    "softcap": (0.0, 5.0),
    "alibi": (None, "heads", "batch"),
    "dropout_p": (0.0, 0.3),
    "return_stats": (False, True),
}
DENSE = {
    "lengths": ((63, 63), (111, 63), (63, 111), (1, 799), (1, 1), (0, 5), (5, 0), (150, 290)),
    "batch": (1, 2),
    "mask": (None, "document", "holes", "mod", "dense"),
}
BIAS = {"bias": (None, (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 2, 2))}
PACKED = {
    "lengths": (
        ((63, 1, 0, 111), (63, 1, 0, 111)),
        ((5, 30, 1, 7), (0, 63, 111, 3)),
        ((257,), (130,)),
    )
}


def _layout(x: Tensor, layout: str) -> Tensor:
    """Equal to x, with other strides."""
    if layout == "heads first":
        return x.transpose(-2, -3).contiguous().transpose(-2, -3)
    return ot.poison_neighbours(x) if layout == "poisoned" else x


def _mask(name: str | None, shape: tuple[int, int, int, int]) -> tuple[object, Tensor | None]:
    """A mask as a user gives it, and the same as a dense bool tensor."""
    batch, heads, seqlen_q, seqlen_k = shape
    b, h, i, j = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
    if name == "document":
        cut = lambda n: torch.tensor([0, n // 3, n // 3, n // 2, n], dtype=torch.int32)
        of = lambda x, n: torch.bucketize(x, cut(n)[1:], right=True)
        visible = of(i, seqlen_q) == of(j, seqlen_k)
        return masks.document(cut(seqlen_q), cut(seqlen_k)), visible
    if name == "holes":  # whole blocks, and rows that see nothing
        kept = (j >= 128) & ((i // 7) % 3 != 0)
        return masks.mod(lambda b, h, q, k: (k >= 128) & ((q // 7) % 3 != 0)), kept
    if name == "mod":
        rule = lambda b, h, q, k: (q + 2 * k + 3 * h + 5 * b) % 4 != 0
        return rule, rule(b, h, i, j)
    if name == "dense":
        generator = torch.Generator().manual_seed(5)
        visible = torch.rand(1, heads, seqlen_q, seqlen_k, generator=generator) < 0.4
        return visible, visible
    return None, None


def _options(case: dict, batch: int) -> dict:
    """The options of a case that dense and packed calls share, with their tensors."""
    num_heads = case["heads"][0]
    generator = torch.Generator().manual_seed(3)
    options = {name: case[name] for name in ("causal", "window_size")}
    if case["sinks"]:
        options["sinks"] = torch.randn(num_heads, generator=generator).requires_grad_()
    if case["out_dtype"]:
        options["out_dtype"] = torch.promote_types(case["dtype"], torch.float32)
    for name in ("softcap", "return_stats"):
        if case.get(name):
            options[name] = case[name]
    if case.get("alibi"):
        shape = (batch, num_heads) if case["alibi"] == "batch" else (num_heads,)
        options["alibi_slopes"] = torch.rand(shape, generator=generator) / 4
    if case.get("dropout_p"):
        options |= {"dropout_p": case["dropout_p"], "dropout_seed": 2**40 + 17}
    return options


def _sizes(case: dict) -> dict:
    (num_heads, num_kv_heads), (head_dim, head_dim_v) = case["heads"], case["dims"]
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "dtype": case["dtype"],
        "distribution": case["distribution"],
    }


def _judge_dense(kernel: str, case: dict) -> ot.Report:
    batch = case["batch"]
    q, k, v = ot.make_qkv(batch, *case["lengths"], **_sizes(case))
    q, k, v = (_layout(x, case["layout"]) for x in (q, k, v))
    shape = (batch, q.shape[2], q.shape[1], k.shape[1])
    mask, visible = _mask(case["mask"], shape)
    options = _options(case, batch) | {"mask": visible}
    if case.get("bias"):
        broadcast = (n if full == 2 else 1 for n, full in zip(shape, case["bias"], strict=False))
        bias = torch.randn(*broadcast, shape[3], generator=torch.Generator().manual_seed(4))
        options["bias"] = bias.requires_grad_()

    def attention(q, k, v, **options):
        options["mask"] = mask
        return onchip.attention(q, k, v, kernel=kernel, return_lse=True, **options)

    return ot.assert_accurate(attention, q, k, v, grad=True, **options)


def _judge_packed(kernel: str, case: dict) -> ot.Report:
    packed = ot.make_packed(*map(list, case["lengths"]), **_sizes(case))
    q, k, v = (_layout(x, case["layout"]) for x in packed[:3])
    options = _options(case, len(case["lengths"][0])) | packed.options

    def attention(q, k, v, **options):
        return onchip.varlen_attention(q, k, v, kernel=kernel, return_lse=True, **options)

    return ot.assert_accurate(attention, q, k, v, grad=True, **options)


def _ids(cases: list[dict]) -> list[str]:
    return [str(i) for i in range(len(cases))]


EVERY_DENSE = pairwise(COMMON | EXTRA | DENSE | BIAS)
EVERY_PACKED = pairwise(COMMON | EXTRA | PACKED)
ATEN_DENSE = pairwise(COMMON | DENSE)
ATEN_PACKED = pairwise(COMMON | PACKED)


@pytest.mark.parametrize("kernel", ["tiled", "reference"])
@pytest.mark.parametrize("case", EVERY_DENSE, ids=_ids(EVERY_DENSE))
def test_dense(kernel, case):
    _judge_dense(kernel, case)


@pytest.mark.parametrize("kernel", ["tiled", "reference"])
@pytest.mark.parametrize("case", EVERY_PACKED, ids=_ids(EVERY_PACKED))
def test_packed(kernel, case):
    _judge_packed(kernel, case)


@pytest.mark.parametrize("case", ATEN_DENSE, ids=_ids(ATEN_DENSE))
def test_dense_aten(case):
    _judge_dense("aten_cpu", case)


@pytest.mark.parametrize("case", ATEN_PACKED, ids=_ids(ATEN_PACKED))
def test_packed_aten(case):
    _judge_packed("aten_cpu", case)
