"""A rank that dies or stalls is named by every other rank, within the timeout."""

import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from onchip import parallel
from onchip.parallel import rounds
from onchip.parallel.comm import GroupComm, ParallelError, run_ranks
from onchip.parallel.watch import Watch
from tests.parallel.pool import Pool

TIMEOUT_S = 5.0
FATES = {
    "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stalls": lambda: time.sleep(60),
}
SAYS = {"dies": "no sign of life", "stops": "no sign of life", "stalls": "stalled after operation"}


def operation(kind, comm, step):
    x, out = torch.full((70_001,), 1.0), [torch.empty(70_001) for _ in range(comm.size)]
    return {
        "shift": lambda: comm.shift(x, out[0]),
        "gather": lambda: comm.gather(x, out),
        "sum": lambda: comm.sum(x),
        "agree": lambda: comm.agree({"step": step}),
    }[kind]()


def steps(comm, kind, numbers):
    for step in numbers:
        if work := operation(kind, comm, step):
            work.wait()


class Late:
    """Seconds by which one who only sleeps was woken too late: the machine was somebody else's."""

    TICK_S = 0.02

    def __init__(self):
        self.seconds, self._over = 0.0, threading.Event()
        threading.Thread(target=self._sleep, daemon=True).start()

    def _sleep(self):
        began = time.monotonic()
        while not self._over.wait(self.TICK_S):
            now = time.monotonic()
            late = now - began - self.TICK_S
            self.seconds += late if late > self.TICK_S / 2 else 0.0
            began = now

    def end(self):
        self._over.set()
        return self.seconds


def lose(comm, victim, fate, kind):
    """What the others hear, whom it names, and after how many seconds of ours."""
    steps(GroupComm(comm.group, 60), kind, range(3))  # a busy machine takes its time to begin
    began, late = time.monotonic(), Late()
    if comm.rank == victim:
        _ = operation(kind, comm, 3) if kind == "shift" else None  # in the middle of a step
        FATES[fate]()
    with pytest.raises(ParallelError) as caught:
        steps(comm, kind, range(3, 9))
    seconds = time.monotonic() - began - late.end()
    with pytest.raises(ParallelError):  # for good: there is no way back
        comm.shift(torch.ones(1), torch.ones(1))
    return str(caught.value), caught.value.rank, seconds


def ask(job, victim=2, inside=False):
    fate, kind = job
    pool = Pool(4, inside)
    try:
        return pool.run(4, lose, victim, fate, kind, timeout_s=TIMEOUT_S, lost=[victim])
    finally:
        pool.close()


def check(heard, victim, says):
    for rank in set(range(4)) - {victim}:
        message, named, seconds = heard[rank]
        assert named == victim and says in message, message
        assert seconds <= TIMEOUT_S, message


@pytest.mark.slow
def test_every_other_rank_names_the_lost_one():
    jobs = [("dies", "shift"), ("stalls", "shift"), ("stops", "gather")]
    with ThreadPoolExecutor() as side_by_side:  # they do little but wait
        for job, heard in zip(jobs, side_by_side.map(ask, jobs), strict=True):
            check(heard, 2, SAYS[job[0]])


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("kind", ["shift", "gather", "sum", "agree"])
@pytest.mark.parametrize("fate", FATES)
def test_whatever_it_was_doing(fate, kind):
    check(ask((fate, kind)), 2, SAYS[fate])


def test_whoever_holds_the_store():
    check(ask(("dies", "shift"), victim=0, inside=True), 0, "the store of the group is gone")


def dies_in_a_round(comm, pass_):
    """Rank 2 dies in the kernel of its second round."""
    q, k, v = torch.randn(3, 1, 24, 2, 8).unbind()
    q.requires_grad_()
    attend = lambda comm: parallel.context_parallel_attention(q, k, v, comm, strategy="ring")
    attend(GroupComm(comm.group, 60)).sum().backward()  # a step as any other
    room, name = (rounds, "attend") if pass_ == "forward" else (rounds.Backward, "add")
    done, kernel = [], getattr(room, name)

    def mortal(*args):
        done.append(args)
        if comm.rank == 2 and len(done) == 2:
            FATES["dies"]()
        return kernel(*args)

    setattr(room, name, mortal)
    with pytest.raises(ParallelError) as caught:
        attend(comm).sum().backward()
    return str(caught.value), caught.value.rank


@pytest.mark.parametrize("pass_", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_a_rank_that_dies_in_a_step_is_named(pass_):
    pool = Pool(4)
    heard = pool.run(4, dies_in_a_round, pass_, timeout_s=TIMEOUT_S, lost=[2])
    for message, named in (heard[r] for r in (0, 1, 3)):
        assert named == 2 and "rank 2 gave no sign of life" in message, message


def changes_its_mind(comm):
    """Rank 1 goes back to what was agreed on, rank 0 to something new."""
    for dtype in ("float32", "float64"):
        comm.agree({"dtype": dtype})
    with pytest.raises(ParallelError) as caught:
        if comm.rank == 0:
            comm.agree({"dtype": "float16"})
        else:
            comm.agree({"dtype": "float32"})
            comm.shift(torch.ones(1), torch.ones(1)).wait()
    return str(caught.value), caught.value.rank


def test_facts_that_differ_later_are_named():
    pool = Pool(2)
    for message, rank in pool.run(2, changes_its_mind, timeout_s=2.0):
        assert rank == 0
        assert 'dtype is "float16" on rank 0, "float32" on rank 1' in message
    pool.close()


def stalls_in_a_thread(comm):
    if comm.rank == 1:
        time.sleep(1.0)
    else:
        comm.sum(torch.ones(1)).wait()


def test_a_thread_that_stalls_is_named():
    with pytest.raises(ParallelError, match="rank 1 did not answer within 0.2 s"):
        run_ranks(3, stalls_in_a_thread, timeout_s=0.2)


def test_a_pulse_ends_with_who_shows_it():
    """And therefore before the interpreter, which a thread inside the store would abort."""
    store = dist.HashStore()
    watch = Watch(store, store, [0], 0, timeout_s=1.0)
    (thread,) = [t for t in threading.enumerate() if t.name == "onchip-pulse"]
    del watch
    gc.collect()
    assert not thread.is_alive()
