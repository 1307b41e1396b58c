"""On-chip footprint of one program of each kernel: shared-memory buffers and registers, computed
from the tile tables. Tests compile the kernels and compare with the compiler's allocation.
"""

from dataclasses import dataclass

from onchip.cost.hardware import Hardware
from onchip.kernels.tiles import (
    HOPPER_DECODE_KV8_REGISTERS,
    HOPPER_DECODE_KV8_STAGES,
    HOPPER_DECODE_STAGES,
    HOPPER_DECODE_STAGES_DENSE,
    HopperBackwardConfig,
    HopperConfig,
    HopperSplitConfig,
    TritonConfig,
    dq_part_columns,
    split_columns,
    stages_unrounded,
)

BARRIER = 8  # bytes
FP32 = 4
WORK_ITEM = 2 * 4  # bytes of a work-queue stage
RESERVED = 1024  # bytes that CUDA reserves per program from capability 8.0 on
PREFETCH_STAGES = 8  # tiles for which page ids are prefetched
# The compiler passes values that warps share to the warps it starts, through shared memory: 290 to
# 700 bytes, depending on the options of a call (Triton 3.6 and 3.9). No table lists it.
HANDED_OVER = 1024
HANDED_OVER_BACKWARD = 768  # fewer values: at most 520 by compilers of 2026-11-18


@dataclass(frozen=True)
class Footprint:
    """One program: bytes of each buffer, barriers, threads, and registers per thread at launch.
    Warps of different roles redistribute the registers later.
    """

    buffers: dict[str, int]
    barriers: int = 0
    threads: int = 128
    registers: int = 255
    roles: tuple[tuple[int, int], ...] = ()  # (threads, registers of each)

    @property
    def shared_bytes(self) -> int:
        """Without the compiler's own part, which is at most HANDED_OVER."""
        return sum(self.buffers.values()) + BARRIER * self.barriers

    @property
    def register_bytes(self) -> int:
        return 4 * self.threads * self.registers

    def programs(self, hardware: Hardware) -> int:
        """Programs that a processor holds at a time."""
        by_registers = 4 * hardware.registers // self.register_bytes
        by_shared = (hardware.shared_bytes + RESERVED) // (self.shared_bytes + RESERVED)
        return max(1, min(by_registers, by_shared))


def hopper_forward(
    config: HopperConfig,
    width: int,
    width_v: int,
    wide: bool = False,
    page_size: int = 0,
    packed: bool = False,
) -> Footprint:
    """width, width_v: head dims as padded; a tail of columns has no barriers of its own. wide: the
    output is unrounded, and is stored from registers if it does not fit shared memory. A work-queue
    entry names its tile of queries, and for packed or paged sequences also their first token.
    """
    rows, n = 64 * config.consumers, config.tile_n
    buffers = {
        "q": 2 * config.q_stages * rows * width,
        "k": 2 * config.num_stages * n * width,
        "v": 2 * config.num_stages * n * width_v,
    }
    if wide and stages_unrounded(width, width_v):
        buffers["out"] = 4 * rows * width_v
    elif not (config.out_in_q or wide):
        buffers["out"] = 2 * rows * width_v
    if page_size:
        buffers["page ids"] = 4 * PREFETCH_STAGES * max(1, n // page_size)
    buffers["work queue"] = WORK_ITEM * (6 if packed or page_size else 3)
    rings = config.q_stages * config.consumers + 2 * config.num_stages + 2
    barriers = 2 * rings + config.consumers  # full and empty, and one per consumer for pingpong
    if config.named_barriers:
        barriers -= config.num_stages  # named barriers for empty key stages take no memory
    return Footprint(buffers, barriers, *_threads(config, config.consumers))


def _threads(
    config: HopperConfig | HopperBackwardConfig | HopperSplitConfig, consumers: int
) -> tuple[int, int, tuple[tuple[int, int], ...]]:
    """Registers are allocated per warpgroup: the producer warp is in one of its own, and in the
    backward also the storing warp.
    """
    roles = ((128 * consumers, config.consumer_regs), (128, config.producer_regs))
    return 128 * (consumers + 1), config.entry_regs, roles


def hopper_decode(width: int, page_size: int = 0, kv8: bool = False) -> Footprint:
    """Few queries, of this sequence and of the next: stages of 64 keys in flight, and the states of
    four warps that are merged. kv8: pages are 8-bit.
    """
    stages = (HOPPER_DECODE_STAGES if page_size else HOPPER_DECODE_STAGES_DENSE)[width]
    stages = HOPPER_DECODE_KV8_STAGES if kv8 else stages
    tiles = stages * 64 * width * (1 if kv8 else 2)
    buffers = {"k": tiles, "v": tiles}
    if kv8:
        buffers["scales"] = FP32 * 2 * stages * 64
    buffers["q"] = 2 * 2 * 16 * width
    buffers["exchange"] = FP32 * 4 * 16 * (width + 2)
    if page_size:
        parts = 64 // min(64, page_size)
        buffers["page ids"] = 4 * PREFETCH_STAGES * (parts + 1)  # and the sequence of each tile
        buffers["lengths"] = 4 * 32  # of 32 sequences; larger batches have 256 or 2,048
    registers = HOPPER_DECODE_KV8_REGISTERS if kv8 else 255
    return Footprint(buffers, 2 * stages + 1, 160, registers)


def hopper_backward(
    config: HopperBackwardConfig, width: int, with_dq: bool = True, dynamic: bool = True
) -> Footprint:
    """dk and dv, and dq unless a separate kernel computes it: then ds is not exchanged. Tails of dk
    and dv leave through memory of their own, the columns before them through that of dq.
    """
    m, n = config.tile_m, config.tile_n
    columns, tail = split_columns(width)
    buffers = {
        "q": 2 * config.q_stages * m * width,
        "lse and delta": FP32 * config.q_stages * 2 * m,
        "dout": 2 * config.dout_stages * m * width,
        "k": 2 * n * width,
        "v": 2 * n * width,
        "dq, or dk and dv on their way": FP32 * 2 * 64 * dq_part_columns(m, columns, tail)[0],
        "tails of dk and dv on their way": 2 * 2 * 64 * tail,
        "work queue": WORK_ITEM if dynamic else 0,
    }
    if with_dq:
        buffers["ds"] = 2 * 3 * n * m
    full = config.q_stages + config.dout_stages  # named barriers for empty stages take no memory
    rings = 1 + 1 + 2
    return Footprint(buffers, full + 2 * rings + 2, *_threads(config, 2))


def hopper_backward_split(
    config: HopperSplitConfig,
    width: int,
    width_v: int,
    keys: bool = False,
    values: bool = False,
    dynamic: bool = True,
) -> Footprint:
    """One gradient in a separate kernel: dq, dk (keys), or dv (keys and values), which needs one
    matrix of own rows less. width: of q and k, width_v: of v and dout. With keys, lse and delta
    stream by with the queries; otherwise they belong to the own rows.
    """
    own = 2 * 2 * 64
    buffers = {"a0": own * width} | ({} if values else {"a1": own * width_v})
    buffers |= {
        "b0": 2 * config.b0_stages * config.tile * width,
        "b1": 2 * config.b1_stages * config.tile * width_v,
        "work queue": WORK_ITEM if dynamic else 0,
    }
    if keys:
        buffers["lse and delta"] = FP32 * config.b0_stages * 2 * config.tile
    rings = (2 if values else 4) + config.b0_stages + config.b1_stages + 2
    return Footprint(buffers, 2 * rings, *_threads(config, 2))


def triton(kernel: str, config: TritonConfig, dim: int) -> Footprint:
    """forward, dkdv or dq of 16-bit inputs on compute capability 9, without a block mask and
    without score options; dim: head_dim as padded. The program's own rows stay in shared memory,
    rows of the other side have num_stages buffers; lse and delta are read one stage later than
    their rows.
    """
    own, other = 2 * config.tile_m * dim, 2 * config.tile_n * dim
    stages, threads = config.num_stages, 32 * config.num_warps
    buffers = {
        "forward": {"q": own, "k and v": 2 * stages * other},
        "dq": {"q and dout": 2 * own, "k and v": 2 * stages * other},
        "dkdv": {
            "k and v": 2 * other,
            "q and dout": 2 * stages * own,
            "lse and delta": 2 * (stages - 1) * FP32 * config.tile_m,
        },
    }
    registers = min(255, 65536 // threads)
    return Footprint(buffers[kernel], 0, threads, config.max_registers or registers)
