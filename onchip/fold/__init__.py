"""Attention as a fold over segments of keys, from any source of segments."""

from onchip.fold.fold import fold
from onchip.fold.offload import Offloaded
from onchip.fold.spill import Spill

__all__ = ["Offloaded", "Spill", "fold"]
