"""Messages travel while kernels compute: two ranks on gloo. What that saves takes two cores that
nobody else uses: `python -m benchmarks ring` measures it, and says if they were not.
"""

import time

import torch

from onchip.parallel import rounds
from onchip.parallel.attention import context_parallel_attention
from onchip.parallel.comm import CountingComm

SEQLEN, HEADS, DIM = 2048, 4, 64


class Wrapped:
    """A communicator that does something about every message."""

    def __init__(self, comm):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size

    def check_consistent(self, fields, device):
        self.comm.check_consistent(fields, device)


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
    spy, attend = Spy(counting), rounds.attend

    def watched(*args):
        began = time.perf_counter()
        result = attend(*args)
        kernels.append((began, time.perf_counter(), spy.arrives(20.0)))
        return result

    rounds.attend = watched
    try:
        step(spy)
    finally:
        rounds.attend = attend
    return kernels, counting.log


def test_a_message_arrives_while_nobody_waits_for_it(pool):
    """The trace of a step: posted, kernel, there, and only then asked for."""
    for kernels, log in pool.run(2, spy_on_kernels):
        (message,) = [event for event in log if event.kind == "shift"]
        began, ended, there = kernels[0]
        assert len(kernels) == 2 and there
        assert message.posted <= began < ended <= message.wait_began <= message.wait_ended
        assert message.bytes == 2 * SEQLEN // 2 * HEADS * DIM * 4
