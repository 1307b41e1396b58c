"""MultiheadAttention: projections, rotary positions, attention, and a cache for decoding."""

from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from onchip.core.arguments import refuse_unknown
from onchip.core.functional import attention, attention_weights
from onchip.core.problem import UnsupportedError
from onchip.models.pointwise import rms_norm
from onchip.models.rotary import Rotary, cos_sin, rotate
from onchip.nn import layouts
from onchip.nn.static_cache import StaticKVCache
from onchip.nn.torch_masks import read_masks

# Options of onchip.attention that hold for every call of a module.
_OPTIONS = dict.fromkeys(
    ("causal", "window_size", "softmax_scale", "softcap", "alibi_slopes", "deterministic")
    + ("precise_delta", "precision", "kernel")
)


class MultiheadAttention(nn.Module):
    """torch.nn.MultiheadAttention on onchip's kernels: the same constructor, call and result.

    Differences: batch_first is True by default, as in every function of onchip; need_weights is
    False by default, because weights take O(seqlen_q * seqlen_k) memory; a query that sees no key
    gives the output of zeros, not NaN. add_bias_kv and add_zero_attn are refused.

    num_kv_heads: heads of k and v (grouped queries). head_dim: default embed_dim / num_heads.
    out_bias: default bias. rotary: a `Rotary`, or the theta of one over head_dim. qk_norm: the eps
    of an RMSNorm of every head of q and k. sinks: learn one per head. options: those of
    onchip.attention that hold for every call, such as causal, window_size and softcap.

    State dicts load from the layouts of `onchip.nn.LAYOUTS`, which are recognised by their names.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        out_bias: bool | None = None,
        rotary: Rotary | float | None = None,
        qk_norm: float | None = None,
        sinks: bool = False,
        **options: Any,
    ):
        super().__init__()
        if add_bias_kv or add_zero_attn:
            raise UnsupportedError("add_bias_kv and add_zero_attn are not served: use sinks=True")
        if unknown := options.keys() - _OPTIONS:
            refuse_unknown("MultiheadAttention", dict.fromkeys(unknown), _OPTIONS)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_dim = _check_heads(embed_dim, num_heads, num_kv_heads, head_dim)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim, self.dropout, self.batch_first = head_dim, dropout, batch_first
        self.rotary = Rotary(rotary, head_dim) if isinstance(rotary, int | float) else rotary
        self.register_buffer("alibi_slopes", options.pop("alibi_slopes", None), persistent=False)
        self.options = options

        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
        self.q_proj = nn.Linear(embed_dim, width, bias, **kind)
        self.k_proj = nn.Linear(kdim or embed_dim, kv_width, bias, **kind)
        self.v_proj = nn.Linear(vdim or embed_dim, kv_width, bias, **kind)
        self.out_proj = nn.Linear(width, embed_dim, bias if out_bias is None else out_bias, **kind)
        norm = nn.Identity if qk_norm is None else partial(HeadNorm, head_dim, qk_norm, **kind)
        self.q_norm, self.k_norm = norm(), norm()
        self.sinks = nn.Parameter(torch.empty(num_heads, **kind)) if sinks else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier weights; biases and sinks of 0."""
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        mask: Any = None,
        positions: Tensor | None = None,
        cache: StaticKVCache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(output, weights), weights None unless need_weights.

        query: (batch, seqlen_q, embed_dim), or (seqlen_q, embed_dim); not batch_first: (seqlen_q,
        batch, embed_dim). key: default query; value: default key. is_causal is aligned bottom-right
        and needs no attn_mask. mask: any of onchip.attention. positions: of the queries for rotary,
        (seqlen_q,) or (batch, seqlen_q). cache: the query continues the sequences in it, causally.
        """
        key = query if key is None else key
        q, k, v = self._project(query, key, key if value is None else value)
        if self.rotary is not None and key is not query:
            raise UnsupportedError("rotary positions are for self-attention: give the query alone")
        if self.rotary is not None:
            q, k = self._rotate(q, k, positions, cache)
        shape = q.shape[0], q.shape[2], q.shape[1], k.shape[1]
        options = self.options | read_masks(attn_mask, key_padding_mask, mask, shape)
        options["causal"] = is_causal or options.get("causal", False)
        options |= {"sinks": self.sinks, "alibi_slopes": self.alibi_slopes}
        if cache is not None:
            out = cache.attend(q, k, v, need_weights=need_weights, **options)
            return self._join_heads(out, query), None
        options["dropout_p"] = self.dropout if self.training else 0.0
        result = attention(q, k, v, return_lse=need_weights, **options)
        if not need_weights:
            return self._join_heads(result, query), None
        weights = _weights(q, k, result[1], options, average_attn_weights)
        return self._join_heads(result[0], query), weights if query.dim() == 3 else weights[0]

    def state_dict_as(self, layout: str) -> dict[str, Tensor]:
        """The state dict in one of `onchip.nn.LAYOUTS`."""
        if layout not in layouts.LAYOUTS:
            raise ValueError(f"{layout=} is not one of {', '.join(layouts.LAYOUTS)}")
        return layouts.write(self.state_dict(), layout, self._sizes)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> "MultiheadAttention":
        """A module with the settings and copies of the weights of torch's."""
        weight, bias = module.out_proj.weight, module.in_proj_bias is not None
        has_bias_kv, extra = module.bias_k is not None, module.add_zero_attn
        sizes = module.embed_dim, module.num_heads, module.dropout, bias, has_bias_kv, extra
        dims = module.kdim, module.vdim, module.batch_first
        ours = cls(*sizes, *dims, device=weight.device, dtype=weight.dtype)
        ours.load_state_dict(module.state_dict())
        return ours.train(module.training)

    def _load_from_state_dict(self, state_dict, prefix, *args):  # pyright: ignore
        layouts.translate(state_dict, prefix, self._sizes)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def _sizes(self) -> layouts.ProjectionSizes:
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return layouts.ProjectionSizes((q, kv, kv), self.head_dim)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """q, k and v, (batch, seqlen, heads, head_dim). The projections determine the number of
        heads: a rank of tensor parallelism has a part of them.
        """
        inputs = query, key, value
        if query.dim() == 2:
            inputs = [t.unsqueeze(0) for t in inputs]
        elif not self.batch_first:
            inputs = [t.transpose(0, 1) for t in inputs]
        split_heads = lambda x: x.unflatten(-1, (-1, self.head_dim))
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (split_heads(f(x)) for f, x in zip(projections, inputs, strict=True))
        return [self.q_norm(q), self.k_norm(k), v]

    def _rotate(
        self, q: Tensor, k: Tensor, positions: Tensor | None, cache: StaticKVCache | None
    ) -> tuple[Tensor, Tensor]:
        if positions is None and cache is not None:
            positions = cache.positions(q.shape[0], q.shape[1], q.device)
        elif positions is None:
            positions = torch.arange(q.shape[1], device=q.device)
        turn = [_match(t, q) for t in cos_sin(self.rotary, positions)]
        return rotate(q, *turn), rotate(k, *turn)

    def _join_heads(self, out: Tensor, query: Tensor) -> Tensor:
        """The output projection, with the dimensions of the query."""
        out = self.out_proj(out.flatten(-2))
        if query.dim() == 2:
            return out.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1)


class HeadNorm(nn.Module):
    """RMSNorm over the elements of a head."""

    def __init__(self, head_dim: int, eps: float, **kind: Any):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(head_dim, **kind))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, _match(self.weight, x), self.eps)


def _weights(q: Tensor, k: Tensor, lse: Tensor, options: dict[str, Any], average: bool) -> Tensor:
    """(batch, seqlen_q, seqlen_k), or (batch, heads, seqlen_q, seqlen_k)."""
    if options["dropout_p"]:
        raise UnsupportedError("need_weights is not served with dropout: call eval() first")
    known = signature(attention_weights).parameters
    options = {name: value for name, value in options.items() if name in known}
    weights = attention_weights(q, k, lse, range(q.shape[1]), **options).to(q.dtype)
    return weights.mean(1) if average else weights


def _check_heads(embed_dim: int, num_heads: int, num_kv_heads: int, head_dim: int | None) -> int:
    """head_dim, by default a share of embed_dim."""
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads=} must be a multiple of {num_kv_heads=}")
    if head_dim is None and embed_dim % num_heads:
        raise ValueError(f"{embed_dim=} must be a multiple of {num_heads=}, or give head_dim")
    return embed_dim // num_heads if head_dim is None else head_dim


def _match(t: Tensor, x: Any) -> Tensor:
    """t as an operand of x: replicated, if x is a DTensor."""
    if not hasattr(x, "device_mesh"):
        return t
    from onchip.core.dtensor import replicate

    return replicate(t, x.device_mesh)
