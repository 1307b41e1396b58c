"""`python -m benchmarks hbm`: does time follow the bytes over HBM? Figure 2 of FlashAttention.

Every row is one problem: 65,536 tokens with 16 heads of 64, GPT-2 medium's shape, without a mask.
`value` and `peers` are the times of all algorithms (algorithms.py), `hbm_bytes` their traffic by
the GPU's counters, `predicted_bytes` what the model of traffic says, and `flops` the operations of
matrix products.

- by length: standard attention, the versions and onchip, forward and backward. v1 to v3 are
  examples of the forward alone.
- tiles: v1 with tiles of 32 to 256 keys, forward. Fewer keys, more round trips of the state.
- blocks: onchip, forward and backward together, with a share of the blocks of 4,096 tokens.

The counters need NVIDIA's profiler, ncu. All calls are counted first, in one process of their own.
"""

import math
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from benchmarks import algorithms, counters
from benchmarks.counters import CountedCall
from benchmarks.video import TrainingCandidate
from onchip.cli.bench import gpu, patterns
from onchip.cli.bench.backward import GradientCheck
from onchip.cli.bench.gpu import GpuCandidate, OutputCheck, RowSpec
from onchip.cli.bench.harness import Case, Row, Session, Threshold
from onchip.core.problem import Problem
from onchip.cost import make_problem
from onchip.cost.hardware import H200
from onchip.lab import traffic
from onchip.lab.traffic import Chip

TOKENS, NUM_HEADS, HEAD_DIM = 65536, 16, 64
PARTS = ("lengths", "tiles", "blocks")
LENGTHS, QUICK_LENGTHS = (512, 1024, 2048, 4096, 8192), (1024,)
TILES_N, TILE_M, TILE_N = (32, 64, 128, 256), 64, 128  # of v1
DENSITIES = (20, 40, 60, 80, 100)  # per cent
SECONDS = 600.0
LIMIT = 4.0  # of an RMSE over ours: standard attention rounds S and dP, 2.8 in a backward
FORWARD = ("onchip", "standard", "compiled", "v1", "v2", "v3", "fa2")
BACKWARD = ("onchip", "standard", "compiled", "fa2")
FLASH = ("onchip", "v2", "v3", "fa2")
EXACT = ("onchip", "standard", "v2", "fa2")  # the model of traffic must hold for these


class Cell(NamedTuple):
    """One problem, and the names of the algorithms, ours first."""

    case: Case
    names: tuple[str, ...]

    @property
    def passes(self) -> tuple[bool, ...]:
        """The passes that are counted: False forward, True backward."""
        both = self.case.pass_name == "forward+backward"
        return (False, True) if both else (self.case.backward,)

    def calls(self, name: str) -> list[CountedCall]:
        case = self.case
        sizes = (case.batch, case.seqlen, case.num_heads, case.head_dim)
        return [CountedCall(*sizes, backward=x, algorithm=name) for x in self.passes]

    @property
    def problem(self) -> Problem:
        case = self.case
        sizes = {"batch": case.batch, "num_heads": case.num_heads, "head_dim": case.head_dim}
        return make_problem(case.seqlen, dtype=case.dtype, **sizes)


def run(session: Session) -> None:
    start = time.perf_counter()
    gpu.run(session, lambda: steps(session, start))


def steps(session: Session, start: float) -> Iterator[gpu.Step]:
    chosen, counted = list(cells(session)), {}
    yield "HBM traffic by the counters", lambda: count(session, chosen, counted)
    for cell in chosen:
        yield f"{cell.case}, batch {cell.case.batch}", partial(measure, session, cell, counted)
    elapsed = Case("elapsed", "none", None, 0, 0)
    yield "seconds", lambda: [elapsed.row("hbm", time.perf_counter() - start, "s")]


def count(session: Session, chosen: list[Cell], counted: dict[CountedCall, float]) -> list[Row]:
    """Fill `counted` with the bytes over HBM of every call, by one process under the profiler."""
    listed = [call for cell in chosen for name in cell.names for call in cell.calls(name)]
    calls = tuple(dict.fromkeys(listed))
    try:
        kernels = counters.count(calls)
    except ValueError as error:
        session.note(f"no traffic is counted: {error}")
        return []
    for call, each in zip(calls, kernels, strict=True):
        counted[call] = sum(kernel.hbm_bytes for kernel in each)
    return []


def cells(session: Session) -> Iterator[Cell]:
    parts = session.only or PARTS
    lengths = session.seqlens or (QUICK_LENGTHS if session.quick else LENGTHS)
    if "lengths" in parts:
        for n in lengths:
            yield Cell(_case(n), FORWARD)
            yield Cell(_case(n, way="backward"), BACKWARD)
    if "tiles" in parts:
        for n in session.seqlens or ((1024,) if session.quick else (1024, 4096)):
            names = tuple(f"v1/{tile_n}" for tile_n in TILES_N)
            yield Cell(_case(n, bench="hbm tiles"), ("onchip", *names))
    if "blocks" in parts:
        n = next(iter(session.seqlens), 1024 if session.quick else 4096)
        for density in DENSITIES:
            case = _case(n, bench="hbm blocks", mask=f"{density} % of blocks", way="both")
            yield Cell(case, (f"onchip/{density}%",))


def _case(seqlen: int, bench: str = "hbm", mask: str = "none", way: str = "") -> Case:
    sizes = (HEAD_DIM, seqlen, max(1, TOKENS // seqlen), NUM_HEADS)
    name = "" if way == "both" else way
    return Case(bench, mask, torch.bfloat16, *sizes, backward=bool(way), way=name)


def measure(session: Session, cell: Cell, counted: dict[CountedCall, float]) -> list[Row]:
    """One row: times in turns under the accuracy rule, and the traffic."""
    case, device = cell.case, session.device
    sets, pattern = gpu.draw_sets(case, device), _pattern(cell, device)
    make_check = GradientCheck if case.backward else OutputCheck
    check = make_check({"normal": sets[0]}, pattern.visible)
    kind = TrainingCandidate if len(cell.passes) == 2 else GpuCandidate
    ours, *others = (
        kind(
            name,
            algorithms.find(name, case.seqlen, device),
            sets,
            check,
            algorithms.layout_of(name),
            ours=name == cell.names[0],
            limit=LIMIT,
        )
        for name in cell.names
    )
    spec = RowSpec(case.bench, ours.name, ours, others)
    rows = gpu.contest(session, case, [spec], gpu.MILLISECONDS)
    return [row | columns(cell, counted) for row in rows]


def _pattern(cell: Cell, device: torch.device) -> patterns.Pattern:
    share = density_of(cell.names[0])
    if share < 1:
        return patterns.blocks(cell.case.seqlen, share, device)
    return patterns.dense(cell.case.seqlen)


def columns(cell: Cell, counted: dict[CountedCall, float]) -> Row:
    """hbm_bytes, predicted_bytes and flops of the algorithms of a cell."""
    calls = {name: cell.calls(name) for name in cell.names}
    predicted = {name: predict(cell, name) for name in cell.names}
    return {
        "hbm_bytes": {
            name: sum(counted[x] for x in listed)
            for name, listed in calls.items()
            if all(x in counted for x in listed)
        },
        "predicted_bytes": {name: x for name, x in predicted.items() if x is not None},
        "flops": {name: count_flops(cell, name) for name in cell.names},
    }


def predict(cell: Cell, name: str) -> float | None:
    """The traffic that the algorithm needs, None where it is not modelled (compiled, v3, masks).

    standard: Algorithms 0 and 3 on a chip that holds whole rows, and two passes over the scaled
    queries. v1: Algorithm 1 with the kernel's tiles. Flash kernels: each tensor once, because the
    L2 holds the keys of the heads at work. Their backward has an fp32 dq as well: cleared, read and
    written by additions, read at last; and rows of lse and delta.
    """
    base, _, option = name.partition("/")
    case, problem = cell.case, cell.problem
    rows, size = case.batch * case.seqlen * case.num_heads, problem.dtype.itemsize
    elements = rows * case.head_dim
    if len(cell.passes) == 2:
        return None
    if base == "standard":
        model = traffic.standard_backward if case.backward else traffic.standard
        moved = model(problem, Chip(math.inf, problem.dtype)).hbm_bytes
        return moved + 2 * elements * size - (0 if case.backward else 4 * rows)  # it has no lse
    if base == "v1":
        return traffic.v1(problem, Chip(tiles=(TILE_M, int(option or TILE_N)))).hbm_bytes
    if base not in FLASH:
        return None
    if not case.backward:
        return problem.min_bytes
    return (9 * size + 4 * 4) * elements + 5 * 4 * rows


def count_flops(cell: Cell, name: str) -> float:
    """2 products in the forward, in the backward 5, and 4 with P in memory; by the share of the
    blocks that a mask leaves.
    """
    of_backward = 4 if name in ("standard", "compiled") else 5
    products = sum(of_backward if backward else 2 for backward in cell.passes)
    case = cell.case
    cells = case.batch * case.num_heads * case.seqlen**2
    return 2.0 * products * cells * case.head_dim * density_of(name)


def density_of(name: str) -> float:
    """The share of the blocks of "onchip/20%"."""
    option = name.partition("/")[2]
    return float(option[:-1]) / 100 if option.endswith("%") else 1.0


class Point(NamedTuple):
    """One algorithm on one problem."""

    name: str
    ms: float
    hbm_bytes: float
    flops: float

    @property
    def is_memory_bound(self) -> bool:
        """Whether its bytes take an H200 longer than its products."""
        bytes_s = self.hbm_bytes / H200.memory_bytes_s
        return bytes_s > self.flops / H200.flops(torch.bfloat16)


def points(rows: list[Row]) -> list[Point]:
    """Every algorithm that was timed and counted."""
    return [
        Point(name, ms, row["hbm_bytes"][name], row["flops"][name])
        for row in rows
        if row.get("hbm_bytes")
        for name, ms in {row["kernel"]: row["value"], **row["peers"]}.items()
        if name in row["hbm_bytes"]
    ]


def rank_correlation(rows: list[Row]) -> float:
    """Spearman's, of time and bytes, over the memory-bound points."""
    chosen = [point for point in points(rows) if point.is_memory_bound]
    pairs = torch.tensor([(p.ms, p.hbm_bytes) for p in chosen], dtype=torch.float64)
    ranks = pairs.argsort(0).argsort(0).double()
    return torch.corrcoef(ranks.T)[0, 1].item()


def gap(rows: list[Row]) -> float:
    """The largest share by which counted traffic of EXACT misses the model, in per cent."""
    return max(
        100 * abs(row["hbm_bytes"][name] / row["predicted_bytes"][name] - 1)
        for row in rows
        for name in EXACT
        if name in row["hbm_bytes"]
    )


def _is_counted(row: Row) -> bool:
    return bool(row.get("hbm_bytes"))


THRESHOLDS = (
    Threshold(
        "traffic of standard, v2, fa2 and onchip by the counters, within",
        lambda row: row["bench"] == "hbm" and _is_counted(row),
        at_most=5.0,
        measure=gap,
        unit="%",
    ),
    Threshold(
        "rank correlation of time and bytes, memory-bound",
        _is_counted,
        at_least=0.95,
        measure=rank_correlation,
        unit="",
    ),
    Threshold("all of it", lambda row: row["bench"] == "elapsed", at_most=SECONDS),
)
