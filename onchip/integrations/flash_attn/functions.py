"""flash_attn's functions of dense and of packed tensors. They have as many parameters as flash_attn
gave them, in its order: programs pass them by position.
"""

import torch
from torch import Tensor

from onchip.core import functional
from onchip.core.problem import UnsupportedError, check_offsets_tensor
from onchip.integrations.flash_attn.cache import check_pages, check_table
from onchip.integrations.flash_attn.options import Asked, Lengths, contiguous, flash_lse, number
from onchip.integrations.flash_attn.s_dmask import dense_s_dmask, packed_s_dmask

Answer = Tensor | tuple[Tensor, ...]


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
) -> Answer:
    """onchip.attention with flash_attn's arguments.

    q: (batch, seqlen_q, heads, head_dim); k, v: (batch, seqlen_k, kv_heads, head_dim).
    return_attn_probs: (out, softmax_lse, S_dmask). softmax_lse: (batch, heads, seqlen_q), +inf for
    a row that sees no key. S_dmask: empty without dropout, else as s_dmask.py has it.
    """
    asked = Asked(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    return _dense(q, k, v, asked)


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
) -> Answer:
    """flash_attn_func of kv (batch, seqlen_k, 2, kv_heads, head_dim)."""
    k, v = unpack("kv", kv, 2, 5)
    asked = Asked(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    return _dense(q, k, v, asked)


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
) -> Answer:
    """flash_attn_func of qkv (batch, seqlen, 3, heads, head_dim)."""
    q, k, v = unpack("qkv", qkv, 3, 5)
    asked = Asked(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    return _dense(q, k, v, asked)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
) -> Answer:
    """onchip.varlen_attention with flash_attn's arguments; with block_table, paged_attention.

    q: (total_q, heads, head_dim); k, v: (total_k, kv_heads, head_dim), with block_table (batch,
    max_blocks) int32: (num_blocks, block_size, kv_heads, head_dim), no gradient and no dropout.
    return_attn_probs: softmax_lse is (heads, total_q), S_dmask 0 outside of a sequence.
    """
    asked = Asked(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    if block_table is None:
        return _packed(q, k, v, lengths, asked)
    if dropout_p:
        raise UnsupportedError(f"{dropout_p=} with block_table: pages are read without dropout")
    return _paged(q, (k, v, block_table), lengths, asked)


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
) -> Answer:
    """flash_attn_varlen_func of kv (total_k, 2, kv_heads, head_dim)."""
    k, v = unpack("kv", kv, 2, 4)
    asked = Asked(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return _packed(q, k, v, lengths, asked)


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
) -> Answer:
    """flash_attn_varlen_func of qkv (total, 3, heads, head_dim)."""
    q, k, v = unpack("qkv", qkv, 3, 4)
    asked = Asked(
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return _packed(q, k, v, lengths, asked)


def unpack(name: str, t: Tensor, count: int, rank: int) -> tuple[Tensor, ...]:
    if not isinstance(t, Tensor) or t.dim() != rank or t.shape[-3] != count:
        got = tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__
        rows = "batch, seqlen" if rank == 5 else "total"
        raise ValueError(f"{name} must be ({rows}, {count}, heads, head_dim), got {got}")
    return t.unbind(-3)


def _dense(q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> Answer:
    q, k, v = map(contiguous, (q, k, v))
    if not asked.return_attn_probs:
        return functional.attention(q, k, v, **asked.options)
    seed = functional.seed_tensor(None, q) if asked.dropout_p else None
    out, lse = functional.attention(q, k, v, **asked.options, dropout_seed=seed, return_lse=True)
    return out, flash_lse(lse), dense_s_dmask(q, k, lse, asked, seed)


def _packed(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, asked: Asked) -> Answer:
    q, k, v = map(contiguous, (q, k, v))
    lengths = *lengths[:2], number(lengths[2]), number(lengths[3])
    if not asked.return_attn_probs:
        return functional.varlen_attention(q, k, v, *lengths, **asked.options)
    seed = functional.seed_tensor(None, q) if asked.dropout_p else None
    call = asked.options | {"dropout_seed": seed, "return_lse": True}
    out, lse = functional.varlen_attention(q, k, v, *lengths, **call)
    return out, flash_lse(lse), packed_s_dmask(q, k, lse, lengths, asked, seed)


@torch.no_grad()
def _paged(q: Tensor, pages: tuple[Tensor, ...], lengths: Lengths, asked: Asked) -> Answer:
    """Detached even if an input requires a gradient: flash_attn's backward has no block_table."""
    k, v, block_table = pages
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, _ = lengths
    check_offsets_tensor("cu_seqlens_k", cu_seqlens_k, q)
    check_table(block_table, len(cu_seqlens_k) - 1)
    cache_seqlens = cu_seqlens_k.diff()
    check_pages(k, block_table, cache_seqlens, cu_seqlens_q.diff(), asked)
    answer = functional.paged_attention(
        contiguous(q),
        k,
        v,
        block_table,
        cache_seqlens,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=number(max_seqlen_q),
        **asked.scores,
        return_lse=bool(asked.return_attn_probs),
    )
    if not asked.return_attn_probs:
        return answer
    out, lse = answer
    return out, flash_lse(lse), q.new_empty(0)
