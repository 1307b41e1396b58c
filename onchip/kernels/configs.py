"""Tile sizes, as data with reasons. Kernels contain no literal tile size."""

from typing import NamedTuple


class TileConfig(NamedTuple):
    tile_m: int  # queries
    tile_n: int  # keys


# A tile of scores for all heads at once should stay in the last-level cache (4 MB of fp32), yet be
# large enough that
# Python's ~50 us per tile is noise beside its matrix products.
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
