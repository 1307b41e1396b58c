"""onchip: exact attention for PyTorch that knows where its bytes are."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onchip.dispatch import register_backend, unregister_backend
    from onchip.explain import explain
    from onchip.kernels.protocol import Backend
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
    **dict.fromkeys(__all__, "ops"),
    **dict.fromkeys(("LayoutWarning", "UnsupportedError", "checks"), "problem"),
    **dict.fromkeys(("register_backend", "unregister_backend"), "dispatch"),
    "Backend": "kernels.protocol",
    "explain": "explain",
    **dict.fromkeys(("LLM", "BeamSearchParams", "RequestOutput", "SamplingParams"), "engine"),
}
_MODULES = ("adapters", "engine", "iomodel", "kvcache", "masks", "models", "parallel", "quant")
_MODULES += ("testing",)


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


class _Package(ModuleType):
    """A package whose functions are not hidden by its files: Python binds a submodule to its
    package when it is first imported, and `onchip.explain` is the function.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
