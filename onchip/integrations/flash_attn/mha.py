"""flash_attn.modules.mha: attention as modules, with the parameters of upstream's state dicts."""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onchip.core import functional
from onchip.core.problem import UnsupportedError
from onchip.integrations.flash_attn.functions import (
    flash_attn_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from onchip.integrations.flash_attn.kvcache import flash_attn_with_kvcache
from onchip.integrations.flash_attn.rotary import RotaryEmbedding

NO_WINDOW = (-1, -1)


def get_alibi_slopes(nheads: int) -> list[float]:
    """Powers of 2**(-8 / n) for n heads, n a power of two; other numbers take every second slope of
    the next larger one as well.
    """
    n = 2 ** math.floor(math.log2(nheads))
    slopes = [2.0 ** (-8.0 * (head + 1) / n) for head in range(n)]
    return slopes if n == nheads else slopes + get_alibi_slopes(2 * n)[::2][: nheads - n]


class _AttentionModule(nn.Module):
    """The options of the attention modules."""

    causal: bool
    softmax_scale: float | None
    drop: nn.Dropout
    window_size: tuple[int, int]
    deterministic: bool

    def __init__(
        self, causal: bool = False, softmax_scale: float | None = None,
        attention_dropout: float = 0.0, window_size: tuple[int, int] = NO_WINDOW,
        alibi_slopes: Tensor | None = None, deterministic: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.causal, self.softmax_scale = causal, softmax_scale
        self.drop = nn.Dropout(attention_dropout)
        self.alibi_slopes: Tensor | None
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.window_size, self.deterministic = window_size, deterministic

    def _options(self, causal: bool | None) -> dict[str, Any]:
        slopes = self.alibi_slopes
        return {
            "dropout_p": self.drop.p if self.training else 0.0,
            "softmax_scale": self.softmax_scale,
            "causal": self.causal if causal is None else causal,
            "window_size": self.window_size,
            "alibi_slopes": None if slopes is None else slopes.float(),
            "deterministic": self.deterministic,
        }


class FlashSelfAttention(_AttentionModule):
    def forward(
        self, qkv: Tensor, causal: bool | None = None, cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:  # fmt: skip
        """qkv: (batch, seqlen, 3, heads, head_dim), or (total, 3, heads, head_dim) with cu_seqlens
        and max_seqlen. causal: instead of the module's.
        """
        options = self._options(causal)
        if cu_seqlens is None:
            q, k, v = qkv.unbind(-3)
            return flash_attn_func(q, k, v, **options)
        lengths: Any = cu_seqlens, max_seqlen
        return flash_attn_varlen_qkvpacked_func(qkv, *lengths, **options)


class FlashCrossAttention(_AttentionModule):
    def __init__(
        self, causal: bool = False, softmax_scale: float | None = None,
        attention_dropout: float = 0.0, alibi_slopes: Tensor | None = None,
        window_size: tuple[int, int] = NO_WINDOW, deterministic: bool = False,
    ):  # fmt: skip
        score = causal, softmax_scale, attention_dropout
        super().__init__(*score, window_size, alibi_slopes, deterministic)

    def forward(
        self, q: Tensor, kv: Tensor, causal: bool | None = None, cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None, cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> Tensor:  # fmt: skip
        """q: (batch, seqlen_q, heads, head_dim); kv: (batch, seqlen_k, 2, kv_heads, head_dim); or
        both packed.
        """
        options = self._options(causal)
        if cu_seqlens is None:
            k, v = kv.unbind(-3)
            return flash_attn_func(q, k, v, **options)
        lengths: Any = cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k
        return flash_attn_varlen_kvpacked_func(q, kv, *lengths, **options)


class CrossAttention(_AttentionModule):
    """FlashCrossAttention with key_padding_mask. Upstream adds -10,000 to masked scores; here they
    are masked, and a query that sees no key gives 0.
    """

    def __init__(
        self, causal: bool = False, softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
    ):  # fmt: skip
        super().__init__(causal, softmax_scale, attention_dropout)

    def forward(
        self, q: Tensor, kv: Tensor, causal: bool | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """key_padding_mask: bool (batch, seqlen_k), True is kept; causal is then aligned to the
        last kept key.
        """
        options = self._options(causal)
        k, v = kv.unbind(-3)
        if key_padding_mask is None:
            return cast(Tensor, flash_attn_func(q, k, v, **options))
        is_causal, keys = options["causal"], key_padding_mask.sum(-1)
        return _attend_padded(q, k, v, key_padding_mask, options, keys if is_causal else None)


class SelfAttention(_AttentionModule):
    """FlashSelfAttention with key_padding_mask; see CrossAttention about masked keys."""

    def __init__(
        self, causal: bool = False, softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
    ):  # fmt: skip
        super().__init__(causal, softmax_scale, attention_dropout)

    def forward(
        self, qkv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        options = self._options(causal)
        q, k, v = qkv.unbind(-3)
        if key_padding_mask is None:
            return cast(Tensor, flash_attn_func(q, k, v, **options))
        keys = torch.full((len(q),), k.shape[1], device=q.device) if options["causal"] else None
        return _attend_padded(q, k, v, key_padding_mask, options, keys)


def _attend_padded(q, k, v, kept: Tensor, options: dict, keys: Tensor | None) -> Tensor:
    """keys: (batch,), the lengths to which causal is aligned; None: not causal."""
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    mask = kept.bool()[:, None, None].expand(batch, 1, seqlen_q, seqlen_k)
    if keys is not None:
        row = torch.arange(seqlen_q, device=q.device)[:, None]
        ahead = torch.arange(seqlen_k, device=q.device) - row
        mask = mask & (ahead <= (keys - seqlen_q)[:, None, None, None])
    named = {name: options[name] for name in ("dropout_p", "softmax_scale")}
    return cast(Tensor, functional.attention(q, k, v, mask=mask, **named))


class MHA(nn.Module):
    """Projections around the attention modules. Parameters: Wqkv, or Wq and Wkv with cross_attn,
    and out_proj. fused_bias_fc, upstream's fused Linear, has no effect here.
    """

    head_dim: int
    num_heads_kv: int
    cross_attn: bool
    causal: bool
    layer_idx: int | None
    use_flash_attn: bool
    return_residual: bool
    rotary_emb_dim: int
    checkpointing: bool
    rotary_emb: RotaryEmbedding
    Wq: nn.Linear
    Wkv: nn.Linear
    Wqkv: nn.Linear
    inner_attn: FlashSelfAttention | SelfAttention
    inner_cross_attn: FlashCrossAttention | CrossAttention
    out_proj: nn.Linear

    def __init__(
        self, embed_dim: int, num_heads: int, num_heads_kv: int | None = None,
        cross_attn: bool = False, qkv_proj_bias: bool = True, out_proj_bias: bool = True,
        dropout: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        layer_idx: int | None = None, dwconv: bool = False, rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0, rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False, use_alibi: bool = False,
        window_size: tuple[int, int] = NO_WINDOW, fused_bias_fc: bool = False,
        use_flash_attn: bool = False, return_residual: bool = False, checkpointing: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        if dwconv:
            raise UnsupportedError("MHA(dwconv=True) is not supported")
        if not use_flash_attn and (use_alibi or tuple(window_size) != NO_WINDOW):
            raise ValueError("use_alibi and window_size need use_flash_attn=True")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        self.cross_attn, self.causal, self.layer_idx = cross_attn, causal, layer_idx
        self.use_flash_attn, self.return_residual = use_flash_attn, return_residual
        self.rotary_emb_dim, self.checkpointing = rotary_emb_dim, checkpointing
        if rotary_emb_dim > 0:
            base, scale = rotary_emb_base, rotary_emb_scale_base
            rope = rotary_emb_dim, base, rotary_emb_interleaved, scale, device
            self.rotary_emb = RotaryEmbedding(*rope)
        width, kept = self.head_dim * self.num_heads_kv, {"device": device, "dtype": dtype}
        if cross_attn:
            self.Wq = nn.Linear(embed_dim, embed_dim, qkv_proj_bias, **kept)
            self.Wkv = nn.Linear(embed_dim, 2 * width, qkv_proj_bias, **kept)
        else:
            self.Wqkv = nn.Linear(embed_dim, embed_dim + 2 * width, qkv_proj_bias, **kept)
        score = causal, softmax_scale, dropout
        if use_flash_attn:
            slopes = torch.tensor(get_alibi_slopes(num_heads), device=device) if use_alibi else None
            self.inner_attn = FlashSelfAttention(*score, window_size, slopes)
            self.inner_cross_attn = FlashCrossAttention(*score, slopes, window_size)
        else:
            self.inner_attn, self.inner_cross_attn = SelfAttention(*score), CrossAttention(*score)
        self.out_proj = nn.Linear(embed_dim, embed_dim, out_proj_bias, **kept)

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        weight = self.out_proj.weight
        shape = batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim
        return torch.empty(shape, dtype=dtype or weight.dtype, device=weight.device)

    def forward(
        self, x: Tensor, x_kv: Tensor | None = None, key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
        mixer_subset: slice | Tensor | None = None, inference_params: Any = None, **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """x: (batch, seqlen, embed_dim), or (total, embed_dim) with cu_seqlens and max_seqlen.
        x_kv: input of the keys, with cross_attn. mixer_subset: the queries to compute.
        inference_params: append keys and values to its cache, and attend to the whole cache.
        """
        if self.use_flash_attn and key_padding_mask is not None:
            raise ValueError("key_padding_mask needs use_flash_attn=False: pass cu_seqlens instead")
        if cu_seqlens is not None and (not self.use_flash_attn or self.rotary_emb_dim > 0):
            raise ValueError("cu_seqlens needs use_flash_attn=True, and no rotary embedding")
        q, kv = self._project(x, x_kv, mixer_subset)
        if self.rotary_emb_dim > 0:
            q, kv = self._rotate(q, kv, inference_params)
        if inference_params is not None:
            context = self._attend_cached(q, kv, inference_params)
        elif cu_seqlens is not None:
            lengths = cu_seqlens, max_seqlen, cu_seqlens, max_seqlen
            context = self._attend(self.inner_cross_attn, q, kv, None, *lengths, **kwargs)
        elif key_padding_mask is None:
            context = self._attend(self.inner_cross_attn, q, kv, **kwargs)
        elif self.cross_attn or self.num_heads != self.num_heads_kv:
            context = self._attend(self.inner_cross_attn, q, kv, None, key_padding_mask, **kwargs)
        else:  # causal is aligned to the last key, padding or not
            qkv = torch.cat([q[:, :, None], kv], 2)
            context = self._attend(self.inner_attn, qkv, None, key_padding_mask, **kwargs)
        out = self.out_proj(context.flatten(-2))
        return (out, x) if self.return_residual else out

    def _project(self, x, x_kv, mixer_subset) -> tuple[Tensor, Tensor]:
        if self.cross_attn:
            q = self.Wq(x if mixer_subset is None else x[:, mixer_subset])
            kv = self.Wkv(x if x_kv is None else x_kv)
        else:
            if x_kv is not None or mixer_subset is not None:
                raise ValueError("x_kv and mixer_subset need cross_attn=True")
            q, kv = self.Wqkv(x).tensor_split((self.embed_dim,), -1)
        heads = self.num_heads_kv, self.head_dim
        return q.unflatten(-1, (-1, self.head_dim)), kv.unflatten(-1, (2, *heads))

    def _rotate(self, q, kv, params) -> tuple[Tensor, Tensor]:
        longest = None if params is None else params.max_seqlen
        offset = 0 if params is None else _length(params)
        k = kv[:, :, 0]
        qk = torch.cat([q, k, k], 2)  # queries, keys and unused values: the layout of grouped heads
        rotated = self.rotary_emb(qk, None, offset, longest, self.num_heads)
        q, k, _ = rotated.split((self.num_heads, self.num_heads_kv, self.num_heads_kv), 2)
        return q, torch.stack([k, kv[:, :, 1]], 2)

    def _attend(self, inner: nn.Module, *args, **kwargs) -> Tensor:
        if not self.checkpointing:
            return inner(*args, **kwargs)
        return cast(Tensor, checkpoint(inner, *args, use_reentrant=False, **kwargs))

    def _attend_cached(self, q, kv, params) -> Tensor:
        if self.layer_idx is None:
            raise ValueError("inference_params needs the layer_idx of the constructor")
        caches = params.key_value_memory_dict
        if self.layer_idx not in caches:
            size = params.max_batch_size, params.max_seqlen, kv.dtype
            caches[self.layer_idx] = self.allocate_inference_cache(*size)
        start, inner = params.batch_size_offset, self.inner_cross_attn
        k_cache, v_cache = caches[self.layer_idx][start : start + len(q)].unbind(2)
        options = inner._options(None)
        out = flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            *kv.unbind(2),
            cache_seqlens=_length(params),
            **{n: options[n] for n in ("softmax_scale", "causal", "window_size", "alibi_slopes")},
        )
        return cast(Tensor, out)


def _length(params) -> int | Tensor:
    """Tokens in the cache before this call."""
    lengths = params.lengths_per_sample
    return params.seqlen_offset if lengths is None else lengths
