"""What the GPU benchmarks share: GPU time by replaying CUDA graphs, contenders in turns.

A sample is one replay of about 5 ms of calls, whose inputs rotate over more than twice the L2. A
round is one sample of every contender, in an order in which each comes after every other equally
often, and the rounds follow one another without a pause. What is reported is the median over the
rounds of the paired ratios, and their 10-90 % band. The first contender is captured twice: if the
median ratio of it to itself, the A/A control, is more than 1.5 % from 1, the cell is measured
again. Clock and power are read while it runs and never set.

Columns of a row beyond the schema's: `band` [low, high] of `ratio`; `ratios` {peer: [ratio, low,
high]}; `errors` {contender: {distribution: RMSE}}; `control` the A/A ratio; `tries`; `sm_mhz` and
`power_w` during the cell; `doubts`, sentences that say why the row does not count (none: it does).
"""

import gc
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from onchip.cli.bench.harness import (
    CHECKED_ROWS,
    Case,
    Inaccurate,
    Refused,
    Row,
    Rows,
    Session,
    geomean,
    hold,
)
from onchip.cli.bench.measure import sample_rows, seconds
from onchip.cli.bench.peers import Attend, heads_first
from onchip.testing import oracle, rmse

SAMPLE_MS, MAX_CALLS = 5.0, 2000
ROUNDS, QUICK_ROUNDS = 30, 6
CONTROL_LIMIT, TRIES = 0.015, 3
PEER_LIMIT = 2.0  # a peer whose RMSE is this many times ours does not compute the same thing
TOKENS, HIDDEN = 16384, 2048
LENGTHS, HEAD_DIMS = (512, 1024, 2048, 4096, 8192, 16384), (64, 128, 256)
QUICK_LENGTHS, QUICK_HEAD_DIMS = (1024,), (64, 128)
Inputs = tuple[Tensor, ...]  # (q, k, v), for a backward pass (q, k, v, dout)
Step = tuple[str, Callable[[], list[Row]]]


class DeviceLost(OSError):
    """The GPU answers every call with an error: nothing more can be measured in this process."""


def device() -> torch.device:
    if not torch.cuda.is_available():
        raise ValueError("this benchmark needs a CUDA GPU, and torch finds none here")
    return torch.device("cuda", torch.cuda.current_device())


def run(session: Session, steps: Callable[[], Iterable[Step]]) -> None:
    """Measure the steps with the GPU watched; a step that fails refuses its row and costs no other.

    steps is a function, so that nothing of it runs where there is no GPU.
    """
    session.device = device()
    session.where = {"device": torch.cuda.get_device_name(session.device), "clocks": {}}
    with Monitor(session.device) as monitor:
        session.watch = monitor.since
        session.run((title, partial(_guarded, session, step)) for title, step in steps())


def _guarded(session: Session, step: Callable[[], list[Row]]) -> list[Row]:
    try:
        rows = step()
    except Refused:
        raise
    except Exception as error:
        still_there(session.device)
        raise Refused(sentence(error)) from error
    finally:
        gc.collect()
    session.where["clocks"] = _typical([*session.rows, *rows])
    return rows


def _typical(rows: list[Row]) -> dict[str, float]:
    """The medians of the clocks and of the power of all rows that have them."""
    names = ("sm_mhz", "power_w")
    read = {name: [r[name] for r in rows if r.get(name) is not None] for name in names}
    return {name: statistics.median(values) for name, values in read.items() if values}


def still_there(device: torch.device) -> None:
    """DeviceLost if an earlier kernel has left the GPU unusable."""
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).item()
    except torch.OutOfMemoryError:
        return
    except RuntimeError as error:
        raise DeviceLost(f"the GPU cannot go on: {sentence(error)}") from error


def sentence(error: BaseException) -> str:
    """The first line of an error that says something, with its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


class Judge(Protocol):
    """RMSE by distribution. strict: Inaccurate if the accuracy rule is broken on any of them."""

    def __call__(self, contender: "Contender", strict: bool) -> dict[str, float]: ...


@dataclass(frozen=True)
class Contender:
    """attend(q, k, v) -> out on every set of inputs, each stored the way `layout` stores it.

    Contenders of the same name are ways to call the same thing: the fastest of them counts. ours:
    held to the accuracy rule.
    """

    name: str
    attend: Attend
    sets: Sequence[Inputs]
    judge: Judge
    layout: Callable[[Tensor], Tensor] = lambda x: x
    ours: bool = False

    @property
    def label(self) -> str:
        return f"{self.name}, heads first," if self.layout is heads_first else self.name

    def forward(self, inputs: Inputs) -> Tensor:
        with torch.no_grad():
            return self.attend(*map(self.layout, inputs[:3]))

    def jobs(self, backward: bool) -> list[Callable[[], object]]:
        """One job per set. A backward pass runs on the stream of its forward, which runs here."""
        stored = [tuple(map(self.layout, inputs)) for inputs in self.sets]
        make = self._backward_job if backward else self._forward_job
        return [make(inputs) for inputs in stored]

    def _forward_job(self, inputs: Inputs) -> Callable[[], object]:
        return partial(_without_grad, self.attend, inputs[:3])

    def _backward_job(self, inputs: Inputs) -> Callable[[], object]:
        return self.differentiate(inputs)[1]

    def differentiate(self, inputs: Inputs) -> tuple[Tensor, Callable[[], Inputs]]:
        """out, and the whole backward pass as a function: () -> (dq, dk, dv)."""
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        with torch.enable_grad():
            out = self.attend(*leaves)
        return out, partial(torch.autograd.grad, out, leaves, inputs[3], retain_graph=True)


def _without_grad(attend: Attend, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        return attend(*inputs)


def both_layouts(name: str, attend: Attend, sets: Sequence[Inputs], judge: Judge):
    """A peer that takes (batch, heads, seqlen, head_dim) but may like a transposed view as well."""
    return (
        Contender(name, attend, sets, judge, layout=heads_first),
        Contender(name, attend, sets, judge),
    )


class Claim(NamedTuple):
    """A row to be: ours, its `bench` and `kernel` columns, and whom it is compared with."""

    bench: str
    kernel: str
    ours: Contender
    against: Sequence[Contender]


class Sampled:
    """Inputs by name, and the rows of queries (and of keys) on which fp64 judges what a contender
    makes of them. visible(rows) -> bool (rows, seqlen_k).
    """

    def __init__(self, samples: dict[str, Inputs], visible: Rows):
        self.samples, self.visible = samples, visible

    @cached_property
    def rows(self) -> Tensor:
        q = next(iter(self.samples.values()))[0]
        return sample_rows(q.shape[1], CHECKED_ROWS).to(q.device)


class OutputJudge(Sampled):
    """fp64 on a sample of query rows, of the very call that is timed and of further inputs.

    The rows go through `onchip.testing.assert_accurate`, the one rule of the package; only
    (sampled rows x seqlen_k) scores are ever stored.
    """

    @cached_property
    def exact(self) -> dict[str, Tensor]:
        mask = self.visible(self.rows)
        answer = lambda q, k, v: oracle(q[:, self.rows], k, v, mask=mask).out
        return {name: answer(*inputs[:3]) for name, inputs in self.samples.items()}

    def __call__(self, contender: Contender, strict: bool) -> dict[str, float]:
        errors = {}
        for name, inputs in self.samples.items():
            out = contender.forward(inputs)[:, self.rows]
            if strict:
                q, k, v = inputs[:3]
                hold(out, q[:, self.rows], k, v, mask=self.visible(self.rows))
            errors[name] = rmse(out, self.exact[name])
        return errors


class Paired(NamedTuple):
    """The median of paired ratios, and the ends of their 10-90 % band."""

    ratio: float
    low: float
    high: float


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Paired:
    """theirs / ours round by round: above 1 means that ours takes less time."""
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    tenths = statistics.quantiles(ratios, n=10, method="inclusive")
    return Paired(statistics.median(ratios), tenths[0], tenths[-1])


class Lane(NamedTuple):
    """A captured contender: replay() launches `calls` calls; ms is what one took when probed."""

    replay: Callable[[], object]
    calls: int
    ms: float
    holds: object = None  # what the graph reads and must not be freed


class Race(NamedTuple):
    """Milliseconds of one call by contender and round; the A/A ratio; how many tries it took."""

    times: dict[str, list[float]]
    control: float
    tries: int

    def against(self, ours: str, theirs: str) -> Paired:
        return paired(self.times[ours], self.times[theirs])

    def ms(self, name: str) -> float:
        return statistics.median(self.times[name])


def race(
    lanes: dict[str, Lane],
    control: Lane,
    rounds: int,
    sample: Callable[[list[Lane]], list[float]] | None = None,
) -> Race:
    """All lanes in turns; control is another capture of the first. While the control is off by more
    than CONTROL_LIMIT there is another try, TRIES at most; the one with the best control counts.

    sample(lanes) -> milliseconds of one call of each, run in that order.
    """
    first, runs = next(iter(lanes)), []
    while len(runs) < TRIES:
        times = alternate([*lanes.items(), ("", control)], rounds, sample or replay_in_order)
        runs.append(Race(times, paired(times[first], times.pop("")).ratio, 0))
        if abs(runs[-1].control - 1) <= CONTROL_LIMIT:
            break
    best = min(runs, key=lambda run: abs(run.control - 1))
    return best._replace(tries=len(runs))


def alternate(
    lanes: Sequence[tuple[str, Lane]], rounds: int, sample: Callable[[list[Lane]], list[float]]
) -> dict[str, list[float]]:
    """Milliseconds by name, one per round; one more round comes first and warms the GPU up."""
    orders = balanced(len(lanes))
    order = [lanes[x] for i in range(rounds + 1) for x in orders[i % len(orders)]]
    times: dict[str, list[float]] = {name: [] for name, _ in lanes}
    for (name, _), ms in zip(order, sample([lane for _, lane in order]), strict=True):
        times[name].append(ms)
    return {name: measured[1:] for name, measured in times.items()}


def balanced(num: int) -> list[list[int]]:
    """Orders of so many contenders in which each comes right after every other equally often
    (Williams, 1949). At its power limit a GPU is faster after somebody who used less: in an order
    and its reverse, where neighbours stay neighbours, a kernel beat itself by 2.4 %.
    """
    first = [x // 2 if x % 2 == 0 else num - 1 - x // 2 for x in range(num)]
    orders = [[(x + i) % num for x in first] for i in range(num)]
    return orders if num % 2 == 0 else orders + [order[::-1] for order in orders]


def replay_in_order(lanes: list[Lane]) -> list[float]:
    """Everything is queued at once: while one graph runs, the next is launched, so that no launch
    is timed and the GPU never rests. For the first one it waits half a millisecond."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in lanes]
    torch.cuda._sleep(1_000_000)
    for lane, (start, end) in zip(lanes, events, strict=True):
        start.record()
        lane.replay()
        end.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / x.calls for x, (a, b) in zip(lanes, events, strict=True)]


def sampler(device: torch.device) -> Callable[[list[Lane]], list[float]]:
    """What `race` samples lanes of this device with."""
    if device.type == "cuda":
        return replay_in_order
    return lambda lanes: [seconds(lane.replay, device) * 1e3 / lane.calls for lane in lanes]


def open_lane(contender: Contender, backward: bool) -> Lane:
    """Capture about SAMPLE_MS of calls. How many that is, a small graph tells: run eagerly, a short
    call would show the time of its launch."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        jobs = contender.jobs(backward)
        for job in (jobs[0], jobs[-1], jobs[0]):
            job()
    torch.cuda.synchronize()
    probe = Lane(_graph(jobs, min(len(jobs), 8), stream).replay, min(len(jobs), 8), 0.0)
    ms = min(replay_in_order([probe, probe]))
    calls = calls_per_sample(ms, len(jobs))
    graph = _graph(jobs, calls, stream)
    graph.replay()  # the first replay uploads the graph
    torch.cuda.synchronize()
    return Lane(graph.replay, calls, ms, jobs)


def _graph(jobs: list[Callable], calls: int, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            jobs[i % len(jobs)]()
    return graph


def calls_per_sample(ms: float, num_sets: int) -> int:
    """About SAMPLE_MS of calls of `ms`, but every set equally often, and at least once."""
    wanted = min(MAX_CALLS, max(1.0, SAMPLE_MS / max(ms, 1e-6)))
    return num_sets * max(1, round(wanted / num_sets))


def num_sets(set_bytes: int, l2_bytes: int) -> int:
    """The least number of sets that together are more than twice the L2."""
    return 2 * l2_bytes // set_bytes + 1


def draw(case: Case, device: torch.device, distribution: str = "normal", seed: int = 0) -> Inputs:
    """q, k, v and, for a backward pass, dout, in onchip's layout, drawn on the GPU; distributions
    as in `onchip.testing.make_qkv`, dout always normal."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (case.batch, case.seqlen, case.num_heads, case.head_dim)
    normal = lambda: torch.randn(shape, generator=generator, device=device)

    def one() -> Tensor:
        x = normal()
        if distribution == "outlier":
            x += 10 * normal() * (torch.rand(shape, generator=generator, device=device) < 0.001)
        return x.to(case.dtype)

    inputs = (one(), one(), one())
    return (*inputs, normal().to(case.dtype)) if case.backward else inputs


def draw_sets(case: Case, device: torch.device) -> list[Inputs]:
    first = draw(case, device)
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
    """The papers' protocol: TOKENS tokens in all, HIDDEN channels, every length and head_dim."""
    if session.quick:
        lengths, head_dims = QUICK_LENGTHS, QUICK_HEAD_DIMS
    way = "backward" if backward else ""
    for head_dim in session.head_dims or head_dims:
        for mask in ("none", "causal"):
            for n in session.seqlens or lengths:
                sizes = (head_dim, n, max(1, TOKENS // n), max(1, HIDDEN // head_dim))
                yield Case(bench, mask, torch.bfloat16, *sizes, backward=backward, way=way)


def flops(case: Case) -> float:
    """4 B H N^2 D, half of it if causal, 2.5 times that for a backward pass."""
    forward = 4.0 * case.batch * case.num_heads * case.seqlen**2 * case.head_dim
    return forward * (0.5 if case.mask == "causal" else 1.0) * (2.5 if case.backward else 1.0)


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
    claims: Sequence[Claim],
    scale: Scale,
    required: Sequence[str] = (),
) -> list[Row]:
    """The rows of one cell. Everyone is judged before anyone is timed.

    The first claim must hold, or there is no row; any other contender that raises or is wrong is
    reported and left out. A row without every `required` peer does not count.
    """
    errors, lanes = _enter(session, case, claims)
    control = open_lane(claims[0].ours, case.backward)
    start = time.monotonic()
    measured = race(lanes, control, QUICK_ROUNDS if session.quick else ROUNDS)
    clocks = session.watch(start)
    doubts = [f"no {name} in this run" for name in required if name not in lanes]
    if abs(measured.control - 1) > CONTROL_LIMIT:
        doubts.append(f"its A/A control is off by {abs(measured.control - 1):.1%}")
    held = [claim for claim in claims if claim.ours.name in lanes]
    return [_row(case, claim, measured, errors, scale, doubts) | clocks for claim in held]


def _enter(
    session: Session, case: Case, claims: Sequence[Claim]
) -> tuple[dict[str, dict[str, float]], dict[str, Lane]]:
    """The errors and the lanes of those who may take part, ours first."""
    first = claims[0].ours
    errors: dict[str, dict[str, float]] = {}
    lanes: dict[str, Lane] = {}
    for contender in _everyone(claims):
        try:
            found = contender.judge(contender, contender.ours)
            if not contender.ours:
                _check_peer(found, errors[first.name])
            lane = open_lane(contender, case.backward)
        except Exception as error:
            if contender is first:
                raise
            still_there(session.device)
            if contender.ours and isinstance(error, Inaccurate):
                session.refused.append(f"{case}, {contender.name}: {error}")
            else:
                session.note(f"{contender.label} is left out: {sentence(error)}", f" ({case})")
            continue
        if contender.name not in lanes or lane.ms < lanes[contender.name].ms:
            errors[contender.name], lanes[contender.name] = found, lane
    return errors, lanes


def _everyone(claims: Sequence[Claim]) -> list[Contender]:
    """Ours first, then whom they are compared with, each once."""
    listed = [c.ours for c in claims] + [peer for c in claims for peer in c.against]
    return list({id(contender): contender for contender in listed}.values())


def _check_peer(found: dict[str, float], ours: dict[str, float]) -> None:
    if not found["normal"] <= PEER_LIMIT * ours["normal"]:
        raise Inaccurate(f"its RMSE is {found['normal']:.3g}, ours {ours['normal']:.3g}")


def _row(
    case: Case, claim: Claim, measured: Race, errors: dict, scale: Scale, doubts: list[str]
) -> Row:
    ours = claim.ours.name
    peers = list(dict.fromkeys(p.name for p in claim.against if p.name in measured.times))
    ratios = {name: measured.against(ours, name) for name in peers}
    best = min(ratios, key=lambda name: ratios[name].ratio) if ratios else None
    columns: dict[str, Any] = {"peers": {name: scale.of_ms(measured.ms(name)) for name in peers}}
    if best is not None:
        columns |= {"best_peer": best, "ratio": ratios[best].ratio}
        columns |= {"peer_error": errors[best]["normal"]}
    row = case.row(claim.kernel, scale.of_ms(measured.ms(ours)), scale.unit, **columns)
    return row | {
        "bench": claim.bench,
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
    """The largest RMSE of ours over that of cuDNN on the same inputs."""
    pairs = [(r["errors"][_ours(r)], r["errors"]["cudnn"]) for r in rows]
    return max(ours[name] / theirs[name] for ours, theirs in pairs for name in distributions)


def beside_cudnn(row: Row) -> bool:
    return "cudnn" in row["errors"]


def _ours(row: Row) -> str:
    return next(iter(row["errors"]))


def against_flex(rows: list[Row]) -> float:
    return geomean([row["ratios"]["flex"][0] for row in rows])


@dataclass
class Monitor:
    """SM clock and power of a GPU five times a second, by nvidia-smi; silent where that is missing.

    A process of its own: nothing is asked of the driver from the process that is timed. It writes
    to a terminal of its own, because into a pipe a program may keep its lines back.
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
        with suppress(OSError):  # how a terminal ends
            for line in lines:
                name, *numbers = (part.strip() for part in line.split(","))
                if uuid in name and len(numbers) == 2:
                    with suppress(ValueError):  # "[N/A]" where the driver does not say
                        clock, power = map(float, numbers)
                        self.readings.append((time.monotonic(), clock, power))

    def since(self, start: float) -> dict[str, float | None]:
        """Medians of the readings since then; None without any."""
        chosen = [reading for reading in self.readings if reading[0] >= start]
        median = lambda i: statistics.median(r[i] for r in chosen) if chosen else None
        return {"sm_mhz": median(1), "power_w": median(2)}
