"""Makes transformers accept attn_implementation="flash_attention_2". It checks that flash_attn is
installed and that there is a GPU; onchip also supports the CPU, so both checks pass here.

transformers stores the results of its checks in four places: a table of distributions made at
import, a function that its modules import from each other, a matrix of supported devices, and the
loaded functions.
"""

import sys
from types import ModuleType
from typing import cast

import transformers.modeling_flash_attention_utils as flash_utils
from transformers.utils import import_utils

_CHECK = "is_flash_attn_2_available"
_saved: dict = {}
_distributions = cast(dict[str, list[str]], import_utils.PACKAGE_DISTRIBUTION_MAPPING)


def enable() -> None:
    """Make transformers find flash_attn, on any device."""
    if _saved:
        return
    row = flash_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
    check = getattr(import_utils, _CHECK)
    _saved.update(row=dict(row), check=check, distributions=_distributions.get("flash_attn"))
    _distributions["flash_attn"] = ["flash-attn"]
    devices = (*row["supported_devices"], (_always, "cpu"))
    row.update(general_availability_check=_always, supported_devices=devices)
    _replace(check, _always)
    _clear_caches()


def disable() -> None:
    """Undo enable()."""
    if not _saved:
        return
    flash_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2].update(_saved["row"])
    _distributions.pop("flash_attn")
    if _saved["distributions"] is not None:
        _distributions["flash_attn"] = _saved["distributions"]
    _replace(_always, _saved["check"])
    _clear_caches()
    _saved.clear()


def _always(kernels_fallback_ok: bool = False) -> bool:
    return True


def _replace(old: object, new: object) -> None:
    for module in _modules_of_transformers():
        if module.__dict__.get(_CHECK) is old:
            setattr(module, _CHECK, new)


def _modules_of_transformers() -> list[ModuleType]:
    return [m for name, m in list(sys.modules.items()) if name.split(".")[0] == "transformers"]


def _clear_caches() -> None:
    """Clear the loaded functions and the cached version checks."""
    flash_utils._loaded_implementation = None
    import_utils.is_flash_attn_greater_or_equal.cache_clear()
