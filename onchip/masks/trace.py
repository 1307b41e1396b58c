"""Find the indices that a mask function depends on, by running it on scalars."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_TO_PYTHON = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist", "numpy"}


class _Taint(TorchFunctionMode):
    """Follow one index through torch calls: `seen` holds every tensor computed from its value."""

    def __init__(self, source: Tensor):
        super().__init__()
        self.seen = [source]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        follows = self.holds((args, kwargs)) and not name.startswith("new_")
        if follows and name in _TO_PYTHON:
            raise ValueError(
                f"a mask function must not turn an index into a Python value ({name}): "
                "use torch.where, & and | instead of if, and, or"
            )
        out = func(*args, **(kwargs or {}))
        if follows:
            outs = out if isinstance(out, (tuple, list)) else [out]
            self.seen += [x for x in outs if torch.is_tensor(x)]
        return out

    def holds(self, value) -> bool:
        if isinstance(value, dict):
            value = tuple(value.values())
        if isinstance(value, (tuple, list)):
            return any(map(self.holds, value))
        return any(value is x for x in self.seen)


def depends_on_planes(fn: Callable, device: torch.device) -> tuple[bool, bool]:
    """Whether fn(b, h, q, k) depends on b, and on h. A dependence is never missed."""
    depends = []
    out = None
    for axis in range(4):
        at = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(4)]
        with _Taint(at[axis]) as taint:
            out = fn(*at)
        depends.append(torch.is_tensor(out) and taint.holds(out))
    out = torch.as_tensor(out)
    if out.dtype != torch.bool or out.dim():
        raise ValueError(
            f"a mask function must return a bool scalar, got {out.dtype} {tuple(out.shape)}"
        )
    return depends[0], depends[1]
