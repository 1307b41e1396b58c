"""Integrations with the APIs of other packages. Importing one changes nothing."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onchip.integrations import diffusers, flash_attn, flex, kernels_hub, sdpa, transformers

__all__ = ["diffusers", "flash_attn", "flex", "kernels_hub", "sdpa", "transformers"]

if not TYPE_CHECKING:  # with a __getattr__, a type checker would accept every name

    def __getattr__(name: str) -> Any:
        if name in __all__:
            return import_module(f".{name}", __name__)
        raise AttributeError(f"module 'onchip.integrations' has no attribute {name!r}")
