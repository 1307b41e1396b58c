"""Simulates a ring attention step on machines that are not here, from measured kernel times and
specified link speeds.

A step is a graph of events, computed for all devices at once: an event happens a duration after the
last of its causes. The order is that of onchip/parallel/ring.py: post send and receive, run the
kernel over the held K and V, merge the result, wait for the transfer. In the backward pass dK and
dV follow one hop behind, over the same link and before the next K and V.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.parallel.machines import H200, Fabric, Machine
from onchip.parallel.simulate import RingStep, SimulatedRound, merge_seconds, rounds, seconds

Key = tuple[str, int]  # kind of event, round


class TimeSpan(NamedTuple):
    """An event with a duration, on one device."""

    device: int
    what: str
    round: int
    start: float
    end: float


@dataclass
class EventGraph:
    """Times of events on all devices: at[kind, round] is a tensor over ranks."""

    num_devices: int
    at: dict[Key, Tensor] = field(default_factory=dict)
    causes: dict[Key, list[tuple[Key, int]]] = field(default_factory=dict)
    lasted: dict[Key, Tensor] = field(default_factory=dict)

    def add(self, key: Key, lasts: Tensor | None, *causes: tuple[Key, int]) -> None:
        """Add an event, `lasts` seconds after the last of its causes. Cause (key, shift): event
        `key` on rank + shift. Causes that never happened are ignored.
        """
        known = [(cause, shift) for cause, shift in causes if cause in self.at]
        happened = [self.at[c].roll(-shift) if shift else self.at[c] for c, shift in known]
        if happened:
            times = reduce(torch.maximum, happened)
        else:
            times = torch.zeros(self.num_devices, dtype=torch.float64)
        self.causes[key] = known
        if lasts is not None:
            times = times + lasts
            self.lasted[key] = lasts
        self.at[key] = times

    def path(self, key: Key, rank: int) -> Iterator[TimeSpan]:
        """The critical path of an event, from its end to its beginning."""
        while True:
            time, lasts = float(self.at[key][rank]), self._lasts(key, rank)
            if lasts:
                yield TimeSpan(rank, key[0], key[1], time - lasts, time)
            if not self.causes[key]:
                return
            shifted = [(cause, (rank + s) % self.num_devices) for cause, s in self.causes[key]]
            key, rank = max(shifted, key=lambda event: float(self.at[event[0]][event[1]]))

    def _lasts(self, key: Key, rank: int) -> float:
        return float(self.lasted[key][rank]) if key in self.lasted else 0.0

    def spans(self, device: int) -> Iterator[TimeSpan]:
        """All events with a duration on a device; a message belongs to its sender."""
        for key in self.lasted:
            end, lasts = float(self.at[key][device]), self._lasts(key, device)
            if lasts:
                yield TimeSpan(device, key[0], key[1], end - lasts, end)


Cost = Callable[[RingStep, SimulatedRound, Machine], float]
COSTS: tuple[Cost, ...] = (seconds, merge_seconds)
COMPUTE, MERGE, SEND_KV, SEND_DKV = "kernel", "merge", "K, V", "dK, dV"
END: Key = ("end", 0)
ROUNDING = 1e-9  # relative, of sums over many rounds


@dataclass(frozen=True)
class Timeline:
    """The events of a step that fits into memory."""

    step: RingStep
    fabric: Fabric
    machine: Machine = H200

    @property
    def seconds(self) -> float:
        return float(self.events.at[END].max())

    @property
    def busy(self) -> float:
        """Compute time of the device with the most work."""
        own, lower, upper = (sum(times) for times in zip(*self._costs.values(), strict=True))
        return own + (self.step.num_devices - 1) * max(lower, upper)

    @property
    def exposed(self) -> float:
        """Seconds that communication adds to the busiest device."""
        added = self.seconds - self.busy
        return added if added > ROUNDING * self.seconds else 0.0

    @cached_property
    def events(self) -> EventGraph:
        """The events of one pass round the ring."""
        self.step.check()
        events = EventGraph(self.step.num_devices)
        for i in range(self.step.num_devices):
            self._begin(events, i)
            events.add((COMPUTE, i), self._over_ranks(i, seconds), (("begun", i), 0))
            self._finish(events, i)
        last = self.step.num_devices - 1
        if self.step.backward and last:
            self._send(events, (SEND_DKV, last), (MERGE, last), (SEND_KV, last))  # to the owners
        events.add(END, None, ((MERGE, last), 0), *self._awaited((SEND_DKV, last)))
        return events

    def _begin(self, events: EventGraph, i: int) -> None:
        """A round begins when the last one is merged and its transfer is complete, both ways. Its K
        and V are sent after the gradients of the last round.
        """
        events.add(("begun", i), None, ((MERGE, i - 1), 0), *self._awaited((SEND_KV, i - 1)))
        if self.step.backward and i:
            self._send(events, (SEND_DKV, i - 1), (MERGE, i - 1), (SEND_KV, i - 1))
        if i < self.step.num_devices - 1:
            self._send(events, (SEND_KV, i), ("begun", i), (SEND_DKV, i - 1))

    def _finish(self, events: EventGraph, i: int) -> None:
        """Merge the result; in the backward pass, into the received gradients."""
        received = self._awaited((SEND_DKV, i - 1))
        events.add((MERGE, i), self._over_ranks(i, merge_seconds), ((COMPUTE, i), 0), *received)

    def _send(self, events: EventGraph, message: Key, posted: Key, before: Key) -> None:
        """A message from each rank to the next: after both have posted it, and after the previous
        message on the link.
        """
        causes = (posted, 0), (posted, 1), (before, 0)
        events.add(message, self._message[message[0]], *causes)

    @cached_property
    def _message(self) -> dict[str, Tensor]:
        over = lambda size: self.fabric.seconds(self.step.num_devices, size)
        return {SEND_KV: over(self.step.kv_bytes), SEND_DKV: over(self.step.dkv_bytes)}

    @staticmethod
    def _awaited(key: Key) -> list[tuple[Key, int]]:
        """The message to the next rank has left, and that of the previous rank has arrived."""
        return [(key, 0), (key, -1)]

    def _over_ranks(self, i: int, cost: Cost) -> Tensor:
        """The cost of round i on every rank: rank r holds the keys of rank r - i."""
        own, lower, upper = self._costs[cost]
        times = torch.full((self.step.num_devices,), lower if i else own, dtype=torch.float64)
        if upper != lower:
            times[:i] = upper
        return times

    @cached_property
    def _costs(self) -> dict[Cost, list[float]]:
        kinds = rounds(self.step)
        return {cost: [cost(self.step, k, self.machine) for k in kinds] for cost in COSTS}

    def critical_path(self) -> dict[str, float]:
        """Seconds of each kind of event on the critical path of the step."""
        total: dict[str, float] = {}
        for span in self.events.path(END, int(self.events.at[END].argmax())):
            total[span.what] = total.get(span.what, 0.0) + span.end - span.start
        return total
