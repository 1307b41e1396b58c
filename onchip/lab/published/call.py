"""One head slice of a call as the papers see it: arrays in HBM, tiles of rows and keys, visibility.

Arrays are (batch, kv_heads, group_size, seqlen, dim). The papers have one head. Each query head of
a group loads its own keys, as in FlashAttention-2, so k and v are expanded views.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from onchip.core.backend import Result, accumulator_dtype, empty_result
from onchip.core.device import DeviceInfo
from onchip.core.problem import Problem, Tensors
from onchip.kernels.cpu.head_slice import HeadSlice, head_slices
from onchip.kernels.cpu.scores import Scorer, TileBounds
from onchip.kernels.tiles import TileConfig
from onchip.masks.blockmask import BLOCK
from onchip.masks.visibility import Visibility

from .ledger import Ledger, TileVisit
from .memory import Array, Span, Tile

OPTIONS = {
    *("causal", "window_size", "packed", "has_mask", "deterministic"),
    *("dropout_p", "has_positions", "first_head", "wide_grads"),
}
WORD_BYTES = 4  # a word of mask bits: 32 keys of a query


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    if problem.dtype == torch.float64 and device.type != "cpu":
        return "float64 is served on the CPU"
    return None


class PaperCall:
    """Arrays and tiles of one head slice."""

    problem: Problem
    book: Ledger
    head_slice: HeadSlice
    rule: Visibility
    scorer: Scorer
    wide: torch.dtype
    scratch: torch.dtype
    kv_heads: int
    q: Array
    k: Array
    v: Array

    def __init__(self, problem: Problem, x: Tensors, head_slice: HeadSlice, book: Ledger):
        self.problem, self.book, self.head_slice = problem, book, head_slice
        self.rule = head_slice.visibility
        self.scorer = Scorer(problem, x, head_slice)
        self.wide = accumulator_dtype(problem.dtype)
        self.scratch = book.scratch or self.wide
        k, v = (head_slice.take_keys(t).transpose(1, 2) for t in (x.k, x.v))
        self.kv_heads = k.shape[1]
        self.q = self.take_queries("q", x.q)
        group = self.q.shape[2]
        shared = lambda t: t.unsqueeze(2).expand(-1, -1, group, -1, -1)
        self.k, self.v = self._array("k", shared(k)), self._array("v", shared(v))
        mask = self.rule.mask
        self._status = None if mask is None else mask.status(self.rule.b, self.rule.h)

    def take_queries(self, name: str, t: Tensor) -> Array:
        """q, out, dout or dq of this head slice."""
        return self._array(name, self._group_heads(self.head_slice.take_queries(t).transpose(1, 2)))

    def take_rows(self, name: str, t: Tensor) -> Array:
        """lse or another number per row, as one column."""
        return self._array(name, self._group_heads(self.head_slice.take_rows(t))[..., None])

    def of_query_heads(self, name: str, t: Tensor) -> Array:
        """dk or dv with one per query head, (batch, seqlen_k, num_heads, dim)."""
        at = self.head_slice._replace(rows=self.head_slice.keys)
        return self._array(name, self._group_heads(at.take_queries(t).transpose(1, 2)))

    def new(self, name: str, columns: int, dtype: torch.dtype) -> Array:
        """An uninitialised array of one row per query."""
        return self._array(name, self.q.data.new_empty(*self.q.shape[:-1], columns, dtype=dtype))

    def row_tiles(self, tiles: TileConfig) -> list[Span]:
        return cuts(self.rule.seqlen_q, tiles.tile_m, self.rule.mask is not None)

    def key_tiles(self, tiles: TileConfig) -> list[Span]:
        return cuts(self.rule.seqlen_k, tiles.tile_n, self.rule.mask is not None)

    def visited_spans(self, rows: list[Span], skips: bool) -> list[list[Span]]:
        """For every tile of rows, the ranges of keys to visit. EMPTY blocks of a mask are always
        left out, and with `skips` also tiles that causal and window hide completely.
        """
        rule = self.rule if skips else self.rule._replace(causal=False, window_size=(None, None))
        return [rule.spans(*tile) for tile in rows]

    def mask_scores(self, s: Tile, rows: Span, keys: Span) -> Tile:
        """s with -inf where hidden."""
        self._read_bits(rows, keys)
        visible = self.rule.tile(*rows, *keys, s.x.device)
        if visible is None:
            return s
        return s.select(lambda x: x.masked_fill(~visible, -torch.inf))

    def apply_dropout(self, p: Tile, rows: Span, keys: Span) -> Tile:
        """p with dropout, drawn again from the seed: the dropout mask is never stored."""
        at = TileBounds(*rows, *keys)
        shape = p.x.shape
        return p.select(lambda x: self.scorer.apply_dropout(x.flatten(1, 2), at).view(shape))

    def report_visit(
        self, kernel: str, rows: Span, keys: Span, s: Tile, state: tuple[Tile, ...]
    ) -> None:
        """Call the ledger's watch function, if there is one."""
        if self.book.watch is None:
            return
        scores, m, l, acc = (x.x.flatten(1, 2) for x in (s, *state))
        first = self.head_slice.first_batch, self.head_slice.first_head
        so_far = self.book.read_bytes, self.book.write_bytes
        self.book.watch(TileVisit(kernel, *first, rows, keys, scores, m, l, acc, *so_far))

    def _array(self, name: str, t: Tensor) -> Array:
        return Array(self.book, name, t, self.wide)

    def _group_heads(self, t: Tensor) -> Tensor:
        return t.unflatten(1, (self.kv_heads, -1))

    def _read_bits(self, rows: Span, keys: Span) -> None:
        """Count the mask words of PARTIAL blocks, which every head reads."""
        if self._status is None:
            return
        mask_words = 0
        for i, (q0, q1) in blocks(rows):
            for j, (k0, k1) in blocks(keys):
                if self._status[i, j] == 1:
                    mask_words += (q1 - q0) * (-(-k1 // 32) - k0 // 32)
        batch, heads = self.q.shape[0], self.q.shape[1] * self.q.shape[2]
        if mask_words:
            self.book.reads["mask"] += mask_words * WORD_BYTES * batch * heads


def calls(problem: Problem, x: Tensors, book: Ledger) -> Iterator[PaperCall]:
    for head_slice in head_slices(problem, x):
        yield PaperCall(problem, x, head_slice, book)


def results(problem: Problem, x: Tensors) -> Result:
    return Result(*empty_result(problem, x))


def cuts(seqlen: int, tile: int, blocked: bool) -> list[Span]:
    """Ranges of at most `tile`. With a mask no range spans two of its blocks, so that each is
    EMPTY, PARTIAL or FULL.
    """
    size = BLOCK if blocked else max(seqlen, 1)
    return [
        (start, min(start + tile, first + size, seqlen))
        for first in range(0, seqlen, size)
        for start in range(first, min(first + size, seqlen), tile)
    ]


def blocks(span: Span) -> Iterator[tuple[int, Span]]:
    """The mask blocks that a range touches, and its part in each."""
    for i in range(span[0] // BLOCK, -(-span[1] // BLOCK)):
        yield i, (max(span[0], i * BLOCK), min(span[1], (i + 1) * BLOCK))


def overlaps(keys: Span, spans: list[Span]) -> bool:
    return any(lo < keys[1] and keys[0] < hi for lo, hi in spans)


def convert(scratch: Array, out: Array) -> None:
    """One more pass over an array that holds sums in more precision than the result has."""
    everything = (0, scratch.shape[-2])
    source = Array(scratch.book, f"{scratch.name}.convert", scratch.data)
    Array(out.book, f"{out.name}.convert", out.data).store(source.load(everything), everything)
