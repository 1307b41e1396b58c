"""Split-KV scheduling on the device: which program computes which keys of which queries.

The lengths of sequences are in device memory, so every program computes the splits for itself; the
host only launches enough programs.

    sequence 0: 300 keys     |k0 |k1 |k2|                      3 key tiles of 128
    sequence 1: 1,000 keys   |k0 |k1 |k2 |k3 |k4 |k5 |k6 |k7|  8 key tiles

    at most 4 tiles a split:  unit 0 = sequence 0, k0-k2   stores its result
                              unit 1 = sequence 1, k0-k3   stores slot 0, and record 0
                              unit 2 = sequence 1, k4-k7   stores slot 1
                              merge: record 0 -> slots 0 and 1 -> result

A work unit is one tile of queries of one sequence and one split of its keys; it is the same for
every kv head. Units are numbered by sequence, tile and split. Each unit of a split sequence stores
its state in one slot of scratch memory. Each tile of queries of a split sequence stores one record
for the merge: (first token, first row, rows, first slot, splits).

Worked shape: batch 1, 300 tokens of cache, one query, tile 128: 3 tiles of keys. Split for 3 units
it takes 3 programs per kv head, 3 slots and 1 record; unsplit, 1 program and no scratch memory.

Used by decode.py; the slots are merged by merge.py. The loop over one split is that of
examples/versions/v2.py.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from onchip.kernels.triton.tile import SequenceInfo, load_clamped, load_sequence

RECORD = tl.constexpr(8)  # int32 per record; the first record holds the number of the others


class SequenceLengths(NamedTuple):
    """The lengths of a call: cu_seqlens if packed, cache_seqlens if paged. Dense calls have total_q
    queries and total_k keys per sequence. No sequence has more than total_k keys.
    """

    cu_seqlens_q: tl.tensor
    cu_seqlens_k: tl.tensor
    cache_seqlens: tl.tensor
    total_q: tl.tensor
    total_k: tl.tensor
    batch: tl.tensor


class SplitPlan(NamedTuple):
    """How keys are split. units: number of units that should share the work, None for no splits.
    least: fewest tiles per split. fixed: tiles per split independent of the other sequences, or
    None. num_units: number of units launched.
    """

    units: tl.tensor
    least: tl.tensor
    fixed: tl.tensor
    num_units: tl.tensor


class WorkUnit(NamedTuple):
    """Tile `tile` of the queries of sequence b, and tiles begin : end of its keys: one of `count`
    splits. If count > 1, `slot` is the unit's slot and `record` the record of its tile.
    """

    b: tl.tensor
    tile: tl.tensor
    split: tl.tensor
    count: tl.tensor
    begin: tl.tensor
    end: tl.tensor
    slot: tl.tensor
    record: tl.tensor
    exists: tl.tensor


@triton.jit
def sequence_at(lengths, b):
    """SequenceInfo b, or a block of them, clamped to the tensors like tile.load_sequence."""
    if lengths.cache_seqlens is None:
        return load_sequence(
            lengths.cu_seqlens_q, lengths.cu_seqlens_k, lengths.total_q, lengths.total_k, b
        )
    else:
        seqlen_k = tl.load(lengths.cache_seqlens + b)
        seqlen_k = tl.minimum(tl.maximum(seqlen_k, 0), lengths.total_k)
        if lengths.cu_seqlens_q is None:
            return SequenceInfo(b, 0, lengths.total_q, 0, seqlen_k)
        else:
            start_q, seqlen_q = load_clamped(lengths.cu_seqlens_q + b, lengths.total_q)
            return SequenceInfo(0, start_q, seqlen_q, 0, seqlen_k)


@triton.jit
def _tiles(at, left, group_size, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """(tiles of queries, first tile of keys that any of them sees, number of tiles from there)."""
    tiles_q = tl.cdiv(at.seqlen_q * group_size, TILE_M)
    first = at.seqlen_k * 0
    if left is not None:
        first = tl.maximum(at.seqlen_k - at.seqlen_q - left, 0) // TILE_N
    return tiles_q, first, tl.cdiv(at.seqlen_k, TILE_N) - first


@triton.jit
def _splits(plan, work, tiles_q, tiles):
    """(splits, tiles per split). With fixed splits, sequences with several tiles of queries are not
    split: they have enough programs, and the splits of a sequence must not depend on the others.
    """
    if plan.units is None:
        return tiles_q * 0 + 1, tl.maximum(tiles, 1)
    else:
        if plan.fixed is None:
            most = tl.maximum(((work + plan.units - 1) // plan.units).to(tl.int32), plan.least)
        else:
            most = tl.where(tiles_q > 1, tl.maximum(tiles, 1), plan.fixed)
        per = tl.maximum(tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, most), 1)), 1)
        return tl.maximum(tl.cdiv(tiles, per), 1), per


@triton.jit
def unit_of(
    lengths, plan, unit, left, group_size, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    BATCH: tl.constexpr,
):  # fmt: skip
    """The WorkUnit with index `unit`, its SequenceInfo, and the number of records. BATCH is a power
    of two, at least the batch size.
    """
    if lengths.cache_seqlens is None and lengths.cu_seqlens_q is None:
        b, start, slot, record, num_records, work = _count_alike(
            lengths, plan, unit, left, group_size, TILE_M, TILE_N
        )
    else:
        b, start, slot, record, num_records, work = _count(
            lengths, plan, unit, left, group_size, TILE_M, TILE_N, BATCH
        )
    at = sequence_at(lengths, tl.minimum(b, lengths.batch - 1))
    tiles_q, first, tiles = _tiles(at, left, group_size, TILE_M, TILE_N)
    count, per = _splits(plan, work, tiles_q, tiles)
    exists = (b < lengths.batch) & (start + tiles_q * count <= plan.num_units)
    local = unit - start
    tile = tiles_q - 1 - local // count  # the last queries see the most keys: they start first
    begin = first + local % count * per
    end = tl.minimum(begin + per, first + tiles)
    mine = WorkUnit(b, tile, local % count, count, begin, end, slot + local, record + tile, exists)
    return mine, at, num_records


@triton.jit
def _count(
    lengths, plan, unit, left, group_size, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    BATCH: tl.constexpr,
):  # fmt: skip
    """(sequence, its first unit, slots and records before it, records in all, tiles in all)."""
    e = tl.arange(0, BATCH)
    at = sequence_at(lengths, tl.minimum(e, lengths.batch - 1))
    tiles_q, _, tiles = _tiles(at, left, group_size, TILE_M, TILE_N)
    tiles_q = tl.where(e < lengths.batch, tiles_q, 0)
    work = tl.sum(tiles_q.to(tl.int64) * tiles, 0)
    count, _ = _splits(plan, work, tiles_q, tiles)
    stop = tl.cumsum(tiles_q * count, 0)
    b = tl.sum((stop <= unit).to(tl.int32), 0)
    start = tl.max(tl.where(stop <= unit, stop, 0), 0)
    stored = (count > 1) & (stop <= plan.num_units)  # bad offsets may need more than were launched
    before = stored & (e < b)
    slots = tl.sum(tl.where(before, tiles_q * count, 0), 0)
    records = tl.sum(tl.where(before, tiles_q, 0), 0)
    return b, start, slots, records, tl.sum(tl.where(stored, tiles_q, 0), 0), work


@triton.jit
def _count_alike(lengths, plan, unit, left, group_size, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """The same if all sequences have the same lengths: no loop over the batch."""
    at = sequence_at(lengths, unit)
    tiles_q, _, tiles = _tiles(at, left, group_size, TILE_M, TILE_N)
    work = tl.cast(tiles_q * lengths.batch, tl.int64) * tiles
    count, _ = _splits(plan, work, tiles_q, tiles)
    b = unit // (tiles_q * count)
    start = b * tiles_q * count
    return b, start, start, b * tiles_q, tl.where(count > 1, lengths.batch * tiles_q, 0), work
