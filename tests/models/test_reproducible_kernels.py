"""The kernels of the reproducible mode, interpreted in a whole decoder as on a GPU; and gradients
of calls whose forward is a kernel.
"""

import pytest
import torch

from onchip.models import ModelConfig, order_check, pointwise, random_model
from onchip.models.reproducible import _KernelForward, reproducible_rows
from onchip.models.rotary import cos_sin
from tests.interpreted import interpreted, mark_slow_except
from tests.models.conftest import fields

TEXT = torch.randint(130, (2, 5), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def as_on_gpu(monkeypatch):
    """The mode runs the kernels of a GPU on CPU tensors; the grids of their launches."""
    from onchip.kernels.llm import pointwise as kernels
    from onchip.kernels.runtime.launcher import observe_launches

    find = lambda *tensors: None if torch.is_grad_enabled() else kernels
    for module in ("reproducible", "decoder"):
        monkeypatch.setattr(f"onchip.models.{module}.runs_kernels", lambda x: True)
    for module in ("pointwise", "decoder"):
        monkeypatch.setattr(f"onchip.models.{module}.fused", find)
    monkeypatch.setattr(order_check, "_STEPS", (1, 3, 2))
    launches = []
    with observe_launches(lambda compiled, grid, args: launches.append(grid)):
        yield launches


@interpreted
@pytest.mark.parametrize("family", mark_slow_except((0,), ["qwen3", "gemma2"]))
def test_a_decoder_of_kernels(family, as_on_gpu):
    """With and without gradients, in steps over pages: the same bits."""
    config = fields(family) | {"num_hidden_layers": 1}
    decoder = random_model(ModelConfig.from_hf(config), seed=1, dtype=torch.bfloat16)
    order_check._check_pages(decoder, torch.Generator().manual_seed(0))
    with reproducible_rows():
        whole = decoder.logits(decoder.full(TEXT))
        assert whole.requires_grad and as_on_gpu
        with torch.no_grad():
            assert torch.equal(decoder.logits(decoder.full(TEXT[1:, :3]))[0], whole[1, :3])
        whole.square().mean().backward()
    ours = [p.grad for p in decoder.parameters()]
    decoder.zero_grad()
    usual = decoder.logits(decoder.full(TEXT))
    usual.square().mean().backward()
    assert (usual - whole).abs().max() < 0.1 * usual.abs().max()
    for a, p in zip(ours, decoder.parameters(), strict=True):
        assert (a - p.grad).float().norm() <= 0.1 * p.grad.float().norm()


def test_gradients_are_those_of_the_definition():
    """Of several results, with arguments that are no tensors or need no gradient."""
    generator = torch.Generator().manual_seed(0)
    x, y, weight = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(needs)
        for shape, needs in (((5, 8), True), ((5, 8), False), ((8,), True))
    )
    args = (x, y, weight, 1e-6, 1.0)
    both = _KernelForward.apply(pointwise.add_rms_norm, *args), pointwise.add_rms_norm(*args)
    totals = [sum((i + 1) * out.pow(2).sum() for i, out in enumerate(outs)) for outs in both]
    ours, usual = (torch.autograd.grad(total, (x, weight)) for total in totals)
    for a, b in zip(ours, usual, strict=True):
        torch.testing.assert_close(a, b)
    heads = _KernelForward.apply(
        pointwise.split_heads, x, None, None, None, None, (0.0, 0.0), (2, 1)
    )
    assert [tuple(t.shape) for t in heads] == [(5, 2, 2), (5, 1, 2), (5, 1, 2)]
    (grad,) = torch.autograd.grad(sum(t.pow(2).sum() for t in heads), x)
    torch.testing.assert_close(grad, 2 * x.detach())


@pytest.mark.parametrize("wanted", [("k_weight",), ("q_weight", "k_weight"), ("qkv",)], ids=str)
def test_gradients_of_some_arguments(wanted):
    """As of frozen projections with trained norms: v does not depend on the weights of q and k."""
    x = {"qkv": torch.randn(3, 16), "q_weight": torch.randn(4), "k_weight": torch.randn(4)}
    leaves = [x[name].requires_grad_() for name in wanted]
    args = (x["qkv"], None, None, x["q_weight"], x["k_weight"], (1e-6, 0.0), (2, 1))
    both = _KernelForward.apply(pointwise.split_heads, *args), pointwise.split_heads(*args)
    ours, usual = (torch.autograd.grad(sum(t.sin().sum() for t in heads), leaves) for heads in both)
    for a, b in zip(ours, usual, strict=True):
        torch.testing.assert_close(a, b)


def test_split_heads_is_what_a_layer_computes():
    decoder = random_model(ModelConfig.from_hf(fields("qwen3")), seed=1)
    attention = decoder.layers[0].attention
    qkv = torch.randn(3, attention.qkv.weight.shape[0])
    positions = torch.tensor([4, 0, 9])
    rope = [cos_sin(rotary, positions) for rotary in decoder.rotaries]
    norms = attention.q_norm.weight, attention.k_norm.weight
    eps_offset = attention.q_norm.eps, attention.q_norm.offset
    ours = pointwise.split_heads(
        qkv, *rope[attention.rope_index], *norms, eps_offset, attention.heads[:2]
    )
    for a, b in zip(ours, attention._split(qkv, rope), strict=True):
        assert torch.equal(a, b)


@interpreted
def test_split_heads_broadcasts_positions():
    """One row of positions for all sequences of a batch, as the definition takes it."""
    from onchip.kernels.llm import pointwise as kernels

    qkv, turn = torch.randn(2, 3, 16), (torch.randn(3, 1, 2), torch.randn(3, 1, 2))
    weights = torch.randn(4), torch.randn(4)
    usual = pointwise.split_heads(qkv, *turn, *weights, (1e-6, 0.0), (2, 1))
    ours = kernels.split_heads(qkv, (2, 1), turn, weights, (1e-6, 0.0))
    for a, b in zip(ours, usual, strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(RuntimeError, match="expanded size"):
        kernels.split_heads(qkv[:, :2], (2, 1), turn, weights, (1e-6, 0.0))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_split_heads_of_no_tokens(shape):
    kernels = pytest.importorskip("onchip.kernels.llm.pointwise")
    heads = kernels.split_heads(torch.empty(*shape, 16), (2, 1), None, None, (0.0, 0.0))
    assert [t.shape for t in heads] == [(*shape, 2, 4), (*shape, 1, 4), (*shape, 1, 4)]
