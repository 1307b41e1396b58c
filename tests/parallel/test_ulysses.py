"""Ulysses equals one device: forward and every gradient."""

import pytest
import torch

from onchip.parallel.all_to_all import assign_heads, kv_heads_of
from onchip.parallel.comm import CountingComm, run_ranks
from tests.parallel.cases import (
    CU,
    DROPOUT,
    OPTIONS,
    PACKED,
    Case,
    check_case,
    check_in_process,
    check_rmse,
    on_rank,
)

# ranks, (heads, key heads): whole groups, cut groups, fewer heads than ranks, one head for all
HEADS = [(4, (8, 4)), (3, (8, 2)), (5, (12, 3)), (8, (6, 6)), (4, (7, 1)), (8, (3, 1)), (1, (4, 2))]


def ulysses(layout="zigzag", seqlen=111, heads=(8, 2), **rest):
    return Case(layout, seqlen, heads=heads, strategy="ulysses", **rest)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_any_mask_and_option(options, layout):
    """Key heads shared by ranks, 111 tokens on 3 ranks."""
    check_in_process(ulysses(layout, batch=2, options=options), 3)


@pytest.mark.parametrize("options", PACKED, ids=str)
def test_packed_documents(options):
    check_in_process(ulysses(seqlen=CU[-1], cu_seqlens=CU, options=options), 4)


@pytest.mark.parametrize("size, heads", HEADS, ids=str)
@pytest.mark.parametrize(
    "options", [{"mask": "planes"}, {"causal": True, **DROPOUT}, {"alibi": True, "sinks": True}]
)
def test_any_number_of_heads(options, size, heads):
    check_in_process(ulysses(heads=heads, options=options), size)


@pytest.mark.parametrize("seqlen", [0, 1, 2, 63])
def test_fewer_tokens_than_ranks_and_odd_ones(seqlen):
    check_in_process(ulysses(seqlen=seqlen, options={"causal": True}), 4)


@pytest.mark.parametrize("heads", [(8, 4), (8, 2), (6, 6), (7, 1)], ids=str)
def test_messages_and_bytes(heads):
    """Forward q, k, v, then out, lse; backward dout, dlse, then dq, dk, dv: one message each from
    every rank to every other. Gradients of shared key heads travel in fp32.
    """
    size, d, dv = 4, 8, 5
    case = ulysses("contiguous", 36, heads, batch=3, dims=(d, dv), dtype=torch.bfloat16)
    assigned = assign_heads(*heads, size)
    keys = [kv_heads_of(span, heads[0] // heads[1]) for span in assigned]
    count = lambda spans, r: spans[r][1] - spans[r][0]
    shared = sum(count(keys, r) for r in range(size)) > heads[1]
    tokens = 3 * 36 // size

    def count_on_rank(comm):
        comm = CountingComm(comm)
        on_rank(comm, case)
        return comm.rank, dict(comm.messages), dict(comm.bytes)

    for rank, messages, sent in run_ranks(size, count_on_rank):
        others = [r for r in range(size) if r != rank]
        to_heads_bytes = sum(
            count(assigned, r) * (d + dv) * 2 + count(assigned, r) * 4 for r in others
        )
        to_heads_bytes += sum(count(keys, r) * (d + dv) * 2 for r in others)
        to_tokens_bytes = count(assigned, rank) * (dv * 2 + 4 + d * 2)
        to_tokens_bytes += count(keys, rank) * (d + dv) * (4 if shared else 2)
        assert messages == {"all_to_all": 4 * len(others)}
        assert sent == {"all_to_all": tokens * (to_heads_bytes + len(others) * to_tokens_bytes)}


@pytest.mark.parametrize("size, heads", [(2, (8, 2)), (3, (16, 2)), (8, (16, 1)), (8, (3, 1))])
def test_sixteen_bits_are_as_accurate_as_one_device(size, heads):
    """Also with key heads shared by ranks: their gradients travel unrounded."""
    options = {"causal": True, "kernel": "tiled"}
    check_rmse(
        ulysses("zigzag", 257, heads, dims=(64, 64), dtype=torch.bfloat16, options=options), size
    )


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ranks_on_gloo(pool, size, dtype):
    cases = [
        ulysses(heads=(8, 8), dtype=dtype, options={"mask": "longformer", "sinks": True}),
        ulysses("striped", heads=(12, 3), dtype=dtype, options={"causal": True, **DROPOUT}),
    ]
    for case, *parts in zip(cases, *pool.run(size, on_rank, *cases), strict=True):
        check_case(case, parts)
