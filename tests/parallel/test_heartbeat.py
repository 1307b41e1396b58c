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
from onchip.parallel.heartbeat import HeartbeatMonitor
from tests.parallel.pool import Pool

TIMEOUT_S = 5.0
FAILURES = {
    "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stalls": lambda: time.sleep(60),
}
MESSAGES = {
    "dies": "sent no heartbeat",
    "stops": "sent no heartbeat",
    "stalls": "stalled after operation",
}


def operation(kind, comm, step):
    x, out = torch.full((70_001,), 1.0), [torch.empty(70_001) for _ in range(comm.size)]
    return {
        "shift": lambda: comm.shift(x, out[0]),
        "all_gather": lambda: comm.all_gather(x, out),
        "sum": lambda: comm.sum(x),
        "check_consistent": lambda: comm.check_consistent({"step": step}),
    }[kind]()


def steps(comm, kind, numbers):
    for step in numbers:
        if work := operation(kind, comm, step):
            work.wait()


class Delay:
    """Seconds by which a sleeping thread woke up too late because the machine was busy."""

    TICK_S = 0.02

    def __init__(self):
        self.seconds, self._over = 0.0, threading.Event()
        threading.Thread(target=self._sleep, daemon=True).start()

    def _sleep(self):
        began = time.monotonic()
        while not self._over.wait(self.TICK_S):
            now = time.monotonic()
            delay = now - began - self.TICK_S
            self.seconds += delay if delay > self.TICK_S / 2 else 0.0
            began = now

    def end(self):
        self._over.set()
        return self.seconds


def lose(comm, victim, failure, kind):
    """(error, named rank, seconds without the machine's delays) on the other ranks."""
    steps(GroupComm(comm.group, 60), kind, range(3))  # a busy machine is slow to start
    began, delay = time.monotonic(), Delay()
    if comm.rank == victim:
        _ = operation(kind, comm, 3) if kind == "shift" else None  # in the middle of a step
        FAILURES[failure]()
    with pytest.raises(ParallelError) as caught:
        steps(comm, kind, range(3, 9))
    seconds = time.monotonic() - began - delay.end()
    with pytest.raises(ParallelError):  # every later operation raises
        comm.shift(torch.ones(1), torch.ones(1))
    return str(caught.value), caught.value.rank, seconds


def lose_rank(job, victim=2, inside=False):
    failure, kind = job
    pool = Pool(4, inside)
    try:
        return pool.run(4, lose, victim, failure, kind, timeout_s=TIMEOUT_S, lost=[victim])
    finally:
        pool.close()


def check(errors, victim, expected):
    for rank in set(range(4)) - {victim}:
        message, named, seconds = errors[rank]
        assert named == victim and expected in message, message
        assert seconds <= TIMEOUT_S, message


@pytest.mark.slow
def test_every_other_rank_names_the_lost_rank():
    jobs = [("dies", "shift"), ("stalls", "shift"), ("stops", "all_gather")]
    with ThreadPoolExecutor() as executor:  # the jobs mostly wait
        for job, errors in zip(jobs, executor.map(lose_rank, jobs), strict=True):
            check(errors, 2, MESSAGES[job[0]])


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("kind", ["shift", "all_gather", "sum", "check_consistent"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_rank_lost_in_any_operation_is_named(failure, kind):
    check(lose_rank((failure, kind)), 2, MESSAGES[failure])


def test_a_lost_rank_with_the_store_is_named():
    check(lose_rank(("dies", "shift"), victim=0, inside=True), 0, "the store of the group is gone")


def dies_in_a_round(comm, pass_):
    """Rank 2 dies in the kernel of its second round."""
    q, k, v = torch.randn(3, 1, 24, 2, 8).unbind()
    q.requires_grad_()
    attend = lambda comm: parallel.context_parallel_attention(q, k, v, comm, strategy="ring")
    attend(GroupComm(comm.group, 60)).sum().backward()  # one complete step
    owner, name = (rounds, "attend") if pass_ == "forward" else (rounds.RunningGradients, "add")
    done, kernel = [], getattr(owner, name)

    def dies_in_second(*args):
        done.append(args)
        if comm.rank == 2 and len(done) == 2:
            FAILURES["dies"]()
        return kernel(*args)

    setattr(owner, name, dies_in_second)
    with pytest.raises(ParallelError) as caught:
        attend(comm).sum().backward()
    return str(caught.value), caught.value.rank


@pytest.mark.parametrize("pass_", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
def test_a_rank_that_dies_in_a_step_is_named(pass_):
    pool = Pool(4)
    errors = pool.run(4, dies_in_a_round, pass_, timeout_s=TIMEOUT_S, lost=[2])
    for message, named in (errors[r] for r in (0, 1, 3)):
        assert named == 2 and "rank 2 sent no heartbeat" in message, message


def repeats_an_earlier_call(comm):
    """Rank 1 repeats an earlier call, rank 0 makes a new one."""
    for dtype in ("float32", "float64"):
        comm.check_consistent({"dtype": dtype})
    with pytest.raises(ParallelError) as caught:
        if comm.rank == 0:
            comm.check_consistent({"dtype": "float16"})
        else:
            comm.check_consistent({"dtype": "float32"})
            comm.shift(torch.ones(1), torch.ones(1)).wait()
    return str(caught.value), caught.value.rank


def test_fields_that_differ_later_are_named():
    pool = Pool(2)
    for message, rank in pool.run(2, repeats_an_earlier_call, timeout_s=2.0):
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


def test_a_heartbeat_ends_with_its_monitor():
    """Otherwise a thread inside the store would abort the interpreter at its end."""
    store = dist.HashStore()
    monitor = HeartbeatMonitor(store, store, [0], 0, timeout_s=1.0)
    (thread,) = [t for t in threading.enumerate() if t.name == "onchip-heartbeat"]
    del monitor
    gc.collect()
    assert not thread.is_alive()
