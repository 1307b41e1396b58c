"""What onchip is compared with, in its own layout (batch, seqlen, heads, head_dim)."""

import math
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Attend = Callable[..., Tensor]  # of q, k, v
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "fa2": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


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


def fa3(**options) -> Attend:
    """FlashAttention-3's forward, from the package fa3-fwd or its own; ImportError where both are
    missing. In FP8 it takes descales, too.
    """
    name = "flash_attn_interface" if find_spec("flash_attn_interface") else "fa3_fwd_interface"
    function = import_module(name).flash_attn_func
    return lambda q, k, v, **scales: function(q, k, v, **options, **scales)


def fa4(**options) -> Attend:
    """FlashAttention-4, from the package flash-attn-4; ImportError where it is missing. Its first
    call of a kind compiles for some seconds.
    """
    function = import_module("flash_attn.cute").flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(q, k, v, **options)
        return out[0] if isinstance(out, tuple) else out  # (out, lse) in some of its versions

    return attend


def flex(n: int, mask_mod: Callable | None, device: torch.device) -> Attend:
    """FlexAttention compiled for n tokens, its block mask built here. mask_mod(b, h, q, k) or None.

    Every call forgets what was compiled before: beyond eight shapes of one function the compiler
    would fall back to the unfused program without a word. Donated buffers are off, because a
    backward pass that is timed runs more than once.
    """
    from torch._functorch import config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    config.donated_buffer = False
    compiled = torch.compile(flex_attention, dynamic=False)
    block_mask = None
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, None, None, n, n, str(device), _compile=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=block_mask).transpose(1, 2)

    return attend
