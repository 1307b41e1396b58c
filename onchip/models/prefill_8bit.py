"""Attention of a step with chunks of long prompts, which compute it in 8 bits.

    chunk of a long prompt     its queries, all keys so far     paged_attention(precision=...)
    other sequences            decodes, short chunks            paged_attention, one call

A call in 8 bits reads the keys of the chunk and the earlier ones from the pages alike, and
quantises all of them. So a chunk needs no merge of two parts, and pages stay as they are: in 16
bits, or in 8 with kv_dtype. A layer with a window sees few keys, and computes in 16 bits.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from onchip.core.functional import paged_attention
from onchip.core.problem import SCORE_OPTIONS, Options
from onchip.kvcache import KVCache, PagedBatch
from onchip.kvcache.prefill_chunks import PrefillChunk, PrefillChunks
from onchip.models.pointwise import Projections, attend_8bit, place, place_keys


def has_prefill(batch: PagedBatch, options: dict[str, Any]) -> bool:
    """Whether a layer with these options computes chunks of this batch in 8 bits."""
    return batch.prefill is not None and options.keys() <= {*SCORE_OPTIONS, "sinks"}


def fuses_prefill(batch: PagedBatch, cache: KVCache, options: dict[str, Any]) -> bool:
    """Whether `attend_projections` can compute this layer, if its other operations are fused: wider
    heads do not fit the registers, and it takes no sinks.
    """
    fits = cache.spec.head_dim <= 128 and "sinks" not in options and has_prefill(batch, options)
    return fits and cast(PrefillChunks, batch.prefill).kernel == "hopper"


def attend_prefill(
    batch: PagedBatch, cache: KVCache, layer: int, q: Tensor, **options: Any
) -> Tensor:
    """Attention of a batch with prefill chunks; q (num_tokens, num_heads, head_dim)."""
    precision = cast(PrefillChunks, batch.prefill).precision
    pages = cache.layer(layer)
    options |= cache.scales(layer)

    def attend_chunk(chunk: PrefillChunk, rows: slice) -> Tensor:
        tables = _tables_of(batch, chunk, cache.spec.page_size)
        out = paged_attention(q[None, rows], *pages, *tables, precision=precision, **options)
        return cast(Tensor, out)[0]

    return _attend_pieces(batch, pages, lambda rows: q[rows], attend_chunk, options)


def attend_projections(
    batch: PagedBatch, cache: KVCache, layer: int, projections: Projections, **options: Any
) -> Tensor:
    """The same from the projections of new tokens, which are not in the pages yet. Queries of the
    chunks are normed, rotated and quantised in one launch.
    """
    precision = cast(PrefillChunks, batch.prefill).precision
    scales = cache.scales(layer)
    pages = *cache.layer(layer), *scales.values()
    scale = options["softmax_scale"]
    resolved = Options(
        out_dtype=projections.qkv.dtype,
        softmax_scale=pages[0].shape[-1] ** -0.5 if scale is None else scale,
        causal=True,
        precision=precision,
    )

    def get_queries(rows: slice) -> Tensor:
        return place(projections.cut(rows), pages, batch.slot_mapping[rows])

    def attend_chunk(chunk: PrefillChunk, rows: slice) -> Tensor:
        own = projections.cut(rows)
        place_keys(own, pages, batch.slot_mapping[rows])
        tables = _tables_of(batch, chunk, cache.spec.page_size)
        return attend_8bit(own, pages, tables, resolved)

    return _attend_pieces(batch, pages[:2], get_queries, attend_chunk, options | scales)


def _attend_pieces(
    batch: PagedBatch,
    pages: tuple[Tensor, Tensor],
    get_queries: Callable[[slice], Tensor],
    attend_chunk: Callable[[PrefillChunk, slice], Tensor],
    options: dict[str, Any],
) -> Tensor:
    """Attention of all rows: of the chunks one by one, of all others in one call."""
    prefill = cast(PrefillChunks, batch.prefill)
    pieces = list(prefill.rows_between(batch.slot_mapping.shape[0]))
    rest = iter(())
    if prefill.others is not None:
        queries = [get_queries(rows) for chunk, rows in pieces if chunk is None]
        out = _attend_others(prefill.others, pages, _join(queries), options)
        rest = iter(out.split([len(q) for q in queries]))
    return _join([attend_chunk(*piece) if piece[0] else next(rest) for piece in pieces])


def _tables_of(batch: PagedBatch, chunk: PrefillChunk, page_size: int) -> tuple[Tensor, Tensor]:
    """The page table and the length of one sequence. The table ends with its last page, because a
    call in 8 bits takes memory for all keys that a table can hold.
    """
    own, num_pages = slice(chunk.sequence, chunk.sequence + 1), -(-chunk.num_keys // page_size)
    return batch.page_table[own, :num_pages], batch.cache_seqlens[own]


def _attend_others(
    others: PagedBatch, pages: tuple[Tensor, Tensor], q: Tensor, options: dict[str, Any]
) -> Tensor:
    tables = others.page_table, others.cache_seqlens
    packed = {"cu_seqlens_q": others.cu_seqlens_q, "max_seqlen_q": others.max_seqlen_q}
    return cast(Tensor, paged_attention(q, *pages, *tables, **packed, **options))


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
