"""S_dmask, the result of return_attn_probs with dropout, as flash_attn's forward kernel computes
it.

The kernel processes a row's keys in blocks from the last to the first with a running maximum m. It
stores exp(s - m) of a block with the m at that time, negative where dropout dropped the
probability, in (batch, heads, seqlen_q, seqlen_k) rounded up to multiples of 128. flash_attn's
tests divide the running maximum out again, with the block size of get_block_size_n. Memory is
O(N^2).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.core import functional
from onchip.integrations.flash_attn.options import FlashArguments, Lengths, round_multiple
from onchip.kernels.cpu import philox

ROUNDED_TO = 128


def get_block_size_n(
    device: torch.device | str | None, head_dim: int, is_dropout: bool, is_causal: bool,
) -> int:  # fmt: skip
    """Keys in a block of flash_attn's forward kernel for A100 and H100."""
    if head_dim > 256:
        raise ValueError(f"{head_dim=} must be at most 256")
    if head_dim <= 32:
        return 128
    if 64 < head_dim <= 96 or head_dim > 128:
        return 64
    wide = 128 if head_dim <= 64 else 64
    return wide // 2 if is_dropout else wide


@torch.no_grad()
def dense_s_dmask(
    q: Tensor, k: Tensor, lse: Tensor, arguments: FlashArguments, seed: Tensor | None
) -> Tensor:
    """S_dmask in the dtype of q; empty without a seed, which means without dropout."""
    if seed is None:
        return q.new_empty(0)
    s = _signed(q, k, lse, arguments, seed)
    rows, keys = (round_multiple(n, ROUNDED_TO) for n in s.shape[2:])
    return F.pad(s, (0, keys - s.shape[3], 0, rows - s.shape[2])).to(q.dtype)


@torch.no_grad()
def packed_s_dmask(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    lengths: Lengths,
    arguments: FlashArguments,
    seed: Tensor | None,
) -> Tensor:
    """The same for packed sequences: a sequence is an entry of the batch, 0 past its end."""
    if seed is None:
        return q.new_empty(0)
    cu_q, cu_k = (cu.tolist() for cu in lengths[:2])
    batch, slopes = len(cu_q) - 1, arguments.alibi_slopes
    shape = (round_multiple(n, ROUNDED_TO) for n in lengths[2:])
    padded = q.new_zeros(batch, q.shape[1], *shape)
    for b in range(batch):
        rows, keys = slice(*cu_q[b : b + 2]), slice(*cu_k[b : b + 2])
        own = slopes[b : b + 1] if slopes is not None and slopes.dim() == 2 else slopes
        one = q[None, rows], k[None, keys], lse[None, :, rows]
        s = _signed(*one, arguments._replace(alibi_slopes=own), seed, b)
        padded[b, :, : s.shape[2], : s.shape[3]] = s[0]
    return padded


def _signed(
    q: Tensor, k: Tensor, lse: Tensor, arguments: FlashArguments, seed: Tensor, b: int = 0
) -> Tensor:
    """(batch, heads, seqlen_q, seqlen_k) without padding. b: the batch index of q's first entry."""
    p = functional.attention_weights(q, k, lse, range(q.shape[1]), **arguments.scores)
    block = get_block_size_n(q.device, q.shape[-1], True, bool(arguments.causal))
    s = _relative_to_running_max(p, block)
    batch, heads, seqlen_q, seqlen_k = s.shape
    shape, corner = (batch, heads, seqlen_q, seqlen_k), philox.Corner(b, 0, 0, 0)
    return torch.where(philox.keep(seed, shape, corner, arguments.dropout_p), s, -s)


def _relative_to_running_max(p: Tensor, block: int) -> Tensor:
    """p = exp(s - lse) as exp(s - m): p over the largest p from its block on; 0 where that is 0."""
    if not p.numel():
        return p
    seqlen_k = p.shape[-1]
    blocks = F.pad(p, (0, -seqlen_k % block)).unflatten(-1, (-1, block))
    running = blocks.amax(-1).flip(-1).cummax(-1).values.flip(-1)
    s = blocks / running.masked_fill(running == 0, 1.0)[..., None]
    return s.flatten(-2)[..., :seqlen_k]
