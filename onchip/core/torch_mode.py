"""How torch runs a call: eagerly, traced, under autocast."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

PLAIN = (Tensor, torch.nn.Parameter)


def is_eager(q: Tensor) -> bool:
    """Whether the call runs eagerly: no torch.compile, tracer, dispatch mode, torch.func transform
    or forward-mode tangent is active, and q holds values (no meta or fake tensor).
    """
    return (
        not torch.compiler.is_compiling()
        and type(q) in PLAIN
        and not q.is_meta
        and forward_ad._current_level < 0
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
    )


def is_traced() -> bool:
    """Whether a compiler, a tracer or a dispatch mode records the call. Then a mask is not built
    now, because the graph would hold the operations that build it. Under a torch.func transform
    alone, tensors have values and the mask can be built.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    )


def is_autocast(q: Tensor) -> bool:
    """Whether torch.autocast is on for q's device. Reading the device's name takes 1 us, which q on
    CUDA avoids.
    """
    if q.is_cuda:
        return torch.is_autocast_enabled("cuda")
    return not q.is_meta and torch.is_autocast_enabled(q.device.type)
