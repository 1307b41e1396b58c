"""flash_attn.cute, FlashAttention-4: functions return (out, lse), with lse None unless return_lse.
Its score_mod, mask_mod and block_sparse_tensors are programs for its own compiler and not
supported.
"""

from typing import cast

import torch
from torch import Tensor

from onchip.core import functional
from onchip.core.problem import UnsupportedError
from onchip.core.validation import check_offsets_tensor
from onchip.integrations.flash_attn.hopper import check_no_gradient, refuse
from onchip.integrations.flash_attn.options import contiguous

NO_WINDOW = (None, None)
OutLse = tuple[Tensor, Tensor | None]


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int | None, int | None] = NO_WINDOW,
    learnable_sink: Tensor | None = None, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, score_mod: object = None,
    score_mod_bwd: object = None, mask_mod: object = None, aux_tensors: object = None,
    aux_scalars: object = None, block_sparse_tensors: object = None,
    block_sparse_tensors_bwd: object = None, return_lse: bool = False,
) -> OutLse:  # fmt: skip
    """onchip.attention; window_size: None is no bound. learnable_sink: sinks."""
    refuse(qv=qv, gather_kv_indices=gather_kv_indices)
    _refuse_programs(score_mod, mask_mod, block_sparse_tensors)
    q, k, v = map(contiguous, (q, k, v))
    call = _options(softmax_scale, causal, window_size, softcap, learnable_sink, deterministic)
    result = functional.attention(q, k, v, **call, return_lse=bool(return_lse))
    return _as_pair(result, return_lse)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None, page_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int | None, int | None] = NO_WINDOW, learnable_sink: Tensor | None = None,
    softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, score_mod: object = None, score_mod_bwd: object = None,
    mask_mod: object = None, block_sparse_tensors: object = None, aux_tensors: object = None,
    aux_scalars: object = None, return_lse: bool = False, scheduler_metadata: Tensor | None = None,
    seqlen_k_per_split: int | None = None, disable_scheduler_metadata: bool = False,
) -> OutLse:  # fmt: skip
    """onchip.varlen_attention; with page_table (batch, max_pages) and seqused_k (batch,), or
    cu_seqlens_k, paged_attention without gradient. Missing max_seqlens are read from the offsets,
    which synchronises a GPU.
    """
    refuse(qv=qv, gather_kv_indices=gather_kv_indices, seqused_q=seqused_q)
    _refuse_programs(score_mod, mask_mod, block_sparse_tensors)
    q, k, v = map(contiguous, (q, k, v))
    call = _options(softmax_scale, causal, window_size, softcap, learnable_sink, deterministic)
    call["return_lse"] = bool(return_lse)
    if page_table is not None:
        check_no_gradient("page_table", q, k, v)
        with torch.no_grad():
            seqlens = cu_seqlens_k.diff() if seqused_k is None else seqused_k
            queries = {} if cu_seqlens_q is None else {"cu_seqlens_q": cu_seqlens_q}
            if queries:
                queries["max_seqlen_q"] = _longest(max_seqlen_q, cu_seqlens_q)
            result = functional.paged_attention(q, k, v, page_table, seqlens, **queries, **call)
        return _as_pair(result, return_lse)
    if cu_seqlens_q is None or cu_seqlens_k is None or seqused_k is not None:
        raise UnsupportedError(
            "packed sequences need cu_seqlens_q and cu_seqlens_k; seqused_k needs page_table"
        )
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_offsets_tensor(name, cu, q)
    longest = _longest(max_seqlen_q, cu_seqlens_q), _longest(max_seqlen_k, cu_seqlens_k)
    result = functional.varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, *longest, **call)
    return _as_pair(result, return_lse)


def check_head_dims(
    head_dim: int, head_dim_v: int, compute_capability: int, alignment: int
) -> None:
    """Raise AssertionError, which callers catch, for unsupported head dimensions."""
    if not (1 <= head_dim <= 256 and 1 <= head_dim_v <= 256):
        raise AssertionError(f"({head_dim=}, {head_dim_v=}) must be between 1 and 256")


def _refuse_programs(score_mod, mask_mod, block_sparse_tensors) -> None:
    programs = {"score_mod": score_mod, "mask_mod": mask_mod}
    programs["block_sparse_tensors"] = block_sparse_tensors
    for name, value in programs.items():
        if value is not None:
            raise UnsupportedError(
                f"{name} is a program for FlashAttention-4's compiler: call onchip.attention with"
                " mask= for mask_mod(b, h, q, k) and BlockMask objects, and with softcap=,"
                " alibi_slopes= or bias= for scores"
            )


def _options(softmax_scale, causal, window_size, softcap, learnable_sink, deterministic) -> dict:
    """The options of onchip.attention."""
    left, right = (None if side is None or side < 0 else int(side) for side in window_size)
    return {
        "softmax_scale": softmax_scale,
        "causal": bool(causal),
        "window_size": (left, right),
        "softcap": softcap or 0.0,
        "sinks": None if learnable_sink is None else learnable_sink.float(),
        "deterministic": bool(deterministic),
    }


def _as_pair(result: Tensor | tuple, return_lse: bool) -> OutLse:
    return cast(OutLse, result if return_lse else (result, None))


def _longest(max_seqlen: int | None, offsets: Tensor) -> int:
    return int(offsets.diff().max()) if max_seqlen is None else int(max_seqlen)
