"""Communicators, the interface under the strategies of context parallelism.

`GroupComm` is torch.distributed (gloo, NCCL). `run_ranks` runs several ranks in one process.
`CountingComm` counts and times the operations of either.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from onchip.parallel.comm_base import CPU, Comm, CommWork, ParallelError
from onchip.parallel.consistency import ConsistencyCache
from onchip.parallel.group_comm import GroupComm
from onchip.parallel.local_comm import LocalComm, run_ranks

__all__ = [
    "Comm",
    "CountingComm",
    "CommEvent",
    "GroupComm",
    "LocalComm",
    "ParallelError",
    "CommWork",
    "as_comm",
    "run_ranks",
]


def as_comm(group: Comm | ProcessGroup | DeviceMesh | None) -> Comm:
    """The communicator of a group, a one-dimensional mesh, or (None) the whole job."""
    if group is None or isinstance(group, (ProcessGroup, DeviceMesh)):
        return GroupComm(group)
    return group


@dataclass
class CommEvent:
    """One operation, in seconds of time.perf_counter: start (it was called), posted (the call
    returned), wait_began and wait_ended (NaN until `wait` is called and returns). From posted to
    wait_began it is in flight while the rank does other work.
    """

    kind: str
    start: float
    posted: float = float("nan")
    wait_began: float = float("nan")
    wait_ended: float = float("nan")
    bytes: int = 0


class CountingComm:
    """A communicator that counts the messages and bytes that leave this rank, by kind, and logs all
    operations. Its parts (`split`, `part`) add to the same counters.

    sum and max count as one message of the tensor's bytes, whatever the backend sends;
    check_consistent and split count none.
    """

    comm: Comm
    rank: int
    size: int

    def __init__(self, comm: Comm):
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.messages: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.log: list[CommEvent] = []

    def shift(self, send: Tensor, recv: Tensor, hops: int = 1) -> CommWork:
        sent = [send] if hops % self.size else []
        return self._count("shift", sent, lambda: self.comm.shift(send, recv, hops))

    def all_gather(self, x: Tensor, out: Sequence[Tensor]) -> CommWork:
        return self._count(
            "all_gather", [x] * (self.size - 1), lambda: self.comm.all_gather(x, out)
        )

    def reduce_scatter(self, parts: Sequence[Tensor], out: Tensor) -> CommWork:
        act = lambda: self.comm.reduce_scatter(parts, out)
        return self._count("reduce_scatter", self._others(parts), act)

    def all_to_all(self, send: Sequence[Tensor], recv: Sequence[Tensor]) -> CommWork:
        return self._count(
            "all_to_all", self._others(send), lambda: self.comm.all_to_all(send, recv)
        )

    def sum(self, x: Tensor) -> CommWork:
        return self._count("sum", [x] if self.size > 1 else [], lambda: self.comm.sum(x))

    def max(self, x: Tensor) -> CommWork:
        return self._count("max", [x] if self.size > 1 else [], lambda: self.comm.max(x))

    @property
    def consistency(self) -> ConsistencyCache:
        return self.comm.consistency

    def check_consistent(self, fields: Mapping[str, object], device: torch.device = CPU) -> None:
        self.comm.check_consistent(fields, device)

    def exchange_digests(self, digest: bytes) -> Callable[[], list[bytes]]:
        return self.comm.exchange_digests(digest)

    def exchange_texts(self, text: str) -> dict[int, str]:
        return self.comm.exchange_texts(text)

    def split(self, color: int) -> "CountingComm":
        return self._with(self.comm.split(color))

    def part(self, members: Sequence[int]) -> "CountingComm":
        return self._with(self.comm.part(members))

    def _with(self, comm: Comm) -> "CountingComm":
        part = CountingComm(comm)
        part.messages, part.bytes, part.log = self.messages, self.bytes, self.log
        return part

    def _others(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t for r, t in enumerate(tensors) if r != self.rank]

    def _count(self, kind: str, sent: Sequence[Tensor], act) -> CommWork:
        sent = [t for t in sent if t.numel()]
        event = CommEvent(kind, time.perf_counter(), bytes=sum(t.nbytes for t in sent))
        self.messages[kind] += len(sent)
        self.bytes[kind] += event.bytes
        self.log.append(event)
        work = act()
        event.posted = time.perf_counter()
        return TimedWork(work, event)


class TimedWork:
    def __init__(self, work: CommWork, event: CommEvent):
        self._work, self._event = work, event

    def wait(self) -> None:
        self._event.wait_began = time.perf_counter()
        self._work.wait()
        self._event.wait_ended = time.perf_counter()
