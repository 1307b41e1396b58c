"""Time and memory of a call, measured rather than modelled."""

import ctypes
import os
import platform
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Job = Callable[[], Any]
ASSUMED_BYTES = 2 << 30  # available memory, where the system does not say
STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")

# Rows that see few keys have up to half of the squared error of a causal call's gradients: of
# one such row it would scatter by some percent.
_FIRST = 64


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(job: Job, device: torch.device) -> float:
    """Wall-clock seconds of one call, the device's work included."""
    synchronize(device)
    start = time.perf_counter()
    job()
    synchronize(device)
    return time.perf_counter() - start


def alternate(
    jobs: dict[str, Job], device: torch.device, rounds: int = 7, budget_s: float = 0.0
) -> dict[str, float]:
    """The least seconds of each job over `rounds` rounds, and on until `budget_s` is spent.

    Candidates take turns, in reversed order every other round, so that a machine that slows down or
    is disturbed slows all of them. A first call is no faster than later ones, so the least needs no
    warm-up.
    """
    best = dict.fromkeys(jobs, float("inf"))
    start = time.perf_counter()
    done = 0
    while done < rounds or (time.perf_counter() - start < budget_s and done < 20 * rounds):
        for name in list(jobs) if done % 2 == 0 else list(reversed(jobs)):
            best[name] = min(best[name], seconds(jobs[name], device))
        done += 1
    return best


def peak_extra_bytes(job: Job, device: torch.device) -> tuple[int | None, Any]:
    """(the most memory that one call held beyond the memory held before it, the call's result).

    On a GPU the allocator reports it. On Linux the kernel does: the high-water mark of the resident
    set is reset, the job runs, the mark is read; if it cannot be reset, a thread samples the
    resident set. None if the system offers neither.
    """
    if device.type == "cuda":
        return _peak_allocated(job, device)
    if not STATUS.exists():
        return None, job()
    _return_free_pages()
    before = _resident("VmRSS")
    try:
        RESET.write_text("5")
    except OSError:
        peak, result = _sampled_peak(job)
    else:
        result = job()
        peak = _resident("VmHWM")
    return max(peak - before, 0), result


def available_bytes(device: torch.device) -> int:
    """Memory that could be allocated now without pushing anything out."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(x for x in lines if x.startswith("MemAvailable")).split()[1])
    with suppress(AttributeError, OSError, ValueError):  # Windows has no sysconf
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return ASSUMED_BYTES


def _peak_allocated(job: Job, device: torch.device) -> tuple[int, Any]:
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = job()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before, result


def _return_free_pages() -> None:
    """Freed memory that malloc keeps is resident already and would hide what a job takes. Torch for
    ARM includes mimalloc, which keeps some unless MIMALLOC_PURGE_DELAY=0 is set before the start.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _resident(field: str) -> int:
    line = next(x for x in STATUS.read_text().splitlines() if x.startswith(field))
    return 1024 * int(line.split()[1])


def _sampled_peak(job: Job) -> tuple[int, Any]:
    samples, stop = [_resident("VmRSS")], threading.Event()

    def watch() -> None:
        while not stop.wait(0.001):
            samples.append(_resident("VmRSS"))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        result = job()
    finally:
        stop.set()
        thread.join()
    return max(*samples, _resident("VmRSS")), result


def sample_rows(n: int, count: int) -> Tensor:
    """The query rows that are compared with fp64: all of them, or the first `_FIRST`, the last, and
    a fixed random sample of the others.
    """
    if n <= count:
        return torch.arange(n)
    first = min(_FIRST, count // 2)
    others = torch.randperm(n - 1 - first, generator=torch.Generator().manual_seed(0))
    picked = others[: count - 1 - first] + first
    return torch.cat([torch.arange(first), picked, torch.tensor([n - 1])]).sort().values


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
