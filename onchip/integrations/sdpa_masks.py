"""The additive masks of F.scaled_dot_product_attention as block masks, on the CPU.

torch makes a new tensor of numbers of a bool mask at every call, so a mask cannot be recognised by
its tensor: the last masks are kept by their values. One pass compares, where building takes ten.
A comparison sees every change, also one that torch does not count: by numpy, in inference mode.
"""

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.problem import UnsupportedError
from onchip.masks import dense
from onchip.masks.blockmask import BlockMask

KEPT_BYTES = 64 << 20  # of one mask; a longer call is so long that building its mask is little
_KEPT_MASKS = 4  # a model with windows has two


class _Kept(NamedTuple):
    bias: Tensor
    mask: BlockMask | None


_kept: deque[_Kept] = deque(maxlen=_KEPT_MASKS)


def forget() -> None:
    """Drop every mask that is kept."""
    _kept.clear()


def block_mask(bias: Tensor) -> BlockMask:
    """The mask that bias (batch|1, heads|1, seqlen_q, seqlen_k) adds; refused if it does more."""
    mask = _find(bias)
    if mask is None:
        raise UnsupportedError("attn_mask adds to scores: on the CPU torch's kernel is faster")
    return mask


def _find(bias: Tensor) -> BlockMask | None:
    for kept in tuple(_kept):
        if _same(kept.bias, bias):
            return kept.mask
    mask = _build(bias)
    if bias.numel() * bias.itemsize <= KEPT_BYTES:
        _kept.appendleft(_Kept(bias.clone(memory_format=torch.contiguous_format), mask))
    return mask


def _same(kept: Tensor, bias: Tensor) -> bool:
    return kept.shape == bias.shape and kept.dtype == bias.dtype and torch.equal(kept, bias)


def _build(bias: Tensor) -> BlockMask | None:
    """None if bias does more than hide keys, by -inf or by the least number there is. Least numbers
    alone in a row hide nothing: softmax gives its keys equal weights.
    """
    hidden = bias <= torch.finfo(bias.dtype).min
    if not bool((hidden | (bias == 0)).all()):
        return None
    blind = bias[hidden.all(-1)]
    if not bool((blind == -torch.inf).all()):
        return None
    batch, heads, seqlen_q, seqlen_k = bias.shape
    return dense(~hidden).build(batch, heads, seqlen_q, seqlen_k, bias.device)
