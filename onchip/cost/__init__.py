"""Cost models: the bytes and FLOPs of a call, its predicted time on a device, and the choices
(splits, shared prefixes) made by them.
"""

from . import decoding, hardware, prefixes, roofline, splits
from .sizes import make_problem

__all__ = ["decoding", "hardware", "make_problem", "prefixes", "roofline", "splits"]
