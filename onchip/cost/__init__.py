"""Cost models: the bytes and FLOPs of a call, its predicted time on a device, and the choices
(splits, shared prefixes) made by them.
"""

from . import hardware, prefixes, roofline, splits
from .sizes import make_problem

__all__ = ["hardware", "make_problem", "prefixes", "roofline", "splits"]
