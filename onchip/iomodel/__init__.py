"""Where the bytes go, predicted: exact counts of what each algorithm moves and computes, and what
no algorithm can do without.
"""

from . import bounds, traffic
from .question import question
from .traffic import Chip, Traffic

__all__ = ["Chip", "Traffic", "bounds", "question", "traffic"]
