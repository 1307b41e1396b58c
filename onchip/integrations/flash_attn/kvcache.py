"""flash_attn_with_kvcache: new tokens turn, are appended to a cache in place, and attend to it."""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from onchip.core import functional
from onchip.core.problem import device_info, values_are_checked
from onchip.integrations.flash_attn.cache import Cache, check_ints, check_pages, located, slots_of
from onchip.integrations.flash_attn.options import Asked, contiguous, flash_lse, window
from onchip.integrations.flash_attn.rotary import check_tables, turn


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
    asked = Asked(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, num_splits == 1)
    q = contiguous(q)
    with torch.no_grad():
        cache = located(q, k_cache, v_cache, block_table, cache_batch_idx, cache_leftpad)
        seqlens = _seqlens(cache_seqlens, q, cache)
        if k is None and v is None:
            _check_lone(rotary_cos, rotary_sin)
            if block_table is not None:
                check_pages(cache.k_pages, block_table, seqlens, q.shape[1], asked)
        else:
            new = _new_tokens(q, k, v, cache, cache_seqlens)
            if rotary_cos is not None or rotary_sin is not None:
                tables = _tables(rotary_cos, rotary_sin, q, cache)
                q, new = _turned(q, new, seqlens, tables, rotary_interleaved, asked)
            if block_table is not None:
                check_pages(cache.k_pages, block_table, seqlens + new.k.shape[1], q.shape[1], asked)
            _append(cache, new, seqlens)
            seqlens = seqlens + new.k.shape[1]
        if not return_softmax_lse:
            return cast(Tensor, _attend(q, cache, seqlens, asked))
        out, lse = _attend(q, cache, seqlens, asked, return_lse=True)
    return out, flash_lse(lse)


class NewTokens(NamedTuple):
    k: Tensor
    v: Tensor


def _seqlens(cache_seqlens: int | Tensor | None, q: Tensor, cache: Cache) -> Tensor:
    """int32 (batch,): positions of each sequence in the cache, those of the left pad included."""
    if cache_seqlens is None or not isinstance(cache_seqlens, Tensor):
        length = cache.capacity if cache_seqlens is None else cache_seqlens
        return torch.full((q.shape[0],), length, dtype=torch.int32, device=q.device)
    check_ints("cache_seqlens", cache_seqlens, q)
    return cache_seqlens


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


def _positions(seqlens: Tensor, count: int) -> Tensor:
    """(batch, count): where tokens stand that come after those in the cache."""
    return seqlens[:, None] + torch.arange(count, dtype=torch.int32, device=seqlens.device)


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
    seqlens: Tensor,
    tables: tuple[Tensor, Tensor],
    interleaved: bool,
    asked: Asked,
) -> tuple[Tensor, NewTokens]:
    """q of a causal or local call stands where the new tokens begin, and goes on; else it all
    stands there.
    """
    moves = asked.causal or window(asked.window_size) != (None, None)
    at = _positions(seqlens, q.shape[1]) if moves else seqlens[:, None].expand(-1, q.shape[1])
    q = turn(q, *tables, at, interleaved)
    at = _positions(seqlens, new.k.shape[1])
    return q, new._replace(k=turn(new.k, *tables, at, interleaved))


def _append(cache: Cache, new: NewTokens, seqlens: Tensor) -> None:
    at = _positions(seqlens, new.k.shape[1])
    slots = slots_of(cache, at)
    if values_are_checked(at) and (slots < 0).any():
        b, t = (slots < 0).nonzero()[0].tolist()
        raise ValueError(
            f"token {t} of sequence {b} goes to position {int(at[b, t])}, where the cache, with"
            f" room for {cache.capacity}, has no slot"
        )
    if at.is_cuda and device_info(at.device).has_triton:
        from onchip.kernels.llm import kv_write

        k, v = (t.flatten(0, 1) for t in new)
        kv_write.write(k, v, cache.k_pages, cache.v_pages, slots.flatten())
        return
    exist = slots >= 0
    place = slots[exist].long()
    place = place // cache.page_size, place % cache.page_size
    cache.k_pages[place] = new.k[exist]
    cache.v_pages[place] = new.v[exist]


def _attend(
    q: Tensor, cache: Cache, seqlens: Tensor, asked: Asked, return_lse: bool = False
) -> Tensor | tuple[Tensor, ...]:
    if cache.leftpad is not None:
        seqlens = _behind_padding(seqlens, cache.leftpad)
    return functional.paged_attention(
        q,
        cache.k_pages,
        cache.v_pages,
        cache.page_table,
        seqlens,
        **asked.scores,
        deterministic=asked.deterministic,
        return_lse=return_lse,
    )


def _behind_padding(seqlens: Tensor, leftpad: Tensor) -> Tensor:
    """How many keys a sequence has from its first on."""
    if values_are_checked(seqlens) and (leftpad > seqlens).any():
        b = int((leftpad > seqlens).nonzero()[0])
        raise ValueError(
            f"cache_leftpad[{b}]={int(leftpad[b])} lies behind the {int(seqlens[b])} tokens that"
            " the cache has of this sequence"
        )
    return seqlens - leftpad
