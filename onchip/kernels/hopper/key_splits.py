"""How kernels/hopper/decode.py splits the keys of a batch over programs, for `onchip.explain`.

The key tiles of all sequences, one after another, are cut into ranges of equal size, one for each
program: a range may end within a sequence and go on in the next one.
"""

from collections.abc import Sequence
from itertools import accumulate

from onchip.core.backend import KeySplits
from onchip.core.problem import Problem
from onchip.cost.hardware import Hardware
from onchip.cost.splits import SplitTiles, TileWork, count_key_tiles, seconds, units_for_waves
from onchip.kernels.tiles import (
    HOPPER_DECODE_KEYS,
    HOPPER_DECODE_ROWS,
    TileConfig,
    hopper_decode_programs,
)


def plan_ranges(
    problem: Problem, lengths: Sequence[tuple[int, int]], hardware: Hardware
) -> KeySplits:
    config = TileConfig(HOPPER_DECODE_ROWS, 64)
    processors, least = hardware.processors, HOPPER_DECODE_KEYS // config.tile_n
    most = units_for_waves(hopper_decode_programs(problem), problem.num_kv_heads, processors)
    tiles = [max(1, n) for n in count_key_tiles(problem, lengths, config.tile_n)]
    total = sum(tiles)
    ranges = min(most, max(1, total // least))
    range_of = lambda tile: ((tile + 1) * ranges - 1) // total
    stops = list(accumulate(tiles))
    counts = [range_of(b - 1) - range_of(b - n) + 1 for b, n in zip(stops, tiles, strict=True)]
    rows = problem.seqlen_q * problem.num_heads
    states = sum(n for n in counts if n > 1) * rows
    why = f"{total} tiles of 64 keys in {ranges} even ranges ({processors} processors)"
    row_bytes, work = 4 * (problem.head_dim_v + 1), TileWork.of(problem, *config)
    times = (
        seconds(work, parts, hardware, merged=False)
        for parts in ([SplitTiles(1, total, ranges)], [SplitTiles(1, n) for n in tiles])
    )
    programs = ranges * problem.num_kv_heads
    return KeySplits(tuple(counts), programs, config.tile_n, 2 * states * row_bytes, why, *times)
