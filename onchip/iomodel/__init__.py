"""Where the bytes go and how long it takes, predicted: exact counts of what algorithms move and
computes, what no algorithm can do without, devices, on-chip memory, rooflines.
"""

from . import traffic
from .question import question
from .traffic import Chip, Traffic

__all__ = ["Chip", "Traffic", "question", "traffic"]
