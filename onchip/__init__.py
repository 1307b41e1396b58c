"""onchip: exact attention for PyTorch that knows where its bytes are."""

from importlib import import_module

from onchip.explain import explain
from onchip.ops import (
    attention,
    attention_weights,
    cascade_attention,
    merge_states,
    offload_attention,
    paged_attention,
    varlen_attention,
)
from onchip.problem import LayoutWarning, UnsupportedError, checks

__version__ = "0.1.0"
__all__ = [
    "LayoutWarning",
    "UnsupportedError",
    "attention",
    "attention_weights",
    "cascade_attention",
    "checks",
    "explain",
    "merge_states",
    "offload_attention",
    "paged_attention",
    "varlen_attention",
]

_LAZY = ("adapters", "engine", "iomodel", "kvcache", "masks", "models", "parallel", "quant")
_LAZY += ("testing",)
_ENGINE = ("LLM", "BeamSearchParams", "RequestOutput", "SamplingParams")


def __getattr__(name: str):
    if name in _LAZY:
        return import_module(f"onchip.{name}")
    if name in _ENGINE:
        return getattr(import_module("onchip.engine"), name)
    raise AttributeError(f"module 'onchip' has no attribute {name!r}")
