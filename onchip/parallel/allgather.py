"""All-gather: every rank gets all K and V, and makes one call over them for each piece of its
positions. There are no states to merge, but K and V of the whole sequence must fit on a rank.

Forward, a rank sends its K and V to each other rank, in one message. Backward, it sends them again,
because they are not kept, and sends each rank its terms of that rank's dK and dV, unrounded.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.backend import accumulator_dtype
from onchip.parallel.comm import Comm
from onchip.parallel.ring import KVBuffer
from onchip.parallel.rounds import (
    KV,
    MAX_PLANS,
    GlobalMask,
    OutLse,
    Round,
    RoundOptions,
    RunningGradients,
    attend,
    plan_round,
)
from onchip.parallel.sharding import Layout, Piece

MAX_PIECES = 8  # calls of one rank; a layout with more pieces gets one call with a block mask


class AllGatherSchedule(NamedTuple):
    """The rounds of one rank: each has some of its rows, over all keys. positions[r]: the positions
    of rank r, on the device.
    """

    rounds: tuple[Round | None, ...]
    positions: tuple[Tensor, ...]


@lru_cache(maxsize=MAX_PLANS)
def plan_rounds(
    layout: Layout, global_mask: GlobalMask, rank: int, device: torch.device
) -> AllGatherSchedule:
    everything = torch.arange(global_mask.seqlen)
    positions = [layout.positions(r, global_mask.seqlen) for r in range(layout.size)]
    rounds, first = [], 0
    for rows in _split_rows(layout.pieces(rank, global_mask.seqlen), positions[rank]):
        rounds.append(_offset_rows(plan_round(global_mask, rows, everything, device), first))
        first += len(rows)
    return AllGatherSchedule(tuple(rounds), tuple(p.to(device) for p in positions))


def _split_rows(pieces: list[Piece], positions: Tensor) -> list[Tensor]:
    if len(pieces) > MAX_PIECES:
        return [positions]
    return [torch.arange(*piece) for piece in pieces]


def _offset_rows(round: Round | None, first: int) -> Round | None:
    """The same round, its rows counted from `first` on."""
    if round is None:
        return None
    return round._replace(rows=slice(first + round.rows.start, first + round.rows.stop))


def forward(
    comm: Comm, schedule: AllGatherSchedule, options: RoundOptions, q: Tensor, k: Tensor, v: Tensor
) -> OutLse:
    """(out, lse) of local queries over the keys of all ranks, unrounded."""
    (batch, seqlen, heads, _), wide = q.shape, accumulator_dtype(q.dtype)
    out = q.new_zeros(batch, seqlen, heads, v.shape[3], dtype=wide)
    lse = q.new_full((batch, heads, seqlen), -torch.inf, dtype=wide)
    k, v = _all_gather_kv(comm, schedule, k, v)
    for round in schedule.rounds:
        if round is not None:
            out[:, round.rows], lse[:, :, round.rows] = attend(options, round, q, k, v)
    return out, lse


def backward(
    comm: Comm,
    schedule: AllGatherSchedule,
    options: RoundOptions,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of the local queries and keys, unrounded. saved: (out, lse, dout, dlse or None) of
    the local queries over all keys.
    """
    wide = accumulator_dtype(q.dtype)
    k, v = _all_gather_kv(comm, schedule, k, v)
    dq, dk, dv = (t.new_zeros(t.shape, dtype=wide) for t in (q, k, v))
    queries = RunningGradients(options, q, saved, dq)
    for round in schedule.rounds:
        if round is not None:
            queries.add(round, k, v, (dk, dv))
    return queries.finish(), *_reduce_scatter_grads(comm, schedule, dk, dv)


def _all_gather_kv(comm: Comm, schedule: AllGatherSchedule, k: Tensor, v: Tensor) -> KV:
    """K and V of all ranks, in the order of their positions."""
    buffers = [KVBuffer(k, v, len(rows), k.dtype) for rows in schedule.positions]
    buffers[comm.rank].fill(k, v)
    messages = [
        buffer.message(len(rows)) for buffer, rows in zip(buffers, schedule.positions, strict=True)
    ]
    comm.all_gather(messages[comm.rank], messages).wait()
    seqlen = sum(map(len, schedule.positions))
    k, v = whole = [t.new_empty(t.shape[0], seqlen, *t.shape[2:]) for t in (k, v)]
    for buffer, rows in zip(buffers, schedule.positions, strict=True):
        for t, part in zip(whole, buffer.kv(len(rows)), strict=True):
            t[:, rows] = part
    return k, v


def _reduce_scatter_grads(comm: Comm, schedule: AllGatherSchedule, dk: Tensor, dv: Tensor) -> KV:
    """The sums of dK and dV over all ranks, at the positions of this rank."""
    buffers = [KVBuffer(dk, dv, len(rows), dk.dtype) for rows in schedule.positions]
    for buffer, rows in zip(buffers, schedule.positions, strict=True):
        buffer.fill(dk[:, rows], dv[:, rows])
    length = len(schedule.positions[comm.rank])
    messages = [
        buffer.message(len(rows)) for buffer, rows in zip(buffers, schedule.positions, strict=True)
    ]
    total = KVBuffer(dk, dv, length, dk.dtype)
    comm.reduce_scatter(messages, total.message(length)).wait()
    return total.kv(length)
