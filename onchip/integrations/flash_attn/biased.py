"""flash_attn.flash_attn_triton: attention with a dense bias."""

from typing import cast

from torch import Tensor

from onchip.core import functional
from onchip.core.problem import UnsupportedError
from onchip.integrations.flash_attn.functions import unpack
from onchip.integrations.flash_attn.options import contiguous


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, causal: bool = False,
    softmax_scale: float | None = None,
) -> Tensor:  # fmt: skip
    """onchip.attention with bias (batch|1, heads|1, seqlen_q|1, seqlen_k), which gets no gradient,
    as upstream. causal needs as many queries as keys: upstream aligns it top-left.
    """
    if causal and q.shape[1] != k.shape[1]:
        raise UnsupportedError(
            f"causal is aligned top-left in flash_attn_triton: {q.shape[1]} queries over"
            f" {k.shape[1]} keys are not supported, call flash_attn_func of flash_attn"
        )
    q, k, v = map(contiguous, (q, k, v))
    options = {"causal": bool(causal), "softmax_scale": softmax_scale}
    bias = None if bias is None else bias.detach()
    return cast(Tensor, functional.attention(q, k, v, bias=bias, **options))


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, bias: Tensor | None = None, causal: bool = False,
    softmax_scale: float | None = None,
) -> Tensor:  # fmt: skip
    k, v = unpack("kv", kv, 2, 5)
    return flash_attn_func(q, k, v, bias, causal, softmax_scale)


def flash_attn_qkvpacked_func(
    qkv: Tensor, bias: Tensor | None = None, causal: bool = False,
    softmax_scale: float | None = None,
) -> Tensor:  # fmt: skip
    q, k, v = unpack("qkv", qkv, 3, 5)
    return flash_attn_func(q, k, v, bias, causal, softmax_scale)
