"""Operands of attention in microscaling formats: q and k in blocks along head_dim, v in blocks
along the keys, because a block must lie along the dimension that its product sums over.

The tensor of an NVFP4 tensor scale is one head of one sequence, as it is for the product of
matrices: sequences of a batch do not depend on each other.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.quant.formats import E4M3, wide
from onchip.quant.microscaling import (
    BlockFormat,
    Microscaled,
    choose_tensor_scale,
    quantise_blocks,
)
from onchip.quant.schemes import Quantised, Scheme, check_layout, find_amax, group_blocks, sequences

_HEAD = Scheme(E4M3, "head")


class KeyBlocks(NamedTuple):
    """v in blocks along the keys: blocks (heads, head_dim, slots), in which each sequence begins a
    new block, and the slot of each token, (tokens,). shape is that of v.
    """

    blocks: Microscaled
    slots: Tensor
    shape: torch.Size

    def dequantise(self) -> Tensor:
        return self.blocks.dequantise().permute(2, 0, 1)[self.slots].reshape(self.shape)


def quantise_channels(
    x: Tensor, fmt: BlockFormat, cu_seqlens: Tensor | None = None, dice: Tensor | None = None
) -> Microscaled:
    """q or k (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim) with cu_seqlens,
    in blocks along head_dim. dice for random rounding are shaped like x.
    """
    check_layout("x", x, cu_seqlens)
    return quantise_blocks(x, fmt, _head_scales(x, fmt, cu_seqlens), dice)


def quantise_keys(
    v: Tensor, fmt: BlockFormat, cu_seqlens: Tensor | None = None, dice: Tensor | None = None
) -> KeyBlocks:
    """v, laid out as above, in blocks along the keys of each sequence."""
    check_layout("v", v, cu_seqlens)
    ids, count = group_blocks(v, fmt.block, cu_seqlens)
    _, position = sequences(v, cu_seqlens)
    slots = ids * fmt.block + position % fmt.block
    scales = _head_scales(v, fmt, cu_seqlens)
    if scales is not None:
        scales = _scatter(scales, ids, count).permute(1, 2, 0)
    arrange = lambda x: _scatter(x, slots, count * fmt.block).permute(1, 2, 0)
    dice = None if dice is None else arrange(dice)
    return KeyBlocks(quantise_blocks(arrange(wide(v)), fmt, scales, dice), slots, v.shape)


def _head_scales(x: Tensor, fmt: BlockFormat, cu_seqlens: Tensor | None) -> Tensor | None:
    """The tensor scale of each token's head (..., heads, 1), from the finite numbers."""
    if not fmt.has_tensor_scale:
        return None
    magnitudes = wide(x).abs()
    amax = find_amax(magnitudes.where(magnitudes.isfinite(), 0.0), _HEAD, cu_seqlens)
    return Quantised(x, choose_tensor_scale(amax, fmt), _HEAD, cu_seqlens).token_scales()


def _scatter(x: Tensor, places: Tensor, count: int) -> Tensor:
    """Tokens of x (..., heads, dim) at their places of (count, heads, dim), 0 elsewhere. Tokens
    with the same place have the same numbers.
    """
    rows = x.reshape(-1, *x.shape[-2:])
    return rows.new_zeros(count, *rows.shape[1:]).index_copy_(0, places, rows)
