"""The frame of the GPU benchmarks: GPU time by CUDA graph replay, candidates in turns.

A sample is one replay of about 5 ms of calls, with inputs that rotate over more than twice the L2.
A round is one sample of every candidate, in an order in which each candidate follows every other
equally often. Rounds run without a pause. A row reports the median over the rounds of the paired
ratios, and their 10-90 % band. The first candidate is captured twice: if the median ratio of the
two captures, the A/A control, is more than 1.5 % from 1, the cell is measured again. Clock and
power are read during the cell and never set.

Columns of a row beyond the schema's: `band` [low, high] of `ratio`; `ratios` {peer: [ratio, low,
high]}; `errors` {candidate: {distribution: RMSE}}; `refusals` {peer: why it was not timed};
`control` the A/A ratio; `tries`; `sm_mhz` and `power_w` during the cell; `doubts`, the reasons why
the row does not count (none: it counts).
"""

import gc
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from onchip.cli.bench.harness import (
    CHECKED_ROWS,
    Case,
    Inaccurate,
    Row,
    RowRefused,
    Rows,
    Session,
    Threshold,
    geomean,
    group_size,
    hold,
    worst_cell,
)
from onchip.cli.bench.measure import sample_rows, seconds
from onchip.cli.bench.peers import Attend, PeerRefusal, heads_first
from onchip.cli.bench.scores import Scores
from onchip.testing import oracle, rmse

SAMPLE_MS, MAX_CALLS = 5.0, 2000
ROUNDS, QUICK_ROUNDS = 30, 6
CONTROL_LIMIT, TRIES = 0.015, 3
LONG_START = 10.0  # seconds of compiling and checking that are told
PEER_LIMIT = 2.0  # a peer with this many times our RMSE does not compute the same function
TOKENS, HIDDEN = 16384, 2048
LENGTHS, HEAD_DIMS = (512, 1024, 2048, 4096, 8192, 16384), (64, 128, 256)
QUICK_LENGTHS, QUICK_HEAD_DIMS = (1024,), (64, 128)
Inputs = tuple[Tensor, ...]  # (q, k, v), for a backward pass (q, k, v, dout)
Step = tuple[str, Callable[[], list[Row]]]


class DeviceLost(OSError):
    """Every CUDA call fails: nothing more can be measured in this process."""


def device() -> torch.device:
    if not torch.cuda.is_available():
        raise ValueError("this benchmark needs a CUDA GPU, and torch finds none here")
    return torch.device("cuda", torch.cuda.current_device())


def run(session: Session, steps: Callable[[], Iterable[Step]]) -> None:
    """Measure the steps under a Monitor. A step that fails loses its own row and no other.

    steps is a function, so that none of its code runs without a GPU.
    """
    session.device = device()
    session.where = {"device": torch.cuda.get_device_name(session.device), "clocks": {}}
    with Monitor(session.device) as monitor:
        session.watch = monitor.since
        session.run((title, partial(_guarded, session, step)) for title, step in steps())


def run_or_quick(
    session: Session, steps: Callable[[], Iterable[Step]], on_cpu: str = "--quick runs"
) -> None:
    """`run`; without a GPU, the quick sizes on the CPU. on_cpu: what else runs there."""
    if torch.cuda.is_available():
        run(session, steps)
    elif session.quick:
        run_on_cpu(session, steps())
    else:
        raise ValueError(
            f"full sizes need a CUDA GPU, and torch finds none here; {on_cpu} on the CPU"
        )


def run_on_cpu(session: Session, steps: Iterable[Step]) -> None:
    torch.set_num_threads(session.threads)
    session.run(steps)


def _guarded(session: Session, step: Callable[[], list[Row]]) -> list[Row]:
    try:
        rows = step()
    except RowRefused:
        raise
    except Exception as error:
        still_there(session.device)
        raise RowRefused(sentence(error)) from error
    finally:
        gc.collect()
    session.where["clocks"] = _typical([*session.rows, *rows])
    return rows


def _typical(rows: list[Row]) -> dict[str, float]:
    """The medians of clock and power over all rows that have them."""
    names = ("sm_mhz", "power_w")
    read = {name: [r[name] for r in rows if r.get(name) is not None] for name in names}
    return {name: statistics.median(values) for name, values in read.items() if values}


def still_there(device: torch.device) -> None:
    """Raise DeviceLost if an earlier kernel left the GPU unusable."""
    if device.type == "cpu":
        return
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).item()
    except torch.OutOfMemoryError:
        return
    except RuntimeError as error:
        raise DeviceLost(f"the GPU cannot go on: {sentence(error)}") from error


def sentence(error: BaseException) -> str:
    """The type of an error and its first line that is not blank; of a PeerRefusal its line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, PeerRefusal):
        return lines[0]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


class GpuAccuracyCheck(Protocol):
    """RMSE by distribution. strict: Inaccurate if the accuracy rule is broken on any of them."""

    def __call__(self, candidate: "GpuCandidate", strict: bool) -> dict[str, float]: ...


@dataclass(frozen=True)
class GpuCandidate:
    """attend(q, k, v) -> out on every set of inputs, each stored in `layout`.

    Candidates of the same name are ways to call the same kernel: the fastest of them counts. ours:
    the accuracy rule applies. parameters: further inputs of attend, the same in every call, whose
    gradients a backward pass computes too. limit: of a peer's RMSE over ours.
    """

    name: str
    attend: Attend
    sets: Sequence[Inputs]
    check: GpuAccuracyCheck
    layout: Callable[[Tensor], Tensor] = lambda x: x
    ours: bool = False
    parameters: tuple[Tensor, ...] = ()
    limit: float = PEER_LIMIT

    @property
    def label(self) -> str:
        return f"{self.name}, heads first," if self.layout is heads_first else self.name

    def forward(self, inputs: Inputs) -> Tensor:
        with torch.no_grad():
            return self.attend(*map(self.layout, inputs[:3]))

    def jobs(self, backward: bool) -> list[Callable[[], object]]:
        """One job per set. A backward job runs its forward here; its backward uses that stream."""
        stored = [tuple(map(self.layout, inputs)) for inputs in self.sets]
        if backward:
            return [self.differentiate(inputs)[1] for inputs in stored]
        return [self._forward_job(inputs) for inputs in stored]

    def _forward_job(self, inputs: Inputs) -> Callable[[], object]:
        return partial(_without_grad, self.attend, inputs[:3])

    def differentiate(self, inputs: Inputs) -> tuple[Tensor, Callable[[], Inputs]]:
        """out, and the whole backward pass as a function: () -> (dq, dk, dv), and the gradients of
        the parameters.
        """
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        with torch.enable_grad():
            out = self.attend(*leaves)
        wanted = (*leaves, *self.parameters)
        return out, partial(torch.autograd.grad, out, wanted, inputs[3], retain_graph=True)


def _without_grad(attend: Attend, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        return attend(*inputs)


def both_layouts(name: str, attend: Attend, sets: Sequence[Inputs], check: GpuAccuracyCheck):
    """A peer for (batch, heads, seqlen, head_dim), contiguous and as a transposed view."""
    return (
        GpuCandidate(name, attend, sets, check, layout=heads_first),
        GpuCandidate(name, attend, sets, check),
    )


class RowSpec(NamedTuple):
    """One row to measure: our candidate, its `bench` and `kernel` columns, and its peers."""

    bench: str
    kernel: str
    ours: GpuCandidate
    against: Sequence[GpuCandidate]


class Sampled:
    """Inputs by name, and the sampled query and key rows on which results are compared with fp64.
    visible(rows) -> bool (rows, seqlen_k). scores: how a score differs from q.k / sqrt(head_dim).
    """

    def __init__(self, samples: dict[str, Inputs], visible: Rows, scores: Scores | None = None):
        self.samples, self.visible, self.scores = samples, visible, scores or Scores()

    @cached_property
    def rows(self) -> Tensor:
        return self._sample(0)

    @cached_property
    def keys(self) -> Tensor:
        return self._sample(1)

    def _sample(self, operand: int) -> Tensor:
        x = next(iter(self.samples.values()))[operand]
        return sample_rows(x.shape[1], CHECKED_ROWS).to(x.device)


class OutputCheck(Sampled):
    """fp64 on a sample of query rows, for the inputs of the timed call and for further inputs.

    The rows are checked by `onchip.testing.assert_accurate`, the accuracy rule of the package. Only
    (sampled rows x seqlen_k) scores are stored.
    """

    @cached_property
    @torch.no_grad()
    def exact(self) -> dict[str, Tensor]:
        answer = lambda q, k, v: oracle(q[:, self.rows], k, v, **self.options).out
        return {name: answer(*inputs[:3]) for name, inputs in self.samples.items()}

    @cached_property
    def options(self) -> dict[str, Any]:
        """Those of the oracle for the sampled rows."""
        return {"mask": self.visible(self.rows), **self.scores.pick(self.rows).options}

    def compute(self, candidate: GpuCandidate, inputs: Inputs) -> Tensor:
        return candidate.forward(inputs)

    def __call__(self, candidate: GpuCandidate, strict: bool) -> dict[str, float]:
        errors = {}
        for name, inputs in self.samples.items():
            out = self.compute(candidate, inputs)[:, self.rows]
            if strict:
                q, k, v = inputs[:3]
                hold(out, q[:, self.rows], k, v, **self.options)
            errors[name] = rmse(out, self.exact[name])
        return errors


class Paired(NamedTuple):
    """The median of paired ratios, and the ends of their 10-90 % band."""

    ratio: float
    low: float
    high: float


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Paired:
    """theirs / ours by round: above 1 means that ours takes less time."""
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    tenths = statistics.quantiles(ratios, n=10, method="inclusive")
    return Paired(statistics.median(ratios), tenths[0], tenths[-1])


class Capture(NamedTuple):
    """A captured candidate: replay() launches `calls` calls; ms is the probed time of one call."""

    replay: Callable[[], object]
    calls: int
    ms: float
    holds: object = None  # keeps the memory alive that the graph reads


class Timing(NamedTuple):
    """Milliseconds of one call by candidate and round; the A/A ratio; the number of tries."""

    times: dict[str, list[float]]
    control: float
    tries: int

    def against(self, ours: str, theirs: str) -> Paired:
        return paired(self.times[ours], self.times[theirs])

    def ms(self, name: str) -> float:
        return statistics.median(self.times[name])


def time_captures(
    captures: dict[str, Capture],
    control: Capture,
    rounds: int,
    sample: Callable[[list[Capture]], list[float]] | None = None,
) -> Timing:
    """Replay all captures in turns; control is a second capture of the first.

    While the A/A ratio is off by more than CONTROL_LIMIT, measure again, at most TRIES times; the
    try with the best A/A ratio counts. sample(captures) -> milliseconds of one call of each, run in
    that order.
    """
    first, runs = next(iter(captures)), []
    while len(runs) < TRIES:
        times = alternate([*captures.items(), ("", control)], rounds, sample or replay_in_order)
        runs.append(Timing(times, paired(times[first], times.pop("")).ratio, 0))
        if abs(runs[-1].control - 1) <= CONTROL_LIMIT:
            break
    best = min(runs, key=lambda run: abs(run.control - 1))
    return best._replace(tries=len(runs))


def alternate(
    captures: Sequence[tuple[str, Capture]],
    rounds: int,
    sample: Callable[[list[Capture]], list[float]],
) -> dict[str, list[float]]:
    """Milliseconds by name, one per round, after an extra round that warms up the GPU."""
    orders = balanced(len(captures))
    order = [captures[x] for i in range(rounds + 1) for x in orders[i % len(orders)]]
    times: dict[str, list[float]] = {name: [] for name, _ in captures}
    for (name, _), ms in zip(order, sample([capture for _, capture in order]), strict=True):
        times[name].append(ms)
    return {name: measured[1:] for name, measured in times.items()}


def balanced(num: int) -> list[list[int]]:
    """Orders of `num` candidates in which each directly follows every other equally often
    (Williams, 1949). At its power limit a GPU is faster after a kernel that used less power. With
    an order and its reverse, which keep the neighbours, a kernel beat itself by 2.4 %.
    """
    first = [x // 2 if x % 2 == 0 else num - 1 - x // 2 for x in range(num)]
    orders = [[(x + i) % num for x in first] for i in range(num)]
    return orders if num % 2 == 0 else orders + [order[::-1] for order in orders]


def replay_in_order(captures: list[Capture]) -> list[float]:
    """Queue all replays at once: the next graph is launched while one runs, so that no launch is
    timed and the GPU is never idle. A sleep of half a millisecond covers the first launch. On a
    CPU, wall-clock time.
    """
    if not torch.cuda.is_available():
        return [seconds(x.replay, torch.device("cpu")) * 1e3 / x.calls for x in captures]
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in captures]
    torch.cuda._sleep(1_000_000)
    for capture, (start, end) in zip(captures, events, strict=True):
        start.record()
        capture.replay()
        end.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / x.calls for x, (a, b) in zip(captures, events, strict=True)]


def sampler(device: torch.device) -> Callable[[list[Capture]], list[float]]:
    """The `sample` argument of `time_captures` for a device."""
    if device.type == "cuda":
        return replay_in_order
    return lambda captures: [seconds(c.replay, device) * 1e3 / c.calls for c in captures]


def capture_calls(candidate: GpuCandidate, backward: bool) -> Capture:
    """Capture about SAMPLE_MS of calls. A small graph measures one call first: run eagerly, a short
    call would take the time of its launch. On a CPU there is no graph: one call of the first job.
    """
    if candidate.sets[0][0].device.type == "cpu":
        job = candidate.jobs(backward)[0]
        return Capture(job, 1, replay_in_order([Capture(job, 1, 0.0)])[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        jobs = candidate.jobs(backward)
        for job in (jobs[0], jobs[-1], jobs[0]):
            job()
    torch.cuda.synchronize()
    probe = Capture(_graph(jobs, min(len(jobs), 8), stream).replay, min(len(jobs), 8), 0.0)
    ms = min(replay_in_order([probe, probe]))
    calls = calls_per_sample(ms, len(jobs))
    graph = _graph(jobs, calls, stream)
    graph.replay()  # the first replay uploads the graph
    torch.cuda.synchronize()
    return Capture(graph.replay, calls, ms, jobs)


def _graph(jobs: list[Callable], calls: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            jobs[i % len(jobs)]()
    return graph


def calls_per_sample(ms: float, num_sets: int) -> int:
    """The number of calls in about SAMPLE_MS, with every set used equally often, at least once."""
    wanted = min(MAX_CALLS, max(1.0, SAMPLE_MS / max(ms, 1e-6)))
    return num_sets * max(1, round(wanted / num_sets))


def num_sets(set_bytes: int, l2_bytes: int) -> int:
    """The least number of sets with more than twice the bytes of the L2."""
    return 2 * l2_bytes // set_bytes + 1


def draw(case: Case, device: torch.device, distribution: str = "normal", seed: int = 0) -> Inputs:
    """q, k, v and, for a backward pass, dout, in onchip's layout, drawn on the GPU; distributions
    as in `onchip.testing.make_qkv`, dout always normal."""
    generator = torch.Generator(device).manual_seed(seed)
    queries = (case.batch, case.seqlen, case.num_heads)
    keys = (case.batch, case.keys, case.kv_heads)
    normal = lambda shape: torch.randn(shape, generator=generator, device=device)

    def one(*shape: int) -> Tensor:
        x = normal(shape)
        if distribution == "outlier":
            hit = torch.rand(shape, generator=generator, device=device) < 0.001
            x += 10 * normal(shape) * hit
        return x.to(case.dtype)

    inputs = (one(*queries, case.head_dim), one(*keys, case.head_dim), one(*keys, case.width_v))
    if not case.backward:
        return inputs
    return (*inputs, normal((*queries, case.width_v)).to(case.dtype))


def draw_sets(case: Case, device: torch.device) -> list[Inputs]:
    """More bytes than twice the L2 of a GPU; one set on a CPU."""
    first = draw(case, device)
    if device.type == "cpu":
        return [first]
    set_bytes = sum(x.numel() * x.element_size() for x in first)
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return [first, *(draw(case, device, seed=i) for i in range(1, num_sets(set_bytes, l2_bytes)))]


def grid(
    session: Session,
    bench: str,
    backward: bool = False,
    *,
    lengths: Sequence[int] = LENGTHS,
    head_dims: Sequence[int] = HEAD_DIMS,
) -> Iterable[Case]:
    """The papers' protocol: TOKENS tokens in all, HIDDEN channels, every length and head_dim; again
    for every group size of the session, with at least one key head.
    """
    if session.quick:
        lengths, head_dims = QUICK_LENGTHS, QUICK_HEAD_DIMS
    way = "backward" if backward else ""
    cells = product(session.groups or (1,), session.head_dims or head_dims, ("none", "causal"))
    for group, head_dim, mask in cells:
        kv_heads = max(1, HIDDEN // head_dim // group)
        for n in session.seqlens or lengths:
            sizes = (head_dim, n, max(1, TOKENS // n), group * kv_heads, backward, way)
            yield Case(bench, mask, torch.bfloat16, *sizes, num_kv_heads=kv_heads)


def is_of_papers(row: Row) -> bool:
    """Whether a row is a cell of the papers' grid: no grouped heads, and one of HEAD_DIMS."""
    return group_size(row) == 1 and row["head_dim"] in HEAD_DIMS


def flops(case: Case) -> float:
    """4 B H N^2 D if all sizes are equal, half of it if causal, 2.5 times that for a backward."""
    d, dv = case.head_dim, case.width_v
    dims = 3 * d + 2 * dv if case.backward else d + dv
    pairs = case.seqlen * case.keys * (0.5 if case.mask == "causal" else 1.0)
    return 2.0 * case.batch * case.num_heads * pairs * dims


@dataclass(frozen=True)
class Scale:
    """How milliseconds become the `value` and the `peers` of a row."""

    unit: str
    of_ms: Callable[[float], float]


MILLISECONDS = Scale("ms", lambda ms: ms)
MICROSECONDS = Scale("us", lambda ms: ms * 1e3)


def tflops(case: Case) -> Scale:
    return Scale("TFLOP/s", lambda ms: flops(case) / ms / 1e9)


def contest(
    session: Session,
    case: Case,
    specs: Sequence[RowSpec],
    scale: Scale,
    required: Sequence[str] = (),
) -> list[Row]:
    """The rows of one cell. All candidates are checked before any is timed.

    If our candidate of the first spec fails, there is no row. Any other candidate that raises or is
    inaccurate is reported and left out. A row without every `required` peer does not count.
    """
    errors, captures, refusals = _check_and_capture(session, case, specs)
    control = capture_calls(specs[0].ours, case.backward)
    start = time.monotonic()
    measured = time_captures(captures, control, QUICK_ROUNDS if session.quick else ROUNDS)
    clocks = session.watch(start)
    doubts = [f"no {name} in this run" for name in required if name not in captures]
    if abs(measured.control - 1) > CONTROL_LIMIT:
        doubts.append(f"its A/A control is off by {abs(measured.control - 1):.1%}")
    timed = [spec for spec in specs if spec.ours.name in captures]
    rows = [_row(case, spec, measured, errors, scale, doubts) for spec in timed]
    named = ({p.name: refusals[p.name] for p in s.against if p.name in refusals} for s in timed)
    return [row | {"refusals": r} | clocks for row, r in zip(rows, named, strict=True)]


def _check_and_capture(
    session: Session, case: Case, specs: Sequence[RowSpec]
) -> tuple[dict[str, dict[str, float]], dict[str, Capture], dict[str, str]]:
    """The errors and the captures of all candidates that pass, ours first; the reasons of those
    that pass in no layout.
    """
    first = specs[0].ours
    refusals: dict[str, str] = {}
    errors: dict[str, dict[str, float]] = {}
    captures: dict[str, Capture] = {}
    for candidate in all_candidates(specs):
        start = time.monotonic()
        try:
            candidate_errors = candidate.check(candidate, candidate.ours)
            if not candidate.ours:
                _check_peer(candidate_errors, errors[first.name], candidate.limit)
            capture = capture_calls(candidate, case.backward)
        except Exception as error:
            if candidate is first:
                raise
            still_there(session.device)
            refusals.setdefault(candidate.name, sentence(error))
            if candidate.ours and isinstance(error, Inaccurate):
                session.refused.append(f"{case}, {candidate.name}: {error}")
            else:
                session.note(f"{candidate.label} is left out: {sentence(error)}", f" ({case})")
            continue
        if (took := time.monotonic() - start) > LONG_START:
            session.note(f"{candidate.label}: {took:.0f} s to compile and check", f" ({case})")
        if candidate.name not in captures or capture.ms < captures[candidate.name].ms:
            errors[candidate.name], captures[candidate.name] = candidate_errors, capture
    return errors, captures, {name: r for name, r in refusals.items() if name not in captures}


def all_candidates(specs: Sequence[RowSpec]) -> list[GpuCandidate]:
    """Our candidates, then their peers, each once."""
    listed = [c.ours for c in specs] + [peer for c in specs for peer in c.against]
    return list({id(candidate): candidate for candidate in listed}.values())


def _check_peer(theirs: dict[str, float], ours: dict[str, float], limit: float) -> None:
    if not theirs["normal"] <= limit * ours["normal"]:
        raise Inaccurate(f"its RMSE is {theirs['normal']:.3g}, ours {ours['normal']:.3g}")


def _row(
    case: Case, spec: RowSpec, measured: Timing, errors: dict, scale: Scale, doubts: list[str]
) -> Row:
    ours = spec.ours.name
    peers = list(dict.fromkeys(p.name for p in spec.against if p.name in measured.times))
    ratios = {name: measured.against(ours, name) for name in peers}
    best = min(ratios, key=lambda name: ratios[name].ratio) if ratios else None
    columns: dict[str, Any] = {"peers": {name: scale.of_ms(measured.ms(name)) for name in peers}}
    if best is not None:
        columns |= {"best_peer": best, "ratio": ratios[best].ratio}
        columns |= {"peer_error": errors[best]["normal"]}
    row = case.row(spec.kernel, scale.of_ms(measured.ms(ours)), scale.unit, **columns)
    return row | {
        "bench": spec.bench,
        "error": errors[ours]["normal"],
        "band": list(ratios[best][1:]) if best is not None else None,
        "ratios": {name: list(ratio) for name, ratio in ratios.items()},
        "errors": {name: errors[name] for name in (ours, *peers)},
        "control": measured.control,
        "tries": measured.tries,
        "doubts": doubts,
    }


def counts(row: Row) -> bool:
    return row["ratio"] is not None and not row["doubts"]


def worst_error(rows: list[Row], distributions: Sequence[str] = ("normal", "outlier")) -> float:
    """The largest ratio of our RMSE, the first of a row, to that of cuDNN on the same inputs."""
    pairs = [(next(iter(r["errors"].values())), r["errors"]["cudnn"]) for r in rows]
    return max(ours[name] / theirs[name] for ours, theirs in pairs for name in distributions)


def has_cudnn(row: Row) -> bool:
    return "cudnn" in row["errors"]


def other_cells(
    bench: str,
    selects: Callable[[Row], bool],
    groups: tuple[float, float],
    head_dims: tuple[float, float],
) -> Iterator[Threshold]:
    """Bounds (geomean, worst cell) on cells beyond the papers' grid, if any are measured."""
    grouped = lambda row: selects(row) and group_size(row) > 1
    plain = lambda row: selects(row) and group_size(row) == 1 and not is_of_papers(row)
    for name, chosen, bounds in (
        ("grouped heads", grouped, groups),
        ("other head_dims", plain, head_dims),
    ):
        yield Threshold(f"{bench}, {name}", chosen, at_least=bounds[0], optional=True)
        yield worst_cell(f"{bench}, {name}, worst cell", chosen, bounds[1], optional=True)


OVER_FLEX = Threshold(
    "triton over FlexAttention",
    lambda row: row["kernel"] == "triton" and "flex" in row["ratios"],
    at_least=1.0,
    measure=lambda rows: geomean([row["ratios"]["flex"][0] for row in rows]),
    optional=True,
)


@dataclass
class Monitor:
    """SM clock and power of a GPU five times a second, by nvidia-smi; no readings without it.

    nvidia-smi is a separate process, so that the timed process makes no driver call for it. It
    writes to a pseudo-terminal, because a program may buffer the lines that it writes to a pipe.
    """

    device: torch.device
    readings: list[tuple[float, float, float]] = field(default_factory=list)
    process: subprocess.Popen | None = None

    def __enter__(self) -> "Monitor":
        command = ["nvidia-smi", "--query-gpu=uuid,clocks.sm,power.draw"]
        command += ["--format=csv,noheader,nounits", "-lms", "200"]
        uuid = str(getattr(torch.cuda.get_device_properties(self.device), "uuid", ""))
        with suppress(OSError, AttributeError):  # no nvidia-smi, or no terminals
            ours, its = os.openpty()
            lines = os.fdopen(ours)
            try:
                self.process = subprocess.Popen(command, stdout=its, stderr=subprocess.DEVNULL)
            finally:
                os.close(its)
            threading.Thread(target=self.read, args=(lines, uuid), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()

    def read(self, lines: Iterable[str], uuid: str) -> None:
        with suppress(OSError):  # raised at the end of a pseudo-terminal
            for line in lines:
                name, *numbers = (part.strip() for part in line.split(","))
                if uuid in name and len(numbers) == 2:
                    with suppress(ValueError):  # "[N/A]" if the driver has no value
                        clock, power = map(float, numbers)
                        self.readings.append((time.monotonic(), clock, power))

    def since(self, start: float) -> dict[str, float | None]:
        """Medians of the readings since `start`; None without readings."""
        chosen = [reading for reading in self.readings if reading[0] >= start]
        median = lambda i: statistics.median(r[i] for r in chosen) if chosen else None
        return {"sm_mhz": median(1), "power_w": median(2)}
