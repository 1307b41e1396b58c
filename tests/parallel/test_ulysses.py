"""Heads dealt to ranks are one device: forward and every gradient."""

import pytest
import torch

from onchip.parallel.comm import CountingComm, run_ranks
from onchip.parallel.exchange import deal, kv_heads
from tests.parallel.whole import (
    OPTIONS,
    assert_as_accurate,
    assert_close,
    inputs,
    joined,
    on_one,
    on_rank,
)

# ranks, (heads, key heads): whole groups, cut groups, fewer heads than ranks, one head for all
DEALS = [(4, (8, 4)), (3, (8, 2)), (5, (12, 3)), (8, (6, 6)), (4, (7, 1)), (1, (4, 2))]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("case", OPTIONS)
def test_any_mask_and_option(case, layout):
    """fp64; heads that ranks share, 37 tokens on 3 ranks."""
    x = inputs((8, 2), head_dim_v=5)
    found = run_ranks(3, lambda comm: on_rank(comm, x, layout, case, strategy="ulysses"))
    assert_close(joined(layout, found), on_one(x, case), 1e-12)


@pytest.mark.parametrize("size, heads", DEALS, ids=str)
@pytest.mark.parametrize("case", ["heads", "dropout", "alibi"])
def test_any_number_of_heads(case, size, heads):
    x = inputs(heads)
    found = run_ranks(size, lambda comm: on_rank(comm, x, "zigzag", case, strategy="ulysses"))
    assert_close(joined("zigzag", found), on_one(x, case), 1e-12)


@pytest.mark.parametrize("seqlen", [1, 2, 63])
def test_fewer_tokens_than_ranks_and_odd_ones(seqlen):
    x = inputs((4, 2), seqlen=seqlen)
    found = run_ranks(4, lambda comm: on_rank(comm, x, "zigzag", "causal", strategy="ulysses"))
    assert_close(joined("zigzag", found), on_one(x, "causal"), 1e-12)


@pytest.mark.parametrize("heads", [(8, 4), (8, 2), (6, 6), (7, 1)], ids=str)
def test_messages_and_bytes(heads):
    """Forward q, k, v there and out, lse back; backward dout, dlse there and dq, dk, dv back: one
    message each from every rank to every other that has tokens or heads. Gradients of key heads
    that ranks share travel in fp32.
    """
    size, seqlen, d, dv = 4, 36, 8, 5
    x = inputs(heads, seqlen=seqlen, batch=3, dtype=torch.bfloat16, head_dim_v=dv)
    dealt = deal(*heads, size)
    keys = [kv_heads(span, heads[0] // heads[1]) for span in dealt]
    count = lambda spans, r: spans[r][1] - spans[r][0]
    shared = sum(count(keys, r) for r in range(size)) > heads[1]
    tokens = 3 * seqlen // size

    def live(comm):
        comm = CountingComm(comm)
        on_rank(comm, x, "contiguous", "causal", strategy="ulysses")
        return comm.rank, dict(comm.messages), dict(comm.bytes)

    for rank, messages, sent in run_ranks(size, live):
        others = [r for r in range(size) if r != rank]
        there = sum(count(dealt, r) * (d + dv) * 2 + count(dealt, r) * 4 for r in others)
        there += sum(count(keys, r) * (d + dv) * 2 for r in others)
        back = count(dealt, rank) * (dv * 2 + 4 + d * 2)
        back += count(keys, rank) * (d + dv) * (4 if shared else 2)
        assert messages == {"swap": 4 * len(others)}
        assert sent == {"swap": tokens * (there + len(others) * back)}


@pytest.mark.parametrize("size, heads", [(2, (16, 2)), (8, (16, 1))], ids=str)
def test_gradients_of_shared_heads_are_not_rounded_on_the_way(size, heads):
    """bf16: as accurate as one device, though the key heads are cut among the ranks."""
    x = inputs(heads, seqlen=257, dtype=torch.bfloat16, head_dim=64)
    exact = on_one([t.double() for t in x], "causal")
    one = on_one(x, "causal")
    found = run_ranks(size, lambda comm: on_rank(comm, x, "zigzag", "causal", strategy="ulysses"))
    assert_as_accurate(joined("zigzag", found), one, exact)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_gloo(pool, size, dtype, tolerance):
    for heads, case in (((8, 8), "documents"), ((12, 3), "dropout")):
        x = inputs(heads, dtype=dtype)
        found = pool.run(size, on_gloo, x, case)
        assert_close(joined("zigzag", found), on_one(x, case), tolerance)


def on_gloo(comm, x, case):
    return on_rank(comm, x, "zigzag", case, strategy="ulysses")
