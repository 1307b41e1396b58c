"""Low precision: formats, scales, rotation, smoothing, and attention computed with them, executable
on any torch device. `formats.INT8` is the number format, `recipes.INT8` a way to compute attention.
"""

from . import formats, recipes
from .accumulator import Accumulator
from .formats import Format, cast
from .recipes import Recipe, attend, prepare
from .rotation import rotate, unrotate
from .schemes import Quantised, Scheme, quantise
from .smoothing import lse_shift, smooth_keys

__all__ = [
    "Accumulator",
    "Format",
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
