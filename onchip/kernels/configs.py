"""Tile sizes, as data with reasons. Kernels contain no literal tile size."""

from typing import NamedTuple


class TileConfig(NamedTuple):
    tile_m: int  # queries
    tile_n: int  # keys


# A tile of scores for all heads at once should stay in the last-level cache (4 MB of fp32), yet be
# large enough that Python's ~50 us per tile is noise beside its matrix products.
TILED_SCORES = 1 << 20


def tiled_config(planes: int) -> TileConfig:
    """The rectangle for the torch loop, `planes` = batch * heads computed together."""
    tile_m = 512
    while tile_m > 32 and planes * tile_m * tile_m > TILED_SCORES:
        tile_m //= 2
    tile_n = max(32, min(2048, TILED_SCORES // (planes * tile_m)))
    return TileConfig(tile_m, tile_n)


class TritonConfig(NamedTuple):
    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int


def triton_config(kernel: str, itemsize: int, dim: int, device) -> TritonConfig:
    return TritonConfig(32, 32, 4, 2)


BIAS_PROGRAMS = 512


class HopperConfig(NamedTuple):
    """One producer warp and `consumers` warpgroups of 64 queries each."""

    tile_n: int
    consumers: int
    num_stages: int
    pingpong: bool = False  # consumers take turns on the tensor cores
    out_in_q: bool = False  # the output leaves through the shared memory of the queries
    consumer_regs: int = 240
    producer_regs: int = 24
    entry_regs: int = 168


_THREE = {"consumer_regs": 160, "producer_regs": 32, "entry_regs": 128}
# (head_dim, cut by causal or a window), bf16 on an H200, 2026-11-15; docs/notebook.md has the runs.
HOPPER_FORWARD = {
    (64, False): HopperConfig(128, 3, 2, pingpong=True, **_THREE),  # 2 consumers: 0.82x at 8k
    (64, True): HopperConfig(128, 3, 2, pingpong=True, **_THREE),
    (128, False): HopperConfig(128, 2, 2),  # ping-pong: 0.98x at 8k
    (128, True): HopperConfig(128, 2, 2),
    # 64 keys a tile: the accumulator takes 128 registers; q and two stages of k and v fill 192 kB
    (256, False): HopperConfig(64, 2, 2, out_in_q=True),
    (256, True): HopperConfig(64, 2, 2, out_in_q=True),
}
# Tiles of 192 rows waste much of a short triangle: 1.08x at 512, but 0.96x at 2k.
HOPPER_FORWARD_SHORT = {(64, True): HopperConfig(128, 2, 4, pingpong=True)}
HOPPER_SHORT = 1024


def hopper_forward_config(head_dim: int, cut: bool, seqlen_k: int) -> HopperConfig:
    """`cut`: tiles differ in length, because of causal or a window."""
    key = max(64, 1 << (head_dim - 1).bit_length()), cut
    short = HOPPER_FORWARD_SHORT.get(key)
    return short if short is not None and seqlen_k <= HOPPER_SHORT else HOPPER_FORWARD[key]
