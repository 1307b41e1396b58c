"""FlashAttention-3's module flash_attn_interface. Its lse of a row that sees no key is -inf, like
onchip's. num_splits, pack_gqa, sm_margin and scheduler_metadata tune its kernels; here dispatch
decides, and num_splits=1 over a cache gives results that do not depend on the rest of the batch.
"""

from typing import Any, cast, overload

import torch
from torch import Tensor

from onchip.core import functional
from onchip.core.problem import UnsupportedError
from onchip.core.signatures import No, Yes
from onchip.integrations.flash_attn.functions import unpack
from onchip.integrations.flash_attn.kvcache import flash_attn_with_kvcache as with_kvcache
from onchip.integrations.flash_attn.options import (
    FlashArguments,
    Lengths,
    as_int,
    contiguous,
    onchip_lse,
)
from onchip.integrations.flash_attn.primitives import attend_in_pages, write_gradients

NO_WINDOW = (-1, -1)


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
    return_attn_probs: No = False,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0, *,
    return_attn_probs: Yes,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    qv: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """onchip.attention: out, or with return_attn_probs (out, softmax_lse)."""
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    refuse(attention_chunk=attention_chunk or None)
    score = softmax_scale, causal, window_size, softcap, None, deterministic
    options = FlashArguments(0.0, *score).options
    q, k, v = map(contiguous, (q, k, v))
    return functional.attention(q, k, v, **options, return_lse=bool(return_attn_probs))


@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, softmax_scale: float | None = None, causal: bool = False,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0, softcap: float = 0.0, deterministic: bool = False,
    num_heads_q: int | None = None, sm_margin: int = 0, return_attn_probs: No = False,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, softmax_scale: float | None = None, causal: bool = False,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0, softcap: float = 0.0, deterministic: bool = False,
    num_heads_q: int | None = None, sm_margin: int = 0, *, return_attn_probs: Yes,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def flash_attn_qkvpacked_func(
    qkv: Tensor, softmax_scale: float | None = None, causal: bool = False,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0, softcap: float = 0.0, deterministic: bool = False,
    num_heads_q: int | None = None, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """flash_attn_func of qkv (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, num_heads_q +
    2 kv_heads, head_dim) with num_heads_q.
    """
    if num_heads_q is None:
        q, k, v = unpack("qkv", qkv, 3, 5)
    else:
        heads = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split((num_heads_q, heads, heads), 2)
    descales = q_descale, k_descale, v_descale
    score = softmax_scale, causal, None, *descales, window_size, attention_chunk, softcap
    return flash_attn_func(q, k, v, *score, 1, None, deterministic, sm_margin, return_attn_probs)


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
    return_attn_probs: No = False,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0, *,
    return_attn_probs: Yes,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """onchip.varlen_attention. seqused_k: int32 (batch,), the number of keys used of each sequence;
    without gradient.
    """
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    refuse(attention_chunk=attention_chunk or None, seqused_q=seqused_q)
    arguments = FlashArguments(
        0.0, softmax_scale, causal, window_size, softcap, None, deterministic
    )
    lengths = cu_seqlens_q, cu_seqlens_k, as_int(max_seqlen_q), as_int(max_seqlen_k)
    q, k, v = map(contiguous, (q, k, v))
    if seqused_k is None:
        return functional.varlen_attention(
            q, k, v, *lengths, **arguments.options, return_lse=bool(return_attn_probs)
        )
    check_no_gradient("seqused_k", q, k, v)
    with torch.no_grad():
        out, lse = attend_in_pages(q, k, v, lengths, arguments, (None, None, seqused_k))
    return (out, lse) if return_attn_probs else out


@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    qv: Tensor | None = None, rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None, rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW, attention_chunk: int = 0, softcap: float = 0.0,
    rotary_interleaved: bool = True, scheduler_metadata: Tensor | None = None, num_splits: int = 0,
    pack_gqa: bool | None = None, sm_margin: int = 0, return_softmax_lse: No = False,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    qv: Tensor | None = None, rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None, rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW, attention_chunk: int = 0, softcap: float = 0.0,
    rotary_interleaved: bool = True, scheduler_metadata: Tensor | None = None, num_splits: int = 0,
    pack_gqa: bool | None = None, sm_margin: int = 0, *, return_softmax_lse: Yes,
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...  # fmt: skip
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    qv: Tensor | None = None, rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None, rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW, attention_chunk: int = 0, softcap: float = 0.0,
    rotary_interleaved: bool = True, scheduler_metadata: Tensor | None = None, num_splits: int = 0,
    pack_gqa: bool | None = None, sm_margin: int = 0, return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """flash_attn_with_kvcache of FlashAttention-2 with page_table for its block_table; packed q
    (total_q, heads, head_dim) with cu_seqlens_q and max_seqlen_q over pages as well. With
    return_softmax_lse upstream appends two empty tensors to (out, softmax_lse), and so does this.
    """
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    refuse(rotary_seqlens=rotary_seqlens, cu_seqlens_k_new=cu_seqlens_k_new)
    refuse(attention_chunk=attention_chunk or None)
    if cu_seqlens_q is None:
        score = softmax_scale, causal, window_size, softcap, rotary_interleaved, None, num_splits
        where = cache_seqlens, cache_batch_idx, cache_leftpad, page_table
        turns = rotary_cos, rotary_sin
        out, lse = with_kvcache(q, k_cache, v_cache, k, v, *turns, *where, *score, True)
        lse = onchip_lse(lse)
    else:
        rest = {"k": k, "rotary_cos": rotary_cos, "cache_leftpad": cache_leftpad}
        refuse("with cu_seqlens_q", **rest, cache_batch_idx=cache_batch_idx)
        if page_table is None or not isinstance(cache_seqlens, Tensor):
            raise UnsupportedError("cu_seqlens_q needs page_table and a tensor of cache_seqlens")
        arguments = FlashArguments(0.0, softmax_scale, causal, window_size, softcap)
        cache = k_cache, v_cache, page_table, cache_seqlens
        queries = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": as_int(max_seqlen_q)}
        with torch.no_grad():
            out, lse = functional.paged_attention(
                contiguous(q), *cache, **queries, **arguments.scores, return_lse=True
            )
    return (out, lse, q.new_empty(0), lse.new_empty(0)) if return_softmax_lse else out


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of partial results over disjoint keys: out_partial (splits, batch, seqlen, heads,
    head_dim), lse_partial (splits, batch, seqlen, heads), both fp32; packed without batch.
    """
    merged, lse = functional.merge_states(out_partial.unbind(0), lse_partial.mT.unbind(0))
    dtype = out_dtype or (out_partial.dtype if out is None else out.dtype)
    merged = merged.to(dtype) if out is None else out.copy_(merged)
    return merged, lse.mT


def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int,
    headdim: int, cache_seqlens: Tensor, qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None, cache_leftpad: Tensor | None = None,
    page_size: int | None = None, max_seqlen_k_new: int = 0, causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW, attention_chunk: int = 0, has_softcap: bool = False,
    num_splits: int = 0, pack_gqa: bool | None = None, sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    """An empty int32 tensor as scheduler_metadata: calls here do not need it."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, k_new: Tensor | None = None, v_new: Tensor | None = None,
    qv: Tensor | None = None, out_: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    page_table: Tensor | None = None, kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None, rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None, seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1, attention_chunk: int = 0,
    softcap: float = 0.0, rotary_interleaved: bool = True, scheduler_metadata: Tensor | None = None,
    num_splits: int = 1, pack_gqa: bool | None = None, sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, softmax_lse, two empty tensors) of any call, without autograd. out_: gets out."""
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    refuse(attention_chunk=attention_chunk or None, seqused_q=seqused_q)
    window_size = window_size_left, window_size_right
    arguments = FlashArguments(0.0, softmax_scale, causal, window_size, softcap)
    with torch.no_grad():
        if cu_seqlens_k is not None:
            refuse("with cu_seqlens_k", k_new=k_new, page_table=page_table)
            longest = as_int(max_seqlen_q), as_int(max_seqlen_k)
            lengths = cast(Lengths, (cu_seqlens_q, cu_seqlens_k, *longest))
            q, k, v = map(contiguous, (q, k, v))
            if leftpad_k is None and seqused_k is None:
                out, lse = functional.varlen_attention(
                    q, k, v, *lengths, **arguments.options, return_lse=True
                )
            else:
                used = None, leftpad_k, seqused_k
                out, lse = attend_in_pages(q, k, v, lengths, arguments, used)
        elif k_new is None and page_table is None and seqused_k is None:
            q, k, v = map(contiguous, (q, k, v))
            out, lse = functional.attention(q, k, v, **arguments.options, return_lse=True)
        else:
            turns = rotary_cos, rotary_sin
            where = seqused_k, kv_batch_idx, leftpad_k, page_table, cu_seqlens_q, cu_seqlens_k_new
            out, lse, *_ = flash_attn_with_kvcache(
                *(q, k, v, k_new, v_new, None, *turns, *where, max_seqlen_q, seqlens_rotary),
                softmax_scale=softmax_scale,
                causal=causal,
                window_size=window_size,
                softcap=softcap,
                rotary_interleaved=rotary_interleaved,
                num_splits=num_splits,
                return_softmax_lse=True,
            )
    out = out if out_ is None else out_.copy_(out)
    return out, lse, q.new_empty(0), lse.new_empty(0)


def flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None, sequed_k: Tensor | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, dq: Tensor | None = None, dk: Tensor | None = None,
    dv: Tensor | None = None, softmax_scale: float | None = None, is_causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    deterministic: bool = False, sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    """Write the gradients into dq, dk and dv, if given; return rowsum(out * dout), shaped as
    softmax_lse.
    """
    refuse(sequed_q=sequed_q, sequed_k=sequed_k)
    score = softmax_scale, is_causal, (window_size_left, window_size_right), softcap
    arguments = FlashArguments(0.0, *score, None, deterministic)
    lengths = None
    if cu_seqlens_q is not None:
        lengths = cu_seqlens_q, cu_seqlens_k, as_int(max_seqlen_q), as_int(max_seqlen_k)
    return write_gradients(
        (q, k, v), lengths, arguments, (out, softmax_lse, dout), (dq, dk, dv), None
    )


def refuse(context: str = "", **arguments: Any) -> None:
    """Raise UnsupportedError for the first argument that is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedError(
                f"{name} {context}".rstrip() + f" is not supported: pass {name}=None"
            )


def check_no_gradient(name: str, *tensors: Tensor) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise UnsupportedError(
            f"{name} has no gradient: call under torch.no_grad(), or pack the sequences and give"
            " their lengths in cu_seqlens"
        )
