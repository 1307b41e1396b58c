"""Launch Triton kernels without Triton's per-launch search for the compiled variant.

That search takes most of a small call's host time: 33 of 42 us of a launch with 31 arguments and 23
constants, on the CPU of a small machine.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.call_cache import insert_bounded

_INT32 = 1 << 31
# Strides are part of a variant's key, and a long-lived process sees any number of strides: both
# caches are bounded. An evicted variant stays compiled, and Triton's own cache finds it again.
MAX_SIGNATURES = 256
MAX_VARIANTS = 256  # of a signature


class CachedLauncher:
    """Launch a Triton kernel in the usual way, `launcher[grid](*args, **constants)`, and find its
    compiled variant again by a shorter key than Triton's.

    The key holds everything that Triton specialises on: the device, which must be the current one
    (see `on_device`); types; dtype and alignment of pointers, at least one of which is an argument;
    dtype and block of TMA descriptors (one layout object is made for both, so that its identity
    distinguishes them); the value of specialised integers, the width of the others (which are not
    negative); constants and options. Two kinds of launches always go through Triton: launches that
    return no compiled kernel (the interpreter), and launches on AMD, where Triton also specialises
    on the sizes of tensors. Triton's knobs take effect when a variant is first launched.

    A compiled kernel is launched through `CompiledKernel.__getitem__`, as in Triton's tutorials.
    The cache keeps no argument except layouts of descriptors, and of variants only the newest.
    Threads may share a launcher: an entry is inserted after it is complete, and if two threads race
    for a key, either entry is correct.
    """

    def __init__(self, kernel: Any):
        self.kernel = kernel
        self._signatures: dict[tuple, _Signature] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        values = tuple(constants.values())
        kinds = (*map(type, args), *map(type, values), *constants, *values)  # 1 is not True
        signature = self._signatures.get(kinds)
        entry = None if signature is None else signature.variants.get(signature.variant_key(args))
        if entry is None:
            self._launch_first(kinds, grid, args, constants)
        else:
            compiled = entry[0]
            compiled[(*grid, 1, 1)[:3]](*args, *signature.constants)
            _notify(compiled, grid, (*args, *signature.constants))

    def _launch_first(self, kinds: tuple, grid: tuple, args: tuple, constants: dict) -> None:
        compiled = self.kernel[grid](*args, **constants)
        if hasattr(type(compiled), "__getitem__") and not torch.version.hip:
            signature = _Signature.of(self.kernel, args, constants)
            signature = insert_bounded(self._signatures, kinds, signature, MAX_SIGNATURES)
            signature.add_variant(args, compiled)
            _notify(compiled, grid, (*args, *signature.constants))
        else:
            _notify(None, grid, args)


class _Signature(NamedTuple):
    """Launches with the same argument types and the same constants: the indices of each kind of
    argument, the constants in the order of the signature, and the compiled variants. A key contains
    ids of layouts, and the entry keeps these layouts alive: otherwise another layout could get the
    same id.
    """

    pointers: list[int]
    descriptors: list[int]
    values: list[int]  # constants, and integers that Triton specialises on by value
    lengths: list[int]  # integers that Triton specialises on by width only
    constants: tuple
    variants: dict[tuple, tuple[Any, list]]

    @classmethod
    def of(cls, kernel: Any, args: tuple, constants: dict) -> "_Signature":
        params = kernel.params
        signature = cls([], [], [], [], _in_order(params[len(args) :], constants), {})
        for i, (param, arg) in enumerate(zip(params, args, strict=False)):
            signature._indices_for(param, arg).append(i)
        return signature

    def _indices_for(self, param: Any, arg: object) -> list[int]:
        if param.is_constexpr:
            return self.values
        if isinstance(arg, Tensor):
            return self.pointers
        if isinstance(arg, int):
            return self.lengths if param.do_not_specialize else self.values
        return [] if arg is None or isinstance(arg, float) else self.descriptors

    def add_variant(self, args: tuple, compiled: Any) -> None:
        layouts = [args[i].layout for i in self.descriptors]
        insert_bounded(self.variants, self.variant_key(args), (compiled, layouts), MAX_VARIANTS)

    def variant_key(self, args: tuple) -> tuple:
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


_thread = threading.local()


@contextmanager
def observe_launches(notify: Callable[[Any, tuple, tuple], None]) -> Iterator[None]:
    """Inside the block, notify(compiled, grid, args) is called after every launch that a
    CachedLauncher makes in this thread. compiled is None if the launch had to go through Triton.
    """
    _thread.notify = notify
    try:
        yield
    finally:
        _thread.notify = None


def _notify(compiled: Any, grid: tuple, args: tuple) -> None:
    notify = getattr(_thread, "notify", None)
    if notify is not None:
        notify(compiled, grid, args)


_HERE = nullcontext()


def on_device(q: Tensor) -> AbstractContextManager[Any]:
    """Make q's device the current one: Triton launches on the current device."""
    device = q.get_device()  # -1 on the CPU
    if device < 0 or device == torch.cuda.current_device():
        return _HERE  # switching to the current device would cost 2 us
    return torch.cuda.device(device)
