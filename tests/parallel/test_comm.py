"""The same calls give the same bits in one process and on torch.distributed."""

import pytest
import torch

from onchip.parallel.comm import CountingComm, ParallelError, run_ranks

SIZES = [2, 4, 8]


def draw(rank, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator).to(dtype)


def lengths(size, total):
    """Uneven, and some are nothing."""
    return [max(0, total // size + 3 * (r % 3) - 4) for r in range(size)]


def patterns(comm, total=11, dtype=torch.float32):
    """What every pattern gives this rank."""
    P, me, n = comm.size, comm.rank, lengths(comm.size, total)
    x = draw(me, n[me], 3, dtype=dtype)
    got = {}
    for hops in (1, -1, 3, P):
        got[f"shift {hops}"] = draw(me, 5, dtype=dtype) * 0
        comm.shift(draw(me, 5, dtype=dtype), got[f"shift {hops}"], hops).wait()
    got["gather"] = [x.new_full((m, 3), float("nan")) for m in n]
    comm.gather(x, got["gather"]).wait()
    parts = [draw(me * P + r, n[r], 3, dtype=dtype) for r in range(P)]
    got["scatter_sum"] = torch.full_like(x, float("nan"))
    comm.scatter_sum(parts, got["scatter_sum"]).wait()
    send = [draw(me * P + r, n[me] + n[r], 2, dtype=dtype) for r in range(P)]
    got["swap"] = [x.new_full((n[r] + n[me], 2), float("nan")) for r in range(P)]
    comm.swap(send, got["swap"]).wait()
    got["max"] = draw(me, 7, dtype=dtype)
    comm.max(got["max"]).wait()
    return got


def expected(size, me, total=11, dtype=torch.float32):
    """The same, from what all ranks would draw."""
    n = lengths(size, total)
    got = {f"shift {hops}": draw((me - hops) % size, 5, dtype=dtype) for hops in (1, -1, 3, size)}
    got["gather"] = [draw(r, n[r], 3, dtype=dtype) for r in range(size)]
    total = torch.zeros(n[me], 3, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    for r in range(size):
        total += draw(r * size + me, n[me], 3, dtype=dtype)
    got["scatter_sum"] = total.to(dtype)
    got["swap"] = [draw(r * size + me, n[r] + n[me], 2, dtype=dtype) for r in range(size)]
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
    row.gather(me, got[0]).wait()
    column.gather(me, got[1]).wait()
    again.sum(me).wait()
    again.agree({"row": comm.rank // 2})
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


def brings(comm, dtypes):
    """What a rank hears when the ranks bring these dtypes, and then again."""
    facts = {"shape": (2, 7, 3), "dtype": dtypes[comm.rank], "causal": True}
    heard = []
    for _ in range(2):
        try:
            comm.agree(facts)
            heard.append(None)
        except ParallelError as error:
            heard.append((str(error), error.rank))
    return heard


def test_facts_that_differ_are_named(pool):
    odd = [torch.float32, torch.float32, torch.float16, torch.float32]
    sentence = (
        'the ranks do not agree: dtype is "torch.float32" on ranks 0, 1, 3, '
        '"torch.float16" on rank 2'
    )
    for heard in (*run_ranks(4, brings, odd), *pool.run(4, brings, odd)):
        assert heard == [(sentence, 2), (sentence, 2)]
    for heard in (*run_ranks(4, brings, odd[:2] * 2), *pool.run(4, brings, odd[:2] * 2)):
        assert heard == [None, None]


def counted(comm):
    counting = CountingComm(comm)
    patterns(counting)
    return dict(counting.messages), dict(counting.bytes), counting.log


def test_messages_and_bytes_are_counted():
    n = lengths(4, 11)
    for rank, (messages, sizes, log) in enumerate(run_ranks(4, counted)):
        others = [r for r in range(4) if r != rank]
        assert messages["shift"] == 3 and sizes["shift"] == 3 * 5 * 4
        assert messages["gather"] == (3 if n[rank] else 0)
        assert sizes["gather"] == 3 * n[rank] * 3 * 4
        assert sizes["scatter_sum"] == sum(n[r] for r in others) * 3 * 4
        assert sizes["swap"] == sum(n[r] + n[rank] for r in others) * 2 * 4
        assert all(e.start <= e.posted <= e.asked <= e.waited for e in log)


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


def test_who_ends_early_is_named():
    with pytest.raises(ParallelError, match="rank 0 ended while others wait for it"):
        run_ranks(3, ends_early)


def uneven(comm):
    comm.shift(torch.ones(2 + comm.rank), torch.ones(2)).wait()


def test_messages_that_do_not_fit_are_named():
    with pytest.raises(ParallelError, match=r"rank 1 sends torch.float32 \(3,\), rank 0 expects"):
        run_ranks(2, uneven)
