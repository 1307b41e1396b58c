"""HBM traffic by the GPU's own counters: NVIDIA's profiler around some calls of another process.

ncu --metrics dram__bytes_read.sum,dram__bytes_write.sum ... python -m benchmarks.counters CALLS
"""

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch

from benchmarks import algorithms

METRICS = {"dram__bytes_read.sum": "read_bytes", "dram__bytes_write.sum": "write_bytes"}
UNITS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
MARK = "spin_kernel"  # what torch.cuda._sleep launches: a new call begins


class CountedCall(NamedTuple):
    batch: int
    seqlen: int
    num_heads: int
    head_dim: int
    causal: bool = False
    backward: bool = False
    algorithm: str = "onchip"  # of algorithms.py; others than onchip have no causal mask


class KernelBytes(NamedTuple):
    """One kernel of the call."""

    kernel: str
    read_bytes: float = 0.0
    write_bytes: float = 0.0

    @property
    def hbm_bytes(self) -> float:
        return self.read_bytes + self.write_bytes


@cache
def count(calls: tuple[CountedCall, ...]) -> list[list[KernelBytes]]:
    """Every kernel of each call, after another that compiled them; ValueError without a profiler.

    Clocks stay as they are. Every kernel finds the caches as the one before left them: the call is
    what it is inside a program. One process for all calls: the profiler takes seconds to begin.
    """
    profiler = shutil.which("ncu")
    if profiler is None:
        raise ValueError("HBM traffic is counted by ncu (Nsight Compute), which is not installed")
    command = [profiler, "--clock-control", "none", "--cache-control", "none", "--csv"]
    command += ["--profile-from-start", "off", "--print-units", "base"]
    command += ["--metrics", ",".join(METRICS), sys.executable, "-m", "benchmarks.counters"]
    done = subprocess.run([*command, json.dumps(calls)], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"ncu failed: {(done.stderr or done.stdout).strip()[-500:]}")
    found = by_call(parse(done.stdout.splitlines()))
    if len(found) != len(calls):
        raise ValueError(f"ncu saw {len(found)} of {len(calls)} calls")
    return found


def by_call(kernels: Iterable[KernelBytes]) -> list[list[KernelBytes]]:
    """The kernels after each mark."""
    calls: list[list[KernelBytes]] = []
    for kernel in kernels:
        if MARK in kernel.kernel:
            calls.append([])
        elif calls:
            calls[-1].append(kernel)
    return calls


def parse(lines: Iterable[str]) -> list[KernelBytes]:
    """The kernels of ncu's table, which begins after lines of its own and of the program."""
    table = [line for line in lines if line.startswith('"')]
    found: dict[str, KernelBytes] = {}
    for row in csv.DictReader(table):
        if row["Metric Name"] not in METRICS:
            continue
        number = float(row["Metric Value"].replace(",", "")) * UNITS[row["Metric Unit"]]
        kernel = found.get(row["ID"], KernelBytes(row["Kernel Name"]))
        found[row["ID"]] = kernel._replace(**{METRICS[row["Metric Name"]]: number})
    if not found:
        raise ValueError("ncu counted no kernel: may this user read the counters?")
    return list(found.values())


def main(args: list[str]) -> None:
    for fields in json.loads(args[0]):
        run(CountedCall(*fields), torch.device("cuda"))


def run(call: CountedCall, device: torch.device) -> None:
    """One call twice, of which the profiler sees the second."""
    shape = (call.batch, call.seqlen, call.num_heads, call.head_dim)
    layout = algorithms.layout_of(call.algorithm)
    make = lambda: layout(torch.randn(shape, device=device, dtype=torch.bfloat16))
    q, k, v = (make().requires_grad_(call.backward) for _ in range(3))
    dout = make()
    function = algorithms.find(call.algorithm, call.seqlen, device)
    options = {"causal": True} if call.causal else {}
    attend = lambda: function(q, k, v, **options)
    for profiled in (False, True):
        out = attend() if call.backward else None
        with _profiled(profiled, device):
            attend() if out is None else torch.autograd.grad(out, (q, k, v), dout)


class _profiled:
    """The profiler looks inside the block, if it is to look at all."""

    def __init__(self, on: bool, device: torch.device):
        self.on = on and device.type == "cuda"

    def __enter__(self) -> None:
        if self.on:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            torch.cuda._sleep(1)

    def __exit__(self, *exc: object) -> None:
        if self.on:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
