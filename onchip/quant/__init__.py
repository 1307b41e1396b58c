"""Low precision: number formats, scales, rotation, smoothing, and reference attention with
quantised operands, on any torch device. `formats.INT8` is the number format, `recipes.INT8` a way
to compute attention; `microscaling.NVFP4` is a block format, `recipes.NVFP4` a way to compute.
"""

from . import formats, fp4, microscaling, recipes
from .accumulator import Accumulator
from .block_operands import KeyBlocks, quantise_channels, quantise_keys
from .emulation import attend, prepare
from .formats import NumberFormat, cast
from .microscaling import BlockFormat, Microscaled, quantise_blocks
from .recipes import Recipe
from .rotation import rotate, unrotate
from .schemes import Quantised, Scheme, quantise
from .smoothing import lse_shift, smooth_keys, smooth_queries

__all__ = [
    "Accumulator",
    "BlockFormat",
    "KeyBlocks",
    "Microscaled",
    "NumberFormat",
    "Quantised",
    "Recipe",
    "Scheme",
    "attend",
    "cast",
    "formats",
    "fp4",
    "lse_shift",
    "microscaling",
    "prepare",
    "quantise",
    "quantise_blocks",
    "quantise_channels",
    "quantise_keys",
    "recipes",
    "rotate",
    "smooth_keys",
    "smooth_queries",
    "unrotate",
]
