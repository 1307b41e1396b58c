"""Merging the states of rounds, at once or in batches, gives one state."""

from functools import partial

import pytest
import torch

from onchip import attention
from onchip.core import torch_op
from onchip.core.backend import make_backend
from onchip.core.state import merge_out_lse
from onchip.kernels.triton import entry
from onchip.parallel import rounds
from onchip.parallel.rounds import BatchedState, Round, RoundOptions, RunningGradients, RunningState
from onchip.testing import make_qkv
from tests.parallel.cases import Case, check_in_process


def state(generator, rows, heads=3, dim=5):
    """A state of two batch entries; some rows have seen no key."""
    draw = lambda *shape: torch.randn(shape, generator=generator)
    lse = (3 * draw(2, heads, rows)).masked_fill(draw(2, heads, rows) < -0.7, -torch.inf)
    out = draw(2, rows, heads, dim)
    return out.masked_fill((lse == -torch.inf).transpose(1, 2)[..., None], 0.0), lse


def fold(own, parts, fresh):
    """The merge kernel in torch. The kernel itself has tests of its own."""
    if fresh:
        own[0].zero_()
        own[1].fill_(-torch.inf)
    for start, out, lse in parts:
        rows = slice(start, start + out.shape[1])
        before = own[0][:, rows].transpose(1, 2).double(), own[1][:, :, rows]
        new = out.transpose(1, 2).double(), lse.double()
        merged, own_lse = merge_out_lse(*zip(before, new, strict=True))
        own[0][:, rows], own[1][:, :, rows] = merged.transpose(1, 2).float(), own_lse


@pytest.mark.parametrize("kind", [RunningState, BatchedState])
@pytest.mark.parametrize(
    "spans", [[], [(0, 7)], [(3, 7)], [(0, 7), (2, 7), (0, 3)], [(0, 7), *[(3, 7), (0, 2)] * 4]]
)
def test_rounds_of_some_rows_merge_into_one_state(kind, spans, monkeypatch):
    monkeypatch.setattr(entry, "fold", fold)
    generator = torch.Generator().manual_seed(len(spans))
    total = kind(torch.empty(2, 7, 3, 8), 5)
    outs, lses = [torch.zeros(2, 3, 7, 5).double()], [torch.full((2, 3, 7), -torch.inf).double()]
    for lo, hi in spans:
        out, lse = state(generator, hi - lo)
        pad = torch.nn.functional.pad
        outs.append(pad(out.double(), (0, 0, 0, 0, lo, 7 - hi)).transpose(1, 2))
        lses.append(pad(lse.double(), (lo, 7 - hi), value=-torch.inf))
        total.add(slice(lo, hi), out.clone(), lse.clone())
    want, want_lse = merge_out_lse(outs, lses)
    out, lse = total.result()
    torch.testing.assert_close(out, want.transpose(1, 2).float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, want_lse.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("merges", [[False] * 5, [True] * 5, [True, False, True, True, False]])
@pytest.mark.parametrize("first", [0, 2])
def test_kernels_with_and_without_a_fused_merge_share_one_state(merges, first, monkeypatch):
    """Rounds over five parts of the keys; the first may have only some rows."""
    monkeypatch.setattr(entry, "fold", fold)
    way, q, *pairs = iter(merges), *make_qkv(1, 7, 15, num_heads=2, head_dim=8)
    merge = lambda out, lse: fold(
        (out, lse), [(0, *torch_op.run(*prepared, None)[:2])], fresh=False
    )

    def get_merge_fn(*args):
        prepared[:] = args[:2]
        return merge if next(way) else None

    prepared, total = [], BatchedState(q, 8)
    monkeypatch.setattr(torch_op, "get_merge_fn", get_merge_fn)
    visible = torch.zeros(7, 15, dtype=torch.bool)
    for i in range(5):
        rows, keys = slice(first if i in (0, 3) else 0, 7), slice(3 * i, 3 * i + 3)
        total.fold(RoundOptions(), Round(rows, slice(0, 3)), q, *(t[:, keys] for t in pairs))
        visible[rows, keys] = True
    want, want_lse = attention(q, *pairs, mask=visible, return_lse=True)
    out, lse = total.result()
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=1e-6)


class Adder:
    """Lets kernels add their gradients themselves if `adds(problem)`, as the Hopper kernel does.
    Logs the number of prepared queries, and for each round the number of keys with sums.
    """

    def __init__(self, monkeypatch, adds=lambda problem: True):
        self.log, self.adds, self.choose = [], adds, torch_op._choose_backend
        monkeypatch.setattr(torch_op, "_choose_backend", self.backend)

    def backend(self, *args, **kwargs):
        real = self.choose(*args, **kwargs)
        backend = make_backend(real.supports, real.forward, real.backward)
        start = partial(AddedQueries, self.log, real.backward)
        backend.get_accumulate_fn = lambda problem: start if self.adds(problem) else None
        return backend


class AddedQueries:
    def __init__(self, log, backward, problem, x, *saved):
        self.log, self.backward, self.saved, self.dq = log, backward, saved, 0.0
        log.append(("queries", x.q.shape[1]))

    def add(self, problem, x, sums):
        grads = self.backward(problem, x, *self.saved)
        self.dq = self.dq + grads.dq
        self.log.append(("keys", None if sums is None else sums[0].shape[1]))
        if sums is None:
            return grads.dk, grads.dv
        for total, share in zip(sums, grads[1:3], strict=True):
            total += share

    def finish(self, dq):
        dq += self.dq


def problem_of_rounds():
    """(q, k, v, saved), of two batch entries and groups of heads."""
    q, k, v = make_qkv(2, 9, 11, num_heads=4, num_kv_heads=2, head_dim=8)
    lse, dlse = torch.randn(2, 2, 4, 9).unbind()
    return q, k, v, (torch.randn_like(q), lse, torch.randn_like(q), dlse)


@pytest.mark.parametrize("adds", [lambda p: False, lambda p: True, lambda p: p.seqlen_k % 2 == 0])
def test_gradients_of_rounds_are_added_to_their_rows_and_keys(adds, monkeypatch):
    """By the kernel or in torch, to the right part of the sums, with more row ranges than MAX_OPEN,
    some of them twice.
    """
    adder, (q, k, v, saved) = Adder(monkeypatch, adds), problem_of_rounds()
    sums = [torch.randn_like(t) for t in (q, k, v)]
    want = [t.clone() for t in sums]
    queries = RunningGradients(RoundOptions(), q, saved, sums[0])
    for rows, keys in [
        ((2, 7), (3, 10)),
        ((2, 7), (4, 10)),
        ((4, 7), (3, 8)),
        ((2, 6), (3, 9)),
    ] * 2:
        round = Round(slice(*rows), slice(*keys), causal=True)
        assert queries.add(round, k, v, (sums[1], sums[2])) is None
        grads = rounds.differentiate_round(RoundOptions(), round, q, k, v, saved)[:3]
        for total, at, share in zip(want, (round.rows, round.keys, round.keys), grads, strict=True):
            total[:, at] += share
    assert queries.finish() is sums[0] is queries.finish()
    for name, a, b in zip(("dq", "dk", "dv"), sums, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=name)
    assert torch.equal(sums[0][:, 7:], want[0][:, 7:]) and torch.equal(
        sums[1][:, :3], want[1][:, :3]
    )
    assert all(kind == "queries" or keys in (5, 6, 7) for kind, keys in adder.log)


@pytest.mark.parametrize("adds", [False, True])
def test_gradients_of_keys_without_sums_are_returned(adds, monkeypatch):
    adder, (q, k, v, saved) = Adder(monkeypatch, lambda p: adds), problem_of_rounds()
    round, dq = Round(slice(0, 5), slice(3, 10)), torch.zeros_like(q)
    queries = RunningGradients(RoundOptions(), q, saved, dq)
    dk, dv = queries.add(round, k, v)
    want = rounds.differentiate_round(RoundOptions(), round, q, k, v, saved)
    assert torch.equal(dk, want.dk) and torch.equal(dv, want.dv)
    assert torch.equal(queries.finish()[:, :5], want.dq) and dq[:, 5:].eq(0).all()
    assert adder.log == [("queries", 5), ("keys", None)] * adds


@pytest.mark.parametrize("strategy", ["ring", "allgather"])
@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("options", [{"causal": True}, {"mask": "prefix"}], ids=str)
def test_ranks_with_a_fused_accumulate_equal_one_device(strategy, some, options, monkeypatch):
    """In a ring a kernel adds only to the sums of its own keys: others are in flight."""
    adder = Adder(monkeypatch, lambda problem: not some or problem.seqlen_k % 2 == 0)
    check_in_process(Case(seqlen=111, batch=2, strategy=strategy, options=options), 3)
    has_sums = [keys is not None for kind, keys in adder.log if kind == "keys"]
    assert has_sums
    if strategy == "allgather":
        assert all(has_sums)
    else:
        assert sum(has_sums) <= 3 and (some or (sum(has_sums), len(has_sums)) == (3, 9))


def test_queries_of_a_zigzag_are_prepared_twice(monkeypatch):
    """All rows and half of the rows, however many rounds there are."""
    adder = Adder(monkeypatch)
    check_in_process(Case(seqlen=160, options={"causal": True}), 5)
    prepared = [rows for kind, rows in adder.log if kind == "queries"]
    assert len(adder.log) == len(prepared) + 25
    assert sorted(prepared) == [16] * 4 + [32] * 5  # all queries of the last rank see all keys
