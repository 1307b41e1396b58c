"""Attention as a fold over segments of keys, wherever the next segment comes from."""

from onchip.fold.fold import fold
from onchip.fold.offload import Offloaded
from onchip.fold.spill import Spill

__all__ = ["Offloaded", "Spill", "fold"]
