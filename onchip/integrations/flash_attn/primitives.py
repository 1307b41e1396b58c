"""flash_attn_interface's functions of a single pass: a forward without autograd, and a backward
from out and softmax_lse. Programs with a gradient of their own call them: rings of GPUs, sequence
parallelism. They keep upstream's names, order and defaults, because programs read their signatures.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.core import functional, torch_op
from onchip.core.backend import accumulator_dtype, row_delta
from onchip.core.problem import Options, Tensors, UnsupportedError
from onchip.core.validation import check_offsets_tensor
from onchip.integrations.flash_attn.cache import check_pages, check_table
from onchip.integrations.flash_attn.options import (
    FlashArguments,
    Lengths,
    as_int,
    contiguous,
    flash_lse,
    onchip_lse,
    untraced,
)
from onchip.integrations.flash_attn.s_dmask import ROUNDED_TO, dense_s_dmask, packed_s_dmask

Forward = tuple[Tensor, Tensor, Tensor, Tensor]  # out, softmax_lse, S_dmask, rng_state
Saved = tuple[Tensor, Tensor, Tensor]  # out, softmax_lse, dout
Buffers = tuple[Tensor | None, Tensor | None, Tensor | None]  # dq, dk, dv to write into


def flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> Forward:  # fmt: skip
    """(out, softmax_lse, S_dmask, rng_state) of (batch, seqlen, heads, head_dim). rng_state: int64
    (2,), the seed of the dropout mask and 0.
    """
    window_size = window_size_left, window_size_right
    arguments = FlashArguments(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    q, k, v = map(contiguous, (q, k, v))
    with torch.no_grad():
        seed = functional.seed_tensor(None, q) if dropout_p else None
        out, lse = functional.attention(
            q, k, v, **arguments.options, dropout_seed=seed, return_lse=True
        )
        s_dmask = dense_s_dmask(q, k, lse, arguments, seed if return_softmax else None)
        return out, flash_lse(lse), s_dmask, _rng_state(seed, q)


def flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, return_softmax: bool = False,
    block_table: Tensor | None = None, leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None, zero_tensors: bool = False, num_splits: int = 0,
) -> Forward:  # fmt: skip
    """The same of packed sequences. block_table: k and v are pages. leftpad_k, seqused_k: int32
    (batch,), sequence b has keys from leftpad_k[b] on, and ends at seqused_k[b].
    """
    _check_varlen(num_splits, zero_tensors)
    window_size = window_size_left, window_size_right
    arguments = FlashArguments(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    lengths = cu_seqlens_q, cu_seqlens_k, as_int(max_seqlen_q), as_int(max_seqlen_k)
    q, k, v = map(contiguous, (q, k, v))
    with torch.no_grad():
        if block_table is not None or leftpad_k is not None or seqused_k is not None:
            used = block_table, leftpad_k, seqused_k
            out, lse = attend_in_pages(q, k, v, lengths, arguments, used)
            return out, flash_lse(lse), q.new_empty(0), _rng_state(None, q)
        seed = functional.seed_tensor(None, q) if dropout_p else None
        out, lse = functional.varlen_attention(
            q, k, v, *lengths, **arguments.options, dropout_seed=seed, return_lse=True
        )
        s_dmask = packed_s_dmask(q, k, lse, lengths, arguments, seed if return_softmax else None)
        return out, flash_lse(lse), s_dmask, _rng_state(seed, q)


def flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dropout_p: float,
    softmax_scale: float | None, causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write the gradients into dq, dk and dv, if given; return rowsum(out * dout) (batch, heads,
    seqlen_q rounded up to a multiple of 128).

    out and softmax_lse may be over more keys than k has: then the gradients are the terms of k's
    keys. rng_state: from the forward, needed with dropout.
    """
    window_size = window_size_left, window_size_right
    score = softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    arguments = FlashArguments(dropout_p, *score)
    saved, buffers = (out, softmax_lse, dout), (dq, dk, dv)
    delta = write_gradients((q, k, v), None, arguments, saved, buffers, rng_state)
    return F.pad(delta, (0, -delta.shape[-1] % ROUNDED_TO))


def flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float,
    softmax_scale: float | None, causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None, zero_tensors: bool = False,
) -> Tensor:  # fmt: skip
    """The same of packed sequences. rowsum(out * dout) is (heads, total_q + 128 * batch): that of
    sequence b begins at cu_seqlens_q[b] + 128 * b.
    """
    _check_varlen(0, zero_tensors)
    window_size = window_size_left, window_size_right
    score = softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    arguments = FlashArguments(dropout_p, *score)
    lengths = cu_seqlens_q, cu_seqlens_k, as_int(max_seqlen_q), as_int(max_seqlen_k)
    saved, buffers = (out, softmax_lse, dout), (dq, dk, dv)
    delta = write_gradients((q, k, v), lengths, arguments, saved, buffers, rng_state)
    token = torch.arange(delta.shape[-1], device=delta.device)
    sequence = torch.searchsorted(cu_seqlens_q[1:], token, right=True)
    width = delta.shape[-1] + ROUNDED_TO * (len(cu_seqlens_q) - 1)
    spaced = delta.new_zeros(delta.shape[0], width)
    return spaced.index_copy_(1, token + ROUNDED_TO * sequence, delta)


def _check_varlen(num_splits: int, zero_tensors: bool) -> None:
    if num_splits > 1:
        raise RuntimeError(
            f"num_splits > 1 is not supported for packed sequences, got {num_splits}"
        )
    if zero_tensors:
        raise UnsupportedError(
            "zero_tensors=True is not supported: rows outside of all sequences are not written; let"
            " cu_seqlens_q end at q.shape[0]"
        )


def _rng_state(seed: Tensor | None, q: Tensor) -> Tensor:
    state = torch.zeros(2, dtype=torch.int64, device=q.device)
    return state if seed is None else torch.stack([seed, state[1]])


def attend_in_pages(
    q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, arguments: FlashArguments,
    used: tuple[Tensor | None, Tensor | None, Tensor | None], return_lse: bool = True,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """(out, lse), or out, of sequences that use only some of their keys. Packed keys are treated as
    pages of one key each, so that a sequence may begin and end anywhere.
    """
    block_table, leftpad_k, seqused_k = used
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = lengths
    if arguments.dropout_p:
        raise UnsupportedError(
            f"dropout_p={arguments.dropout_p} is not supported with block_table, leftpad_k or"
            " seqused_k"
        )
    if block_table is not None and leftpad_k is not None:
        raise UnsupportedError("leftpad_k with block_table is refused, as flash_attn refuses it")
    check_offsets_tensor("cu_seqlens_k", cu_seqlens_k, q)
    seqlens = cu_seqlens_k.diff() if seqused_k is None else seqused_k
    if block_table is None:
        start = cu_seqlens_k[:-1] if leftpad_k is None else cu_seqlens_k[:-1] + leftpad_k
        seqlens = seqlens if leftpad_k is None else seqlens - leftpad_k
        steps = torch.arange(max_seqlen_k, dtype=torch.int32, device=q.device)
        block_table = (start[:, None] + steps).clamp(max=max(k.shape[0] - 1, 0))
        k, v = k.unsqueeze(1), v.unsqueeze(1)
    else:
        check_table(block_table, len(cu_seqlens_k) - 1)
        check_pages(k, block_table, seqlens, cu_seqlens_q.diff(), arguments)
    return functional.paged_attention(
        q,
        k,
        v,
        block_table,
        seqlens,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        **arguments.scores,
        return_lse=return_lse,
    )


@untraced
@torch.no_grad()
def write_gradients(
    qkv: tuple[Tensor, Tensor, Tensor],
    lengths: Lengths | None,
    arguments: FlashArguments,
    saved: Saved,
    buffers: Buffers,
    rng_state: Tensor | None,
) -> Tensor:
    """Fill the buffers; return rowsum(out * dout), shaped as lse."""
    if arguments.dropout_p and rng_state is None:
        raise ValueError(f"dropout_p={arguments.dropout_p} needs the rng_state of the forward")
    q, k, v = map(contiguous, qkv)
    out, lse, dout = saved
    seed = rng_state[0].clone() if arguments.dropout_p and rng_state is not None else None
    fields: dict[str, Any] = {**arguments.options, "return_lse": True}
    slopes = fields.pop("alibi_slopes")  # a tensor, not one of the scalar Options
    cu_q, cu_k, *max_seqlens = (None, None) if lengths is None else lengths
    x, options = Tensors(q, k, v, cu_q, cu_k, alibi_slopes=slopes), Options(**fields)
    call, x = functional.prepare_attention(x, options, tuple(max_seqlens), dropout_seed=seed)
    out, dout = out.contiguous(), dout.contiguous()
    lse = onchip_lse(lse).to(accumulator_dtype(q.dtype)).contiguous()
    grads = torch_op.run_backward(call, x, None, out, lse, dout, None)
    for buffer, grad in zip(buffers, grads[:3], strict=True):
        if buffer is not None:
            buffer.copy_(grad)
    return row_delta(out, dout, None)
