"""The memories of this machine, measured: bandwidth and latency by size of the working set.

Bandwidth: repeated sums of one tensor, on a GPU negated copies. Latency: pointer chasing from cache
line to cache line in random order. The interpreter's own time, that of the smallest set, is
subtracted. On a GPU one thread chases the pointers.
"""

import ctypes
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.cli.bench.measure import alternate

CPU_SETS = tuple(16 << 10 << 2 * i for i in range(8))  # 16 KB to 256 MB
LARGEST = 2 << 30  # bytes that a measurement may allocate
READ = 64 << 20  # bytes of one measurement, at least
HOPS = 200_000
LINE_BYTES = 64
STRIDE = LINE_BYTES // 4  # numbers of a line
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
GPU_SETS = (16 << 20, 2 << 30)  # well inside the L2 of any data centre GPU, far outside
GPU_HOPS = 20_000


class LevelTiming(NamedTuple):
    """A working set and the smallest memory level that holds it. Latency 0: the interpreter hides
    it.
    """

    level: str
    set_bytes: int
    bytes_s: float
    latency_s: float


def measure(
    device: torch.device, report_progress: Callable[[str, float], None]
) -> Iterator[LevelTiming]:
    """Measure every level of a device; report_progress(title, done) moves a progress bar."""
    sweep = gpu_levels(device) if device.type == "cuda" else cpu_levels()
    total = len(GPU_SETS) if device.type == "cuda" else len(cpu_sets())
    report_progress("reading", 0.0)
    for count, row in enumerate(sweep, 1):
        report_progress(f"{row.set_bytes >> 10} KB", count / total)
        yield row


def cpu_sets() -> tuple[int, ...]:
    """The last set is larger than every cache, so that it measures DRAM."""
    outside = 2 * max((held for _, held in cache_sizes()), default=0)
    return (*CPU_SETS, outside) if CPU_SETS[-1] < outside <= LARGEST else CPU_SETS


def cpu_levels(sets: tuple[int, ...] | None = None) -> Iterator[LevelTiming]:
    caches, own = cache_sizes(), None
    for size in cpu_sets() if sets is None else sets:
        name = next((name for name, held in caches if size <= held), "DRAM")
        hop = walk_s(size)
        own = hop if own is None else own
        yield LevelTiming(name, size, read_bytes_s(size), beyond(hop, own))


def beyond(hop_s: float, own_s: float) -> float:
    """The time of a hop beyond the interpreter's own; 0 if less than half of the latter."""
    return 0.0 if hop_s < 1.5 * own_s else hop_s - own_s


def cache_sizes(folder: Path = CACHES) -> list[tuple[str, int]]:
    """(name, bytes) of the caches that hold data, the smallest first; none outside Linux."""
    caches = []
    for cache in sorted(folder.glob("index*")):
        level, kind, size = ((cache / n).read_text().strip() for n in ("level", "type", "size"))
        if kind != "Instruction":
            unit = {"K": 1 << 10, "M": 1 << 20}[size[-1]]
            caches.append((f"L{level}", int(size[:-1]) * unit))
    return sorted(caches, key=lambda cache: cache[1])


def read_bytes_s(set_bytes: int) -> float:
    """Bytes per second of one thread that sums a tensor of `set_bytes` repeatedly."""
    x = torch.ones(set_bytes // 4)
    times = max(1, READ // set_bytes)
    rows = x.as_strided((times, len(x)), (0, 1))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        best = alternate({"sum": lambda: rows.sum(1)}, x.device, rounds=5)["sum"]
    finally:
        torch.set_num_threads(threads)
    return times * x.nbytes / best


def walk_s(set_bytes: int) -> float:
    """Seconds per hop from line to line of `set_bytes`, in random order."""
    ring = chain(set_bytes // LINE_BYTES)
    numbers = (ctypes.c_int32 * ring.numel()).from_address(ring.data_ptr())
    where = memoryview(numbers).cast("B").cast("i")
    _hop(where, 0, min(len(ring), HOPS))
    return min(_timed(where, ring.numel() * i // 5 // STRIDE * STRIDE) for i in range(5))


def chain(lines: int) -> Tensor:
    """(lines, STRIDE) int32: the first number of a line is the index of the next one's."""
    order = torch.randperm(lines, generator=torch.Generator().manual_seed(0))
    ring = torch.zeros(lines, STRIDE, dtype=torch.int32)
    ring[order, 0] = (STRIDE * order.roll(-1)).int()
    return ring


def _timed(where: memoryview, first: int) -> float:
    start = time.thread_time()  # excludes the time of other processes
    _hop(where, first, HOPS)
    return (time.thread_time() - start) / HOPS


def _hop(where: memoryview, at: int, times: int) -> int:
    for _ in repeat(None, times):
        at = where[at]
    return at


def gpu_levels(device: torch.device) -> Iterator[LevelTiming]:
    """Read half of a set and write its negation to the other half. Plain copies in a graph reached
    2.7 TB/s on an H200, where kernels reach 4.4.
    """
    from onchip.kernels.triton.chase import chase, make_ring

    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    for size in GPU_SETS:
        source = torch.ones(size // 8, device=device)
        target = torch.empty_like(source)
        copies = max(1, (4 << 30) // size)
        seconds = _graph_s(lambda: [torch.neg(source, out=target) for _ in range(copies)])  # noqa: B023
        ring = make_ring(torch.randperm(size // 128, device=device, dtype=torch.int32))
        latency = _event_s(lambda: chase(ring, GPU_HOPS)) / GPU_HOPS  # noqa: B023
        yield LevelTiming("L2" if size <= l2 else "HBM", size, copies * size / seconds, latency)


def _graph_s(work: Callable[[], object]) -> float:
    """Seconds of work replayed by a CUDA graph, without host time."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return _event_s(graph.replay)


def _event_s(work: Callable[[], object]) -> float:
    """The least of five runs, by the device's own clock."""
    work()
    times = []
    for _ in range(5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3)
    return min(times)
