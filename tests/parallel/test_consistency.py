"""Calls that differ between ranks raise on every rank, also if both calls were made before."""

import pytest
import torch

from onchip import masks
from onchip.parallel import (
    Mesh2D,
    ParallelError,
    context_parallel_attention,
    digests,
    tree_attention,
)
from onchip.parallel.comm import run_ranks
from onchip.parallel.consistency import encode_fields, find_difference
from onchip.parallel.group_comm import GroupComm
from onchip.parallel.strategy import STRATEGIES
from tests.parallel.pool import Pool

SEQLEN, HEADS, KV_HEADS, DIM, ODD_RANK = 48, 4, 2, 8, 1


def mod(modulus):
    return masks.mod(lambda b, h, q, k: (q + k) % modulus == 0)


def visible(hidden):
    cells = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool)
    cells[3, hidden] = False
    return cells


def slopes(first):
    return torch.tensor([first, 0.5, 0.25, 0.125])


# {difference: (call of most ranks, call of rank STRAY)}; callables are called on each rank
CASES = {
    "causal": ({}, {"causal": True}),
    "window_size": ({"window_size": (5, 0)}, {"window_size": (6, 0)}),
    "seqlen": ({}, {"seqlen": 2 * SEQLEN}),
    "batch": ({}, {"batch": 2}),
    "softcap": ({}, {"softcap": 3.0}),
    "softmax_scale": ({}, {"softmax_scale": 0.5}),
    "q": ({}, {"dtype": torch.float64}),
    "layout": ({"layout": "zigzag"}, {"layout": "contiguous"}),
    "strategy": ({"strategy": "ring"}, {"strategy": "allgather"}),
    "grad": ({}, {"grad": True}),
    "mask": ({"mask": lambda: mod(3)}, {"mask": lambda: mod(5)}),
    "dense mask": ({"mask": lambda: visible(2)}, {"mask": lambda: visible(1)}),
    "document mask": tuple(
        {"mask": lambda end=end: masks.document(torch.tensor([0, end, SEQLEN], dtype=torch.int32))}
        for end in (20, 21)
    ),
    "built mask": tuple(
        {"mask": lambda w=w: masks.window(w, 0).build(1, 1, SEQLEN, SEQLEN)} for w in (7, 8)
    ),
    "cu_seqlens": tuple(
        {"cu_seqlens": torch.tensor([0, end, SEQLEN], dtype=torch.int32)} for end in (20, 21)
    ),
    "sinks": ({"sinks": slopes(1.0)}, {"sinks": slopes(2.0)}),
    "alibi_slopes": ({"alibi_slopes": slopes(1.0)}, {"alibi_slopes": None}),
    "values of alibi_slopes": ({"alibi_slopes": slopes(1.0)}, {"alibi_slopes": slopes(0.9)}),
    "dropout_seed": (
        {"dropout_p": 0.1, "dropout_seed": 3},
        {"dropout_p": 0.1, "dropout_seed": torch.tensor(4)},
    ),
}


def attend(comm, strategy, call):
    call = {"strategy": strategy, **call}
    seqlen, batch = call.get("seqlen", SEQLEN), call.pop("batch", 1)
    dtype, grad = call.pop("dtype", torch.float32), call.pop("grad", False)
    if callable(call.get("mask")):
        call["mask"] = call["mask"]()
    generator = torch.Generator().manual_seed(comm.rank)
    shapes = [(batch, seqlen // comm.size, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    shapes = [s[1:] if "cu_seqlens" in call else s for s in shapes]
    q, k, v = (torch.randn(s, dtype=dtype, generator=generator) for s in shapes)
    return context_parallel_attention(q.requires_grad_(grad), k, v, comm, **call)


def mix(comm, strategy, cases):
    """The error of this rank in each case; every rank has made both calls before."""
    errors = {}
    for name in cases:
        ours, theirs = CASES[name]
        before = attend(comm, strategy, ours)
        attend(comm, strategy, theirs)
        try:
            attend(comm, strategy, theirs if comm.rank == ODD_RANK else ours)
            errors[name] = ("nothing", None)
        except ParallelError as error:
            errors[name] = (str(error), error.rank)
        assert torch.equal(attend(comm, strategy, ours), before), (
            name
        )  # the communicator still works
    return errors


def check(errors):
    for name, (message, rank) in errors.items():
        field = name.split()[-1]
        assert rank == ODD_RANK and f"{field} is " in message, (name, message)
        assert "on ranks 0, 2" in message and "on rank 1" in message, (name, message)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_call_that_differs_raises_in_one_process(strategy):
    cases = CASES if strategy == "ring" else ["causal", "mask"]
    for errors in run_ranks(3, mix, strategy, list(cases)):
        check(errors)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_call_that_differs_raises_over_gloo(pool, strategy):
    """Without the check another length aborts the process inside gloo."""
    cases = ["causal", "seqlen", "mask", "document mask", "strategy"]
    for errors in pool.run(3, mix, strategy, cases):
        check(errors)


def mix_nest(comm):
    """Rank 1 differs; then ranks 1 and 3 differ, so that both rows have the same digests."""
    mesh = Mesh2D(comm.split(comm.rank % 2), comm.split(comm.rank // 2))
    errors = [mix(mesh, "auto", ["causal"])["causal"]]
    with pytest.raises(ParallelError) as caught:
        attend(mesh, "auto", {"causal": comm.rank in (1, 3)})
    return [*errors, (str(caught.value), caught.value.rank)]


@pytest.mark.slow
def test_every_rank_of_a_2d_mesh_raises(pool):
    """Also ranks in neither the row nor the column of the differing rank."""
    sentences = (
        ("the ranks do not agree: causal is false on ranks 0, 2, 3, true on rank 1", ODD_RANK),
        ("the ranks do not agree: causal is false on ranks 0, 2, true on ranks 1, 3", 0),
    )
    for results in (run_ranks(4, mix_nest), pool.run(4, mix_nest)):
        assert results == [list(sentences)] * 4


def mix_passes(comm, strategy):
    """Rank 1 differentiates two calls in another order, then makes a forward call instead."""
    errors = []
    calls = [{"grad": True, "causal": True}, {"grad": True, "causal": False}]
    outs = [attend(comm, strategy, call) for call in calls]
    with pytest.raises(ParallelError) as caught:
        outs[comm.rank == ODD_RANK].sum().backward()
    errors.append((str(caught.value), caught.value.rank))
    with pytest.raises(ParallelError) as caught:
        if comm.rank == ODD_RANK:
            attend(comm, strategy, calls[0])
        else:
            outs[0].sum().backward()
    errors.append((str(caught.value), caught.value.rank))
    return errors


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_passes_that_differ_raise(pool, strategy):
    for results in (run_ranks(3, mix_passes, strategy), pool.run(3, mix_passes, strategy)):
        for (order, first), (passes, second) in results:
            assert first == second == ODD_RANK
            assert "causal is true on ranks 0, 2, false on rank 1" in order
            assert 'pass is "backward" on ranks 0, 2, "forward" on rank 1' in passes


def mix_decoding(comm):
    q, k, v = torch.randn(3, 1, 1, 4, DIM).unbind()
    decode = lambda **options: tree_attention(q, k, v, comm, **options)
    for options in ({"softcap": 2.0}, {"sinks": slopes(1.0)}, {}):
        decode(**options)
    errors = []
    for theirs in ({"softcap": 2.0}, {"sinks": slopes(1.0)}):
        with pytest.raises(ParallelError) as caught:
            decode(**(theirs if comm.rank == ODD_RANK else {}))
        errors.append((next(iter(theirs)) in str(caught.value), caught.value.rank))
    return errors


def test_decoding_that_differs_raises(pool):
    for results in (run_ranks(3, mix_decoding), pool.run(3, mix_decoding)):
        assert results == [[(True, ODD_RANK)] * 2] * 3


MASKS = {  # of one number, which is not in their text
    "function": lambda n: masks.mod(lambda b, h, q, k: (q + k) % 700 != n),
    "function in a window": lambda n: masks.mod(lambda b, h, q, k: k % 90 != n) & masks.window(99),
    "not a function, or another": lambda n: ~mod(9) | masks.mod(lambda b, h, q, k: k % 90 == n),
    "prefixes": lambda n: ~masks.prefix_lm(torch.tensor([100, n])),
    "documents": lambda n: masks.document(torch.tensor([0, n, 3000], dtype=torch.int32)),
    "dense": lambda n: masks.dense(torch.arange(3000 * 3000).view(3000, 3000) != n),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_differ_by_their_visible_cells(name):
    make = MASKS[name]
    digest = lambda mask: digests.of_mask(mask, (2, 1), 3000, torch.device("cpu"))
    assert str(make(17)) == str(make(18)) or name == "prefixes"
    assert digest(make(17)) == digest(make(17)) != digest(make(18))


def test_the_minority_rank_is_named_whatever_fields_differ():
    """Ranks are grouped by all fields: single fields may split them in other ways."""
    calls = [{"a": 1, "b": 1}] * 3 + [{"a": 2, "b": 1}, {"a": 2, "b": 2}]
    texts = {rank: encode_fields(call) for rank, call in enumerate(calls)}
    assert find_difference(texts).rank == 3
    assert find_difference({r: t for r, t in texts.items() if r < 4}).rank == 3
    assert find_difference({0: texts[0], 1: texts[3], 2: texts[3]}).rank == 0


def joins_alone(comm):
    comm = GroupComm(comm.group, 2.0)
    comm.check_consistent({"step": 0})
    if comm.rank != ODD_RANK:
        return None
    with pytest.raises(ParallelError) as caught:
        comm.check_consistent({"step": 1})
    return caught.value.rank


def defers(comm):
    """As over NCCL: the next call compares fields that were equal before."""
    comm._state.nccl, cuda = True, torch.device("cuda")
    torch.distributed.get_backend_config = lambda group: "cuda:nccl"  # forces a gloo group
    for causal in (True, False):
        comm.check_consistent({"causal": causal}, cuda)
    comm.check_consistent({"causal": comm.rank == ODD_RANK}, cuda)
    with pytest.raises(ParallelError) as caught:
        comm.check_consistent({"causal": True}, cuda)
    comm.check_consistent({"causal": True}, cuda)
    assert comm._state.host_group[0] is not comm.group
    return str(caught.value), caught.value.rank


@pytest.mark.slow
def test_a_comparison_that_is_deferred_raises_in_the_next_call():
    pool = Pool(3)
    sentence = "the ranks do not agree: causal is false on ranks 0, 2, true on rank 1"
    try:
        assert pool.run(3, defers) == [(sentence, ODD_RANK)] * 3
        named = pool.run(3, joins_alone)  # the waiting rank differs from two others
        assert named[ODD_RANK] == ODD_RANK
    finally:
        pool.close()
