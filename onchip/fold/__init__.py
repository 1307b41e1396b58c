"""Attention as a fold over segments of keys, wherever the next segment comes from."""

from onchip.fold.fold import fold

__all__ = ["fold"]
