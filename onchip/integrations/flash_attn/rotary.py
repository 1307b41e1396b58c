"""flash_attn.layers.rotary: positions as rotations of pairs of elements, from tables."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from onchip.core.values import values_are_checked


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False,
    seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:  # fmt: skip
    """Rotate the first rotary_dim elements of every head by the table rows of their positions, in
    fp32 and rounded once.

    x: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cu_seqlens and max_seqlen.
    cos, sin: (seqlen_rotary, rotary_dim / 2). Token t of sequence b has position seqlen_offsets +
    t, an int or int (batch,). interleaved: elements 2i and 2i + 1 are a pair, else i and i +
    rotary_dim / 2. inplace: change x itself and return it.
    """
    check_tables(cos, sin, x.shape[-1])
    positions = _positions(x, seqlen_offsets, cu_seqlens, max_seqlen)
    check_positions(positions, cos)
    rotated = apply_rope(x, cos, sin, positions, interleaved)
    return x.copy_(rotated) if inplace else rotated


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
    return rotate_pairs(x.to(dtype), cos, sin, interleaved)


def apply_rotary_emb_qkv_(
    qkv: Tensor, cos: Tensor, sin: Tensor, cos_k: Tensor | None = None, sin_k: Tensor | None = None,
    interleaved: bool = False, seqlen_offsets: int | Tensor = 0, num_heads_q: int | None = None,
) -> Tensor:  # fmt: skip
    """apply_rotary_emb in place to q and k of qkv: (batch, seqlen, 3, heads, head_dim), or
    (batch, seqlen, num_heads_q + 2 num_heads_k, head_dim) with num_heads_q. k has tables of its own
    if given.
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


class CosSinTables(NamedTuple):
    """The tables of RotaryEmbedding, for queries and for keys."""

    cos: Tensor
    sin: Tensor
    cos_k: Tensor
    sin_k: Tensor


class RotaryEmbedding(nn.Module):
    """Rotates q and k in place, pair i by base ** (-2 i / dim) radians a token. scale_base:
    xPos, in which queries grow and keys shrink with their positions. Tables grow with the longest
    sequence.
    """

    dim: int
    base: float
    interleaved: bool
    scale_base: float | None

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
        self.register_buffer("inv_freq", self._frequencies(pairs), persistent=False)
        self._cos_sin: CosSinTables | None = None

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """qkv as for apply_rotary_emb_qkv_; or q (batch, seqlen, heads, head_dim) and kv.
        max_seqlen: the largest position + 1, needed if seqlen_offset is a tensor.
        """
        tables = self._get_tables(qkv, seqlen_offset, max_seqlen)
        rest = self.interleaved, seqlen_offset
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, *tables, *rest, num_heads_q)
        q = apply_rotary_emb(qkv, tables.cos, tables.sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, tables.cos_k, tables.sin_k, *rest)

    def _get_tables(self, x: Tensor, offset: int | Tensor, max_seqlen: int | None) -> CosSinTables:
        seqlen, tables = max_seqlen, self._cos_sin
        if seqlen is None and not isinstance(offset, Tensor):
            seqlen = x.shape[1] + offset
        if tables is not None and self._fits(tables, x, seqlen or 0):
            return tables
        if seqlen is None:
            raise ValueError("seqlen_offset as a tensor needs max_seqlen")
        self._cos_sin = self._compute(seqlen, x)
        return self._cos_sin

    def _fits(self, tables: CosSinTables, x: Tensor, seqlen: int) -> bool:
        cos = tables.cos
        same = cos.dtype == x.dtype and cos.device == x.device and seqlen <= cos.shape[0]
        return same and not (self.training and cos.is_inference())

    def _compute(self, seqlen: int, x: Tensor) -> CosSinTables:
        """Compute tables in fp32, whatever the dtype of the module: angles grow large."""
        pairs = torch.arange(0, self.dim, 2, device=x.device, dtype=torch.float32)
        position = torch.arange(seqlen, device=x.device, dtype=torch.float32)
        exact = self.inv_freq.dtype == torch.float32
        angle = torch.outer(
            position, self.inv_freq.to(x.device) if exact else self._frequencies(pairs)
        )
        growth = torch.ones_like(angle)
        if self.scale_base is not None:
            power = (position - seqlen // 2) / self.scale_base
            growth = ((pairs + 0.4 * self.dim) / (1.4 * self.dim)) ** power[:, None]
        cos, sin = angle.cos(), angle.sin()
        tables = cos * growth, sin * growth, cos / growth, sin / growth
        return CosSinTables(*(t.to(x.dtype) for t in tables))

    def _frequencies(self, pairs: Tensor) -> Tensor:
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


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x: (..., seqlen, heads, head_dim) at positions (..., seqlen), clamped to the tables."""
    rows = positions.long().clamp(0, cos.shape[0] - 1)
    c, s = (table[rows].unsqueeze(-2).to(_wide(x)) for table in (cos, sin))
    return rotate_pairs(x, c, s, interleaved)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate pairs of the first 2 * cos.shape[-1] elements, in the dtype of the tables; cos and sin
    broadcast over x.
    """
    width = 2 * cos.shape[-1]
    pairs, rest = x[..., :width].to(cos.dtype), x[..., width:]
    a, b = (pairs[..., ::2], pairs[..., 1::2]) if interleaved else pairs.chunk(2, -1)
    halves = a * cos - b * sin, b * cos + a * sin
    rotated = torch.stack(halves, -1).flatten(-2) if interleaved else torch.cat(halves, -1)
    return torch.cat((rotated.to(x.dtype), rest), -1)


def check_tables(cos: Tensor, sin: Tensor, head_dim: int) -> None:
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > head_dim:
        raise ValueError(
            f"cos and sin must be (seqlen_rotary, rotary_dim / 2) with rotary_dim <= {head_dim=},"
            f" got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )


def check_positions(positions: Tensor, cos: Tensor) -> None:
    """Raise ValueError for positions outside of the tables, where values are checked; elsewhere
    they are clamped.
    """
    if not positions.numel() or not values_are_checked(positions):
        return
    low, high = positions.aminmax()
    if low < 0 or high >= cos.shape[0]:
        raise ValueError(
            f"positions {int(low)} to {int(high)} exceed the {cos.shape[0]} rows of cos and sin"
        )


def _positions(
    x: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None
) -> Tensor:
    """The position of every token: (1 or batch, seqlen), packed (total,)."""
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
    x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None, max_seqlen: int | None = None, interleaved: bool = False,
    inplace: bool = False, conjugate: bool = False,
) -> Tensor:  # fmt: skip
    """apply_rotary_emb in the order of flash_attn.ops.triton.rotary; conjugate: the inverse."""
    sin = -sin if conjugate else sin
    rest = interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen
    return apply_rotary_emb(x, cos, sin, *rest)
