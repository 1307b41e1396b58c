"""Which derivatives of attention there are: the gradient. Forward mode, second derivatives and
transforms that a function does not serve raise a sentence here, because a zero would look like an
answer.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from onchip.core.problem import UnsupportedError

SECOND = (
    "second derivatives of attention are not served yet: neither a double backward"
    " (create_graph=True) nor torch.func.hessian, nor jvp, hvp, vhp and hessian of"
    " torch.autograd.functional"
)
FORWARD_MODE = (
    "forward-mode derivatives of attention are not served yet (torch.func.jvp, jacfwd and"
    " linearize, dual tensors of torch.autograd.forward_ad): use reverse mode, such as"
    " torch.func.vjp or torch.autograd.grad"
)


def is_recorded(tensors: Sequence[Tensor | None]) -> bool:
    """Whether a derivative of what is computed from these tensors may be asked for."""
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def refuse_forward_mode(ctx: Any, *grad_inputs: Any) -> NoReturn:
    """`jvp` of an autograd.Function."""
    raise UnsupportedError(FORWARD_MODE)


def refuse_second_order(ctx: Any, *grad_outputs: Any) -> NoReturn:
    """`backward` of an autograd.Function that computes gradients."""
    raise UnsupportedError(SECOND)


def refuse_transforms(name: str, *tensors: Tensor | None) -> None:
    """For functions that no transform of torch.func and no tracer may reach. Threads other than the
    one that applies a transform see only the wrapped tensors.
    """
    is_wrapped = _functorch.is_functorch_wrapped_tensor
    active = torch._C._are_functorch_transforms_active()
    if active or any(isinstance(t, Tensor) and is_wrapped(t) for t in tensors):
        raise UnsupportedError(
            f"transforms of torch.func (grad, vjp, jvp, vmap and what they make up) are not served"
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
    """torch.autograd maps a backward over several gradients by an older vmap, which custom ops have
    no rule for.
    """
    if torch.compiler.is_compiling():
        return  # the older vmap is not traced, and Dynamo cannot read the test for it
    if any(t is not None and _functorch.is_legacy_batchedtensor(t) for t in grads):
        raise UnsupportedError(
            "a backward of attention is not mapped over gradients (is_grads_batched=True, jacobian"
            " and hessian of torch.autograd.functional with vectorize=True): use torch.func.jacrev"
        )


def first_order(backward: Callable[..., tuple]) -> Callable[..., tuple]:
    """A `backward` without a derivative of its own: differentiating what it returns raises. torch's
    `once_differentiable` raises only if an incoming gradient requires one, and otherwise drops the
    terms that come through the saved tensors.
    """

    @wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> tuple:
        check_unmapped(*grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():  # no create_graph
            return found
        given = [t for t in (*ctx.saved_tensors, *grads) if t is not None and t.requires_grad]
        at = [i for i, grad in enumerate(found) if grad is not None]
        marked = _FirstOrder.apply(len(at), *(found[i] for i in at), *given)
        return tuple(marked[at.index(i)] if i in at else None for i in range(len(found)))

    return run


class _FirstOrder(torch.autograd.Function):
    """The first `count` tensors as they are, as a function of the others."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(t.view_as(t) for t in tensors[:count])

    backward = staticmethod(refuse_second_order)
    jvp = staticmethod(refuse_forward_mode)


class SingleLevel(_SingleLevelFunction):
    """An autograd.Function for the Autograd kernel of an op. The dispatcher calls that kernel once
    for each level of torch.func, so the Function serves the level that it is called at, and not the
    whole stack of them as `torch.autograd.Function` would have to.
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
