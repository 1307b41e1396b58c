"""The mask arguments of torch.nn.MultiheadAttention as `mask` and `bias` of onchip.attention."""

from typing import Any

import torch
from torch import Tensor

from onchip import masks
from onchip.core.problem import UnsupportedError

Shape = tuple[int, int, int, int]  # batch, heads, seqlen_q, seqlen_k


def read_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, mask: Any, shape: Shape
) -> dict[str, Any]:
    """attn_mask: (seqlen_q, seqlen_k) or (batch * heads, seqlen_q, seqlen_k); key_padding_mask:
    (batch, seqlen_k), or (seqlen_k,) without a batch. Bool ones hide where they are True; others
    are added to the scores. mask: any of onchip.attention, which hides where it is False.
    """
    batch, heads, seqlen_q, seqlen_k = shape
    given: list[Tensor] = []
    if attn_mask is not None:
        names = "(seqlen_q, seqlen_k) or (batch * heads, seqlen_q, seqlen_k)"
        _check("attn_mask", attn_mask, names, (shape[2:], (batch * heads, *shape[2:])))
        given.append(attn_mask.unflatten(0, shape[:2]) if attn_mask.dim() == 3 else attn_mask)
    if key_padding_mask is not None:
        allowed = ((batch, seqlen_k), *([(seqlen_k,)] if batch == 1 else []))
        _check("key_padding_mask", key_padding_mask, "(batch, seqlen_k)", allowed)
        given.append(key_padding_mask.reshape(batch, 1, 1, seqlen_k))
    added = [t for t in given if t.dtype != torch.bool]
    hidden = [t.expand(*t.shape[:-2], seqlen_q, -1) for t in given if t.dtype == torch.bool]
    options: dict[str, Any] = {}
    if added:
        options["bias"] = _as_bias(sum(added[1:], added[0]))
    if hidden:
        visible = ~hidden[0] if len(hidden) == 1 else ~(hidden[0] | hidden[1])
        mask = visible if mask is None else _as_rule(mask) & masks.dense(visible)
    return options if mask is None else options | {"mask": mask}


def _as_rule(mask: Any) -> masks.Mask:
    rule = masks.as_mask(mask)
    if not isinstance(rule, masks.Mask):
        raise UnsupportedError(
            "a BlockMask does not combine with attn_mask and key_padding_mask: pass its rule"
        )
    return rule


def _as_bias(t: Tensor) -> Tensor:
    return t if t.dim() == 4 else t[None, None]


def _check(name: str, t: Tensor, layout: str, allowed: tuple[tuple[int, ...], ...]) -> None:
    if tuple(t.shape) not in allowed:
        sizes = " or ".join(map(str, allowed))
        raise ValueError(f"{name} must be {layout} = {sizes}, got {tuple(t.shape)}")
    if t.dtype != torch.bool and not t.is_floating_point():
        raise ValueError(f"{name}.dtype={t.dtype} must be torch.bool or a floating type")
