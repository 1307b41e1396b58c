"""Count the tiles of scores that an algorithm visits: by spans in each row of tiles, not one by
one, so that a million tokens are fast.
"""

from collections.abc import Iterator
from typing import NamedTuple

from onchip.kernels.tiles import TileConfig
from onchip.masks import BLOCK, Visibility


class Visits(NamedTuple):
    """One head: its rows and keys; and, summed over the visited tiles, their rows, keys, cells, and
    the 32-bit words of their mask bits.
    """

    seqlen_q: int
    seqlen_k: int
    rows: int
    keys: int
    cells: int
    mask_words: int


def count_visits(rule: Visibility, tiles: TileConfig, skips: bool) -> Visits:
    """Count the visits. skips: whether tiles that causal and window hide completely are skipped."""
    rule = rule if skips else rule._replace(causal=False, window_size=(None, None))
    grid = _Grid(rule, tiles)
    rows = keys = cells = mask_words = 0
    for q0, q1 in grid.row_tiles():
        for lo, hi in rule.spans(q0, q1):
            start, stop = grid.widen_to_tiles(lo, hi)
            rows += (q1 - q0) * grid.tiles_between(start, stop)
            keys += stop - start
            cells += (q1 - q0) * (stop - start)
            mask_words += (q1 - q0) * grid.mask_words(q0 // BLOCK, start, stop)
    return Visits(rule.seqlen_q, rule.seqlen_k, rows, keys, cells, mask_words)


class _Grid:
    """The tiles of a rule; with a mask, no tile spans two of its blocks."""

    def __init__(self, rule: Visibility, tiles: TileConfig):
        self.rule, (self.tile_m, self.tile_n) = rule, tiles
        self.period_q = BLOCK if rule.mask is not None else max(1, rule.seqlen_q)
        self.period_k = BLOCK if rule.mask is not None else max(1, rule.seqlen_k)
        self.status = None if rule.mask is None else rule.mask.status(rule.b, rule.h)

    def row_tiles(self) -> Iterator[tuple[int, int]]:
        for first in range(0, self.rule.seqlen_q, self.period_q):
            end = min(first + self.period_q, self.rule.seqlen_q)
            yield from ((q0, min(q0 + self.tile_m, end)) for q0 in range(first, end, self.tile_m))

    def widen_to_tiles(self, lo: int, hi: int) -> tuple[int, int]:
        """The keys of the tiles that [lo, hi) touches."""
        block, rest = divmod(hi - 1, self.period_k)
        end = min((rest // self.tile_n + 1) * self.tile_n, self.period_k)
        stop = min(block * self.period_k + end, self.rule.seqlen_k)
        return lo - lo % self.period_k % self.tile_n, stop

    def tiles_between(self, start: int, stop: int) -> int:
        return self._index(stop - 1) - self._index(start) + 1

    def _index(self, k: int) -> int:
        block, rest = divmod(k, self.period_k)
        return block * -(-self.period_k // self.tile_n) + rest // self.tile_n

    def mask_words(self, block_q: int, start: int, stop: int) -> int:
        """Mask words per row of the PARTIAL blocks among these tiles, counted for each tile."""
        if self.status is None:
            return 0
        return sum(
            _count_words(max(start, j * BLOCK), min(stop, (j + 1) * BLOCK), self.tile_n)
            for j in range(start // BLOCK, -(-stop // BLOCK))
            if self.status[block_q, j] == 1
        )


def _count_words(start: int, stop: int, tile: int) -> int:
    """32-bit words that hold the bits of keys [start, stop), read in tiles."""
    return sum(-(-min(k + tile, stop) // 32) - k // 32 for k in range(start, stop, tile))


def count_row_mask_words(rule: Visibility, tile: int) -> int:
    """Mask words of all rows, if tiles of keys ignore the mask's blocks (standard attention)."""
    if rule.mask is None:
        return 0
    total, (seqlen_q, seqlen_k) = 0, (rule.seqlen_q, rule.seqlen_k)
    for i, j in (rule.mask.status(rule.b, rule.h) == 1).nonzero().tolist():
        rows = min((i + 1) * BLOCK, seqlen_q) - i * BLOCK
        start, stop = j * BLOCK, min((j + 1) * BLOCK, seqlen_k)
        cuts = [start, *range(start - start % tile + tile, stop, tile), stop]
        total += rows * sum(_count_words(a, b, b - a) for a, b in zip(cuts, cuts[1:], strict=False))
    return total


def count_page_ids(rule: Visibility, tiles: TileConfig, page_size: int) -> int:
    """Page ids that the visited tiles read, counted for each tile."""
    grid, ids = _Grid(rule, tiles), 0
    for q0, q1 in grid.row_tiles():
        for start, stop in (grid.widen_to_tiles(*span) for span in rule.spans(q0, q1)):
            for k0 in range(start, stop, tiles.tile_n):
                ids += -(-min(k0 + tiles.tile_n, stop) // page_size) - k0 // page_size
    return ids


def even_parts(length: int, num: int) -> list[tuple[int, int]]:
    """A range in `num` parts, as even as possible."""
    return [(length * i // num, length * (i + 1) // num) for i in range(num)]
