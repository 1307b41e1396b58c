"""Launches that skip what Triton works out anew for every one of them: which compiled variant fits
the arguments. That takes most of a small call's host time (33 of 42 us of a launch with 31
arguments and 23 constants, on the CPU of a small machine).
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.problem import insert_bounded

_INT32 = 1 << 31
# Strides are among what tells variants apart, and of these a long life sees any number. What had to
# make room is compiled all the same: Triton finds it again.
MAX_FAMILIES = 256
MAX_VARIANTS = 256  # of a family


class Handle:
    """Launch a Triton kernel as ever, `handle[grid](*args, **constants)`, and its variants are
    found again by a shorter key.

    The key is what Triton itself looks at: the device, which is current (see `on_device`); types;
    dtype and alignment of pointers, of which there is one at least; dtype and block of TMA
    descriptors (their layouts are made once for both, so that identity tells them apart); the value
    of integers that it specialises on, the width of the others (which are not negative); constants
    and options. Every launch takes the usual way where no compiled kernel comes back (the
    interpreter), and on AMD, where Triton looks at the sizes of tensors, too. Triton's knobs count
    when a variant is first launched.

    A compiled kernel is launched through `CompiledKernel.__getitem__`, as Triton's tutorials do.
    Of arguments, nothing is kept but layouts of descriptors; of variants, the newest. Threads may
    share a handle: each entry is written once it is whole, and of two that raced either will do.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self._families: dict[tuple, _Family] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        values = tuple(constants.values())
        kinds = (*map(type, args), *map(type, values), *constants, *values)  # 1 is not True
        family = self._families.get(kinds)
        found = None if family is None else family.variants.get(family.variant(args))
        if found is None:
            self._launch_first(kinds, grid, args, constants)
        else:
            compiled = found[0]
            compiled[(*grid, 1, 1)[:3]](*args, *family.constants)
            _tell(compiled, grid, (*args, *family.constants))

    def _launch_first(self, kinds: tuple, grid: tuple, args: tuple, constants: dict) -> None:
        compiled = self.kernel[grid](*args, **constants)
        if hasattr(type(compiled), "__getitem__") and not torch.version.hip:
            family = _Family.of(self.kernel, args, constants)
            family = insert_bounded(self._families, kinds, family, MAX_FAMILIES)
            family.keep(args, compiled)
            _tell(compiled, grid, (*args, *family.constants))
        else:
            _tell(None, grid, args)


class _Family(NamedTuple):
    """Launches whose arguments have the same types and whose constants are the same: where which
    arguments stand, the constants in the order of the signature, and the compiled variants, each
    with the layouts whose identity is in its key: alive, so that no other layout takes that.
    """

    pointers: list[int]
    descriptors: list[int]
    values: list[int]  # constants, and integers whose value makes a variant
    lengths: list[int]  # integers of which only the width does
    constants: tuple
    variants: dict[tuple, tuple[Any, list]]

    @classmethod
    def of(cls, kernel: Any, args: tuple, constants: dict) -> "_Family":
        params = kernel.params
        found = cls([], [], [], [], _in_order(params[len(args) :], constants), {})
        for i, (param, arg) in enumerate(zip(params, args, strict=False)):
            found._places(param, arg).append(i)
        return found

    def _places(self, param: Any, arg: object) -> list[int]:
        if param.is_constexpr:
            return self.values
        if isinstance(arg, Tensor):
            return self.pointers
        if isinstance(arg, int):
            return self.lengths if param.do_not_specialize else self.values
        return [] if arg is None or isinstance(arg, float) else self.descriptors

    def keep(self, args: tuple, compiled: Any) -> None:
        layouts = [args[i].layout for i in self.descriptors]
        insert_bounded(self.variants, self.variant(args), (compiled, layouts), MAX_VARIANTS)

    def variant(self, args: tuple) -> tuple:
        """What tells the compiled variants apart."""
        pointers = [args[i] for i in self.pointers]
        return (
            pointers[0].get_device(),
            *[t.dtype for t in pointers],
            *[t.data_ptr() % 16 for t in pointers],
            *[args[i] for i in self.values],
            *[args[i] < _INT32 for i in self.lengths],
            *[id(args[i].layout) for i in self.descriptors],
        )


def _in_order(params: list, constants: dict) -> tuple:
    return tuple(constants.get(param.name, param.default) for param in params)


_ears = threading.local()


@contextmanager
def listening(tell: Callable[[Any, tuple, tuple], None]) -> Iterator[None]:
    """Inside the block, tell(compiled, grid, args) hears of every launch of this thread by a
    handle; compiled is None where a launch took the usual way because it has to.
    """
    _ears.tell = tell
    try:
        yield
    finally:
        _ears.tell = None


def _tell(compiled: Any, grid: tuple, args: tuple) -> None:
    tell = getattr(_ears, "tell", None)
    if tell is not None:
        tell(compiled, grid, args)


_HERE = nullcontext()


def on_device(q: Tensor) -> AbstractContextManager:
    """Triton launches on the current device: make that q's."""
    device = q.get_device()  # -1 on the CPU
    if device < 0 or device == torch.cuda.current_device():
        return _HERE  # a switch to where one is costs 2 us
    return torch.cuda.device(device)
