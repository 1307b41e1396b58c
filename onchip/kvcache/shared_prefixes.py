"""The tensors of a step in which groups of sequences read their shared pages once.

    sequence    pages                  group       own pages
    0           1 2 3 | 4              A: 1 2 3    4
    1           1 2 3 | 5 6            A           5 6
    2           7 8                    -           7 8
    3           9 10 | 11              B: 9 10     11
    4           9 10 | 12              B           12

A group fills slots of `rows` queries each; slots of one group read the same pages. The pages of a
slot are cut into `segments`, so that few slots use the whole device. All sizes are fixed by a
SharedShape, for CUDA graphs: unused slots have no pages, unused rows are computed and ignored. The
host passes a few int32 numbers; page tables and lengths are made from them on the device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class SharedShape(NamedTuple):
    """Sizes of the call over shared pages: segments * slots sequences of `rows` queries.
    segment_pages: pages that are worth a segment.
    """

    slots: int
    rows: int
    segments: int = 1
    segment_pages: int = 1

    def sizes(self, num_seqs: int, num_tokens: int) -> list[int]:
        """Numbers of `SharedSlots.numbers`: leaders, pages, rows, row_index and own_from."""
        return [self.slots, self.slots, self.slots * self.rows, num_tokens, num_seqs]

    def num_numbers(self, num_seqs: int, num_tokens: int) -> int:
        return sum(self.sizes(num_seqs, num_tokens))


class SharedSlot(NamedTuple):
    """Some queries of a group. leader: a sequence of the group; pages: how many they share; tokens:
    the indices of the queries among the tokens of the step.
    """

    leader: int
    pages: int
    tokens: Sequence[int]


class SharedPrefixes(NamedTuple):
    """The arguments of two calls of paged attention, and how their results belong together.

    page_table, seqlens: (segments * slots, segment pages) and (segments * slots,), of the shared
    pages; the first segments of all slots come first. own_table, own_seqlens: as in PagedBatch, of
    the pages that a sequence does not share. rows: int64 (slots * rows,), the token of each query.
    row_index: int32 (num_tokens,), the inverse; -1 for a token in no slot.
    """

    shape: SharedShape
    page_table: Tensor
    seqlens: Tensor
    own_table: Tensor
    own_seqlens: Tensor
    rows: Tensor
    row_index: Tensor


def pack_slots(
    slots: Sequence[SharedSlot], own_from: Sequence[int], shape: SharedShape, num_tokens: int
) -> list[int]:
    """The numbers that `share_prefixes` reads. own_from: the first page of each sequence that it
    does not share.
    """
    leaders, pages = [0] * shape.slots, [0] * shape.slots
    rows, row_index = [0] * (shape.slots * shape.rows), [-1] * num_tokens
    for i, slot in enumerate(slots):
        leaders[i], pages[i] = slot.leader, slot.pages
        at = i * shape.rows
        rows[at : at + len(slot.tokens)] = slot.tokens
        for row, token in enumerate(slot.tokens, at):
            row_index[token] = row
    return [*leaders, *pages, *rows, *row_index, *own_from]


def share_prefixes(
    page_table: Tensor,
    cache_seqlens: Tensor,
    numbers: Tensor,
    shape: SharedShape,
    page_size: int,
) -> SharedPrefixes:
    """Tables and lengths of a step, from the tables of all its pages: on their device, without
    waiting for it.
    """
    num_seqs, width = page_table.shape
    num_tokens = numbers.shape[0] - shape.num_numbers(num_seqs, 0)
    leaders, pages, rows, row_index, own_from = numbers.split(shape.sizes(num_seqs, num_tokens))
    columns = torch.arange(width, device=page_table.device)
    own = page_table.gather(1, (columns + own_from[:, None]).clamp_(max=width - 1))
    seqlens, segment = _cut(pages, shape, page_size)
    longest = min(width, max(-(-width // shape.segments), shape.segment_pages))
    places = (segment[..., None] + columns[:longest]).clamp_(max=width - 1)
    runs = page_table.index_select(0, leaders).expand(shape.segments, -1, -1)
    return SharedPrefixes(
        shape,
        runs.gather(2, places).flatten(0, 1),
        seqlens.flatten(),
        own,
        cache_seqlens - own_from * page_size,
        rows.long(),
        row_index,
    )


def _cut(pages: Tensor, shape: SharedShape, page_size: int) -> tuple[Tensor, Tensor]:
    """(segments, slots): tokens of each segment, int32, and its first page. The segments of a slot
    are equal but for the last, and at least segment_pages long.
    """
    size = ((pages + shape.segments - 1) // shape.segments).clamp_(min=shape.segment_pages)
    first = torch.arange(shape.segments, device=pages.device, dtype=torch.int32)[:, None] * size
    return (pages - first).clamp_(min=0).minimum(size) * page_size, first
