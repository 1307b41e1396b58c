"""All-gather: every rank gets all keys and values and attends them in one call for each piece of
its positions. There are no states to merge, but it takes memory for the keys of the whole sequence.

Forward, a rank sends its keys and values to each other rank, in one message. Backward it does so
again (they are not kept), and sends each its share of the gradients of their keys, unrounded.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.backend import accumulator_dtype
from onchip.parallel.comm import Comm
from onchip.parallel.ring import Parcel
from onchip.parallel.rounds import PLANS, Backward, Call, Pair, Round, Rule, attend, plan
from onchip.parallel.sharding import Layout, Piece

MAX_PIECES = 8  # calls of one rank; what is cut finer is one call with a block mask


class Schedule(NamedTuple):
    """What one rank does: rounds over all keys, which see rows of their own. places[r] are the
    positions of rank r, on the device.
    """

    rounds: tuple[Round | None, ...]
    places: tuple[Tensor, ...]


@lru_cache(maxsize=PLANS)
def schedule(layout: Layout, rule: Rule, rank: int, device: torch.device) -> Schedule:
    everything = torch.arange(rule.seqlen)
    places = [layout.positions(r, rule.seqlen) for r in range(layout.size)]
    rounds, first = [], 0
    for rows in _pieces(layout.pieces(rank, rule.seqlen), places[rank]):
        rounds.append(_shifted(plan(rule, rows, everything, device), first))
        first += len(rows)
    return Schedule(tuple(rounds), tuple(p.to(device) for p in places))


def _pieces(pieces: list[Piece], positions: Tensor) -> list[Tensor]:
    if len(pieces) > MAX_PIECES:
        return [positions]
    return [torch.arange(*piece) for piece in pieces]


def _shifted(round: Round | None, first: int) -> Round | None:
    """A round of rows that come after `first` others."""
    if round is None:
        return None
    return round._replace(rows=slice(first + round.rows.start, first + round.rows.stop))


def forward(comm: Comm, schedule: Schedule, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Pair:
    """(out, lse) of local queries over the keys of all ranks, unrounded."""
    (batch, seqlen, heads, _), wide = q.shape, accumulator_dtype(q.dtype)
    out = q.new_zeros(batch, seqlen, heads, v.shape[3], dtype=wide)
    lse = q.new_full((batch, heads, seqlen), -torch.inf, dtype=wide)
    k, v = _gathered(comm, schedule, k, v)
    for round in schedule.rounds:
        if round is not None:
            out[:, round.rows], lse[:, :, round.rows] = attend(call, round, q, k, v)
    return out, lse


def backward(
    comm: Comm, schedule: Schedule, call: Call, q: Tensor, k: Tensor, v: Tensor, saved: tuple
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of the local queries and keys, unrounded. saved is (out, lse, dout, dlse or None)
    of the local queries over all keys.
    """
    wide = accumulator_dtype(q.dtype)
    k, v = _gathered(comm, schedule, k, v)
    dq, dk, dv = (t.new_zeros(t.shape, dtype=wide) for t in (q, k, v))
    queries = Backward(call, q, saved, dq)
    for round in schedule.rounds:
        if round is not None:
            queries.add(round, k, v, (dk, dv))
    return queries.settled(), *_scattered(comm, schedule, dk, dv)


def _gathered(comm: Comm, schedule: Schedule, k: Tensor, v: Tensor) -> Pair:
    """Keys and values of all ranks, in the order of their positions."""
    parcels = [Parcel(k, v, len(rows), k.dtype) for rows in schedule.places]
    parcels[comm.rank].fill(k, v)
    flats = [parcel.flat(len(rows)) for parcel, rows in zip(parcels, schedule.places, strict=True)]
    comm.gather(flats[comm.rank], flats).wait()
    seqlen = sum(map(len, schedule.places))
    k, v = whole = [t.new_empty(t.shape[0], seqlen, *t.shape[2:]) for t in (k, v)]
    for parcel, rows in zip(parcels, schedule.places, strict=True):
        for t, part in zip(whole, parcel.pair(len(rows)), strict=True):
            t[:, rows] = part
    return k, v


def _scattered(comm: Comm, schedule: Schedule, dk: Tensor, dv: Tensor) -> Pair:
    """The sums over all ranks, at the positions of this one."""
    parcels = [Parcel(dk, dv, len(rows), dk.dtype) for rows in schedule.places]
    for parcel, rows in zip(parcels, schedule.places, strict=True):
        parcel.fill(dk[:, rows], dv[:, rows])
    length = len(schedule.places[comm.rank])
    flats = [parcel.flat(len(rows)) for parcel, rows in zip(parcels, schedule.places, strict=True)]
    total = Parcel(dk, dv, length, dk.dtype)
    comm.scatter_sum(flats, total.flat(length)).wait()
    return total.pair(length)
