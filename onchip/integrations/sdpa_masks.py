"""The additive masks of F.scaled_dot_product_attention as block masks, on the CPU.

torch makes a new tensor of a bool mask at every call, so a mask cannot be recognised by its tensor.
Instead the last masks are cached by their values: a comparison takes one pass, building a mask
takes ten. A comparison also detects changes that torch does not count: by numpy, in inference mode.
"""

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.problem import UnsupportedError
from onchip.masks import dense
from onchip.masks.blockmask import BlockMask

MAX_CACHED_BYTES = 64 << 20  # of one mask; in a longer call building the mask costs little
_MAX_CACHED = 4  # a model with windows has two


class _CachedMask(NamedTuple):
    bias: Tensor
    mask: BlockMask | None


_cache: deque[_CachedMask] = deque(maxlen=_MAX_CACHED)


def clear_cache() -> None:
    """Drop all cached masks."""
    _cache.clear()


def block_mask(bias: Tensor) -> BlockMask:
    """bias (batch|1, heads|1, seqlen_q, seqlen_k) as a mask; UnsupportedError if it is more."""
    mask = _get_or_build(bias)
    if mask is None:
        raise UnsupportedError("attn_mask adds to scores: on the CPU torch's kernel is faster")
    return mask


def _get_or_build(bias: Tensor) -> BlockMask | None:
    for cached in tuple(_cache):
        if _same(cached.bias, bias):
            return cached.mask
    mask = _build(bias)
    if bias.numel() * bias.itemsize <= MAX_CACHED_BYTES:
        _cache.appendleft(_CachedMask(bias.clone(memory_format=torch.contiguous_format), mask))
    return mask


def _same(cached: Tensor, bias: Tensor) -> bool:
    return cached.shape == bias.shape and cached.dtype == bias.dtype and torch.equal(cached, bias)


def _build(bias: Tensor) -> BlockMask | None:
    """The mask of a bias that only hides keys, by -inf or by the smallest number of its dtype; else
    None. A row of smallest numbers alone hides nothing: softmax gives its keys equal weights.
    """
    hidden = bias <= torch.finfo(bias.dtype).min
    if not bool((hidden | (bias == 0)).all()):
        return None
    fully_hidden = bias[hidden.all(-1)]
    if not bool((fully_hidden == -torch.inf).all()):
        return None
    batch, heads, seqlen_q, seqlen_k = bias.shape
    return dense(~hidden).build(batch, heads, seqlen_q, seqlen_k, bias.device)
