"""The all-to-all of Ulysses: tokens for heads, one message from each rank to each other rank.

Before it a rank has all heads of its own tokens; after it, some heads of all tokens, in the order
of their positions. The number of heads need not divide by the ranks. A key head is sent to every
rank that needs it; on the way back the tensors that several ranks have for one head are summed.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.parallel.comm import Comm

HeadSpan = tuple[int, int]  # heads [lo, hi)
TensorSpec = tuple[Tensor, torch.Size]  # (tensor with the dtype and device, size)


def assign_heads(num_heads: int, num_kv_heads: int, size: int) -> list[HeadSpan]:
    """The query heads of each rank: runs as even as possible, of whole GQA groups where this is as
    even. Ranks beyond the number of heads get none.
    """
    group_size = num_heads // num_kv_heads
    whole = -(-num_kv_heads // size) * group_size <= -(-num_heads // size)
    unit, count = (group_size, num_kv_heads) if whole else (1, num_heads)
    return [(unit * (r * count // size), unit * ((r + 1) * count // size)) for r in range(size)]


def kv_heads_of(heads: HeadSpan, group_size: int) -> HeadSpan:
    """The key heads that a run of query heads reads."""
    lo, hi = heads
    return (lo // group_size, -(-hi // group_size)) if lo < hi else (0, 0)


class HeadGroup(NamedTuple):
    """Part of a run of heads in which every key head has equally many query heads, so that one call
    computes it. Both slices count from the first head of the run.
    """

    heads: slice
    kv_heads: slice


def split_by_kv_head(heads: HeadSpan, group_size: int) -> list[HeadGroup]:
    """The calls of a run of heads: one for all whole GQA groups, one for each cut group at its
    ends.
    """
    lo, hi = heads
    first, last = -(-lo // group_size) * group_size, hi // group_size * group_size
    edges = sorted({lo, hi} | ({first, last} if first <= last else set()))
    base = lo // group_size
    return [
        HeadGroup(slice(a - lo, b - lo), slice(a // group_size - base, -(-b // group_size) - base))
        for a, b in pairwise(edges)
    ]


class HeadAllToAll(NamedTuple):
    """The exchange of a group. rows[r]: the tokens of rank r among all tokens of the group, int64
    on the device.
    """

    comm: Comm
    rows: tuple[Tensor, ...]

    @property
    def seqlen(self) -> int:
        return sum(map(len, self.rows))

    def to_heads(
        self, tensors: Sequence[Tensor], spans: Sequence[Sequence[HeadSpan]]
    ) -> list[Tensor]:
        """(batch, tokens of this rank, all heads, dim) -> (batch, all tokens, heads of this rank,
        dim). Rank r gets the heads spans[i][r] of tensor i. Tensors of wider types must be first.
        """
        each = list(zip(tensors, spans, strict=True))
        mine = [s[self.comm.rank] for s in spans]
        send = [_pack([t[:, :, slice(*s[r])] for t, s in each]) for r in range(self.comm.size)]
        specs = [_sizes(tensors, len(rows), mine) for rows in self.rows]
        whole = [t.new_empty(size) for t, size in _sizes(tensors, self.seqlen, mine)]
        for rows, parts in zip(self.rows, self._exchange(send, specs), strict=True):
            for t, part in zip(whole, parts, strict=True):
                t[:, rows] = part
        return whole

    def to_tokens(
        self, tensors: Sequence[Tensor], spans: Sequence[Sequence[HeadSpan]]
    ) -> list[Tensor]:
        """The inverse: (batch, all tokens, heads of this rank, dim) -> (batch, tokens of this rank,
        all heads, dim). A head that several ranks have becomes their sum, in rank order.
        """
        tokens = len(self.rows[self.comm.rank])
        send = [_pack([t[:, rows] for t in tensors]) for rows in self.rows]
        specs = [_sizes(tensors, tokens, [s[r] for s in spans]) for r in range(self.comm.size)]
        all_heads = [(0, max(hi for _, hi in s)) for s in spans]
        whole = [t.new_zeros(size) for t, size in _sizes(tensors, tokens, all_heads)]
        for r, parts in enumerate(self._exchange(send, specs)):
            for t, s, part in zip(whole, spans, parts, strict=True):
                t[:, :, slice(*s[r])] += part
        return whole

    def _exchange(self, send: list[Tensor], specs: list[list[TensorSpec]]) -> list[list[Tensor]]:
        recv = [send[0].new_empty(sum(map(_nbytes, sizes))) for sizes in specs]
        self.comm.all_to_all(send, recv).wait()
        return [_unpack(buffer, sizes) for buffer, sizes in zip(recv, specs, strict=True)]


def _sizes(tensors: Sequence[Tensor], tokens: int, heads: Sequence[HeadSpan]) -> list[TensorSpec]:
    """Specs of tensors like these, with `tokens` tokens and these heads."""
    size = lambda t, lo, hi: (t.shape[0], tokens, hi - lo, t.shape[3])
    return [(t, torch.Size(size(t, *span))) for t, span in zip(tensors, heads, strict=True)]


def _nbytes(sized: TensorSpec) -> int:
    like, size = sized
    return size.numel() * like.element_size()


def _pack(parts: list[Tensor]) -> Tensor:
    """The bytes of all parts in one message. Wider types are first: otherwise a part could begin at
    an address that is not aligned for its type.
    """
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def _unpack(buffer: Tensor, sizes: list[TensorSpec]) -> list[Tensor]:
    parts = buffer.split([_nbytes(sized) for sized in sizes])
    return [p.view(like.dtype).view(size) for p, (like, size) in zip(parts, sizes, strict=True)]
