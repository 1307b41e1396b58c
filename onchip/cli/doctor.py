"""The capabilities of this machine: versions, kernels with their refusals, memories. All of it is
detected.
"""

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import onchip
from onchip import models
from onchip.cli.bench import levels
from onchip.cli.bench.measure import seconds
from onchip.core.device import DeviceInfo, device_info
from onchip.core.dispatch import backend_names, find_refusal, get_backend
from onchip.core.explain import human_bytes
from onchip.core.machine import has_fast_matmul
from onchip.core.problem import Options, Problem, Tensors, UnsupportedError
from onchip.core.validation import describe
from onchip.cost import hardware
from onchip.models import foreign

DEVICES = {
    "CPU": DeviceInfo("cpu"),
    "sm_80": DeviceInfo("cuda", "NVIDIA A100", (8, 0)),
    "sm_90": DeviceInfo("cuda", "NVIDIA H100", (9, 0)),
    "sm_100": DeviceInfo("cuda", "NVIDIA B200", (10, 0)),
    "gfx942": DeviceInfo("hip", "gfx942"),
}
PRECISIONS = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
# Calls that compile on first use: (head_dim, options), each forward and backward.
FIRST_CALLS = {
    "causal, head_dim 64": (64, {"causal": True}),
    "causal, head_dim 128": (128, {"causal": True}),
    "causal, head_dim 256": (256, {"causal": True}),
    "one query, head_dim 128": (128, {"queries": 1}),
}


class Finding(NamedTuple):
    """One line about the machine. advice is a sentence where something is missing."""

    subject: str
    found: str
    advice: str = ""


class Support(NamedTuple):
    """kernel on device: the precisions it serves, and why it refuses each of the others."""

    kernel: str
    device: str
    served: tuple[str, ...]
    refusals: dict[str, str]


def findings() -> list[Finding]:
    return [
        Finding("Python", platform.python_version()),
        Finding("torch", torch.__version__),
        _triton(),
        _launcher(),
        _cache(),
        _models(),
        _cpu(),
        *_gpus(),
    ]


def model_finding(folder: str | Path) -> tuple[bool, Finding]:
    """Whether the model of a folder is served, and how; its weights are not read."""
    try:
        if models.is_native(folder):
            checkpoint = models.inspect(folder)
            has_experts = any(layer.experts is not None for layer in checkpoint.config.layers)
            recorded = "in bf16 on Hopper recorded" if has_experts else "recorded"
            how = f"Runs natively: fused, {recorded}, on several ranks."
        else:
            checkpoint, how = models.inspect_foreign(folder), f"It {foreign.ABOUT}; on one device."
    except ValueError as error:
        return False, Finding(str(folder), "not served", f"{error}.")
    config = checkpoint.config
    what = f"{config.model_type}, {config.num_layers} layers, {checkpoint.dtype}"
    return True, Finding(str(folder), what, how)


def ordinary(dtype: torch.dtype) -> Problem:
    """The problem of the support table: causal self-attention with head_dim 64."""
    q = torch.empty(1, 4096, 8, 64, dtype=dtype, device="meta")
    return describe(Tensors(q, q, q), Options(causal=True))


def support_table(devices: dict[str, DeviceInfo] | None = None) -> list[Support]:
    """The precisions that every kernel supports on every device."""
    table = []
    for kernel in backend_names():
        for label, device in (devices or DEVICES).items():
            refuse = partial(find_refusal, get_backend(kernel))
            answers = {p: refuse(ordinary(t), device) for p, t in PRECISIONS.items()}
            served = tuple(p for p, reason in answers.items() if reason is None)
            table.append(Support(kernel, label, served, {p: r for p, r in answers.items() if r}))
    return table


def reasons(table: list[Support]) -> list[str]:
    """Every refusal as a sentence; devices with the same refusal share one sentence."""
    where: dict[tuple[str, str], list[str]] = {}
    for s in table:
        for precision, reason in s.refusals.items():
            label = s.device if not s.served else f"{s.device} {precision}"
            devices = where.setdefault((s.kernel, reason), [])
            devices += [label] if label not in devices else []
    return [f"{k} refuses {', '.join(labels)}: {reason}." for (k, reason), labels in where.items()]


def here() -> dict[str, DeviceInfo]:
    """The devices of this machine, by torch's names."""
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return {str(d): device_info(d) for d in (torch.device("cpu"), *gpus)}


def print_report(console) -> None:
    from rich.table import Table

    machine = Table("", "found", "", title="This machine", title_justify="left", show_header=False)
    for finding in findings():
        machine.add_row(f"[bold]{finding.subject}[/bold]", finding.found, finding.advice)
    console.print(machine)
    console.print(_grid("Kernels here", support_table(here())))
    console.print(_grid("Kernels anywhere: causal self-attention, heads of 64", support_table()))
    for reason in reasons(support_table()):
        console.print(f"- {reason}", highlight=False, markup=False, soft_wrap=True)


def print_model(console, finding: Finding) -> None:
    console.print(f"{finding.subject}: {finding.found}", markup=False, soft_wrap=True)
    console.print(finding.advice, highlight=False, markup=False, soft_wrap=True)


def report() -> dict[str, Any]:
    """What print_report prints, for programs."""
    return {
        "machine": findings(),
        "kernels_here": support_table(here()),
        "kernels_anywhere": support_table(),
    }


def _grid(title: str, table: list[Support]):
    from rich.table import Table

    devices = list(dict.fromkeys(s.device for s in table))
    cells = {(s.kernel, s.device): " ".join(s.served) for s in table}
    grid = Table("kernel", *devices, title=title, title_justify="left")
    for kernel in backend_names():
        grid.add_row(kernel, *(cells[kernel, device] for device in devices))
    return grid


def _triton() -> Finding:
    try:
        return Finding("Triton", importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        return Finding("Triton", "not installed", "GPU kernels need it; the CPU path does not.")


def _models() -> Finding:
    """Families of our own, and whether any other can run."""
    own = ", ".join(models.FAMILIES)
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return Finding("Models", own, "Others need transformers, which is not installed.")
    return Finding("Models", own, f"Others run through transformers {version}, slower.")


def _launcher() -> Finding:
    """What Triton needs to build its launcher: a C compiler and Python's own headers."""
    named = os.environ.get("CC")
    names = (named,) if named else ("gcc", "clang")  # in Triton's order
    compiler = next((path for name in names if (path := shutil.which(name))), None)
    what = "Triton builds its launcher with one at the first GPU call; nothing else does."
    if compiler is None:
        return Finding("C compiler", f"CC={named} is not there" if named else "none", what)
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        missing = f"Triton's launcher needs {header}: install Python's development files."
        return Finding("C compiler", f"{compiler}, but no Python.h", missing)
    return Finding("C compiler", f"{compiler}, with Python.h")


def cache_folder() -> Path:
    """Where Triton keeps what it compiled."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")


def _cache() -> Finding:
    folder = cache_folder()
    if not folder.is_dir():
        return Finding("Triton's cache", f"{folder}, empty")
    sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    return Finding("Triton's cache", f"{folder}, {sum(sizes) / 1e6:.0f} MB in {len(sizes)} files")


class FirstCall(NamedTuple):
    """Seconds of a call that compiles what it needs, and of the next one."""

    call: str
    kernel: str
    way: str
    first_s: float
    second_s: float


def first_calls() -> list[FirstCall]:
    """Measured by another process with an empty cache. Without a GPU nothing compiles."""
    if not torch.cuda.is_available():
        return []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "onchip.cli.doctor"]
        environment = {**os.environ, "TRITON_CACHE_DIR": folder}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"first calls could not be measured: {done.stderr.strip()[-500:]}")
    return [FirstCall(*json.loads(line)) for line in done.stdout.splitlines()]


def time_first_calls(device: torch.device) -> Iterator[FirstCall]:
    """Every call that a GPU kernel serves, in this process: its cache decides what is compiled."""
    torch.empty(1, device=device)  # torch's own start is not ours
    for kernel in ("hopper", "triton"):
        for name, (head_dim, options) in FIRST_CALLS.items():
            for way in ("forward", "backward"):
                try:
                    spent = _twice(kernel, head_dim, options, way, device)
                except UnsupportedError:
                    continue
                yield FirstCall(name, kernel, way, *spent)


def _twice(
    kernel: str, head_dim: int, options: dict, way: str, device: torch.device
) -> tuple[float, float]:
    call_options = dict(options)
    shape = (1, 512, 4, head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
    q = q[:, : call_options.pop("queries", 512)].contiguous()
    leaves = [x.requires_grad_(way == "backward") for x in (q, k, v)]
    out = onchip.attention(*leaves, kernel=kernel, **call_options) if way == "backward" else None

    def call() -> object:
        if out is None:
            return onchip.attention(*leaves, kernel=kernel, **call_options)
        return torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)

    return seconds(call, device), seconds(call, device)


class DeviceMemory(NamedTuple):
    """A `levels.LevelTiming` of a device, by torch's name."""

    device: str
    level: str
    set_bytes: int
    bytes_s: float
    latency_s: float


def measure_levels(
    report_progress: Callable[[str, float], None],
) -> Iterator[DeviceMemory]:
    """Every memory of every device here."""
    for name in here():
        for row in levels.measure(torch.device(name), report_progress):
            yield DeviceMemory(name, *row)


def print_levels(console, memories: Sequence[DeviceMemory]) -> None:
    """What was measured here, then what was published of devices elsewhere."""
    from rich.table import Table

    columns = ("", "memory", "bytes", "bandwidth", "latency")
    table = Table(*columns, title="Memories, measured here", title_justify="left")
    for row in memories:
        hidden = "hidden" if row.latency_s == 0 else _latency(row.latency_s)
        cells = human_bytes(row.set_bytes), f"{row.bytes_s / 1e9:.3g} GB/s", hidden
        table.add_row(row.device, row.level, *cells)
    console.print(table)
    console.print("bytes: the working set; latency: beyond what the interpreter hides of it.")
    table = Table(*columns, title="Memories, as published", title_justify="left")
    sources: dict[str, list[str]] = {}
    for row in hardware.TABLE:
        for level in row.levels:
            rate = f"{level.bytes_s / 1e9:,.0f} GB/s" if level.bytes_s else ""
            cells = human_bytes(level.size_bytes), rate, _latency(level.latency_s)
            table.add_row(row.name, level.name, *cells)
            sources.setdefault(level.source, []).append(f"{row.name} {level.name}")
        sources.setdefault(row.source, []).append(f"{row.name} itself")
    console.print(table)
    for source, of in sources.items():
        console.print(f"- {', '.join(of)}: {source}.", highlight=False, soft_wrap=True)


def _latency(latency_s: float | None) -> str:
    return "" if latency_s is None else f"{latency_s * 1e9:.3g} ns"


def print_first_calls(console, calls: Sequence[FirstCall]) -> None:
    """Of a machine with a GPU; a sentence elsewhere."""
    from rich.table import Table

    if not torch.cuda.is_available():
        console.print("First calls compile on a GPU only, and torch finds none here.")
        return

    table = Table("call", "kernel", "pass", "first", "next", title="First calls, nothing cached")
    for c in calls:
        table.add_row(c.call, c.kernel, c.way, f"{c.first_s:.2f} s", f"{c.second_s * 1e3:.2f} ms")
    console.print(table)
    console.print("The first line includes Triton's own start. Later processes read the cache.")


def _cpu() -> Finding:
    capability = torch.backends.cpu.get_cpu_capability()
    matrix = " with bf16 matrix units" if _has_amx() else ""
    threads = f"{torch.get_num_threads()} threads of {os.cpu_count()} cores"
    slow = [name for name in ("bf16", "fp16") if not has_fast_matmul(PRECISIONS[name])]
    advice = f"No instructions for {' and '.join(slow)}: calls compute in fp32." if slow else ""
    return Finding("CPU", f"{platform.machine()}, {capability}{matrix}, {threads}", advice)


def _has_amx() -> bool:
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(supported and supported())


def _gpus() -> list[Finding]:
    if not torch.cuda.is_available():
        no_support = torch.version.cuda is None and torch.version.hip is None
        why = "This torch is built for the CPU only" if no_support else "Torch finds no device"
        return [Finding("GPU", "none", f"{why}; calls run on the CPU.")]
    return [_gpu(i) for i in range(torch.cuda.device_count())]


def _gpu(index: int) -> Finding:
    p = torch.cuda.get_device_properties(index)
    arch = p.gcnArchName if torch.version.hip else f"sm_{p.major}{p.minor}"
    return Finding(f"GPU {index}", f"{p.name}, {arch}, {p.total_memory / 1e9:.0f} GB")


if __name__ == "__main__":
    for _call in time_first_calls(torch.device("cuda")):
        print(json.dumps(_call), flush=True)
