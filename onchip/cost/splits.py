"""Few queries over many keys: how long they take with the keys of a sequence cut into so many
splits, and which cut takes least.

A program reads its tiles of keys one after another, at its processor's share of the memory's rate.
Too few programs leave processors idle, a few too many make some of them take one more than the
others, and whatever is cut has to be merged. With n programs of s tiles on P processors

    call + ceil(n / P) * s * step + merge         step: one tile, as long as P of them come at once

which is within a tenth of what decoding over pages took on an H200 (tests/cost/test_splits.py).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from onchip.core.problem import Problem
from onchip.cost.hardware import Hardware
from onchip.kernels.tiles import SPLIT_MOST_WAVES, SPLIT_WAVES


class Tiles(NamedTuple):
    """What a program does: a tile of queries with the heads of one kv head, tile after tile of
    keys. state_bytes: of its result, unrounded.
    """

    num_kv_heads: int
    key_bytes: int  # of keys and values of a tile
    flops: int
    state_bytes: int
    dtype: torch.dtype

    @classmethod
    def of(cls, problem: Problem, tile_m: int, tile_n: int) -> "Tiles":
        """tile_m: rows, queries x heads of a group."""
        dims, stored = problem.head_dim + problem.head_dim_v, problem.page_dtype or problem.dtype
        scales = 0 if problem.page_dtype is None else 8  # of a key and its value
        rows = min(problem.seqlen_q * problem.group_size, tile_m)
        return cls(
            problem.num_kv_heads,
            tile_n * (dims * stored.itemsize + scales),
            2 * tile_m * tile_n * dims,
            4 * rows * (problem.head_dim_v + 1),
            problem.dtype,
        )

    def step_s(self, hardware: Hardware) -> float:
        """Seconds of a tile, when all processors ask for theirs."""
        read = self.key_bytes * hardware.processors / hardware.memory_bytes_s
        if not hardware.is_known:
            return read
        return max(read, self.flops / hardware.flops_clock(self.dtype) / hardware.clock_hz)


class Part(NamedTuple):
    """So many tiles of queries, each over so many tiles of keys, which are cut into splits."""

    number: int
    tiles: int
    splits: int = 1

    @property
    def longest(self) -> int:
        """Tiles of keys of a split."""
        return -(-self.tiles // self.splits)


def first_key(problem: Problem, seqlen_q: int, seqlen_k: int) -> int:
    """The first key that the window leaves to any query of a sequence."""
    left = problem.window_size[0]
    return 0 if left is None else max(0, seqlen_k - seqlen_q - left)


def count_key_tiles(problem: Problem, lengths: Sequence[tuple[int, int]], tile_n: int) -> list[int]:
    """Tiles of keys that each sequence reads. lengths: (seqlen_q, seqlen_k) of each."""
    return [-(-n // tile_n) - first_key(problem, m, n) // tile_n for m, n in lengths]


def even_splits(tiles: int, most: int) -> int:
    """Into how many splits of `most` tiles at most, which are as even as can be."""
    each = max(1, -(-tiles // max(1, -(-tiles // most))))
    return max(1, -(-tiles // each))


def seconds(tiles: Tiles, parts: Sequence[Part], hardware: Hardware, merged: bool) -> float:
    """Of a call; merged: by a second launch, which costs its time also where nothing was cut."""
    steps = _busiest(parts, tiles.num_kv_heads, hardware.processors)
    read = hardware.call_s + steps * tiles.step_s(hardware)
    if not merged:
        return read
    states = tiles.num_kv_heads * sum(p.number * p.splits for p in parts if p.splits > 1)
    return read + hardware.merge_s + 2 * states * tiles.state_bytes / hardware.memory_bytes_s


def _busiest(parts: Sequence[Part], num_kv_heads: int, processors: int) -> float:
    """Tiles of keys of the processor that ends last: programs that are alike come in waves, others
    fill what the longer ones leave.
    """
    longest = max((part.longest for part in parts), default=0)
    if all(part.longest == longest for part in parts):
        programs = num_kv_heads * sum(part.number * part.splits for part in parts)
        return -(-programs // processors) * longest
    work = num_kv_heads * sum(part.number * part.tiles for part in parts)
    return max(longest, work / processors + longest / 2)


def filling(waves: int, num_kv_heads: int, processors: int) -> int:
    """Units, programs of one kv head, that give every processor so many programs."""
    return max(1, waves * processors // num_kv_heads)


def cut_evenly(part: Part, units: int | None, least: int) -> Part:
    """The same in splits for so many units, of `least` tiles at least; None: nothing is cut."""
    if units is None:
        return part._replace(splits=1)
    most = max(least, -(-part.number * part.tiles // units))
    return part._replace(splits=even_splits(part.tiles, most))


def predicted(tiles: Tiles, part: Part, units: int | None, least: int, on: Hardware) -> float:
    """Seconds of a call whose keys are cut for so many units."""
    return seconds(tiles, [cut_evenly(part, units, least)], on, units is not None)


@lru_cache(maxsize=4096)
def choose(tiles: Tiles, part: Part, least: int, hardware: Hardware) -> int | None:
    """For how many units keys are cut, None for none at all: whatever is predicted to take least,
    with SPLIT_WAVES programs for every processor or more.
    """
    waves = range(SPLIT_WAVES, SPLIT_MOST_WAVES + 1)
    units = [filling(n, tiles.num_kv_heads, hardware.processors) for n in waves]
    return min((None, *units), key=lambda n: predicted(tiles, part, n, least, hardware))


@lru_cache(maxsize=4096)
def choose_unseen(tiles: Tiles, part: Part, least: int, hardware: Hardware) -> int | None:
    """The same where only the device knows the lengths, part.tiles at most: it cuts them by what
    there is, for SPLIT_WAVES programs on every processor. Nothing is cut, and no merge launched, if
    that would take longer even were one sequence all there is: others only fill processors.
    """
    units = filling(SPLIT_WAVES, tiles.num_kv_heads, hardware.processors)
    one = part._replace(number=1)
    return min((None, units), key=lambda n: predicted(tiles, one, n, least, hardware))
