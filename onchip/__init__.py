"""onchip: exact attention for PyTorch that knows where its bytes are."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onchip.core.backend import Backend
    from onchip.core.dispatch import register_backend, unregister_backend
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
    from onchip.core.problem import UnsupportedError
    from onchip.core.validation import LayoutWarning
    from onchip.core.values import checks

__version__ = "0.1.0"
__all__ = [
    "Backend",
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
    "register_backend",
    "unregister_backend",
    "varlen_attention",
]

# Everything is imported at its first use: `onchip --version` needs no torch, which takes seconds.
_HOMES = {
    **dict.fromkeys(__all__, "core.functional"),
    "LayoutWarning": "core.validation",
    "UnsupportedError": "core.problem",
    "checks": "core.values",
    **dict.fromkeys(("register_backend", "unregister_backend"), "core.dispatch"),
    "Backend": "core.backend",
    "explain": "core.explain",
    **dict.fromkeys(("LLM", "BeamSearchParams", "RequestOutput", "SamplingParams"), "engine"),
}
_MODULES = ("cost", "engine", "integrations", "kvcache", "masks", "models", "nn", "parallel")
_MODULES += ("quant", "testing")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module 'onchip' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
