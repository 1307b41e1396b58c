"""Multi-head latent attention: keys and values of all heads are projections of one vector a token.

    hidden -> qkv:  q                     (tokens, heads, plain + rope), of some families by way of
                                          a vector of q_rank numbers
                    latent c              (tokens, kv_rank), normed
                    k_rope                (tokens, rope), rotated, the same in all heads
    kv_up c:        k_plain, v            (tokens, heads, plain), (tokens, heads, value)

Two ways to the same output:

    expanded    q (plain + rope) . [k_plain, k_rope], times v: an ordinary call, heads x heads
    absorbed    q_plain . k_plain = q_plain . (K c) = (q_plain K) . c, so [q_plain K, q_rope] meets
                [c, k_rope], and the output V (p c) is the sum of latents, multiplied by V

Absorbed, the cache holds [c, k_rope] alone: 576 numbers a token at DeepSeek-V3's sizes (512 + 64),
where keys and values of its 128 heads are 40,960. A pair of query and key costs more: 576 + 512
columns, expanded 192 + 128. So whole prompts are expanded from their own tokens, and all other
steps read pages; with pages in 8 bits all do, so that every query sees the same keys.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from onchip.models.attend import Attend, PackedAttend, PagedAttend
from onchip.models.config import ModelConfig
from onchip.models.layer_config import LatentSizes
from onchip.models.linear import Linear, ParameterFactory
from onchip.models.norm import NormLayer, optional
from onchip.models.rotary import rotate, rotate_pairs

# In transformers the norms of the two vectors do not read rms_norm_eps.
_NORM_EPS = 1e-6


class LatentAttention(nn.Module):
    """Self-attention of a layer. The weight `qkv` holds the rows of q, or of the vector that q is a
    projection of, then those of the latent and of k_rope; `kv_up` those of k_plain, then v, of
    head 0, then of head 1, and so on.
    """

    sizes: LatentSizes
    num_heads: int
    index: int
    rope_index: int
    qkv: Linear
    q_norm: NormLayer | None
    q_up: Linear | None
    kv_norm: NormLayer
    kv_up: Linear
    out: Linear

    def __init__(
        self, config: ModelConfig, index: int, factory: ParameterFactory, options: dict[str, Any]
    ):
        super().__init__()
        sizes, heads = cast(LatentSizes, config.latent), config.num_heads
        width, q_rank, q_columns = config.hidden_size, sizes.q_rank, heads * sizes.head_dim
        norm = lambda size: NormLayer(config, size, factory, _NORM_EPS)
        linear = lambda inner, outer: Linear(inner, outer, False, factory)
        self.sizes, self.num_heads, self.index, self.options = sizes, heads, index, options
        self.rope_index = config.rotaries.index(config.layers[index].rotary)
        self.qkv = linear(width, (q_rank or q_columns) + sizes.cached)
        self.q_norm = None if q_rank is None else norm(q_rank)
        self.q_up = None if q_rank is None else linear(q_rank, q_columns)
        self.kv_norm = norm(sizes.kv_rank)
        self.kv_up = linear(sizes.kv_rank, heads * (sizes.plain_dim + sizes.value_dim))
        self.out = linear(heads * sizes.value_dim, width)

    def forward(
        self, projected: Tensor, rope: Sequence[tuple[Tensor, Tensor]], attend: Attend
    ) -> Tensor:
        """The attention of tokens that were projected by `qkv`, projected by `out`."""
        rest = projected.shape[-1] - self.sizes.cached
        q, key = projected.split((rest, self.sizes.cached), -1)
        q, key = self._queries(q, *rope[self.rope_index]), self._key(key, *rope[self.rope_index])
        if not isinstance(attend, PagedAttend):
            out = self._expanded(q, key, attend)
        elif attend.batch.is_prompts and attend.cache.spec.kv_dtype is None:
            attend.write(self.index, key, None)
            packed = PackedAttend(attend.batch.cu_seqlens_q, attend.batch.max_seqlen_q)
            out = self._expanded(q, key, packed)
        else:
            out = self._absorbed(q, key, attend)
        return self.out(out.flatten(-2))

    def _queries(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(..., heads, plain_dim + rope_dim), rotated."""
        q = optional(self.q_norm, q)
        q = (q if self.q_up is None else self.q_up(q)).unflatten(-1, (self.num_heads, -1))
        plain, rotated = q.split((self.sizes.plain_dim, self.sizes.rope_dim), -1)
        return torch.cat((plain, self._rotate(rotated, cos, sin)), -1)

    def _key(self, key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(..., 1, kv_rank + rope_dim), as in the cache: the latent normed, the rest rotated."""
        latent, rotated = key[..., None, :].split((self.sizes.kv_rank, self.sizes.rope_dim), -1)
        return torch.cat((self.kv_norm(latent), self._rotate(rotated, cos, sin)), -1)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return (rotate_pairs if self.sizes.is_interleaved else rotate)(x, cos, sin)

    def _expanded(self, q: Tensor, key: Tensor, attend: Attend) -> Tensor:
        """(..., heads, value_dim) from keys and values of every head."""
        sizes = self.sizes
        latent, k_rope = key.split((sizes.kv_rank, sizes.rope_dim), -1)
        expanded = self.kv_up(latent[..., 0, :]).unflatten(-1, (self.num_heads, -1))
        k_plain, v = expanded.split((sizes.plain_dim, sizes.value_dim), -1)
        k = torch.cat((k_plain, k_rope.expand(*k_plain.shape[:-1], -1)), -1)
        return attend(self.index, q, k, v, **self.options)

    def _absorbed(self, q: Tensor, key: Tensor, attend: PagedAttend) -> Tensor:
        """(tokens, heads, value_dim) from the pages, to which the new tokens are written."""
        sizes, weight = self.sizes, self.kv_up.weight.unflatten(0, (self.num_heads, -1))
        to_keys, to_values = weight.split((sizes.plain_dim, sizes.value_dim), 1)
        plain, rotated = q.split((sizes.plain_dim, sizes.rope_dim), -1)
        absorbed = torch.bmm(plain.transpose(0, 1), to_keys).transpose(0, 1)
        out = attend(self.index, torch.cat((absorbed, rotated), -1), key, None, **self.options)
        return torch.bmm(out.transpose(0, 1), to_values.transpose(1, 2)).transpose(0, 1)
