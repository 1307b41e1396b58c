"""Machines for the simulated ring: kernel rates as measured, links and memories as specified."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.cost import hardware


class Link(NamedTuple):
    """One direction of a connection between neighbours; bytes_s is its nominal speed."""

    name: str
    bytes_s: float
    latency_s: float


# Latency: NCCL's cost model for a message of the ring algorithm, protocol Simple: 8.4 us, plus 3.4
# for NVLink, 5.7 for PCIe, 14 for a network (src/graph/tuning.cc). TCP is assumed to add 30. Speeds
# are nominal, of one direction: 18 links of 25 GB/s (NVLink 4) or 50 (NVLink 5), 16 lanes of 4.
LINKS = {
    link.name: link
    for link in (
        Link("NVLink 5", 900e9, 11.8e-6),
        Link("NVLink 4", 450e9, 11.8e-6),
        Link("PCIe 5 x16", 64e9, 14.1e-6),
        Link("InfiniBand NDR", 50e9, 22.4e-6),
        Link("100 GbE", 12.5e9, 52.4e-6),
    )
}


class Fabric(NamedTuple):
    """Nodes of `node` neighbouring devices: one link inside a node, another between nodes."""

    inside: Link
    between: Link | None = None
    node: int = 8

    @property
    def name(self) -> str:
        return f"{self.inside.name}, {self.between.name}" if self.between else self.inside.name

    def crosses(self, num_devices: int) -> Tensor:
        """Whether the hop from rank r to r + 1 leaves a node, for every r."""
        nodes = torch.arange(num_devices) // self.node
        return nodes != nodes.roll(-1)

    def seconds(self, num_devices: int, message_bytes: float) -> Tensor:
        """Time of a message from rank r to r + 1, for every r."""
        cost = lambda link: link.latency_s + message_bytes / link.bytes_s
        inside = torch.full((num_devices,), cost(self.inside), dtype=torch.float64)
        if self.between is None:
            return inside
        return torch.where(self.crosses(num_devices), cost(self.between), inside)


class StorageTier(NamedTuple):
    """Storage for a context that does not fit into device memory. unit_bytes: of one module."""

    name: str
    unit_bytes: float
    read_s: float  # bytes a second
    write_s: float

    def units(self, num_bytes: float) -> int:
        return max(1, math.ceil(num_bytes / self.unit_bytes))


class KernelRates(NamedTuple):
    """TFLOP/s of one device at each of LENGTHS keys."""

    tflops: tuple[float, ...]

    def rate(self, keys: float) -> float:
        """flop/s: linear in log(keys) between measured lengths, constant above, proportional to the
        keys below (a tile of queries costs no less over fewer keys).
        """
        at = math.log2(max(keys, 1) / LENGTHS[0])
        if at <= 0:
            return self.tflops[0] * 2**at * 1e12
        i = min(int(at), len(LENGTHS) - 2)
        share = min(at - i, 1.0)
        return ((1 - share) * self.tflops[i] + share * self.tflops[i + 1]) * 1e12


LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# (backward, causal, head_dim): benchmarks/results/h200-forward.json and h200-backward.json; a test
# compares. 16k tokens and 2,048 of hidden size in each call, bf16.
H200_KERNELS = {
    (False, False, 64): KernelRates((406, 439, 496, 507, 536, 559)),
    (False, True, 64): KernelRates((273, 350, 411, 458, 514, 538)),
    (False, False, 128): KernelRates((564, 626, 667, 698, 724, 752)),
    (False, True, 128): KernelRates((372, 484, 581, 650, 697, 723)),
    (False, False, 256): KernelRates((533, 636, 699, 734, 756, 783)),
    (False, True, 256): KernelRates((361, 499, 615, 686, 740, 753)),
    (True, False, 64): KernelRates((326, 414, 475, 520, 547, 568)),
    (True, True, 64): KernelRates((200, 297, 394, 464, 519, 557)),
    (True, False, 128): KernelRates((367, 472, 545, 599, 649, 667)),
    (True, True, 128): KernelRates((237, 336, 445, 528, 587, 635)),
    (True, False, 256): KernelRates((317, 377, 415, 436, 467, 472)),
    (True, True, 256): KernelRates((207, 293, 358, 407, 431, 467)),
}


ROUNDS_PER_MERGE = 4  # results that one launch merges into the state (rounds.BatchedState)


@dataclass(frozen=True, eq=False)
class Machine:
    """A device with its kernels, its memory, and the storage tiers behind it.

    A call takes at least call_s on the host. A call with fewer tiles of tile_m queries than
    processors leaves some of them idle. merge_moves: reads and writes per element of a result that
    is merged into the state.
    """

    name: str
    kernels: dict[tuple[bool, bool, int], KernelRates]
    memory_bytes: float
    memory_bytes_s: float
    processors: int
    tile_m: int
    call_s: float
    tiers: tuple[StorageTier, ...]
    merge_moves: float = 1 + 2 / ROUNDS_PER_MERGE

    def kernel(self, backward: bool, causal: bool, head_dim: int) -> KernelRates:
        key = (backward, causal, head_dim)
        if key not in self.kernels:
            known = sorted({d for _, _, d in self.kernels})
            raise ValueError(f"head_dim={head_dim} was not measured on {self.name}, but {known}")
        return self.kernels[key]

    def best(self, backward: bool, head_dim: int) -> float:
        """flop/s of long calls, the faster of causal and not causal."""
        kernels = (self.kernel(backward, causal, head_dim) for causal in (False, True))
        return max(kernel.rate(LENGTHS[-1]) for kernel in kernels)

    def filled(self, queries: float, num_heads: int) -> float:
        """The share of the processors that a call keeps busy."""
        return min(1.0, math.ceil(queries / self.tile_m) * num_heads / self.processors)


# Half of the memory; the other half is for weights and everything else. Host: 54.8 GB/s as measured
# over pages (benchmarks/results/h200-paged.json), 256 GB is a DGX's 2 TB for 8 devices. 35 us:
# benchmarks/results/h200-host.json. Disk: one PM1743 of 15.36 TB for each device.
H200 = Machine(
    hardware.H200.name,
    H200_KERNELS,
    memory_bytes=70e9,
    memory_bytes_s=hardware.H200.memory_bytes_s,
    processors=hardware.H200.processors,
    tile_m=128,
    call_s=35e-6,
    tiers=(StorageTier("host", 256e9, 54.8e9, 52.5e9), StorageTier("disk", 15.36e12, 13e9, 6.6e9)),
)
