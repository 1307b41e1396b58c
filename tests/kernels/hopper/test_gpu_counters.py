"""Counters of launches that run one after another and concurrently, on Hopper. All calls have more
tiles than the GPU has processors.
"""

import pytest
import torch

import onchip
from onchip.core.problem import Options, Tensors
from onchip.core.validation import describe
from onchip.kernels.hopper import entry
from onchip.kernels.runtime import counters
from onchip.testing import make_packed, make_pages
from tests.kernels.gpu import inputs

pytestmark = pytest.mark.hopper


def causal():
    q, k, v = inputs(1500, batch=4)
    return lambda: onchip.attention(q, k, v, causal=True, kernel="hopper")


def packed(lengths=(700, 1, 0, 333)):
    heads = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    return make_packed([*lengths] * 4, dtype=torch.bfloat16, device="cuda", **heads)


def varlen():
    x = packed()
    options = {**x.options, "causal": True, "kernel": "hopper"}
    return lambda: onchip.varlen_attention(x.q, x.k, x.v, **options)


def mixed():
    """Work indices without queries lead to no draw."""
    x = packed()
    pages = make_pages(x.k, x.v, x.cu_seqlens_k, 16)
    call = {"cu_seqlens_q": x.cu_seqlens_q, "max_seqlen_q": 700, "kernel": "hopper"}
    return lambda: onchip.paged_attention(x.q, *pages, causal=True, **call)


def are_clear():
    torch.cuda.synchronize()
    return not counters._pools[torch.device("cuda", 0)].counters.any()


@pytest.mark.parametrize("make", [causal, varlen, mixed])
def test_two_streams_and_a_graph_run_concurrently(make):
    call = make()
    expected = call()
    assert all(torch.equal(call(), expected) for _ in range(4))  # from the third on replayed
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    captured.fill_(torch.nan)
    first, second, third = (torch.cuda.Stream() for _ in range(3))
    torch.cuda.synchronize()
    results = []
    for _ in range(100):
        for stream in (first, second):
            with torch.cuda.stream(stream):
                results.append(call())
        with torch.cuda.stream(third):
            graph.replay()
    assert are_clear()
    assert all(torch.equal(out, expected) for out in (*results, captured))


def test_a_call_with_wrong_offsets_clears_its_counter():
    call, x = mixed(), packed()
    expected = call()
    pages = make_pages(x.k, x.v, x.cu_seqlens_k, 16)
    wild = x.cu_seqlens_q.clone()
    wild[3:] = 10**6
    bad = {"cu_seqlens_q": wild, "max_seqlen_q": 700, "kernel": "hopper"}
    for _ in range(4):
        onchip.paged_attention(x.q, *pages, causal=True, **bad)
        assert are_clear() and torch.equal(call(), expected)


def test_accumulated_gradients():
    q, k, v = inputs(1500, 1500, batch=8, num_kv_heads=8)
    x = Tensors(q, k, v)
    problem = describe(x, Options(causal=True), ())
    out, lse = onchip.attention(q, k, v, causal=True, return_lse=True, kernel="hopper")
    start = entry.backend.get_accumulate_fn(problem)
    queries = start(problem, x, out, lse, torch.randn_like(out), None)
    expected = queries.add(problem, x, None)
    for _ in range(20):
        sums = queries.add(problem, x, None)
        assert all(map(torch.equal, sums, expected))
    assert are_clear()
