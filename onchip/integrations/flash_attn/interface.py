"""flash_attn.flash_attn_interface: the public functions, and the private names that programs
import.
"""

from onchip.integrations.flash_attn import extension as flash_attn_gpu
from onchip.integrations.flash_attn.functions import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from onchip.integrations.flash_attn.kvcache import flash_attn_with_kvcache
from onchip.integrations.flash_attn.options import contiguous, round_multiple
from onchip.integrations.flash_attn.primitives import (
    flash_attn_backward,
    flash_attn_forward,
    flash_attn_varlen_backward,
    flash_attn_varlen_forward,
)
from onchip.integrations.flash_attn.s_dmask import get_block_size_n

USE_TRITON_ROCM = False  # flash_attn's kernels for AMD; onchip has its own dispatch

__all__ = [
    "USE_TRITON_ROCM",
    "contiguous",
    "flash_attn_backward",
    "flash_attn_forward",
    "flash_attn_func",
    "flash_attn_gpu",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_backward",
    "flash_attn_varlen_forward",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_block_size_n",
    "round_multiple",
]
