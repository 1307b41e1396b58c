"""Attention as an nn.Module: `MultiheadAttention`, its cache for decoding, and state dicts in the
layouts of torch and transformers.
"""

from .layouts import LAYOUTS
from .multihead import MultiheadAttention
from .static_cache import StaticKVCache

__all__ = ["LAYOUTS", "MultiheadAttention", "StaticKVCache"]
