"""The operations between the matrix products of a decoder: their definitions in torch, and one
fused launch each if a GPU has Triton.

The fused kernels serve inference. With gradients enabled, under compilers and transforms, and in
fp64 the definitions run.
"""

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.core.device import device_info
from onchip.core.torch_mode import is_eager


class Norms(NamedTuple):
    """The RMSNorms of the heads of q and k: weights (head_dim,), eps, and the offset added to a
    weight.
    """

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    offset: float = 0.0


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / rms(x) * (offset + weight) over the last dimension, in fp32 and rounded once."""
    if kernel := fused(x, weight):
        return kernel.add_rms_norm(x, None, weight, eps, offset)[1]
    wide = x if x.dtype == torch.float64 else x.float()
    factor = weight.to(wide.dtype)
    factor = offset + factor if offset else factor
    return F.rms_norm(wide, weight.shape, factor, eps).to(x.dtype)


def add_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(x + y, rms_norm(x + y)): the sum is rounded, then normed."""
    if (kernel := fused(x, weight)) and x.shape == y.shape and x.dtype == y.dtype:
        return kernel.add_rms_norm(x, y, weight, eps, offset)
    total = x + y
    return total, rms_norm(total, weight, eps, offset)


def activate(x: Tensor, name: str) -> Tensor:
    return _ACTIVATE[name](x)


def gated_activation(x: Tensor, name: str) -> Tensor:
    """activation(gate) * up of a projection (..., 2 inner) that holds both."""
    if kernel := fused(x):
        return kernel.gated_activation(x, name)
    gate, up = x.chunk(2, -1)
    return activate(gate, name) * up


def place(
    qkv: Tensor,
    num_heads: int,
    turn: tuple[Tensor, Tensor] | None,
    norms: Norms | None,
    pages: tuple[Tensor, ...],
    slot_mapping: Tensor,
) -> Tensor:
    """q (tokens, num_heads, head_dim), normed and rotated (RoPE); k and v of the same tokens, k
    normed and rotated too, are written to their slots. Only if `fused(qkv)`.

    qkv: (tokens, (num_heads + 2 num_kv_heads) head_dim); a row holds q, then k, then v. turn: (cos,
    sin), fp32 (tokens, 1, half), or None for no rotation. pages: k_pages, v_pages (num_pages,
    page_size, num_kv_heads, head_dim), and for 8-bit pages their scales, fp32 (num_pages,
    page_size, num_kv_heads). slot_mapping: int32 (tokens,); a slot out of range, like -1, writes
    nothing.
    """
    _check_place(qkv, num_heads, pages, slot_mapping)
    from onchip.kernels.llm import pointwise as kernel

    weights, rest = (norms[:2], norms[2:]) if norms else (None, (0.0, 0.0))
    return kernel.place(qkv, num_heads, turn, weights, rest, pages, slot_mapping)


def _check_place(
    qkv: Tensor, num_heads: int, pages: tuple[Tensor, ...], slot_mapping: Tensor
) -> None:
    k_pages, v_pages, *scales = pages
    num_kv_heads, head_dim = k_pages.shape[2:]
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.shape != (slot_mapping.shape[0], width) or k_pages.shape != v_pages.shape:
        raise ValueError(
            f"qkv {tuple(qkv.shape)} does not fit pages {tuple(k_pages.shape)} and"
            f" {tuple(v_pages.shape)} with {num_heads=} and {slot_mapping.shape[0]} slots"
        )
    if not scales and (k_pages.dtype != qkv.dtype or v_pages.dtype != qkv.dtype):
        raise ValueError(f"qkv is {qkv.dtype}, pages are {k_pages.dtype} and {v_pages.dtype}")


def fused(*tensors: Tensor) -> ModuleType | None:
    """The module with fused kernels for all of these functions and `place`; None if the definitions
    must run.
    """
    x = tensors[0]
    if x.device.type != "cuda" or torch.is_grad_enabled() or not is_eager(x):
        return None
    same = all(t.dtype == x.dtype and t.device == x.device for t in tensors)
    if not same or x.dtype == torch.float64 or not device_info(x.device).has_triton:
        return None
    from onchip.kernels.llm import pointwise

    return pointwise


_ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
