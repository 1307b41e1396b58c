"""The placements of DTensors, and the sentences for those that are not served. A fake process group
stands in for four ranks: values are in tests/parallel/test_dtensor.py.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import onchip
from onchip import masks
from onchip.core.problem import Tensors
from onchip.parallel import context_parallel_attention

BATCH, HEADS, R = Shard(0), Shard(2), Replicate()


@pytest.fixture(scope="module")
def mesh():
    """Two by two ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2))
    dist.destroy_process_group()


def qkv(mesh, *placements, heads=8, kv_heads=4, seqlen=5, grad=False):
    shapes = [(4, seqlen, n, 16) for n in (heads, kv_heads, kv_heads)]
    spread = [distribute_tensor(torch.randn(shape), mesh, placements) for shape in shapes]
    return [t.requires_grad_(grad) for t in spread]


def test_every_tensor_of_a_call_says_which_dimensions_ranks_may_share():
    """A tensor of (heads,) that is missing would be replicated beside a part of the queries."""
    from onchip.core import dtensor  # after torch_op: it registers rules for its ops

    assert set(Tensors._fields) <= dtensor._DIMS.keys()


@pytest.mark.parametrize("seqlen", [1, 5])
@pytest.mark.parametrize(
    "placements, lse",
    [
        ((R, R), (R, R)),
        ((BATCH, R), (BATCH, R)),
        ((R, HEADS), (R, Shard(1))),
        ((BATCH, HEADS), (BATCH, Shard(1))),
        ((HEADS, HEADS), (Shard(1), Shard(1))),
    ],
)
def test_results_and_gradients_are_placed_as_the_inputs(mesh, placements, lse, seqlen):
    q, k, v = qkv(mesh, *placements, seqlen=seqlen, grad=True)
    out, out_lse, stats = onchip.attention(q, k, v, return_lse=True, return_stats=True)
    assert out.placements == placements and out_lse.placements == lse
    assert out.shape == q.shape and out.to_local().shape == q.to_local().shape
    assert out_lse.to_local().shape[1:] == (q.to_local().shape[2], seqlen)
    assert stats.max_logit.placements == lse
    out.sum().backward()
    assert all(t.grad.placements == placements for t in (q, k, v))


def test_shared_keys_and_biases_have_partial_gradients(mesh):
    """Multi-query attention: every rank has the one key head, and a part of the queries' heads."""
    q, k, v = qkv(mesh, BATCH, R, kv_heads=1, grad=True)
    q = q.detach().redistribute(mesh, (BATCH, HEADS)).requires_grad_()
    bias = distribute_tensor(torch.randn(1, 8, 1, 5), mesh, (R, R)).requires_grad_()
    sinks = distribute_tensor(torch.randn(8), mesh, (R, Shard(0))).requires_grad_()
    out = onchip.attention(q, k, v, bias=bias, sinks=sinks)
    grads = torch.autograd.grad(out.sum(), (q, k, bias, sinks))
    assert [g.placements for g in grads] == [
        (BATCH, HEADS),
        (BATCH, Partial()),
        (Partial(), Shard(1)),
        (Partial(), Shard(0)),
    ]


def test_packed_and_paged_calls(mesh):
    q, k, v = (t.detach() for t in qkv(mesh, R, HEADS))
    packed = [DTensor.from_local(t.to_local()[0], mesh, (R, Shard(1))) for t in (q, k, v)]
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    out, lse = onchip.varlen_attention(*packed, cu, cu, 3, 3, return_lse=True)
    assert out.placements == (R, Shard(1)) and lse.placements == (R, Shard(0))
    pages = [distribute_tensor(torch.randn(5, 16, 4, 16), mesh, (R, HEADS)) for _ in "kv"]
    table = torch.arange(4, dtype=torch.int32)[:, None]
    q = q.redistribute(mesh, (BATCH, HEADS))
    out = onchip.paged_attention(q, *pages, table, torch.full((4,), 9, dtype=torch.int32))
    assert out.placements == (BATCH, HEADS)


def test_inference_mode_and_masks(mesh):
    q, k, v = (t.detach() for t in qkv(mesh, BATCH, HEADS))
    with torch.inference_mode():
        assert onchip.attention(q, k, v, causal=True).placements == (BATCH, HEADS)
    by_batch = torch.ones(4, 1, 5, 5, dtype=torch.bool)
    for mask in (masks.causal() & masks.window(2, 0), by_batch, by_batch[0, 0]):
        assert onchip.attention(q, k, v, mask=mask).placements == (BATCH, HEADS)


@pytest.mark.slow
def test_a_compiled_graph_keeps_the_placements(mesh):
    x = qkv(mesh, BATCH, HEADS, grad=True)
    step = lambda *x: onchip.attention(*x, causal=True)
    out = torch.compile(step, fullgraph=True, backend="aot_eager")(*x)
    out.sum().backward()
    assert out.placements == x[0].grad.placements == (BATCH, HEADS)


@pytest.mark.parametrize(
    "placements, options, sentence",
    [
        ((Shard(1), R), {}, "q is sharded over its sequence.*context_parallel_attention"),
        ((R, Shard(3)), {}, "q is sharded over head_dim"),
        ((BATCH, R), {"dropout_p": 0.5}, "dropout_p is not served for DTensors"),
        ((BATCH, R), {"mask": lambda b, h, q, k: q >= k + b}, "may differ by batch entry"),
        ((HEADS, R), {"mask": lambda b, h, q, k: q >= k + h}, "may differ by head"),
    ],
)
def test_what_is_not_served_is_a_sentence(mesh, placements, options, sentence):
    with pytest.raises(onchip.UnsupportedError, match=sentence):
        onchip.attention(*qkv(mesh, *placements), **options)


@pytest.mark.parametrize("heads, kv_heads", [(6, 3), (6, 6), (8, 2)])
def test_groups_of_heads_are_not_cut(mesh, heads, kv_heads):
    """Over four ranks."""
    x = qkv(mesh, R, R, heads=heads, kv_heads=kv_heads)
    q = x[0].redistribute(mesh, (HEADS, HEADS))
    sentence = f"{heads} heads over {kv_heads} key heads cannot be divided among 4 ranks"
    with pytest.raises(onchip.UnsupportedError, match=sentence):
        onchip.attention(q, *x[1:])


def test_local_functions_refuse_dtensors(mesh):
    q, k, v = (t.detach() for t in qkv(mesh, R, R))
    with pytest.raises(ValueError, match="q is a DTensor and k is not"):
        onchip.attention(q, k.to_local(), v)
    with pytest.raises(onchip.UnsupportedError, match="attention_weights does not take DTensors"):
        onchip.attention_weights(q, k, torch.zeros(4, 8, 5), [0])
    with pytest.raises(onchip.UnsupportedError, match="does not take DTensors: call it with to_lo"):
        context_parallel_attention(q, k, v)
