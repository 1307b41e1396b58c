"""Cost models: exact traffic and operation counts of each algorithm, lower bounds, on-chip
footprints, predicted times per device, and the choices made by them.
"""

from . import bounds, footprint, hardware, prefixes, roofline, splits, traffic
from .question import make_problem
from .traffic import Chip, Traffic

__all__ = [
    "Chip",
    "Traffic",
    "bounds",
    "footprint",
    "hardware",
    "prefixes",
    "make_problem",
    "roofline",
    "splits",
    "traffic",
]
