"""Routes F.scaled_dot_product_attention to onchip, for all callers at once: timm,
nn.MultiheadAttention, diffusers, models of transformers with attn_implementation="sdpa".

    onchip.integrations.sdpa.activate()   # and restore()
    with onchip.integrations.sdpa.active(): ...

It replaces the operators that torch chooses for a call, not the function. Therefore code that was
compiled before is switched too, and autograd, autocast and vmap stay torch's. Calls that onchip
does not support run torch's own kernel; `why` gives the reason for one call, `counts` all reasons
so far.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import attention as registry

from onchip.core.problem import UnsupportedError
from onchip.integrations import sdpa_masks
from onchip.integrations.sdpa_ops import OPERATORS, SdpaCall, as_bias, math_call
from onchip.kernels.cpu import aten

NAME = "onchip"
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_ALIASES = {"CompositeImplicitAutograd": "AutogradCPU"}  # a key that the alias fills
_BACKENDS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
_served: Counter[str] = Counter()
_left: Counter[str] = Counter()


class Counts(NamedTuple):
    """Calls since activate(). served: by onchip, for each operator; left: to torch, by reason."""

    served: dict[str, int]
    left: dict[str, int]


def activate() -> None:
    """Route F.scaled_dot_product_attention of this process to onchip. Meanwhile the fast path of
    nn.MultiheadAttention and cuDNN's attention are off, because they bypass the operators of flash
    attention.
    """
    if not hasattr(registry, "restore_flash_attention_impl"):
        raise UnsupportedError(f"torch {torch.__version__} has no register of attention: take 2.11")
    registry.register_flash_attention_impl(NAME, register_fn=_Overrides)
    registry.activate_flash_attention_impl(NAME)


def restore() -> None:
    """Undo activate(); does nothing if it is not active."""
    if is_active():
        registry.restore_flash_attention_impl()


@contextmanager
def active() -> Iterator[None]:
    """activate() for a with block. Restores the implementation that was active before."""
    before = registry.current_flash_attention_impl()
    activate()
    try:
        yield
    finally:
        restore()
        if before is not None:
            registry.activate_flash_attention_impl(before)


def is_active() -> bool:
    return registry.current_flash_attention_impl() == NAME


def counts() -> Counts:
    return Counts(dict(_served), dict(_left))


def why(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str | None:
    """The reason why torch's own kernel runs a call of F.scaled_dot_product_attention with these
    arguments; None if onchip's runs it.
    """
    if not is_active():
        return "onchip is not active: call onchip.integrations.sdpa.activate()"
    choice = torch.ops.aten._fused_sdp_choice(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    chosen = _BACKENDS.get(choice, str(choice))
    call = (query, key, value, attn_mask, dropout_p, is_causal, scale)
    try:
        if chosen == "math":
            math_call(*call, enable_gqa).prepare()
        elif chosen in ("flash", "efficient"):
            bias = as_bias(attn_mask, query.dtype)
            SdpaCall(
                query, key, value, bias, *call[4:], chosen == "efficient" or query.is_cpu
            ).prepare()
        else:
            return f"torch chose its {chosen} path (by its backends that are on)"
    except ValueError as error:
        return str(error)
    return None


class _Overrides:
    """onchip's operators in torch's dispatcher, until remove()."""

    def __init__(self) -> None:
        _served.clear()
        _left.clear()
        self._fastpath = torch.backends.mha.get_fastpath_enabled()
        self._cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
        self._library = torch.library.Library("aten", "IMPL")
        self._replaced: dict[str, Any] = {}
        with warnings.catch_warnings():  # it warns that a kernel is overridden
            warnings.simplefilter("ignore", UserWarning)
            for key, operators in OPERATORS.items():
                for name, operator in operators.items():
                    self._override(name, key, operator)

    def _override(self, name: str, key: str, operator: Callable[..., Any]) -> None:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
            return
        torch_kernel = torch.library.get_kernel(f"aten::{name}", _ALIASES.get(key, key))
        self._library.impl(
            name, partial(_run_or_fall_back, name, operator, torch_kernel), key, with_keyset=True
        )
        if key == "CPU":
            self._redirect_aten_cpu(name, partial(torch_kernel.call_boxed, _CPU))

    def _redirect_aten_cpu(self, name: str, torch_kernel: Callable[..., Any]) -> None:
        """Let the aten_cpu kernel, which calls these operators, call torch's kernels meanwhile."""
        attribute = "_BACKWARD" if name.endswith("backward") else "_FORWARD"
        self._replaced[attribute] = getattr(aten, attribute)
        setattr(aten, attribute, torch_kernel)

    def remove(self) -> None:
        self._library._destroy()
        for attribute, operator in self._replaced.items():
            setattr(aten, attribute, operator)
        sdpa_masks.clear_cache()
        torch.backends.mha.set_fastpath_enabled(self._fastpath)
        torch.backends.cuda.enable_cudnn_sdp(self._cudnn)


def _run_or_fall_back(
    name: str,
    operator: Callable[..., Any],
    torch_kernel: Any,
    keyset: Any,
    *args: Any,
    **options: Any,
) -> Any:
    """The result of onchip's operator, or of torch's kernel if the call is not supported."""
    try:
        result = operator(*args, **options)
    except ValueError as error:
        _left[str(error)] += 1
        return torch_kernel.call_boxed(keyset, *args, **options)
    _served[name] += 1
    return result
