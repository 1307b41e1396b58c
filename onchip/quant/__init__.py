"""Low precision: number formats, scales, rotation, smoothing, and reference attention with
quantised operands, on any torch device. `formats.INT8` is the number format, `recipes.INT8` a way
to compute attention.
"""

from . import formats, recipes
from .accumulator import Accumulator
from .formats import NumberFormat, cast
from .recipes import Recipe, attend, prepare
from .rotation import rotate, unrotate
from .schemes import Quantised, Scheme, quantise
from .smoothing import lse_shift, smooth_keys

__all__ = [
    "Accumulator",
    "NumberFormat",
    "Quantised",
    "Recipe",
    "Scheme",
    "attend",
    "cast",
    "formats",
    "lse_shift",
    "prepare",
    "quantise",
    "recipes",
    "rotate",
    "smooth_keys",
    "unrotate",
]
