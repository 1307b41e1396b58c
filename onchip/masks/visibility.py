"""The keys that a tile of queries sees, computed on the host before a CPU kernel loads anything."""

from bisect import bisect_left
from typing import NamedTuple

import torch
from torch import Tensor

from .bits import BLOCK, unpack
from .blockmask import ALL_ONES, ALL_ZEROS, BlockMask


class Visibility(NamedTuple):
    """causal AND window AND plane (b, h) of a mask, for one sequence.

    Query q is at p = q + seqlen_k - seqlen_q; causal: k <= p; window: p - left <= k <= p +
    right, None = unbounded.
    """

    seqlen_q: int
    seqlen_k: int
    causal: bool = False
    window_size: tuple[int | None, int | None] = (None, None)
    mask: BlockMask | None = None
    b: int = 0
    h: int = 0

    def spans(self, q0: int, q1: int) -> list[tuple[int, int]]:
        """Ascending, disjoint key ranges that contain all keys visible to queries [q0, q1)."""
        lo, hi = self._limits(q0, q1)
        if lo >= hi:
            return []
        if self.mask is None:
            return [(lo, hi)]
        runs = self._runs(q0 // BLOCK, (q1 + BLOCK - 1) // BLOCK)
        cut = ((max(lo, start * BLOCK), min(hi, stop * BLOCK)) for start, stop in runs)
        return [(start, stop) for start, stop in cut if start < stop]

    def restrict(self, rows: tuple[int, int], keys: tuple[int, int]) -> "Visibility":
        """The rule for a range of queries and a range of keys alone, without a mask."""
        left, right = self._window_bounds()
        shift = (self.seqlen_k - keys[1]) - (self.seqlen_q - rows[1])
        window = left if left is None else left - shift, right if right is None else right + shift
        return Visibility(rows[1] - rows[0], keys[1] - keys[0], False, window)

    def tile(
        self, q0: int, q1: int, k0: int, k1: int, device: torch.device | str = "cpu"
    ) -> Tensor | None:
        """Bool (q1 - q0, k1 - k0), True where visible; None only if every cell is visible."""
        visible = None if self.mask is None else self._mask_tile(q0, q1, k0, k1)
        band = self._band(q0, q1, k0, k1, device)
        if visible is None:
            return band
        visible = visible.to(device)
        return visible if band is None else band.logical_and_(visible)

    def _window_bounds(self) -> tuple[int | None, int | None]:
        left, right = self.window_size
        return left, (0 if right is None else min(right, 0)) if self.causal else right

    def _limits(self, q0: int, q1: int) -> tuple[int, int]:
        left, right = self._window_bounds()
        offset = self.seqlen_k - self.seqlen_q
        lo = 0 if left is None else max(0, q0 + offset - left)
        hi = self.seqlen_k if right is None else min(self.seqlen_k, q1 + offset + right)
        return lo, hi

    def _band(self, q0: int, q1: int, k0: int, k1: int, device) -> Tensor | None:
        """The causal and window part of a tile, None if it hides nothing."""
        left, right = self._window_bounds()
        diagonal = q0 + self.seqlen_k - self.seqlen_q - k0  # the column where row 0 has k = p
        if right is not None and k1 - k0 - 1 <= diagonal + right:
            right = None  # the tile ends before this bound
        if left is not None and q1 - q0 - 1 + diagonal <= left:
            left = None
        if left is None and right is None:
            return None
        band = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=device)
        if right is not None:
            band.tril_(diagonal + right)
        if left is not None:
            band.triu_(diagonal - left)
        return band

    def _runs(self, i0: int, i1: int) -> list[tuple[int, int]]:
        """Runs of key blocks that are not EMPTY for some query block of [i0, i1)."""
        host, first = self.mask.host, self._first_row()
        begin, end = host.run_offsets[first + i0], host.run_offsets[first + i1]
        runs = list(zip(host.run_starts[begin:end], host.run_stops[begin:end], strict=True))
        return runs if i1 - i0 == 1 else _merge_runs(sorted(runs))

    def _first_row(self) -> int:
        return (self.b * self.mask.shape[1] + self.h) * ((self.seqlen_q + BLOCK - 1) // BLOCK)

    def _mask_tile(self, q0: int, q1: int, k0: int, k1: int) -> Tensor | None:
        """The mask's part of a tile, None if it hides nothing."""
        i0, i1, j0, j1 = q0 // BLOCK, -(-q1 // BLOCK), k0 // BLOCK, -(-k1 // BLOCK)
        first = self._first_row()
        ids = [self._tile_ids(first + i, j0, j1) for i in range(i0, i1)]
        if all(t == ALL_ONES for row in ids for t in row):
            return None
        words = self.mask.host.tiles[torch.tensor(ids)]  # (rows, columns, 128, 4)
        cells = unpack(words.transpose(1, 2).reshape(len(ids) * BLOCK, -1))
        return cells[q0 - i0 * BLOCK : q1 - i0 * BLOCK, k0 - j0 * BLOCK : k1 - j0 * BLOCK]

    def _tile_ids(self, row: int, j0: int, j1: int) -> list[int]:
        """The tile of each key block of [j0, j1), numbered as in `HostRows.tiles`."""
        host, ids = self.mask.host, [ALL_ZEROS] * (j1 - j0)
        for e in _entries_between(host.full_offsets, host.full_indices, row, j0, j1):
            ids[host.full_indices[e] - j0] = ALL_ONES
        for e in _entries_between(host.partial_offsets, host.partial_indices, row, j0, j1):
            ids[host.partial_indices[e] - j0] = host.partial_tiles[e]
        return ids


def _entries_between(offsets: list[int], indices: list[int], row: int, j0: int, j1: int) -> range:
    """The entries of a row with j0 <= index < j1."""
    begin, end = offsets[row], offsets[row + 1]
    first = bisect_left(indices, j0, begin, end)
    return range(first, bisect_left(indices, j1, first, end))


def _merge_runs(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge ascending runs that may overlap or touch into disjoint runs."""
    out: list[tuple[int, int]] = []
    for start, stop in runs:
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(stop, out[-1][1]))
        else:
            out.append((start, stop))
    return out
