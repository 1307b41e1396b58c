"""The reproducible mode: the bits of a row depend on that row alone, not on other rows, on their
number, on threads, nor on whether gradients are recorded. Attention has the option `reproducible`.

What depends on more by default, and how it is computed here. On the CPU:

    products           a BLAS chooses its order of sums by the number of rows. Here every call has
                       ROWS rows; zeros fill the last tile.
    exp, silu, tanh    torch computes the elements after the last whole vector by other code. Here
                       zeros follow them, so that there is none.
    any of them        several threads cut elsewhere, and MKL then sums in parts: one thread.

On a GPU:

    products                  a kernel with one order of sums (kernels/llm/fixed_order.py)
    norms, gates, rotation    the fused kernels of inference, and where gradients are recorded the
                              same kernels: `forward_by_kernel`

Norms on the CPU and softmax are row by row in torch: `order_check` compares them, too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from onchip.core.machine import one_thread

# Rows of every product. Against one call of 512 rows, 8 tiles of 64 rows took 1.0 to 1.4 times as
# long, tiles of 32 rows 1.6 to 2.7, tiles of 16 rows 1.5 to 2.7 times; against one row, a tile took
# 4 to 12, 4 to 7 and 3 to 5 times as long (fp32, 1,024 x 3,072 and around, Xeon, 2026-11-19).
ROWS = 32
_ALIGNED_BYTES = 64
_WHOLE = 256  # elements: a multiple of what a vectorised loop takes at a time

_is_on: ContextVar[bool] = ContextVar("onchip_reproducible", default=False)


@contextmanager
def reproducible_rows(enabled: bool = True) -> Iterator[None]:
    """Inside, in this thread, the layers of a decoder compute so. enabled=False changes nothing."""
    if not enabled:
        yield
        return
    token = _is_on.set(True)
    try:
        with one_thread():
            yield
    finally:
        _is_on.reset(token)


def is_reproducible() -> bool:
    """Whether the mode is on. It never is in a compiled graph: `order_check.check_mode` refuses."""
    return not torch.compiler.is_compiling() and _is_on.get()


def runs_kernels(x: Tensor) -> bool:
    """Whether the mode computes rows like x by kernels of this package: on a GPU."""
    return x.is_cuda


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias in an order of sums that does not depend on the number of rows. The
    gradient is that of torch's product.
    """
    return _FixedOrderProduct.apply(x, weight, bias)


class _FixedOrderProduct(torch.autograd.Function):
    """The backward is torch operations, so it has derivatives of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x, weight)
        if runs_kernels(x):
            from onchip.kernels.llm import fixed_order

            return fixed_order.multiply(x, weight, bias)
        tiles = _as_tiles(x.reshape(-1, x.shape[-1]))
        out = torch.cat([F.linear(tile, weight, bias) for tile in tiles])
        return out[: x.shape[:-1].numel()].view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = dout.reshape(-1, dout.shape[-1])
        return (
            dout @ weight if needs_x else None,
            rows.T @ x.reshape(-1, x.shape[-1]) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


def _as_tiles(rows: Tensor) -> tuple[Tensor, ...]:
    """Tiles of ROWS rows, each of which begins at a multiple of 64 bytes: a BLAS may treat the
    elements before one apart.
    """
    count = -(-max(1, len(rows)) // ROWS) * ROWS
    if count > len(rows) or rows.data_ptr() % _ALIGNED_BYTES or not rows.is_contiguous():
        padded = rows.new_zeros(count, rows.shape[1])
        padded[: len(rows)] = rows
        rows = padded
    return rows.split(ROWS)


def in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x) of a function of single elements. In the mode, on the CPU, each element is in a
    whole vector.
    """
    if runs_kernels(x) or not is_reproducible():
        return function(x)
    flat = x.reshape(-1)
    padded = F.pad(flat, (0, -len(flat) % _WHOLE))
    return function(padded)[: len(flat)].view(x.shape)


_F = TypeVar("_F", bound=Callable[..., Any])


def forward_by_kernel(function: _F) -> _F:
    """Decorate a function of positional arguments, the first of them a tensor, that has a fused
    kernel for calls without gradients. In the mode, on a GPU, a call that records gradients runs
    the kernel, too, so that its bits are the same; its backward differentiates the definition.
    """

    @wraps(function)
    def run(*args: Any) -> Any:
        if torch.is_grad_enabled() and is_reproducible() and runs_kernels(args[0]):
            return _KernelForward.apply(function, *args)
        return function(*args)

    return cast(_F, run)


class _KernelForward(torch.autograd.Function):
    """function(*args) without gradients; backward: those of function(*args) with gradients, which
    runs no fused kernel outside of the mode.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.function, ctx.others = function, [None if _is_tensor(a) else a for a in args]
        ctx.is_tensor = [_is_tensor(a) for a in args]
        ctx.save_for_backward(*filter(_is_tensor, args))
        return function(*args)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        saved, needs = iter(ctx.saved_tensors), ctx.needs_input_grad[1:]
        args = [next(saved) if is_tensor else None for is_tensor in ctx.is_tensor]
        args = [
            other if t is None else t.detach().requires_grad_(wanted)
            for t, other, wanted in zip(args, ctx.others, needs, strict=True)
        ]
        with torch.enable_grad(), _usual_rows():
            outs = ctx.function(*args)
        outs = outs if isinstance(outs, tuple) else (outs,)
        # Not every result depends on the wanted arguments: the values of split_heads on no norm.
        pairs = [(o, d) for o, d in zip(outs, douts, strict=True) if o.requires_grad]
        leaves = [t for t, wanted in zip(args, needs, strict=True) if wanted]
        outs, douts = zip(*pairs, strict=True)
        grads = iter(torch.autograd.grad(outs, leaves, douts))
        return None, *[next(grads) if wanted else None for wanted in needs]


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


@contextmanager
def _usual_rows() -> Iterator[None]:
    token = _is_on.set(False)
    try:
        yield
    finally:
        _is_on.reset(token)
