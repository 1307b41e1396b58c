"""Everything on F.scaled_dot_product_attention, switched at once: timm, nn.MultiheadAttention,
diffusers, models of transformers with attn_implementation="sdpa".

    onchip.integrations.sdpa.activate()   # and restore()
    with onchip.integrations.sdpa.active(): ...

Ours are the operators that torch chooses for a call, not the function: what was compiled before is
switched too, and autograd, autocast and vmap stay torch's. What we do not serve is answered by
torch's own kernel; `why` names the reason for one call, `counts` has those that occurred.
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
from onchip.integrations.sdpa_ops import OPERATORS, Ask, as_bias, math_ask
from onchip.kernels.cpu import aten

NAME = "onchip"
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_ALIASES = {"CompositeImplicitAutograd": "AutogradCPU"}  # one of the keys that it fills
_BACKENDS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
_served: Counter[str] = Counter()
_left: Counter[str] = Counter()


class Counts(NamedTuple):
    """Calls since activate(). served: of each operator; left: to torch, by reason."""

    served: dict[str, int]
    left: dict[str, int]


def activate() -> None:
    """From now on F.scaled_dot_product_attention is served by onchip, in this process. While it is,
    torch's faster paths of nn.MultiheadAttention and cuDNN's attention, which go around the
    operators of flash attention, are off.
    """
    if not hasattr(registry, "restore_flash_attention_impl"):
        raise UnsupportedError(f"torch {torch.__version__} has no register of attention: take 2.11")
    registry.register_flash_attention_impl(NAME, register_fn=_Handle)
    registry.activate_flash_attention_impl(NAME)


def restore() -> None:
    """Undo activate(); nothing if it is not active."""
    if is_active():
        registry.restore_flash_attention_impl()


@contextmanager
def active() -> Iterator[None]:
    """activate() inside; afterwards whatever was active before is active again."""
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
    """Why a call of F.scaled_dot_product_attention with these arguments is torch's own; None: it is
    ours.
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
            math_ask(*call, enable_gqa).prepare()
        elif chosen in ("flash", "efficient"):
            bias = as_bias(attn_mask, query.dtype)
            Ask(query, key, value, bias, *call[4:], chosen == "efficient" or query.is_cpu).prepare()
        else:
            return f"torch chose its {chosen} path (by its backends that are on)"
    except ValueError as error:
        return str(error)
    return None


class _Handle:
    """Our operators in torch's dispatcher, for as long as it is not removed."""

    def __init__(self) -> None:
        _served.clear()
        _left.clear()
        self._fastpath = torch.backends.mha.get_fastpath_enabled()
        self._cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
        self._library = torch.library.Library("aten", "IMPL")
        self._replaced: dict[str, Any] = {}
        with warnings.catch_warnings():  # that a kernel is overridden, which is the purpose
            warnings.simplefilter("ignore", UserWarning)
            for key, operators in OPERATORS.items():
                for name, ours in operators.items():
                    self._override(name, key, ours)

    def _override(self, name: str, key: str, ours: Callable[..., Any]) -> None:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
            return
        theirs = torch.library.get_kernel(f"aten::{name}", _ALIASES.get(key, key))
        self._library.impl(name, partial(_serve, name, ours, theirs), key, with_keyset=True)
        if key == "CPU":
            self._keep_for_aten(name, partial(theirs.call_boxed, _CPU))

    def _keep_for_aten(self, name: str, theirs: Callable[..., Any]) -> None:
        """One of our kernels calls these operators: while they are ours, it calls torch's."""
        attribute = "_BACKWARD" if name.endswith("backward") else "_FORWARD"
        self._replaced[attribute] = getattr(aten, attribute)
        setattr(aten, attribute, theirs)

    def remove(self) -> None:
        self._library._destroy()
        for attribute, operator in self._replaced.items():
            setattr(aten, attribute, operator)
        sdpa_masks.forget()
        torch.backends.mha.set_fastpath_enabled(self._fastpath)
        torch.backends.cuda.enable_cudnn_sdp(self._cudnn)


def _serve(
    name: str, ours: Callable[..., Any], theirs: Any, keyset: Any, *args: Any, **options: Any
) -> Any:
    """Our answer, or torch's own where there is none."""
    try:
        answer = ours(*args, **options)
    except ValueError as error:
        _left[str(error)] += 1
        return theirs.call_boxed(keyset, *args, **options)
    _served[name] += 1
    return answer
