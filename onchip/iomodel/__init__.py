"""Where the bytes go, predicted: exact counts of what each algorithm moves and computes, what no
algorithm can do without, what lies on the chip, and how long it takes on which device.
"""

from . import bounds, footprint, hardware, roofline, traffic
from .question import question
from .traffic import Chip, Traffic

__all__ = ["Chip", "Traffic", "bounds", "footprint", "hardware", "question", "roofline", "traffic"]
