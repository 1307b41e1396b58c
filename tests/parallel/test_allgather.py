"""All-gather equals one device: forward and every gradient."""

import pytest
import torch

from onchip import masks
from onchip.parallel import allgather, sharding
from onchip.parallel.comm import CountingComm, run_ranks
from onchip.parallel.rounds import GlobalMask
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

CPU = torch.device("cpu")


def allgather_case(layout="zigzag", seqlen=111, **rest):
    return Case(layout, seqlen, strategy="allgather", **rest)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "balanced"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_any_mask_and_option(options, layout):
    check_in_process(allgather_case(layout, batch=2, options=options), 3)


@pytest.mark.parametrize("options", PACKED, ids=str)
def test_packed_documents(options):
    check_in_process(allgather_case(seqlen=CU[-1], cu_seqlens=CU, options=options), 4)


@pytest.mark.parametrize("options", [{"causal": True}, DROPOUT], ids=str)
@pytest.mark.parametrize("size, seqlen", [(1, 37), (8, 5), (4, 300), (3, 0)])
def test_any_lengths(size, seqlen, options):
    check_in_process(allgather_case(seqlen=seqlen, options=options), size)


def test_a_layout_of_many_pieces(monkeypatch):
    """A rank with every other pair of blocks makes one call with a block mask."""
    layout, seqlen = sharding.balanced(2, masks.block_local(64)), 700
    monkeypatch.setattr(allgather, "MAX_PIECES", 1)
    assert len(layout.pieces(0, seqlen)) > 1
    assert len(allgather.plan_rounds(layout, GlobalMask(seqlen, True), 0, CPU).rounds) == 1
    check_in_process(allgather_case("balanced", seqlen, options={"causal": True}), 2)


@pytest.mark.parametrize("layout", [sharding.contiguous(4), sharding.zigzag(4)])
@pytest.mark.parametrize(
    "global_mask",
    [
        GlobalMask(999, causal=True),
        GlobalMask(999, window_size=(50, 7)),
        GlobalMask(999, True, (50, None)),
    ],
)
def test_pieces_need_no_mask(layout, global_mask):
    """Causal and window options, aligned bottom-right, express every piece, and no invisible key is
    read.
    """
    for rank in range(4):
        rounds = allgather.plan_rounds(layout, global_mask, rank, CPU).rounds
        assert len(rounds) == len(layout.pieces(rank, 999))
        assert all(round.mask is None for round in rounds)
        for round, piece in zip(rounds, layout.pieces(rank, 999), strict=True):
            lo, hi = global_mask.key_ranges(torch.arange(*piece))
            assert (round.keys.start, round.keys.stop) == (int(lo.min()), int(hi.max()))


def test_messages_and_bytes():
    """K and V travel to each other rank once forward and once backward; then dK, dV in fp32."""
    size, seqlen, heads, dims = 3, 37, (4, 2), (8, 5)
    case = allgather_case(seqlen=seqlen, batch=2, heads=heads, dims=dims, dtype=torch.bfloat16)

    def count_on_rank(comm):
        comm = CountingComm(comm)
        on_rank(comm, case)
        return comm.rank, dict(comm.messages), dict(comm.bytes)

    per_token = 2 * heads[1] * sum(dims)  # of a batch of 2
    for rank, messages, sent in run_ranks(size, count_on_rank):
        mine = case.layout_of(size).length(rank, seqlen)
        assert messages == {"all_gather": 2 * (size - 1), "reduce_scatter": size - 1}
        assert sent["all_gather"] == 2 * (size - 1) * mine * per_token * 2
        assert sent["reduce_scatter"] == (seqlen - mine) * per_token * 4


@pytest.mark.parametrize("size", [2, 8])
def test_sixteen_bits_are_as_accurate_as_one_device(size):
    options = {"causal": True, "kernel": "tiled"}
    shape = {"heads": (4, 1), "dims": (64, 64), "dtype": torch.bfloat16}
    check_rmse(allgather_case(seqlen=511, options=options, **shape), size)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ranks_on_gloo(pool, size, dtype):
    cases = [
        allgather_case(dtype=dtype, options={"causal": True, **DROPOUT}),
        allgather_case("striped", heads=(6, 2), dtype=dtype, options={"window_size": (17, 0)}),
    ]
    for case, *parts in zip(cases, *pool.run(size, on_rank, *cases), strict=True):
        check_case(case, parts)
