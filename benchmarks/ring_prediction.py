"""Predicts a ring attention step of any length: time, waiting time, and memory.

A context that does not fit into device memory is in host memory or on disk, cut into slabs. One
slab of queries is resident. Each slab of keys is read while the previous one travels round the
ring, as fold/offload.py reads segments, so that the disk limits the context.
"""

import math
from functools import lru_cache
from typing import NamedTuple

from benchmarks.ring_timeline import Timeline
from onchip.parallel.machines import H200, ROUNDS_PER_MERGE, Fabric, Machine, StorageTier
from onchip.parallel.simulate import FP32, LAYOUTS, RingStep


def six_blocks_bytes(step: RingStep) -> float:
    """Bytes of a chunk's Q, O, K, V and the incoming K and V, in the type of the inputs."""
    shape = step.shape
    return step.chunk * 2 * (shape.q_elements + shape.kv_elements) * shape.itemsize


def resident_bytes(step: RingStep, folds: bool | None = None) -> float:
    """Bytes of a step on one device: inputs and results, and, if it merges several results (a ring
    of several devices, or folds=True), the fp32 accumulators.
    """
    folds = step.num_devices > 1 if folds is None else folds
    return step.chunk * (_backward_bytes if step.backward else _forward_bytes)(step, folds)


def _forward_bytes(step: RingStep, folds: bool) -> int:
    """Bytes of a token: Q, K, V, out and lse. A fold adds the incoming K and V, and its out is
    fp32: the running state, and the results that wait to be merged.
    """
    q, kv, _, size = _elements(step)
    if not folds:
        return (2 * q + kv) * size + step.shape.num_heads * FP32
    outs = 1 + min(ROUNDS_PER_MERGE, max(step.num_devices - 1, 1))
    return (q + 2 * kv) * size + outs * (q + step.shape.num_heads) * FP32


def _backward_bytes(step: RingStep, folds: bool) -> int:
    """Bytes of a token: Q, O, dO, lse and delta, K, V, gradients in fp32. A fold adds the incoming
    K and V. It has dQ twice (the sum, one round) and dK and dV three times (held, incoming, one
    round).
    """
    q, kv, grads, size = _elements(step)
    copies = 2 if folds else 1
    inputs = (3 * q + copies * kv) * size + 2 * step.shape.num_heads * FP32
    return inputs + (copies * q + (2 * copies - 1) * grads) * FP32


def stored_bytes(step: RingStep) -> float:
    """Bytes in a storage tier: Q, O, K, V, and for backward dO, dQ, dK, dV."""
    q, kv, grads, size = _elements(step)
    return step.chunk * ((4 if step.backward else 2) * q * size + kv * size + grads * FP32)


def _elements(step: RingStep) -> tuple[int, int, int, int]:
    """Elements of a token: of Q, of K and V, of dK and dV; and the bytes of an input element."""
    shape = step.shape
    return shape.q_elements, shape.kv_elements, step.backward * shape.kv_elements, shape.itemsize


class TimeBreakdown(NamedTuple):
    """Seconds of a step and their parts.

    The busiest device computes for total - exposed - waiting; exposed is lost to links, waiting to
    storage. critical: seconds of each kind of event on the critical path.
    """

    total: float = 0.0
    exposed: float = 0.0
    waiting: float = 0.0
    critical: dict[str, float] = {}

    def add_passes(self, passes: int, line: Timeline, reading: float) -> "TimeBreakdown":
        """Add passes round the ring, each with so many seconds of reading in parallel."""
        late = max(0.0, reading - line.seconds)
        path = line.critical_path() if not late else {TIER: reading}
        kinds = dict.fromkeys([*self.critical, *path])
        return TimeBreakdown(
            self.total + passes * (line.seconds + late),
            self.exposed + passes * line.exposed,
            self.waiting + passes * late,
            {k: self.critical.get(k, 0.0) + passes * path.get(k, 0.0) for k in kinds},
        )


class Prediction(NamedTuple):
    """A predicted step. ideal: seconds at the rate of long calls, all devices always busy."""

    slabs: "Slabs"
    ideal: float
    time: TimeBreakdown

    @property
    def efficiency(self) -> float:
        return self.ideal / self.time.total


def predict(step: RingStep, fabric: Fabric, machine: Machine = H200) -> Prediction:
    """Predict a step from memory if it fits, else in slabs from the first tier that holds it, or
    the last.
    """
    step.check()
    ideal = step.flops / step.num_devices / machine.best(step.backward, step.shape.head_dim)
    slabs = Slabs.cut(step, machine)
    return Prediction(slabs, ideal, slabs.simulate(fabric))


TIER = "tier"


class Slabs(NamedTuple):
    """A step cut into passes round the ring that fit into memory: each slab of queries over each
    visible slab of keys. Slabs are consecutive in the context, and each is laid out over all
    devices, so that the layout matters only on the diagonal.
    """

    step: RingStep
    machine: Machine
    num_slabs: int
    tier: StorageTier | None

    @classmethod
    def cut(cls, step: RingStep, machine: Machine) -> "Slabs":
        if resident_bytes(step) <= machine.memory_bytes:
            return cls(step, machine, 1, None)
        holds = (t for t in machine.tiers if stored_bytes(step) <= t.unit_bytes)
        ahead = step.kv_bytes + 2 * step.dkv_bytes  # read for the next pass, written from the last
        num_slabs = math.ceil((resident_bytes(step, True) + ahead) / machine.memory_bytes)
        return cls(step, machine, num_slabs, next(holds, machine.tiers[-1]))

    @property
    def slab(self) -> RingStep:
        """A pass on the diagonal. Without a mask all layouts are alike."""
        layout = self.step.layout if self.step.causal else LAYOUTS[0]
        return self.step._replace(tokens=self.step.tokens / self.num_slabs, layout=layout)

    @property
    def _full_slab(self) -> RingStep:
        """Any other pass: every query sees every key."""
        return self.slab._replace(causal=False, layout=LAYOUTS[0])

    @property
    def num_passes(self) -> int:
        n = self.num_slabs
        return n * (n + 1) // 2 if self.step.causal else n * n

    @property
    def num_modules(self) -> int:
        """Storage modules for each device; 0 if the step fits into memory."""
        return self.tier.units(stored_bytes(self.step)) if self.tier else 0

    def simulate(self, fabric: Fabric) -> TimeBreakdown:
        """A pass takes the longer of itself and the reading for the next pass. The reading before
        the first pass overlaps with nothing.
        """
        diagonal = _timeline(self.slab, fabric, self.machine)
        first = self.query_seconds + self.key_seconds
        time = TimeBreakdown(first, 0.0, first, {TIER: first} if self.tier else {})
        time = time.add_passes(self.num_slabs, diagonal, first)
        if self.num_slabs == 1:
            return time
        full = _timeline(self._full_slab, fabric, self.machine)
        return time.add_passes(self.num_passes - self.num_slabs, full, self.key_seconds)

    @property
    def key_seconds(self) -> float:
        """Seconds to read a slab of K and V; backward also to read and write their gradients."""
        return self._seconds(self.step.kv_bytes + self.step.dkv_bytes, self.step.dkv_bytes)

    @property
    def query_seconds(self) -> float:
        """Seconds to read a slab of queries and to write their results."""
        block = self.step.chunk * self.step.shape.q_elements * self.step.shape.itemsize
        return self._seconds((3 if self.step.backward else 1) * block, block)

    def _seconds(self, read_bytes: float, write_bytes: float) -> float:
        """Modules of a tier work in parallel, up to the bandwidth of the host."""
        if self.tier is None:
            return 0.0
        host, units = self.machine.tiers[0], self.tier.units(stored_bytes(self.step))
        read = read_bytes / min(units * self.tier.read_s, host.read_s)
        return (
            max(read, write_bytes / min(units * self.tier.write_s, host.write_s)) / self.num_slabs
        )


@lru_cache(maxsize=2)  # the events of 1,024 devices take 50 MB
def _timeline(slab: RingStep, fabric: Fabric, machine: Machine) -> Timeline:
    return Timeline(slab, fabric, machine)
