"""Tokens for heads: the all-to-all of Ulysses, one message from each rank to each other.

Before it a rank has all heads of its own tokens; after it, some heads of all tokens, in the order
of their positions. Heads need not divide the ranks, and a key head goes to every rank that needs
it: on the way back what several ranks made of one head is summed.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.parallel.comm import Comm

HeadSpan = tuple[int, int]  # heads [lo, hi)
TensorSpec = tuple[Tensor, torch.Size]  # a tensor like this one, but of this size


def assign_heads(num_heads: int, num_kv_heads: int, size: int) -> list[HeadSpan]:
    """Which query heads each rank gets: runs as even as they can be, of whole groups where these
    are as even. Ranks beyond the number of heads get none.
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
    serves it. Both count from the first of the run.
    """

    heads: slice
    kv_heads: slice


def split_by_kv_head(heads: HeadSpan, group_size: int) -> list[HeadGroup]:
    """The calls that serve a run of heads: whole groups at once, cut ones at its ends alone."""
    lo, hi = heads
    first, last = -(-lo // group_size) * group_size, hi // group_size * group_size
    edges = sorted({lo, hi} | ({first, last} if first <= last else set()))
    base = lo // group_size
    return [
        HeadGroup(slice(a - lo, b - lo), slice(a // group_size - base, -(-b // group_size) - base))
        for a, b in pairwise(edges)
    ]


class HeadAllToAll(NamedTuple):
    """Who has which tokens: rows[r] are those of rank r, int64 on the device, among all tokens of
    the group.
    """

    comm: Comm
    rows: tuple[Tensor, ...]

    @property
    def seqlen(self) -> int:
        return sum(map(len, self.rows))

    def to_heads(
        self, tensors: Sequence[Tensor], spans: Sequence[Sequence[HeadSpan]]
    ) -> list[Tensor]:
        """All tokens of some heads, (batch, seqlen, my heads, dim), from all heads of my tokens,
        (batch, tokens, heads, dim). Tensor i gives the heads spans[i][r] to rank r; tensors of
        wider types come first.
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
        """The way back: all heads of my tokens from some heads of all. A head that several ranks
        have comes back as the sum of theirs, in their order.
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
    """Tensors like these with so many tokens and heads."""
    size = lambda t, lo, hi: (t.shape[0], tokens, hi - lo, t.shape[3])
    return [(t, torch.Size(size(t, *span))) for t, span in zip(tensors, heads, strict=True)]


def _nbytes(sized: TensorSpec) -> int:
    like, size = sized
    return size.numel() * like.element_size()


def _pack(parts: list[Tensor]) -> Tensor:
    """The bytes of all parts, one after another: one message. Wider types come first, so that every
    part lies where its type may.
    """
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def _unpack(buffer: Tensor, sizes: list[TensorSpec]) -> list[Tensor]:
    parts = buffer.split([_nbytes(sized) for sized in sizes])
    return [p.view(like.dtype).view(size) for p, (like, size) in zip(parts, sizes, strict=True)]
