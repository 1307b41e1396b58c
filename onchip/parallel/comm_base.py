"""The interface of communicators, and every pattern as messages between pairs of ranks.

`GroupComm` (torch.distributed) and `LocalComm` (threads) share these patterns, and sums over ranks
are taken in rank order. So a result has the same bits in one process and on torch.distributed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from onchip.parallel.consistency import ConsistencyCache


CPU = torch.device("cpu")


class ParallelError(RuntimeError):
    """Ranks make different calls, or one of them was lost. rank: the lost rank, or the first of the
    smallest group of ranks that differs from the others.
    """

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


class CommWork(Protocol):
    """Communication in flight. Its tensors must not be touched until `wait` has returned."""

    def wait(self) -> None:
        """Return when the results may be used: on a GPU by the current stream. ParallelError names
        the rank that was lost or did not answer in time."""
        ...


class Comm(Protocol):
    """One rank of `size`. All ranks make the same calls in the same order; a call posts its
    messages and returns. Tensors of one call have one dtype; sender and receiver use one shape."""

    rank: int
    size: int

    def shift(self, send: Tensor, recv: Tensor, hops: int = 1) -> CommWork:
        """Send `send` to rank + hops, receive `recv` from rank - hops (modulo size)."""
        ...

    def all_gather(self, x: Tensor, out: Sequence[Tensor]) -> CommWork:
        """out[r] = x of rank r. Shapes may differ from rank to rank."""
        ...

    def reduce_scatter(self, parts: Sequence[Tensor], out: Tensor) -> CommWork:
        """out = the sum over ranks r, in rank order, of parts[rank] of r; at least in fp32."""
        ...

    def all_to_all(self, send: Sequence[Tensor], recv: Sequence[Tensor]) -> CommWork:
        """recv[r] = send[rank] of rank r."""
        ...

    def sum(self, x: Tensor) -> CommWork:
        """x becomes the sum of the x of all ranks, the same bits everywhere."""
        ...

    def max(self, x: Tensor) -> CommWork:
        """x becomes the maximum of the x of all ranks."""
        ...

    def check_consistent(self, fields: Mapping[str, object], device: torch.device = CPU) -> None:
        """Return when the fields of all ranks are equal. Otherwise every rank raises a
        ParallelError that names fields, ranks and values. device: of the tensors that travel next.
        Where the host does not wait for them (NCCL), the next call compares fields that were equal
        before.
        """
        ...

    @property
    def consistency(self) -> "ConsistencyCache":
        """The cache of `check_consistent`."""
        ...

    def exchange_digests(self, digest: bytes) -> Callable[[], list[bytes]]:
        """Post 16 bytes to all ranks. The returned function waits for the digests of all ranks."""
        ...

    def exchange_texts(self, text: str) -> dict[int, str]:
        """The texts of all ranks, by global rank."""
        ...

    def split(self, color: int) -> "Comm":
        """The communicator of the ranks that give the same color, in the order of their ranks."""
        ...

    def part(self, members: Sequence[int]) -> "Comm":
        """The communicator of these ranks, this one among them. All of them pass the same members:
        it costs no message."""
        ...


class PeerMessage(NamedTuple):
    """A tensor to send to a peer, or to receive from it."""

    peer: int
    tensor: Tensor


class CompletedWork:
    """Nothing is in flight."""

    def wait(self) -> None:
        return


class WorkThen:
    """Work, and a function to call once after it."""

    def __init__(self, work: CommWork, finish: Callable[[], object]):
        self._work, self._finish = work, finish

    @torch.no_grad()
    def wait(self) -> None:
        self._work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class PointToPointComm:
    """The patterns of `Comm` over `_exchange`, which a subclass defines."""

    rank: int
    size: int

    def _exchange(self, kind: str, sends: list[PeerMessage], recvs: list[PeerMessage]) -> CommWork:
        """Post contiguous, non-empty tensors. Messages between two ranks keep their order."""
        raise NotImplementedError

    @torch.no_grad()
    def shift(self, send: Tensor, recv: Tensor, hops: int = 1) -> CommWork:
        _check_like("send", send, "recv", recv, shapes=False)
        if hops % self.size == 0:
            recv.copy_(send)
            return CompletedWork()
        ahead, behind = (self.rank + hops) % self.size, (self.rank - hops) % self.size
        return self._post("shift", [PeerMessage(ahead, send)], [PeerMessage(behind, recv)])

    @torch.no_grad()
    def all_gather(self, x: Tensor, out: Sequence[Tensor]) -> CommWork:
        return self._all_gather("all_gather", x, out)

    @torch.no_grad()
    def all_to_all(self, send: Sequence[Tensor], recv: Sequence[Tensor]) -> CommWork:
        self._check_parts("send", send)
        self._check_parts("recv", recv)
        _check_like(f"send[{self.rank}]", send[self.rank], f"recv[{self.rank}]", recv[self.rank])
        recv[self.rank].copy_(send[self.rank])
        return self._post("all_to_all", self._to_all(send), self._to_all(recv))

    @torch.no_grad()
    def reduce_scatter(self, parts: Sequence[Tensor], out: Tensor) -> CommWork:
        self._check_parts("parts", parts)
        _check_like(f"parts[{self.rank}]", parts[self.rank], "out", out)
        terms = [torch.empty_like(out, memory_format=torch.contiguous_format) for _ in parts]
        terms[self.rank] = parts[self.rank]
        work = self._post("reduce_scatter", self._to_all(parts), self._to_all(terms))
        return WorkThen(work, lambda: out.copy_(_sum_in_order(terms)))

    @torch.no_grad()
    def sum(self, x: Tensor) -> CommWork:
        terms = [torch.empty_like(x) for _ in range(self.size)]
        return WorkThen(self._all_gather("sum", x, terms), lambda: x.copy_(_sum_in_order(terms)))

    @torch.no_grad()
    def max(self, x: Tensor) -> CommWork:
        terms = [torch.empty_like(x) for _ in range(self.size)]
        return WorkThen(
            self._all_gather("max", x, terms), lambda: torch.amax(torch.stack(terms), 0, out=x)
        )

    def _all_gather(self, kind: str, x: Tensor, out: Sequence[Tensor]) -> CommWork:
        self._check_parts("out", out)
        _check_like("x", x, f"out[{self.rank}]", out[self.rank])
        out[self.rank].copy_(x)
        return self._post(kind, self._to_all([x] * self.size), self._to_all(out))

    def _to_all(self, tensors: Sequence[Tensor]) -> list[PeerMessage]:
        """The next rank first, so that not all ranks begin with rank 0."""
        peers = [(self.rank + i) % self.size for i in range(1, self.size)]
        return [PeerMessage(peer, tensors[peer]) for peer in peers]

    def _post(self, kind: str, sends: list[PeerMessage], recvs: list[PeerMessage]) -> CommWork:
        """Messages without elements are not sent; tensors with gaps travel as copies."""
        sends = [PeerMessage(m.peer, m.tensor.contiguous()) for m in sends if m.tensor.numel()]
        wanted = [m for m in recvs if m.tensor.numel()]
        recvs = [PeerMessage(m.peer, _contiguous_like(m.tensor)) for m in wanted]
        work = self._exchange(kind, sends, recvs) if sends or recvs else CompletedWork()
        copies = [(m.tensor, c.tensor) for m, c in zip(wanted, recvs, strict=True)]
        copies = [(to, solid) for to, solid in copies if to is not solid]
        return WorkThen(work, lambda: [to.copy_(solid) for to, solid in copies]) if copies else work

    def _check_parts(self, name: str, parts: Sequence[Tensor]) -> None:
        if len(parts) != self.size:
            raise ValueError(f"{name} has {len(parts)} tensors for {self.size} ranks")
        dtypes = sorted({str(part.dtype) for part in parts})
        if len(dtypes) > 1:
            raise ValueError(f"the tensors of {name} have several dtypes: {', '.join(dtypes)}")


def _contiguous_like(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_contiguous() else torch.empty_like(tensor).contiguous()


def _sum_in_order(terms: Sequence[Tensor]) -> Tensor:
    """The sum from first to last; 16-bit terms are added in fp32."""
    narrow = terms[0].is_floating_point() and terms[0].element_size() < 4
    total = terms[0].to(torch.float32 if narrow else terms[0].dtype, copy=True)
    for term in terms[1:]:
        total += term
    return total


def _check_like(name_a: str, a: Tensor, name_b: str, b: Tensor, shapes: bool = True) -> None:
    if a.dtype != b.dtype or a.device != b.device or (shapes and a.shape != b.shape):
        raise ValueError(
            f"{name_a} is {_describe(a)}, {name_b} is {_describe(b)}: they must be alike"
        )


def _describe(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} on {x.device}"
