"""Masks: rules that combine with & | ~, built into EMPTY, PARTIAL and FULL blocks."""

from .bits import BLOCK
from .blockmask import BlockLists, BlockMask
from .mods import (
    Mask,
    MaskLike,
    MaskMod,
    as_mask,
    build,
    causal,
    dense,
    document,
    from_flex,
    full,
    mod,
    padding,
    prefix_lm,
    spans,
    window,
)
from .order import TokenOrder, tile_order
from .presets import bigbird, block_local, butterfly, dilated, longformer, strided
from .video import neighborhood, radial, sliding_tile, spatial_head, temporal_head
from .visibility import Visibility

__all__ = [
    "BLOCK",
    "BlockLists",
    "BlockMask",
    "Mask",
    "MaskLike",
    "MaskMod",
    "TokenOrder",
    "Visibility",
    "as_mask",
    "bigbird",
    "block_local",
    "build",
    "butterfly",
    "causal",
    "dense",
    "dilated",
    "document",
    "from_flex",
    "full",
    "longformer",
    "mod",
    "neighborhood",
    "padding",
    "prefix_lm",
    "radial",
    "sliding_tile",
    "spans",
    "spatial_head",
    "strided",
    "temporal_head",
    "tile_order",
    "window",
]
