"""The matrix products of a decoder: torch's, or inside `fuse_products`, for the few rows of a step
of decoding, one launch each with the norm before it, its bias and the gate after it.

What one launch computes, by what the model is and what the step has:

    rows of the step, weight     up to PRODUCT_MOST_ROWS and PRODUCT_MOST_BYTES (tiles.py); more:
                                 torch's products
    dtype, device                fp16, bf16, fp32 on a GPU with Triton, without gradients and
                                 compilers (`pointwise.fused`); else torch's products
    norm before a product        an RMSNorm, for rows x width up to PRODUCT_NORM_ELEMENTS; a
                                 LayerNorm and longer rows: the norm is a launch of its own
    activation after a product   of a gate; an activation without one is a launch of its own
    norms after attention, MLP   a launch of its own
    experts                      torch's products, but for the router and a shared expert
    the reproducible mode        products of one order of sums for all of them (reproducible.py)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.models.pointwise import RMSNorm, add_rms_norm, fused, gated_activation, rms_norm
from onchip.models.reproducible import is_reproducible, multiply

_is_fused: ContextVar[bool] = ContextVar("onchip_fused_products", default=False)


@contextmanager
def fuse_products(enabled: bool = True) -> Iterator[None]:
    """Inside, in this thread, products of few rows are fused with what is around them."""
    token = _is_fused.set(enabled)
    try:
        yield
    finally:
        _is_fused.reset(token)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias."""
    if is_reproducible():
        return multiply(x, weight, bias)
    if kernel := find_kernel(x, weight):
        return kernel.product(x, weight, bias)
    return F.linear(x, weight, bias)


def norm_product(
    x: Tensor,
    y: Tensor | None,
    norm: RMSNorm,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(x + y, rms_norm(x + y) @ weight.T + bias); without y, x alone. With an activation, the
    product holds gate, then up, and becomes activation(gate) * up.
    """
    kernel = find_kernel(x, weight)
    if kernel is not None and kernel.fuses_norm(x) and _is_like(x, y):
        eps_offset = norm.eps, norm.offset
        return kernel.norm_product(x, y, norm.weight, eps_offset, weight, bias, activation)
    total, normed = (x, rms_norm(x, *norm)) if y is None else add_rms_norm(x, y, *norm)
    out = product(normed, weight, bias)
    return total, out if activation is None else gated_activation(out, activation)


def find_kernel(x: Tensor, weight: Tensor) -> ModuleType | None:
    """The module with the fused kernels; None if torch's products must run."""
    if torch.compiler.is_compiling() or not _is_fused.get() or is_reproducible():
        return None
    if fused(x, weight) is None:
        return None
    from onchip.kernels.llm import products

    return products if products.serves(x, weight) else None


def _is_like(x: Tensor, y: Tensor | None) -> bool:
    return y is None or (x.shape == y.shape and x.dtype == y.dtype)
