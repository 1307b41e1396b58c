"""flash_attn_with_kvcache: rotate new tokens, append them to a cache in place, and attend
to it.
"""

from typing import NamedTuple, cast, overload

import torch
from torch import Tensor

from onchip.core import functional
from onchip.core.device import device_info
from onchip.core.signatures import No, Yes
from onchip.core.values import values_are_checked
from onchip.integrations.flash_attn.cache import (
    FlashCache,
    check_ints,
    check_pages,
    locate_cache,
    slots_of,
)
from onchip.integrations.flash_attn.options import FlashArguments, contiguous, flash_lse, window
from onchip.integrations.flash_attn.rotary import apply_rope, check_tables


@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None, num_splits: int = 0, return_softmax_lse: No = False,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None, num_splits: int = 0, *, return_softmax_lse: Yes,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None, num_splits: int = 0, return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None, num_splits: int = 0, return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """onchip.paged_attention with flash_attn's arguments, after appending k and v in place.

    q: (batch, seqlen_q, heads, head_dim); k_cache, v_cache: (batch_cache, seqlen_cache, kv_heads,
    head_dim), or with block_table (batch, max_blocks) int32: (num_blocks, block_size, kv_heads,
    head_dim), of any block_size. k, v: (batch, seqlen_new, kv_heads, head_dim), written from
    position cache_seqlens on: an int or int32 (batch,), by default the whole cache.
    cache_batch_idx: int32 (batch,), the row of the cache of each sequence. cache_leftpad: int32
    (batch,), the position of its first key. rotary_cos, rotary_sin: (at least as many rows as the
    cache, rotary_dim / 2); k is rotated by its positions, q by the same if causal or local, else
    all of q by the first position. num_splits: 1 gives results that do not depend on the rest of
    the batch; other numbers are left to dispatch. No gradient.
    """
    arguments = FlashArguments(
        0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, num_splits == 1
    )
    q = contiguous(q)
    with torch.no_grad():
        cache = locate_cache(q, k_cache, v_cache, block_table, cache_batch_idx, cache_leftpad)
        seqlens = _seqlens(cache_seqlens, q, cache)
        if k is None and v is None:
            _check_no_rotary(rotary_cos, rotary_sin)
            if block_table is not None:
                check_pages(cache.k_pages, block_table, seqlens, q.shape[1], arguments)
        else:
            new = _new_tokens(q, k, v, cache, cache_seqlens)
            if rotary_cos is not None or rotary_sin is not None:
                tables = _tables(rotary_cos, rotary_sin, q, cache)
                q, new = _rotate(q, new, seqlens, tables, rotary_interleaved, arguments)
            if block_table is not None:
                check_pages(
                    cache.k_pages, block_table, seqlens + new.k.shape[1], q.shape[1], arguments
                )
            _append(cache, new, seqlens)
            seqlens = seqlens + new.k.shape[1]
        if not return_softmax_lse:
            return cast(Tensor, _attend(q, cache, seqlens, arguments))
        out, lse = _attend(q, cache, seqlens, arguments, return_lse=True)
    return out, flash_lse(lse)


class NewTokens(NamedTuple):
    k: Tensor
    v: Tensor


def _seqlens(cache_seqlens: int | Tensor | None, q: Tensor, cache: FlashCache) -> Tensor:
    """int32 (batch,): positions of each sequence in the cache, including the left padding."""
    if cache_seqlens is None or not isinstance(cache_seqlens, Tensor):
        length = cache.capacity if cache_seqlens is None else cache_seqlens
        return torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)
    check_ints("cache_seqlens", cache_seqlens, q)
    return cache_seqlens


def _check_no_rotary(rotary_cos: Tensor | None, rotary_sin: Tensor | None) -> None:
    if rotary_cos is not None or rotary_sin is not None:
        raise ValueError("rotary_cos and rotary_sin rotate new keys: give k and v with them")


def _new_tokens(q, k, v, cache: FlashCache, cache_seqlens) -> NewTokens:
    if k is None or v is None or cache_seqlens is None:
        tensors = {"k": k, "v": v, "cache_seqlens": cache_seqlens}
        missing = " and ".join(name for name, t in tensors.items() if t is None)
        raise ValueError(f"appending needs k, v and cache_seqlens, {missing} is missing")
    for name, t, pages in (("k", k, cache.k_pages), ("v", v, cache.v_pages)):
        seqlen_new = k.shape[1] if isinstance(k, Tensor) and k.dim() == 4 else "seqlen_new"
        shape = (q.shape[0], seqlen_new, *pages.shape[2:])
        if not isinstance(t, Tensor) or tuple(t.shape) != shape or t.dtype != pages.dtype:
            is_tensor = isinstance(t, Tensor)
            got = f"{tuple(t.shape)} {t.dtype}" if is_tensor else type(t).__name__
            raise ValueError(f"{name} must be {shape} {pages.dtype}, got {got}")
    return NewTokens(contiguous(k), contiguous(v))


def _positions(seqlens: Tensor, count: int) -> Tensor:
    """(batch, count): the positions of new tokens, after the tokens in the cache."""
    return seqlens[:, None] + torch.arange(count, dtype=torch.int32, device=seqlens.device)


def _tables(cos, sin, q: Tensor, cache: FlashCache) -> tuple[Tensor, Tensor]:
    if cos is None or sin is None:
        raise ValueError("rotary_cos and rotary_sin must be given together")
    check_tables(cos, sin, q.shape[-1])
    if cos.shape[0] < cache.capacity:
        raise ValueError(
            f"rotary_cos has {cos.shape[0]} rows, the cache has {cache.capacity} positions"
        )
    return cos, sin


def _rotate(
    q: Tensor,
    new: NewTokens,
    seqlens: Tensor,
    tables: tuple[Tensor, Tensor],
    interleaved: bool,
    arguments: FlashArguments,
) -> tuple[Tensor, NewTokens]:
    """Rotate q and the new keys. If causal or local, query i is at the position of new token i;
    otherwise all queries are at the position of the first new token.
    """
    advances = arguments.causal or window(arguments.window_size) != (None, None)
    at = _positions(seqlens, q.shape[1]) if advances else seqlens[:, None].expand(-1, q.shape[1])
    q = apply_rope(q, *tables, at, interleaved)
    at = _positions(seqlens, new.k.shape[1])
    return q, new._replace(k=apply_rope(new.k, *tables, at, interleaved))


def _append(cache: FlashCache, new: NewTokens, seqlens: Tensor) -> None:
    at = _positions(seqlens, new.k.shape[1])
    slots = slots_of(cache, at)
    if values_are_checked(at) and (slots < 0).any():
        b, t = (slots < 0).nonzero()[0].tolist()
        raise ValueError(
            f"token {t} of sequence {b} has position {int(at[b, t])}, for which the cache of"
            f" {cache.capacity} positions has no slot"
        )
    if at.is_cuda and device_info(at.device).has_triton:
        from onchip.kernels.llm import kv_write

        k, v = (t.flatten(0, 1) for t in new)
        kv_write.write(k, v, cache.k_pages, cache.v_pages, slots.flatten())
        return
    exist = slots >= 0
    page_and_slot = slots[exist].long()
    page_and_slot = page_and_slot // cache.page_size, page_and_slot % cache.page_size
    cache.k_pages[page_and_slot] = new.k[exist]
    cache.v_pages[page_and_slot] = new.v[exist]


def _attend(
    q: Tensor,
    cache: FlashCache,
    seqlens: Tensor,
    arguments: FlashArguments,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    if cache.leftpad is not None:
        seqlens = _without_padding(seqlens, cache.leftpad)
    return functional.paged_attention(
        q,
        cache.k_pages,
        cache.v_pages,
        cache.page_table,
        seqlens,
        **arguments.scores,
        deterministic=arguments.deterministic,
        return_lse=return_lse,
    )


def _without_padding(seqlens: Tensor, leftpad: Tensor) -> Tensor:
    """Keys of each sequence without its left padding."""
    if values_are_checked(seqlens) and (leftpad > seqlens).any():
        b = int((leftpad > seqlens).nonzero()[0])
        raise ValueError(
            f"cache_leftpad[{b}]={int(leftpad[b])} exceeds the {int(seqlens[b])} tokens of this"
            " sequence in the cache"
        )
    return seqlens - leftpad
