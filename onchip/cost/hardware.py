"""Peak rates and memories of devices as published, every figure with its source; for devices not in
the table, from torch's device properties.
"""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from onchip.core.device import DeviceInfo

KB, MB, GB = 1 << 10, 1 << 20, 10**9  # HBM is sold in decimal gigabytes, all else in binary ones


class MemoryLevel(NamedTuple):
    """One memory. On-chip levels are summed over the processors; None: not published."""

    name: str
    size_bytes: int
    bytes_s: float | None
    latency_s: float | None
    source: str


@dataclass(frozen=True, eq=False)  # compared by identity: choices are cached per object
class Hardware:
    """One device. Rates are per processor and clock; levels are ordered from the largest memory to
    the smallest. clock_hz is the clock of the published peak. stream_bytes_s: bandwidth that
    kernels reach that only read memory. again_bytes_s: the same for keys that another program reads
    as well, if it was measured.

    call_s: time of a call over few queries besides reading: the launch, the time until the first
    keys arrive, and the time between the first program's end and the last one's. It is chosen to
    match the shortest call of benchmarks/results/h200-paged.json. merge_s: time of a merge launched
    after it, on an H200 2 us to begin and 3 us to run (docs/notebook.md, decoding on Hopper). Other
    GPUs are assumed to take as long.
    """

    name: str
    processors: int
    clock_hz: float
    levels: tuple[MemoryLevel, ...]
    tensor_flops: dict[str, int]  # dense, by the name of the dtype
    exps: int  # exponentials of the exp2 unit
    lanes: int  # fp32 operations; a multiply-add is one
    shared_bytes: int  # most shared memory of one program
    source: str
    capability: tuple[int, int] | None = None  # CUDA's
    shared_rate: int = 128  # bytes
    registers: int = 65536  # of 32 bits
    launch_s: float = 2.5e-6  # one kernel in a graph; assumed, neither measured nor looked up
    stream_bytes_s: float | None = None
    again_bytes_s: float | None = None
    call_s: float = 7.5e-6
    merge_s: float = 5e-6

    @property
    def as_device(self) -> DeviceInfo:
        """The DeviceInfo with which kernels' supports() is called for such a device."""
        return DeviceInfo("cuda", self.name, self.capability)

    @property
    def memory(self) -> MemoryLevel:
        """The memory that holds tensors."""
        return self.levels[0]

    @property
    def memory_bytes_s(self) -> float:
        """As measured, else as published."""
        return self.stream_bytes_s or self.memory.bytes_s or 0.0

    @property
    def repeated_bytes_s(self) -> float:
        """Bandwidth of data that was read a moment ago: as measured, else the L2's, else the
        memory's.
        """
        cache = self.levels[1].bytes_s if len(self.levels) > 1 else None
        return self.again_bytes_s or cache or self.memory_bytes_s

    @property
    def is_known(self) -> bool:
        """Whether compute rates are known, not only the memory: a row of the table."""
        return self.clock_hz > 0

    def flops(self, dtype: torch.dtype) -> float:
        """Operations of all tensor cores per second; IEEE fp32 runs on the lanes."""
        return self.processors * self.clock_hz * self.flops_clock(dtype)

    def flops_clock(self, dtype: torch.dtype) -> int:
        """Operations of one processor per clock."""
        return self.tensor_flops.get(_name(dtype), 2 * self.lanes)

    def has_tensor(self, dtype: torch.dtype) -> bool:
        """Whether tensor cores compute products of this dtype, not the lanes."""
        return _name(dtype) in self.tensor_flops

    @property
    def exps_s(self) -> float:
        return self.processors * self.clock_hz * self.exps

    def ridge(self, dtype: torch.dtype) -> float:
        """Operations per byte of memory traffic below which memory is the limit."""
        return self.flops(dtype) / (self.memory.bytes_s or float("inf"))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Latencies of A100 and Hopper in clocks: attributed to Luo et al., arXiv 2402.13499 (their Hopper
# is an H800), but written from memory and not checked against it. No prediction uses them; `onchip
# doctor --measure` measures them on a GPU. Shared memory: 32 banks of 4 bytes a clock. Registers:
# the three operands of a multiply-add on every lane. L2 of an A100: 5,120 bytes a clock (NVIDIA
# A100 whitepaper); Hopper's was not published: assumed to be the same.
_LUO = "after Luo et al., arXiv 2402.13499, unchecked"
_L2_CLOCK = 5120
_HOPPER_CLOCKS = (478.8, 263.0, 29.0)
_AMPERE_CLOCKS = (466.3, 261.5, 29.0)
_DENSE = ("bfloat16", "float16")


def _levels(
    memory: tuple[int, float, str],
    l2: tuple[int, float | None, str],
    processors: int,
    shared_bytes: int,
    lanes: int,
    clock_hz: float,
    clocks: tuple[float | None, float | None, float | None],
) -> tuple[MemoryLevel, ...]:
    """HBM, L2, shared memory and registers, from (size, bytes a second, source) of the first two,
    and from the sizes per processor of the others; clocks are the latencies of the first three.
    """
    seconds = lambda n: None if n is None else n / clock_hz
    hbm, cache, shared = map(seconds, clocks)
    rate = processors * clock_hz
    bank = "32 banks of 4 bytes a clock"
    fma = "three operands of a multiply-add on every lane and clock"
    return (
        MemoryLevel("HBM", memory[0], memory[1], hbm, memory[2]),
        MemoryLevel("L2", l2[0], l2[1], cache, l2[2]),
        MemoryLevel("shared memory", processors * shared_bytes, 128 * rate, shared, bank),
        MemoryLevel("registers", processors * 65536 * 4, 12 * lanes * rate, 1 / clock_hz, fma),
    )


A100 = Hardware(
    "NVIDIA A100",
    processors=108,
    clock_hz=1.41e9,
    levels=_levels(
        (80 * GB, 2.039e12, "NVIDIA A100 80GB SXM datasheet"),
        (40 * MB, _L2_CLOCK * 1.41e9, "NVIDIA A100 whitepaper"),
        *(108, 164 * KB, 64, 1.41e9, _AMPERE_CLOCKS),
    ),
    tensor_flops=dict.fromkeys(_DENSE, 2048),  # 312 TFLOP/s
    exps=16,  # CUDA C++ programming guide, throughput of native arithmetic instructions, 8.0
    lanes=64,
    shared_bytes=163 * KB,
    source=f"NVIDIA A100 whitepaper (2020); latencies: {_LUO}",
    capability=(8, 0),
)
_HOPPER = {
    "processors": 132,
    "clock_hz": 1.83e9,  # 989.4 TFLOP/s = 132 x 4,096 x 1.83 GHz
    "tensor_flops": dict.fromkeys(_DENSE, 4096) | {"float8_e4m3fn": 8192},
    "exps": 16,  # the same guide, 9.0
    "lanes": 128,
    "shared_bytes": 227 * KB,
    "capability": (9, 0),
}
_H_L2 = (50 * MB, _L2_CLOCK * 1.83e9, "assumed to be as wide as that of an A100")
_H_REST = (132, 228 * KB, 128, 1.83e9, _HOPPER_CLOCKS)
H100 = Hardware(
    "NVIDIA H100",
    levels=_levels((80 * GB, 3.35e12, "NVIDIA H100 SXM datasheet"), _H_L2, *_H_REST),
    source=f"NVIDIA H100 whitepaper (2022); latencies: {_LUO}",
    **_HOPPER,
)
H200 = Hardware(
    "NVIDIA H200",
    levels=_levels((141 * GB, 4.8e12, "NVIDIA H200 SXM datasheet"), _H_L2, *_H_REST),
    source=f"NVIDIA H200 datasheet (2023), an H100 with other memory; latencies: {_LUO}",
    # Both from benchmarks/results/h200-paged.json; tests compare. Decoding over pages; and one call
    # of 64 sequences that share 8,192 or 32,768 keys: of its 259 and 1,030 us all but 32 and 54 us
    # are repeated reads of the same keys.
    stream_bytes_s=4.5e12,
    again_bytes_s=8.6e12,
    **_HOPPER,
)
_B200_L2 = (126 * MB, None, "freeCodeCamp, Blackwell GPU memory architecture")
B200 = Hardware(
    "NVIDIA B200",
    processors=148,
    clock_hz=1.86e9,  # 2.25 PFLOP/s = 148 x 8,192 x 1.86 GHz
    levels=_levels(
        (192 * GB, 8e12, "NVIDIA DGX B200 datasheet"),
        _B200_L2,
        *(148, 228 * KB, 128, 1.86e9, (None, None, None)),
    ),
    # 4.5 PFLOP/s in FP8 and 9 in FP4; the datasheet has 72 and 144 for 8 GPUs, with sparsity
    tensor_flops=dict.fromkeys(_DENSE, 8192) | {"float8_e4m3fn": 16384, "float4_e2m1fn_x2": 32768},
    exps=16,  # the same guide, 10.0: why FlashAttention-4 computes some exponentials otherwise
    lanes=128,
    shared_bytes=227 * KB,
    source="NVIDIA DGX B200 datasheet (2024)",
    capability=(10, 0),
)
TABLE = (A100, H100, H200, B200)
# Two cores of a server (2026-11-15): a paged call over 16 keys takes 0.4 ms, a merge included.
HOST = Hardware(
    "CPU",
    processors=1,
    clock_hz=0.0,
    levels=(MemoryLevel("memory", 0, 5e9, None, "measured: keys of a paged call"),),
    tensor_flops={},
    exps=0,
    lanes=0,
    shared_bytes=0,
    source="measured",
    launch_s=0.0,
    call_s=0.4e-3,
    merge_s=0.0,
)


@lru_cache(maxsize=16)
def of_device(device: torch.device) -> Hardware | None:
    """The row of a GPU, or one made from torch's device properties; None for other devices, the
    memory of which `onchip doctor --measure` measures.
    """
    if device.type != "cuda":
        return None
    return of_properties(torch.cuda.get_device_properties(device))


@lru_cache(maxsize=16)
def planned_for(device: torch.device) -> Hardware:
    """The hardware that choices are made for; every device needs one. An unknown GPU is treated as
    an H200 with its own number of processors.
    """
    if device.type == "cpu":
        return HOST
    hardware = of_device(device)
    if hardware is not None or device.type != "cuda":
        return hardware or H200
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return replace(H200, processors=count)


def of_properties(about: Any) -> Hardware | None:
    """The row of a device's name, if the device is that variant: an A100 of 40 GB or an H100 for
    PCIe has other memory or fewer processors. (Drivers report a few per cent more bytes than the
    label.)
    """
    row = find(about.name)
    if row is None or row.processors != about.multi_processor_count:
        return from_properties(about)
    same_memory = 0.9 < about.total_memory / row.memory.size_bytes < 1.15
    return row if same_memory else from_properties(about)


def find(name: str) -> Hardware | None:
    """The row with a model that is a word of the name ("H200", "NVIDIA A100-SXM4-80GB"; not
    "GH200").
    """
    models = ((row.name.removeprefix("NVIDIA "), row) for row in TABLE)
    return next((row for model, row in models if re.search(rf"\b{model}\b", name)), None)


def from_properties(about: Any) -> Hardware | None:
    """A device that is not in the table: only its memory, two transfers a clock over the width of
    the bus; None if torch does not report these.
    """
    bytes_s = 2e3 * getattr(about, "memory_clock_rate", 0)
    bytes_s *= getattr(about, "memory_bus_width", 0) / 8
    if not bytes_s:
        return None
    source = "torch.cuda.get_device_properties"
    memory = MemoryLevel("memory", about.total_memory, bytes_s, None, source)
    unknown = {"clock_hz": 0.0, "tensor_flops": {}, "exps": 0, "lanes": 0, "shared_bytes": 0}
    return Hardware(
        about.name, about.multi_processor_count, levels=(memory,), source=source, **unknown
    )
