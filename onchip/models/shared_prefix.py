"""Attention of a step in which groups of sequences share their first pages.

    shared pages   the queries of a group, all at once      paged_attention, not causal
    own pages      the queries of each sequence             paged_attention, causal
                   merge of the two, or more with segments

Every shared key is before every query of its group, so no query is masked from any. A layer with a
window, or with an option that gives one key another score in each sequence, reads all pages of each
sequence by itself.
"""

from typing import Any, cast

import torch
from torch import Tensor

from onchip.core.functional import get_level_merge, paged_attention
from onchip.core.problem import SCORE_OPTIONS
from onchip.kvcache import KVCache, PagedBatch
from onchip.kvcache.shared_prefixes import SharedPrefixes

OutLse = tuple[Tensor, Tensor]
_OPTIONS = {*SCORE_OPTIONS, "sinks"}  # sinks count once, among the own pages


def can_share(batch: PagedBatch, options: dict[str, Any]) -> bool:
    """Whether a layer with these options reads the shared pages of this batch once."""
    return batch.shared is not None and options.keys() <= _OPTIONS


def attend_shared(
    batch: PagedBatch, cache: KVCache, layer: int, q: Tensor, **options: Any
) -> Tensor:
    """Attention of a batch with shared prefixes; q (num_tokens, num_heads, head_dim). Parts are
    merged unrounded.
    """
    shared = cast(SharedPrefixes, batch.shared)
    options |= {"return_lse": True, "out_dtype": torch.promote_types(q.dtype, torch.float32)}
    options |= cache.scales(layer)
    pages = cache.layer(layer)
    own = _attend_own(batch, q, pages, shared, options)
    options.pop("sinks", None)
    part = *_attend_level(q, pages, shared, options), shared.row_index
    return get_level_merge(q.device)(own, [part], q.dtype)[0]


def _attend_own(
    batch: PagedBatch, q: Tensor, pages: OutLse, shared: SharedPrefixes, options: dict[str, Any]
) -> OutLse:
    """(num_tokens, num_heads, head_dim_v) and (num_heads, num_tokens)."""
    tables = shared.own_table, shared.own_seqlens
    if batch.max_seqlen_q == 1 and q.shape[0] == batch.page_table.shape[0]:
        out, lse = paged_attention(q[:, None], *pages, *tables, **options)
        return out[:, 0], lse[..., 0].T
    return paged_attention(q, *pages, *tables, **batch.packed_options(), **options)


def _attend_level(
    q: Tensor, pages: OutLse, shared: SharedPrefixes, options: dict[str, Any]
) -> OutLse:
    """(segments, slots * rows, num_heads, head_dim_v) and (segments, num_heads, slots * rows)."""
    slots, rows, segments, _ = shared.shape
    queries = q.index_select(0, shared.rows).unflatten(0, (slots, rows))
    if segments > 1:  # one slot: its segments read the same memory
        queries = queries.expand(segments, -1, -1, -1, -1).flatten(0, 1)
    tables = shared.page_table, shared.seqlens
    out, lse = paged_attention(queries, *pages, *tables, causal=False, **options)
    # With one row a slot, flatten is a view, and the merge reads rows one after another.
    lse = lse.unflatten(0, (segments, slots)).transpose(1, 2).flatten(2).contiguous()
    return out.unflatten(0, (segments, slots)).flatten(1, 2), lse
