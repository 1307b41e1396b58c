"""What this machine can run, and why not the rest: found by looking and by asking, never typed."""

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable
from typing import NamedTuple

import torch

from onchip.dispatch import KERNELS, kernel_module
from onchip.problem import DeviceInfo, Problem, device_info

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
        _compiler(),
        _cpu(),
        *_gpus(),
    ]


def ordinary(dtype: torch.dtype) -> Problem:
    """The problem that the support table asks about: causal self-attention with heads of 64."""
    return Problem(1, 4096, 4096, 8, 8, 64, 64, dtype, dtype, 0.125, causal=True)


def support_table(
    devices: dict[str, DeviceInfo] | None = None,
    problem_of: Callable[[torch.dtype], Problem] = ordinary,
) -> list[Support]:
    """Every kernel on every device, each precision asked for by name."""
    table = []
    for kernel in KERNELS:
        for label, device in (devices or DEVICES).items():
            supports = kernel_module(kernel).supports
            answers = {p: supports(problem_of(t), device) for p, t in PRECISIONS.items()}
            served = tuple(p for p, reason in answers.items() if reason is None)
            table.append(Support(kernel, label, served, {p: r for p, r in answers.items() if r}))
    return table


def reasons(table: list[Support]) -> list[str]:
    """Every refusal as a sentence, those that are alike told once."""
    where: dict[tuple[str, str], list[str]] = {}
    for s in table:
        for precision, reason in s.refusals.items():
            label = s.device if not s.served else f"{s.device} {precision}"
            seen = where.setdefault((s.kernel, reason), [])
            seen += [label] if label not in seen else []
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
        console.print(f"- {reason}", highlight=False, markup=False)


def _grid(title: str, table: list[Support]):
    from rich.table import Table

    devices = list(dict.fromkeys(s.device for s in table))
    cells = {(s.kernel, s.device): " ".join(s.served) for s in table}
    grid = Table("kernel", *devices, title=title, title_justify="left")
    for kernel in KERNELS:
        grid.add_row(kernel, *(cells[kernel, device] for device in devices))
    return grid


def _triton() -> Finding:
    try:
        return Finding("Triton", importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        return Finding("Triton", "not installed", "GPU kernels need it; the CPU path does not.")


def _compiler() -> Finding:
    found = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if found:
        return Finding("C compiler", found)
    return Finding(
        "C compiler",
        "none",
        "Triton builds its launcher with one at the first GPU call; nothing else does.",
    )


def _cpu() -> Finding:
    capability = torch.backends.cpu.get_cpu_capability()
    matrix = " with bf16 matrix units" if _has_amx() else ""
    threads = f"{torch.get_num_threads()} threads of {os.cpu_count()} cores"
    return Finding("CPU", f"{platform.machine()}, {capability}{matrix}, {threads}")


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
