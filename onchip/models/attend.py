"""Where a layer of the decoder finds its keys: an `Attend` gets q, k and v of the new tokens.

This file has three: sequences in pages (serving), dense batches and packed sequences (training,
scoring). Any other fold works, too.
"""

from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor

from onchip.core.functional import attention, paged_attention, varlen_attention
from onchip.core.problem import UnsupportedError
from onchip.kvcache import KVCache, PagedBatch
from onchip.models.host_prefix import attend_with_prefixes
from onchip.models.prefill_8bit import attend_prefill, has_prefill
from onchip.models.shared_prefix import attend_shared, can_share


class Attend(Protocol):
    """Attention of one layer over all tokens so far: q (..., num_heads, head_dim), k and v (...,
    num_kv_heads, head_dim) of the new tokens; options of `onchip.attention`.
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor: ...


class PagedAttend(NamedTuple):
    """Writes keys and values to the pages of the cache, and attends over the pages. v is None for
    latent pages, of which the keys hold the values.
    """

    batch: PagedBatch
    cache: KVCache

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, **options: Any
    ) -> Tensor:
        self.write(layer, k, v)
        return self.read(layer, q, **options)

    def write(self, layer: int, k: Tensor, v: Tensor | None) -> None:
        self.cache.write(layer, k, v, self.batch.slot_mapping)

    def read(self, layer: int, q: Tensor, **options: Any) -> Tensor:
        """Attention over the pages, which contain the keys and values of the new tokens already."""
        batch, cache = self
        if batch.tree is not None and "window_size" in options:
            raise UnsupportedError("a window counts positions, and slots of a tree are none")
        if batch.host_prefixes:
            return attend_with_prefixes(batch, cache, layer, q, **options)
        if can_share(batch, options):
            return attend_shared(batch, cache, layer, q, **options)
        if has_prefill(batch, options):
            return attend_prefill(batch, cache, layer, q, **options)
        pages = *cache.layer(layer), batch.page_table, batch.cache_seqlens
        options |= cache.scales(layer)
        if batch.max_seqlen_q == 1 and q.shape[0] == batch.page_table.shape[0]:
            # One token per sequence: kernels need no cu_seqlens_q.
            return cast(Tensor, paged_attention(q[:, None], *pages, **options))[:, 0]
        options |= batch.packed_options()
        return cast(Tensor, paged_attention(q, *pages, **options))


class PackedAttend(NamedTuple):
    """Whole sequences, packed one after another."""

    cu_seqlens: Tensor
    max_seqlen: int

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        lengths = (self.cu_seqlens, self.cu_seqlens, self.max_seqlen, self.max_seqlen)
        return cast(Tensor, varlen_attention(q, k, v, *lengths, causal=True, **options))


def attend_dense(layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Whole sequences of one length: an `Attend` of (batch, seqlen) tokens."""
    return cast(Tensor, attention(q, k, v, causal=True, **options))
