"""flash_attn_2_cuda, the extension module below flash_attn_interface: its four passes with their
arguments in the extension's order. Programs call it for arguments that flash_attn_interface hides.
"""

from typing import NoReturn

from torch import Tensor

from onchip.core.problem import UnsupportedError
from onchip.integrations.flash_attn import primitives

USE_TRITON_ROCM = False  # flash_attn's kernels for AMD; onchip has its own dispatch


def fwd(
    q, k, v, out_, alibi_slopes, p_dropout, softmax_scale, is_causal, window_size_left,
    window_size_right, softcap, return_softmax, gen_=None,
) -> list[Tensor]:  # fmt: skip
    _check_generator(gen_)
    score = p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap
    results = primitives.flash_attn_forward(q, k, v, *score, alibi_slopes, return_softmax)
    return _into(out_, results)


def varlen_fwd(
    q, k, v, out_, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes,
    max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal,
    window_size_left, window_size_right, softcap, return_softmax, gen_=None, num_splits=0,
) -> list[Tensor]:  # fmt: skip
    _check_generator(gen_)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    score = p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap
    rest = alibi_slopes, return_softmax, block_table, leftpad_k, seqused_k
    results = primitives.flash_attn_varlen_forward(
        q, k, v, *lengths, *score, *rest, zero_tensors, num_splits
    )
    return _into(out_, results)


def bwd(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, alibi_slopes, p_dropout, softmax_scale,
    is_causal, window_size_left, window_size_right, softcap, deterministic, gen_=None,
    rng_state=None,
) -> list[Tensor]:  # fmt: skip
    _check_generator(gen_)
    dq, dk, dv = _empty(dq, q), _empty(dk, k), _empty(dv, v)
    score = p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap
    rest = alibi_slopes, deterministic, rng_state
    delta = primitives.flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, *score, *rest
    )
    return [dq, dk, dv, delta]


def varlen_bwd(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, alibi_slopes,
    max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal,
    window_size_left, window_size_right, softcap, deterministic, gen_=None, rng_state=None,
) -> list[Tensor]:  # fmt: skip
    _check_generator(gen_)
    dq, dk, dv = _empty(dq, q), _empty(dk, k), _empty(dv, v)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    score = p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap
    rest = alibi_slopes, deterministic, rng_state, zero_tensors
    delta = primitives.flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, *lengths, *score, *rest
    )
    return [dq, dk, dv, delta]


def fwd_kvcache(*args, **kwargs) -> NoReturn:
    raise UnsupportedError(
        "flash_attn_2_cuda.fwd_kvcache is not supported: call flash_attn.flash_attn_with_kvcache"
    )


def _check_generator(gen_: object) -> None:
    if gen_ is not None:
        raise RuntimeError(
            "the `generator` argument is no longer supported: seed torch's generator of the device"
        )


def _into(out_: Tensor | None, results: tuple[Tensor, ...]) -> list[Tensor]:
    out, *rest = results
    return [out if out_ is None else out_.copy_(out), *rest]


def _empty(grad: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(like.shape) if grad is None else grad
