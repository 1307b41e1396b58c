"""flash_attn.layers.rotary: positions as rotations of pairs of elements, from tables."""

import torch
from torch import Tensor

from onchip.problem import values_are_checked


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """The first rotary_dim elements of every head turned by the table rows of their positions, in
    fp32 and rounded once.

    x: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cu_seqlens and max_seqlen.
    cos, sin: (seqlen_rotary, rotary_dim / 2). Token t of sequence b stands at seqlen_offsets + t,
    an int or int (batch,). interleaved: elements 2i and 2i + 1 are a pair, else i and i +
    rotary_dim / 2. inplace: x itself is changed and returned.
    """
    check_tables(cos, sin, x.shape[-1])
    positions = _positions(x, seqlen_offsets, cu_seqlens, max_seqlen)
    check_positions(positions, cos)
    turned = turn(x, cos, sin, positions, interleaved)
    return x.copy_(turned) if inplace else turned


apply_rotary_emb_func = apply_rotary_emb


def turn(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x: (..., seqlen, heads, head_dim) at positions (..., seqlen), clamped to the tables."""
    rows = positions.long().clamp(0, cos.shape[0] - 1)
    c, s = (table[rows].unsqueeze(-2).to(_wide(x)) for table in (cos, sin))
    width = 2 * cos.shape[-1]
    pairs, rest = x[..., :width].to(_wide(x)), x[..., width:]
    a, b = (pairs[..., ::2], pairs[..., 1::2]) if interleaved else pairs.chunk(2, -1)
    halves = a * c - b * s, b * c + a * s
    turned = torch.stack(halves, -1).flatten(-2) if interleaved else torch.cat(halves, -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def check_tables(cos: Tensor, sin: Tensor, head_dim: int) -> None:
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > head_dim:
        raise ValueError(
            f"cos and sin must be (seqlen_rotary, rotary_dim / 2) with rotary_dim <= {head_dim=},"
            f" got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )


def check_positions(positions: Tensor, cos: Tensor) -> None:
    """Where values are checked; elsewhere positions outside are clamped."""
    if not positions.numel() or not values_are_checked(positions):
        return
    low, high = positions.aminmax()
    if low < 0 or high >= cos.shape[0]:
        raise ValueError(
            f"positions {int(low)} to {int(high)} leave the {cos.shape[0]} rows of cos and sin"
        )


def _positions(
    x: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> Tensor:
    """Of every token: (1 or batch, seqlen), packed (total,)."""
    rank = 4 if cu_seqlens is None else 3
    if x.dim() != rank or (cu_seqlens is not None and max_seqlen is None):
        raise ValueError(
            "x must be (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with"
            f" cu_seqlens and max_seqlen, got {tuple(x.shape)} with {max_seqlen=}"
        )
    token = torch.arange(x.shape[rank - 3], device=x.device)
    if cu_seqlens is None:
        start = offsets[:, None] if isinstance(offsets, Tensor) else offsets
        return token + start
    b = torch.searchsorted(cu_seqlens, token, right=True).sub(1).clamp(0, len(cu_seqlens) - 2)
    start = offsets[b] if isinstance(offsets, Tensor) else offsets
    return token - cu_seqlens[b] + start


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
