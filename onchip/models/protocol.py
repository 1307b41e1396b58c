"""The interface between an engine and a model."""

from typing import Protocol

import torch
from torch import Tensor

from onchip.kvcache import KVCache, PagedBatch, Spec


class Sizes(Protocol):
    """The sizes that an engine needs, under the names of `ModelConfig`."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def max_seqlen(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


class Model(Protocol):
    """A `Decoder`, or a `Foreign` one.

    A call is one step over pages: rows of `width` numbers in `dtype` for its tokens; `logits` turns
    them into logits. layer_weights: the number of weights of a layer, of its experts those of one
    token if the model is a `Decoder`. windows: of each layer, None where it sees all tokens.
    """

    @property
    def config(self) -> Sizes: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def width(self) -> int: ...
    @property
    def layer_weights(self) -> int: ...
    @property
    def windows(self) -> tuple[int | None, ...]: ...

    def cache_spec(self, page_size: int = 16, kv_dtype: str | None = None) -> Spec: ...

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: PagedBatch,
        cache: KVCache,
        rows: Tensor | None = None,
    ) -> Tensor: ...

    def logits(self, hidden: Tensor, wide: bool = True) -> Tensor: ...
