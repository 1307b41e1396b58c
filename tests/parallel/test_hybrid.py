"""Hybrid, a ring of groups that exchange heads, equals one device: forward and every gradient."""

from functools import cache

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from onchip.parallel import sharding
from onchip.parallel.attention import context_parallel_attention
from onchip.parallel.comm import CountingComm, run_ranks
from onchip.parallel.mesh2d import GroupedLayout, Mesh2D, best_inner_size, make_mesh2d, sent_bytes
from onchip.parallel.strategy import choose_strategy
from tests.parallel.cases import (
    CU,
    DROPOUT,
    OPTIONS,
    PACKED,
    Case,
    check_case,
    check_in_process,
    on_rank,
)

LAYOUTS = ["contiguous", "zigzag", "striped"]


def hybrid(layout="zigzag", seqlen=111, **rest):
    return Case(layout, seqlen, strategy="hybrid", **rest)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_any_mask_and_option(options, layout):
    """Three groups of two ranks."""
    check_in_process(hybrid(layout, batch=2, options=options), 6)


@pytest.mark.parametrize("options", PACKED, ids=str)
def test_packed_documents(options):
    check_in_process(hybrid(seqlen=CU[-1], cu_seqlens=CU, options=options), 4)


@pytest.mark.parametrize("inner_size, heads", [(1, (4, 2)), (2, (6, 3)), (4, (5, 5)), (8, (2, 1))])
@pytest.mark.parametrize(
    "options", [{"causal": True, "sinks": True}, {"mask": "planes"}, DROPOUT], ids=str
)
def test_any_groups_and_heads(options, inner_size, heads):
    """8 ranks in groups, also with key heads that do not divide or are fewer than the ranks."""
    case = hybrid(heads=heads, options=options)

    def count_on_rank(comm):
        group = Mesh2D(comm.split(comm.rank % inner_size), comm.split(comm.rank // inner_size))
        return on_rank(group, case)[0]

    check_case(case, run_ranks(8, count_on_rank))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seqlen", [5, 37, 400])
def test_groups_of_a_layout_are_a_layout(layout, seqlen):
    layout = sharding.as_layout(layout, 6)
    groups = GroupedLayout(layout, 3)
    every = torch.cat([groups.positions(r, seqlen) for r in range(groups.size)])
    assert torch.equal(every.sort().values, torch.arange(seqlen))
    for rank in range(groups.size):
        held, pieces = groups.positions(rank, seqlen), groups.pieces(rank, seqlen)
        assert held.tolist() == [p for piece in pieces for p in range(*piece)]
        assert len(held) == groups.length(rank, seqlen)
        for i, rows in enumerate(groups.rows(rank, seqlen, torch.device("cpu"))):
            assert torch.equal(held[rows], layout.positions(3 * rank + i, seqlen))


def test_zigzag_groups_are_zigzag():
    """So the ring of groups is as balanced as a ring of ranks."""
    groups, coarse = GroupedLayout(sharding.zigzag(8), 2), sharding.zigzag(4)
    for rank in range(4):
        assert groups.pieces(rank, 4096) == coarse.pieces(rank, 4096)


@pytest.mark.parametrize("heads, size", [((8, 8), 8), ((16, 4), 8), ((8, 2), 6), ((32, 8), 4)])
def test_sent_bytes_equal_the_model(heads, size):
    """Forward, each inner_size that divides: `auto` compares the bytes sent, without lse."""
    seqlen, layout = 4 * size, sharding.contiguous(size)
    (q, k, v, _, dlse), _ = Case(
        seqlen=seqlen, heads=heads, dims=(4, 4), dtype=torch.float32
    ).tensors()
    own = 2 * k.nbytes // size

    def count_on_rank(comm, inner_size):
        comm = CountingComm(comm)
        group = make_mesh2d(comm, inner_size) if inner_size > 1 else comm
        strategy = "hybrid" if inner_size > 1 else "ring"
        mine = [layout.shard(t, comm.rank) for t in (q, k, v)]
        context_parallel_attention(*mine, group, layout=layout, strategy=strategy)
        return sum(comm.bytes.values())

    bytes_by_size = {}
    for inner_size in (n for n in range(1, size + 1) if size % n == 0 and heads[1] % n == 0):
        lse = dlse.nbytes / size * (inner_size - 1) / inner_size
        (sent,) = set(run_ranks(size, count_on_rank, inner_size))
        assert sent == sent_bytes(size, inner_size, *heads) * own + lse
        bytes_by_size[inner_size] = sent - lse
    assert bytes_by_size[best_inner_size(size, *heads)] == min(bytes_by_size.values())


@pytest.mark.parametrize(
    "size, heads, expected",
    [
        (1, (8, 8), ("ring", 1)),
        (2, (8, 8), ("ring", 1)),  # equal bytes; messages of a ring can be hidden
        (4, (8, 8), ("ulysses", 4)),
        (8, (32, 8), ("ulysses", 8)),
        (8, (64, 8), ("ring", 1)),  # eight query heads for each key head
        (16, (8, 8), ("hybrid", 8)),
        (3, (8, 8), ("ring", 1)),
        (64, (32, 8), ("hybrid", 8)),
    ],
)
def test_auto_sends_least(size, heads, expected):
    def count_on_rank(comm):
        return tuple(choose_strategy("auto", comm, *heads))

    assert set(run_ranks(size, count_on_rank)) == {expected}


def test_a_2d_mesh_is_for_hybrid_alone():
    with pytest.raises(ValueError, match="only 'hybrid' takes two"):
        run_ranks(4, lambda comm: on_rank(make_mesh2d(comm, 2), Case(strategy="ring")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(4, 2), (2, 4)])
def test_gloo_2d_mesh(pool, shape, dtype):
    case = hybrid(heads=(8, 2), dtype=dtype, options={"causal": True, **DROPOUT})
    check_case(case, pool.run(8, on_mesh, case, shape))


def on_mesh(comm, case, shape):
    return on_rank(comm, case, group=mesh_of(shape))[0]


@cache
def mesh_of(shape):
    return init_device_mesh("cpu", shape)


@pytest.mark.parametrize("size", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_gloo_in_groups_made_by_hybrid(pool, size):
    case = hybrid("striped", heads=(8, 2), options={"window_size": (17, 0)})
    check_case(case, [part[0] for part in pool.run(size, on_rank, case)])
