"""The tiles of a head slice, and its operands, for the loops of the kernel `tiled`."""

from collections.abc import Iterator

from torch import Tensor

from onchip.core.backend import Tangents, accumulator_dtype
from onchip.core.problem import Problem, Tensors
from onchip.kernels.cpu.head_slice import HeadSlice
from onchip.kernels.cpu.scores import TileBounds
from onchip.kernels.tiles import tiled_config
from onchip.masks.blockmask import BLOCK


def load_operands(problem: Problem, x: Tensors, head_slice: HeadSlice) -> list[Tensor]:
    """q, k, v of a head slice as (batch, heads, seqlen, dim) in accumulator precision; views if no
    conversion is needed.
    """
    views = head_slice.take_queries(x.q), head_slice.take_keys(x.k), head_slice.take_keys(x.v)
    return [t.transpose(1, 2).to(accumulator_dtype(problem.dtype)) for t in views]


def load_tangents(problem: Problem, dx: Tangents, head_slice: HeadSlice) -> list[Tensor | None]:
    """load_operands of the tangents of q, k and v; None where there is none."""
    wide = accumulator_dtype(problem.dtype)
    takes = head_slice.take_queries, head_slice.take_keys, head_slice.take_keys
    return [
        None if t is None else take(t).transpose(1, 2).to(wide)
        for take, t in zip(takes, dx[:3], strict=True)
    ]


def row_tiles(head_slice: HeadSlice, q: Tensor) -> Iterator[tuple[int, int]]:
    """[q0, q1) of each tile of queries."""
    batch, heads, seqlen_q, _ = q.shape
    tile_m = tiled_config(max(1, batch * heads)).tile_m
    if head_slice.visibility.mask is not None:
        tile_m = min(tile_m, BLOCK)  # otherwise a row would read a block that is EMPTY for it
    for q0 in range(0, seqlen_q, tile_m):
        yield q0, min(q0 + tile_m, seqlen_q)


def key_tiles(head_slice: HeadSlice, q: Tensor, q0: int) -> Iterator[TileBounds]:
    """The tiles of keys that at least one query of this row tile sees."""
    batch, heads, rows, _ = q.shape
    tile_n = tiled_config(max(1, batch * heads)).tile_n
    for k0, k1 in head_slice.visibility.spans(q0, q0 + rows):
        for n in range(k0, k1, tile_n):
            yield TileBounds(q0, q0 + rows, n, min(n + tile_n, k1))
