"""The contract over the option grid: every kernel, compared with fp64 by the accuracy rule.

The grids are pairwise: every value of every factor meets every value of every other one in some
case. Bugs of two options that interact show in such a case.
"""

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

import onchip
import onchip.lab  # registers the kernels of the papers
import onchip.testing as ot
from onchip import masks
from onchip.core.dispatch import get_backend
from onchip.core.problem import DIFFERENTIABLE, LEARNED, UNDECLARED, Problem
from onchip.kernels.cpu import tile_loop
from onchip.kernels.tiles import TileConfig

KERNELS = ["tiled", "aten_cpu", "reference"]
PAPERS = ["paper_v0", "paper_v1", "paper_v2", "paper_v4"]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NARROW = ((64, 64), (40, 24), (16, 72))
WIDE = ((320, 320), (512, 512), (576, 512))  # the last: latent attention, and the limits


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
    "dims": (*NARROW, *WIDE),
    "causal": (False, True),
    "window_size": ((None, None), (16, 0), (None, 5), (0, 0), (40, 70)),
    "sinks": (False, True),
    "layout": ("contiguous", "heads first", "poisoned"),
    "distribution": ("normal", "outlier", "sink", "biased"),
    "out_dtype": (False, True),
    "precise_delta": (False, True),
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
    """A mask as a user passes it, and the same mask as a dense bool tensor."""
    batch, heads, seqlen_q, seqlen_k = shape
    b, h, i, j = torch.meshgrid(*map(torch.arange, shape), indexing="ij")
    if name == "document":
        cut = lambda n: torch.tensor([0, n // 3, n // 3, n // 2, n], dtype=torch.int32)
        of = lambda x, n: (x[..., None] >= cut(n)[1:]).sum(-1)
        visible = of(i, seqlen_q) == of(j, seqlen_k)
        return masks.document(cut(seqlen_q), cut(seqlen_k)), visible
    if name == "holes":  # whole blocks, and rows without keys
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
    """The options of a case for dense and packed calls, with their tensors."""
    num_heads = case["heads"][0]
    generator = torch.Generator().manual_seed(3)
    options = {name: case[name] for name in ("causal", "window_size")}
    if case["sinks"]:
        options["sinks"] = torch.randn(num_heads, generator=generator).requires_grad_()
    if case["out_dtype"]:
        options["out_dtype"] = torch.promote_types(case["dtype"], torch.float32)
    for name in ("softcap", "return_stats", "precise_delta"):
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
PUBLISHED = COMMON | {"dims": NARROW, "sinks": (False,), "dropout_p": (0.0, 0.3)}
PAPER_DENSE = pairwise(PUBLISHED | DENSE)
PAPER_PACKED = pairwise(PUBLISHED | PACKED)


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


def _published(kernel: str, case: dict) -> dict:
    """v4 has neither fp64 nor dropout."""
    if kernel != "paper_v4":
        return case
    dtype = torch.float32 if case["dtype"] == torch.float64 else case["dtype"]
    return case | {"dtype": dtype, "dropout_p": 0.0}


@pytest.mark.parametrize("kernel", PAPERS)
@pytest.mark.parametrize("case", PAPER_DENSE, ids=_ids(PAPER_DENSE))
def test_dense_papers(kernel, case):
    _judge_dense(kernel, _published(kernel, case))


@pytest.mark.parametrize("kernel", PAPERS)
@pytest.mark.parametrize("case", PAPER_PACKED, ids=_ids(PAPER_PACKED))
def test_packed_papers(kernel, case):
    _judge_packed(kernel, _published(kernel, case))


GRIDS = {
    **dict.fromkeys(("tiled", "reference"), [*EVERY_DENSE, *EVERY_PACKED]),
    "aten_cpu": [*ATEN_DENSE, *ATEN_PACKED],
    **dict.fromkeys(PAPERS, [*PAPER_DENSE, *PAPER_PACKED]),
}
# Factors of the grids, and arguments of calls, that are options of Problem under another name.
FIELDS = {
    **{"sinks": "has_sinks", "mask": "has_mask", "bias": "has_bias"},
    **dict.fromkeys(("alibi", "alibi_slopes"), "has_alibi"),
    "dropout_seed": "dropout_p",
}
# Tested below, in test_score_mod.py, and in tests/kernels/test_parts_of_calls.py.
ELSEWHERE = {
    "deterministic",
    "reproducible",
    "has_positions",
    "first_head",
    "wide_grads",
    "score_mod",
}


@pytest.mark.parametrize("kernel", GRIDS)
def test_the_grids_have_every_option_that_a_kernel_declares(kernel):
    unused = (None, False, (None, None))
    tested = {"packed"}
    for case in GRIDS[kernel]:
        used = [x for x, value in _published(kernel, case).items() if value not in unused]
        tested |= {FIELDS.get(x, x) for x in used}
    tested &= Problem._field_defaults.keys() - UNDECLARED
    assert tested == get_backend(kernel).options - ELSEWHERE


@pytest.mark.parametrize("kernel", GRIDS)
def test_deterministic_calls_repeat_their_bits(kernel):
    q, k, v = (t.requires_grad_() for t in ot.make_qkv(2, 63, 111, num_heads=4, num_kv_heads=2))

    def run():
        out = onchip.attention(q, k, v, causal=True, deterministic=True, kernel=kernel)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v))

    assert all(map(torch.equal, run(), run()))


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 5.0},
        {"alibi_slopes": torch.rand(2)},
        {"bias": torch.randn(1, 1, 1, 7)},
        {"dropout_p": 0.1, "dropout_seed": 1},
        {"return_stats": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_named_kernel_serves_or_refuses(options):
    q, k, v = ot.make_qkv(1, 7)
    with pytest.raises(onchip.UnsupportedError, match="aten_cpu"):
        onchip.attention(q, k, v, kernel="aten_cpu", **options)


LONG = [
    {"seqlen": 799, "dtype": torch.bfloat16, "causal": True},
    {"seqlen": 1023, "dtype": torch.float32, "window_size": (255, 0)},
    {"seqlen": 1023, "dtype": torch.float16, "mask": masks.bigbird(128, 128, 1)},
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", LONG, ids=_ids(LONG))
@pytest.mark.parametrize("distribution", ["normal", "outlier"])
def test_many_tiles(kernel, case, distribution):
    options = dict(case)
    sizes = {"num_kv_heads": 1, "dtype": options.pop("dtype"), "distribution": distribution}
    q, k, v = ot.make_qkv(1, options.pop("seqlen"), **sizes)
    attention = lambda *qkv, **o: onchip.attention(*qkv, kernel=kernel, return_lse=True, **o)
    ot.assert_accurate(attention, q, k, v, grad=True, **options)


@pytest.mark.parametrize("kernel", KERNELS + PAPERS)
@pytest.mark.parametrize(
    "head_dim, head_dim_v",
    [(1, 256), (3, 254), (255, 2), (256, 1), (257, 511), (575, 3), (576, 1), (1, 512)],
)
def test_extreme_head_dims(kernel, head_dim, head_dim_v):
    q, k, v = ot.make_qkv(1, 9, 33, head_dim=head_dim, head_dim_v=head_dim_v)
    attention = lambda *qkv, **o: onchip.attention(*qkv, kernel=kernel, return_lse=True, **o)
    ot.assert_accurate(attention, q, k, v, grad=True, causal=True)


@pytest.mark.parametrize("kernel", KERNELS + PAPERS)
def test_batch_zero(kernel):
    q, k, v = (x.requires_grad_() for x in ot.make_qkv(0, 5, 7))
    out, lse = onchip.attention(q, k, v, return_lse=True, kernel=kernel)
    assert out.shape == q.shape and lse.shape == (0, 2, 5)
    (out.sum() + lse.sum()).backward()
    assert q.grad.shape == q.shape


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_slices_of_one_projection(kernel, dtype):
    fused = ot.make_qkv(2, 33, num_heads=6, head_dim=16, dtype=dtype)[0].requires_grad_()
    q, k, v = fused[:, :, :4], fused[:, :, 4:5], fused[:, :, 5:]
    out = onchip.attention(q, k, v, causal=True, kernel=kernel)
    (got,) = torch.autograd.grad(out.sum(), fused)  # a dout of stride 0
    leaf = fused.detach().double().requires_grad_()
    exact = ot.oracle(leaf[:, :, :4], leaf[:, :, 4:5], leaf[:, :, 5:], causal=True)
    (want,) = torch.autograd.grad(exact.out.sum(), leaf)
    assert ot.max_error(got, want) <= 8 * torch.finfo(dtype).eps * want.abs().max()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_return_order_shapes_and_dtypes(kernel, dtype):
    q, k, v = ot.make_qkv(2, 5, 7, num_heads=4, num_kv_heads=2, head_dim_v=8, dtype=dtype)
    out, lse = onchip.attention(q, k, v, return_lse=True, kernel=kernel)
    assert out.shape == (2, 5, 4, 8) and out.dtype == dtype
    assert lse.shape == (2, 4, 5) and lse.dtype == torch.promote_types(dtype, torch.float32)
    alone = onchip.attention(q, k, v, kernel=kernel)
    if kernel == "aten_cpu" and dtype.itemsize == 2:  # with lse, P is not rounded
        assert ot.max_error(alone, out) <= 2 * ot.ulp(dtype, out.abs().max())
    else:
        assert torch.equal(alone, out)
    if kernel != "aten_cpu":
        triple = onchip.attention(q, k, v, return_lse=True, return_stats=True, kernel=kernel)
        pair = onchip.attention(q, k, v, return_stats=True, kernel=kernel)
        assert torch.equal(triple[1], lse) and torch.equal(triple[2].entropy, pair[1].entropy)
        assert pair[1].max_logit.shape == pair[1].entropy.shape == lse.shape


def test_kernels_agree():
    q, k, v = ot.make_qkv(2, 257, 257, dtype=torch.bfloat16, distribution="outlier")
    exact = ot.oracle(q, k, v, causal=True).out
    out = {x: onchip.attention(q, k, v, causal=True, kernel=x) for x in KERNELS}
    ot.compare(out["tiled"], out["reference"], exact)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
    ot.compare(out["aten_cpu"], sdpa.transpose(1, 2), exact)


def _kept(out: Tensor) -> Tensor:
    """The keys that dropout kept, read from out: with v = identity, out is the probabilities."""
    return out.transpose(1, 2) != 0


@pytest.mark.parametrize("tile", [TileConfig(32, 48), TileConfig(7, 33), TileConfig(512, 2048)])
def test_dropout_is_the_same_for_any_tile_and_kernel(monkeypatch, tile):
    monkeypatch.setattr(tile_loop, "tiled_config", lambda planes: tile)
    q, k, _ = ot.make_qkv(2, 50, 70, num_heads=3, num_kv_heads=1, head_dim=8)
    v = torch.eye(70).view(1, 70, 1, 70).expand(2, -1, -1, -1)
    for seed in (0, 7, -3, 2**62 + 5, torch.tensor(2**33 + 1)):
        options = {"dropout_p": 0.4, "dropout_seed": seed}
        want = ot.philox_keep(seed, 2, 3, 50, 70, 0.4)
        for kernel in ("tiled", "reference"):
            out = onchip.attention(q, k, v, kernel=kernel, **options)
            assert torch.equal(_kept(out), want)


@pytest.mark.parametrize("kernel", ["tiled", "reference"])
def test_dropout_of_a_sequence_does_not_depend_on_the_layout(kernel):
    q, k, v = ot.make_qkv(3, 17, 23)
    options = {"dropout_p": 0.5, "dropout_seed": 9, "kernel": kernel}
    dense = onchip.attention(q, k, v, **options)
    cu_q, cu_k = (torch.arange(4, dtype=torch.int32) * n for n in (17, 23))
    flat = (x.flatten(0, 1) for x in (q, k, v))
    packed = onchip.varlen_attention(*flat, cu_q, cu_k, 17, 23, **options)
    torch.testing.assert_close(packed, dense.flatten(0, 1))
    per_head = torch.ones(3, 2, 17, 23, dtype=torch.bool)
    torch.testing.assert_close(onchip.attention(q, k, v, mask=per_head, **options), dense)


def test_a_drawn_dropout_seed_follows_the_generator_and_serves_the_backward():
    q, k, v = ot.make_qkv(1, 33, 40, dtype=torch.float64)
    v.requires_grad_()
    torch.manual_seed(3)
    out = onchip.attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(out, onchip.attention(q, k, v, dropout_p=0.5))
    assert not torch.equal(out, onchip.attention(q, k, v, dropout_p=0.5))
    dout = torch.randn_like(out)
    (dv,) = torch.autograd.grad(out, v, dout)  # out = P v for one P, so <dout, out> = <dv, v>
    torch.testing.assert_close((dout * out).sum(), (dv * v).sum())


@pytest.mark.parametrize("tile", [TileConfig(32, 48), TileConfig(7, 33)])
def test_tiles_do_not_change_the_result(monkeypatch, tile):
    case = {"dtype": torch.float64, "heads": (4, 2), "dims": (8, 5), "lengths": (150, 290)}
    case |= {"causal": True, "window_size": (190, None), "sinks": True, "layout": "contiguous"}
    case |= {"distribution": "normal", "out_dtype": False, "batch": 2, "mask": "holes"}
    case |= {"softcap": 5.0, "alibi": "batch", "dropout_p": 0.3, "return_stats": True}
    monkeypatch.setattr(tile_loop, "tiled_config", lambda planes: tile)
    _judge_dense("tiled", case | {"bias": (2, 1, 2)})


HOLES = masks.mod(lambda b, h, q, k: (q + k + h + b) % 3 != 0)
GRADCHECKS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (1, 1)},
    "softmax_scale": {"softmax_scale": -0.7},
    "softcap": {"softcap": 0.8},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1])},
    "alibi per batch": {"alibi_slopes": torch.tensor([[0.5, 0.1], [0.2, -0.3]])},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 8},
    "mask": {"mask": HOLES},
    "deterministic": {"deterministic": True},
    "bias": {"bias": (2, 2, 4, 5)},
    "bias of keys": {"bias": (1, 1, 1, 5)},
    "bias of heads": {"bias": (1, 2, 4, 5)},
    "bias of batch": {"bias": (2, 1, 1, 5)},
    "sinks": {"sinks": (2,)},
    "all": {
        "causal": True,
        "window_size": (3, None),
        "softcap": 0.8,
        "alibi_slopes": torch.tensor([0.5, 0.1]),
        "dropout_p": 0.4,
        "dropout_seed": 8,
        "mask": HOLES,
        "bias": (2, 1, 4, 5),
        "sinks": (2,),
    },
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", GRADCHECKS)
@pytest.mark.parametrize("dims", [(3, 3), *WIDE])
def test_gradcheck(kernel, name, dims):
    options = dict(GRADCHECKS[name])
    refused = Problem._field_defaults.keys() - UNDECLARED - get_backend(kernel).options
    if refused & {FIELDS.get(x, x) for x in options}:
        pytest.skip(f"{kernel} refuses these options")
    generator = torch.Generator().manual_seed(0)
    learned = [x for x in LEARNED if x in options]
    leaves = [torch.randn(options.pop(x), generator=generator).double() for x in learned]
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": dims[0], "head_dim_v": dims[1]}
    qkv = ot.make_qkv(2, 4, 5, **sizes, dtype=torch.float64)

    def attention(q, k, v, *rest):
        more = dict(zip(learned, rest, strict=True))
        call = {"return_lse": True, "kernel": kernel}
        out, lse = onchip.attention(q, k, v, **options, **more, **call)
        return out, lse.masked_fill(lse == -math.inf, 0.0)  # -inf - -inf has no difference

    inputs = [x.requires_grad_() for x in (*qkv, *leaves)]
    assert torch.autograd.gradcheck(attention, inputs, fast_mode=name == "all" or dims in WIDE)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradcheck_packed(kernel):
    packed = ot.make_packed([3, 0, 2], [2, 3, 4], num_heads=2, head_dim=2, dtype=torch.float64)
    options = packed.options | {"causal": True, "return_lse": True, "kernel": kernel}

    def attention(q, k, v, sinks):
        return onchip.varlen_attention(q, k, v, sinks=sinks, **options)

    sinks = torch.tensor([0.3, -0.2], dtype=torch.float64)
    assert torch.autograd.gradcheck(attention, [x.requires_grad_() for x in (*packed[:3], sinks)])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("wanted", DIFFERENTIABLE)
@pytest.mark.parametrize("through", ["out", "lse"])
def test_one_gradient_through_one_output(kernel, wanted, through):
    if kernel == "aten_cpu" and wanted in ("bias", "captured"):
        pytest.skip("aten_cpu refuses bias and score_mod")
    q, k, v = ot.make_qkv(1, 7, 5, dtype=torch.float64)
    tensors = {"q": q, "k": k, "v": v, "sinks": torch.ones(2).double()}
    if kernel != "aten_cpu":
        tensors |= {"bias": torch.ones(1, 2, 1, 5).double(), "captured": torch.ones(5).double()}
    leaf = tensors[wanted] = tensors[wanted].requires_grad_()
    results = []
    captured = tensors.pop("captured", None)
    if captured is not None:
        tensors["score_mod"] = lambda score, b, h, q, k: score * captured[k]
    for f in (ot.oracle, lambda **x: onchip.attention(**x, return_lse=True, kernel=kernel)):
        out, lse = f(**tensors)[:2]
        # 0 * leaf: lse does not depend on v
        y = (out if through == "out" else lse).sin().sum() + 0 * leaf.sum()
        results += torch.autograd.grad(y, leaf)
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
def test_inputs_are_not_written(kernel):
    q, k, v = (x.requires_grad_() for x in ot.make_qkv(1, 9, 12, head_dim_v=24))
    sinks = torch.ones(2, requires_grad=True)
    tensors = (q, k, v, sinks)
    before = [(x.detach().clone(), x._version) for x in tensors]
    out, lse = onchip.attention(q, k, v, sinks=sinks, return_lse=True, kernel=kernel)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    copies = dout.clone(), dlse.clone()
    torch.autograd.grad([out, lse], tensors, [dout, dlse])
    assert all(
        torch.equal(x, y) and x._version == n for x, (y, n) in zip(tensors, before, strict=True)
    )
    assert torch.equal(dout, copies[0]) and torch.equal(dlse, copies[1])


def _run(attention, q, k, v, dout: Tensor) -> list[Tensor]:
    """out, lse, dq, dk, dv for one dout and a dlse of ones."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves)
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    return [out, lse, *torch.autograd.grad([out, lse], leaves, [dout, torch.ones_like(lse)])]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_a_neighbouring_sequence(kernel, dtype):
    packed = ot.make_packed([33, 20, 47], [40, 21, 47], dtype=dtype)
    options = packed.options | {"causal": True, "return_lse": True, "kernel": kernel}
    attention = lambda q, k, v: onchip.varlen_attention(q, k, v, **options)
    dout = torch.randn(100, 2, 64).to(dtype)
    clean = _run(attention, *packed[:3], dout)
    q, k, v = (x.clone() for x in packed[:3])
    k[40:61], v[40:61] = math.nan, math.nan
    dirty = _run(attention, q, k, v, dout)
    rows, keys = [*range(33), *range(53, 100)], [*range(40), *range(61, 108)]
    for name, a, b in zip(("out", "lse", "q", "k", "v"), clean, dirty, strict=True):
        at = (slice(None), rows) if name == "lse" else keys if name in "kv" else rows
        assert torch.equal(a[at], b[at]), name


MASK_SPARES = {
    "a block that no row sees": (masks.mod(lambda b, h, q, k: k // 128 != 1), 300, (128, 256)),
    "a block past the end": (masks.padding(torch.tensor([203])), 300, (256, 300)),
    "a block that other rows see": (
        masks.document(torch.tensor([0, 128, 300], dtype=torch.int32)),
        128,
        (128, 300),
    ),
}


@pytest.mark.parametrize("kernel", ["tiled", "aten_cpu", "paper_v1", "paper_v2"])  # skip blocks
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MASK_SPARES)
def test_nan_in_empty_blocks(kernel, dtype, name):
    """Rows up to `rows` are as if the NaN keys from lo to hi, in EMPTY blocks, were not there."""
    mask, rows, (lo, hi) = MASK_SPARES[name]
    q, k, v = ot.make_qkv(1, 300, dtype=dtype)
    attention = lambda q, k, v: onchip.attention(q, k, v, mask=mask, return_lse=True, kernel=kernel)
    dout = torch.randn_like(q)
    clean = _run(attention, q, k, v, dout)
    k[:, lo:hi], v[:, lo:hi] = math.nan, math.nan
    dirty = _run(attention, q, k, v, dout)
    for what, a, b in zip(("out", "lse", "dq", "dk", "dv"), clean, dirty, strict=True):
        at = (..., slice(rows)) if what == "lse" else (slice(None), slice(rows))
        a, b = a[at].detach().double(), b[at].detach().double()
        error, allowed = ot.max_error(b, a), 4 * torch.finfo(dtype).eps * a.abs().max().item()
        assert error <= allowed, what
