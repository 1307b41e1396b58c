"""Ring attention: queries stay, K and V go round, states merge (Liu et al. 2023, arXiv:2310.01889).

rounds.py draws the rounds. Forward, in round i a rank attends to the keys of rank - i while it
sends them to rank + 1: `hops` messages of one packed K/V buffer each, posted before the kernel is
launched.

Backward, K and V go round again, and dK and dV follow one round behind:

    round i on rank r
      post     K V of rank r - i      -> r + 1        received while the kernel runs
      compute  dq_i, dk_i, dv_i of these keys
      wait     dK dV of these keys    <- r - 1        sent by r - 1 after its round i - 1
      add      dk_i, dv_i
      post     dK dV                  -> r + 1        after the last round: to their own rank

Terms and sums are fp32 (fp64 for fp64), whatever the type of the inputs.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from onchip.core.backend import accumulator_dtype
from onchip.parallel.comm import Comm, CommWork
from onchip.parallel.rounds import (
    KV,
    OutLse,
    RingSchedule,
    RoundOptions,
    RunningGradients,
    make_running_state,
)


def forward(
    comm: Comm, schedule: RingSchedule, options: RoundOptions, q: Tensor, k: Tensor, v: Tensor
) -> OutLse:
    """(out, lse) of local queries over the keys of all ranks, unrounded."""
    state = make_running_state(q, v.shape[-1])
    for round, (k_here, v_here) in zip(
        schedule.rounds, _iterate_kv(comm, schedule, k, v), strict=True
    ):
        if round is not None:
            state.fold(options, round, q, k_here, v_here)
    return state.result()


def backward(
    comm: Comm,
    schedule: RingSchedule,
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
    queries = RunningGradients(options, q, saved, q.new_zeros(q.shape, dtype=wide))
    sums = KVGradBuffers(comm, schedule, (k, v), wide)
    for i, (k_here, v_here) in enumerate(_iterate_kv(comm, schedule, k, v)):
        round = schedule.rounds[i]
        own = None if i else sums.wait_for_round(0)  # sums of other keys are still in flight
        share = None if round is None else queries.add(round, k_here, v_here, own)
        pair = own or sums.wait_for_round(i)
        if round is not None and share is not None:
            for total, part in zip(pair, share, strict=True):
                total[:, round.keys] += part
        sums.send_on(i)
    return queries.finish(), *sums.wait_for_own()


def _iterate_kv(comm: Comm, schedule: RingSchedule, k: Tensor, v: Tensor) -> Iterator[KV]:
    """K and V of rank, rank - 1, ..., rank - hops. While the caller uses one pair, the next is in
    flight; a pair is valid until the next is taken.
    """
    lengths = _lengths_of_rounds(comm, schedule)
    here, there = (KVBuffer(k, v, max(lengths) if schedule.hops else 0, k.dtype) for _ in range(2))
    if schedule.hops:
        here.fill(k, v)
    held = k, v
    for i, length in enumerate(lengths):
        work = None
        if i < schedule.hops:
            work = comm.shift(here.message(length), there.message(lengths[i + 1]))
        yield held
        if work is not None:
            work.wait()
            here, there = there, here
            held = here.kv(lengths[i + 1])


class KVGradBuffers:
    """dK and dV of the keys that are here: sums of the terms of the ranks that had them before."""

    def __init__(self, comm: Comm, schedule: RingSchedule, like: KV, dtype: torch.dtype):
        self._comm, self._hops = comm, schedule.hops
        self._lengths = _lengths_of_rounds(comm, schedule)
        self._here = KVBuffer(*like, max(self._lengths), dtype)
        self._there = KVBuffer(*like, max(self._lengths) if self._hops else 0, dtype)
        self._work: CommWork | None = None

    def wait_for_round(self, i: int) -> KV:
        """The sums so far for the keys of round i. The caller adds its terms to them."""
        if i:
            self._wait_and_swap()
        pair = self._here.kv(self._lengths[i])
        if not i:
            for t in pair:
                t.zero_()
        return pair

    def send_on(self, i: int) -> None:
        """Send the sums to the rank that has these keys next. After the last round, send them to
        the rank that owns the keys.
        """
        send, hops_to_owner = self._here.message(self._lengths[i]), self._comm.size - self._hops
        if i < self._hops:
            self._work = self._comm.shift(send, self._there.message(self._lengths[i + 1]))
        elif self._hops:
            self._work = self._comm.shift(
                send, self._there.message(self._lengths[0]), hops=hops_to_owner
            )

    def wait_for_own(self) -> KV:
        """dk and dv of this rank's own keys, from all ranks."""
        if self._hops:
            self._wait_and_swap()
        return self._here.kv(self._lengths[0])

    def _wait_and_swap(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._here, self._there = self._there, self._here


class KVBuffer:
    """K and V, or dK and dV, of one rank in one piece of memory, so that one message carries both.
    longest: the most tokens that any rank holds.
    """

    def __init__(self, k: Tensor, v: Tensor, longest: int, dtype: torch.dtype):
        self._shapes = [(t.shape[0], t.shape[2], t.shape[3]) for t in (k, v)]
        self._storage = k.new_empty(longest * sum(self._per_token()), dtype=dtype)

    def message(self, length: int) -> Tensor:
        """The memory of `length` tokens, as one flat message."""
        return self._storage[: length * sum(self._per_token())]

    def kv(self, length: int) -> KV:
        """(batch, length, heads, dim) views of K and of V."""
        parts = self.message(length).split([length * n for n in self._per_token()])
        k, v = (
            part.view(batch, length, heads, dim)
            for part, (batch, heads, dim) in zip(parts, self._shapes, strict=True)
        )
        return k, v

    def fill(self, k: Tensor, v: Tensor) -> None:
        for part, t in zip(self.kv(k.shape[1]), (k, v), strict=True):
            part.copy_(t)

    def _per_token(self) -> list[int]:
        return [batch * heads * dim for batch, heads, dim in self._shapes]


def _lengths_of_rounds(comm: Comm, schedule: RingSchedule) -> list[int]:
    return [schedule.lengths[(comm.rank - i) % comm.size] for i in range(schedule.hops + 1)]
