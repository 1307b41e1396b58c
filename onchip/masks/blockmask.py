"""BlockMask: a mask as data, in blocks of 128 queries x 128 keys.

A block is EMPTY (not listed: never touched), FULL (listed: no mask arithmetic) or PARTIAL (listed
with the number of a bit tile). Kernels read lists and tiles, never the rule itself.
"""

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .bits import BLOCK, WORDS, constant_tiles, unpack


class BlockLists(NamedTuple):
    """Compressed lists of the FULL and PARTIAL blocks of every block row (or block column).

    Row i of plane (b, h) owns the entries offsets[b, h, i] : offsets[b, h, i + 1] of the flat
    index tensors, in ascending order. All tensors are int32.
    """

    full_offsets: Tensor  # (planes_b, planes_h, rows + 1)
    full_indices: Tensor  # (num_full,)
    partial_offsets: Tensor  # (planes_b, planes_h, rows + 1)
    partial_indices: Tensor  # (num_partial,)
    partial_tiles: Tensor  # (num_partial,) the tile of each PARTIAL block

    def of_heads(self, lo: int, hi: int) -> "BlockLists":
        """The planes of heads [lo, hi)."""
        full, (full_indices,) = _planes(self.full_offsets, (self.full_indices,), lo, hi)
        entries = self.partial_indices, self.partial_tiles
        partial, entries = _planes(self.partial_offsets, entries, lo, hi)
        return BlockLists(full, full_indices, partial, *entries)

    def repeat_batch(self, n: int) -> "BlockLists":
        """The planes of all batch entries, repeated n times."""
        repeat = lambda offsets, entries: torch.cat([offsets + i * entries for i in range(n)])
        return BlockLists(
            repeat(self.full_offsets, len(self.full_indices)),
            self.full_indices.repeat(n),
            repeat(self.partial_offsets, len(self.partial_indices)),
            self.partial_indices.repeat(n),
            self.partial_tiles.repeat(n),
        )


class BlockMask:
    """Which keys each query sees.

    rows: per query block, its key blocks. cols: per key block, its query blocks (for backward).
    tiles (num_tiles, 128, 4) int32: bit k % 32 of word k // 32 of row q is 1 iff query q of the
    block sees key k of the block. Tiles are stored once, and shared by rows and cols.

    The leading plane dimensions are 1 if all batch entries (heads) share the mask. In blocks that
    extend past seqlen_q or seqlen_k, the cells outside are 0 in the tile; such a block is FULL if
    all its cells *inside* are visible, so kernels bound-check the ragged end themselves.
    """

    def __init__(
        self, seqlen_q: int, seqlen_k: int, rows: BlockLists, cols: BlockLists, tiles: Tensor
    ):
        self.seqlen_q = seqlen_q
        self.seqlen_k = seqlen_k
        self.rows = rows
        self.cols = cols
        self.tiles = tiles
        self._parts: dict[tuple[int, int], BlockMask] = {}

    @classmethod
    def from_tensors(cls, tensors: list[Tensor], seqlen_q: int, seqlen_k: int) -> "BlockMask":
        """The inverse of `tensors()`."""
        return cls(
            seqlen_q, seqlen_k, BlockLists(*tensors[:5]), BlockLists(*tensors[5:10]), tensors[10]
        )

    def tensors(self) -> list[Tensor]:
        """The eleven tensors: five of rows, five of cols, tiles."""
        return [*self.rows, *self.cols, self.tiles]

    def to(self, device: torch.device | str) -> "BlockMask":
        """This mask on another device (itself if it is on that device)."""
        if torch.device(device) == self.device:
            return self
        moved = [t.to(device) for t in self.tensors()]
        return BlockMask.from_tensors(moved, self.seqlen_q, self.seqlen_k)

    def of_heads(self, lo: int, hi: int) -> "BlockMask":
        """This mask for heads [lo, hi) alone (itself if heads share it)."""
        if self.shape[1] == 1 or (lo, hi) == (0, self.shape[1]):
            return self
        if (lo, hi) not in self._parts:
            rows, cols = (lists.of_heads(lo, hi) for lists in (self.rows, self.cols))
            part = BlockMask(self.seqlen_q, self.seqlen_k, rows, cols, self.tiles)
            self._parts[lo, hi] = part
        return self._parts[lo, hi]

    def repeat_batch(self, n: int) -> "BlockMask":
        """This mask for a batch repeated n times (itself if batch entries share it)."""
        if self.shape[0] == 1 or n == 1:
            return self
        rows, cols = (lists.repeat_batch(n) for lists in (self.rows, self.cols))
        return BlockMask(self.seqlen_q, self.seqlen_k, rows, cols, self.tiles)

    @property
    def device(self) -> torch.device:
        return self.tiles.device

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(planes_b, planes_h, seqlen_q, seqlen_k)."""
        planes_b, planes_h, _ = self.rows.full_offsets.shape
        return planes_b, planes_h, self.seqlen_q, self.seqlen_k

    @property
    def num_full(self) -> int:
        return self.rows.full_indices.numel()

    @property
    def num_partial(self) -> int:
        return self.rows.partial_indices.numel()

    @property
    def num_tiles(self) -> int:
        return self.tiles.shape[0]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors())

    @property
    def num_blocks(self) -> int:
        """Of all planes, EMPTY ones included."""
        planes_b, planes_h, seqlen_q, seqlen_k = self.shape
        return planes_b * planes_h * num_blocks(seqlen_q) * num_blocks(seqlen_k)

    def density(self) -> float:
        """The fraction of the blocks that are not EMPTY (0.0 for a mask without blocks)."""
        return (self.num_full + self.num_partial) / self.num_blocks if self.num_blocks else 0.0

    def status(self, b: int = 0, h: int = 0) -> Tensor:
        """Plane (b, h) as a (query blocks, key blocks) uint8 grid: 0 EMPTY, 1 PARTIAL, 2 FULL."""
        grid = torch.zeros(num_blocks(self.seqlen_q), num_blocks(self.seqlen_k), dtype=torch.uint8)
        lists = BlockLists(*(t.cpu() for t in self.rows))
        grid[_cells(lists.partial_offsets[b, h], lists.partial_indices)] = 1
        grid[_cells(lists.full_offsets[b, h], lists.full_indices)] = 2
        return grid

    def to_dense(self) -> Tensor:
        """Bool (planes_b, planes_h, seqlen_q, seqlen_k), in O(N^2) memory."""
        planes_b, planes_h, seqlen_q, seqlen_k = self.shape
        n_q, n_k = num_blocks(seqlen_q), num_blocks(seqlen_k)
        dense = torch.zeros(planes_b * planes_h * n_q, n_k, BLOCK, BLOCK, dtype=torch.bool)
        lists = BlockLists(*(t.cpu() for t in self.rows))
        partial = owners(flat_offsets(lists.partial_offsets)), lists.partial_indices.long()
        dense[partial] = unpack(self.tiles.cpu())[lists.partial_tiles.long()]
        dense[owners(flat_offsets(lists.full_offsets)), lists.full_indices.long()] = True
        dense = dense.view(planes_b, planes_h, n_q, n_k, BLOCK, BLOCK).transpose(3, 4)
        dense = dense.reshape(planes_b, planes_h, n_q * BLOCK, n_k * BLOCK)
        return dense[:, :, :seqlen_q, :seqlen_k].to(self.device)

    @cached_property
    def host(self) -> "HostRows":
        """The row lists as Python lists, made once, for the CPU kernels."""
        return HostRows.of(self)

    def show(
        self, b: int = 0, h: int = 0, width: int | None = None, path: str | None = None
    ) -> None:
        """Print plane (b, h) in at most `width` columns, or draw it to the image file `path`."""
        from .show import show

        show(self, b, h, width, path)

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.shape))
        return (
            f"BlockMask({shape}, full={self.num_full}, partial={self.num_partial}, "
            f"tiles={self.num_tiles}, density={self.density():.2%})"
        )


ALL_ZEROS, ALL_ONES = 0, 1  # in HostRows.tiles


class HostRows(NamedTuple):
    """Row lists for Python code; row = (b * planes_h + h) * query_blocks + i.

    Run r of a row covers the key blocks run_starts[r] : run_stops[r], all of them non-empty. tiles
    starts with an empty and a full tile, so that every block has a tile in it.
    """

    run_offsets: list[int]
    run_starts: list[int]
    run_stops: list[int]
    full_offsets: list[int]
    full_indices: list[int]
    partial_offsets: list[int]
    partial_indices: list[int]
    partial_tiles: list[int]
    tiles: Tensor  # (2 + num_tiles, 128, 4), on the CPU

    @classmethod
    def of(cls, mask: BlockMask) -> "HostRows":
        lists = BlockLists(*(t.cpu() for t in mask.rows))
        full_offsets = flat_offsets(lists.full_offsets)
        partial_offsets = flat_offsets(lists.partial_offsets)
        stride = num_blocks(mask.seqlen_k) + 1  # one more than fits, so that runs end with the row
        full_rows = owners(full_offsets) * stride + lists.full_indices
        partial_rows = owners(partial_offsets) * stride + lists.partial_indices
        starts, stops = _runs(torch.cat([full_rows, partial_rows]).sort().values)
        bounds = torch.arange(full_offsets.numel()) * stride
        return cls(
            torch.searchsorted(starts, bounds).tolist(),
            (starts % stride).tolist(),
            (stops % stride).tolist(),
            full_offsets.tolist(),
            lists.full_indices.tolist(),
            partial_offsets.tolist(),
            lists.partial_indices.tolist(),
            (lists.partial_tiles + 2).tolist(),
            torch.cat([constant_tiles(), mask.tiles.cpu()]),
        )


def num_blocks(seqlen: int) -> int:
    return (seqlen + BLOCK - 1) // BLOCK


def describe_blocks(full: int, partial: int, total: int) -> str:
    """The sentence under a picture, and in explain()."""
    share = (full + partial) / total if total else 0.0
    return f"{full} FULL and {partial} PARTIAL of {total} blocks ({share:.2%} visited)"


def divide(numbers: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Quotient and remainder of non-negative integers: torch's own % costs a second division."""
    quotient = numbers // size
    return quotient, numbers - quotient * size


def assemble(
    shape: tuple[int, ...], block_ids: Tensor, full: Tensor, tile_ids: Tensor, tiles: Tensor
) -> BlockMask:
    """A BlockMask of shape (planes_b, planes_h, seqlen_q, seqlen_k) from its non-empty blocks.

    block_ids: ascending int64 (plane * query_blocks + i) * key_blocks + j; full: bool per
    block; tile_ids: the tile of every block that is not full, in order; tiles: (num_tiles, 128, 4)
    int32.
    """
    planes, (n_q, n_k) = shape[:2], map(num_blocks, shape[2:4])
    row, j = divide(block_ids, max(n_k, 1))
    plane, i = divide(row, max(n_q, 1))
    flipped = (plane * n_k + j) * n_q + i
    f, p = full.nonzero().flatten(), (~full).nonzero().flatten()
    full_cols, full_order = flipped[f].sort(stable=True)  # stable: torch's radix sort, 2-3x faster
    partial_cols, partial_order = flipped[p].sort(stable=True)
    rows = BlockLists(
        _offsets(planes, n_q, n_k, block_ids[f]),
        j[f].int(),
        _offsets(planes, n_q, n_k, block_ids[p]),
        j[p].int(),
        tile_ids.int(),
    )
    cols = BlockLists(
        _offsets(planes, n_k, n_q, full_cols),
        i[f[full_order]].int(),
        _offsets(planes, n_k, n_q, partial_cols),
        i[p[partial_order]].int(),
        tile_ids[partial_order].int(),
    )
    return BlockMask(shape[2], shape[3], rows, cols, tiles.reshape(-1, BLOCK, WORDS).contiguous())


def _offsets(planes: tuple[int, int], rows: int, width: int, block_ids: Tensor) -> Tensor:
    """The start of each row in ascending numbers row * width + column: (*planes, rows + 1)."""
    first_row = torch.arange(planes[0] * planes[1]).view(*planes, 1) * rows
    bounds = (first_row + torch.arange(rows + 1)) * width
    return torch.searchsorted(block_ids, bounds, out_int32=True)


def _planes(
    offsets: Tensor, entries: tuple[Tensor, ...], lo: int, hi: int
) -> tuple[Tensor, list[Tensor]]:
    """Offsets of the planes [:, lo:hi], and the entries of these planes."""
    owned = [slice(int(o[lo, 0]), int(o[hi - 1, -1])) for o in offsets.cpu()]
    counts = offsets[:, lo:hi].diff()
    ends = counts.flatten().cumsum(0).view_as(counts)
    selected = torch.cat([(ends - counts)[..., :1], ends], -1).int()
    return selected, [torch.cat([t[own] for own in owned]) for t in entries]


def flat_offsets(offsets: Tensor) -> Tensor:
    """(planes_b, planes_h, rows + 1) offsets as one list of all rows, and the end."""
    return torch.cat([offsets[..., :-1].flatten(), offsets.flatten()[-1:]]).long()


def owners(offsets: Tensor, entries: int | None = None) -> Tensor:
    """The row of every entry. If the number of entries is given, the host does not wait."""
    rows = torch.arange(offsets.numel() - 1, device=offsets.device)
    return torch.repeat_interleave(rows, offsets.diff(), output_size=entries)


def _cells(offsets: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(row, index) of the entries of one plane."""
    entries = indices[int(offsets[0]) : int(offsets[-1])]
    return owners(offsets.long()), entries.long()


def _runs(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Maximal runs of consecutive integers in ascending numbers: their starts and stops."""
    if not numbers.numel():
        return numbers, numbers
    cut = (numbers.diff() != 1).nonzero().flatten()
    starts = torch.cat([numbers[:1], numbers[cut + 1]])
    stops = torch.cat([numbers[cut], numbers[-1:]]) + 1
    return starts, stops
