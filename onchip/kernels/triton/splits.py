"""Which program takes which keys of which queries. The lengths lie on the device, so the cuts are
made there, by every program for itself; the host knows no more than how many programs suffice.

A unit is one tile of queries of one sequence and one split of its keys, the same for every group of
heads. Units are numbered by sequence, tile and split. A sequence that is cut leaves states in
scratch memory, one slot for each of its units, and one record for each tile of queries, by which
the merge finds them: (first token, first row, rows, first slot, splits).
"""

from typing import NamedTuple

import triton
import triton.language as tl

from onchip.kernels.triton.tile import Sequence, clamped, sequence_of

RECORD = tl.constexpr(8)  # int32 of a record; the record before the first holds their number


class Lengths(NamedTuple):
    """Where the lengths of a call are: offsets if packed, cache_seqlens if paged. Dense calls have
    total_q queries and total_k keys a sequence; no sequence has more keys than total_k.
    """

    cu_seqlens_q: tl.tensor
    cu_seqlens_k: tl.tensor
    cache_seqlens: tl.tensor
    total_q: tl.tensor
    total_k: tl.tensor
    batch: tl.tensor


class Cut(NamedTuple):
    """How keys are cut. `units`: how many should share the work; `least`: the fewest tiles worth a
    program. `fixed`: tiles of a split whatever else there is to do, or None. num_units: how many
    were launched. Without `units` nothing is cut.
    """

    units: tl.tensor
    least: tl.tensor
    fixed: tl.tensor
    num_units: tl.tensor


class Unit(NamedTuple):
    """Tile `tile` of the queries of sequence b, and its keys from tile `begin` to tile `end`, which
    is one of `count` splits. `slot` and `record` are its own, and its tile's, if count > 1.
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
    """Sequence b, or a block of them, clamped to the tensors like tile.sequence_of."""
    if lengths.cache_seqlens is None:
        return sequence_of(
            lengths.cu_seqlens_q, lengths.cu_seqlens_k, lengths.total_q, lengths.total_k, b
        )
    else:
        seqlen_k = tl.load(lengths.cache_seqlens + b)
        seqlen_k = tl.minimum(tl.maximum(seqlen_k, 0), lengths.total_k)
        if lengths.cu_seqlens_q is None:
            return Sequence(b, 0, lengths.total_q, 0, seqlen_k)
        else:
            start_q, seqlen_q = clamped(lengths.cu_seqlens_q + b, lengths.total_q)
            return Sequence(0, start_q, seqlen_q, 0, seqlen_k)


@triton.jit
def _tiles(at, left, group_size, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """(tiles of queries, first tile of keys that any of them sees, how many tiles from there)."""
    tiles_q = tl.cdiv(at.seqlen_q * group_size, TILE_M)
    first = at.seqlen_k * 0
    if left is not None:
        first = tl.maximum(at.seqlen_k - at.seqlen_q - left, 0) // TILE_N
    return tiles_q, first, tl.cdiv(at.seqlen_k, TILE_N) - first


@triton.jit
def _splits(cut, work, tiles_q, tiles):
    """(splits, tiles of each). Fixed cuts leave sequences with many queries whole: they have
    programs enough, and what a sequence is cut into must depend on itself alone.
    """
    if cut.units is None:
        return tiles_q * 0 + 1, tl.maximum(tiles, 1)
    else:
        if cut.fixed is None:
            most = tl.maximum(((work + cut.units - 1) // cut.units).to(tl.int32), cut.least)
        else:
            most = tl.where(tiles_q > 1, tl.maximum(tiles, 1), cut.fixed)
        per = tl.maximum(tl.cdiv(tiles, tl.maximum(tl.cdiv(tiles, most), 1)), 1)
        return tl.maximum(tl.cdiv(tiles, per), 1), per


@triton.jit
def unit_of(
    lengths, cut, unit, left, group_size, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    BATCH: tl.constexpr,
):  # fmt: skip
    """The Unit of a number, its Sequence, and how many records there are. BATCH is a power of two,
    not below the batch.
    """
    if lengths.cache_seqlens is None and lengths.cu_seqlens_q is None:
        b, start, slot, record, num_records, work = _count_alike(
            lengths, cut, unit, left, group_size, TILE_M, TILE_N
        )
    else:
        b, start, slot, record, num_records, work = _count(
            lengths, cut, unit, left, group_size, TILE_M, TILE_N, BATCH
        )
    at = sequence_at(lengths, tl.minimum(b, lengths.batch - 1))
    tiles_q, first, tiles = _tiles(at, left, group_size, TILE_M, TILE_N)
    count, per = _splits(cut, work, tiles_q, tiles)
    exists = (b < lengths.batch) & (start + tiles_q * count <= cut.num_units)
    local = unit - start
    tile = tiles_q - 1 - local // count  # the last queries see most keys: they go first
    begin = first + local % count * per
    end = tl.minimum(begin + per, first + tiles)
    mine = Unit(b, tile, local % count, count, begin, end, slot + local, record + tile, exists)
    return mine, at, num_records


@triton.jit
def _count(
    lengths, cut, unit, left, group_size, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    BATCH: tl.constexpr,
):  # fmt: skip
    """(sequence, its first unit, slots and records before it, records in all, tiles in all)."""
    e = tl.arange(0, BATCH)
    at = sequence_at(lengths, tl.minimum(e, lengths.batch - 1))
    tiles_q, _, tiles = _tiles(at, left, group_size, TILE_M, TILE_N)
    tiles_q = tl.where(e < lengths.batch, tiles_q, 0)
    work = tl.sum(tiles_q.to(tl.int64) * tiles, 0)
    count, _ = _splits(cut, work, tiles_q, tiles)
    stop = tl.cumsum(tiles_q * count, 0)
    b = tl.sum((stop <= unit).to(tl.int32), 0)
    start = tl.max(tl.where(stop <= unit, stop, 0), 0)
    stored = (count > 1) & (stop <= cut.num_units)  # bad offsets ask for more than was launched
    before = stored & (e < b)
    slots = tl.sum(tl.where(before, tiles_q * count, 0), 0)
    records = tl.sum(tl.where(before, tiles_q, 0), 0)
    return b, start, slots, records, tl.sum(tl.where(stored, tiles_q, 0), 0), work


@triton.jit
def _count_alike(lengths, cut, unit, left, group_size, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """The same where all sequences are alike."""
    at = sequence_at(lengths, unit)
    tiles_q, _, tiles = _tiles(at, left, group_size, TILE_M, TILE_N)
    work = tl.cast(tiles_q * lengths.batch, tl.int64) * tiles
    count, _ = _splits(cut, work, tiles_q, tiles)
    b = unit // (tiles_q * count)
    start = b * tiles_q * count
    return b, start, start, b * tiles_q, tl.where(count > 1, lengths.batch * tiles_q, 0), work
