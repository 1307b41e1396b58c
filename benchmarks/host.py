"""`python -m benchmarks host`: the time of an eager call on the calling thread, in microseconds.

A call is timed from its start to its return, while the GPU runs asynchronously. Problems are so
small and rounds so short that the GPU keeps up and its queue never fills: otherwise the thread
would wait for the GPU. A call that synchronises is refused. "host" rows run without gradients,
"host grad" rows record them, "host backward" rows are `torch.autograd.grad` of such a call. SDPA
runs the same calls as the peer.

`python -m benchmarks.host` prints the time of a call by function.
"""

import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

import onchip
from onchip.cli.bench import gpu, patterns
from onchip.cli.bench.backward import GradientCheck, kernel_of
from onchip.cli.bench.harness import Case, Row, RowRefused, Rows, Session, Threshold
from onchip.cli.bench.peers import Attend

CALLS = 100  # of one round: at most a few hundred launches, and the queue holds a thousand
CALLS_PROFILED = 2000
SHAPES = ((64, 64, "none"), (197, 64, "causal"), (64, 128, "causal"), (64, 256, "none"))
PASSES = ("host", "host grad", "host backward")
KERNELS = (None, "triton")  # what a plain call gets, and the portable kernels by name
LIMITS_US = {"host": 60, "host grad": 90}
Job = Callable[[], object]


def _named(bench: str) -> Callable[[Row], bool]:
    return lambda row: row["bench"] == bench


THRESHOLDS = tuple(
    Threshold(f"{name}, worst cell", _named(name), at_most=us) for name, us in LIMITS_US.items()
)


def run(session: Session) -> None:
    gpu.run(session, lambda: steps(session))


def cases(session: Session) -> Iterator[Case]:
    shapes = SHAPES[:1] if session.quick else SHAPES
    for bench in PASSES:
        for n, head_dim, mask in shapes:
            if head_dim in (session.head_dims or (head_dim,)):
                grad = bench == "host backward"
                way = "backward" if grad else "forward"
                yield Case(bench, mask, torch.bfloat16, head_dim, n, backward=grad, way=way)


def steps(session: Session) -> Iterator[gpu.Step]:
    for case in cases(session):
        for kernel in KERNELS:
            yield f"{case}, {kernel or 'plain'}", partial(measure, session, case, kernel)


def measure(session: Session, case: Case, kernel: str | None) -> list[Row]:
    """One row: right on these inputs, then the median over rounds in turns with SDPA."""
    inputs = gpu.draw(case, session.device)
    pattern = patterns.plain(case.seqlen, case.mask)
    attend = partial(onchip.attention, kernel=kernel, **pattern.options)
    error = _check_accuracy(case, attend, inputs, pattern.visible)
    transposed = tuple(x.transpose(1, 2).contiguous() for x in inputs)  # its own layout, no views
    peer = partial(scaled_dot_product_attention, is_causal=case.mask == "causal")
    jobs = {"onchip": job(case.bench, attend, inputs), "sdpa": job(case.bench, peer, transposed)}
    warm_up(jobs)
    check_no_sync(jobs["onchip"])
    times = call_times(jobs, gpu.QUICK_ROUNDS if session.quick else gpu.ROUNDS)
    ratio = gpu.paired(times["onchip"], times["sdpa"])
    ours, theirs = (statistics.median(times[name]) for name in jobs)
    columns = {"peers": {"sdpa": theirs}, "best_peer": "sdpa", "ratio": ratio.ratio}
    row = case.row(kernel or _served_by(case, inputs), ours, "us", error=error, **columns)
    return [row | {"band": list(ratio[1:]), "ratios": {"sdpa": list(ratio)}, "doubts": []}]


def _served_by(case: Case, inputs: gpu.Inputs) -> str:
    options = {"causal": case.mask == "causal"}
    if case.backward:
        return kernel_of(inputs, options)
    return onchip.explain(*inputs[:3], **options).plan.kernel


def _check_accuracy(case: Case, attend: Attend, inputs: gpu.Inputs, visible: Rows) -> float:
    """The RMSE of the call that will be timed; a refusal if it breaks the accuracy rule."""
    check = (GradientCheck if case.backward else gpu.OutputCheck)({"normal": inputs}, visible)
    return check(gpu.GpuCandidate("onchip", attend, [inputs], check, ours=True), True)["normal"]


def job(bench: str, attend: Attend, inputs: gpu.Inputs) -> Job:
    """The call that a bench is about; for a backward pass the forward runs here."""
    q, k, v = (x.detach().requires_grad_(bench != "host") for x in inputs[:3])
    if bench != "host backward":
        return partial(attend, q, k, v)
    out = attend(q, k, v)
    return partial(torch.autograd.grad, out, (q, k, v), torch.ones_like(out), retain_graph=True)


def warm_up(jobs: dict[str, Job]) -> None:
    for _ in range(3):
        for call in jobs.values():
            call()


def call_times(
    jobs: dict[str, Job],
    rounds: int,
    calls: int = CALLS,
    wait: Job = lambda: torch.cuda.synchronize(),
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Microseconds by job and round, each the median of `calls` calls. wait() empties the queue
    before a round, outside of what is timed.
    """
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for i in range(rounds):
        for name in reversed(jobs) if i % 2 else jobs:
            wait()
            times[name].append(statistics.median(_each(jobs[name], calls, clock)) * 1e6)
    wait()
    return times


def _each(call: Job, calls: int, clock: Callable[[], float]) -> list[float]:
    spent = []
    for _ in range(calls):
        start = clock()
        call()
        spent.append(clock() - start)
    return spent


def check_no_sync(call: Job) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        raise RowRefused(f"a call synchronises: {gpu.sentence(error)}") from error
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Spent(NamedTuple):
    """Microseconds of one call in one function: its own, and with what it calls."""

    where: str
    own_us: float
    all_us: float
    times: float  # calls of the function per call of the job


def breakdown(call: Job, calls: int = CALLS_PROFILED) -> list[Spent]:
    """The time of a call by function, largest first. Profiling adds about a microsecond to every
    Python function call: read the order and the counts, not the sum.
    """
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(calls):
        call()
    profile.disable()
    found = pstats.Stats(profile).stats  # pyright: ignore[reportAttributeAccessIssue]
    rows = [
        Spent(_place(*where), own / calls * 1e6, total / calls * 1e6, count / calls)
        for where, (_, count, own, total, _) in found.items()
    ]
    return sorted(rows, key=lambda row: -row.own_us)


def _place(file: str, line: int, function: str) -> str:
    short = "/".join(Path(file).parts[-2:])
    return f"{short}:{line} {function}" if line else function


def main(rows: int = 16, calls: int = CALLS_PROFILED) -> int:
    """Print the breakdown of every pass, on the GPU if there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    inputs = gpu.draw(Case("host", "none", torch.bfloat16, 64, 64), device)
    for bench in PASSES:
        call = job(bench, onchip.attention, inputs)
        warm_up({"onchip": call})
        print(f"{bench} on {device}: us of one call, own / with callees, calls, where")
        for spent in breakdown(call, calls)[:rows]:
            print(f"{spent.own_us:8.2f} {spent.all_us:8.2f} {spent.times:6.1f}  {spent.where}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
