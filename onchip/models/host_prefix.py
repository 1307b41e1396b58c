"""Attention over the first tokens of long sequences, which are in host memory.

    new tokens of a sequence   i = computed ... length - 1
    host memory                keys 0 ... num_tokens - 1       offload_attention: streams segments
    pages of the pool          keys num_tokens ... length - 1  paged_attention, causal
                               merge_states of the two

Every key in host memory is before every new token, so only a window hides some of them.
"""

from typing import Any

import torch
from torch import Tensor

from onchip.core.functional import UNBOUNDED, merge_states, offload_attention, paged_attention
from onchip.core.problem import Window
from onchip.kvcache import KVCache, PagedBatch
from onchip.kvcache.offload import PREFIX_SEGMENT_BYTES
from onchip.kvcache.paged_batch import HostPrefix


def attend_with_prefixes(
    batch: PagedBatch, cache: KVCache, layer: int, q: Tensor, **options: Any
) -> Tensor:
    """Attention of a batch with host_prefixes; q (num_tokens, num_heads, head_dim). A sink counts
    once, among the pages. Parts are merged unrounded.
    """
    parts = {"return_lse": True, "out_dtype": torch.promote_types(q.dtype, torch.float32)}
    pages = *cache.layer(layer), batch.page_table, batch.cache_seqlens
    out, lse = paged_attention(q, *pages, **batch.packed_options(), **parts, **options)
    window = options.pop("window_size", UNBOUNDED)
    options.pop("sinks", None)
    for prefix in batch.host_prefixes:
        count, shifted = _visible_rows(prefix, window)
        if count:
            rows = slice(prefix.start, prefix.start + count)
            source = cache.offloaded.layer(layer, prefix.held, prefix.num_tokens)
            own = {"window_size": shifted, "segment_bytes": PREFIX_SEGMENT_BYTES}
            more, more_lse = offload_attention(q[None, rows], source, **own, **parts, **options)
            out[rows], _ = merge_states([out[rows], more[0]], [lse[:, rows], more_lse[0]])
    return out.to(q.dtype)


def _visible_rows(prefix: HostPrefix, window: Window) -> tuple[int, Window]:
    """How many of the new tokens see a key in host memory, and the window of a call with these
    queries and all of these keys, which aligns the last query with the last key.
    """
    count, left = prefix.stop - prefix.start, window[0]
    if left is None:
        return count, UNBOUNDED
    count = max(0, min(count, prefix.num_tokens + left - prefix.computed))
    ahead = prefix.computed + count - prefix.num_tokens
    return count, (left - ahead, None)
