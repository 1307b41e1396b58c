"""Messages travel while kernels compute: two ranks on gloo. `python -m benchmarks ring` measures
the time saved, which needs two idle cores, and reports if they were not idle.
"""

import time

import torch

from onchip.parallel import rounds
from onchip.parallel.attention import context_parallel_attention
from onchip.parallel.comm import CountingComm

SEQLEN, HEADS, DIM = 2048, 4, 64


class Wrapped:
    """A communicator that wraps another."""

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
    """Reads the buffer of the latest message before `wait`, which other code must not do."""

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
    """([(began, ended, whether the message had arrived) of each kernel], log of messages)"""
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


def test_a_message_arrives_while_a_kernel_runs(pool):
    """The order in a step: posted, kernel, arrived, and only then waited for."""
    for kernels, log in pool.run(2, spy_on_kernels):
        (message,) = [event for event in log if event.kind == "shift"]
        began, ended, arrived = kernels[0]
        assert len(kernels) == 2 and arrived
        assert message.posted <= began < ended <= message.wait_began <= message.wait_ended
        assert message.bytes == 2 * SEQLEN // 2 * HEADS * DIM * 4
