"""flash_attn's KV caches as pages. A cache without a block table has rows, which are treated as
consecutive pages, so that one code path writes and one reads.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.problem import UnsupportedError
from onchip.core.validation import check_layout
from onchip.core.values import values_are_checked
from onchip.integrations.flash_attn.options import FlashArguments, window

MAX_PAGE_SIZE = 256  # of rows as pages: the largest pages that the Hopper kernel copies


class FlashCache(NamedTuple):
    """Position p of sequence b, counted from its first key, is slot p % page_size of page
    page_table[b, p // page_size].
    """

    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    capacity: int  # positions per sequence, including the left padding
    leftpad: Tensor | None = None

    @property
    def page_size(self) -> int:
        return self.k_pages.shape[1]


def locate_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None,
    cache_batch_idx: Tensor | None, cache_leftpad: Tensor | None,
) -> FlashCache:  # fmt: skip
    layout = "(batch_cache, seqlen_cache, kv_heads, head_dim)"
    for name, t in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_layout(name, t, 4, "(batch, seqlen_q, heads, head_dim)" if name == "q" else layout)
    if k_cache.shape[:3] != v_cache.shape[:3]:
        shapes = f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        raise ValueError(f"k_cache and v_cache must agree but for head_dim, got {shapes}")
    named = {"cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}
    for name, t in named.items():
        check_ints(name, t, q)
        if block_table is not None and t is not None:
            raise UnsupportedError(f"{name} with block_table is refused, as flash_attn refuses it")
    if block_table is None:
        return _rows_as_pages(q, k_cache, v_cache, cache_batch_idx, cache_leftpad)
    check_table(block_table, q.shape[0])
    return FlashCache(k_cache, v_cache, block_table, block_table.shape[1] * k_cache.shape[1])


def _rows_as_pages(q, k_cache, v_cache, cache_batch_idx, cache_leftpad) -> FlashCache:
    """Rows as pages: as large as the strides allow; with left padding, of one slot each."""
    rows, seqlen = k_cache.shape[:2]
    apart = _rows_apart(k_cache, v_cache)
    size = 1 if cache_leftpad is not None else _page_size(math.gcd(seqlen, apart))
    row = _row_of(q, rows, cache_batch_idx)
    steps = torch.arange(seqlen // size, dtype=torch.int32, device=q.device)
    table = row[:, None] * (apart // size) + steps
    if cache_leftpad is not None:
        last = (row[:, None] * apart + seqlen - 1) if seqlen else table
        table = torch.minimum(table + cache_leftpad[:, None], last)
    num_pages = ((rows - 1) * apart + seqlen) // size if rows else 0
    k_pages, v_pages = (_strided(t, num_pages, size) for t in (k_cache, v_cache))
    return FlashCache(k_pages, v_pages, table, seqlen, cache_leftpad)


def _page_size(length: int) -> int:
    """The largest power of two that divides length, up to MAX_PAGE_SIZE."""
    return min(length & -length, MAX_PAGE_SIZE) if length else 1


def _rows_apart(k_cache: Tensor, v_cache: Tensor) -> int:
    """The number of slots from one row of the cache to the next."""
    if k_cache.shape[0] <= 1 or not k_cache.numel():
        return k_cache.shape[1]
    (row_k, slot_k), (row_v, slot_v) = k_cache.stride()[:2], v_cache.stride()[:2]
    if row_k % slot_k or row_v % slot_v or row_k // slot_k != row_v // slot_v:
        raise UnsupportedError(
            "rows of k_cache and v_cache must be the same whole number of tokens apart, got"
            f" strides {k_cache.stride()} and {v_cache.stride()}: make both contiguous"
        )
    return row_k // slot_k


def _row_of(q: Tensor, rows: int, cache_batch_idx: Tensor | None) -> Tensor:
    """int32 (batch,): the row of the cache of each sequence."""
    batch = q.shape[0]
    if cache_batch_idx is None:
        if batch > rows:
            raise ValueError(f"q has batch {batch}, the cache has {rows} rows")
        return torch.arange(batch, dtype=torch.int32, device=q.device)
    if values_are_checked(q) and batch:
        low, high = map(int, cache_batch_idx.aminmax())
        if low < 0 or high >= rows:
            raise ValueError(
                f"cache_batch_idx {low} to {high} exceeds the {rows} rows of the cache"
            )
    return cache_batch_idx


def _strided(t: Tensor, num_pages: int, size: int) -> Tensor:
    _, slot, head, element = t.stride()
    return t.as_strided((num_pages, size, *t.shape[2:]), (size * slot, slot, head, element))


def check_table(block_table: Tensor, batch: int) -> None:
    is_tensor = isinstance(block_table, Tensor)
    got = f"{block_table.dtype} {tuple(block_table.shape)}" if is_tensor else block_table
    if not is_tensor or block_table.dtype != torch.int32 or block_table.dim() != 2:
        raise ValueError(f"block_table must be int32 (batch, max_blocks), got {got}")
    if block_table.shape[0] != batch:
        raise ValueError(f"block_table must have a row for each of {batch} sequences, got {got}")


class BlockTableError(ValueError, RuntimeError):
    """flash_attn raises RuntimeError here, the rest of onchip ValueError."""


def check_pages(
    k_pages: Tensor,
    block_table: Tensor,
    seqlens: Tensor,
    seqlens_q: int | Tensor,
    arguments: FlashArguments,
) -> None:
    """Where values are checked: every visible key of seqlens (batch,) has a block."""
    if not values_are_checked(k_pages) or not seqlens.numel():
        return
    num_blocks, block_size = k_pages.shape[:2]
    capacity = block_table.shape[1] * block_size
    longest = int(seqlens.max())
    if longest > capacity:
        raise BlockTableError(
            f"a sequence of {longest} keys exceeds block_table: {block_table.shape[1]} columns of"
            f" {block_size} keys hold {capacity}"
        )
    left = window(arguments.window_size)[0]
    first = 0 * seqlens if left is None else (seqlens - seqlens_q - left).clamp(min=0)
    column = torch.arange(block_table.shape[1], device=block_table.device)
    is_read = (column >= (first // block_size)[:, None]) & (column * block_size < seqlens[:, None])
    wrong = is_read & ((block_table < 0) | (block_table >= num_blocks))
    if wrong.any():
        b, c = wrong.nonzero()[0].tolist()
        entry = int(block_table[b, c])
        raise BlockTableError(
            f"block_table[{b}, {c}]={entry} is not one of the {num_blocks} blocks"
        )


def check_ints(name: str, t: Tensor | None, q: Tensor) -> None:
    if t is None:
        return
    is_tensor = isinstance(t, Tensor)
    if not is_tensor or t.dtype != torch.int32 or tuple(t.shape) != (q.shape[0],):
        got = f"{t.dtype} {tuple(t.shape)}" if is_tensor else type(t).__name__
        raise ValueError(f"{name} must be int32 (batch,) = ({q.shape[0]},), got {got}")
    if t.device != q.device:
        raise ValueError(f"{name} is on {t.device}, q is on {q.device}")


def slots_of(cache: FlashCache, at: Tensor) -> Tensor:
    """int32 (batch, n): slots of positions `at`; -1 if a position or its page does not exist."""
    exists = (at >= 0) & (at < cache.capacity)
    if cache.leftpad is not None:
        exists &= at >= cache.leftpad[:, None]
        at = at - cache.leftpad[:, None]
    if not cache.page_table.shape[1]:
        return torch.full_like(at, -1)
    column = (at // cache.page_size).clamp(0, cache.page_table.shape[1] - 1)
    page = cache.page_table.gather(1, column.long())
    exists &= (page >= 0) & (page < cache.k_pages.shape[0])
    return torch.where(exists, page * cache.page_size + at % cache.page_size, -1)
