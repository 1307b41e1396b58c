"""Dropout by Philox (core/philox.py). The mask depends only on positions, so that every kernel,
tile size and rank draws the same mask. A probability is kept iff its u32 < round((1 - p) 2^32).
"""

import torch
from torch import Tensor

from onchip.core.philox import Corner, axis, draw, draw_tile


def keep(
    seed: Tensor, shape: tuple[int, int, int, int], corner: Corner, dropout_p: float
) -> Tensor:
    """bool (batch, heads, rows, keys): which probabilities of the tile at `corner` survive."""
    return draw_tile(seed, shape, corner) < round((1.0 - dropout_p) * 2**32)


def keep_at(
    seed: Tensor,
    shape: tuple[int, int, int, int],
    corner: Corner,
    places: tuple[Tensor, Tensor],
    dropout_p: float,
) -> Tensor:
    """The same for queries and keys at given positions: `places` are the tile's rows of
    Tensors.positions_q and its keys of positions_k. Of the corner only batch and head are used.
    """
    batch, heads, rows, keys = shape
    (q, sequence), k = places[0].long(), places[1].long()
    u32s = draw(
        seed,
        k.view(1, 1, 1, keys) // 4,
        q.view(1, 1, rows, 1),
        axis(corner.head, heads, 1, seed.device),
        axis(corner.batch, batch, 0, seed.device) + sequence.view(1, 1, rows, 1),
    )
    lane, u32 = k % 4, torch.empty(shape, dtype=torch.int64, device=seed.device)
    for i, of_lane in enumerate(u32s):
        u32 = torch.where(lane == i, of_lane, u32)
    return u32 < round((1.0 - dropout_p) * 2**32)
