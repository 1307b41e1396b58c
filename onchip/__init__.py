"""onchip: exact attention for PyTorch that knows where its bytes are."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onchip.core.explain import explain
    from onchip.core.functional import (
        attention,
        attention_weights,
        cascade_attention,
        merge_states,
        offload_attention,
        paged_attention,
        varlen_attention,
    )
    from onchip.core.problem import LayoutWarning, UnsupportedError, checks

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

# Everything is imported at its first use: `onchip --version` needs no torch, which takes seconds.
_HOMES = {
    **dict.fromkeys(__all__, "core.functional"),
    **dict.fromkeys(("LayoutWarning", "UnsupportedError", "checks"), "core.problem"),
    "explain": "core.explain",
    **dict.fromkeys(("LLM", "BeamSearchParams", "RequestOutput", "SamplingParams"), "engine"),
}
_MODULES = ("cost", "engine", "integrations", "kvcache", "masks", "models", "parallel", "quant")
_MODULES += ("testing",)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"onchip.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'onchip' has no attribute {name!r}")
    value = getattr(import_module(f"onchip.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
