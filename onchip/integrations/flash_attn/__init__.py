"""The public functions of flash_attn 2.8, computed by onchip.

Import them from here, or call `install()` and keep a program's `import flash_attn` unchanged.
Arguments have flash_attn's names, order and meaning. An argument that onchip does not support
raises an UnsupportedError. docs/integrations.md has the table.
"""

from onchip.integrations.flash_attn.alias import VERSION as __version__
from onchip.integrations.flash_attn.alias import install, installed, uninstall
from onchip.integrations.flash_attn.functions import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from onchip.integrations.flash_attn.kvcache import flash_attn_with_kvcache

__all__ = [
    "__version__",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "installed",
    "uninstall",
]
