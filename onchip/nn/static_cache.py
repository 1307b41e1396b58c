"""Keys and values of one layer in preallocated memory, for decoding a batch."""

from typing import Any, cast

import torch
from torch import Tensor

from onchip.core.functional import paged_attention
from onchip.core.problem import UnsupportedError

PAGE_SIZE = 64


class StaticKVCache:
    """Room for max_seqlen tokens of every sequence of a batch. The first `append` allocates it, for
    the batch, heads and dtype of its keys. The pages of a sequence follow one another, so the page
    table never changes, and lengths are on the device: a step needs no host code.

    k, v: (pages, PAGE_SIZE, kv_heads, head_dim); page_table: int32 (batch, pages per sequence);
    cache_seqlens: int32 (batch,), as paged_attention takes them. length: the longest sequence.
    """

    def __init__(self, max_seqlen: int):
        if max_seqlen < 1:
            raise ValueError(f"{max_seqlen=} must be at least 1")
        self.max_seqlen, self.length = max_seqlen, 0
        self.k: Tensor | None = None

    def positions(self, batch: int, seqlen: int, device: torch.device) -> Tensor:
        """The positions of the next tokens: int64 (batch, seqlen)."""
        each = torch.arange(seqlen, device=device)
        return each.expand(batch, -1) if self.k is None else self.cache_seqlens[:, None] + each

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, need_weights: bool = False, **options: Any
    ) -> Tensor:
        """Append k and v; attend to all tokens of the cache, causally. options: of attention."""
        options |= {"causal": True, "need_weights": need_weights or None}
        options.pop("precise_delta", None)  # of a backward, which pages do not have
        for name in ("mask", "bias", "precision", "need_weights"):
            if options.pop(name, None) is not None:
                raise UnsupportedError(f"a cache is not served with {name}")
        self.append(k, v)
        pages = cast(Tensor, self.k), self.v, self.page_table, self.cache_seqlens
        return cast(Tensor, paged_attention(q, *pages, **options))

    def append(self, k: Tensor, v: Tensor) -> None:
        """Write the next keys and values of every sequence, (batch, seqlen, kv_heads, head_dim)."""
        if self.length + k.shape[1] > self.max_seqlen:
            raise ValueError(
                f"{self.length} + {k.shape[1]} tokens exceed the cache's max_seqlen="
                f"{self.max_seqlen}"
            )
        if self.k is None:
            self._allocate(k, v)
        if len(self.cache_seqlens) != len(k) or self.k.dtype != k.dtype:
            raise ValueError(
                f"the cache has {len(self.cache_seqlens)} sequences of {self.k.dtype}, the new keys"
                f" {len(k)} of {k.dtype}: make a new cache"
            )
        rows = torch.arange(len(k), device=k.device)[:, None]
        positions = self.positions(len(k), k.shape[1], k.device)
        for pages, new in ((self.k, k), (self.v, v)):
            pages.view(len(k), -1, *pages.shape[2:])[rows, positions] = new
        self.cache_seqlens += k.shape[1]
        self.length += k.shape[1]

    def truncate(self, lengths: int | Tensor) -> None:
        """Keep the first tokens of each sequence: int, or int (batch,). After a prefill of prompts
        that are padded on the right, `truncate` with their lengths drops the padding.
        """
        if self.k is None:
            raise ValueError("the cache is empty")
        lengths = torch.as_tensor(lengths, device=self.cache_seqlens.device)
        self.cache_seqlens.copy_(torch.minimum(self.cache_seqlens, lengths))
        self.length = int(self.cache_seqlens.max())

    def _allocate(self, k: Tensor, v: Tensor) -> None:
        batch, width = len(k), -(-self.max_seqlen // PAGE_SIZE)
        self.k, self.v = (t.new_empty(batch * width, PAGE_SIZE, *t.shape[2:]) for t in (k, v))
        pages = torch.arange(batch * width, dtype=torch.int32, device=k.device)
        self.page_table = pages.view(batch, width)
        self.cache_seqlens = torch.zeros(batch, dtype=torch.int32, device=k.device)
