"""Ranks as processes, over torch.distributed.

gloo: `wait` blocks the host, at most for the timeout, and raises ParallelError. NCCL: `wait` orders
streams and returns at once, as torch's does; nccl_watchdog.py finds an operation that hangs, unless
the process group's own timeout in torch is shorter and ends the process first.
"""

import re
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from onchip.parallel.comm_base import (
    CPU,
    CommWork,
    ParallelError,
    PeerMessage,
    PointToPointComm,
    WorkThen,
)
from onchip.parallel.consistency import ConsistencyCache, check_consistent
from onchip.parallel.heartbeat import DIAGNOSIS_BEATS, HeartbeatMonitor
from onchip.parallel.nccl_watchdog import NcclWatchdog

# Tags of messages; all others have 0. Digests have their own tag, so that a digest never meets the
# buffer of a tensor: gloo aborts the process if a message and its buffer differ in size.
DIGEST_TAG = 1
UNUSED_TAG = 2**20  # of a message that no rank sends


class GroupState:
    """The state that all communicators of the same ranks of one process group share."""

    store: Store
    ranks: tuple[int, ...]
    monitor: HeartbeatMonitor
    consistency: ConsistencyCache
    num_exchanges: int
    nccl: bool

    def __init__(
        self, group: dist.ProcessGroup, store: Store, ranks: Sequence[int], timeout_s: float
    ):
        self.store, self.ranks = store, tuple(ranks)
        global_ranks = [dist.get_global_rank(group, rank) for rank in ranks]
        job_store = PrefixStore("onchip job", dist.group.WORLD.get_group_store())
        self.monitor = HeartbeatMonitor(store, job_store, global_ranks, dist.get_rank(), timeout_s)
        self.consistency, self.num_exchanges = ConsistencyCache(), 0
        self.nccl = "cuda:nccl" in dist.get_backend_config(group)
        self._group = group
        self.watchdog: NcclWatchdog | None = None  # only under NCCL, where hosts do not wait
        self.parts: dict[tuple[int, ...], GroupState] = {}

    def global_rank(self, rank: int) -> int:
        return self.monitor.ranks[rank]

    @cached_property
    def host_group(self) -> tuple[dist.ProcessGroup, list[int]]:
        """A group for messages in host memory, and these ranks in it. If the process group has NCCL
        alone, its ranks make a gloo group together in their first consistency check.
        """
        if "cpu:gloo" in dist.get_backend_config(self._group):
            return self._group, list(self.ranks)
        ranks = list(self.monitor.ranks)
        gloo_group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        group = group_of(gloo_group)  # pyright: ignore[reportArgumentType]: on its members it is a group
        return group, [dist.get_group_rank(group, rank) for rank in ranks]


_STATES: "weakref.WeakKeyDictionary[dist.ProcessGroup, GroupState]" = weakref.WeakKeyDictionary()


class GroupComm(PointToPointComm):
    """A rank of a process group, of a mesh with one dimension, or (None) of the whole job.

    An operation that another rank does not join raises within timeout_s. The first communicator of
    a group is slow to make, all others are cheap. Over gloo, tensors on a GPU travel through host
    memory. The parts of `split` use the connections of the whole: torch makes no new group.
    """

    group: dist.ProcessGroup
    timeout_s: float
    rank: int
    size: int

    def __init__(
        self,
        group_or_mesh: dist.ProcessGroup | DeviceMesh | None = None,
        timeout_s: float = 600.0,
        *,
        _part: GroupState | None = None,
    ):
        if timeout_s <= 0:
            raise ValueError(f"{timeout_s=} must be positive")
        self.group, self.timeout_s = group_of(group_or_mesh), timeout_s
        self._state = _part or _state_of(self.group, timeout_s)
        self._ranks = self._state.ranks  # [rank in this communicator] -> rank in the group
        self.rank, self.size = self._ranks.index(dist.get_rank(self.group)), len(self._ranks)

    @property
    def _wait_timeout_s(self) -> float:
        """The time to wait for an operation; the rest of the timeout is for the diagnosis."""
        return max(
            self.timeout_s - DIAGNOSIS_BEATS * self._state.monitor.beat_s, self.timeout_s / 2
        )

    def _exchange(self, kind: str, sends: list[PeerMessage], recvs: list[PeerMessage]) -> CommWork:
        self._state.monitor.begin_operation(kind)
        staged_recvs = [self._stage(m.tensor, empty=True) for m in recvs]
        ops = [self._op(dist.irecv, m.peer, t) for m, t in zip(recvs, staged_recvs, strict=True)]
        ops += [self._op(dist.isend, m.peer, self._stage(m.tensor)) for m in sends]
        peers = [m.peer for m in (*recvs, *sends)]
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise self._diagnose(peers[0], error) from error
        host = self._host_waits(ops[0].tensor)
        work = GroupWork(self, works, peers if host else [None] * len(works), host)
        staged = [
            (m.tensor, t) for m, t in zip(recvs, staged_recvs, strict=True) if m.tensor is not t
        ]
        return WorkThen(work, lambda: [m.copy_(t) for m, t in staged]) if staged else work

    def _op(self, do, peer: int, tensor: Tensor) -> dist.P2POp:
        return dist.P2POp(do, tensor, group=self.group, group_peer=self._ranks[peer])

    def _stage(self, tensor: Tensor, empty: bool = False) -> Tensor:
        """The tensor to send from or receive into: gloo needs host memory."""
        if not (tensor.is_cuda and self._host_waits(tensor)):
            return tensor
        return torch.empty_like(tensor, device="cpu") if empty else tensor.cpu()

    def _host_waits(self, tensor: Tensor) -> bool:
        return not (tensor.is_cuda and self._state.nccl)

    def _watch_stream(self) -> None:
        """Let the watchdog watch the work of the current stream up to here."""
        state, monitor = self._state, self._state.monitor
        if state.watchdog is None:
            diagnose = lambda cause: monitor.diagnose(None, cause)
            state.watchdog = NcclWatchdog(diagnose, self.group.abort, monitor.beat_s)
        if state.watchdog.is_idle and not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event()
            event.record()
            state.watchdog.watch(event, self._wait_timeout_s)

    def sum(self, x: Tensor) -> CommWork:
        if not self._is_whole_group:
            return super().sum(x)
        return self._all_reduce("sum", x, dist.ReduceOp.SUM)

    def max(self, x: Tensor) -> CommWork:
        if not self._is_whole_group:
            return super().max(x)
        return self._all_reduce("max", x, dist.ReduceOp.MAX)

    @property
    def _is_whole_group(self) -> bool:
        return self.size == dist.get_world_size(self.group) > 1

    @torch.no_grad()
    def _all_reduce(self, kind: str, x: Tensor, op) -> CommWork:
        self._state.monitor.begin_operation(kind)
        contiguous_x = x.contiguous()
        try:
            works = [dist.all_reduce(contiguous_x, op, group=self.group, async_op=True)]
        except RuntimeError as error:
            raise self._diagnose(None, error) from error
        work = GroupWork(self, works, [None], self._host_waits(x))
        return work if contiguous_x is x else WorkThen(work, lambda: x.copy_(contiguous_x))

    @property
    def consistency(self) -> ConsistencyCache:
        return self._state.consistency

    def check_consistent(self, fields: Mapping[str, object], device: torch.device = CPU) -> None:
        check_consistent(self, fields, defer=device.type == "cuda" and self._state.nccl)

    def exchange_digests(self, digest: bytes) -> Callable[[], list[bytes]]:
        """Calls the group directly: torch's send and recv functions cost as much as the message."""
        self._state.monitor.begin_operation("check_consistent")
        group, ranks = self._state.host_group
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        digests = [torch.empty_like(mine) for _ in ranks]
        digests[self.rank], peers = mine, [r for r in range(self.size) if r != self.rank]
        try:
            works = [group.recv([digests[peer]], ranks[peer], DIGEST_TAG) for peer in peers]
            works += [group.send([mine], ranks[peer], DIGEST_TAG) for peer in peers]
        except RuntimeError as error:
            raise self._diagnose(None, error) from error
        work = GroupWork(self, works, peers * 2, host=True)

        def wait() -> list[bytes]:
            work.wait()
            return [bytes(each.tolist()) for each in digests]

        return wait

    def exchange_texts(self, text: str) -> dict[int, str]:
        texts = self._exchange_texts("check_consistent", text)
        return dict(zip(self._state.monitor.ranks, texts, strict=True))

    def split(self, color: int) -> "GroupComm":
        colors = self._exchange_texts("split", str(color))
        return self.part([r for r in range(self.size) if colors[r] == str(color)])

    def part(self, members: Sequence[int]) -> "GroupComm":
        ranks, parts = tuple(self._ranks[r] for r in members), self._state.parts
        if ranks not in parts:
            self._connect()
            store = PrefixStore(f"part {ranks}", self._state.store)
            parts[ranks] = GroupState(self.group, store, ranks, self.timeout_s)
        return GroupComm(self.group, self.timeout_s, _part=parts[ranks])

    def _connect(self) -> None:
        """Run one operation of all ranks before the first part: NCCL connects in the first
        operation
        of a group, which all its ranks must join."""
        if self._state.nccl and self._is_whole_group and not self._state.parts:
            self.sum(torch.zeros(1, device="cuda")).wait()

    def _exchange_texts(self, kind: str, text: str) -> list[str]:
        state = self._state
        state.monitor.begin_operation(kind)
        state.num_exchanges += 1
        return state.monitor.exchange_texts(state.num_exchanges, text, self._wait_timeout_s)

    def _diagnose(self, peer: int | None, error: Exception, waited_s: float = 0) -> ParallelError:
        suspect = None if peer is None else self._state.global_rank(peer)
        cause = f"waited {waited_s:.3g} s, {_first_sentence(error)}"
        diagnosis = self._state.monitor.diagnose(suspect, cause)
        self._close_connections()
        return diagnosis

    def _close_connections(self) -> None:
        """Let ranks that wait for this one fail now instead of after their timeout. gloo closes all
        connections of a process when one of its operations times out, so this runs one that does.
        """
        for peer in set(range(self.size)) - {self.rank}:
            with suppress(RuntimeError):  # the timeout is the purpose
                unused, peer = torch.empty(1), self._ranks[peer]
                work = dist.irecv(unused, group=self.group, group_src=peer, tag=UNUSED_TAG)
                work.wait(timedelta(milliseconds=1))


class GroupWork:
    """Works of torch, each with its peer, or None where one work has several (NCCL has one work for
    all messages). host: `wait` blocks the host; otherwise the current stream waits.
    """

    def __init__(
        self, comm: GroupComm, works: list[dist.Work], peers: Sequence[int | None], host: bool
    ):
        self._comm, self._works, self._peers, self._host = comm, works, peers, host

    def wait(self) -> None:
        works, self._works = self._works, []
        began = time.monotonic()
        for work, peer in zip(works, self._peers, strict=False):
            try:
                self._wait(work, began + self._comm._wait_timeout_s)
            except RuntimeError as error:
                raise self._comm._diagnose(peer, error, time.monotonic() - began) from error

    def _wait(self, work: dist.Work, until: float) -> None:
        if self._host:
            work.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))
        else:
            work.wait()  # a timeout would make the host wait for the device
            self._comm._watch_stream()


def group_of(group_or_mesh: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    """The process group; ValueError if this process is not in it."""
    if not dist.is_initialized():
        raise ValueError(
            "no job: start with torchrun and call torch.distributed.init_process_group"
        )
    if isinstance(group_or_mesh, DeviceMesh):
        if group_or_mesh.ndim != 1:
            names = group_or_mesh.mesh_dim_names or group_or_mesh.ndim
            raise ValueError(f"the mesh has several dimensions ({names}): give one, mesh[name]")
        return group_or_mesh.get_group()
    group = dist.group.WORLD if group_or_mesh is None else group_or_mesh
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"a ProcessGroup or a DeviceMesh is needed, got {group!r}")
    return group


def _state_of(group: dist.ProcessGroup, timeout_s: float) -> GroupState:
    if group not in _STATES:
        store = PrefixStore("onchip", group.get_group_store())
        _STATES[group] = GroupState(group, store, range(dist.get_world_size(group)), timeout_s)
    return _STATES[group]


def _first_sentence(error: Exception) -> str:
    """The first sentence of torch's error, without its source location."""
    line = re.sub(r"^\[[^]]*\] ", "", str(error)).partition("\n")[0]
    return line.partition(". ")[0]
