"""Where the bytes go, predicted: exact counts of what each algorithm moves and computes, what no
algorithm can do without, what lies on the chip, how long it takes on which device, and what is
chosen by that.
"""

from . import bounds, footprint, hardware, prefixes, roofline, splits, traffic
from .question import question
from .traffic import Chip, Traffic

__all__ = [
    "Chip",
    "Traffic",
    "bounds",
    "footprint",
    "hardware",
    "prefixes",
    "question",
    "roofline",
    "splits",
    "traffic",
]
