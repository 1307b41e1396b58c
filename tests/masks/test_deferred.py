"""Masks that are tensors: built when needed, cached until the tensor changes."""

import gc

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import onchip
from onchip import masks
from onchip.core import torch_op
from onchip.masks import deferred
from onchip.masks.deferred import DeferredMask


def bounds(seqlen=40, window=7, batch=2):
    """A causal window, as spans."""
    hi = torch.arange(1, seqlen + 1).expand(batch, 1, seqlen)
    return torch.stack([(hi - window).clamp(min=0), hi], -1).int()


def qkv(seqlen=40):
    return [torch.randn(2, seqlen, 4, 16, requires_grad=True) for _ in range(3)]


def two_layers(q, k, v, mask):
    mask = torch_op.build_once(mask, k.shape[1])
    return onchip.attention(onchip.attention(q, k, v, mask=mask), k, v, mask=mask)


@pytest.fixture
def builds(monkeypatch):
    """One entry for each mask that is built."""
    builds = []
    spy = lambda *args: builds.append(1) or masks.build(*args)
    monkeypatch.setattr(deferred, "build", spy)
    return builds


@pytest.mark.parametrize("kind", ["spans", "dense"])
def test_a_graph_builds_its_mask_at_run_time_once_for_all_calls(kind, builds):
    x, given = qkv(), bounds()
    given = given if kind == "spans" else masks.build(given, 2, 1, 40, 40).to_dense()
    compiled = torch.compile(two_layers, backend="aot_eager", fullgraph=True)
    runs = []
    for fn in (two_layers, compiled):
        before = len(builds)
        out = fn(*x, given)
        runs.append([out, *torch.autograd.grad(out.square().sum(), x)])
    assert len(builds) - before == 1
    for ours, eager in zip(*runs, strict=True):
        torch.testing.assert_close(ours, eager, rtol=0, atol=0)
    other = bounds(window=3)
    expected = onchip.attention(*x, causal=True, window_size=(2, 0))
    expected = onchip.attention(expected, *x[1:], causal=True, window_size=(2, 0))
    torch.testing.assert_close(compiled(*x, other if kind == "spans" else _dense(other)), expected)


def _dense(given):
    return masks.build(given, 2, 1, 40, 40).to_dense()


def test_compiled_calls_take_tensors_as_masks():
    x, given = qkv(), bounds()
    attend = lambda *x: onchip.attention(*x[:3], mask=x[3])
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for mask in (given, _dense(given), _dense(given)[0, 0]):
        torch.testing.assert_close(compiled(*x, mask), attend(*x, mask), rtol=0, atol=0)


@pytest.mark.slow
def test_a_mask_that_reuses_the_memory_of_another_is_built_again():
    def attend(q, k, v, mask, first):
        kept = torch_op.build_once(mask, k.shape[1])
        out = onchip.attention(q, k, v, mask=kept)
        return out + onchip.attention(q, k, v, mask=torch.maximum(kept, first))

    x = [t.detach() for t in qkv()]
    first = torch.tensor([0] * 20 + [20] * 20, dtype=torch.int32)[:, None]
    ours = torch.compile(attend, fullgraph=True)(*x, bounds(), first)
    torch.testing.assert_close(ours, attend(*x, bounds(), first), rtol=0, atol=0)


def test_cuda_graphs_never_record_a_mask_that_is_built_from_values():
    ops = []

    def spy(graph, _):
        ops.extend(n.target for n in graph.graph.nodes if "onchip" in str(n.target))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=spy, bw_compiler=spy)
    torch.compile(two_layers, backend=backend, fullgraph=True)(*qkv(), bounds()).sum().backward()
    assert len(ops) == 5
    assert all(torch.Tag.cudagraph_unsafe in op.tags for op in ops)
    assert torch.Tag.cudagraph_unsafe not in torch.ops.onchip.forward.default.tags


@pytest.mark.gpu
@pytest.mark.parametrize("kept", [False, True])
def test_a_recorded_graph_follows_its_mask(kept):
    def attend(q, k, v, mask):
        return onchip.attention(q, k, v, mask=torch_op.build_once(mask, 40) if kept else mask)

    x = [t.detach().cuda().half() for t in qkv()]
    recorded = torch.compile(attend, mode="reduce-overhead", fullgraph=True)
    for window in (7, 7, 7, 3, 11):
        mask = bounds(window=window).cuda()
        expected = onchip.attention(*x, causal=True, window_size=(window - 1, 0))
        torch.testing.assert_close(recorded(*x, mask), expected, rtol=0.01, atol=0.01)


def test_a_mask_of_the_wrong_shape_is_refused_before_it_runs():
    attend = torch.compile(
        lambda *x: onchip.attention(*x[:3], mask=x[3]), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(Exception, match="does not fit"):
        attend(*qkv(), torch.ones(40, 39, dtype=torch.bool))


def test_the_op_passes_the_checks_of_torch():
    torch.library.opcheck(torch.ops.onchip.mask.default, (bounds(), 40))
    torch.library.opcheck(torch.ops.onchip.mask.default, (_dense(bounds()), 40))


def test_a_cached_mask_is_freed_with_its_tensor():
    gc.collect()
    before = len(deferred._built)
    kept = torch.ops.onchip.mask(bounds(), 40)
    assert len(deferred._built) == before + 1
    assert DeferredMask(kept, 40, 40).built() is DeferredMask(kept, 40, 40).built()
    del kept
    gc.collect()
    assert len(deferred._built) == before


def test_a_modified_tensor_is_built_again():
    given = bounds()
    deferred.keep(given, DeferredMask(given, 40, 40).built())
    given[..., 0] = 0
    causal = masks.causal().build(1, 1, 40, 40).to_dense()
    assert torch.equal(DeferredMask(given, 40, 40).built().to_dense(), causal.expand(2, 1, 40, 40))


def test_other_lengths_are_built_again():
    given = bounds()
    deferred.keep(given, DeferredMask(given, 40, 40).built())
    assert DeferredMask(given, 40, 50).built().shape == (2, 1, 40, 50)
