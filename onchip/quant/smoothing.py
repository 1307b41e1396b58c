"""Smoothing: subtract from the keys of a sequence their mean. It changes no softmax, only its lse.

q.(k - mean) = q.k - q.mean: every score of a row decreases by the same number, so the weights stay
the same, and lse decreases by softmax_scale * q.mean. The rest of the keys has no channel that is
large for every key, and is easier to quantise.
"""

import torch
from torch import Tensor

from onchip.quant.formats import wide
from onchip.quant.schemes import check_layout, group_blocks, sequences


def smooth_keys(k: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(k - mean, mean) in fp32 (fp64 for fp64). k is (batch, seqlen, heads, head_dim), or packed
    (total, heads, head_dim) with cu_seqlens. mean (batch, heads, head_dim) is per sequence and
    head, 0 for a sequence without keys.
    """
    check_layout("k", k, cu_seqlens)
    k = wide(k)
    sequence, _ = sequences(k, cu_seqlens)
    count = k.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    rows = k.reshape(-1, *k.shape[-2:])
    lengths = torch.bincount(sequence, minlength=count).clamp(min=1)
    # In fp64: an fp32 sum over a million keys of one sign would lose the bits of the mean.
    total = rows.new_zeros(count, *rows.shape[1:], dtype=torch.float64)
    mean = total.index_add_(0, sequence, rows.double()) / lengths[:, None, None]
    mean = mean.to(k.dtype)
    return (rows - mean[sequence]).reshape(k.shape), mean


def smooth_queries(q: Tensor, tile: int, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(q - mean, mean), both shaped like q, in fp32 (fp64 for fp64). The mean of a token is that of
    its tile: of `tile` queries of one head, counted from the start of the sequence. Scores need the
    product mean.k in addition, once per tile and key (SageAttention2, arXiv 2411.10958).
    """
    check_layout("q", q, cu_seqlens)
    q = wide(q)
    ids, count = group_blocks(q, tile, cu_seqlens)
    lengths = torch.bincount(ids, minlength=count)
    rows = q.reshape(-1, *q.shape[-2:])
    total = rows.new_zeros(count, *rows.shape[1:], dtype=torch.float64)
    mean = total.index_add_(0, ids, rows.double()) / lengths[:, None, None]
    mean = mean.to(q.dtype)[ids].reshape(q.shape)
    return q - mean, mean


def lse_shift(
    q: Tensor, mean: Tensor, softmax_scale: float, cu_seqlens_q: Tensor | None = None
) -> Tensor:
    """softmax_scale * q.mean, the decrease of lse over k - mean: (batch, heads, seqlen_q), packed
    (heads, total). Heads of a group share their keys' mean.
    """
    check_layout("q", q, cu_seqlens_q)
    q = wide(q)
    sequence, _ = sequences(q, cu_seqlens_q)
    mean = mean.repeat_interleave(q.shape[-2] // mean.shape[-2], -2)
    rows = q.reshape(-1, *q.shape[-2:])
    shift = (rows * mean.to(q.dtype)[sequence]).sum(-1) * softmax_scale
    return shift.reshape(q.shape[:-1]).transpose(-1, -2).contiguous()
