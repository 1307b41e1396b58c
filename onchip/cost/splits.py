"""Cost model of split-KV: the time of a call over few queries with the keys of a sequence in so
many splits, and the choice of the number of splits.

A program reads its tiles of keys one after another, at its processor's share of the memory
bandwidth. Too few programs leave processors idle; with a few too many, some processors run one
program more than the others; and splits must be merged. With n programs of s tiles on P processors

    call + ceil(n / P) * s * step + merge         step: one tile, while P of them are read at once

which is within a tenth of the measured time of paged decoding on an H200
(tests/cost/test_splits.py).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from onchip.core.problem import Problem
from onchip.cost.hardware import Hardware
from onchip.kernels.tiles import SPLIT_MOST_WAVES, SPLIT_WAVES


class TileWork(NamedTuple):
    """The work of a program: a tile of queries with the heads of one kv head, over tile after tile
    of keys. state_bytes: size of its unrounded result.
    """

    num_kv_heads: int
    key_bytes: int  # keys and values of a tile
    flops: int
    state_bytes: int
    dtype: torch.dtype

    @classmethod
    def of(cls, problem: Problem, tile_m: int, tile_n: int) -> "TileWork":
        """tile_m: rows, queries x heads of a group."""
        rows = min(problem.seqlen_q * problem.group_size, tile_m)
        return cls(
            problem.num_kv_heads,
            tile_n * problem.key_bytes,
            2 * tile_m * tile_n * (problem.head_dim + problem.head_dim_v),
            4 * rows * (problem.head_dim_v + 1),
            problem.dtype,
        )

    def step_s(self, hardware: Hardware) -> float:
        """Seconds per tile while all processors read."""
        read = self.key_bytes * hardware.processors / hardware.memory_bytes_s
        if not hardware.is_known:
            return read
        return max(read, self.flops / hardware.flops_clock(self.dtype) / hardware.clock_hz)


class SplitTiles(NamedTuple):
    """`number` tiles of queries, each over `tiles` tiles of keys, in `splits` splits."""

    number: int
    tiles: int
    splits: int = 1

    @property
    def longest(self) -> int:
        """Tiles of keys in the longest split."""
        return -(-self.tiles // self.splits)


def first_key(problem: Problem, seqlen_q: int, seqlen_k: int) -> int:
    """The first key that the window leaves to any query of a sequence."""
    left = problem.window_size[0]
    return 0 if left is None else max(0, seqlen_k - seqlen_q - left)


def count_key_tiles(problem: Problem, lengths: Sequence[tuple[int, int]], tile_n: int) -> list[int]:
    """Tiles of keys that each sequence reads. lengths: (seqlen_q, seqlen_k) of each."""
    return [-(-n // tile_n) - first_key(problem, m, n) // tile_n for m, n in lengths]


def even_splits(tiles: int, most: int) -> int:
    """The number of splits of at most `most` tiles, as even as possible."""
    each = max(1, -(-tiles // max(1, -(-tiles // most))))
    return max(1, -(-tiles // each))


def seconds(
    tiles: TileWork, parts: Sequence[SplitTiles], hardware: Hardware, merged: bool
) -> float:
    """Seconds of a call. merged: a second launch merges the splits, and takes its time even if
    nothing was split.
    """
    steps = _longest_processor(parts, tiles.num_kv_heads, hardware.processors)
    read = hardware.call_s + steps * tiles.step_s(hardware)
    if not merged:
        return read
    states = tiles.num_kv_heads * sum(p.number * p.splits for p in parts if p.splits > 1)
    return read + hardware.merge_s + 2 * states * tiles.state_bytes / hardware.memory_bytes_s


def _longest_processor(parts: Sequence[SplitTiles], num_kv_heads: int, processors: int) -> float:
    """Tiles of keys of the processor that ends last: programs of equal length run in waves, others
    fill the gaps that longer ones leave.
    """
    longest = max((part.longest for part in parts), default=0)
    if all(part.longest == longest for part in parts):
        programs = num_kv_heads * sum(part.number * part.splits for part in parts)
        return -(-programs // processors) * longest
    work = num_kv_heads * sum(part.number * part.tiles for part in parts)
    return max(longest, work / processors + longest / 2)


def units_for_waves(waves: float, num_kv_heads: int, processors: int) -> int:
    """Units (programs of one kv head) that give every processor `waves` programs."""
    return max(1, int(waves * processors) // num_kv_heads)


def split_evenly(part: SplitTiles, units: int | None, least: int) -> SplitTiles:
    """The same, split for `units` units with at least `least` tiles per split; None: not split."""
    if units is None:
        return part._replace(splits=1)
    most = max(least, -(-part.number * part.tiles // units))
    return part._replace(splits=even_splits(part.tiles, most))


def predict_seconds(
    tiles: TileWork, part: SplitTiles, units: int | None, least: int, on: Hardware
) -> float:
    """Seconds of a call with its keys split for `units` units."""
    return seconds(tiles, [split_evenly(part, units, least)], on, units is not None)


@lru_cache(maxsize=4096)
def choose(tiles: TileWork, part: SplitTiles, least: int, hardware: Hardware) -> int | None:
    """The number of units to split for, None for no splits: the choice with the least predicted
    time, from no splits and SPLIT_WAVES to SPLIT_MOST_WAVES programs per processor.
    """
    waves = range(SPLIT_WAVES, SPLIT_MOST_WAVES + 1)
    units = [units_for_waves(n, tiles.num_kv_heads, hardware.processors) for n in waves]
    return min((None, *units), key=lambda n: predict_seconds(tiles, part, n, least, hardware))


@lru_cache(maxsize=4096)
def choose_for_unknown_lengths(
    tiles: TileWork,
    part: SplitTiles,
    least: int,
    hardware: Hardware,
    waves: tuple[float, ...] = (SPLIT_WAVES,),
) -> int | None:
    """The same if the lengths are only on the device, at most part.tiles: the device splits by the
    real lengths. waves: programs on every processor, of which those are chosen that are best if all
    sequences have that length. None if splits and merge would take longer even for a single
    sequence of that length: more sequences only fill processors.
    """
    units = min(
        (units_for_waves(n, tiles.num_kv_heads, hardware.processors) for n in waves),
        key=lambda n: predict_seconds(tiles, part, n, least, hardware),
    )
    single = part._replace(number=1)
    return min((None, units), key=lambda n: predict_seconds(tiles, single, n, least, hardware))
