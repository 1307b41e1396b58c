"""The attention backend "onchip" of diffusers: call `register()`, then set it on a model.

    onchip.integrations.diffusers.register()
    pipe.transformer.set_attention_backend("onchip")

It takes effect where a model calls diffusers' dispatcher, as transformers of Flux, Wan, Qwen-Image
and HunyuanVideo do. Models that call F.scaled_dot_product_attention themselves, UNets and VAEs
among them, run onchip under `onchip.integrations.sdpa.activate()`.
"""

from typing import Any

from torch import Tensor

from onchip.core.functional import attention
from onchip.core.problem import UnsupportedError
from onchip.integrations.flash_attn.options import contiguous
from onchip.integrations.sdpa_ops import as_bias

NAME = "onchip"


def register() -> None:
    """Make "onchip" a backend of diffusers, for `set_attention_backend` and `attention_backend`. A
    second call does nothing. Models do not change before the backend is set.
    """
    from diffusers.models import attention_dispatch as dispatch

    backend = _add_name(dispatch.AttentionBackendName)
    dispatch._AttentionBackendRegistry.register(backend)(attend)


def _add_name(names: Any) -> Any:
    """The member "onchip" of diffusers' enumeration of backends, which has no way to add one."""
    if NAME in names._value2member_map_:
        return names(NAME)
    member = str.__new__(names, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = member
    names._value2member_map_[NAME] = member
    type.__setattr__(names, member._name_, member)
    return member


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Any:
    """Attention with the arguments of diffusers' dispatcher, (batch, seqlen, heads, head_dim).

    attn_mask: a tensor that broadcasts to (batch, heads, seqlen_q, seqlen_k), bool or added to the
    scores; (batch, seqlen_k), or without heads (batch, seqlen_q, seqlen_k); or a mask of onchip or
    of FlexAttention. is_causal is aligned top-left, as in SDPA. return_lse: (out, lse), lse
    (batch, heads, seqlen_q).
    """
    _check(query, key, is_causal, attn_mask, enable_gqa, _parallel_config)
    q, k, v = map(contiguous, (query, key, value))
    options: dict[str, Any] = {"softmax_scale": scale, "return_lse": return_lse}
    if dropout_p:
        options["dropout_p"] = dropout_p
    if is_causal:  # no key after the last query is visible; query i is at the position of key i
        k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
        options["window_size"] = (None, q.shape[1] - k.shape[1])
    if isinstance(attn_mask, Tensor):
        options["bias"] = as_bias(_rank4(attn_mask, query, key), query.dtype)
    elif attn_mask is not None:
        options["mask"] = attn_mask
    return attention(q, k, v, **options)


def _check(
    query: Tensor, key: Tensor, is_causal: bool, attn_mask: Any, enable_gqa: bool, parallel: Any
) -> None:
    if parallel is not None:
        raise UnsupportedError(
            "context parallelism of diffusers is not supported: onchip.parallel has rings and"
            " Ulysses, or set the backend 'native'"
        )
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal=True and attn_mask exclude each other")
    if not enable_gqa and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"query has {query.shape[2]} heads and key has {key.shape[2]}: give enable_gqa=True"
        )


def _rank4(attn_mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """attn_mask as (batch or 1, heads or 1, seqlen_q or 1, seqlen_k)."""
    keys = (query.shape[0], key.shape[1])
    if attn_mask.dim() == 2 and attn_mask.shape == keys:
        return attn_mask[:, None, None]
    if attn_mask.dim() == 3:
        return attn_mask[:, None]
    expanded = attn_mask[(None,) * (4 - attn_mask.dim())]
    return expanded.expand(*expanded.shape[:3], key.shape[1])


def why(model: Any) -> str | None:
    """The reason why some attention of a model does not run on onchip, whatever backend is set;
    None if all of it does: diffusers leaves out modules that do not call its dispatcher, silently.
    """
    processors = {
        type(module.processor).__name__
        for module in model.modules()
        if getattr(module, "processor", None) is not None
        and not hasattr(module.processor, "_attention_backend")
    }
    if not processors:
        return None
    names = ", ".join(sorted(processors))
    return f"{names} do not call diffusers' dispatcher: use onchip.integrations.sdpa.activate()"
