"""What onchip is compared with, in its own layout (batch, seqlen, heads, head_dim)."""

import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Attend = Callable[..., Tensor]  # of q, k, v
MOST_EAGER_PAIRS = 2**31  # of a query and a key, in a mask that is built uncompiled
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "fa2": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class PeerRefusal(Exception):
    """A peer cannot compute a call; the message says what it lacks, in one line."""


class Lengths(NamedTuple):
    """Packed sequences: int32 cu_seqlens of queries and keys, and the longest sequence."""

    cu_seqlens: Tensor
    longest: int


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as in textbooks: the whole of S = q k^T, then P = softmax(S), then P v."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s = (q * q.shape[-1] ** -0.5) @ k.mT
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu_(1)
    s.masked_fill_(hidden, -math.inf)
    return (torch.softmax(s, -1) @ v).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """torch's SDPA: transposed views, no copies."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


def heads_first(x: Tensor) -> Tensor:
    """The same tensor stored as (batch, heads, seqlen, head_dim), which SDPA likes best."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def backend(name: str, **options) -> Attend:
    """SDPA held to one of its BACKENDS: it serves or raises, it is never replaced by another."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(BACKENDS[name]):
            return sdpa(q, k, v, **options)

    return attend


def explain_refusal(attend: Attend) -> Attend:
    """attend, in which SDPA's "No available kernel" becomes a PeerRefusal with the reason. torch
    gives it as a warning, after one that announces it. That a backend is disabled is none.
    """

    def attend_or_explain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        try:
            return attend(q, k, v)
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            with warnings.catch_warnings(record=True) as caught, suppress(RuntimeError):
                warnings.simplefilter("always")
                attend(q, k, v)
            texts = [str(x.message).partition(" (Triggered internally")[0] for x in caught]
            announced = (b for a, b in pairwise(texts) if a.endswith("not used because:"))
            reasons = (text for text in announced if not text.endswith("disabled."))
            raise PeerRefusal(next(reasons, "SDPA has no kernel for it")) from error

    return attend_or_explain


def fa2(
    causal: bool,
    window: int | None = None,
    softmax_scale: float | None = None,
    packed: Lengths | None = None,
) -> Attend:
    """FlashAttention-2 as torch has it, with options that SDPA has no name for: a window of the
    last keys, packed sequences, and a causal mask aligned bottom-right.
    """
    forward = torch.ops.aten._flash_attention_forward
    sides = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        if packed is None:
            lengths = (None, None, q.shape[1], k.shape[1])
            return forward(q, k, v, *lengths, 0.0, causal, False, scale=scale, **sides)[0]
        lengths = (packed.cu_seqlens, packed.cu_seqlens, packed.longest, packed.longest)
        one = (x[0] for x in (q, k, v))
        return forward(*one, *lengths, 0.0, causal, False, scale=scale, **sides)[0][None]

    return attend


def fa3(packed: Lengths | None = None, cache_seqlens: Tensor | None = None, **options) -> Attend:
    """FlashAttention-3's forward, from the package fa3-fwd or its own; ImportError where both are
    missing. In FP8 it takes descales, too. With cache_seqlens, attend(q, pages of k and v,
    page_table), and further operands by name.
    """
    name = "flash_attn_interface" if find_spec("flash_attn_interface") else "fa3_fwd_interface"
    module = import_module(name)
    if cache_seqlens is None:
        return _flash(module, packed, options)
    options = {"num_splits": 1, "cache_seqlens": cache_seqlens} | options  # as in its other calls
    return _over_pages(module.flash_attn_with_kvcache, options)


def fa4(packed: Lengths | None = None, cache_seqlens: Tensor | None = None, **options) -> Attend:
    """FlashAttention-4, from the package flash-attn-4; ImportError where it is missing. Its first
    call of a kind compiles for some seconds. cache_seqlens: as of fa3.
    """
    module = import_module("flash_attn.cute")
    if cache_seqlens is None:
        return _flash(module, packed, options)
    return _over_pages(module.flash_attn_varlen_func, options | {"seqused_k": cache_seqlens})


def _flash(module, packed: Lengths | None, options: dict) -> Attend:
    """Packed sequences are one batch entry."""
    if packed is None:
        function = module.flash_attn_func
        return lambda q, k, v, **scales: _out(function(q, k, v, **options, **scales))
    function, (cu, longest) = module.flash_attn_varlen_func, packed
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    lengths |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return lambda q, k, v: _out(function(q[0], k[0], v[0], **lengths, **options))[None]


def _over_pages(function: Callable, options: dict) -> Attend:
    return lambda q, pages, table, **parts: _out(
        function(q, *pages, page_table=table, **options, **parts)
    )


def _out(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """out of (out, lse), which some versions return."""
    return result[0] if isinstance(result, tuple) else result


def flex(
    n: int,
    mask_mod: Callable | None,
    device: torch.device,
    *,
    seqlen_k: int | None = None,
    score_mod: Callable | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Attend:
    """FlexAttention compiled for n tokens, its block mask built here. mask_mod(b, h, q, k) or None.
    sinks, which it lacks, rescale its output: out * l / (l + exp(sink)) with l = exp(lse).

    Every call forgets what was compiled before: beyond eight shapes of one function the compiler
    would fall back to the unfused program without a word. Donated buffers are off, because a
    backward pass that is timed runs more than once.
    """
    from torch._functorch import config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    config.donated_buffer = False
    compiled = torch.compile(flex_attention, dynamic=False)
    rescale = torch.compile(_add_sinks, dynamic=False)
    block_mask, keys = None, n if seqlen_k is None else seqlen_k
    if mask_mod is not None:
        # Compiled, the mask needs no memory for each pair, but minutes at 128 blocks of keys.
        large = n * keys > MOST_EAGER_PAIRS
        block_mask = create_block_mask(mask_mod, None, None, n, keys, str(device), _compile=large)
    options = {"score_mod": score_mod, "block_mask": block_mask, "scale": scale}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        if sinks is None:
            return compiled(q, k, v, **options, enable_gqa=grouped).transpose(1, 2)
        out, lse = compiled(q, k, v, **options, enable_gqa=grouped, return_lse=True)
        return rescale(out, lse, sinks).transpose(1, 2)

    return attend


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    kept = torch.sigmoid(lse - sinks[:, None].to(lse))
    return (out * kept[..., None]).to(out.dtype)
