"""Block masks for three warpgroups of a program: lists of key blocks for strips of 192 queries.

        block rows of 128        strips of 192        warpgroups of 64
        row 0  [  0, 128)   ->   strip 0 [0, 192)     rows 0, 0, 1
        row 1  [128, 256)   ->   strip 1 [192, 384)   rows 1, 2, 2
        row 2  [256, 384)

A strip covers two block rows, and each row may list blocks that the other does not. The entries of
a strip are the blocks that both rows list, then the blocks of one row alone, alternating between
the rows. A kernel walks them from the last to the first. So the surplus of the longer row comes
first, before the other row's warpgroups start; after that, a warpgroup that has no part in an entry
has a part in the next one.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from onchip.masks.bits import BLOCK
from onchip.masks.blockmask import BlockMask, flat_offsets, num_blocks, owners
from onchip.masks.deferred import version_of

UNSEEN = -1
FAR, CUT, BIT_TILE = 1, 2, 4  # flags: an entry's value in a row is their sum
ENTRY = 3  # numbers per entry


class MaskStrips(NamedTuple):
    """heads: of each strip its first entry, and the numbers of entries that both rows list, the
    first row alone, the second row alone. entries: a key block, and its value in each of the two
    rows: UNSEEN, or a sum of FAR if the next entry in walking order belongs to the other row alone;
    CUT if the keys end within the block; BIT_TILE times the number of its bit tile, counted from 1,
    or 0 if the whole block is visible. Entry 0 belongs to no strip: it makes looking one entry
    ahead safe. shared: the average fraction of loaded tiles that a warpgroup has a part in; 1 if
    the host could not wait for that number.
    """

    heads: Tensor  # (planes_b, planes_h, strips, 4), int32
    entries: Tensor  # (1 + at least the number of entries, ENTRY), int32
    shared: float


_CACHE = WeakTensorKeyDictionary()  # tensor of the mask -> (identity of the source, strips)


def strips_of(mask: BlockMask) -> MaskStrips:
    """The strips of a mask, built once. The host waits for them, because the next call may be on
    another stream. Strips built during a CUDA graph capture are not cached: their values exist only
    after the graph is replayed.
    """
    key = mask.rows.full_offsets
    source = [(id(t), version_of(t)) for t in mask.rows], mask.seqlen_q, mask.seqlen_k
    cached = _CACHE.get(key)
    if cached is not None and cached[0] == source:
        return cached[1]
    recorded = key.is_cuda and torch.cuda.is_current_stream_capturing()
    strips = _build(mask)
    if not recorded:
        strips = strips._replace(shared=_load_share(mask, strips))
        _CACHE[key] = source, strips
    return strips


def _load_share(mask: BlockMask, strips: MaskStrips) -> float:
    """A block row belongs to two of the three warpgroups for which a strip loads its tiles."""
    loaded = 3 * int(strips.heads[..., 1:].sum())
    return 2 * (mask.num_full + mask.num_partial) / loaded if loaded else 1.0


class _ListedBlocks(NamedTuple):
    """Blocks of a strip, each once for each row that lists it."""

    strip: Tensor
    block: Tensor
    side: Tensor  # 0 or 1: the first or the second row of the strip
    tile: Tensor  # counted from 1; 0: no bit tile


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
    turn = rank + side  # at most so many entries of the other row come before it
    alone = counts[strip, 0] + rank + torch.minimum(turn, others)
    start = before.sum(1) + 1
    at = start[strip] + torch.where(both, rank, alone)
    far = ~both & (turn > 0) & (turn <= others)
    cut = block == seqlen_k // BLOCK  # the last block, if it is not full
    part = tile * BIT_TILE + cut * CUT + far * FAR
    entries = torch.full((1 + cell.numel(), ENTRY), UNSEEN, dtype=torch.int32, device=cell.device)
    entries[0] = 0
    entries[at, 0] = block.int()
    entries[at, 1 + side] = part.int()
    heads = torch.cat([start[:strips, None], counts[:strips]], 1).int()
    return MaskStrips(heads.view(planes_b, planes_h, per_plane, 4), entries, 1.0)


def _list_blocks(mask: BlockMask, per_plane: int, strips: int) -> _ListedBlocks:
    """Of three block rows the middle one is the second row of a strip and the first of the next.
    The other rows have no second strip: they get the dummy strip number `strips`.
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
