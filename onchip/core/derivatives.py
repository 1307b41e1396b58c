"""The derivatives of attention: first order in reverse mode, and on the CPU also in forward mode
and second order. Third derivatives, all other calls and unsupported transforms raise
UnsupportedError here. Otherwise torch would return zeros, which look like a result.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._guards import TracingContext
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from onchip.core.problem import UnsupportedError

_NO_SECOND_ORDER = (
    "second derivatives of attention (create_graph=True, torch.func.hessian, hvp, a gradient of jvp"
    " or a jvp of a gradient) are not served for this call{}: attention and varlen_attention have"
    " them on the CPU, without dropout, statistics, precision, precise_delta and DTensors"
)
_NO_THIRD_ORDER = (
    "third derivatives of attention are not served, nor a jvp of a jvp (jacfwd of jacfwd): take"
    " second derivatives in reverse mode, or as torch.func.hessian does, a jvp of a gradient"
)
_NO_FORWARD_MODE = (
    "forward-mode derivatives (torch.func.jvp, jacfwd and linearize, dual tensors of"
    " torch.autograd.forward_ad) are not served for this call{}: attention and varlen_attention"
    " have them on the CPU, without dropout, statistics, precision and DTensors; use reverse mode,"
    " such as torch.func.vjp or torch.autograd.grad"
)


def is_recorded(tensors: Sequence[Tensor | None]) -> bool:
    """Whether autograd may differentiate a function of these tensors."""
    if forward_ad._current_level >= 0:
        return True
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return True
    return _runs_compiled_graph() and any(map(has_tangent, tensors))


def _runs_compiled_graph() -> bool:
    """Whether a graph of torch.compile may be running, or be lowered. Such a graph of a jvp enters
    the dual level in C++, and _current_level remains -1. A graph of make_fx alone does not, and
    looking for tangents would leave nodes in it.
    """
    proxies = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    return proxies is None or TracingContext.try_get() is not None


def has_tangent(t: Tensor | None) -> bool:
    """Whether t is a dual tensor of torch.autograd.forward_ad."""
    unpack = torch._VF._unpack_dual  # pyright: ignore[reportAttributeAccessIssue]
    return t is not None and unpack(t, level=0)[1] is not None


def refuse_forward_mode(ctx: Any, *grad_inputs: Any) -> NoReturn:
    """The `jvp` of an autograd.Function without forward mode."""
    raise no_forward_mode()


def no_forward_mode(reason: str = "") -> UnsupportedError:
    """The error for a call whose inputs have tangents that nothing propagates."""
    return UnsupportedError(_NO_FORWARD_MODE.format(f" ({reason})" * bool(reason)))


def refuse_second_order(ctx: Any, *grad_outputs: Any) -> NoReturn:
    """The `backward` and `jvp` of an autograd.Function that computes derivatives itself."""
    raise no_second_order()


def no_second_order(reason: str = "") -> UnsupportedError:
    """The error for a call whose derivative is differentiated again."""
    return UnsupportedError(_NO_SECOND_ORDER.format(f" ({reason})" * bool(reason)))


def refuse_third_order(ctx: Any, *grad_outputs: Any) -> NoReturn:
    """The `backward` and `jvp` of second derivatives, and the `jvp` of tangents."""
    raise UnsupportedError(_NO_THIRD_ORDER)


def check_no_tangents(name: str) -> None:
    """Raise in forward mode, for functions that would lose tangents: messages between ranks carry
    none. Which tensors have one is not visible here, so the mode alone decides.
    """
    if forward_ad._current_level >= 0:
        raise UnsupportedError(
            f"forward-mode derivatives are not served for {name}: call it outside of"
            " torch.func.jvp and forward_ad.dual_level"
        )


def refuse_transforms(name: str, *tensors: Tensor | None) -> None:
    """Raise if a transform of torch.func or a tracer is active. In other threads than the one that
    applies the transform, only the wrapped tensors show it.
    """
    is_wrapped = _functorch.is_functorch_wrapped_tensor
    active = torch._C._are_functorch_transforms_active()
    if active or any(isinstance(t, Tensor) and is_wrapped(t) for t in tensors):
        raise UnsupportedError(
            f"transforms of torch.func (grad, vjp, jvp, vmap and their combinations) are not served"
            f" for {name}: use torch.autograd"
        )
    proxies = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    is_traced = torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None
    if proxies is not None or is_traced:
        raise UnsupportedError(
            f"a graph of {name} is not served (torch.export, make_fx, torch.jit.trace): it would"
            " hold the messages of the ranks as constants"
        )


def check_unmapped(*grads: Tensor | None) -> None:
    """Raise if torch.autograd maps the backward over several gradients. It uses an older vmap, for
    which custom ops cannot register a rule.
    """
    if torch.compiler.is_compiling():
        return  # the older vmap is not traced, and Dynamo cannot trace the test below
    if any(t is not None and _functorch.is_legacy_batchedtensor(t) for t in grads):
        raise UnsupportedError(
            "the backward of attention cannot be mapped over gradients (is_grads_batched=True,"
            " jacobian and hessian of torch.autograd.functional with vectorize=True): use"
            " torch.func.jacrev"
        )


def check_tangents(served: Sequence[Tensor | None], tangents: Sequence[Tensor | None]) -> None:
    """Raise if one of the tangents is not among the served ones, if they are DTensors, or if
    torch.autograd maps over them by its older vmap.
    """
    given = [t for t in tangents if t is not None]
    if len(given) > sum(t is not None for t in served):
        raise no_forward_mode("a tensor that counts as a constant has a tangent")
    if any(hasattr(t, "device_mesh") for t in given):
        raise no_forward_mode("its tensors are DTensors")
    if torch.compiler.is_compiling():
        return
    if any(_functorch.is_legacy_batchedtensor(t) for t in given):
        raise UnsupportedError(
            "the tangents of attention cannot be mapped by jacobian of torch.autograd.functional"
            " (strategy='forward-mode'): use torch.func.jacfwd"
        )


def first_order(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """Decorate a `backward` so that differentiating its results raises. torch's
    `once_differentiable` raises only if an incoming gradient requires a gradient; otherwise it
    silently drops the terms through the saved tensors.
    """

    @wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> tuple:
        check_unmapped(*grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        if not torch.is_grad_enabled():  # no create_graph
            return results
        inputs = [t for t in (*ctx.saved_tensors, *grads) if t is not None and t.requires_grad]
        at = [i for i, grad in enumerate(results) if grad is not None]
        marked = _FirstOrder.apply(len(at), *(results[i] for i in at), *inputs)
        return tuple(marked[at.index(i)] if i in at else None for i in range(len(results)))

    return run


class _FirstOrder(torch.autograd.Function):
    """Return the first `count` tensors unchanged, as a function of the others. Its derivative
    raises.
    """

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(t.view_as(t) for t in tensors[:count])

    backward = staticmethod(refuse_second_order)
    jvp = staticmethod(refuse_second_order)


class SingleLevel(_SingleLevelFunction):
    """An autograd.Function for the Autograd kernel of an op. The dispatcher calls that kernel once
    per level of torch.func, so this Function handles one level. `torch.autograd.Function` handles
    the whole stack of levels.
    """

    @classmethod
    def record(cls, *args: Any) -> Any:
        allow = _functorch.set_single_level_autograd_function_allowed
        before = _functorch.get_single_level_autograd_function_allowed()
        allow(True)
        try:
            return cls.apply(*args)  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            allow(before)
