"""Predicted costs: the bytes and FLOPs of a call, its on-chip memory, its time on a device, and the
choices (splits, shared prefixes) that follow from these.
"""

from . import footprint, hardware, prefixes, roofline, splits
from .question import question

__all__ = ["footprint", "hardware", "prefixes", "question", "roofline", "splits"]
