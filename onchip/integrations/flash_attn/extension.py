"""flash_attn_2_cuda, the extension module below flash_attn_interface: its four passes with their
arguments in the extension's order. Programs call it for arguments that flash_attn_interface hides.
"""

from typing import Any, NoReturn

from torch import Tensor

from onchip.core.problem import UnsupportedError
from onchip.integrations.flash_attn import primitives

USE_TRITON_ROCM = False  # flash_attn's kernels for AMD; onchip has its own dispatch


def fwd(
    q: Tensor, k: Tensor, v: Tensor, out_: Tensor | None, alibi_slopes: Tensor | None,
    p_dropout: float, softmax_scale: float | None, is_causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, return_softmax: bool, gen_: object = None,
) -> list[Tensor]:  # fmt: skip
    _check_generator(gen_)
    score = p_dropout, softmax_scale, is_causal, window_size_left, window_size_right, softcap
    results = primitives.flash_attn_forward(q, k, v, *score, alibi_slopes, return_softmax)
    return _into(out_, results)


def varlen_fwd(
    q: Tensor, k: Tensor, v: Tensor, out_: Tensor | None, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor, seqused_k: Tensor | None, leftpad_k: Tensor | None,
    block_table: Tensor | None, alibi_slopes: Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
    p_dropout: float, softmax_scale: float | None, zero_tensors: bool, is_causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, return_softmax: bool,
    gen_: object = None, num_splits: int = 0,
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
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, alibi_slopes: Tensor | None,
    p_dropout: float, softmax_scale: float | None, is_causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, deterministic: bool, gen_: object = None,
    rng_state: Tensor | None = None,
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
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor, alibi_slopes: Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
    p_dropout: float, softmax_scale: float | None, zero_tensors: bool, is_causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, deterministic: bool,
    gen_: object = None, rng_state: Tensor | None = None,
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


def fwd_kvcache(*args: Any, **kwargs: Any) -> NoReturn:
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
