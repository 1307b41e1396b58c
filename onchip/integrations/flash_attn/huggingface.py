"""transformers asks before it runs attn_implementation="flash_attention_2": is the package there,
and is there a GPU? Both answers are given here, because onchip serves the CPU as well.

It keeps the answers: in a table of distributions made when it is imported, in functions that its
modules import from each other, in a matrix of what works where, and in the functions it loaded.
"""

import sys
from types import ModuleType
from typing import cast

import transformers.modeling_flash_attention_utils as flash_utils
from transformers.utils import import_utils

_ASKED = "is_flash_attn_2_available"
_before: dict = {}
_listed = cast(dict[str, list[str]], import_utils.PACKAGE_DISTRIBUTION_MAPPING)


def admit() -> None:
    """transformers finds flash_attn, on any device."""
    if _before:
        return
    row = flash_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
    asked = getattr(import_utils, _ASKED)
    _before.update(row=dict(row), asked=asked, listed=_listed.get("flash_attn"))
    _listed["flash_attn"] = ["flash-attn"]
    devices = (*row["supported_devices"], (_always, "cpu"))
    row.update(general_availability_check=_always, supported_devices=devices)
    _replace(asked, _always)
    _forget()


def dismiss() -> None:
    """Undo admit()."""
    if not _before:
        return
    flash_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2].update(_before["row"])
    _listed.pop("flash_attn")
    if _before["listed"] is not None:
        _listed["flash_attn"] = _before["listed"]
    _replace(_always, _before["asked"])
    _forget()
    _before.clear()


def _always(kernels_fallback_ok: bool = False) -> bool:
    return True


def _replace(old: object, new: object) -> None:
    for module in _modules_of_transformers():
        if module.__dict__.get(_ASKED) is old:
            setattr(module, _ASKED, new)


def _modules_of_transformers() -> list[ModuleType]:
    return [m for name, m in list(sys.modules.items()) if name.split(".")[0] == "transformers"]


def _forget() -> None:
    """The functions that were loaded, and what was found out about versions."""
    flash_utils._loaded_implementation = None
    import_utils.is_flash_attn_greater_or_equal.cache_clear()
