"""One decoder for all families: embeddings, layers of attention and MLP, a head.

A layer is independent of the source of its keys: it passes q, k and v to an `Attend`.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onchip.core.values import checks
from onchip.kvcache import KVCache, PagedBatch, Spec
from onchip.models.attend import Attend, PackedAttend, PagedAttend, attend_dense
from onchip.models.config import ModelConfig
from onchip.models.experts import SparseMLP
from onchip.models.latent_attention import LatentAttention
from onchip.models.layer_config import Layer
from onchip.models.linear import Linear, ParameterFactory
from onchip.models.norm import NormLayer, add_norm, optional
from onchip.models.order_check import DeviceDtype, check_mode, check_order, check_unmoved
from onchip.models.pointwise import (
    Norms,
    Projections,
    RMSNorm,
    activate,
    fused,
    gated_activation,
    place,
    split_heads,
)
from onchip.models.prefill_8bit import attend_projections, fuses_prefill
from onchip.models.products import find_kernel, norm_product, product
from onchip.models.reproducible import (
    in_whole_vectors,
    is_reproducible,
    reproducible_rows,
    runs_kernels,
)
from onchip.models.rotary import Rotary, cos_sin, rotate
from onchip.models.routing import Routing
from onchip.models.weight_names import Shard

Rope = Sequence[tuple[Tensor, Tensor]]  # (cos, sin) for each of `ModelConfig.rotaries`


class DecoderAttention(nn.Module):
    """Self-attention of a layer. The weight `qkv` holds the rows of q, then k, then v."""

    heads: tuple[int, int, int]
    head_dim: int
    index: int
    rope_index: int | None
    qkv: Linear
    out: Linear
    sinks: nn.Parameter | None
    q_norm: NormLayer | None
    k_norm: NormLayer | None

    def __init__(self, config: ModelConfig, index: int, factory: ParameterFactory):
        super().__init__()
        heads, dim, width = config.num_heads, config.head_dim, config.hidden_size
        self.heads, self.head_dim = (heads, config.num_kv_heads, config.num_kv_heads), dim
        layer, rotaries = config.layers[index], config.rotaries
        self.index, self._score_options = index, score_options(config, layer)
        self.rope_index = None if layer.rotary is None else rotaries.index(layer.rotary)
        self.qkv = Linear(width, sum(self.heads) * dim, config.qkv_bias, factory)
        self.out = Linear(heads * dim, width, config.out_bias, factory)
        self.sinks = factory.empty(heads) if config.sinks else None
        self.q_norm = NormLayer(config, dim, factory) if config.qk_norm else None
        self.k_norm = NormLayer(config, dim, factory) if config.qk_norm else None

    def forward(self, qkv: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """The attention of heads that were projected by `qkv`, projected by `out`."""
        if isinstance(attend, PagedAttend) and self._fuses(qkv):
            return self.out(self.attend_pages(qkv, rope, attend).flatten(-2))
        q, k, v = self._split(qkv, rope)
        return self.out(attend(self.index, q, k, v, **self.options).flatten(-2))

    @property
    def options(self) -> dict[str, Any]:
        """The options of each attention call of this layer. The reproducible mode is one of the
        forward: deterministic is the backward's.
        """
        options = self._score_options
        if is_reproducible():
            options = options | {"reproducible": True, "deterministic": True}
        return options if self.sinks is None else options | {"sinks": self.sinks}

    def _split(self, qkv: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, normalised and rotated. On a GPU in the reproducible mode with the bits of
        `write`.
        """
        if is_reproducible() and runs_kernels(qkv) and self._has_rms_norms:
            projections, norms = self._projections(qkv, rope), self._norms()
            weights, eps_offset = (norms[:2], norms[2:]) if norms else ((None, None), (0.0, 0.0))
            turn = projections.turn or (None, None)
            return split_heads(qkv, *turn, *weights, eps_offset, self.heads[:2])
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=-2)
        q, k = (
            self._norm_and_rotate(q, self.q_norm, rope),
            self._norm_and_rotate(k, self.k_norm, rope),
        )
        return q, k, v

    @property
    def _has_rms_norms(self) -> bool:
        return self.q_norm is None or self.q_norm.bias is None

    def _fuses(self, qkv: Tensor) -> bool:
        """Whether norms, rotation and page write run as one launch; checked writes do not."""
        return fused(qkv) is not None and self._has_rms_norms and not checks.enabled

    def attend_pages(self, qkv: Tensor, rope: Rope, paged: PagedAttend) -> Tensor:
        """Write keys and values to their pages, and attend."""
        options = self.options
        if not fuses_prefill(*paged, options):
            return paged.read(self.index, self.write(qkv, rope, paged), **options)
        projections = self._projections(qkv, rope)
        return attend_projections(*paged, self.index, projections, **options)

    def write(self, qkv: Tensor, rope: Rope, paged: PagedAttend) -> Tensor:
        """Return the queries, normalised and rotated; write the keys, treated alike, and the values
        to their pages: one launch.
        """
        cache, slots = paged.cache, paged.batch.slot_mapping
        pages = *cache.layer(self.index), *cache.scales(self.index).values()
        return place(self._projections(qkv, rope), pages, slots)

    def _projections(self, qkv: Tensor, rope: Rope) -> Projections:
        turn = None if self.rope_index is None else rope[self.rope_index]
        return Projections(qkv, self.heads[0], turn, self._norms())

    def _norms(self) -> Norms | None:
        q, k = self.q_norm, self.k_norm
        if q is None or k is None:
            return None
        return Norms(q.weight, k.weight, q.eps, q.offset)

    def _norm_and_rotate(self, x: Tensor, norm: NormLayer | None, rope: Rope) -> Tensor:
        x = optional(norm, x)
        return x if self.rope_index is None else rotate(x, *rope[self.rope_index])


class MLP(nn.Module):
    """The weight `up` holds the rows of gate, then up, if the MLP is gated."""

    gated: bool
    up: Linear
    down: Linear

    def __init__(self, config: ModelConfig, factory: ParameterFactory):
        super().__init__()
        self.gated, self.activation = config.gated, config.activation
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.up = Linear(width, inner * (2 if config.gated else 1), bias, factory)
        self.down = Linear(inner, width, bias, factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self._activate(self.up(x)))

    def add_forward(self, x: Tensor, y: Tensor, norm: NormLayer) -> tuple[Tensor, Tensor]:
        """(x + y, forward(norm(x + y)))"""
        if self.gated:
            x, inner = project(x, y, norm, self.up, self.activation)
        else:
            x, inner = project(x, y, norm, self.up)
            inner = self._activate(inner)
        return x, self.down(inner)

    def _activate(self, x: Tensor) -> Tensor:
        return (gated_activation if self.gated else activate)(x, self.activation)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); with post norms of the two outputs if the
    config has them.
    """

    attention_norm: NormLayer
    mlp_norm: NormLayer
    attention: DecoderAttention | LatentAttention
    mlp: MLP | SparseMLP
    attention_post_norm: NormLayer | None
    mlp_post_norm: NormLayer | None

    def __init__(self, config: ModelConfig, index: int, factory: ParameterFactory):
        super().__init__()
        norm = lambda: NormLayer(config, config.hidden_size, factory)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention = _attention(config, index, factory)
        experts = config.layers[index].experts
        self.mlp = MLP(config, factory) if experts is None else SparseMLP(config, experts, factory)
        self.attention_post_norm = norm() if config.post_norms else None
        self.mlp_post_norm = norm() if config.post_norms else None

    def forward(
        self, x: Tensor, y: Tensor | None, rope: Rope, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """x: the residual stream; y: the output of the block before, to be added to it. Returns
        both for the next block: a sum, the norm after it and the product after that are one
        operation.
        """
        x, qkv = project(x, y, self.attention_norm, self.attention.qkv)
        y = optional(self.attention_post_norm, self.attention(qkv, rope, attend))
        if isinstance(self.mlp, MLP) and is_fused(x, self.mlp_norm, self.mlp.up):
            x, y = self.mlp.add_forward(x, y, self.mlp_norm)
        else:
            x, normed = add_norm(x, y, self.mlp_norm)
            y = self.mlp(normed)
        return x, optional(self.mlp_post_norm, y)


def _attention(
    config: ModelConfig, index: int, factory: ParameterFactory
) -> DecoderAttention | LatentAttention:
    if config.latent is None:
        return DecoderAttention(config, index, factory)
    return LatentAttention(config, index, factory, score_options(config, config.layers[index]))


class Decoder(nn.Module):
    """The model of a config, or one rank's shard of it (`onchip.parallel.tensor_parallel`). Its
    parameters are not initialised: use `loader.load` or `loader.random_model`.

    forward: one step over pages. full: whole sequences, differentiable. Both return hidden states
    after the last norm; `logits` computes logits from them.
    """

    config: ModelConfig
    shard: Shard
    rotaries: tuple[Rotary, ...]
    embed: nn.Parameter
    positions: nn.Parameter | None
    layers: nn.ModuleList
    norm: NormLayer
    head: nn.Parameter | None

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        shard: Shard = Shard(),  # noqa: B008 (immutable)
    ):
        super().__init__()
        factory = ParameterFactory(device, dtype)
        config = config.shard(shard.world_size)
        width = config.hidden_size
        self.config, self.shard, self.rotaries = config, shard, config.rotaries
        self.embed = factory.empty(config.vocab_size, width)
        learned = config.learned_positions
        self.positions = factory.empty(config.max_seqlen, width) if learned else None
        self.layers = nn.ModuleList(Block(config, i, factory) for i in range(config.num_layers))
        self.norm = NormLayer(config, width, factory)
        self.head = None if config.tied else factory.empty(config.vocab_size, width)
        self._checked_as: DeviceDtype | None = None

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def width(self) -> int:
        """The size of the hidden states."""
        return self.config.hidden_size

    @property
    def reproducible(self) -> bool:
        """See `set_reproducible`."""
        return self._checked_as is not None

    def set_reproducible(self, enabled: bool = True) -> None:
        """From now on the bits of a token's hidden states and logits depend on the weights and on
        the tokens before it alone: not on the batch, on packing, chunks, pages, nor on whether
        gradients are recorded (docs/reproducible.md). UnsupportedError: this model has a layer that
        has no such mode, is on another device than a CPU or an NVIDIA GPU, or the libraries of this
        machine fail a check. After a change of device or dtype calls raise until this is called
        again.
        """
        kind = (self.device, self.dtype) if enabled else None
        if kind is not None and kind != self._checked_as:
            self._checked_as = None  # the check runs out of the mode
            check_order(self)
        self._checked_as = kind

    @property
    def layer_weights(self) -> int:
        """The number of parameters of a layer that a token is multiplied with: the mean of all
        layers. Of experts, those of one token count.
        """
        total = sum(weight.numel() for weight in self.layers.parameters())
        return (total - sum(mlp.idle_weights for mlp in self._sparse())) // len(self.layers)

    @property
    def is_recordable(self) -> bool:
        """Whether a CUDA graph can hold a step: no layer reads values on the host."""
        return all(mlp.is_recordable for mlp in self._sparse())

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        return tuple(layer.window for layer in self.config.layers)

    @contextmanager
    def record_routing(self) -> Iterator[list[Routing]]:
        """A list to which every layer of experts appends its routing, in each call in this context:
        for `balance_loss`, or to count the tokens of each expert.
        """
        sparse, record = list(self._sparse()), []
        before = [mlp.record for mlp in sparse]
        for mlp in sparse:
            mlp.record = record
        try:
            yield record
        finally:
            for mlp, earlier in zip(sparse, before, strict=True):
                mlp.record = earlier

    def cache_spec(self, page_size: int = 16, kv_dtype: str | None = None) -> Spec:
        """Pages for the keys and values of this model, on its device and in its dtype, or in 8 bits
        with kv_dtype "fp8" or "int8".
        """
        c, w = self.config, self.embed
        sizes = c.num_layers, c.num_kv_heads, c.head_dim
        latent = 0 if c.latent is None else c.latent.kv_rank
        spec = Spec(*sizes, page_size=page_size, dtype=w.dtype, device=w.device, latent=latent)
        return spec.stored_as(kv_dtype)

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        batch: PagedBatch,
        cache: KVCache,
        rows: Tensor | None = None,
    ) -> Tensor:
        """One step: hidden states of the new tokens of a batch, or of some rows of them.

        tokens, positions: integers (num_tokens,), packed like `batch` (`positions_of(batch)`). Keys
        and values are written to the cache; the caller commits them. rows: integers (num_rows,),
        indices into `tokens`. Padding of a static batch gives undefined rows.
        """
        return self.run(tokens, positions, PagedAttend(batch, cache), rows)

    def full(
        self, tokens: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        """Hidden states of whole sequences: tokens (batch, seqlen), or packed (total,) with int32
        cu_seqlens (batch + 1,) and the length of the longest.
        """
        if (max_seqlen is None) != (cu_seqlens is None):
            raise ValueError("packed tokens need both cu_seqlens and max_seqlen, others neither")
        self._check_length(max_seqlen or tokens.shape[-1])
        if cu_seqlens is None:
            positions = torch.arange(tokens.shape[-1], device=tokens.device)
            return self.run(tokens, positions.expand(tokens.shape), attend_dense)
        each = torch.arange(tokens.shape[0], device=tokens.device)
        owner = torch.searchsorted(cu_seqlens, each.int(), right=True) - 1
        return self.run(tokens, each - cu_seqlens[owner], PackedAttend(cu_seqlens, max_seqlen))

    def logits(self, hidden: Tensor, wide: bool = True) -> Tensor:
        """(..., vocab_size) in fp32 (fp64 for fp64). wide=False keeps the dtype of the matrix
        product, unless logits are capped: for a kernel that reads them once and widens them itself.
        """
        with self._mode():
            out = product(hidden, self.embed if self.head is None else self.head)
            if not wide and not self.config.logit_softcap:
                return out
            out = out if out.dtype == torch.float64 else out.float()
            return soft_cap(out, self.config.logit_softcap)

    def run(
        self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None
    ) -> Tensor:
        """Hidden states of tokens of any shape, with any `Attend`. `forward` and `full` call it
        with the three of this file.
        """
        with self._mode():
            return self._run(tokens, positions, attend, rows)

    def _mode(self) -> AbstractContextManager[None]:
        if self._checked_as is not None:
            check_mode(self.embed)
            check_unmoved(self.embed, self._checked_as)
        return reproducible_rows(self.reproducible)

    def _run(
        self, tokens: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None
    ) -> Tensor:
        compiling = torch.compiler.is_compiling()  # reading a value would break the graph
        if (tokens.device.type == "cpu" and not compiling) or checks.enabled:
            self._check_tokens(tokens)
        x = embed(tokens, self.embed, self.config.embedding_scale)
        x = x if self.positions is None else x + F.embedding(positions, self.positions)
        rope = [cos_sin(rotary, positions) for rotary in self.rotaries]
        y = None
        for block in self.layers:
            x, y = block(x, y, rope, attend)
        if rows is not None:
            x, y = x.index_select(0, rows), y.index_select(0, rows)
        return add_norm(x, y, self.norm)[1]

    def _sparse(self) -> Iterator[SparseMLP]:
        """The layers with experts."""
        return (block.mlp for block in self.layers if isinstance(block.mlp, SparseMLP))

    def _check_length(self, seqlen: int) -> None:
        limit = self.config.max_seqlen
        if self.positions is not None and seqlen > limit:
            raise ValueError(f"{seqlen} tokens exceed the {limit} learned positions")

    def _check_tokens(self, tokens: Tensor) -> None:
        low, high = (t.item() for t in tokens.aminmax()) if tokens.numel() else (0, 0)
        if low < 0 or high >= self.config.vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"token {bad} is not in [0, vocab_size={self.config.vocab_size})")


def positions_of(batch: PagedBatch) -> Tensor:
    """int64 (num_tokens,): the position of each new token in its sequence, computed on the device;
    0 for the padding of a static batch. In a tree it is the depth that counts.
    """
    starts = batch.cu_seqlens_q
    each = torch.arange(batch.slot_mapping.shape[0], device=starts.device, dtype=torch.int32)
    owner = torch.searchsorted(starts[1:], each, right=True).clamp(max=len(starts) - 2)
    if batch.tree is None:
        position = each + (batch.cache_seqlens - starts[1:])[owner]
    else:
        position = batch.tree.depths + (batch.cache_seqlens - starts.diff())[owner]
    for prefix in batch.host_prefixes:
        position[prefix.start : prefix.stop] += prefix.num_tokens
    return torch.where(each < starts[-1], position, 0).long()


def score_options(config: ModelConfig, layer: Layer) -> dict[str, Any]:
    """The options of attention that a config implies, but for sinks, which are parameters."""
    options: dict[str, Any] = {"softmax_scale": config.softmax_scale, "softcap": config.softcap}
    if layer.window is not None:
        options["window_size"] = (layer.window - 1, 0)
    return options


def embed(tokens: Tensor, weight: Tensor, factor: float) -> Tensor:
    x = F.embedding(tokens, weight)
    # The factor is rounded to the dtype of the weights: Gemma was trained so.
    return x if factor == 1 else x * torch.tensor(factor, dtype=weight.dtype).item()


def project(
    x: Tensor, y: Tensor | None, norm: NormLayer, linear: Linear, activation: str | None = None
) -> tuple[Tensor, Tensor]:
    """(x + y, linear(norm(x + y))); with an activation, the second is that of the gate, times up.
    A fused product reads the weights alone: it skips hooks of `linear` and `norm`.
    """
    if is_fused(x, norm, linear):
        rms = RMSNorm(norm.weight, norm.eps, norm.offset)
        return norm_product(x, y, rms, linear.weight, linear.bias, activation)
    x, normed = add_norm(x, y, norm)
    out = linear(normed)
    return x, out if activation is None else gated_activation(out, activation)


def is_fused(x: Tensor, norm: NormLayer, linear: Linear) -> bool:
    """Whether the norm of x and the product after it may be one launch."""
    return norm.bias is None and find_kernel(x, linear.weight) is not None


def soft_cap(x: Tensor, cap: float) -> Tensor:
    return cap * in_whole_vectors(torch.tanh, x / cap) if cap else x
