"""FlexAttention's API: its BlockMask objects, and a flex_attention."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast, overload

from torch import Tensor

from onchip import masks
from onchip.core import functional
from onchip.core.problem import UnsupportedError
from onchip.core.signatures import No, Yes
from onchip.core.validation import check_layout
from onchip.integrations.flash_attn.options import contiguous
from onchip.score_mods import ScoreMod

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest
    from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask


def from_block_mask(block_mask: "FlexBlockMask", batch: int, num_heads: int) -> masks.BlockMask:
    """Convert a FlexAttention BlockMask of any BLOCK_SIZE for `mask=` of attention(), on its
    device. Convert once, outside of the loop: the tensors that its mask_mod captured are read now.

    batch, num_heads: of the calls; a BlockMask made with B=None or H=None does not have them.
    """
    seqlen_q, seqlen_k = block_mask.seq_lengths
    device = block_mask.kv_num_blocks.device
    return masks.from_flex(block_mask).build(batch, num_heads, seqlen_q, seqlen_k, device)


@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable | ScoreMod | None = None,
    block_mask: "masks.MaskLike | None" = None, scale: float | None = None,
    enable_gqa: bool = False, return_lse: No = False, kernel_options: object = None,
    *, return_aux: None = None,
) -> Tensor: ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable | ScoreMod | None = None,
    block_mask: "masks.MaskLike | None" = None, scale: float | None = None,
    enable_gqa: bool = False, *, return_lse: Yes, kernel_options: object = None,
    return_aux: None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable | ScoreMod | None = None,
    block_mask: "masks.MaskLike | None" = None, scale: float | None = None,
    enable_gqa: bool = False, return_lse: bool = False, kernel_options: object = None,
    *, return_aux: "AuxRequest",
) -> "tuple[Tensor, AuxOutput]": ...  # fmt: skip
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable | ScoreMod | None = None,
    block_mask: "masks.MaskLike | None" = None, scale: float | None = None,
    enable_gqa: bool = False, return_lse: bool = False, kernel_options: object = None,
    *, return_aux: "AuxRequest | None" = None,
) -> Tensor | tuple[Tensor, Any]: ...  # fmt: skip
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable | ScoreMod | None = None,
    block_mask: "masks.MaskLike | None" = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: object = None,
    *,
    return_aux: "AuxRequest | None" = None,
) -> Tensor | tuple[Tensor, Any]:
    """torch.nn.attention.flex_attention.flex_attention, forward and backward, compiled or not.

    query: (batch, heads, seqlen_q, head_dim); key, value: (batch, kv_heads, seqlen_k, dim), of any
    strides: a last dimension that is not contiguous is copied. score_mod: a function of (score, b,
    h, q_idx, kv_idx), which is traced at every call, or the result of onchip.score_mods.trace; it
    sees the scaled score, before the mask. block_mask: a FlexAttention BlockMask, which is
    converted at every call, or the result of from_block_mask, or a mask of onchip. return_aux:
    (out, AuxOutput) with the requested ones of lse, natural logarithm, and max_scores.
    """
    _check_options(kernel_options)
    query, key, value = map(contiguous, (query, key, value))
    _check_heads(query, key, value, enable_gqa)
    if return_lse and return_aux is not None:
        raise ValueError("return_lse and return_aux=AuxRequest(lse=True) are the same: give one")
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    needs_max = return_aux is not None and return_aux.max_scores
    needs_lse = return_lse if return_aux is None else return_aux.lse
    options = {"softmax_scale": scale, "return_lse": needs_lse, "return_stats": needs_max}
    result = functional.attention(q, k, v, mask=block_mask, score_mod=score_mod, **options)
    out, *rest = cast(tuple[Any, ...], result if isinstance(result, tuple) else (result,))
    out = out.transpose(1, 2)
    lse = rest.pop(0) if needs_lse else None
    if return_aux is not None:
        return out, _aux(lse, rest[0].max_logit if rest else None)
    return (out, lse) if return_lse else out


def _aux(lse: Tensor | None, max_scores: Tensor | None):
    from torch.nn.attention.flex_attention import AuxOutput  # takes 0.3 s to import

    return AuxOutput(lse=lse, max_scores=max_scores)


def _check_options(kernel_options) -> None:
    if kernel_options:
        raise UnsupportedError(
            f"{kernel_options=} tune FlexAttention's kernels; attention(kernel=...) names one of"
            " onchip's"
        )


def _check_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    for name, t in (("query", query), ("key", key), ("value", value)):
        check_layout(name, t, 4, "(batch, heads, seqlen, head_dim)")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"query has {query.shape[1]} heads and key has {key.shape[1]}: give enable_gqa=True"
        )
