"""Benchmarks that users run on their own machine: `onchip bench NAME`.

A benchmark is a module with `run(session: harness.Session)`, which fills the session with rows, and
`THRESHOLDS`, the bounds that the rows must meet. A benchmark with tables of its own has a report
module: `print_report(console, rows, picture)` and `SHEETS`, the tables that documents include. The
repository has more suites, in its folder benchmarks/: `python -m benchmarks`.
"""

from importlib import import_module
from types import ModuleType
from typing import NamedTuple


class Benchmark(NamedTuple):
    """One line of the registry; modules are imported when the benchmark runs."""

    summary: str
    module: str
    report: str | None = None  # module with tables of its own
    plots: str = ""  # module with draw(document, path), for --plot
    module_8bit: str | None = None  # runs instead for --precision
    simulates: bool = False  # accepts --simulate
    has_cache: bool = False  # accepts --kv-dtype
    has_groups: bool = False  # accepts --groups


BENCHES = {
    "cpu": Benchmark(
        "attention on this CPU against torch SDPA: dense, masked, packed, memory, overhead",
        "onchip.cli.bench.cpu",
    ),
    "forward": Benchmark(
        "GPU: forward kernels against FlashAttention-3 and 4, cuDNN and other peers",
        "onchip.cli.bench.forward",
        plots="onchip.cli.bench.plots",
        has_groups=True,
    ),
    "backward": Benchmark(
        "GPU: the whole backward pass against FlashAttention-4, cuDNN and FlashAttention-2",
        "onchip.cli.bench.backward",
        plots="onchip.cli.bench.plots",
        has_groups=True,
    ),
    "paged": Benchmark(
        "GPU: decoding over pages and in one piece, shared prefixes",
        "onchip.cli.bench.paged",
        has_cache=True,
    ),
}


def load(name: str, precision: str | None = None) -> ModuleType:
    """Import the module of a benchmark. Raises ValueError with the known names."""
    bench = _find(name)
    if precision is None:
        return import_module(bench.module)
    if bench.module_8bit is None:
        names = ", ".join(n for n, b in BENCHES.items() if b.module_8bit)
        known = names or "`python -m benchmarks forward`"
        raise ValueError(f"{name} has no precisions; --precision is for: {known}")
    return import_module(bench.module_8bit)


def report(name: str) -> ModuleType | None:
    """Import the module that prints the rows of a benchmark in its own tables, if it has one."""
    bench = BENCHES.get(name)
    return None if bench is None or bench.report is None else import_module(bench.report)


def _find(name: str) -> Benchmark:
    if name not in BENCHES:
        others = "" if "memory" in BENCHES else "; other suites: `python -m benchmarks` in a clone"
        raise ValueError(
            f"there is no benchmark {name!r}; choose from: {', '.join(BENCHES)}{others}"
        )
    return BENCHES[name]
