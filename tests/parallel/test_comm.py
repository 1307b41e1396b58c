"""The same calls give the same bits in one process and on torch.distributed."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.parallel.comm import CountingComm, ParallelError, run_ranks

SIZES = [2, 4, 8]


def draw(rank, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator).to(dtype)


def lengths(size, total):
    """Uneven, some of them 0."""
    return [max(0, total // size + 3 * (r % 3) - 4) for r in range(size)]


def patterns(comm, total=11, dtype=torch.float32, device="cpu"):
    """The results of every pattern on this rank."""
    P, me, n = comm.size, comm.rank, lengths(comm.size, total)
    take = lambda seed, *shape: draw(seed, *shape, dtype=dtype).to(device)
    blank = lambda *shape: torch.full(shape, torch.nan, dtype=dtype, device=device)
    got = {}
    for hops in (1, -1, 3, P):
        got[f"shift {hops}"] = blank(5)
        comm.shift(take(me, 5), got[f"shift {hops}"], hops).wait()
    got["all_gather"] = [blank(m, 3) for m in n]
    comm.all_gather(take(me, n[me], 3), got["all_gather"]).wait()
    got["reduce_scatter"] = blank(n[me], 3)
    parts = [take(me * P + r, n[r], 3) for r in range(P)]
    comm.reduce_scatter(parts, got["reduce_scatter"]).wait()
    got["all_to_all"] = [blank(n[r] + n[me], 2) for r in range(P)]
    comm.all_to_all([take(me * P + r, n[me] + n[r], 2) for r in range(P)], got["all_to_all"]).wait()
    got["max"] = take(me, 7)
    comm.max(got["max"]).wait()
    return got


def expected(size, me, total=11, dtype=torch.float32):
    """The same, computed from the inputs of all ranks."""
    n = lengths(size, total)
    got = {f"shift {hops}": draw((me - hops) % size, 5, dtype=dtype) for hops in (1, -1, 3, size)}
    got["all_gather"] = [draw(r, n[r], 3, dtype=dtype) for r in range(size)]
    total = torch.zeros(n[me], 3, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    for r in range(size):
        total += draw(r * size + me, n[me], 3, dtype=dtype)
    got["reduce_scatter"] = total.to(dtype)
    got["all_to_all"] = [draw(r * size + me, n[r] + n[me], 2, dtype=dtype) for r in range(size)]
    got["max"] = torch.stack([draw(r, 7, dtype=dtype) for r in range(size)]).amax(0)
    return got


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, *SIZES])
def test_patterns_in_one_process(size, dtype):
    for rank, got in enumerate(run_ranks(size, patterns, 11, dtype)):
        torch.testing.assert_close(got, expected(size, rank, 11, dtype), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, *SIZES])
def test_patterns_on_gloo(pool, size, dtype):
    for rank, got in enumerate(pool.run(size, patterns, 11, dtype)):
        torch.testing.assert_close(got, expected(size, rank, 11, dtype), rtol=0, atol=0)


def program(comm, kinds, seed):
    """Post these patterns with random sizes, hops and gaps, and wait for them in random order."""
    chance, works, got = random.Random(seed), [], []
    for step, kind in enumerate(kinds):
        n = [chance.randrange(6) for _ in range(comm.size)]
        hops, gaps = chance.randrange(-9, 10), chance.choice((1, 2))
        mine = lambda *shape, salt=step: draw(97 * salt + comm.rank, *shape)
        here = n[comm.rank]
        blank = lambda rows, gaps=gaps: torch.full((rows, 3 * gaps), torch.nan)[:, ::gaps]
        if kind == "shift":
            out = [blank(n[(comm.rank - hops) % comm.size])]
            work = comm.shift(mine(here, 3 * gaps)[:, ::gaps], out[0], hops)
        elif kind == "all_gather":
            out = [blank(m) for m in n]
            work = comm.all_gather(mine(here, 3 * gaps)[:, ::gaps], out)
        elif kind == "all_to_all":
            out = [blank(m) for m in n]
            work = comm.all_to_all([mine(here, 3) for _ in n], out)
        elif kind == "reduce_scatter":
            out = [blank(here)]
            work = comm.reduce_scatter([mine(m, 3 * gaps)[:, ::gaps] for m in n], out[0])
        else:
            out = [mine(5, 3 * gaps)[:, ::gaps]]
            work = comm.max(out[0])
        works.append(work)
        got.append(out)
    chance.shuffle(works)
    for work in works:
        work.wait()
        work.wait()  # a second wait changes nothing
    return got


@settings(max_examples=25)
@given(
    size=st.sampled_from([1, 2, 3, 4, 8]),
    kinds=st.lists(
        st.sampled_from(["shift", "all_gather", "all_to_all", "reduce_scatter", "max"]),
        min_size=1,
        max_size=6,
    ),
    seed=st.integers(0, 2**32),
)
def test_any_calls_have_the_same_bits_in_one_process_and_on_gloo(pool, size, kinds, seed):
    here, there = run_ranks(size, program, kinds, seed), pool.run(size, program, kinds, seed)
    torch.testing.assert_close(here, there, rtol=0, atol=0)


def sums(comm):
    x = draw(comm.rank, 257)
    comm.sum(x).wait()
    return x


def test_a_sum_has_the_same_bits_on_every_rank(pool):
    exact = sum(draw(r, 257).double() for r in range(4))
    for results in (run_ranks(4, sums), pool.run(4, sums)):
        assert all(torch.equal(x, results[0]) for x in results)
        torch.testing.assert_close(results[0].double(), exact, rtol=0, atol=1e-6)


def parts(comm):
    """A mesh of two rows, as two communicators each."""
    row, column = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
    again = comm.split(comm.rank // 2)
    got = [torch.empty(1) for _ in range(row.size)], [torch.empty(1) for _ in range(column.size)]
    me = torch.tensor([float(comm.rank)])
    row.all_gather(me, got[0]).wait()
    column.all_gather(me, got[1]).wait()
    again.sum(me).wait()
    again.check_consistent({"row": comm.rank // 2})
    return [torch.cat(each).tolist() for each in got], me.item()


def test_split_gives_the_ranks_of_one_color_in_order(pool):
    for results in (run_ranks(4, parts), pool.run(4, parts)):
        assert [r[0] for r in results] == [
            [[0, 1], [0, 2]],
            [[0, 1], [1, 3]],
            [[2, 3], [0, 2]],
            [[2, 3], [1, 3]],
        ]
        assert [r[1] for r in results] == [1, 1, 5, 5]


def check_dtypes(comm, dtypes):
    """The errors of two checks in which ranks have these dtypes."""
    fields = {"shape": (2, 7, 3), "dtype": dtypes[comm.rank], "causal": True}
    errors = []
    for _ in range(2):
        try:
            comm.check_consistent(fields)
            errors.append(None)
        except ParallelError as error:
            errors.append((str(error), error.rank))
    return errors


def test_fields_that_differ_are_named(pool):
    odd = [torch.float32, torch.float32, torch.float16, torch.float32]
    sentence = (
        'the ranks do not agree: dtype is "torch.float32" on ranks 0, 1, 3, '
        '"torch.float16" on rank 2'
    )
    for errors in (*run_ranks(4, check_dtypes, odd), *pool.run(4, check_dtypes, odd)):
        assert errors == [(sentence, 2), (sentence, 2)]
    for errors in (
        *run_ranks(4, check_dtypes, odd[:2] * 2),
        *pool.run(4, check_dtypes, odd[:2] * 2),
    ):
        assert errors == [None, None]


def counted(comm):
    counting = CountingComm(comm)
    patterns(counting)
    return dict(counting.messages), dict(counting.bytes), counting.log


def test_messages_and_bytes_are_counted():
    n = lengths(4, 11)
    for rank, (messages, sizes, log) in enumerate(run_ranks(4, counted)):
        others = [r for r in range(4) if r != rank]
        assert messages["shift"] == 3 and sizes["shift"] == 3 * 5 * 4
        assert messages["all_gather"] == (3 if n[rank] else 0)
        assert sizes["all_gather"] == 3 * n[rank] * 3 * 4
        assert sizes["reduce_scatter"] == sum(n[r] for r in others) * 3 * 4
        assert sizes["all_to_all"] == sum(n[r] + n[rank] for r in others) * 2 * 4
        assert all(e.start <= e.posted <= e.wait_began <= e.wait_ended for e in log)


def fails_on_two(comm):
    if comm.rank == 2:
        raise KeyError("no such thing")
    comm.sum(torch.ones(1)).wait()


def test_the_exception_of_a_rank_reaches_the_caller(pool):
    with pytest.raises(KeyError, match="no such thing") as caught:
        run_ranks(4, fails_on_two)
    assert caught.value.__notes__ == ["on rank 2 of 4"]


def ends_early(comm):
    if comm.rank:
        comm.shift(torch.ones(1), torch.ones(1)).wait()


def test_a_rank_that_ends_early_is_named():
    with pytest.raises(ParallelError, match="rank 0 ended while others wait for it"):
        run_ranks(3, ends_early)


def uneven(comm):
    comm.shift(torch.ones(2 + comm.rank), torch.ones(2)).wait()


def test_messages_that_do_not_fit_are_named():
    with pytest.raises(ParallelError, match=r"rank 1 sends torch.float32 \(3,\), rank 0 expects"):
        run_ranks(2, uneven)


def surroundings(comm):
    product = torch.ones(2, 2) @ torch.eye(2)
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), product.dtype


def test_backwards_run_on_the_threads_of_their_ranks():
    """On the device's one autograd thread, backwards that wait for one another would deadlock."""
    assert run_ranks(2, lambda comm: torch._C._is_multithreading_enabled()) == [False, False]


def test_ranks_compute_as_their_caller_would():
    with torch.autocast("cpu", torch.bfloat16):
        assert [r[2] for r in run_ranks(2, surroundings)] == [torch.bfloat16] * 2
    with torch.no_grad():
        assert [r[:2] for r in run_ranks(2, surroundings)] == [(False, False)] * 2
    with torch.inference_mode():
        assert [r[:2] for r in run_ranks(2, surroundings)] == [(False, True)] * 2
    assert [r[:2] for r in run_ranks(2, surroundings)] == [(True, False)] * 2


class PassOn(torch.autograd.Function):
    """Send x to the next rank; the gradient is sent back."""

    @staticmethod
    def forward(ctx, comm, x):
        ctx.comm, out = comm, torch.empty_like(x)
        comm.shift(x, out).wait()
        return out

    @staticmethod
    def backward(ctx, dout):
        dx = torch.empty_like(dout)
        ctx.comm.shift(dout.contiguous(), dx, -1).wait()
        return None, dx


def pass_on(comm, device="cpu"):
    x = torch.full((3,), comm.rank + 1.0, requires_grad=True, device=device)
    (PassOn.apply(comm, x) * (comm.rank + 10)).sum().backward()
    return x.grad.tolist()


def test_backwards_may_wait_for_one_another(pool):
    expected = [[(r + 1) % 4 + 10.0] * 3 for r in range(4)]
    assert run_ranks(4, pass_on) == expected
    assert pool.run(4, pass_on) == expected


@pytest.mark.gpu
def test_backwards_may_wait_for_one_another_on_one_gpu():
    """The device has one autograd thread: sharing it would deadlock."""
    assert run_ranks(4, pass_on, "cuda") == [[(r + 1) % 4 + 10.0] * 3 for r in range(4)]


@pytest.mark.gpu
def test_patterns_on_one_gpu(pool):
    """In one process, and over gloo through the host."""
    job = 4, patterns, 11, torch.float32, "cuda"
    for results in (run_ranks(*job), pool.run(*job)):
        for rank, got in enumerate(results):
            close = torch.testing.assert_close
            close(got, expected(4, rank), rtol=0, atol=0, check_device=False)
