"""Fused layers of experts against fp64, and decoders with them against decoders without: by
Triton's interpreter on the CPU, and on a GPU where there is one.
"""

from math import ceil
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional as F

from onchip.engine import LLM, SamplingParams
from onchip.kernels import tiles
from onchip.models import ModelConfig, experts, random_model
from tests.interpreted import DEVICE, INTERPRETED, interpreted, interpreted_or_gpu, mark_slow_except
from tests.kernels.llm.test_products import between_nans
from tests.models.conftest import fields

pytest.importorskip("triton")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SWIGLU = (0.5, 1.702)  # a limit that many elements exceed
SIZES = [  # tokens, experts, experts of a token, width, inner
    (1, 1, 1, 1, 1),
    (3, 5, 2, 48, 24),
    (5, 20, 3, 40, 35),  # more than one group of tiles
    (31, 4, 3, 150, 27),  # several steps of the inner dimension; tiles of 32 rows
    (13, 9, 8, 33, 40),
    (111, 3, 1, 17, 70),  # several tiles of columns; tiles of 64 rows
    (111, 1, 1, 70, 20),  # of 128
    *([] if INTERPRETED else [(1, 8, 2, 1536, 8960), (799, 32, 4, 2880, 2880)]),
]


class Layer(NamedTuple):
    """Weights and biases of experts, each in the middle of NaN."""

    num_experts: int
    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @classmethod
    def random(cls, num_experts, width, inner, dtype, has_bias=True):
        shapes = [(num_experts * 2 * inner, width), (num_experts * width, inner)]
        shapes += [shape[:1] for shape in shapes] * has_bias
        return cls(num_experts, *(between_nans(*shape, dtype=dtype) for shape in shapes))


@pytest.fixture
def kernels():
    from onchip.kernels.llm import fused_moe as kernels

    with torch.no_grad():
        yield kernels


def make_rows(tokens, width, dtype):
    """Rows whose products with a matrix are of order one."""
    return between_nans(tokens, width, dtype=dtype).mul_(width**-0.5)


def choose(tokens, num_experts, per_token):
    """Different experts for each token, at random, and weights."""
    chosen = torch.rand(tokens, num_experts).argsort(1)[:, :per_token].to(DEVICE)
    return chosen, torch.rand(tokens, per_token).to(DEVICE)


def compute(kernels, x, routing, layer, name="silu", shared=None):
    """(rows of the first product in the order of tokens, the result)"""
    groups = kernels.group_rows(routing[0], layer.num_experts, x.element_size())
    swiglu = SWIGLU if name == "clamped_swiglu" else None
    rows = kernels.up(x, layer.up, layer.up_bias, groups, name, swiglu)
    out = kernels.down(rows, layer.down, layer.down_bias, groups, routing[1], shared)
    return torch.empty_like(rows).index_copy(0, groups.choices.long(), rows), out


def multiply(x, chosen, weight, bias, num_experts):
    """x @ matrix.T + bias with the matrix and bias of each row's expert, rounded once; fp64."""
    matrices = weight.view(num_experts, -1, x.shape[1])
    out = x.new_empty(len(x), matrices.shape[1], dtype=torch.float64)
    for expert in chosen.unique().tolist():
        at = chosen == expert
        out[at] = x[at].double() @ matrices[expert].double().T
        if bias is not None:
            out[at] += bias.view(num_experts, -1)[expert].double()
    return out.to(x.dtype).double()


def activate(gate, up, name):
    if name == "clamped_swiglu":
        limit, alpha = SWIGLU
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(alpha * gate)
    how = {"approximate": "tanh"} if name == "gelu_tanh" else {}
    return getattr(F, name.removesuffix("_tanh"))(gate, **how) * up


def sum_error(products, terms):
    """Six standard deviations of what sums of so many products lose in fp32, whose additions each
    lose up to 2^-24 of a partial sum.
    """
    return 6 * 2**-24 * terms**0.5 * float(products.square().mean().sqrt())


def assert_rounded_alike(out, exact, slack):
    """The exact values, rounded; in fp32 to within slack, which is what the sums may lose. Now and
    then such a sum rounds an element of 16 bits up instead of down.
    """
    theirs = exact.to(out.dtype)
    if out.dtype == FP32:
        worst = ((out.double() - exact).abs() - 1e-6 * exact.abs() - slack).max().item()
        assert worst <= 0, f"{worst:.1e} beyond what the sums may lose"
        return
    close = 4 * torch.finfo(out.dtype).eps
    torch.testing.assert_close(out, theirs, rtol=close, atol=close * float(theirs.abs().mean()))
    assert (out != theirs).sum() <= 2 + 0.03 * out.numel()


def check(kernels, x, routing, layer, name="silu", shared=None):
    """Each product against fp64, from the rounded results of the one before."""
    (chosen, weights), count = routing, layer.num_experts
    rows, out = compute(kernels, x, routing, layer, name, shared)
    flat = chosen.flatten()
    gated = multiply(x.repeat_interleave(chosen.shape[1], 0), flat, layer.up, layer.up_bias, count)
    gate, up = gated.chunk(2, 1)
    # No activation here has a slope above 2, in either factor.
    slack = 2 * sum_error(gated, x.shape[1]) * (1 + gate.abs() + up.abs())
    assert_rounded_alike(rows, activate(gate, up, name), slack)
    each = multiply(rows, flat, layer.down, layer.down_bias, count).unflatten(0, chosen.shape)
    total = (each * weights[..., None].double()).sum(1)
    slack = sum_error(each, rows.shape[1]) * weights.double().sum(1, keepdim=True) + 1e-6
    if shared is not None:
        total = total.to(x.dtype).double() + shared.double()
    assert_rounded_alike(out, total, slack)


@interpreted_or_gpu
@pytest.mark.parametrize("chunk", [16, 1024])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 5, 2), (13, 8, 8), (41, 9, 4), (5, 40, 3)])
def test_rows_are_sorted_and_tiled(kernels, monkeypatch, sizes, chunk):
    """As torch sorts them, stable; every row is in one tile of its expert, no tile is empty."""
    config = tiles.TRITON_GROUP_ROWS._replace(tile_n=chunk)
    monkeypatch.setattr(kernels, "TRITON_GROUP_ROWS", config)
    chosen = choose(*sizes)[0]
    for experts_of_tokens in (chosen, torch.full_like(chosen, sizes[1] - 1)):
        groups = kernels.group_rows(experts_of_tokens, sizes[1], 2)
        assert_tiled(groups, experts_of_tokens.flatten().cpu())
    strided = torch.stack([chosen, chosen - 1], 1).flatten(1)[:, : sizes[2]]
    assert_tiled(kernels.group_rows(strided, sizes[1], 2), chosen.flatten().cpu())


def assert_tiled(groups, chosen):
    ordered, choices = chosen.sort(stable=True)
    assert torch.equal(groups.choices.cpu().long(), choices)
    table, row = groups.tiles.cpu().T.tolist(), 0
    used = [tile for tile in table if tile[0] >= 0]
    assert all(tile[0] == -1 for tile in table[len(used) :])
    for expert, first, stop in used:
        assert first == row < stop <= first + groups.tile_m
        assert (ordered[first:stop] == expert).all()
        row = stop
    assert row == len(chosen)
    assert len(used) == sum(ceil(n / groups.tile_m) for n in chosen.bincount().tolist())


@interpreted_or_gpu
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_layer_is_its_rounded_products(kernels, dtype, sizes):
    tokens, num_experts, per_token, width, inner = sizes
    layer = Layer.random(num_experts, width, inner, dtype)
    x, shared = make_rows(tokens, width, dtype), between_nans(tokens, width, dtype=dtype)
    check(kernels, x, choose(tokens, num_experts, per_token), layer, shared=shared)


@interpreted_or_gpu
@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu"])
def test_activations(kernels, dtype, name):
    for has_bias in (False, True):
        layer = Layer.random(3, 40, 21, dtype, has_bias)
        check(kernels, make_rows(7, 40, dtype), choose(7, 3, 2), layer, name)


@interpreted_or_gpu
@pytest.mark.parametrize("per_token", range(1, 9))
def test_every_number_of_experts_of_a_token(kernels, per_token):
    layer = Layer.random(8, 20, 13, BF16)
    check(kernels, make_rows(9, 20, BF16), choose(9, 8, per_token), layer)


@interpreted_or_gpu
@pytest.mark.parametrize("tokens", [3, 40])
def test_experts_without_rows_are_not_read(kernels, tokens):
    """Their weights are NaN, and all rows are of one expert."""
    layer = Layer.random(5, 20, 13, BF16)
    for tensor in layer[1:]:
        matrices = tensor.unflatten(0, (5, -1))
        matrices[:3], matrices[4:] = torch.nan, torch.nan
    chosen = torch.full((tokens, 1), 3, device=DEVICE)
    check(kernels, make_rows(tokens, 20, BF16), (chosen, choose(tokens, 5, 1)[1]), layer)


@interpreted_or_gpu
def test_permuted_tokens_give_permuted_bits_and_repeated_runs_the_same(kernels):
    layer, x = Layer.random(4, 50, 30, BF16), make_rows(21, 50, BF16)
    chosen, weights = choose(21, 4, 3)
    out = compute(kernels, x, (chosen, weights), layer)[1]
    order = torch.randperm(21, device=DEVICE)
    permuted = compute(kernels, x[order], (chosen[order], weights[order]), layer)[1]
    assert torch.equal(permuted, out[order])
    assert torch.equal(compute(kernels, x, (chosen, weights), layer)[1], out)


@interpreted_or_gpu
def test_a_token_of_nan_changes_no_other(kernels):
    """As padding of a static batch may be; also for activations that select the larger number."""
    layer, x, routing = Layer.random(3, 40, 21, BF16), make_rows(7, 40, BF16), choose(7, 3, 2)
    for name in ("relu", "clamped_swiglu"):
        before = compute(kernels, x, routing, layer, name)[1]
        bad = x.clone()
        bad[2] = torch.nan
        after = compute(kernels, bad, routing, layer, name)[1]
        others = [0, 1, 3, 4, 5, 6]
        assert torch.equal(after[others], before[others]) and after[2].isnan().all()


@interpreted_or_gpu
def test_no_tokens(kernels):
    layer = Layer.random(3, 40, 21, BF16)
    rows, out = compute(kernels, make_rows(0, 40, BF16), choose(0, 3, 2), layer)
    assert rows.shape == (0, 21) and out.shape == (0, 40)


FAMILIES = ("mixtral", "gpt_oss", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")


@pytest.fixture
def as_on_gpu(kernels, monkeypatch):
    """All layers of experts find the fused kernels. How many tokens each of them had."""
    calls, up = [], kernels.up
    monkeypatch.setattr(experts, "fused", lambda *tensors: kernels)
    monkeypatch.setattr(kernels, "up", lambda x, *rest: calls.append(len(x)) or up(x, *rest))
    return calls


@interpreted
@pytest.mark.parametrize("family", mark_slow_except((0, 1), FAMILIES))
def test_a_decoder_gives_the_same_greedy_tokens(as_on_gpu, family):
    one = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "mlp_only_layers": []}
    config = fields(family)
    config |= {name: value for name, value in one.items() if name in config}
    tokens = []
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for fused_experts in (False, True):
        model = random_model(ModelConfig.from_hf(config), seed=3)
        with LLM(model, max_model_len=64, num_pages=20, fused_experts=fused_experts) as llm:
            outputs = llm.generate([[5, 9, 5, 7], [3]], params, use_tqdm=False)
        tokens.append([output.outputs[0].token_ids for output in outputs])
        assert bool(as_on_gpu) == fused_experts
    assert tokens[0] == tokens[1]
    assert as_on_gpu == [5, 2]


@interpreted_or_gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_is_that_of_torch(as_on_gpu, family):
    """Also its shared expert, router, biases and hooks."""
    config = ModelConfig.from_hf(fields(family))
    layer = next(
        block.mlp
        for block in random_model(config, device=DEVICE).layers
        if hasattr(block.mlp, "experts")
    )
    x, hooked = torch.randn(2, 3, 48, device=DEVICE), []
    layer.down.register_forward_hook(lambda module, inputs, out: hooked.append(out.shape))
    expected = layer(x)
    with experts.fuse_experts():
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert as_on_gpu == [6] and hooked == [(6, 48)] * 2


def test_the_host_reads_no_tensor(launches):
    """In a mode in which tensors have no values, so that a CUDA graph can hold the layer."""
    from benchmarks.cross_compile import as_if_on

    config = ModelConfig.from_hf(fields("gpt_oss"))
    with torch.no_grad(), FakeTensorMode(), as_if_on("sm_90"):
        layer, x = random_model(config, dtype=BF16).layers[0].mlp, torch.randn(5, 48, dtype=BF16)
        with pytest.raises(DataDependentOutputException):
            layer(x)
        with experts.fuse_experts(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(experts, "fused", lambda *tensors: True)
            assert layer(x).shape == (5, 48)
    names = ["group_kernel", "up_kernel", "down_kernel", "combine_kernel"]
    assert [launch.name for launch in launches] == names


@pytest.mark.gpu
def test_a_graph_holds_a_layer(kernels):
    """Replayed with other tokens, which choose other experts."""
    layer = random_model(ModelConfig.from_hf(fields("gpt_oss")), device="cuda").layers[0].mlp
    x, graph = torch.randn(9, 48, device="cuda"), torch.cuda.CUDAGraph()
    with experts.fuse_experts():
        layer(x)
        with torch.cuda.graph(graph):
            out = layer(x)
    for _ in range(3):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(out, layer(x), rtol=1e-5, atol=1e-5)


def test_tiles_grow_with_the_rows_of_an_expert():
    """And have fewer columns where programs are fewer than processors."""
    for rows, num_experts, tile_m in ((1, 8, 16), (40, 8, 16), (512, 8, 64), (9999, 2, 128)):
        assert tiles.expert_tile_rows(rows, num_experts, 2) == tile_m
    for processors, expected in ((132, (16, 512, 2)), (96, (32, 256, 4)), (48, (64, 128, 4))):
        tile = tiles.expert_tile("down", 16, 2, 1536, 8960, 2, (9, 0), processors)
        assert tile[:3] == expected
    assert tiles.expert_tile("down", 16, 2, 1536, 8961, 2, (9, 0), 48)[:3] == (32, 64, 4)
