"""flash_attn's functions of dense and of packed tensors. They have all parameters of flash_attn, in
its order, because programs pass them by position.
"""

from typing import cast, overload

import torch
from torch import Tensor

from onchip.core import functional
from onchip.core.problem import UnsupportedError
from onchip.core.signatures import No, Yes
from onchip.integrations.flash_attn.options import (
    FlashArguments,
    Lengths,
    as_int,
    contiguous,
    flash_lse,
)
from onchip.integrations.flash_attn.primitives import attend_in_pages
from onchip.integrations.flash_attn.s_dmask import dense_s_dmask, packed_s_dmask

WithProbs = tuple[Tensor, Tensor, Tensor]  # out, softmax_lse, S_dmask
FlashResult = Tensor | WithProbs


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: No = False,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, *, return_attn_probs: Yes,
) -> WithProbs: ...  # fmt: skip
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> FlashResult: ...  # fmt: skip
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> FlashResult:  # fmt: skip
    """onchip.attention with flash_attn's arguments.

    q: (batch, seqlen_q, heads, head_dim); k, v: (batch, seqlen_k, kv_heads, head_dim).
    return_attn_probs: (out, softmax_lse, S_dmask). softmax_lse: (batch, heads, seqlen_q), +inf for
    a row that sees no key. S_dmask: empty without dropout, else see s_dmask.py.
    """
    score = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    arguments = FlashArguments(*score, deterministic, return_attn_probs)
    return _dense(q, k, v, arguments)


@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: No = False,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, *, return_attn_probs: Yes,
) -> WithProbs: ...  # fmt: skip
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> FlashResult: ...  # fmt: skip
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> FlashResult:  # fmt: skip
    """flash_attn_func of kv (batch, seqlen_k, 2, kv_heads, head_dim)."""
    score = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    arguments = FlashArguments(*score, deterministic, return_attn_probs)
    k, v = unpack("kv", kv, 2, 5)
    return _dense(q, k, v, arguments)


@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: No = False,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, *, return_attn_probs: Yes,
) -> WithProbs: ...  # fmt: skip
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> FlashResult: ...  # fmt: skip
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> FlashResult:  # fmt: skip
    """flash_attn_func of qkv (batch, seqlen, 3, heads, head_dim)."""
    score = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    arguments = FlashArguments(*score, deterministic, return_attn_probs)
    q, k, v = unpack("qkv", qkv, 3, 5)
    return _dense(q, k, v, arguments)


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: No = False,
    block_table: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, *, return_attn_probs: Yes,
    block_table: Tensor | None = None,
) -> WithProbs: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> FlashResult: ...  # fmt: skip
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> FlashResult:  # fmt: skip
    """onchip.varlen_attention with flash_attn's arguments; with block_table, paged_attention.

    q: (total_q, heads, head_dim); k, v: (total_k, kv_heads, head_dim), with block_table (batch,
    max_blocks) int32: (num_blocks, block_size, kv_heads, head_dim), no gradient and no dropout.
    return_attn_probs: softmax_lse is (heads, total_q), S_dmask 0 outside of a sequence.
    """
    score = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    arguments = FlashArguments(*score, deterministic, return_attn_probs)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    if block_table is None:
        return _packed(q, k, v, lengths, arguments)
    if dropout_p:
        raise UnsupportedError(f"{dropout_p=} with block_table: pages are read without dropout")
    return _paged(q, k, v, lengths, arguments, block_table)


@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: No = False,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, *, return_attn_probs: Yes,
) -> WithProbs: ...  # fmt: skip
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> FlashResult: ...  # fmt: skip
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> FlashResult:  # fmt: skip
    """flash_attn_varlen_func of kv (total_k, 2, kv_heads, head_dim)."""
    score = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    arguments = FlashArguments(*score, deterministic, return_attn_probs)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    k, v = unpack("kv", kv, 2, 4)
    return _packed(q, k, v, lengths, arguments)


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: No = False,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, *, return_attn_probs: Yes,
) -> WithProbs: ...  # fmt: skip
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> FlashResult: ...  # fmt: skip
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> FlashResult:  # fmt: skip
    """flash_attn_varlen_func of qkv (total, 3, heads, head_dim)."""
    score = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes
    arguments = FlashArguments(*score, deterministic, return_attn_probs)
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    q, k, v = unpack("qkv", qkv, 3, 4)
    return _packed(q, k, v, lengths, arguments)


def unpack(name: str, t: Tensor, count: int, rank: int) -> tuple[Tensor, ...]:
    if not isinstance(t, Tensor) or t.dim() != rank or t.shape[-3] != count:
        got = tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__
        rows = "batch, seqlen" if rank == 5 else "total"
        raise ValueError(f"{name} must be ({rows}, {count}, heads, head_dim), got {got}")
    return t.unbind(-3)


def _dense(q: Tensor, k: Tensor, v: Tensor, arguments: FlashArguments) -> FlashResult:
    q, k, v = map(contiguous, (q, k, v))
    if not arguments.return_attn_probs:
        return functional.attention(q, k, v, **arguments.options)
    seed = functional.seed_tensor(None, q) if arguments.dropout_p else None
    out, lse = functional.attention(
        q, k, v, **arguments.options, dropout_seed=seed, return_lse=True
    )
    return out, flash_lse(lse), dense_s_dmask(q, k, lse, arguments, seed)


def _packed(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, arguments: FlashArguments
) -> FlashResult:
    q, k, v = map(contiguous, (q, k, v))
    lengths = *lengths[:2], as_int(lengths[2]), as_int(lengths[3])
    if not arguments.return_attn_probs:
        return functional.varlen_attention(q, k, v, *lengths, **arguments.options)
    seed = functional.seed_tensor(None, q) if arguments.dropout_p else None
    out, lse = functional.varlen_attention(
        q, k, v, *lengths, **arguments.options, dropout_seed=seed, return_lse=True
    )
    return out, flash_lse(lse), packed_s_dmask(q, k, lse, lengths, arguments, seed)


@torch.no_grad()
def _paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    arguments: FlashArguments,
    block_table: Tensor,
) -> FlashResult:
    """Without gradient even if an input requires one: flash_attn's backward has no block_table."""
    lengths, used = (*lengths[:2], as_int(lengths[2]), lengths[3]), (block_table, None, None)
    return_lse = bool(arguments.return_attn_probs)
    result = attend_in_pages(contiguous(q), k, v, lengths, arguments, used, return_lse)
    return (result[0], flash_lse(result[1]), q.new_empty(0)) if return_lse else cast(Tensor, result)
