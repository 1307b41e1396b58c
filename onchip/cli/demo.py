"""`onchip demo`: standard attention, torch SDPA and onchip side by side on this machine.

Every result is compared with fp64 before it is shown. A time is the shortest of a few runs; the
methods alternate. Memory is the system's figure for one call. A call that would not fit is refused,
and its size is shown.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onchip
from onchip.cli.bench import patterns
from onchip.cli.bench.measure import (
    alternate,
    available_bytes,
    cpu_name,
    peak_extra_bytes,
    sample_rows,
)
from onchip.cli.bench.patterns import Pattern
from onchip.cli.bench.peers import sdpa, standard
from onchip.cli.progress import Interruptible

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
QUICK_LENGTHS = (256, 512, 1024)
NUM_HEADS, HEAD_DIM = 4, 64
MASKED_LENGTH, QUICK_MASKED_LENGTH = 8192, 2048
CHECKED_ROWS = 128
MEMORY_FRACTION, MEMORY_CAP_BYTES = 0.25, 4 << 30
TIME_BUDGET_S, CALLS = 75.0, 4  # calls of a method: one is checked, about three are timed

Attend = Callable[..., Any]
CAUSAL: dict[str, Attend] = {
    "standard": standard,
    "sdpa": partial(sdpa, is_causal=True),
    "onchip": partial(onchip.attention, causal=True),
}
METHODS = tuple(CAUSAL)


class Measurement(NamedTuple):
    """One method on one problem. If it was refused, only refused_bytes is set."""

    method: str
    seqlen: int
    mask: str = "causal"
    time_s: float | None = None
    peak_bytes: int | None = None
    error: float | None = None
    refused_bytes: int | None = None
    least_bytes: int = 0  # the result, and one N x N matrix of standard attention

    @property
    def is_below_resolution(self) -> bool:
        """Whether the measured peak is less than the call must hold, because the process reused
        memory that it had already.
        """
        return self.peak_bytes is not None and self.peak_bytes < self.least_bytes

    @property
    def held_bytes(self) -> int | None:
        """The measured peak, or the lower bound if the peak is below it."""
        return self.least_bytes if self.is_below_resolution else self.peak_bytes


@dataclass
class Results:
    """The measurements of the demo; `onchip.cli.report` makes tables and plots of them."""

    machine: str
    dtype: str
    budget_bytes: int
    lengths: list[Measurement] = field(default_factory=list)
    masked: list[Measurement] = field(default_factory=list)
    merge_cut: tuple[int, int] = (0, 0)
    merge_gap: float = 0.0
    omitted: list[int] = field(default_factory=list)
    elapsed_s: float = 0.0
    interrupted_at: str = ""  # title of the step that Ctrl-C ended; later steps did not run


class DemoStep(NamedTuple):
    """A step of the demo; title is for the progress bar."""

    title: str
    run: Callable[[], object]


ReportProgress = Callable[[str, float], None]


def run(quick: bool = False, report_progress: ReportProgress = lambda title, done: None) -> Results:
    """Run the demo. report_progress(title, done) gets the current step and the completed share.
    Ctrl-C ends it with the results so far.
    """
    start = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    budget = min(int(MEMORY_FRACTION * available_bytes(device)), MEMORY_CAP_BYTES)
    results = Results(machine_name(device), str(dtype).removeprefix("torch."), budget)
    runner = DemoRunner(device, dtype, results, quick, start + TIME_BUDGET_S)
    steps = list(runner.steps())

    def report_part(i: int, part: str, share: float) -> None:
        report_progress(steps[i].title + part, (i + share) / len(steps))

    step = steps[0]
    with Interruptible() as work:
        for i, step in enumerate(steps):
            runner.report_progress = partial(report_part, i)
            runner.report_progress("", 0.0)
            step.run()
        report_progress("done", 1.0)
    results.interrupted_at = step.title if work.was_interrupted else ""
    results.elapsed_s = time.perf_counter() - start
    return results


@dataclass
class DemoRunner:
    """Runs the steps of the demo on one device and collects their results."""

    device: torch.device
    dtype: torch.dtype
    results: Results
    quick: bool
    deadline: float
    report_progress: ReportProgress = lambda part, share: None

    def steps(self) -> Iterator[DemoStep]:
        warm = partial(self.measure, patterns.causal(64), 64, CAUSAL)  # loads what torch loads once
        yield DemoStep("warming up", warm)
        for n in QUICK_LENGTHS if self.quick else LENGTHS:
            yield DemoStep(f"causal attention over {n:,} tokens", partial(self.measure_length, n))
        n = QUICK_MASKED_LENGTH if self.quick else MASKED_LENGTH
        for build in (patterns.window, partial(patterns.documents, device=self.device)):
            pattern = build(n)
            yield DemoStep(
                f"{pattern.name} over {n:,} tokens", partial(self.measure_masked, pattern, n)
            )
        yield DemoStep("two sets of keys, merged", partial(self.measure_merge, n // 2))

    def measure_length(self, n: int) -> None:
        if time.perf_counter() + self.expected_s(n) > self.deadline:
            self.results.omitted.append(n)
            return
        self.results.lengths += self.measure(patterns.causal(n), n, CAUSAL)

    def expected_s(self, n: int) -> float:
        """Predicted time of a length, from the previous one: the work grows with the square."""
        last = [
            m for m in self.results.lengths[-len(METHODS) :] if not self.refused_bytes(m.method, n)
        ]
        return sum((n / m.seqlen) ** 2 * CALLS * (m.time_s or 0.0) for m in last)

    def measure_masked(self, pattern: Pattern, n: int) -> None:
        """onchip, and SDPA with the equivalent dense mask. The mask has floats, with which SDPA is
        fastest, and is built before the timing."""
        hidden = ~pattern.visible(torch.arange(n)).to(self.device)
        dense = torch.zeros(n, n, dtype=self.dtype, device=self.device)
        attends = {
            "sdpa": partial(sdpa, attn_mask=dense.masked_fill_(hidden, -math.inf)),
            "onchip": partial(onchip.attention, **pattern.options),
        }
        self.results.masked += self.measure(pattern, n, attends)

    def measure(self, pattern: Pattern, n: int, attends: dict[str, Attend]) -> list[Measurement]:
        q, k, v = self.qkv(n)
        rows = sample_rows(n, CHECKED_ROWS)
        exact = exact_rows(q, k, v, rows, pattern.visible(rows))
        refused = {m: need for m in attends if (need := self.refused_bytes(m, n))}
        jobs = {m: partial(f, q, k, v) for m, f in attends.items() if m not in refused}
        errors, peaks = {}, {}
        for i, (m, job) in enumerate(jobs.items()):
            self.report_progress(f": {m} against fp64", 0.1 + 0.4 * i / len(jobs))
            peaks[m], out = peak_extra_bytes(job, self.device)
            errors[m] = max_error(out, exact, rows)
        self.report_progress(": timing", 0.5)
        times = alternate(jobs, self.device, rounds=2, budget_s=0.1 if self.quick else 1.0)
        return [
            Measurement(m, n, pattern.name, refused_bytes=refused[m])
            if m in refused
            else Measurement(
                m,
                n,
                pattern.name,
                times[m],
                peaks[m],
                errors[m],
                least_bytes=self.least_bytes(m, n),
            )
            for m in attends
        ]

    def measure_merge(self, n: int) -> None:
        """Attention over two sets of keys, merged, compared with attention over their union."""
        q, k, v = self.qkv(n)
        cut = n // 3
        first, lse_first = onchip.attention(q, k[:, :cut], v[:, :cut], return_lse=True)
        rest, lse_rest = onchip.attention(q, k[:, cut:], v[:, cut:], return_lse=True)
        merged, _ = onchip.merge_states([first, rest], [lse_first, lse_rest])
        whole, _ = onchip.attention(q, k, v, return_lse=True)
        self.results.merge_cut = (cut, n - cut)
        self.results.merge_gap = (merged.double() - whole.double()).abs().max().item()

    def refused_bytes(self, method: str, n: int) -> int | None:
        """The bytes of S and P if the method is standard attention and they exceed the budget."""
        need = 2 * NUM_HEADS * n * n * self.dtype.itemsize
        return need if method == "standard" and need > self.results.budget_bytes else None

    def least_bytes(self, method: str, n: int) -> int:
        columns = HEAD_DIM + (n if method == "standard" else 0)
        return n * NUM_HEADS * columns * self.dtype.itemsize

    def qkv(self, n: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(n)
        shape = (1, n, NUM_HEADS, HEAD_DIM)
        sample = lambda: torch.randn(shape, generator=generator).to(self.device, self.dtype)
        return [sample() for _ in range(3)]


def exact_rows(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, visible: Tensor) -> Tensor:
    """Some query rows of attention in fp64 on the CPU: (1, rows, heads, head_dim)."""
    q, k, v = (x.double().cpu().transpose(1, 2) for x in (q[:, rows.to(q.device)], k, v))
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, -math.inf)
    return (torch.softmax(s, -1) @ v).transpose(1, 2)


def max_error(out: Tensor, exact: Tensor, rows: Tensor) -> float:
    return (out[:, rows.to(out.device)].double().cpu() - exact).abs().max().item()


def machine_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
