"""Which positions of a sequence each rank holds, for any length: no layout asks that anything
divides.

Inside a rank positions ascend. So a query that sees an interval of the sequence's keys sees an
interval of any rank's keys, and under a causal mask a rank's own keys are plainly causal.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from onchip.masks import BLOCK, BlockMask, Mask, build
from onchip.masks.bits import unpack

Piece = tuple[int, int, int]  # start, stop, step, as of a slice
IGNORE_INDEX = -100  # the label that torch's cross_entropy leaves out


class Layout:
    """The positions of `size` ranks. Every position belongs to one rank."""

    size: int

    def pieces(self, rank: int, seqlen: int) -> list[Piece]:
        """What `rank` holds of a sequence of this length, in ascending order."""
        raise NotImplementedError

    def positions(self, rank: int, seqlen: int) -> Tensor:
        """int64, ascending, on the CPU: `rank` holds x[positions] of a sequence x."""
        self._check(rank, seqlen)
        ranges = [torch.arange(*piece) for piece in self.pieces(rank, seqlen)]
        return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.int64)

    def length(self, rank: int, seqlen: int) -> int:
        """How many positions `rank` holds."""
        return sum(len(range(*piece)) for piece in self.pieces(rank, seqlen))

    def lengths(self, seqlen: int) -> list[int]:
        """The same of every rank."""
        return [self.length(rank, seqlen) for rank in range(self.size)]

    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """The part of x that `rank` holds; x has the whole sequence along `dim`. Differentiable; a
        view where the rank holds one piece.
        """
        self._check(rank, x.shape[dim])
        before = (slice(None),) * (dim % x.dim())
        pieces = self.pieces(rank, x.shape[dim]) or [(0, 0, 1)]
        parts = [x[(*before, slice(*piece))] for piece in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def unshard(self, parts: list[Tensor], dim: int = 1) -> Tensor:
        """The whole of the parts of all ranks, in rank order: the inverse of `shard`."""
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
        """int64: where the rank's tokens stand in the sequence, or in their own document: what
        rotary embeddings need.
        """
        positions = self.positions(rank, seqlen)
        if cu_seqlens is None:
            return positions
        starts = document_offsets(cu_seqlens, seqlen)
        return positions - starts[documents_of(positions, starts)]

    def labels(
        self, tokens: Tensor, rank: int, dim: int = -1, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """The rank's share of the next tokens of `tokens`, the whole sequence: IGNORE_INDEX after the
        last token of the sequence, or of a document. (Shifted after sharding, a rank would lack the
        token that another one holds.)
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
        """int32 offsets of the documents in the rank's part: document d of the sequence is document
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
    """Rank r holds the r-th chunk. Balanced where every query sees as much as every other."""

    size: int
    multiple: int = 1

    def pieces(self, rank: int, seqlen: int) -> list[Piece]:
        return _join_pieces([_chunk(rank, self.size, seqlen, self.multiple)])


@dataclass(frozen=True)
class ZigzagLayout(Layout):
    """Of 2 * size chunks rank r holds the r-th and the r-th from the end: under a causal mask all
    have as much to do.
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
    """Blocks of 128 queries, sorted by how many keys they see under a mask and dealt in turns,
    there and back: all ranks have as many blocks, up to one, and about as much to do.
    """

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
    """Rank r holds the r-th of `size` chunks, which begin at multiples of `multiple`."""
    return ContiguousLayout(_check_positive("size", size), _check_positive("multiple", multiple))


def zigzag(size: int, multiple: int = 1) -> Layout:
    """Rank r holds chunks r and 2 size - 1 - r of 2 size: a causal mask costs all ranks the same.

    multiple: chunks begin at multiples of it. 128 lets block masks be cut along their blocks.
    """
    return ZigzagLayout(_check_positive("size", size), _check_positive("multiple", multiple))


def striped(size: int) -> Layout:
    """Rank r holds positions r, r + size, r + 2 size, ..."""
    return StripedLayout(_check_positive("size", size))


def balanced(size: int, mask: Mask | BlockMask) -> Layout:
    """Blocks of 128 positions dealt by the work that a mask gives their queries. The mask must be
    the same for all batch entries, or a BlockMask, of which all planes count.
    """
    if not isinstance(mask, (Mask, BlockMask)):
        raise ValueError(f"mask must be a Mask or a BlockMask, got {type(mask).__name__}")
    return BalancedLayout(_check_positive("size", size), mask)


LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}


def as_layout(layout: str | Layout, size: int) -> Layout:
    """A layout of `size` ranks, given itself or by its name."""
    if isinstance(layout, str) and layout in LAYOUTS:
        return LAYOUTS[layout](size)
    if not isinstance(layout, Layout):
        names = ", ".join(map(repr, LAYOUTS))
        raise ValueError(f"{layout=} must be a Layout or one of {names}")
    if layout.size != size:
        raise ValueError(f"the layout is for {layout.size} ranks, the group has {size}")
    return layout


def document_offsets(cu_seqlens: Tensor, seqlen: int | None = None) -> Tensor:
    """cu_seqlens as int64 on the host, checked: from 0 to seqlen, never falling."""
    starts = torch.as_tensor(cu_seqlens).to("cpu", torch.int64)
    if starts.dim() != 1 or not len(starts):
        raise ValueError(f"cu_seqlens must be (documents + 1,), got shape {tuple(starts.shape)}")
    if starts[0] != 0 or bool((starts.diff() < 0).any()):
        raise ValueError(f"cu_seqlens must start at 0 and never fall, got {starts.tolist()}")
    if seqlen is not None and starts[-1] != seqlen:
        raise ValueError(f"cu_seqlens must end at {seqlen=}, got {int(starts[-1])}")
    return starts


def documents_of(positions: Tensor, starts: Tensor) -> Tensor:
    """The document of each position, given the offsets of all."""
    return torch.searchsorted(starts[1:], positions.contiguous(), right=True)


def visible_cells(mask: BlockMask) -> Tensor:
    """int64 (query blocks,): the (query, key) pairs that each block of queries sees, over all
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
    """The i-th of `chunks`, which differ by at most one unit of `multiple` positions."""
    units = -(-seqlen // multiple)
    edge = lambda j: min(seqlen, j * units // chunks * multiple)
    return edge(i), edge(i + 1), 1


def _join_pieces(pieces: list[Piece]) -> list[Piece]:
    """Ascending pieces of step 1 without the empty ones, neighbours as one."""
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
