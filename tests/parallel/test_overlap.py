"""Messages travel while kernels compute: two ranks on gloo."""

import time

import pytest
import torch

from onchip.bench.ring_ranks import Still
from onchip.parallel import ring
from onchip.parallel.attention import context_parallel_attention
from onchip.parallel.comm import CountingComm

SEQLEN, HEADS, DIM = 2048, 4, 64


class Wrapped:
    """A communicator that does something about every message."""

    def __init__(self, comm):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size

    def agree(self, facts):
        self.comm.agree(facts)


def step(comm):
    q, k, v = torch.randn(3, 1, SEQLEN // comm.size, HEADS, DIM).unbind()
    began = time.perf_counter()
    context_parallel_attention(q, k, v, comm, strategy="ring", layout="contiguous")
    return time.perf_counter() - began


class Spy(Wrapped):
    """Looks into the buffer of the latest message, which nobody may before `wait`."""

    recv = None

    def shift(self, send, recv, hops=1):
        self.recv = recv.fill_(torch.nan)
        return self.comm.shift(send, recv, hops)

    def arrives(self, seconds):
        until = time.monotonic() + seconds
        while self.recv.isnan().any() and time.monotonic() < until:
            pass
        return not self.recv.isnan().any()


def spy_on_kernels(comm):
    """([(began, ended, whether the message was there) of each kernel], log of messages)"""
    counting, kernels = CountingComm(comm), []
    spy, attend = Spy(counting), ring.attend

    def watched(*args):
        began = time.perf_counter()
        result = attend(*args)
        kernels.append((began, time.perf_counter(), spy.arrives(20.0)))
        return result

    ring.attend = watched
    try:
        step(spy)
    finally:
        ring.attend = attend
    return kernels, counting.log


def test_a_message_arrives_while_nobody_waits_for_it(pool):
    """The trace of a step: posted, kernel, there, and only then asked for."""
    for kernels, log in pool.run(2, spy_on_kernels):
        (message,) = [event for event in log if event.kind == "shift"]
        began, ended, there = kernels[0]
        assert len(kernels) == 2 and there
        assert message.posted <= began < ended <= message.asked <= message.waited
        assert message.bytes == 2 * SEQLEN // 2 * HEADS * DIM * 4


class Link(Wrapped):
    """Messages take at least `seconds`, without a core's help; apart: who posts one waits."""

    def __init__(self, comm, seconds, apart=False):
        super().__init__(comm)
        self.seconds, self.apart = seconds, apart

    def shift(self, send, recv, hops=1):
        work = Slow(self.comm.shift(send, recv, hops), time.perf_counter() + self.seconds)
        if self.apart:
            work.wait()
        return work


class Slow:
    def __init__(self, work, until):
        self.work, self.until = work, until

    def wait(self):
        self.work.wait()
        time.sleep(max(self.until - time.perf_counter(), 0))


def steps(comm, seconds):
    """The least times of steps: with the keys always there, over a link, and over it apart."""
    ways = {
        "kernels": Still(comm),
        "step": Link(comm, seconds),
        "apart": Link(comm, seconds, apart=True),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(40):
        for name, way in ways.items():
            comm.sum(torch.zeros(1)).wait()
            best[name] = min(best[name], step(way))
    return best


@pytest.mark.slow
def test_a_step_takes_as_long_as_its_kernels_or_its_messages(pool):
    """Over gloo as it is, over a link almost as slow as a round's kernel, and over a slower one.
    Needs two cores that nobody else uses.
    """
    kernels = max(best["kernels"] for best in pool.run(2, steps, 0.0))
    for seconds in (0.0, 0.4 * kernels, 1.5 * kernels):
        for best in pool.run(2, steps, seconds):
            # the second of two kernels has no message beside it
            longer = max(best["kernels"], seconds + best["kernels"] / 2)
            assert best["step"] <= 1.15 * longer, best
            assert best["apart"] >= best["kernels"] + 0.8 * seconds, best
