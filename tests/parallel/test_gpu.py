"""Chunks on one GPU equal one call. Ranks are threads, and messages are copies on the device."""

import pytest
import torch

import onchip
from onchip.parallel.attention import context_parallel_attention
from onchip.parallel.comm import run_ranks
from onchip.parallel.sharding import as_layout
from onchip.parallel.tree import tree_attention, tree_paged_attention
from onchip.testing import compare, make_packed, make_pages, make_qkv

pytestmark = pytest.mark.gpu

STRATEGIES = ["ring", "ulysses", "hybrid", "allgather"]
DROPOUT = {"dropout_p": 0.2, "dropout_seed": 11}


def sequence(seqlen, dtype, heads=(16, 4), dim=128):
    """q, k, v and dout on the device."""
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": dim}
    q, k, v = make_qkv(1, seqlen, device="cuda", dtype=dtype, **sizes)
    return [q, k, v, torch.randn_like(q)]


def differentiate(attend, q, k, v, dout):
    """out, dq, dk, dv."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def in_chunks(x, size, strategy, layout="zigzag", **options):
    """The same on `size` ranks, put together."""
    layout, seqlen = as_layout(layout, size), x[0].shape[1]
    parts = [[layout.shard(t, r).contiguous() for t in x] for r in range(size)]
    options |= {"strategy": strategy, "layout": layout, "seqlen": seqlen}

    def on_rank(comm):
        attend = lambda *qkv: context_parallel_attention(*qkv, comm, **options)
        return differentiate(attend, *parts[comm.rank])

    return [layout.unshard(list(each)) for each in zip(*run_ranks(size, on_rank), strict=True)]


@pytest.mark.parametrize("options", [{}, {"window_size": (300, None), "softcap": 20.0}], ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_chunks_are_as_accurate_as_one_call(strategy, options):
    """bf16, 8 ranks, uneven chunks, GQA: out and gradients, compared with one call."""
    x = sequence(1111, torch.bfloat16)
    attend = lambda *qkv: onchip.attention(*qkv, causal=True, **options)
    exact = differentiate(attend, *(t.double().cpu() for t in x))
    one = differentiate(attend, *x)
    for got, other, want in zip(
        in_chunks(x, 8, strategy, causal=True, **options), one, exact, strict=True
    ):
        compare(got.cpu(), other.cpu(), want)


@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dropout_equals_one_call(strategy, layout):
    """fp32, 5 ranks: a single different draw would fail."""
    x = sequence(333, torch.float32, heads=(6, 3), dim=64)
    one = differentiate(lambda *qkv: onchip.attention(*qkv, causal=True, **DROPOUT), *x)
    results = in_chunks(x, 5, strategy, layout, causal=True, **DROPOUT)
    for got, want in zip(results, one, strict=True):
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_rank_waits_for_the_device(strategy):
    """Once the rounds are planned, forward and backward do not synchronise with the device."""
    x = sequence(1024, torch.bfloat16)
    layout = as_layout("zigzag", 4)
    parts = [[layout.shard(t, r).contiguous() for t in x] for r in range(4)]
    options = {"strategy": strategy, "layout": layout, "seqlen": 1024, "causal": True}

    def on_rank(comm):
        attend = lambda *qkv: context_parallel_attention(*qkv, comm, **options)
        return differentiate(attend, *parts[comm.rank])

    run_ranks(4, on_rank)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_ranks(4, on_rank)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("window_size", [(None, None), (700, None)])
@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_a_cache_on_several_ranks_equals_one_cache(seqlen_q, window_size):
    """Dense and over pages, bf16, 1,500 keys on four ranks."""
    edges = [0, 100, 900, 900, 1500]
    x = make_packed(
        [seqlen_q], [1500], num_heads=64, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16
    )
    q, k, v = (t[None].cuda() for t in x[:3])
    options = {"window_size": window_size, "causal": True}
    exact = onchip.attention(*(t.double().cpu() for t in (q, k, v)), **options)
    one = onchip.attention(q, k, v, **options)

    def decode(comm):
        lo, hi = edges[comm.rank : comm.rank + 2]
        mine, place = (k[:, lo:hi], v[:, lo:hi]), (lo, 1500)
        cu = torch.tensor([0, hi - lo], dtype=torch.int32)
        pages = make_pages(mine[0][0], mine[1][0], cu, 16)
        paged = tree_paged_attention(q, *pages, comm, places=[place], **options)
        return tree_attention(q, *mine, comm, place=place, **options), paged

    for outs in run_ranks(4, decode):
        for out in outs:
            compare(out.cpu(), one.cpu(), exact)
