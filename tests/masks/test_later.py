"""Masks that are tensors: built when they are needed, kept for as long as they say the same."""

import gc

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import onchip
from onchip import library, masks
from onchip.masks import later
from onchip.masks.later import Later


def bounds(seqlen=40, window=7, batch=2):
    """A causal window, as spans."""
    hi = torch.arange(1, seqlen + 1).expand(batch, 1, seqlen)
    return torch.stack([(hi - window).clamp(min=0), hi], -1).int()


def qkv(seqlen=40):
    return [torch.randn(2, seqlen, 4, 16, requires_grad=True) for _ in range(3)]


def two_layers(q, k, v, mask):
    mask = library.built_once(mask, k.shape[1])
    return onchip.attention(onchip.attention(q, k, v, mask=mask), k, v, mask=mask)


@pytest.fixture
def builds(monkeypatch):
    """One entry for each mask that is built."""
    found = []
    spy = lambda *args: found.append(1) or masks.build(*args)
    monkeypatch.setattr(later, "build", spy)
    return found


@pytest.mark.parametrize("kind", ["spans", "dense"])
def test_a_graph_builds_its_mask_when_it_runs_once_for_all_calls(kind, builds):
    x, given = qkv(), bounds()
    given = given if kind == "spans" else masks.build(given, 2, 1, 40, 40).to_dense()
    compiled = torch.compile(two_layers, backend="aot_eager", fullgraph=True)
    found = []
    for fn in (two_layers, compiled):
        before = len(builds)
        out = fn(*x, given)
        found.append([out, *torch.autograd.grad(out.square().sum(), x)])
    assert len(builds) - before == 1
    for ours, eager in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=0)
    other = bounds(window=3)
    expected = onchip.attention(*x, causal=True, window_size=(2, 0))
    expected = onchip.attention(expected, *x[1:], causal=True, window_size=(2, 0))
    torch.testing.assert_close(compiled(*x, other if kind == "spans" else _dense(other)), expected)


def _dense(given):
    return masks.build(given, 2, 1, 40, 40).to_dense()


def test_tensors_are_masks_of_calls_that_are_compiled():
    x, given = qkv(), bounds()
    attend = lambda *x: onchip.attention(*x[:3], mask=x[3])
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for mask in (given, _dense(given), _dense(given)[0, 0]):
        torch.testing.assert_close(compiled(*x, mask), attend(*x, mask), rtol=0, atol=0)


@pytest.mark.slow
def test_a_mask_computed_from_another_in_its_memory_is_another():
    def attend(q, k, v, mask, first):
        kept = library.built_once(mask, k.shape[1])
        out = onchip.attention(q, k, v, mask=kept)
        return out + onchip.attention(q, k, v, mask=torch.maximum(kept, first))

    x = [t.detach() for t in qkv()]
    first = torch.tensor([0] * 20 + [20] * 20, dtype=torch.int32)[:, None]
    ours = torch.compile(attend, fullgraph=True)(*x, bounds(), first)
    torch.testing.assert_close(ours, attend(*x, bounds(), first), rtol=0, atol=0)


def test_graphs_on_the_gpu_never_record_a_mask_that_is_built_from_values():
    found = []

    def spy(graph, _):
        found.extend(n.target for n in graph.graph.nodes if "onchip" in str(n.target))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=spy, bw_compiler=spy)
    torch.compile(two_layers, backend=backend, fullgraph=True)(*qkv(), bounds()).sum().backward()
    assert len(found) == 5
    assert all(torch.Tag.cudagraph_unsafe in op.tags for op in found)
    assert torch.Tag.cudagraph_unsafe not in torch.ops.onchip.forward.default.tags


@pytest.mark.gpu
@pytest.mark.parametrize("kept", [False, True])
def test_a_recorded_graph_follows_its_mask(kept):
    def attend(q, k, v, mask):
        return onchip.attention(q, k, v, mask=library.built_once(mask, 40) if kept else mask)

    x = [t.detach().cuda().half() for t in qkv()]
    recorded = torch.compile(attend, mode="reduce-overhead", fullgraph=True)
    for window in (7, 7, 7, 3, 11):
        mask = bounds(window=window).cuda()
        expected = onchip.attention(*x, causal=True, window_size=(window - 1, 0))
        torch.testing.assert_close(recorded(*x, mask), expected, rtol=0.01, atol=0.01)


def test_what_does_not_fit_is_refused_before_it_runs():
    attend = torch.compile(
        lambda *x: onchip.attention(*x[:3], mask=x[3]), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(Exception, match="does not fit"):
        attend(*qkv(), torch.ones(40, 39, dtype=torch.bool))


def test_the_op_passes_the_checks_of_torch():
    torch.library.opcheck(torch.ops.onchip.mask.default, (bounds(), 40))
    torch.library.opcheck(torch.ops.onchip.mask.default, (_dense(bounds()), 40))


def test_what_is_kept_dies_with_its_tensor():
    gc.collect()
    before = len(later._built)
    kept = torch.ops.onchip.mask(bounds(), 40)
    assert len(later._built) == before + 1
    assert Later(kept, 40, 40).built() is Later(kept, 40, 40).built()
    del kept
    gc.collect()
    assert len(later._built) == before


def test_what_was_written_to_is_built_again():
    given = bounds()
    later.keep(given, Later(given, 40, 40).built())
    given[..., 0] = 0
    causal = masks.causal().build(1, 1, 40, 40).to_dense()
    assert torch.equal(Later(given, 40, 40).built().to_dense(), causal.expand(2, 1, 40, 40))


def test_other_lengths_are_another_mask():
    given = bounds()
    later.keep(given, Later(given, 40, 40).built())
    assert Later(given, 40, 50).built().shape == (2, 1, 40, 50)
