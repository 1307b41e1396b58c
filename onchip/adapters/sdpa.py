"""Everything on F.scaled_dot_product_attention, switched at once: timm, nn.MultiheadAttention,
diffusers, models of transformers with attn_implementation="sdpa".

    onchip.adapters.sdpa.activate()   # and restore(); or: with onchip.adapters.sdpa.active(): ...

Ours are the operators that torch chooses for a call, not the function: what was compiled before is
switched too, and autograd, autocast and vmap stay torch's. What we do not serve is answered by
torch's own kernel; `why` names the reason for one call, `counts` has those that occurred.
"""

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import attention as registry

from onchip.adapters.sdpa_ops import OPERATORS, Ask
from onchip.problem import UnsupportedError

NAME = "onchip"
_BACKENDS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
_inside = threading.local()
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
        return "onchip is not active: call onchip.adapters.sdpa.activate()"
    choice = torch.ops.aten._fused_sdp_choice(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    chosen = _BACKENDS.get(choice, str(choice))
    if chosen not in (("flash",) if query.is_cpu else ("flash", "efficient")):
        return _torch_chose(chosen, query, value, attn_mask, dropout_p)
    bias = attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    try:
        Ask(query, key, value, bias, dropout_p, is_causal, scale, chosen != "flash").posed()
    except ValueError as error:
        return str(error)
    return None


def _torch_chose(
    chosen: str, query: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float
) -> str:
    """A sentence with what torch's own conditions on its fused operators are known to be."""
    known = {
        f"query has {query.dim()} dimensions, not 4": query.dim() != 4,
        f"{dropout_p=} on the CPU": query.is_cpu and dropout_p,
        f"value has head_dim {value.shape[-1]}, query has {query.shape[-1]}": (
            query.shape[-1] != value.shape[-1]
        ),
        "attn_mask requires a gradient": attn_mask is not None and attn_mask.requires_grad,
    }
    found = [reason for reason, holds in known.items() if holds]
    said = f" ({', '.join(found)})" if found else " (by its backends that are on, or the shapes)"
    return f"torch chose its {chosen} path{said}"


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
        with warnings.catch_warnings():  # that a kernel is overridden, which is the purpose
            warnings.simplefilter("ignore", UserWarning)
            for key, operators in OPERATORS.items():
                for name, ours in operators.items():
                    self._override(name, key, ours)

    def _override(self, name: str, key: str, ours: Callable[..., Any]) -> None:
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
            theirs = torch.library.get_kernel(f"aten::{name}", key)
            serve = partial(_serve, name, ours, theirs)
            self._library.impl(name, serve, key, with_keyset=True)

    def remove(self) -> None:
        self._library._destroy()
        torch.backends.mha.set_fastpath_enabled(self._fastpath)
        torch.backends.cuda.enable_cudnn_sdp(self._cudnn)


def _serve(
    name: str, ours: Callable[..., Any], theirs: Any, keyset: Any, *args: Any, **options: Any
) -> Any:
    """Our answer, torch's own where there is none, or where one of our kernels is asking."""
    if getattr(_inside, "asking", False):
        return theirs.call_boxed(keyset, *args, **options)
    _inside.asking = True
    try:
        answer = ours(*args, **options)
    except ValueError as error:
        _left[str(error)] += 1
        return theirs.call_boxed(keyset, *args, **options)
    finally:
        _inside.asking = False
    _served[name] += 1
    return answer
