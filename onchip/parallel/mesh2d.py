"""Ranks in two dimensions: neighbours exchange heads, and the groups of neighbours form a ring."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import torch
from torch import Tensor

from onchip.parallel.comm import Comm, CommWork
from onchip.parallel.comm_base import CPU, CompletedWork
from onchip.parallel.consistency import ConsistencyCache, check_consistent, digest_of
from onchip.parallel.rounds import MAX_PLANS
from onchip.parallel.sharding import Layout, Piece


class SingleRankComm:
    """The communicator of a single rank."""

    rank: int = 0
    size: int = 1

    def exchange_digests(self, digest: bytes) -> Callable[[], list[bytes]]:
        return lambda: [digest]

    def exchange_texts(self, text: str) -> dict[int, str]:
        return {0: text}

    def sum(self, x: Tensor) -> CommWork:
        return CompletedWork()


class Mesh2D:
    """The two communicators of a rank. Its global rank is outer.rank * inner.size + inner.rank."""

    outer: Comm | SingleRankComm
    inner: Comm
    rank: int
    size: int

    def __init__(self, outer: Comm | SingleRankComm, inner: Comm):
        self.outer, self.inner = outer, inner
        self.rank = outer.rank * inner.size + inner.rank
        self.size = outer.size * inner.size

    @property
    def consistency(self) -> ConsistencyCache:
        return self.inner.consistency

    def check_consistent(self, fields: Mapping[str, object], device: torch.device = CPU) -> None:
        check_consistent(self, fields)

    def exchange_digests(self, digest: bytes) -> Callable[[], list[bytes]]:
        """The digests of this rank's group, and one digest of each group: that of its members if
        all
        have the same, else another. They are equal if and only if all ranks have the same digest.
        """
        inner_digests = self.inner.exchange_digests(digest)

        def wait() -> list[bytes]:
            group = inner_digests()
            same = len(set(group)) == 1
            return [
                *group,
                *self.outer.exchange_digests(digest if same else digest_of(b"".join(group)))(),
            ]

        return wait

    def exchange_texts(self, text: str) -> dict[int, str]:
        groups = self.outer.exchange_texts(json.dumps([*self.inner.exchange_texts(text).items()]))
        return {rank: each for group in groups.values() for rank, each in json.loads(group)}

    def sum(self, x: Tensor) -> CommWork:
        self.inner.sum(x).wait()
        return self.outer.sum(x)


def make_mesh2d(comm: Comm, inner_size: int) -> Mesh2D:
    """The ranks of a communicator in groups of inner_size neighbours."""
    if inner_size == comm.size:
        return Mesh2D(SingleRankComm(), comm)
    first = comm.rank // inner_size * inner_size
    inner = comm.part(range(first, first + inner_size))
    return Mesh2D(comm.part(range(comm.rank % inner_size, comm.size, inner_size)), inner)


def inner_sizes(size: int, num_kv_heads: int) -> list[int]:
    """The group sizes that divide both the ranks and the key heads."""
    most = gcd(size, num_kv_heads)
    return [n for n in range(1, most + 1) if most % n == 0]


def sent_bytes(size: int, inner_size: int, num_heads: int, num_kv_heads: int) -> float:
    """Bytes that a rank sends in a forward pass, in units of its own K and V, if groups of U =
    inner_size ranks exchange heads and form a ring: (U - 1) / U of q, k, v and out, which is as
    wide as q; and its K and V to each of the size / U - 1 other groups. inner_size = 1 is a ring,
    inner_size = size is Ulysses.
    """
    exchanged = (num_heads + num_kv_heads) / num_kv_heads * (inner_size - 1) / inner_size
    return exchanged + size / inner_size - 1


def best_inner_size(size: int, num_heads: int, num_kv_heads: int, hops: int | None = None) -> int:
    """The group size that sends least. On a tie the ring wins, because its messages overlap with
    kernels. hops: of a ring of all ranks, if windows or documents end it early.
    """
    cost = {
        n: sent_bytes(size, n, num_heads, num_kv_heads) for n in inner_sizes(size, num_kv_heads)
    }
    if hops is not None:
        cost[1] = hops
    return min(cost, key=cost.__getitem__)


@dataclass(frozen=True)
class GroupedLayout(Layout):
    """Another layout with groups of inner_size neighbours as its ranks."""

    layout: Layout
    inner_size: int

    @property
    def size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.layout.size // self.inner_size

    def positions(self, rank: int, seqlen: int) -> Tensor:
        return _positions(self.layout, self.inner_size, rank, seqlen)

    def length(self, rank: int, seqlen: int) -> int:
        first = rank * self.inner_size
        return sum(self.layout.length(first + i, seqlen) for i in range(self.inner_size))

    def pieces(self, rank: int, seqlen: int) -> list[Piece]:
        at = self.positions(rank, seqlen)
        ends = (at.diff() != 1).nonzero().flatten() + 1
        starts = torch.cat([at[:1], at[ends]]).tolist()
        stops = torch.cat([at[ends - 1], at[-1:]]).add(1).tolist()
        return [(start, stop, 1) for start, stop in zip(starts, stops, strict=True)]

    def rows(self, rank: int, seqlen: int, device: torch.device) -> tuple[Tensor, ...]:
        """For each member of a group, the indices of its positions in the group's."""
        return _rows(self, rank, seqlen, device)


@lru_cache(maxsize=MAX_PLANS)
def _positions(layout: Layout, inner_size: int, rank: int, seqlen: int) -> Tensor:
    members = range(rank * inner_size, (rank + 1) * inner_size)
    return torch.cat([layout.positions(member, seqlen) for member in members]).sort().values


@lru_cache(maxsize=MAX_PLANS)
def _rows(
    groups: GroupedLayout, rank: int, seqlen: int, device: torch.device
) -> tuple[Tensor, ...]:
    whole, first = groups.positions(rank, seqlen), rank * groups.inner_size
    members = (groups.layout.positions(first + i, seqlen) for i in range(groups.inner_size))
    return tuple(torch.searchsorted(whole, positions).to(device) for positions in members)
