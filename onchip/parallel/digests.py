"""Digests of arguments that must be equal on all ranks and are too long for a message: masks,
documents and the values of small tensors. An error prints them in hexadecimal.
"""

import ctypes
from array import array
from functools import lru_cache
from hashlib import blake2b

import torch
from torch import Tensor

from onchip.masks import BLOCK, BlockMask, Mask
from onchip.masks.cells import Cells, Dense
from onchip.masks.nodes import Grid, Interval, Join, Node, Not
from onchip.masks.submask import node_of
from onchip.parallel.rounds import MAX_PLANS

# A mask that is a function is compared cell by cell if it has at most MAX_BLOCKS blocks of 128 x
# 128 cells. A larger one is compared in that many random rectangles of 128 queries and 128 keys.
MAX_BLOCKS = 16


def of_tensor(x: Tensor | None) -> str | None:
    """The digest of values in host memory. On a GPU the shape alone, to avoid a synchronisation."""
    if x is None:
        return None
    shape = f"{x.dtype} {tuple(x.shape)}"
    return f"{shape} on {x.device.type}" if x.device.type != "cpu" else f"{shape} {_digest(x)}"


def of_documents(offsets: tuple[int, ...] | None) -> str | None:
    if offsets is None:
        return None
    digest = blake2b(array("q", offsets).tobytes(), digest_size=8).hexdigest()
    return f"{len(offsets) - 1} documents {digest}"


def of_mask(
    mask: Mask | BlockMask | None, planes: tuple[int, int], seqlen: int, device: torch.device
) -> str | None:
    """The digest of a mask's text and of its visible cells: of a function in a sample
    (`MAX_BLOCKS`), of any other mask all of them.
    """
    return None if mask is None else _of_mask(mask, planes, seqlen, device)


@lru_cache(maxsize=MAX_PLANS)
def _of_mask(
    mask: Mask | BlockMask, planes: tuple[int, int], seqlen: int, device: torch.device
) -> str:
    if isinstance(mask, BlockMask):
        return f"{mask} {_digest(*mask.rows, mask.tiles)}"
    return f"{mask} {_digest(*_parts(node_of(mask, planes, (seqlen, seqlen), device)))}"


def _parts(node: Node) -> list[Tensor | str]:
    """Tensors and names that identify a mask."""
    if isinstance(node, Interval):
        return [*node.bounds]
    if isinstance(node, Dense):
        return [node.words]
    if isinstance(node, Join):
        return [type(node).__name__, *(x for part in node.parts for x in (*_parts(part), "|"))]
    if isinstance(node, Not):
        return ["not", *_parts(node.part)]
    if isinstance(node, Cells):
        return [_cells(node)]
    raise TypeError(f"{type(node).__name__} has no digest")


def _cells(node: Cells) -> Tensor:
    """Bool (n, 128, 128): cells of a mask that is a function of its cell."""
    grid, steps = node.grid, torch.arange(BLOCK)
    if not grid.num_blocks:
        return torch.empty(0, dtype=torch.bool)
    if grid.num_blocks <= MAX_BLOCKS:
        b, h, i, j = grid.split(torch.arange(grid.num_blocks))
        q, k = i[:, None] * BLOCK + steps, j[:, None] * BLOCK + steps
    else:
        b, h, q, k = _draw_cells(grid)
    q, k = q.clamp(max=grid.seqlen_q - 1), k.clamp(max=grid.seqlen_k - 1)
    return node.visible(b, h, q, k).cpu()


def _draw_cells(grid: Grid) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(batch, head, queries, keys) of random rectangles, the same on all ranks. Half of them are
    blocks on the diagonal, where most masks end; half have queries and keys from anywhere.
    """
    draw, half = torch.Generator().manual_seed(0), MAX_BLOCKS // 2
    some = lambda end, *shape: torch.randint(end, shape, generator=draw)
    b, h = some(grid.batch, MAX_BLOCKS), some(grid.heads, MAX_BLOCKS)
    start, steps = some(max(1, grid.seqlen_q - BLOCK), half, 1), torch.arange(BLOCK)
    near = (start + grid.offset).clamp(min=0) + steps
    q = torch.cat([start + steps, some(grid.seqlen_q, half, BLOCK)])
    return b, h, q, torch.cat([near, some(grid.seqlen_k, half, BLOCK)])


def _digest(*parts: Tensor | str) -> str:
    digest = blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, str):
            digest.update(part.encode())
            continue
        digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
        values = part.detach().cpu().contiguous()
        if values.numel():
            digest.update((ctypes.c_char * values.nbytes).from_address(values.data_ptr()))
    return digest.hexdigest()
