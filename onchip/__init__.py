"""onchip: exact attention for PyTorch that knows where its bytes are."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onchip import (
        cost,
        engine,
        fold,
        integrations,
        kvcache,
        masks,
        models,
        nn,
        parallel,
        quant,
        score_mods,
        testing,
    )
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
    from onchip.engine import LLM, BeamSearchParams, RequestOutput, SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Backend",
    "BeamSearchParams",
    "LayoutWarning",
    "RequestOutput",
    "SamplingParams",
    "UnsupportedError",
    "attention",
    "attention_weights",
    "cascade_attention",
    "checks",
    "cost",
    "engine",
    "explain",
    "fold",
    "integrations",
    "kvcache",
    "masks",
    "merge_states",
    "models",
    "nn",
    "offload_attention",
    "paged_attention",
    "parallel",
    "quant",
    "register_backend",
    "score_mods",
    "testing",
    "unregister_backend",
    "varlen_attention",
]

# Everything is imported at its first use: `onchip --version` needs no torch, which takes seconds.
_MODULES = ("cost", "engine", "fold", "integrations", "kvcache", "masks", "models", "nn")
_MODULES += ("parallel", "quant", "score_mods", "testing")
_HOMES = {
    **dict.fromkeys(set(__all__) - {*_MODULES}, "core.functional"),
    "LayoutWarning": "core.validation",
    "UnsupportedError": "core.problem",
    "checks": "core.values",
    **dict.fromkeys(("register_backend", "unregister_backend"), "core.dispatch"),
    "Backend": "core.backend",
    "explain": "core.explain",
    **dict.fromkeys(("LLM", "BeamSearchParams", "RequestOutput", "SamplingParams"), "engine"),
}

if not TYPE_CHECKING:  # with a __getattr__, a type checker would accept every name

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return import_module(f".{name}", __name__)
        if name not in _HOMES:
            raise AttributeError(f"module 'onchip' has no attribute {name!r}")
        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
