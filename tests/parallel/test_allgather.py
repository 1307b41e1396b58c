"""All keys on every rank are one device: forward and every gradient."""

import pytest
import torch

from onchip import masks
from onchip.parallel import allgather, sharding
from onchip.parallel.comm import CountingComm, run_ranks
from onchip.parallel.rounds import Rule
from tests.parallel.whole import (
    OPTIONS,
    assert_as_accurate,
    assert_close,
    inputs,
    joined,
    on_one,
    on_rank,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("case", OPTIONS)
def test_any_mask_and_option(case, layout):
    """fp64, GQA, 37 tokens on 3 ranks."""
    x = inputs((4, 2), head_dim_v=5)
    found = run_ranks(3, lambda comm: on_rank(comm, x, layout, case, strategy="allgather"))
    assert_close(joined(layout, found), on_one(x, case), 1e-12)


@pytest.mark.parametrize("case", ["causal", "dropout"])
@pytest.mark.parametrize("size, seqlen", [(1, 37), (8, 5), (4, 300)])
def test_any_lengths(size, seqlen, case):
    x = inputs((4, 1), seqlen=seqlen)
    found = run_ranks(size, lambda comm: on_rank(comm, x, "zigzag", case, strategy="allgather"))
    assert_close(joined("zigzag", found), on_one(x, case), 1e-12)


def test_a_layout_of_many_pieces():
    """Every other pair of blocks is on one rank: one call with a block mask."""
    layout, seqlen = sharding.balanced(2, masks.block_local(64)), 5000
    assert len(layout.pieces(0, seqlen)) > allgather.MAX_PIECES
    assert len(allgather.schedule(layout, Rule(seqlen, True), 0, CPU).rounds) == 1
    x = inputs((1, 1), seqlen=seqlen, batch=1)
    found = run_ranks(2, lambda comm: on_rank(comm, x, layout, "causal", strategy="allgather"))
    assert_close(joined(layout, found), on_one(x, "causal"), 1e-12)


@pytest.mark.parametrize("layout", [sharding.contiguous(4), sharding.zigzag(4)])
@pytest.mark.parametrize(
    "rule", [Rule(999, causal=True), Rule(999, window_size=(50, 7)), Rule(999, True, (50, None))]
)
def test_pieces_need_no_mask(layout, rule):
    """Causal and windows are what kernels know, aligned bottom-right, and no key is read that none
    sees.
    """
    for rank in range(4):
        rounds = allgather.schedule(layout, rule, rank, CPU).rounds
        assert len(rounds) == len(layout.pieces(rank, 999))
        assert all(round.mask is None for round in rounds)
        for round, piece in zip(rounds, layout.pieces(rank, 999), strict=True):
            lo, hi = rule.spans(torch.arange(*piece))
            assert (round.keys.start, round.keys.stop) == (int(lo.min()), int(hi.max()))


def test_messages_and_bytes():
    """Keys and values to each other rank, once forward and once backward; then to each its share of
    their gradients, in fp32.
    """
    size, seqlen, heads, dims = 3, 37, (4, 2), (8, 5)
    x = inputs(heads, seqlen=seqlen, dtype=torch.bfloat16, head_dim_v=dims[1])
    layout = sharding.zigzag(size)

    def live(comm):
        comm = CountingComm(comm)
        on_rank(comm, x, layout, "causal", strategy="allgather")
        return comm.rank, dict(comm.messages), dict(comm.bytes)

    per_token = 2 * heads[1] * sum(dims)  # of a batch of 2
    for rank, messages, sent in run_ranks(size, live):
        mine = layout.length(rank, seqlen)
        assert messages == {"gather": 2 * (size - 1), "scatter_sum": size - 1}
        assert sent["gather"] == 2 * (size - 1) * mine * per_token * 2
        assert sent["scatter_sum"] == (seqlen - mine) * per_token * 4


@pytest.mark.parametrize("size", [2, 8])
def test_as_accurate_as_one_device(size):
    x = inputs((4, 1), seqlen=511, dtype=torch.bfloat16, head_dim=64)
    exact, one = on_one([t.double() for t in x], "causal"), on_one(x, "causal")
    found = run_ranks(size, lambda comm: on_rank(comm, x, "zigzag", "causal", strategy="allgather"))
    assert_as_accurate(joined("zigzag", found), one, exact)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_gloo(pool, size, dtype, tolerance):
    for layout, case in (("zigzag", "dropout"), ("striped", "window")):
        x = inputs((6, 2), dtype=dtype)
        found = pool.run(size, on_gloo, x, layout, case)
        assert_close(joined(layout, found), on_one(x, case), tolerance)


def on_gloo(comm, x, layout, case):
    return on_rank(comm, x, layout, case, strategy="allgather")
