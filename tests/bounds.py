"""A memory checker for interpreted kernels: every lane that reads or writes must do so within a
tensor that its launch was given. A checker of allocations sees less: not the end of a view, nor
what lies between two tensors of one allocation.
"""

from collections.abc import Iterator

import numpy as np
from torch import Tensor


class OutOfBounds(Exception):
    """A lane that is not masked went where no argument lies."""


class Bounds:
    """The memory of some tensors, as intervals that do not touch."""

    def __init__(self, tensors: list[Tensor]):
        spans: list[tuple[int, int]] = []
        for begin, end in sorted(extent(t) for t in tensors if t.numel()):
            if spans and begin <= spans[-1][1]:
                begin, end = spans[-1][0], max(end, spans.pop()[1])
            spans.append((begin, end))
        self._begins, self._ends = np.array(spans, dtype=np.uint64).reshape(-1, 2).T

    def check(self, at: np.ndarray, size: int, what: str) -> None:
        """Raise unless `size` bytes at each of these addresses are ours."""
        if at.size == 0 or self._have(at.min(), at.max(), size).all():
            return  # as a rule all lanes go to one tensor
        if (bad := ~self._have(at, at, size)).any():
            raise OutOfBounds(f"{bad.sum()} of {at.size} lanes {what} outside of all tensors")

    def _have(self, first: np.ndarray, last: np.ndarray, size: int) -> np.ndarray:
        """Whether from `first` to the end of what lies at `last` is of one interval."""
        of = np.searchsorted(self._begins, first, "right") - 1
        return (of >= 0) & (last + np.uint64(size) <= np.append(self._ends, np.uint64(0))[of])


def extent(t: Tensor) -> tuple[int, int]:
    """(the address of its first byte, the one after its last)"""
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def tensors_in(argument: object) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, tuple):
        for part in argument:
            yield from tensors_in(part)
    elif hasattr(argument, "base"):  # a descriptor, or a tensor as another type
        yield from tensors_in(argument.base)


class Watched:
    """In the place of Triton's own memory: looks at addresses before they are used."""

    def __init__(self, memory: object):
        self._memory, self.bounds = memory, Bounds([])

    def load(self, at, mask, other, dtype):
        self.bounds.check(at[mask], dtype.itemsize, "read")
        return self._memory.load(at, mask, other, dtype)

    def store(self, at, value, mask):
        self.bounds.check(at[mask], value.itemsize, "write")
        return self._memory.store(at, value, mask)

    def atomic_rmw(self, op, at, value, mask, order):
        self.bounds.check(at[mask], value.itemsize, "update")
        return self._memory.atomic_rmw(op, at, value, mask, order)

    def atomic_cas(self, at, expected, value, order):
        self.bounds.check(at, value.itemsize, "swap")
        return self._memory.atomic_cas(at, expected, value, order)

    def __getattr__(self, name):
        return getattr(self._memory, name)


def install() -> None:
    """Check every launch of this process from now on."""
    from triton.runtime import interpreter

    memory = interpreter._interpreter = Watched(interpreter._interpreter)
    to_host = interpreter.GridExecutor._init_args_hst

    def begin(self, args, kwargs):
        found = to_host(self, args, kwargs)
        given = (*found[0], *found[1].values())
        memory.bounds = Bounds([t for argument in given for t in tensors_in(argument)])
        return found

    interpreter.GridExecutor._init_args_hst = begin
