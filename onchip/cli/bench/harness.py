"""The frame of every benchmark: accuracy before time, candidates in turns, one row schema.

A results file is `{"meta": {...}, "schema": 1, "rows": [...]}`. `ratio` is our speed over
the best peer's, so that above 1 is faster; `error` and `peer_error` are RMSEs against fp64. Without
a peer these are null. GPU rows have further columns, documented in `gpu.py`.
"""

import datetime
import json
import math
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from onchip.cli.bench.measure import alternate, cpu_name, sample_rows
from onchip.cli.output import STANDARD_OUTPUT
from onchip.testing import assert_accurate, oracle, rmse

SCHEMA = 1
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64", "none": ""}
SHORT |= {"float8_e4m3fn": "fp8", "int8": "int8", "float4_e2m1fn_x2": "fp4"}
CHECKED_ROWS = 128
ROUNDS, BUDGET_S = 7, 0.5
Row = dict[str, Any]
Rows = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """The columns of a row that describe the problem.

    num_kv_heads, head_dim_v and seqlen_k default to num_heads, head_dim and seqlen. A row has the
    columns `head_dim_v` and `seqlen_k` only if they differ from these.
    """

    bench: str
    mask: str
    dtype: torch.dtype | None
    head_dim: int
    seqlen: int
    batch: int = 1
    num_heads: int = 8
    backward: bool = False
    way: str = ""  # the pass, where it is neither forward nor forward+backward
    num_kv_heads: int | None = None
    head_dim_v: int | None = None
    seqlen_k: int | None = None

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def width_v(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def keys(self) -> int:
        return self.seqlen if self.seqlen_k is None else self.seqlen_k

    def row(self, kernel: str, value: float, unit: str, **measured: object) -> Row:
        blank = dict(peers={}, best_peer=None, ratio=None, error=None, peer_error=None)
        return {
            "bench": self.bench,
            "kernel": kernel,
            "pass": self.pass_name,
            "mask": self.mask,
            "dtype": self.dtype_name,
            "head_dim": self.head_dim,
            "seqlen": self.seqlen,
            "batch": self.batch,
            "num_heads": self.num_heads,
            "num_kv_heads": self.kv_heads,
            "value": value,
            "unit": unit,
            **blank,
            **measured,
            **self._unequal_sizes(),
        }

    def _unequal_sizes(self) -> Row:
        sizes = {"head_dim_v": (self.width_v, self.head_dim), "seqlen_k": (self.keys, self.seqlen)}
        return {name: size for name, (size, other) in sizes.items() if size != other}

    @property
    def pass_name(self) -> str:
        return self.way or ("forward+backward" if self.backward else "forward")

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.").lower()

    def __str__(self) -> str:
        size = f"{self.seqlen:,} tokens, head_dim {self.head_dim}"
        if self.kv_heads != self.num_heads:
            size += f", {self.num_heads} heads over {self.kv_heads}"
        return f"{self.bench} {self.mask}, {size}, {self.dtype_name}, {self.pass_name}"


@dataclass(frozen=True)
class Candidate:
    """attend(q, k, v) -> out on its own inputs.

    to_check_layout(out) converts out to the layout that the accuracy check reads.
    """

    name: str
    attend: Callable[..., Any]
    inputs: Sequence[Tensor]
    to_check_layout: Callable[[Tensor], Tensor] = lambda out: out

    def job(self, backward: bool) -> Callable[[], object]:
        return self._step if backward else self.forward

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self.attend(*self.inputs)

    def _step(self) -> object:
        q, k, v = self.leaves
        return torch.autograd.grad(self.attend(q, k, v), (q, k, v), self.dout)

    @cached_property
    def leaves(self) -> list[Tensor]:
        return [x.detach().requires_grad_() for x in self.inputs]

    @cached_property
    def dout(self) -> Tensor:
        return torch.randn_like(self.forward())


class RowRefused(Exception):
    """The row was not measured; the message gives the reason."""


class Inaccurate(RowRefused):
    """A result that breaks the accuracy rule. Its time is not reported."""


def hold(attention: Callable | Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """Apply `testing.assert_accurate`; Inaccurate if the result breaks the rule."""
    try:
        assert_accurate(attention, q, k, v, **options)
    except AssertionError as error:
        raise Inaccurate(str(error)) from error


class AccuracyCheck(Protocol):
    """check(): the RMSE of a candidate's result, or Inaccurate; error(): the RMSE alone."""

    def check(self, candidate: Candidate, backward: bool) -> float: ...

    def error(self, candidate: Candidate) -> float: ...


@dataclass
class Exact:
    """fp64 on a sample of query rows of one problem. visible(rows) -> bool (rows, seqlen_k)."""

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Rows

    @cached_property
    def rows(self) -> Tensor:
        return sample_rows(self.q.shape[1], CHECKED_ROWS)

    @cached_property
    def out(self) -> Tensor:
        return oracle(self.q[:, self.rows], self.k, self.v, mask=self.visible(self.rows)).out

    def check(self, candidate: Candidate, backward: bool) -> float:
        """The RMSE of the output; Inaccurate if the accuracy rule is broken.

        The checked call is the timed call. Rows outside the sample get no gradient, so that dk and
        dv depend on the sample alone; otherwise the reference would need N x N scores.
        """

        def sampled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            return candidate.attend(self.q.index_copy(1, self.rows, q), k, v)[:, self.rows]

        q, mask = self.q[:, self.rows], self.visible(self.rows)
        hold(sampled, q, self.k, self.v, grad=backward, mask=mask)
        return self.error(candidate)

    def error(self, candidate: Candidate) -> float:
        return rmse(candidate.to_check_layout(candidate.forward())[:, self.rows], self.out)


@dataclass
class Session:
    """One run of a benchmark: its options, its rows, the refused rows and the callbacks.

    - Callbacks: report_progress(title, done) moves the progress bar, keep(row) receives every row
      as soon as it is measured, say(sentence) prints a remark, watch(start) returns the GPU's
      clocks since `start`.
    - Selection: seqlens and head_dims choose cells of a GPU benchmark, groups chooses query heads
      per key head, only chooses among its PARTS, kv_dtypes chooses 8-bit caches, precision chooses
      8-bit operands.
    - flex adds FlexAttention as a peer, seconds is the duration of a load (0: the benchmark's
      default), simulate runs the simulation of machines that are not present.
    - where replaces the CPU's description in the meta of the results file; was_interrupted: Ctrl-C
      ended the run, and later rows are missing.
    """

    quick: bool = False
    threads: int = 2
    report_progress: Callable[[str, float], None] = lambda title, done: None
    rows: list[Row] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    device: torch.device = torch.device("cpu")
    keep: Callable[[Row], None] = lambda row: None
    say: Callable[[str], None] = lambda sentence: None
    seqlens: Sequence[int] = ()
    head_dims: Sequence[int] = ()
    groups: Sequence[int] = ()
    only: Sequence[str] = ()
    flex: bool = False
    seconds: float = 0.0
    simulate: bool = False
    kv_dtypes: Sequence[str] = ()
    precision: str | None = None
    where: dict[str, Any] = field(default_factory=dict)
    watch: Callable[[float], dict[str, Any]] = lambda start: {}
    noted: set[str] = field(default_factory=set)
    was_interrupted: bool = False

    def run(self, steps: Iterable[tuple[str, Callable[[], Row | list[Row]]]]) -> None:
        """Run each step, which returns a row or several, or raises RowRefused."""
        steps = list(steps)
        for i, (title, step) in enumerate(steps):
            self.report_progress(title, i / len(steps))
            try:
                measured = step()
            except RowRefused as error:
                self.refused.append(f"{title}: {error}")
                continue
            for row in measured if isinstance(measured, list) else [measured]:
                self.rows.append(row)
                self.keep(row)

    def note(self, sentence: str, first: str = "") -> None:
        """Print a sentence once in a session; `first` names the cell of its first occurrence."""
        if sentence not in self.noted:
            self.noted.add(sentence)
            self.say(sentence + first)

    def contest(
        self,
        case: Case,
        kernel: str,
        ours: Candidate,
        peers: list[Candidate],
        accuracy: AccuracyCheck,
    ) -> Row:
        """One row: check our result, then time it in turns with the fastest peer."""
        error = accuracy.check(ours, case.backward)
        peer = self.fastest(peers, case.backward)
        jobs = {c.name: c.job(case.backward) for c in (ours, peer)}
        best = self.clock(jobs)
        return case.row(
            kernel,
            best[ours.name] * 1e3,
            "ms",
            peers={peer.name: best[peer.name] * 1e3},
            best_peer=peer.name,
            ratio=best[peer.name] / best[ours.name],
            error=error,
            peer_error=accuracy.error(peer),
        )

    def fastest(self, peers: list[Candidate], backward: bool) -> Candidate:
        if len(peers) == 1:
            return peers[0]
        times = alternate({p.name: p.job(backward) for p in peers}, self.device, rounds=2)
        return min(peers, key=lambda p: times[p.name])

    def clock(self, jobs: dict[str, Callable[[], object]]) -> dict[str, float]:
        rounds, budget_s = (2, 0.0) if self.quick else (ROUNDS, BUDGET_S)
        return alternate(jobs, self.device, rounds, budget_s)


class Threshold(NamedTuple):
    """A bound on the selected rows: geomean of ratio >= at_least, or largest value <= at_most.

    measure(rows) replaces the geomean or the largest value, and unit replaces its unit. An optional
    threshold that selects no row is skipped.
    """

    name: str
    selects: Callable[[Row], bool]
    at_least: float | None = None
    at_most: float | None = None
    measure: Callable[[list[Row]], float] | None = None
    unit: str | None = None
    optional: bool = False


class ThresholdResult(NamedTuple):
    threshold: Threshold
    measured: float | None
    unit: str

    @property
    def ok(self) -> bool:
        if self.measured is None:
            return False
        if self.threshold.at_least is not None:
            return self.measured >= self.threshold.at_least
        return self.threshold.at_most is not None and self.measured <= self.threshold.at_most


def check_thresholds(rows: list[Row], thresholds: Iterable[Threshold]) -> list[ThresholdResult]:
    """One result per threshold. One that selects no row is missed, or skipped if optional."""
    verdicts = []
    for threshold in thresholds:
        chosen = [row for row in rows if threshold.selects(row)]
        if chosen:
            verdicts.append(_verdict(threshold, chosen))
        elif not threshold.optional:
            verdicts.append(ThresholdResult(threshold, None, ""))
    return verdicts


def _verdict(threshold: Threshold, rows: list[Row]) -> ThresholdResult:
    if threshold.at_least is not None:
        measure, unit = lambda rows: geomean([row["ratio"] for row in rows]), "x"
    else:
        measure, unit = lambda rows: max(row["value"] for row in rows), rows[0]["unit"]
    unit = unit if threshold.unit is None else threshold.unit
    return ThresholdResult(threshold, (threshold.measure or measure)(rows), unit)


def worst_cell(
    name: str, selects: Callable[[Row], bool], at_least: float, optional: bool = False
) -> Threshold:
    """A bound on the least ratio; a cell whose 10-90 % band contains the bound counts as equal to
    it.
    """

    def ratio(row: Row) -> float:
        low, high = row["band"]
        return at_least if low <= at_least <= high else row["ratio"]

    least = lambda rows: min(map(ratio, rows))
    return Threshold(name, selects, at_least, measure=least, optional=optional)


def group_size(row: Row) -> int:
    """Query heads per key head; 1 in rows about no heads."""
    return max(1, row["num_heads"] // max(1, row["num_kv_heads"]))


def geomean(values: list[float]) -> float:
    return math.exp(sum(math.log(x) for x in values) / len(values))


def document(rows: list[Row], where: dict[str, Any] | None = None) -> dict[str, Any]:
    """The contents of a results file; `where` overrides entries of meta()."""
    return {"meta": meta() | (where or {}), "schema": SCHEMA, "rows": rows}


def write_results(rows: list[Row], path: Path, where: dict[str, Any] | None = None) -> None:
    """Replace the file atomically: a benchmark that is killed leaves all rows measured so far.
    path "-": standard output.
    """
    whole = document(rows, where)
    if path == STANDARD_OUTPUT:
        print(json.dumps(whole, indent=1))
        return
    ordinary = path.is_file() or not path.exists()  # a terminal or a pipe is not replaced
    part = path.with_name(f"{path.name}.part") if ordinary else path
    part.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if ordinary:
        part.replace(path)


def describe_rows(session: Session, path: Path | None) -> str:
    """What an interrupted session has measured, and where it is."""
    count = "1 row" if len(session.rows) == 1 else f"{len(session.rows)} rows"
    if path is None:
        return f"{count} measured; --json FILE would have kept them"
    return f"{count} measured, written to {'standard output' if path == STANDARD_OUTPUT else path}"


def meta() -> dict[str, Any]:
    return {
        "device": f"{cpu_name()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "clocks": _clocks(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _commit() -> str | None:
    """The commit of the source tree, with a + if the tree is modified; None outside a git tree.
    Read once per process, because the running code is the code that was loaded.
    """
    git = ["git", "-C", str(Path(__file__).parent), "describe"]
    git += ["--always", "--abbrev=12", "--dirty=+"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _clocks() -> dict[str, float]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return {"cpu_mhz": max(float(x.split(":")[1]) for x in lines if x.startswith("cpu MHz"))}
    except (OSError, ValueError):
        return {}


def print_session(console, session: Session, verdicts: list[ThresholdResult]) -> None:
    """Print the refused rows, then the thresholds if they were checked."""
    for sentence in session.refused:
        console.print(f"refused: {sentence}", markup=False, highlight=False, soft_wrap=True)
    if verdicts:
        console.print(_verdicts_table(verdicts))


def print_row(console, row: Row) -> None:
    console.print(line(row), markup=False, highlight=False, soft_wrap=True)


def line(r: Row) -> str:
    """One row as a line: the problem, the time, and the peers."""
    head_dim = f"D {r['head_dim']}" if r["head_dim"] else ""
    if group_size(r) > 1:
        head_dim += f" {r['num_heads']}/{r['num_kv_heads']}"
    tokens = f"{r['batch']} x {r['seqlen']:,}" if r["seqlen"] else ""
    case = f"{r['bench']:<16} {r['mask']:<14} {r['pass']:<16} {SHORT[r['dtype']]:<4} {head_dim:<5}"
    ratio = f"{r['ratio']:.3g}x {r['best_peer']}" if r["best_peer"] else ""
    band = " [{:.3f}, {:.3f}]".format(*r["band"]) if r.get("band") else ""
    peers = ", ".join(f"{name} {value:.4g}" for name, value in r["peers"].items())
    clocks = " ".join(f"{value:.0f} {unit}" for unit, value in _under_load(r).items())
    doubts = "".join(f"; does not count: {doubt}" for doubt in r.get("doubts", ()))
    value = f"{r['value']:.4g} {r['unit']}"
    parts = (f"{case} {tokens:>12} {r['kernel']:<9} {value:>14}", ratio + band, peers, clocks)
    return "  ".join(part for part in parts if part) + doubts


def _under_load(row: Row) -> dict[str, float]:
    units = {"MHz": "sm_mhz", "W": "power_w"}
    return {u: row[name] for u, name in units.items() if row.get(name) is not None}


def _verdicts_table(verdicts: list[ThresholdResult]):
    from rich.table import Table

    table = Table("threshold", "measured", "required", "")
    for v in verdicts:
        least = v.threshold.at_least is not None
        bound = f">= {v.threshold.at_least:.4g}" if least else f"<= {v.threshold.at_most:.4g}"
        required = f"{bound} {v.unit}"
        measured = "no row" if v.measured is None else f"{v.measured:.4g} {v.unit}"
        verdict = "[green]met[/]" if v.ok else "[red]missed[/]"
        table.add_row(v.threshold.name, measured, required, verdict)
    return table
