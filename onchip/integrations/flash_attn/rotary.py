"""flash_attn.layers.rotary: positions as rotations of pairs of elements, from tables."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from onchip.core.problem import values_are_checked


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


def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """The same in the dtype that x and cos promote to. Tables have a row for each token: cos, sin
    (seqlen, rotary_dim / 2) or (batch, seqlen, rotary_dim / 2).
    """
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(f"cos has {cos.shape[-1]} columns, x has head_dim={x.shape[-1]}")
    dtype = torch.promote_types(x.dtype, cos.dtype)
    cos, sin = (t.to(dtype).unsqueeze(-2) for t in (cos, sin))
    return turn_pairs(x.to(dtype), cos, sin, interleaved)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """apply_rotary_emb in place to q and k of qkv: (batch, seqlen, 3, heads, head_dim), or (batch,
    seqlen, num_heads_q + 2 num_heads_k, head_dim) with num_heads_q. k has tables of its own if
    given.
    """
    q, k = _queries_and_keys(qkv, num_heads_q)
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    tables = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    apply_rotary_emb(k, *tables, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """apply_rotary_emb in place to k of kv (batch, seqlen, 2, heads, head_dim)."""
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


class Turns(NamedTuple):
    """Tables of RotaryEmbedding: of queries, and of keys."""

    cos: Tensor
    sin: Tensor
    cos_k: Tensor
    sin_k: Tensor


class RotaryEmbedding(nn.Module):
    """q and k turned in place, pair i by base ** (-2 i / dim) radians a token. scale_base: xPos, in
    which queries grow and keys shrink with their positions. Tables grow with what is asked of them.
    """

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.dim, self.base = dim, float(base)
        self.interleaved, self.scale_base = interleaved, scale_base
        pairs = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", self._slowing(pairs), persistent=False)
        self._turns: Turns | None = None

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """qkv as for apply_rotary_emb_qkv_; or q (batch, seqlen, heads, head_dim) and kv. With
        offsets that are a tensor max_seqlen says how far they reach.
        """
        turns = self._tables(qkv, seqlen_offset, max_seqlen)
        rest = self.interleaved, seqlen_offset
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, *turns, *rest, num_heads_q)
        q = apply_rotary_emb(qkv, turns.cos, turns.sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, turns.cos_k, turns.sin_k, *rest)

    def _tables(self, x: Tensor, offset: int | Tensor, max_seqlen: int | None) -> Turns:
        seqlen, turns = max_seqlen, self._turns
        if seqlen is None and not isinstance(offset, Tensor):
            seqlen = x.shape[1] + offset
        if turns is not None and self._serve(turns, x, seqlen or 0):
            return turns
        if seqlen is None:
            raise ValueError("offsets that are a tensor need max_seqlen, how far they reach")
        self._turns = self._computed(seqlen, x)
        return self._turns

    def _serve(self, turns: Turns, x: Tensor, seqlen: int) -> bool:
        cos = turns.cos
        same = cos.dtype == x.dtype and cos.device == x.device and seqlen <= cos.shape[0]
        return same and not (self.training and cos.is_inference())

    def _computed(self, seqlen: int, x: Tensor) -> Turns:
        """In fp32 whatever the module was cast to: positions times frequencies grow large."""
        pairs = torch.arange(0, self.dim, 2, device=x.device, dtype=torch.float32)
        place = torch.arange(seqlen, device=x.device, dtype=torch.float32)
        exact = self.inv_freq.dtype == torch.float32
        angle = torch.outer(place, self.inv_freq.to(x.device) if exact else self._slowing(pairs))
        growth = torch.ones_like(angle)
        if self.scale_base is not None:
            power = (place - seqlen // 2) / self.scale_base
            growth = ((pairs + 0.4 * self.dim) / (1.4 * self.dim)) ** power[:, None]
        cos, sin = angle.cos(), angle.sin()
        tables = cos * growth, sin * growth, cos / growth, sin / growth
        return Turns(*(t.to(x.dtype) for t in tables))

    def _slowing(self, pairs: Tensor) -> Tensor:
        return self.base ** -(pairs / self.dim)


def _queries_and_keys(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, Tensor]:
    """Views of qkv."""
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        return qkv[:, :, 0], qkv[:, :, 1]
    heads = qkv.shape[2] if qkv.dim() == 4 else -1
    if num_heads_q is None or heads < num_heads_q or (heads - num_heads_q) % 2:
        raise ValueError(
            "qkv must be (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, num_heads_q + 2"
            f" num_heads_k, head_dim), got {tuple(qkv.shape)} with {num_heads_q=}"
        )
    num_heads_k = (heads - num_heads_q) // 2
    return qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + num_heads_k]


def turn(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x: (..., seqlen, heads, head_dim) at positions (..., seqlen), clamped to the tables."""
    rows = positions.long().clamp(0, cos.shape[0] - 1)
    c, s = (table[rows].unsqueeze(-2).to(_wide(x)) for table in (cos, sin))
    return turn_pairs(x, c, s, interleaved)


def turn_pairs(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Pairs of the first 2 * cos.shape[-1] elements turned, in the dtype of the tables; cos and sin
    broadcast over x.
    """
    width = 2 * cos.shape[-1]
    pairs, rest = x[..., :width].to(cos.dtype), x[..., width:]
    a, b = (pairs[..., ::2], pairs[..., 1::2]) if interleaved else pairs.chunk(2, -1)
    halves = a * cos - b * sin, b * cos + a * sin
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


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """apply_rotary_emb in the order of flash_attn.ops.triton.rotary; conjugate turns back."""
    sin = -sin if conjugate else sin
    rest = interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen
    return apply_rotary_emb(x, cos, sin, *rest)
