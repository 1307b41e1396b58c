"""The operators that F.scaled_dot_product_attention ends in, computed by onchip's kernels.

Their tensors are (batch, heads, seqlen, head_dim). is_causal is aligned top-left, except for flash
attention on a GPU. A mask is added to the scores. Results have the strides and shapes that torch's
compilers expect. A `ValueError` means that torch's own kernel has to run.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad as fwAD
from torch.nn import functional as F

from onchip.core import torch_op
from onchip.core.call_cache import CachedCall
from onchip.core.functional import prepare_attention
from onchip.core.problem import Options, Tensors, UnsupportedError
from onchip.core.torch_mode import is_eager
from onchip.integrations.flash_attn.options import contiguous
from onchip.integrations.sdpa_masks import block_mask

Grads = tuple[Tensor | None, ...]
_SEEDS = 2**63 - 1
# heads * seqlen_q * seqlen_k of a masked call: from here on the skipped blocks save more than the
# mask, and the calls that it is cut into, cost (0.5x to 1.2x of torch's speed at 1 << 20, 1.0x to
# 5.6x here; two threads of a Neoverse N1, 2026-11-17).
MIN_CELLS = 1 << 22
MOST_COLUMNS = 256  # of heads on a GPU: wider ones were not timed beside torch's kernels


class SdpaCall(NamedTuple):
    """The arguments of an operator, in torch's layout and names."""

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    top_left: bool = True

    @property
    def num_visible(self) -> int:
        """The most keys that a query sees: under top-left causal no key after the last query."""
        rows, keys = self.query.shape[2], self.key.shape[2]
        return min(rows, keys) if self.is_causal and self.top_left else keys

    def prepare(self, seed: Tensor | None = None) -> tuple[CachedCall, Tensors]:
        """The call for onchip's kernels, over the visible keys."""
        scores = self._mask()  # first, because it refuses most calls
        q, k, v = (t.transpose(1, 2) for t in (self.query, self.key, self.value))
        if q.is_cuda and max(q.shape[-1], v.shape[-1]) > MOST_COLUMNS:
            raise UnsupportedError(f"a head_dim above {MOST_COLUMNS} on a GPU")
        rows, keys = q.shape[1], self.num_visible
        options = Options(softmax_scale=self.scale, dropout_p=self.dropout_p)
        if self.is_causal and rows > keys and self.top_left:
            options = options._replace(
                window_size=(None, rows - keys)
            )  # query i is at the position of key i
        elif self.is_causal:
            options = options._replace(causal=True)
        x = Tensors(q, k[:, :keys], v[:, :keys], bias=scores.get("bias"))
        return prepare_attention(x, options, mask=scores.get("mask"), dropout_seed=seed)

    def _mask(self) -> dict[str, Any]:
        """On the CPU the values are read: a bias that only hides keys becomes a mask, and its empty
        blocks are skipped. Any other bias is refused: torch's kernel adds it three times as fast.
        """
        if self.bias is None:
            return {}
        heads, rows = self.query.shape[1:3]
        if is_readable(self.bias) and heads * rows * self.num_visible < MIN_CELLS:
            raise UnsupportedError("attn_mask of a small call: on the CPU torch's kernel is faster")
        bias = self.bias if self.bias.dim() == 4 else self.bias[None, None]
        bias = bias.expand(*bias.shape[:3], self.key.shape[2])[..., : self.num_visible]
        if not is_readable(bias):
            return {"bias": bias}
        return {"mask": block_mask(bias.expand(*bias.shape[:2], rows, self.num_visible))}


def is_readable(bias: Tensor) -> bool:
    """Whether values may be read: on a GPU that would synchronise."""
    return bias.is_cpu


def cpu_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """aten::_scaled_dot_product_flash_attention_for_cpu"""
    if dropout_p:
        raise UnsupportedError(f"{dropout_p=}: this operator hands no seed to its gradient")
    out, lse = _forward(SdpaCall(query, key, value, attn_mask, 0.0, is_causal, scale), None)
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


def cpu_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    dropout_p: float, is_causal: bool, *, attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Grads:  # fmt: skip
    """aten::_scaled_dot_product_flash_attention_for_cpu_backward"""
    if dropout_p:
        raise UnsupportedError(f"{dropout_p=}: this operator hands no seed to its gradient")
    call = SdpaCall(query, key, value, attn_mask, 0.0, is_causal, scale)
    return _backward(call, (out, logsumexp, grad_out))[:3]


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention"""
    if return_debug_mask:
        raise UnsupportedError("return_debug_mask needs probabilities, which are never stored")
    call = SdpaCall(query, key, value, None, dropout_p, is_causal, scale, top_left=False)
    seed = _draw_seed(call)
    out, lse = _forward(call, seed)
    state = torch.stack([seed, torch.zeros_like(seed)]).view(torch.uint64)
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    lengths = (query.shape[2], key.shape[2])
    return out, lse, None, None, *lengths, state, unused, query.new_empty(0)


def flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, philox_seed: Tensor, philox_offset: Tensor, *, scale: float | None = None,
) -> Grads:  # fmt: skip
    """aten::_scaled_dot_product_flash_attention_backward"""
    call = SdpaCall(query, key, value, None, dropout_p, is_causal, scale, top_left=False)
    seed = philox_seed.view(torch.int64).flatten()[0]
    grads = _backward(call, (out, logsumexp, grad_out), seed)[:3]
    return tuple(map(_laid_out_like, (query, key, value), grads))


def efficient_forward(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """aten::_scaled_dot_product_efficient_attention; its lse is padded to multiples of 32."""
    call = SdpaCall(query, key, value, attn_bias, dropout_p, is_causal, scale)
    seed = _draw_seed(call)
    out, lse = _forward(call, seed, like_query=False)
    rows = math.ceil(lse.shape[2] / 32) * 32 if compute_log_sumexp else 0
    padded = lse.new_full((*lse.shape[:2], rows), torch.inf)
    if compute_log_sumexp:
        padded[..., : lse.shape[2]] = lse
    return out, padded, seed, torch.zeros_like(seed)


def efficient_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Tensor | None,
    out: Tensor, logsumexp: Tensor, philox_seed: Tensor, philox_offset: Tensor, dropout_p: float,
    grad_input_mask: Sequence[bool], is_causal: bool = False, *, scale: float | None = None,
) -> Grads:  # fmt: skip
    """aten::_scaled_dot_product_efficient_attention_backward"""
    bias = None if attn_bias is None or not attn_bias.numel() else attn_bias
    call = SdpaCall(query, key, value, bias, dropout_p, is_causal, scale)
    lse = logsumexp[..., : query.shape[2]]
    *grads, dbias = _backward(call, (out, lse, grad_out), philox_seed.to(query.device).reshape(()))
    results = (*grads, dbias if bias is None else _padded(dbias, bias))
    return tuple(g if needed else None for g, needed in zip(results, grad_input_mask, strict=True))


def cudnn_forward(*args: Any, **options: Any) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_cudnn_attention: runs only if the user turned it on again."""
    raise UnsupportedError("torch chose its cudnn path (by its backends that are on)")


def math_forward(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, dropout_mask: Tensor | None = None, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """aten::_scaled_dot_product_attention_math, for calls that no fused operator of torch takes.
    Autograd is below it. The second result would be the weights, which the function drops: they are
    not computed, and NaN for a caller of the operator itself.
    """
    if dropout_mask is not None:
        raise _refuse_math("dropout_mask is given")
    call = math_call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    prepared, x = call.prepare(_draw_seed(call))
    out = torch_op.attend(prepared, x, None).out.transpose(1, 2)
    out = out.reshape(*query.shape[:-1], value.shape[-1]).contiguous()
    return out, out.new_full((), torch.nan).expand(*query.shape[:-1], key.shape[-2])


def math_call(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None, enable_gqa: bool,
) -> SdpaCall:  # fmt: skip
    """The call in rank 4 with contiguous last dimensions. Refused where torch's path is faster, or
    raises the right error.
    """
    qkv = (query, key, value)
    if not all(map(_is_plain, qkv)):
        raise _refuse_math("under a compiler, a mode or a transform, or nested")
    if not torch.backends.cuda.flash_sdp_enabled():
        raise _refuse_math("flash attention is switched off")
    if query.is_cpu and dropout_p:
        raise _refuse_math(f"{dropout_p=} on the CPU, where that path is faster")
    if query.is_cpu and attn_mask is not None and attn_mask.requires_grad:
        raise _refuse_math("attn_mask requires a gradient on the CPU, where that path is faster")
    if is_causal and attn_mask is not None:
        raise _refuse_math("it refuses attn_mask with is_causal")
    if not enable_gqa and len({t.shape[:-2] for t in qkv}) > 1:
        raise _refuse_math("batch or heads differ")
    q, k, v = (contiguous(_rank4(t)) for t in qkv)
    bias = as_bias(attn_mask, query.dtype)
    if bias is not None and bias.dim() > 4:
        bias = bias.expand(*query.shape[:-3], *bias.shape[-3:])
    bias = None if bias is None else _rank4(bias)
    return SdpaCall(q, k, v, bias, dropout_p, is_causal, scale)


def _refuse_math(reason: str) -> UnsupportedError:
    return UnsupportedError(f"torch chose its math path ({reason})")


def _is_plain(t: Tensor) -> bool:
    return is_eager(t) and not t.is_nested and fwAD._current_level < 0


def _rank4(t: Tensor) -> Tensor:
    """(..., heads, seqlen, head_dim) as (batch, heads, seqlen, head_dim)."""
    return t.flatten(0, -4) if t.dim() > 4 else t[(None,) * (4 - t.dim())]


def as_bias(attn_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """attn_mask as a term of the scores: a bool mask is 0 where True, -inf elsewhere."""
    if attn_mask is None or attn_mask.dtype != torch.bool:
        return attn_mask
    return torch.zeros_like(attn_mask, dtype=dtype).masked_fill_(~attn_mask, -torch.inf)


def _draw_seed(call: SdpaCall) -> Tensor:
    """The seed of dropout, from torch's generator; without dropout 0, and nothing is drawn."""
    like = {"dtype": torch.int64, "device": call.query.device}
    return torch.randint(_SEEDS, (), **like) if call.dropout_p else torch.zeros((), **like)


def _forward(call: SdpaCall, seed: Tensor | None, like_query: bool = True) -> tuple[Tensor, Tensor]:
    """out and lse (batch, heads, seqlen_q). like_query: out has the strides of the query, if these
    are dense; otherwise the strides of (batch, seqlen, heads, head_dim).
    """
    prepared, x = call.prepare(seed)
    out, lse, _ = torch_op.run(prepared, x, None)
    out = out.transpose(1, 2)
    return _laid_out_like(call.query, out) if like_query else out, lse


def _backward(call: SdpaCall, saved: tuple[Tensor, ...], seed: Tensor | None = None) -> Grads:
    """dq, dk, dv with the strides of (batch, seqlen, heads, head_dim), and dbias."""
    prepared, x = call.prepare(seed)
    out, lse, dout = saved
    out, dout = out.transpose(1, 2).contiguous(), dout.transpose(1, 2)
    grads = torch_op.run_backward(prepared, x, None, out, lse.contiguous(), dout, None)
    dq, dk, dv, dbias = grads[:4]
    num_hidden = call.key.shape[2] - call.num_visible
    dk, dv = (F.pad(g, (0, 0, 0, 0, 0, num_hidden)) if num_hidden else g for g in (dk, dv))
    if dbias is not None and num_hidden:
        dbias = F.pad(dbias, (0, num_hidden))
    return (*(g.transpose(1, 2) for g in (dq, dk, dv)), dbias)


def _laid_out_like(t: Tensor, result: Tensor) -> Tensor:
    expected = torch.empty_like(t, dtype=result.dtype)
    return result if result.stride() == expected.stride() else expected.copy_(result)


def _padded(dbias: Tensor, bias: Tensor) -> Tensor:
    """dbias in the shape and dtype of the bias, with rows aligned to 16 elements."""
    *planes, keys = bias.shape
    return bias.new_empty(*planes, math.ceil(keys / 16) * 16)[..., :keys].copy_(dbias)


MATH = {"_scaled_dot_product_attention_math": math_forward}
OPERATORS: dict[str, dict[str, Callable[..., Any]]] = {
    "CompositeImplicitAutograd": MATH,
    "FuncTorchVmapMode": MATH,  # vmap's kernel precedes it
    "CPU": {
        "_scaled_dot_product_flash_attention_for_cpu": cpu_forward,
        "_scaled_dot_product_flash_attention_for_cpu_backward": cpu_backward,
    },
    "CUDA": {
        "_scaled_dot_product_flash_attention": flash_forward,
        "_scaled_dot_product_flash_attention_backward": flash_backward,
        "_scaled_dot_product_efficient_attention": efficient_forward,
        "_scaled_dot_product_efficient_attention_backward": efficient_backward,
        "_scaled_dot_product_cudnn_attention": cudnn_forward,
    },
}
