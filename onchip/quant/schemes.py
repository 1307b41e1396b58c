"""Schemes: tensors as values of a number format times fp32 scales, and which elements share a
scale.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.quant.formats import NumberFormat, cast, store, wide

PER = ("tensor", "head", "channel", "block", "token")


@dataclass(frozen=True)
class Scheme:
    """One scale per "tensor"; per "head" of a sequence; per "channel" of a head of a sequence; per
    "block" of `block` tokens of a head, counted from the start of its sequence; or per "token" of a
    head.
    """

    format: NumberFormat
    per: str
    block: int = 128

    def __post_init__(self) -> None:
        if self.per not in PER:
            raise ValueError(f"per={self.per!r} must be one of {PER}")
        if self.block < 1:
            raise ValueError(f"block={self.block} must be a positive number of tokens")


class Quantised(NamedTuple):
    """x ~ values * token_scales(). values are shaped like x, in the dtype of the format (fp4:
    fp32).

    scales, fp32: per tensor (); head (batch, heads); channel (batch, heads, head_dim); block
    (batch, blocks, heads); token (batch, seqlen, heads). Packed: batch is the number of sequences;
    block (blocks, heads) and token (total, heads) hold one sequence after another, and each
    sequence begins a new block.
    """

    values: Tensor
    scales: Tensor
    scheme: Scheme
    cu_seqlens: Tensor | None = None

    def token_scales(self) -> Tensor:
        """The scale of each element, fp32, broadcastable to values: (..., seqlen, heads, 1|dim)."""
        if self.scheme.per == "tensor":
            return self.scales.expand([1] * self.values.dim())
        ids, count = _group_tokens(self.values, self.scheme, self.cu_seqlens)
        heads, dim = self.values.shape[-2:]
        scales = self.scales.reshape(count, heads, dim if self.scheme.per == "channel" else 1)
        return scales[ids].unflatten(0, self.values.shape[:-2])

    def dequantise(self) -> Tensor:
        """values * scales in fp32."""
        return self.values.float() * self.token_scales()


def quantise(
    x: Tensor,
    scheme: Scheme,
    cu_seqlens: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Quantised:
    """Quantise x (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim) with
    cu_seqlens: the largest |x| that shares a scale becomes the format's max.

    A scale over NaN or infinity makes all elements that share it NaN. With a generator values are
    rounded at random: see `cast`.
    """
    check_layout("x", x, cu_seqlens)
    amax = find_amax(wide(x).abs(), scheme, cu_seqlens)
    # Divide by a tensor: on a GPU torch would multiply by a number's reciprocal, and scales differ.
    scales = (amax / amax.new_tensor(scheme.format.max)).float()
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny)  # zeros: no division by 0
    out = Quantised(x, scales, scheme, cu_seqlens)
    values = cast(wide(x) / out.token_scales(), scheme.format, generator)
    return out._replace(values=store(values, scheme.format))


def sequences(x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """(sequence, position) of each token of x: int64 (tokens,), batch entries one after another.
    Each entry of a dense batch is a sequence.
    """
    tokens, bounds = _bounds(x, cu_seqlens)
    sequence = torch.repeat_interleave(
        torch.arange(len(bounds) - 1, device=x.device), bounds.diff(), output_size=tokens
    )
    return sequence, torch.arange(tokens, device=x.device) - bounds[sequence]


def _bounds(x: Tensor, cu_seqlens: Tensor | None) -> tuple[int, Tensor]:
    """The number of tokens, and the first token of each sequence, then the end of the last."""
    if cu_seqlens is not None:
        return x.shape[0], cu_seqlens.long()
    batch, seqlen = x.shape[:2]
    return batch * seqlen, torch.arange(batch + 1, device=x.device) * seqlen


def group_blocks(x: Tensor, block: int, cu_seqlens: Tensor | None) -> tuple[Tensor, int]:
    """The index of each token's block of `block` tokens, and the number of blocks; each sequence
    begins a new one.
    """
    _, bounds = _bounds(x, cu_seqlens)
    sequence, position = sequences(x, cu_seqlens)
    blocks = (bounds.diff() + block - 1) // block
    ends = blocks.cumsum(0)
    return (ends - blocks)[sequence] + position // block, int(blocks.sum())


def _group_tokens(x: Tensor, scheme: Scheme, cu_seqlens: Tensor | None) -> tuple[Tensor, int]:
    """The index of each token's scale, and the number of scales, for one head."""
    if scheme.per == "block":
        return group_blocks(x, scheme.block, cu_seqlens)
    tokens, bounds = _bounds(x, cu_seqlens)
    if scheme.per == "token":
        return torch.arange(tokens, device=x.device), tokens
    return sequences(x, cu_seqlens)[0], len(bounds) - 1


def find_amax(x: Tensor, scheme: Scheme, cu_seqlens: Tensor | None) -> Tensor:
    """The largest magnitude per scale, in the shape of the scales; NaN if one of them is."""
    if scheme.per == "tensor":
        return x.amax() if x.numel() else x.new_zeros(())
    if scheme.per != "channel":
        x = x.amax(-1, keepdim=True)
    ids, count = _group_tokens(x, scheme, cu_seqlens)
    rows = x.reshape(-1, *x.shape[-2:])
    amax = rows.new_zeros(count, *rows.shape[1:])
    amax.scatter_reduce_(0, ids[:, None, None].expand_as(rows), rows, "amax")
    amax = amax if scheme.per == "channel" else amax[..., 0]
    if cu_seqlens is None and scheme.per in ("block", "token"):
        return amax.unflatten(0, (x.shape[0], -1 if x.shape[0] * count else 0))
    return amax


def check_layout(name: str, x: Tensor, cu_seqlens: Tensor | None) -> None:
    """Check that x is dense without cu_seqlens, or packed with them, every token in a sequence."""
    rank, layout = 4, "(batch, seqlen, heads, head_dim)"
    if cu_seqlens is not None:
        rank, layout = 3, "(total, heads, head_dim) with cu_seqlens"
    if x.dim() != rank:
        raise ValueError(f"{name} must have rank {rank}, {layout}, got shape {tuple(x.shape)}")
    if cu_seqlens is None:
        return
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != len(x) or offsets != sorted(offsets):
        raise ValueError(
            f"cu_seqlens must rise from 0 to the {len(x)} tokens of {name}, got {offsets}"
        )
