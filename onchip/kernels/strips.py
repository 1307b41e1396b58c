"""A block mask as three warpgroups of a program walk it: in strips of 192 queries.

A strip reaches over two block rows, of which either may list blocks that the other does not. Its
entries are those that both list, then those of one row alone, by turns of either. They are walked
from the last to the first: what one row has more than the other passes by the other's warpgroups
before they begin, and from then on who has no part in a block goes on to the next, which is theirs.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from onchip.masks.bits import BLOCK
from onchip.masks.blockmask import BlockMask, flat_offsets, num_blocks, owners
from onchip.masks.deferred import version_of

UNSEEN = -1
FAR, CUT, BIT_TILE = 1, 2, 4  # of which the part of an entry in a row is the sum
ENTRY = 3  # numbers of an entry


class MaskStrips(NamedTuple):
    """heads: of each strip its first entry, and how many of them both rows list, the first row
    alone, the second row alone. entries: a key block, and its part in each of the two rows:
    UNSEEN, or a sum of FAR if the entry that is walked after it is the other row's alone; CUT if
    the keys end within it; so many BIT_TILEs as the number of its bit tile, counted from 1, or none
    if all of it is seen. One entry lies before all others, of no strip: who looks ahead may look at
    it. shared: of the tiles that a strip loads for its warpgroups, how many they have a
    part in, on average; 1 where nobody could wait for that number.
    """

    heads: Tensor  # (planes_b, planes_h, strips, 4), int32
    entries: Tensor  # (1 + as many as there are at least, ENTRY), int32
    shared: float


_CACHE = WeakTensorKeyDictionary()  # by a tensor of the mask: (what they were made of, strips)


def strips_of(mask: BlockMask) -> MaskStrips:
    """Made once, and waited for: the next call may be on another stream. What a CUDA graph records
    is not kept: it is not there before the graph is replayed.
    """
    key = mask.rows.full_offsets
    source = [(id(t), version_of(t)) for t in mask.rows], mask.seqlen_q, mask.seqlen_k
    kept = _CACHE.get(key)
    if kept is not None and kept[0] == source:
        return kept[1]
    recorded = key.is_cuda and torch.cuda.is_current_stream_capturing()
    found = _build(mask)
    if not recorded:
        found = found._replace(shared=_load_share(mask, found))
        _CACHE[key] = source, found
    return found


def _load_share(mask: BlockMask, strips: MaskStrips) -> float:
    """A block row is that of two warpgroups of the three for which a strip loads its tiles."""
    loaded = 3 * int(strips.heads[..., 1:].sum())
    return 2 * (mask.num_full + mask.num_partial) / loaded if loaded else 1.0


class _ListedBlocks(NamedTuple):
    """Blocks of a strip, each once for each row that lists it."""

    strip: Tensor
    block: Tensor
    side: Tensor  # 0 or 1: the first or the second row of the strip
    tile: Tensor  # counted from 1; 0: none


def _build(mask: BlockMask) -> MaskStrips:
    planes_b, planes_h, seqlen_q, seqlen_k = mask.shape
    per_plane = 2 * -(-num_blocks(seqlen_q) // 3)
    strips = planes_b * planes_h * per_plane
    listed = _list_blocks(mask, per_plane, strips)
    cell = listed.strip * num_blocks(seqlen_k) + listed.block
    order = (cell * 2 + listed.side).argsort()
    cell, (strip, block, side, tile) = cell[order], (t[order] for t in listed)

    again = torch.zeros_like(cell, dtype=torch.bool)
    again[1:] = cell[1:] == cell[:-1]
    both = again.clone()
    both[:-1] |= again[1:]
    kind = torch.where(both, 0, side + 1)
    kinds = torch.arange(3, device=cell.device)
    counted = ((kind[:, None] == kinds) & ~again[:, None]).long()
    counts = torch.zeros(strips + 1, 3, dtype=torch.int64, device=cell.device)
    counts.index_add_(0, strip, counted)
    before = counts.cumsum(0) - counts
    rank = (counted.cumsum(0) - 1 - before[strip]).gather(1, kind[:, None])[:, 0]

    others = counts[strip, 3 - kind.clamp(min=1)]
    turn = rank + side  # of the others, so many come before it if there are as many
    alone = counts[strip, 0] + rank + torch.minimum(turn, others)
    start = before.sum(1) + 1
    at = start[strip] + torch.where(both, rank, alone)
    far = ~both & (turn > 0) & (turn <= others)
    cut = block == seqlen_k // BLOCK  # the last block, unless it is whole
    part = tile * BIT_TILE + cut * CUT + far * FAR
    entries = torch.full((1 + cell.numel(), ENTRY), UNSEEN, dtype=torch.int32, device=cell.device)
    entries[0] = 0
    entries[at, 0] = block.int()
    entries[at, 1 + side] = part.int()
    heads = torch.cat([start[:strips, None], counts[:strips]], 1).int()
    return MaskStrips(heads.view(planes_b, planes_h, per_plane, 4), entries, 1.0)


def _list_blocks(mask: BlockMask, per_plane: int, strips: int) -> _ListedBlocks:
    """Of three block rows the middle one is the second of a strip and the first of the next. The
    others have no second strip, which is strip number `strips`.
    """
    lists = mask.rows
    full = owners(flat_offsets(lists.full_offsets), mask.num_full)
    owner = torch.cat([full, owners(flat_offsets(lists.partial_offsets), mask.num_partial)])
    block = torch.cat([lists.full_indices, lists.partial_indices]).long()
    tile = torch.cat([torch.zeros_like(lists.full_indices), lists.partial_tiles + 1])
    rows = max(1, num_blocks(mask.seqlen_q))
    plane, row = owner // rows, owner % rows
    third = row % 3
    first = plane * per_plane + row // 3 * 2 + (third == 2)
    second = torch.where(third == 1, first + 1, strips)
    side = (third > 0).long()
    return _ListedBlocks(
        torch.cat([first, second]),
        block.repeat(2),
        torch.cat([side, torch.zeros_like(side)]),
        tile.repeat(2),
    )
