"""Masks: rules that combine with & | ~, built into EMPTY, PARTIAL and FULL blocks."""

from .bits import BLOCK
from .blockmask import BlockLists, BlockMask
from .mods import (
    Mask,
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
from .presets import bigbird, block_local, butterfly, dilated, longformer, strided
from .visibility import Visibility

__all__ = [
    "BLOCK",
    "BlockLists",
    "BlockMask",
    "Mask",
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
    "padding",
    "prefix_lm",
    "spans",
    "strided",
    "window",
]
