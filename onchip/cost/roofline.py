"""Predicted time of a call, and the unit of the device that limits it.

Lower bound: each unit alone, that is bytes over bandwidth, operations over the rate of the tensor
cores, exponentials over the rate of their unit; the longest of them is the bound. How much of it a
kernel reaches follows from its pipeline. Consumers (warpgroups of 64 rows) use the units of a
processor in turn, one tile after another: tensor cores, exp unit and lanes, shared memory. That is
a closed queueing network; mean value analysis gives its throughput (Reiser and Lavenberg, 1980)
from the time that a tile needs on each unit. With one consumer nothing overlaps; with many the
slowest unit is never idle. Steps that need the tiles of all consumers are done in turns.

No factor was fitted. But the choice of units, steps and synchronisations was made with measurements
of an H200 in view: docs/benchmarks.md says which predictions held, also for cases that were not
looked at before. Short calls take longer than predicted.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.problem import Problem
from onchip.cost.hardware import Hardware
from onchip.kernels.tiles import (
    HOPPER_SPLIT_ALL,
    HopperConfig,
    HopperSplitConfig,
    hopper_backward_config,
    hopper_backward_widths,
    hopper_forward_of,
    hopper_forward_widths,
    hopper_split_config,
    hopper_splits_dq,
)

HBM, TENSOR, EXP, SHARED, LAUNCH = "HBM", "tensor cores", "exp unit", "shared memory", "launch"
LANES = "fp32 lanes"  # compute the products of dtypes that tensor cores lack
# fp32 operations per score besides its exponential. Forward: scaled and shifted by one
# multiply-add, maximum, sum, half of an instruction that rounds two. Backward: the same
# multiply-add, dp - delta, times p, and both p and ds rounded; for dv only p.
FORWARD_OPS, BACKWARD_OPS, VALUE_OPS = 3.5, 4.0, 1.5
MASK_OPS = 4.0  # the key's position, two comparisons, a select
GRADIENT_ROWS = 128  # own rows per program of the backward kernels


class TileStep(NamedTuple):
    """The work of one consumer on one tile: clocks on each unit of its processor."""

    tensor: float
    softmax: float
    shared: float

    def response(self, consumers: int) -> float:
        """Clocks from the start of a consumer's step to its end, if so many consumers share the
        units.
        """
        waiting = [0.0] * len(self)
        spent = [0.0]
        for number in range(1, consumers + 1):
            spent = [need * (1 + queue) for need, queue in zip(self, waiting, strict=True)]
            waiting = [number * clocks / sum(spent) for clocks in spent]
        return sum(spent)


class PipelineModel(NamedTuple):
    """The pipeline of a kernel's program: its tiles of own rows, one after another, each `counts`
    steps long. masked: extra clocks of a masked step. exposed: clocks of moving own rows that no
    other tile hides. in_turns: the part of a step that needs the tiles of all consumers, which do
    it one after another, one step later than the rest.
    """

    step: TileStep
    consumers: int
    counts: Tensor  # steps of each tile of own rows of one plane
    planes: int
    masked: float = 0.0
    exposed: float = 0.0
    in_turns: TileStep = TileStep(0.0, 0.0, 0.0)

    def clocks(self, processors: int) -> float:
        """Clocks from the first program's start to the last one's end. A tile takes one step more
        than its count: its first scores and its last product overlap with nothing of the same tile.
        What is done one step later takes another one, in which nothing overlaps.
        """
        if not self.counts.numel():
            return 0.0
        tiles = (self.counts + 1) * self._step() + self.masked * self.consumers + self.exposed
        if any(self.in_turns):
            tiles += self.consumers * (sum(self.step) + sum(self.in_turns))
        longest = float(tiles.max())
        if float(tiles.min()) == longest:
            return math.ceil(len(tiles) * self.planes / processors) * longest
        return max(longest, float(tiles.sum()) * self.planes / processors + longest / 2)

    def _step(self) -> float:
        return self.step.response(self.consumers) + self.consumers * sum(self.in_turns)

    def busy(self, unit: str, processors: int) -> float:
        """Clocks that a unit works, without waiting."""
        step = TileStep(*map(sum, zip(self.step, self.in_turns, strict=True)))
        need = {TENSOR: step.tensor, EXP: step.softmax, SHARED: step.shared}[unit]
        return float(self.counts.sum()) * self.planes * self.consumers * need / processors


@dataclass(frozen=True)
class Phase:
    """One kernel: seconds that each resource would need alone, and the predicted seconds."""

    name: str
    alone: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class TimePrediction:
    """A call on a device. modelled: by the kernel's pipeline; otherwise a lower bound from peak
    rates.
    """

    hardware: Hardware
    phases: tuple[Phase, ...]
    modelled: bool

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def alone(self) -> dict[str, float]:
        """Seconds that each resource needs, over all phases, the longest first."""
        names = dict.fromkeys(name for phase in self.phases for name in phase.alone)
        total = {n: sum(phase.alone.get(n, 0.0) for phase in self.phases) for n in names}
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    @property
    def binds(self) -> str:
        return next(iter(self.alone))

    def __str__(self) -> str:
        about = "" if self.modelled else "at least "
        others = [f"{name} {human_time(s)}" for name, s in list(self.alone.items())[1:]]
        needs = f"{self.binds} {'need' if self.binds in (TENSOR, LANES) else 'needs'}"
        rest = f"; {', '.join(others)}" if others else ""
        bound = human_time(self.alone[self.binds])
        return f"{about}{human_time(self.seconds)}: {needs} {bound} of it{rest}"


def predict(
    problem: Problem,
    hardware: Hardware,
    kernel: str = "",
    backward: bool = False,
    density: float = 1.0,
) -> TimePrediction:
    """Predict a call that `kernel` serves. density: of a block mask. Only Hopper's pipelines are
    modelled, and not for packed sequences, pages and few queries: these get the lower bound of
    `bound`.
    """
    if not 0.0 <= density <= 1.0:
        raise ValueError(f"{density=} must be between 0 and 1")
    if not is_modelled(problem, hardware, kernel):
        ratio = backward_ratio(problem) if backward else 1
        memory_bytes = (2 if backward else 1) * problem.min_bytes
        flops = round(ratio * density * problem.flops)
        return bound(problem, hardware, flops, memory_bytes, ratio)
    if backward:
        return TimePrediction(hardware, tuple(_backward(problem, hardware, density)), True)
    return TimePrediction(hardware, (_forward(problem, hardware, density),), True)


def backward_ratio(problem: Problem) -> float:
    """Operations of the backward over those of the forward: five products instead of two, three of
    them over head_dim; 2.5 if both head dims are equal.
    """
    d, dv = problem.head_dim, problem.head_dim_v
    return (3 * d + 2 * dv) / (d + dv)


def is_modelled(problem: Problem, hardware: Hardware, kernel: str) -> bool:
    few = problem.seqlen_q * problem.group_size <= 64
    lists = problem.packed or problem.page_size or few
    return kernel == "hopper" and hardware.capability == (9, 0) and not lists


def bound(
    problem: Problem, hardware: Hardware, flops: int, memory_bytes: int, ratio: float = 1
) -> TimePrediction:
    """A lower bound for any kernel with so many operations and bytes: the slowest unit, if all
    others hide behind it. ratio: operations relative to the forward, which has one exponential per
    2 (head_dim + head_dim_v) operations.
    """
    alone = {HBM: memory_bytes / hardware.memory_bytes_s}
    if hardware.is_known:
        exps = flops / ratio / (2 * (problem.head_dim + problem.head_dim_v))
        products = TENSOR if hardware.has_tensor(problem.dtype) else LANES
        alone |= {products: flops / hardware.flops(problem.dtype), EXP: exps / hardware.exps_s}
        alone[LAUNCH] = hardware.launch_s
    return TimePrediction(hardware, (Phase("call", alone, max(alone.values())),), False)


def _forward(problem: Problem, hardware: Hardware, density: float) -> Phase:
    config = hopper_forward_of(problem)
    width, width_v = hopper_forward_widths(problem)
    rows = 64 * config.consumers
    counts = steps(problem, rows, config.tile_n) * density
    moved = rows * (width + width_v) * problem.dtype.itemsize if config.q_stages == 1 else 0
    step = forward_step(config, width, width_v, hardware, problem.dtype)
    pipeline = PipelineModel(
        step,
        config.consumers,
        counts,
        problem.batch * problem.num_heads,
        _mask_clocks(problem, config.tile_n, hardware),
        moved / _bytes_clock(hardware),
    )
    return _phase("forward", pipeline, problem.min_bytes, hardware)


def forward_step(
    config: HopperConfig, width: int, width_v: int, hardware: Hardware, dtype: torch.dtype
) -> TileStep:
    """64 queries and tile_n keys. Copies of keys and values are shared by all consumers. The output
    so far is rescaled in every step, or only if a maximum changes, which is rare after the first
    steps.
    """
    pairs = 64 * config.tile_n
    ops = FORWARD_OPS * pairs + (64 * width_v if config.rescale == "always" else 0)
    copied = config.tile_n * (width + width_v) * dtype.itemsize / config.consumers
    return TileStep(
        2 * pairs * (width + width_v) / hardware.flops_clock(dtype),
        pairs / hardware.exps + ops / hardware.lanes,
        copied / hardware.shared_rate,
    )


def _backward(problem: Problem, hardware: Hardware, density: float) -> list[Phase]:
    """The kernels of kernels/hopper/launch_backward.py: lse and delta first, then all gradients at
    once with dq summed in fp32, or each gradient in its own kernel.
    """
    widths = hopper_backward_widths(problem)
    width = max(widths)
    rows = problem.batch * problem.seqlen_q * problem.num_heads
    itemsize, apart = problem.dtype.itemsize, hopper_splits_dq(problem)
    summed = 0 if apart else 4 * rows * width
    read = 2 * rows * problem.head_dim_v * itemsize
    phases = [_streaming("prepare", read + summed, hardware)]
    if width < HOPPER_SPLIT_ALL:
        phases.append(_gradients(problem, width, hardware, density, not apart))
    else:
        phases += [_gradient(problem, widths, name, hardware, density) for name in ("dk", "dv")]
    if apart:
        return [*phases, _gradient(problem, widths, "dq", hardware, density)]
    written = rows * problem.head_dim * itemsize
    return [*phases, _streaming("finish", summed + written, hardware)]


def _gradients(
    problem: Problem, width: int, hardware: Hardware, density: float, with_dq: bool
) -> Phase:
    """dk and dv. If dq is computed too, consumers exchange ds in every step."""
    config = hopper_backward_config(width)
    moved = 2 * config.tile_n * width * problem.dtype.itemsize  # one k and one v fit, no next one
    planes = problem.batch * problem.num_kv_heads
    pipeline = PipelineModel(
        backward_step(width, hardware, problem.dtype),
        2,
        density * problem.group_size * steps(problem, config.tile_n, 64, keys=True),
        planes,
        _mask_clocks(problem, 64, hardware),
        moved / _bytes_clock(hardware),
        *([query_gradient_step(width, hardware, problem.dtype)] if with_dq else []),
    )
    return _phase("gradients", pipeline, 2 * problem.min_bytes, hardware)


def backward_step(width: int, hardware: Hardware, dtype: torch.dtype) -> TileStep:
    """64 keys and 64 queries: four products. Through shared memory: half of q and dout."""
    pairs = 64 * 64
    return TileStep(
        4 * 2 * pairs * width / hardware.flops_clock(dtype),
        pairs / hardware.exps + BACKWARD_OPS * pairs / hardware.lanes,
        64 * width * dtype.itemsize / hardware.shared_rate,
    )


def query_gradient_step(width: int, hardware: Hardware, dtype: torch.dtype) -> TileStep:
    """dq of 64 keys and 64 queries. Through shared memory: ds to the other consumer, and half of 64
    rows written to and read from the buffer of the sum.
    """
    pairs = 64 * 64
    moved = pairs * dtype.itemsize + 64 * width * 4
    product = 2 * pairs * width / hardware.flops_clock(dtype)
    return TileStep(product, 0.0, moved / hardware.shared_rate)


def _gradient(
    problem: Problem, widths: tuple[int, int], name: str, hardware: Hardware, density: float
) -> Phase:
    """dq, dk or dv in its own kernel. widths: of q and k, and of v and dout."""
    config, keys = hopper_split_config(max(widths)), name != "dq"
    counts = density * steps(problem, GRADIENT_ROWS, config.tile, keys=keys)
    # Own rows that are loaded or stored: of k and dv, or of both operands and dq or dk.
    own = sum(widths) if name == "dv" else 2 * widths[0] + widths[1]
    moved = own * GRADIENT_ROWS * problem.dtype.itemsize
    pipeline = PipelineModel(
        gradient_step(config, widths, name == "dv", hardware, problem.dtype),
        2,
        counts * (problem.group_size if keys else 1),
        problem.batch * (problem.num_kv_heads if keys else problem.num_heads),
        _mask_clocks(problem, config.tile, hardware),
        moved / _bytes_clock(hardware),
    )
    return _phase(name, pipeline, problem.min_bytes, hardware)


def gradient_step(
    config: HopperSplitConfig,
    widths: tuple[int, int],
    values: bool,
    hardware: Hardware,
    dtype: torch.dtype,
) -> TileStep:
    """64 own rows and a tile of the others: scores, their gradient (not for dv), the product.
    Through shared memory: half of both streamed tiles.
    """
    pairs = 64 * config.tile
    columns = sum(widths) if values else 2 * widths[0] + widths[1]
    return TileStep(
        2 * pairs * columns / hardware.flops_clock(dtype),
        pairs / hardware.exps + (VALUE_OPS if values else BACKWARD_OPS) * pairs / hardware.lanes,
        config.tile * sum(widths) / 2 * dtype.itemsize / hardware.shared_rate,
    )


def steps(problem: Problem, own: int, tile: int, keys: bool = False) -> Tensor:
    """Tiles of the other side that each tile of `own` queries (keys: of own keys) sees."""
    left, right = problem.window
    length, other = problem.seqlen_q, problem.seqlen_k
    if keys:
        length, other, left, right = other, length, right, left
    first = torch.arange(0, length, own)
    last = (first + own).clamp(max=length) - 1
    offset = other - length
    lo = torch.zeros_like(first) if left is None else (first + offset - left).clamp(min=0)
    hi = torch.full_like(first, other) if right is None else last + offset + right + 1
    hi = hi.clamp(max=other)
    return torch.where(hi > lo, -(-hi // tile) - lo // tile, 0)


def _mask_clocks(problem: Problem, tile: int, hardware: Hardware) -> float:
    """Extra clocks of the masked step: the diagonal or a side of the window cuts one step of a
    tile.
    """
    cut = problem.causal or problem.window_size != (None, None)
    return MASK_OPS * 64 * tile / hardware.lanes if cut else 0.0


def _bytes_clock(hardware: Hardware) -> float:
    """Memory bytes per clock for each processor, if all of them read."""
    return hardware.memory_bytes_s / hardware.processors / hardware.clock_hz


def _phase(name: str, pipeline: PipelineModel, memory_bytes: int, hardware: Hardware) -> Phase:
    seconds = lambda clocks: clocks / hardware.clock_hz
    units = {unit: pipeline.busy(unit, hardware.processors) for unit in (TENSOR, EXP, SHARED)}
    alone = {HBM: memory_bytes / hardware.memory_bytes_s, LAUNCH: hardware.launch_s}
    alone |= {unit: seconds(clocks) for unit, clocks in units.items()}
    computed = max(seconds(pipeline.clocks(hardware.processors)), alone[HBM])
    return Phase(name, alone, computed + hardware.launch_s)


def _streaming(name: str, memory_bytes: int, hardware: Hardware) -> Phase:
    alone = {HBM: memory_bytes / hardware.memory_bytes_s, LAUNCH: hardware.launch_s}
    return Phase(name, alone, sum(alone.values()))


def human_time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
