"""Cost models: the bytes and FLOPs of a call, its on-chip footprint, its predicted time on a
device, and the choices (splits, shared prefixes) made by them.
"""

from . import footprint, hardware, prefixes, roofline, splits
from .sizes import make_problem

__all__ = ["footprint", "hardware", "make_problem", "prefixes", "roofline", "splits"]
