"""`onchip demo`: standard attention, torch SDPA and onchip side by side on this machine.

Every answer is judged by fp64 before it is shown. Times are the least of a few runs that take turns,
memory is what the system says a call held, and what would not fit is refused, with its size.
"""

import math
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import onchip
from onchip.bench.measure import alternate, available_bytes, peak_extra_bytes

METHODS = ("standard", "sdpa", "onchip")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
QUICK_LENGTHS = (256, 512, 1024)
NUM_HEADS, HEAD_DIM = 4, 64
MASKED_LENGTH, QUICK_MASKED_LENGTH = 8192, 1024
WINDOW, NUM_DOCUMENTS = 256, 16
CHECKED_ROWS = 128
MEMORY_FRACTION, MEMORY_CAP_BYTES = 0.25, 4 << 30
TIME_BUDGET_S = 75.0

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Measurement(NamedTuple):
    """One method on one problem. refused_bytes is set where it was not run, and nothing else is then."""

    method: str
    seqlen: int
    mask: str = "causal"
    time_s: float | None = None
    peak_bytes: int | None = None
    error: float | None = None
    refused_bytes: int | None = None


@dataclass
class Results:
    """What the demo found; `onchip.report` turns it into tables and pictures."""

    machine: str
    dtype: str
    budget_bytes: int
    lengths: list[Measurement] = field(default_factory=list)
    masked: list[Measurement] = field(default_factory=list)
    merge_cut: tuple[int, int] = (0, 0)
    merge_gap: float = 0.0
    omitted: list[int] = field(default_factory=list)
    elapsed_s: float = 0.0


class Step(NamedTuple):
    """A piece of the demo: what the progress bar says, and what is done."""

    title: str
    run: Callable[[], object]


Tell = Callable[[str, float], None]


def run(quick: bool = False, tell: Tell = lambda title, done: None) -> Results:
    """The whole demo. tell(title, done) hears what is under way and the share of steps that is done."""
    start = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    budget = min(int(MEMORY_FRACTION * available_bytes(device)), MEMORY_CAP_BYTES)
    results = Results(machine_name(device), str(dtype).removeprefix("torch."), budget)
    lab = Lab(device, dtype, results, quick, start + TIME_BUDGET_S)
    steps = list(lab.steps())
    for i, step in enumerate(steps):
        lab.tell = lambda part, share, i=i, step=step: tell(step.title + part, (i + share) / len(steps))
        lab.tell("", 0.0)
        step.run()
    tell("done", 1.0)
    results.elapsed_s = time.perf_counter() - start
    return results


@dataclass
class Lab:
    """Runs the steps of the demo on one device and collects their results."""

    device: torch.device
    dtype: torch.dtype
    results: Results
    quick: bool
    deadline: float
    last_s: float = 0.0
    tell: Tell = lambda part, share: None

    def steps(self) -> Iterator[Step]:
        for n in QUICK_LENGTHS if self.quick else LENGTHS:
            yield Step(f"causal attention over {n:,} tokens", lambda n=n: self.length(n))
        n = QUICK_MASKED_LENGTH if self.quick else MASKED_LENGTH
        yield Step(f"sliding window of {WINDOW} over {n:,} tokens", lambda: self.window(n))
        yield Step(f"{NUM_DOCUMENTS} documents in {n:,} tokens", lambda: self.documents(n))
        yield Step("keys cut in two, attended apart, merged", lambda: self.merge(n // 2))

    def length(self, n: int) -> None:
        start = time.perf_counter()
        if start + 4 * self.last_s > self.deadline:  # work grows fourfold from one length to the next
            self.results.omitted.append(n)
            return
        attends = {
            "standard": standard,
            "sdpa": lambda q, k, v: sdpa(q, k, v, is_causal=True),
            "onchip": lambda q, k, v: onchip.attention(q, k, v, causal=True),
        }
        self.results.lengths += self.measure("causal", n, attends, causal_rows)
        self.last_s = time.perf_counter() - start

    def window(self, n: int) -> None:
        visible = lambda rows: causal_rows(rows, n) & (rows[:, None] - torch.arange(n) < WINDOW)
        ours = lambda q, k, v: onchip.attention(q, k, v, window_size=(WINDOW - 1, 0))
        self.masked(f"window {WINDOW}", n, visible, ours)

    def documents(self, n: int) -> None:
        ends = document_ends(n, NUM_DOCUMENTS)
        ids = torch.bucketize(torch.arange(n), ends[1:], right=True)
        visible = lambda rows: causal_rows(rows, n) & (ids[rows][:, None] == ids)
        mask = onchip.masks.document(ends.to(self.device, torch.int32)) & onchip.masks.causal()
        built = mask.build(1, 1, n, n, self.device)
        ours = lambda q, k, v: onchip.attention(q, k, v, mask=built)
        self.masked(f"{NUM_DOCUMENTS} documents", n, visible, ours)

    def masked(self, name: str, n: int, visible: Callable[[Tensor], Tensor], ours: Attend) -> None:
        """onchip against SDPA with the equivalent dense mask, which is built before the clock starts."""
        dense = visible(torch.arange(n)).to(self.device)
        attends = {"sdpa": lambda q, k, v: sdpa(q, k, v, attn_mask=dense), "onchip": ours}
        self.results.masked += self.measure(name, n, attends, lambda rows, _: visible(rows))

    def measure(
        self, mask: str, n: int, attends: dict[str, Attend], visible: Callable[[Tensor, int], Tensor]
    ) -> list[Measurement]:
        q, k, v = self.qkv(n)
        rows = sample_rows(n)
        exact = exact_rows(q, k, v, rows, visible(rows, n))
        refused = {m: need for m in attends if (need := self.refuse(m, n))}
        jobs = {m: (lambda f=f: f(q, k, v)) for m, f in attends.items() if m not in refused}
        errors, peaks = {}, {}
        for i, (m, job) in enumerate(jobs.items()):
            self.tell(f": {m} against fp64", 0.1 + 0.4 * i / len(jobs))
            peaks[m], out = peak_extra_bytes(job, self.device)
            errors[m] = max_error(out, exact, rows)
        self.tell(": timing", 0.5)
        times = alternate(jobs, self.device, rounds=2, budget_s=0.1 if self.quick else 1.0)
        return [
            Measurement(m, n, mask, refused_bytes=refused[m])
            if m in refused
            else Measurement(m, n, mask, times[m], peaks[m], errors[m])
            for m in attends
        ]

    def merge(self, n: int) -> None:
        """The one idea: attention over two halves of the keys, merged, is attention over all of them."""
        q, k, v = self.qkv(n)
        cut = n // 3
        parts = [
            onchip.attention(q, k[:, part], v[:, part], return_lse=True)
            for part in (slice(0, cut), slice(cut, n))
        ]
        merged, _ = onchip.merge_states(*zip(*parts, strict=True))
        whole = onchip.attention(q, k, v)
        self.results.merge_cut = (cut, n - cut)
        self.results.merge_gap = (merged.double() - whole.double()).abs().max().item()

    def refuse(self, method: str, n: int) -> int | None:
        """The bytes of S and P if standard attention would go over the budget with them."""
        need = 2 * NUM_HEADS * n * n * self.dtype.itemsize
        return need if method == "standard" and need > self.results.budget_bytes else None

    def qkv(self, n: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(n)
        shape = (1, n, NUM_HEADS, HEAD_DIM)
        draw = lambda: torch.randn(shape, generator=generator).to(self.device, self.dtype)
        return [draw() for _ in range(3)]


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as the textbook writes it: the whole of S = q k^T, then P = softmax(S), then P v."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s = (q * q.shape[-1] ** -0.5) @ k.mT
    s.masked_fill_(~causal_rows(torch.arange(q.shape[2]), k.shape[2]).to(s.device), -math.inf)
    return (torch.softmax(s, -1) @ v).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """torch's SDPA in the layout of onchip: transposed views, no copies."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def causal_rows(rows: Tensor, n: int) -> Tensor:
    return torch.arange(n) <= rows[:, None]


def document_ends(n: int, num_documents: int) -> Tensor:
    """Boundaries 0 = e_0 < ... < e_num_documents = n of documents of unequal lengths."""
    weights = torch.linspace(0.5, 1.5, num_documents)[torch.arange(num_documents) * 7 % num_documents]
    ends = (weights.cumsum(0) / weights.sum() * n).round().long()
    return torch.cat([torch.zeros(1, dtype=torch.long), ends])


def sample_rows(n: int) -> Tensor:
    """The query rows that fp64 judges: all of them, or a fixed random sample with both ends."""
    if n <= CHECKED_ROWS:
        return torch.arange(n)
    rows = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:CHECKED_ROWS]
    rows[:2] = torch.tensor([0, n - 1])
    return rows.unique()


def exact_rows(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, visible: Tensor) -> Tensor:
    """The given query rows of attention in fp64 on the CPU: (1, rows, heads, head_dim)."""
    q, k, v = (x.double().cpu().transpose(1, 2) for x in (q[:, rows.to(q.device)], k, v))
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, -math.inf)
    return (torch.softmax(s, -1) @ v).transpose(1, 2)


def max_error(out: Tensor, exact: Tensor, rows: Tensor) -> float:
    return (out[:, rows.to(out.device)].double().cpu() - exact).abs().max().item()


def machine_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
