"""Random rounding by position: dice from Philox (core/philox.py), so that the same seed gives the
same numbers in every layout, tile size and device, and an element's dice depend on no other
element.

The counter of an element is (column // 4, token, head, sequence), its lane column % 4: the column
is the channel of q, k and v, and the key of p. The upper half of the key is the operand, the lower
half the seed; dropout, which draws by seed too, has 0 in the upper half for seeds below 2^32.
"""

import torch
from torch import Tensor

from onchip.core.philox import Corner, draw, draw_tile
from onchip.quant.schemes import sequences

OPERANDS = ("q", "k", "v", "p")


def draw_tokens(x: Tensor, operand: str, seed: int, cu_seqlens: Tensor | None = None) -> Tensor:
    """Dice for q, k or v: fp64 in [0, 1), shaped like x (batch, seqlen, heads, dim), or packed
    (total, heads, dim) with cu_seqlens. A batch entry is a sequence.
    """
    sequence, position = sequences(x, cu_seqlens)
    heads, dim = x.shape[-2:]
    u32s = draw(
        _key(operand, seed, x.device),
        torch.arange((dim + 3) // 4, device=x.device),
        position[:, None, None],
        torch.arange(heads, device=x.device)[:, None],
        sequence[:, None, None],
    )
    return _scale(torch.stack(u32s, -1).flatten(-2)[..., :dim]).reshape(x.shape)


def draw_weights(
    shape: tuple[int, int, int, int], corner: Corner, seed: int, device: torch.device
) -> Tensor:
    """Dice for a tile of p (batch, heads, queries, keys) at `corner`."""
    return _scale(draw_tile(_key("p", seed, device), shape, corner))


def _key(operand: str, seed: int, device: torch.device) -> Tensor:
    return torch.tensor((1 + OPERANDS.index(operand)) << 32 | seed, device=device)


def _scale(u32s: Tensor) -> Tensor:
    """Exact in fp64; fp32 would round the largest to 1."""
    return u32s.double() * 2.0**-32
