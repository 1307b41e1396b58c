"""A memory checker for interpreted kernels: every lane that is not masked must access a tensor that
is an argument of its launch.

A checker of allocations misses more: accesses past the end of a view, and accesses between two
tensors of one allocation.
"""

from collections.abc import Iterator

import numpy as np
from torch import Tensor


class OutOfBounds(Exception):
    """A lane that is not masked accesses memory outside of all arguments."""


class Bounds:
    """The memory of some tensors, as disjoint intervals."""

    def __init__(self, tensors: list[Tensor]):
        spans: list[tuple[int, int]] = []
        for begin, end in sorted(extent(t) for t in tensors if t.numel()):
            if spans and begin <= spans[-1][1]:
                begin, end = spans[-1][0], max(end, spans.pop()[1])
            spans.append((begin, end))
        self._begins, self._ends = np.array(spans, dtype=np.uint64).reshape(-1, 2).T

    def check(self, addresses: np.ndarray, size: int, what: str) -> None:
        """Raise unless `size` bytes at each of these addresses are in one of the tensors."""
        if addresses.size == 0 or self._contain(addresses.min(), addresses.max(), size).all():
            return  # the usual case: all lanes access one tensor
        if (bad := ~self._contain(addresses, addresses, size)).any():
            count = f"{bad.sum()} of {addresses.size}"
            raise OutOfBounds(f"{count} lanes {what} outside of all tensors")

    def _contain(self, first: np.ndarray, last: np.ndarray, size: int) -> np.ndarray:
        """Whether one interval contains everything from `first` to `size` bytes after `last`."""
        index = np.searchsorted(self._begins, first, "right") - 1
        ends = np.append(self._ends, np.uint64(0))
        return (index >= 0) & (last + np.uint64(size) <= ends[index])


def extent(t: Tensor) -> tuple[int, int]:
    """(the address of the first byte of t, the address after its last byte)"""
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def tensors_in(argument: object) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, tuple):
        for part in argument:
            yield from tensors_in(part)
    elif hasattr(argument, "base"):  # a tensor descriptor, or a tensor reinterpreted as a type
        yield from tensors_in(argument.base)


class CheckedMemory:
    """Replaces the interpreter's memory, and checks addresses before it accesses them."""

    def __init__(self, memory: object):
        self._memory, self.bounds = memory, Bounds([])

    def load(self, addresses, mask, other, dtype):
        self.bounds.check(addresses[mask], dtype.itemsize, "read")
        return self._memory.load(addresses, mask, other, dtype)

    def store(self, addresses, value, mask):
        self.bounds.check(addresses[mask], value.itemsize, "write")
        return self._memory.store(addresses, value, mask)

    def atomic_rmw(self, op, addresses, value, mask, order):
        self.bounds.check(addresses[mask], value.itemsize, "update")
        return self._memory.atomic_rmw(op, addresses, value, mask, order)

    def atomic_cas(self, addresses, expected, value, order):
        self.bounds.check(addresses, value.itemsize, "swap")
        return self._memory.atomic_cas(addresses, expected, value, order)

    def __getattr__(self, name):
        return getattr(self._memory, name)


def install() -> None:
    """Check every later launch of this process."""
    from triton.runtime import interpreter

    memory = interpreter._interpreter = CheckedMemory(interpreter._interpreter)
    copy_to_host = interpreter.GridExecutor._init_args_hst

    def set_bounds(self, args, kwargs):
        copies = copy_to_host(self, args, kwargs)
        arguments = (*copies[0], *copies[1].values())
        memory.bounds = Bounds([t for argument in arguments for t in tensors_in(argument)])
        return copies

    interpreter.GridExecutor._init_args_hst = set_bounds
