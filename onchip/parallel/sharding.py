"""Layouts: the positions of a sequence that each rank holds, for any length and any number of
ranks.

    16 positions on 4 ranks    rank 0         rank 1         rank 2         rank 3
      contiguous               0 1 2 3        4 5 6 7        8 9 10 11      12 13 14 15
      zigzag                   0 1 14 15      2 3 12 13      4 5 10 11      6 7 8 9
      striped                  0 4 8 12       1 5 9 13       2 6 10 14      3 7 11 15

Positions ascend inside a rank. So a query that sees an interval of the sequence's keys sees an
interval of any rank's keys, and a causal mask over the sequence is a causal mask over a rank's own
keys.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from onchip.masks import BLOCK, BlockMask, Mask, build
from onchip.masks.bits import unpack

Piece = tuple[int, int, int]  # (start, stop, step) of a slice
IGNORE_INDEX = -100  # the label that torch's cross_entropy ignores


class Layout:
    """The positions of `size` ranks. Every position belongs to one rank."""

    size: int

    def pieces(self, rank: int, seqlen: int) -> list[Piece]:
        """The positions of `rank` in a sequence of this length, as ascending slices."""
        raise NotImplementedError

    def positions(self, rank: int, seqlen: int) -> Tensor:
        """int64, ascending, on the CPU: `rank` holds x[positions] of a sequence x."""
        self._check(rank, seqlen)
        ranges = [torch.arange(*piece) for piece in self.pieces(rank, seqlen)]
        return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)

    def length(self, rank: int, seqlen: int) -> int:
        """The number of positions of `rank`."""
        return sum(len(range(*piece)) for piece in self.pieces(rank, seqlen))

    def lengths(self, seqlen: int) -> list[int]:
        """The number of positions of every rank."""
        return [self.length(rank, seqlen) for rank in range(self.size)]

    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """The part of x on `rank`; x has the whole sequence along `dim`. Differentiable; a view
        where the rank has one piece.
        """
        self._check(rank, x.shape[dim])
        before = (slice(None),) * (dim % x.dim())
        pieces = self.pieces(rank, x.shape[dim]) or [(0, 0, 1)]
        parts = [x[(*before, slice(*piece))] for piece in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def unshard(self, parts: list[Tensor], dim: int = 1) -> Tensor:
        """The whole sequence from the parts of all ranks, in rank order: the inverse of `shard`."""
        if len(parts) != self.size:
            raise ValueError(f"the layout has {self.size} ranks, got the parts of {len(parts)}")
        seqlen = sum(part.shape[dim] for part in parts)
        for rank, part in enumerate(parts):
            if part.shape[dim] != self.length(rank, seqlen):
                raise ValueError(
                    f"rank {rank} holds {self.length(rank, seqlen)} of {seqlen} positions, its"
                    f" part has {part.shape[dim]}"
                )
        order = torch.cat([self.positions(rank, seqlen) for rank in range(self.size)])
        back = torch.empty_like(order)
        back[order] = torch.arange(seqlen)
        return torch.cat(list(parts), dim).index_select(dim, back.to(parts[0].device))

    def position_ids(self, rank: int, seqlen: int, cu_seqlens: Tensor | None = None) -> Tensor:
        """int64: the positions of the rank's tokens in the sequence, or in their own document, for
        rotary embeddings.
        """
        positions = self.positions(rank, seqlen)
        if cu_seqlens is None:
            return positions
        starts = document_offsets(cu_seqlens, seqlen)
        return positions - starts[documents_of(positions, starts)]

    def labels(
        self, tokens: Tensor, rank: int, dim: int = -1, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """The rank's part of the labels: the next token of each of `tokens`, the whole sequence.
        The last token of the sequence, or of a document, has IGNORE_INDEX. Labels must be shifted
        before sharding, because the token after a rank's last one is on another rank.
        """
        labels = tokens.roll(-1, dim)
        seqlen = tokens.shape[dim]
        ends = (
            torch.tensor([seqlen])
            if cu_seqlens is None
            else document_offsets(cu_seqlens, seqlen)[1:]
        )
        last = ends[ends > 0] - 1
        labels.index_fill_(dim, last.to(labels.device), IGNORE_INDEX)
        return self.shard(labels, rank, dim)

    def cu_seqlens(self, rank: int, cu_seqlens: Tensor) -> Tensor:
        """int32 offsets of the documents in the rank's part. Document d of the sequence is document
        d here, and may be empty.
        """
        starts = document_offsets(cu_seqlens)
        positions = self.positions(rank, int(starts[-1]))
        return torch.searchsorted(positions, starts).int()

    def _check(self, rank: int, seqlen: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{rank=} is not one of the layout's {self.size} ranks")
        if seqlen < 0:
            raise ValueError(f"{seqlen=} must not be negative")


@dataclass(frozen=True)
class ContiguousLayout(Layout):
    """Rank r has chunk r of `size`. Balanced only if all queries see equally many keys."""

    size: int
    multiple: int = 1

    def pieces(self, rank: int, seqlen: int) -> list[Piece]:
        return _join_pieces([_chunk(rank, self.size, seqlen, self.multiple)])


@dataclass(frozen=True)
class ZigzagLayout(Layout):
    """Rank r has chunk r and chunk 2 * size - 1 - r of 2 * size: under a causal mask all ranks have
    equal work.
    """

    size: int
    multiple: int = 1

    def pieces(self, rank: int, seqlen: int) -> list[Piece]:
        chunks = 2 * self.size
        both = (rank, chunks - 1 - rank)
        return _join_pieces([_chunk(i, chunks, seqlen, self.multiple) for i in both])


@dataclass(frozen=True)
class StripedLayout(Layout):
    """Position t is on rank t % size."""

    size: int

    def pieces(self, rank: int, seqlen: int) -> list[Piece]:
        return [(rank, seqlen, self.size)] if rank < seqlen else []


class BalancedLayout(Layout):
    """Blocks of 128 queries, sorted by visible keys under a mask and assigned to ranks 0, 1, ...,
    n, n, ..., 1, 0 in turns. The numbers of blocks differ by at most one, and work is about equal.
    """

    size: int
    mask: Mask | BlockMask

    def __init__(self, size: int, mask: Mask | BlockMask):
        self.size, self.mask = size, mask
        self._assigned: dict[int, list[list[Piece]]] = {}

    def pieces(self, rank: int, seqlen: int) -> list[Piece]:
        if seqlen not in self._assigned:
            self._assigned[seqlen] = self._assign_blocks(seqlen)
        return self._assigned[seqlen][rank]

    def _assign_blocks(self, seqlen: int) -> list[list[Piece]]:
        mask = build(self.mask, *self._planes(), seqlen, seqlen)
        order = visible_cells(mask).sort(descending=True, stable=True).indices
        turn = torch.arange(len(order)) % (2 * self.size)
        ranks = torch.minimum(turn, 2 * self.size - 1 - turn)
        owned = [order[ranks == rank].sort().values.tolist() for rank in range(self.size)]
        block = lambda i: (i * BLOCK, min((i + 1) * BLOCK, seqlen), 1)
        return [_join_pieces([block(i) for i in blocks]) for blocks in owned]

    def __repr__(self) -> str:
        return f"BalancedLayout(size={self.size}, mask={self.mask})"

    def _planes(self) -> tuple[int, int]:
        return self.mask.shape[:2] if isinstance(self.mask, BlockMask) else (1, 1)


def contiguous(size: int, multiple: int = 1) -> Layout:
    """Rank r has chunk r of `size`. Chunks begin at multiples of `multiple`."""
    return ContiguousLayout(_check_positive("size", size), _check_positive("multiple", multiple))


def zigzag(size: int, multiple: int = 1) -> Layout:
    """Rank r has chunks r and 2 size - 1 - r of 2 size: equal work on all ranks under a causal
    mask.

    multiple: chunks begin at multiples of it. With 128 block masks are cut between their blocks.
    """
    return ZigzagLayout(_check_positive("size", size), _check_positive("multiple", multiple))


def striped(size: int) -> Layout:
    """Rank r has positions r, r + size, r + 2 size, ..."""
    return StripedLayout(_check_positive("size", size))


def balanced(size: int, mask: Mask | BlockMask) -> Layout:
    """Blocks of 128 positions, assigned by the work of their queries under a mask. The mask must be
    the same for all batch entries, or a BlockMask, of which all planes count.
    """
    if not isinstance(mask, (Mask, BlockMask)):
        raise ValueError(f"mask must be a Mask or a BlockMask, got {type(mask).__name__}")
    return BalancedLayout(_check_positive("size", size), mask)


LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}


def as_layout(layout: str | Layout, size: int) -> Layout:
    """A layout of `size` ranks, from a layout or its name."""
    if isinstance(layout, str) and layout in LAYOUTS:
        return LAYOUTS[layout](size)
    if not isinstance(layout, Layout):
        names = ", ".join(map(repr, LAYOUTS))
        raise ValueError(f"{layout=} must be a Layout or one of {names}")
    if layout.size != size:
        raise ValueError(f"the layout is for {layout.size} ranks, the group has {size}")
    return layout


def document_offsets(cu_seqlens: Tensor, seqlen: int | None = None) -> Tensor:
    """cu_seqlens as int64 on the host, checked: ascending from 0 to seqlen."""
    starts = torch.as_tensor(cu_seqlens).to("cpu", torch.int64)
    if starts.dim() != 1 or not len(starts):
        raise ValueError(f"cu_seqlens must be (documents + 1,), got shape {tuple(starts.shape)}")
    if starts[0] != 0 or bool((starts.diff() < 0).any()):
        raise ValueError(f"cu_seqlens must start at 0 and never fall, got {starts.tolist()}")
    if seqlen is not None and starts[-1] != seqlen:
        raise ValueError(f"cu_seqlens must end at {seqlen=}, got {int(starts[-1])}")
    return starts


def documents_of(positions: Tensor, starts: Tensor) -> Tensor:
    """The document of each position; starts: the offsets of all documents."""
    return torch.searchsorted(starts[1:], positions.contiguous(), right=True)


def visible_cells(mask: BlockMask) -> Tensor:
    """int64 (query blocks,): the visible (query, key) pairs of each block of queries, over all
    planes of the mask.
    """
    lists, n_q = mask.rows, -(-mask.seqlen_q // BLOCK)
    per_tile = unpack(mask.tiles.cpu()).sum((1, 2))
    rows = (mask.seqlen_q - torch.arange(n_q) * BLOCK).clamp(max=BLOCK)
    cells = torch.zeros(n_q, dtype=torch.int64)
    full_i = _block_of_entries(lists.full_offsets.cpu(), n_q)
    cols = (mask.seqlen_k - lists.full_indices.cpu().long() * BLOCK).clamp(max=BLOCK)
    cells.index_add_(0, full_i, rows[full_i] * cols)
    partial_i = _block_of_entries(lists.partial_offsets.cpu(), n_q)
    return cells.index_add_(0, partial_i, per_tile[lists.partial_tiles.cpu().long()])


def _block_of_entries(row_offsets: Tensor, rows: int) -> Tensor:
    """The query block of every entry, for (planes_b, planes_h, rows + 1) offsets."""
    counts = row_offsets.long().diff().reshape(-1)
    return torch.arange(len(counts)).remainder(max(rows, 1)).repeat_interleave(counts)


def _chunk(i: int, chunks: int, seqlen: int, multiple: int) -> Piece:
    """Chunk i of `chunks`. Chunks differ by at most one unit of `multiple` positions."""
    units = -(-seqlen // multiple)
    edge = lambda j: min(seqlen, j * units // chunks * multiple)
    return edge(i), edge(i + 1), 1


def _join_pieces(pieces: list[Piece]) -> list[Piece]:
    """Ascending pieces of step 1 without empty ones; adjacent ones are joined."""
    runs: list[Piece] = []
    for start, stop, _ in pieces:
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]
        if start < stop:
            runs.append((start, stop, 1))
    return runs


def _check_positive(name: str, number: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"{name}={number!r} must be an int of at least 1")
    return number
