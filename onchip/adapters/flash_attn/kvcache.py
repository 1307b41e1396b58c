"""flash_attn_with_kvcache: new tokens are turned, appended to a cache in place, and attend to it.

A cache without a block table is pages, too: (batch, seqlen, ...) seen as pages that lie one after
another. So there is one way to write and one to read.
"""

import math
from importlib import import_module
from typing import NamedTuple, cast

import torch
from torch import Tensor

from onchip import ops
from onchip.adapters.flash_attn.options import Common, contiguous, flash_lse
from onchip.adapters.flash_attn.rotary import check_tables, turn
from onchip.problem import UnsupportedError, check_layout, device_info, values_are_checked

MAX_PAGE_SIZE = 256  # of the views of a cache without a block table: what the Hopper kernel copies


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
) -> Tensor | tuple[Tensor, Tensor]:
    """onchip.paged_attention with flash_attn's arguments, after k and v were appended in place.

    q: (batch, seqlen_q, heads, head_dim); k_cache, v_cache: (batch_cache, seqlen_cache, kv_heads,
    head_dim), or with block_table (batch, max_blocks) int32: (num_blocks, block_size, kv_heads,
    head_dim), of any block_size. k, v: (batch, seqlen_new, kv_heads, head_dim), written from
    position cache_seqlens on: an int or int32 (batch,), unless given the whole cache.
    cache_batch_idx: int32 (batch,), the row of the cache of each sequence. cache_leftpad: int32
    (batch,), where its keys begin. rotary_cos, rotary_sin: (at least as many rows as the cache,
    rotary_dim / 2); k turns by its positions, q by the same if causal or local, else all of it by
    the first. num_splits: 1 asks for results that do not depend on the rest of the batch; other
    numbers are left to dispatch. No gradient.
    """
    common = Common(softmax_scale, causal, window_size, softcap, alibi_slopes)
    q = contiguous(q)
    with torch.no_grad():
        cache = _located(q, k_cache, v_cache, block_table, cache_batch_idx, cache_leftpad)
        seqlens = _seqlens(cache_seqlens, q, cache)
        if k is None and v is None:
            _check_lone(rotary_cos, rotary_sin)
        else:
            new = _new_tokens(q, k, v, cache, cache_seqlens)
            at = _positions(seqlens, new.k.shape[1])
            if rotary_cos is not None or rotary_sin is not None:
                tables = _tables(rotary_cos, rotary_sin, q, cache)
                q, new = _turned(q, new, at, tables, rotary_interleaved, common)
            _append(cache, new, at)
            seqlens = seqlens + new.k.shape[1]
        out, lse = _attend(q, cache, seqlens, common, num_splits)
    return (out, flash_lse(lse)) if return_softmax_lse else out


class Cache(NamedTuple):
    """Where the keys of each sequence lie: position p of sequence b, counted from its first key, is
    slot p % page_size of page page_table[b, p // page_size].
    """

    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    capacity: int  # positions that a sequence has room for, those before its first key included
    leftpad: Tensor | None = None

    @property
    def page_size(self) -> int:
        return self.k_pages.shape[1]


class NewTokens(NamedTuple):
    k: Tensor
    v: Tensor


def _located(q, k_cache, v_cache, block_table, cache_batch_idx, cache_leftpad) -> Cache:
    layout = "(batch_cache, seqlen_cache, kv_heads, head_dim)"
    for name, t in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        check_layout(name, t, 4, "(batch, seqlen_q, heads, head_dim)" if name == "q" else layout)
    if k_cache.shape[:3] != v_cache.shape[:3]:
        shapes = f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        raise ValueError(f"k_cache and v_cache must agree but for head_dim, got {shapes}")
    named = {"cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}
    for name, t in named.items():
        _check_ints(name, t, q)
        if block_table is not None and t is not None:
            raise UnsupportedError(f"{name} with block_table is refused, as flash_attn refuses it")
    if block_table is None:
        return _rows_as_pages(q, k_cache, v_cache, cache_batch_idx, cache_leftpad)
    return Cache(k_cache, v_cache, block_table, block_table.shape[1] * k_cache.shape[1])


def _rows_as_pages(q, k_cache, v_cache, cache_batch_idx, cache_leftpad) -> Cache:
    """Pages as large as fit the strides; of one slot where sequences begin anywhere."""
    rows, seqlen = k_cache.shape[:2]
    apart = _rows_apart(k_cache, v_cache)
    size = 1
    if cache_leftpad is None:
        common = math.gcd(seqlen, apart)
        size = min(common & -common, MAX_PAGE_SIZE) or 1
    row = _row_of(q, rows, cache_batch_idx)
    steps = torch.arange(seqlen // size, dtype=torch.int32, device=q.device)
    table = row[:, None] * (apart // size) + steps
    if cache_leftpad is not None:
        last = (row[:, None] * apart + seqlen - 1) if seqlen else table
        table = torch.minimum(table + cache_leftpad[:, None], last)
    num_pages = ((rows - 1) * apart + seqlen) // size if rows else 0
    k_pages, v_pages = (_strided(t, num_pages, size) for t in (k_cache, v_cache))
    return Cache(k_pages, v_pages, table, seqlen, cache_leftpad)


def _rows_apart(k_cache: Tensor, v_cache: Tensor) -> int:
    """How many slots lie between the beginnings of two rows of the cache."""
    if k_cache.shape[0] <= 1 or not k_cache.numel():
        return k_cache.shape[1]
    (row_k, slot_k), (row_v, slot_v) = k_cache.stride()[:2], v_cache.stride()[:2]
    if row_k % slot_k or row_v % slot_v or row_k // slot_k != row_v // slot_v:
        raise UnsupportedError(
            "rows of k_cache and v_cache must lie the same whole number of tokens apart, got"
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
            raise ValueError(f"cache_batch_idx {low} to {high} leaves the {rows} rows of the cache")
    return cache_batch_idx


def _strided(t: Tensor, num_pages: int, size: int) -> Tensor:
    _, slot, head, element = t.stride()
    return t.as_strided((num_pages, size, *t.shape[2:]), (size * slot, slot, head, element))


def _seqlens(cache_seqlens: int | Tensor | None, q: Tensor, cache: Cache) -> Tensor:
    """int32 (batch,): positions of each sequence in the cache, those of the left pad included."""
    if cache_seqlens is None or not isinstance(cache_seqlens, Tensor):
        length = cache.capacity if cache_seqlens is None else cache_seqlens
        return torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)
    _check_ints("cache_seqlens", cache_seqlens, q)
    return cache_seqlens


def _check_ints(name: str, t: Tensor | None, q: Tensor) -> None:
    if t is None:
        return
    is_tensor = isinstance(t, Tensor)
    if not is_tensor or t.dtype != torch.int32 or tuple(t.shape) != (q.shape[0],):
        got = f"{t.dtype} {tuple(t.shape)}" if is_tensor else type(t).__name__
        raise ValueError(f"{name} must be int32 (batch,) = ({q.shape[0]},), got {got}")
    if t.device != q.device:
        raise ValueError(f"{name} is on {t.device}, q is on {q.device}")


def _check_lone(rotary_cos: Tensor | None, rotary_sin: Tensor | None) -> None:
    if rotary_cos is not None or rotary_sin is not None:
        raise ValueError("rotary_cos and rotary_sin turn new keys: give k and v with them")


def _new_tokens(q, k, v, cache: Cache, cache_seqlens) -> NewTokens:
    if k is None or v is None or cache_seqlens is None:
        given = {"k": k, "v": v, "cache_seqlens": cache_seqlens}
        missing = " and ".join(name for name, t in given.items() if t is None)
        raise ValueError(f"k, v and cache_seqlens append together, {missing} is missing")
    for name, t, pages in (("k", k, cache.k_pages), ("v", v, cache.v_pages)):
        seqlen_new = k.shape[1] if isinstance(k, Tensor) and k.dim() == 4 else "seqlen_new"
        shape = (q.shape[0], seqlen_new, *pages.shape[2:])
        if not isinstance(t, Tensor) or tuple(t.shape) != shape or t.dtype != pages.dtype:
            is_tensor = isinstance(t, Tensor)
            got = f"{tuple(t.shape)} {t.dtype}" if is_tensor else type(t).__name__
            raise ValueError(f"{name} must be {shape} {pages.dtype}, got {got}")
    return NewTokens(contiguous(k), contiguous(v))


def _positions(seqlens: Tensor, seqlen_new: int) -> Tensor:
    """(batch, seqlen_new): where the new tokens stand in the cache."""
    steps = torch.arange(seqlen_new, dtype=torch.int32, device=seqlens.device)
    return seqlens[:, None] + steps


def _tables(cos, sin, q: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
    if cos is None or sin is None:
        raise ValueError("rotary_cos and rotary_sin come together")
    check_tables(cos, sin, q.shape[-1])
    if cos.shape[0] < cache.capacity:
        raise ValueError(
            f"rotary_cos has {cos.shape[0]} rows, the cache has room for {cache.capacity} positions"
        )
    return cos, sin


def _turned(
    q: Tensor,
    new: NewTokens,
    at: Tensor,
    tables: tuple[Tensor, Tensor],
    interleaved: bool,
    common: Common,
) -> tuple[Tensor, NewTokens]:
    """q of a causal or local call stands where the new tokens begin, and goes on; else it all
    stands there.
    """
    moves = common.causal or common.ours()["window_size"] != (None, None)
    steps = torch.arange(q.shape[1], device=q.device) if moves else at.new_zeros(q.shape[1])
    q = turn(q, *tables, at[:, :1] + steps, interleaved)
    return q, new._replace(k=turn(new.k, *tables, at, interleaved))


def _append(cache: Cache, new: NewTokens, at: Tensor) -> None:
    slots = _slots(cache, at)
    if values_are_checked(at) and (slots < 0).any():
        b, t = (slots < 0).nonzero()[0].tolist()
        raise ValueError(
            f"token {t} of sequence {b} goes to position {int(at[b, t])}, where the cache, with"
            f" room for {cache.capacity}, has no slot"
        )
    if at.is_cuda and device_info(at.device).has_triton:
        kernel = import_module("onchip.kernels.triton.kv_write")
        k, v = (t.flatten(0, 1) for t in new)
        kernel.write(k, v, cache.k_pages, cache.v_pages, slots.flatten())
        return
    exist = slots >= 0
    place = slots[exist].long()
    place = place // cache.page_size, place % cache.page_size
    cache.k_pages[place] = new.k[exist]
    cache.v_pages[place] = new.v[exist]


def _slots(cache: Cache, at: Tensor) -> Tensor:
    """int32 (batch, seqlen_new); -1 where a position, or its page, does not exist."""
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


def _attend(
    q: Tensor, cache: Cache, seqlens: Tensor, common: Common, num_splits: int
) -> tuple[Tensor, ...]:
    if cache.leftpad is not None:
        seqlens = seqlens - cache.leftpad
    answer = ops.paged_attention(
        q,
        cache.k_pages,
        cache.v_pages,
        cache.page_table,
        seqlens,
        **common.ours(),
        deterministic=num_splits == 1,
        return_lse=True,
    )
    return cast(tuple[Tensor, ...], answer)
