"""Ranks as threads of one process: for property tests, and for several chunks on one GPU.

A message is copied when both sides have posted it, by the side that posted second, straight from
buffer to buffer. A rank that reuses a buffer before `wait` fails here as it would on a network.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from onchip.core.derivatives import refuse_transforms
from onchip.parallel.comm_base import CPU, ParallelError, PeerMessage, PointToPointComm
from onchip.parallel.consistency import ConsistencyCache, check_consistent

JOIN_TIMEOUT_S = 5.0  # for the other threads to end after one rank failed


def run_ranks(size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """[fn(comm, *args) of rank 0, of rank 1, ...], each on a thread of its own, with the caller's
    stream, grad mode and autocast. The exception of the first rank that fails is raised here. A
    rank that waits longer than timeout_s for another raises ParallelError.
    """
    if size < 1:
        raise ValueError(f"{size=} must be at least 1")
    refuse_transforms("run_ranks")
    rendezvous, results = Rendezvous(size, timeout_s), [None] * size
    caller_context = _copy_thread_context()

    def run_rank(rank: int) -> None:
        try:
            with caller_context():
                results[rank] = fn(LocalComm(rendezvous, (), tuple(range(size)), rank), *args)
        except BaseException as error:
            rendezvous.fail(rank, error)
        finally:
            rendezvous.leave(rank)

    threads = [threading.Thread(target=run_rank, args=(r,), daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    rendezvous.wait_until_over()
    for thread in threads:
        thread.join(JOIN_TIMEOUT_S)
    if rendezvous.failure is not None:
        rank, error = rendezvous.failure
        error.add_note(f"on rank {rank} of {size}")
        raise error
    return results


def _copy_thread_context() -> Callable[[], AbstractContextManager[None]]:
    """A context manager that gives another thread torch's thread-local settings of the caller."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    casts = {
        device: torch.get_autocast_dtype(device)
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    }

    @contextmanager
    def caller_context() -> Iterator[None]:
        with ExitStack() as stack:
            for device, dtype in casts.items():
                stack.enter_context(torch.autocast(device, dtype))
            stack.enter_context(torch.cuda.stream(stream))
            stack.enter_context(torch.inference_mode(inference))
            # Each rank runs its backward on its own thread. Otherwise all ranks would share the
            # device's one autograd thread, and ranks that wait for one another would deadlock.
            # (After inference_mode, which turns multithreading on again.)
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            stack.enter_context(torch.set_grad_enabled(grad))
            yield

    return caller_context


class PendingMessage:
    """One side of a message that waits for the other side."""

    peer: int
    tensor: Tensor
    done: bool

    def __init__(self, peer: int, tensor: Tensor):
        self.peer, self.tensor, self.done = peer, tensor, False


class Rendezvous:
    """Matches the messages of all ranks of one process. Ranks are numbered as in
    `run_ranks`, whatever the group.
    """

    timeout_s: float

    def __init__(self, size: int, timeout_s: float):
        self.timeout_s, self._size = timeout_s, size
        self.failure: tuple[int, BaseException] | None = None
        self._changed = threading.Condition()
        self._left: set[int] = set()
        self._sends: dict[tuple, deque[PendingMessage]] = {}
        self._recvs: dict[tuple, deque[PendingMessage]] = {}
        self._exchanges: dict[tuple, dict[int, Any]] = {}

    def fail(self, rank: int, error: BaseException) -> None:
        with self._changed:
            if self.failure is None:
                self.failure = (rank, error)

    def leave(self, rank: int) -> None:
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def wait_until_over(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.failure or len(self._left) == self._size)

    def send(self, group: tuple[Any, ...], source: int, to: int, tensor: Tensor) -> PendingMessage:
        message = PendingMessage(to, tensor)
        self._match((*group, source, to), message, self._sends, self._recvs)
        return message

    def receive(
        self, group: tuple[Any, ...], source: int, to: int, tensor: Tensor
    ) -> PendingMessage:
        message = PendingMessage(source, tensor)
        self._match((*group, source, to), message, self._recvs, self._sends)
        return message

    def _match(
        self, key: tuple[Any, ...], message: PendingMessage, ours: dict, theirs: dict
    ) -> None:
        with self._changed:
            waiting = theirs.get(key)
            if not waiting:
                ours.setdefault(key, deque()).append(message)
                return
            other = waiting.popleft()
        sent, received = (message, other) if ours is self._sends else (other, message)
        _copy(key, sent.tensor, received.tensor)
        with self._changed:
            message.done = other.done = True
            self._changed.notify_all()

    def wait(self, message: PendingMessage) -> None:
        self._wait_until(lambda: message.done, lambda: [message.peer])

    def exchange(
        self, key: tuple[Any, ...], ranks: tuple[int, ...], rank: int, value: Any
    ) -> list[Any]:
        """The values of all ranks under this key, in rank order."""
        with self._changed:
            values = self._exchanges.setdefault(key, {})
            values[rank] = value
            if len(values) == len(ranks):  # complete: each rank holds a reference to it
                del self._exchanges[key]
                self._changed.notify_all()
        self._wait_until(
            lambda: len(values) == len(ranks), lambda: [r for r in ranks if r not in values]
        )
        return [values[r] for r in ranks]

    def _wait_until(self, done: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        with self._changed:
            over = lambda: self.failure or self._left.intersection(missing())
            self._changed.wait_for(lambda: done() or over(), self.timeout_s)
            if not done():
                raise self._make_error(missing()[0])

    def _make_error(self, peer: int) -> ParallelError:
        if self.failure is not None:
            rank, error = self.failure
            return ParallelError(f"rank {rank} failed: {type(error).__name__}: {error}", rank)
        if peer in self._left:
            return ParallelError(f"rank {peer} ended while others wait for it", peer)
        return ParallelError(f"rank {peer} did not answer within {self.timeout_s:g} s", peer)


def _copy(key: tuple[Any, ...], sent: Tensor, received: Tensor) -> None:
    if sent.shape != received.shape or sent.dtype != received.dtype:
        *_, source, to = key
        raise ParallelError(
            f"rank {source} sends {sent.dtype} {tuple(sent.shape)}, "
            f"rank {to} expects {received.dtype} {tuple(received.shape)}",
            source,
        )
    with torch.no_grad():
        received.copy_(sent)


class LocalWork:
    def __init__(self, rendezvous: Rendezvous, messages: list[PendingMessage]):
        self._rendezvous, self._messages = rendezvous, messages

    def wait(self) -> None:
        for message in self._messages:
            self._rendezvous.wait(message)


class LocalComm(PointToPointComm):
    """A rank of `run_ranks`."""

    rank: int
    size: int
    consistency: ConsistencyCache

    def __init__(
        self, rendezvous: Rendezvous, group: tuple[Any, ...], ranks: tuple[int, ...], rank: int
    ):
        self.rank, self.size = rank, len(ranks)
        self._rendezvous, self._group, self._ranks = rendezvous, group, ranks
        self.consistency, self._calls = ConsistencyCache(), 0
        self._parts: dict[tuple[int, ...], LocalComm] = {}

    def _exchange(self, kind: str, sends: list[PeerMessage], recvs: list[PeerMessage]) -> LocalWork:
        me, rendezvous = self._ranks[self.rank], self._rendezvous
        received = [
            rendezvous.receive(self._group, self._ranks[m.peer], me, m.tensor) for m in recvs
        ]
        sent = [rendezvous.send(self._group, me, self._ranks[m.peer], m.tensor) for m in sends]
        return LocalWork(rendezvous, [*received, *sent])

    def check_consistent(self, fields: Mapping[str, object], device: torch.device = CPU) -> None:
        check_consistent(self, fields)

    def exchange_digests(self, digest: bytes) -> Callable[[], list[bytes]]:
        return lambda: self._exchange_values("digests", digest)

    def exchange_texts(self, text: str) -> dict[int, str]:
        return dict(zip(self._ranks, self._exchange_values("fields", text), strict=True))

    def split(self, color: int) -> "LocalComm":
        colors = self._exchange_values("colors", color)
        return self.part([r for r in range(self.size) if colors[r] == color])

    def part(self, members: Sequence[int]) -> "LocalComm":
        ranks = tuple(self._ranks[r] for r in members)
        if ranks not in self._parts:
            group, rank = (*self._group, "part", ranks), members.index(self.rank)
            self._parts[ranks] = LocalComm(self._rendezvous, group, ranks, rank)
        return self._parts[ranks]

    def _exchange_values(self, kind: str, value: Any) -> list[Any]:
        self._calls += 1
        key = (*self._group, kind, self._calls)
        return self._rendezvous.exchange(key, self._ranks, self._ranks[self.rank], value)
