"""Groups that deal heads, in a ring, are one device: forward and every gradient."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from onchip.parallel import sharding
from onchip.parallel.attention import context_parallel_attention
from onchip.parallel.comm import CountingComm, run_ranks
from onchip.parallel.nest import Groups, Nest, best_inner_size, nested, sent_bytes
from onchip.parallel.strategy import choose
from tests.parallel.whole import OPTIONS, assert_close, inputs, joined, on_one, on_rank

LAYOUTS = ["contiguous", "zigzag", "striped"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", OPTIONS)
def test_any_mask_and_option(case, layout):
    """fp64; three groups of two ranks, 37 tokens."""
    x = inputs((4, 2), head_dim_v=5)
    found = run_ranks(6, lambda comm: on_rank(comm, x, layout, case, strategy="hybrid"))
    assert_close(joined(layout, found), on_one(x, case), 1e-12)


@pytest.mark.parametrize("inner_size, heads", [(1, (4, 2)), (2, (6, 3)), (4, (5, 5)), (8, (2, 1))])
@pytest.mark.parametrize("case", ["causal", "heads", "dropout"])
def test_any_groups_and_heads(case, inner_size, heads):
    """Groups whose key heads do not divide, or are fewer than the ranks, by splitting 8 ranks."""
    x = inputs(heads)

    def live(comm):
        group = Nest(comm.split(comm.rank % inner_size), comm.split(comm.rank // inner_size))
        return on_rank(comm, x, "zigzag", case, strategy="hybrid", group=group)

    assert_close(joined("zigzag", run_ranks(8, live)), on_one(x, case), 1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seqlen", [5, 37, 400])
def test_groups_of_a_layout_are_a_layout(layout, seqlen):
    layout = sharding.as_layout(layout, 6)
    groups = Groups(layout, 3)
    every = torch.cat([groups.positions(r, seqlen) for r in range(groups.size)])
    assert torch.equal(every.sort().values, torch.arange(seqlen))
    for rank in range(groups.size):
        held, pieces = groups.positions(rank, seqlen), groups.pieces(rank, seqlen)
        assert held.tolist() == [p for piece in pieces for p in range(*piece)]
        assert len(held) == groups.length(rank, seqlen)
        for i, rows in enumerate(groups.rows(rank, seqlen, torch.device("cpu"))):
            assert torch.equal(held[rows], layout.positions(3 * rank + i, seqlen))


def test_zigzag_groups_are_zigzag():
    """So the ring of groups is as balanced as that of ranks."""
    groups, coarse = Groups(sharding.zigzag(8), 2), sharding.zigzag(4)
    for rank in range(4):
        assert groups.pieces(rank, 4096) == coarse.pieces(rank, 4096)


@pytest.mark.parametrize("heads, size", [((8, 8), 8), ((16, 4), 8), ((8, 2), 6), ((32, 8), 4)])
def test_bytes_are_those_of_the_model(heads, size):
    """Forward, each number of neighbours that divides: what `auto` compares is what is sent, beside
    lse. A ring sends what a group has, and heads are as even as can be.
    """
    seqlen, head_dim = 4 * size, 4
    x = inputs(heads, seqlen=seqlen, dtype=torch.float32, sinks=False, head_dim=head_dim)
    own = x[1].nbytes * 2 // size

    def live(comm, inner_size):
        comm = CountingComm(comm)
        with torch.no_grad():
            group = nested(comm, inner_size) if inner_size > 1 else comm
            strategy = "hybrid" if inner_size > 1 else "ring"
            layout = sharding.contiguous(size)
            mine = [layout.shard(t, comm.rank) for t in x[:3]]
            context_parallel_attention(*mine, group, layout=layout, strategy=strategy)
        return sum(comm.bytes.values())

    found = {}
    for inner_size in (n for n in range(1, size + 1) if size % n == 0 and heads[1] % n == 0):
        lse = x[4].nbytes / size * (inner_size - 1) / inner_size
        (sent,) = set(run_ranks(size, live, inner_size))
        assert sent == sent_bytes(size, inner_size, *heads) * own + lse
        found[inner_size] = sent - lse
    assert found[best_inner_size(size, *heads)] == min(found.values())


@pytest.mark.parametrize(
    "size, heads, expected",
    [
        (1, (8, 8), ("ring", 1)),
        (2, (8, 8), ("ring", 1)),  # as many bytes either way, and those of a ring hide
        (4, (8, 8), ("ulysses", 4)),
        (8, (32, 8), ("ulysses", 8)),
        (8, (64, 8), ("ring", 1)),  # eight heads of q and out for every key head
        (16, (8, 8), ("hybrid", 8)),
        (3, (8, 8), ("ring", 1)),
        (64, (32, 8), ("hybrid", 8)),
    ],
)
def test_auto_sends_least(size, heads, expected):
    def live(comm):
        return tuple(choose("auto", comm, *heads))

    assert set(run_ranks(size, live)) == {expected}


def test_what_has_two_dimensions_is_for_hybrid():
    x = inputs((4, 2))

    def live(comm):
        return on_rank(comm, x, "zigzag", "full", strategy="ring", group=nested(comm, 2))

    with pytest.raises(ValueError, match="only 'hybrid' takes two"):
        run_ranks(4, live)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("shape", [(4, 2), (2, 4)])
def test_gloo_mesh_of_two_dimensions(pool, shape, dtype, tolerance):
    x = inputs((8, 2), dtype=dtype)
    for case in ("dropout", "documents"):
        found = pool.run(8, on_mesh, x, shape, case)
        assert_close(joined("zigzag", found), on_one(x, case), tolerance)


def on_mesh(comm, x, shape, case):
    mesh = MESHES.get(shape) or MESHES.setdefault(shape, init_device_mesh("cpu", shape))
    assert dist.get_rank() == comm.rank
    return on_rank(comm, x, "zigzag", case, group=mesh)


MESHES = {}


@pytest.mark.parametrize("size", [2, 4, 8])
def test_gloo_in_groups_of_its_own(pool, size):
    x = inputs((8, 2))
    found = pool.run(size, on_gloo, x)
    assert_close(joined("striped", found), on_one(x, "window"), 1e-12)


def on_gloo(comm, x):
    return on_rank(comm, x, "striped", "window", strategy="hybrid")
