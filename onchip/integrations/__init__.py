"""Integrations with the APIs of other packages. Importing one changes nothing."""

from importlib import import_module

_LAZY = ("diffusers", "flash_attn", "flex", "kernels_hub", "sdpa", "transformers")


def __getattr__(name: str):
    if name in _LAZY:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module 'onchip.integrations' has no attribute {name!r}")
