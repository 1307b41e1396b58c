"""A launch with nothing left to work out but addresses: Triton's launcher in C is called with the
flat arguments that Triton's Python would make of them, descriptors expanded.

Known are the launchers of Triton 3.6 and 3.9 for NVIDIA; others, and kernels that need scratch
memory of Triton's own, cannot be flattened: those are launched the usual way.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Triton need not be there where types are checked.

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

Place = tuple[int, int]  # a buffer of the call, and how many bytes into it


class Unknown(Exception):
    """This launch cannot be flattened."""


class Launcher(NamedTuple):
    """A compiled kernel's launcher in C: launch(*grid, stream, *options, *args), or with the args
    as one sequence if `nested`. encode(address, *how) makes a TMA descriptor.
    """

    launch: Callable
    options: tuple
    nested: bool
    encode: Callable
    dtypes: dict[int, int]  # of descriptors: the compiler's number to the driver's
    maps: Sequence[dict]  # how each descriptor of the signature is encoded
    compiled: Any  # alive: with it goes the code on the device


class Flat(NamedTuple):
    """One launch; `args` has holes for what depends on the addresses of buffers."""

    launcher: Launcher
    grid: tuple[int, int, int]
    args: list
    pointers: list[tuple[int, int, int]]  # (hole, buffer, bytes)
    maps: list[tuple[int, int, int, tuple]]  # and how it is encoded

    def __call__(self, addresses: list[int], stream: int) -> None:
        launch, options, nested, encode, *_ = self.launcher
        args = self.args.copy()
        for hole, buffer, offset in self.pointers:
            args[hole] = addresses[buffer] + offset
        for hole, buffer, offset, how in self.maps:
            args[hole] = encode(addresses[buffer] + offset, *how)
        if nested:
            launch(*self.grid, stream, *options, args)
        else:
            launch(*self.grid, stream, *options, *args)


def flatten(compiled: Any, grid: tuple, args: tuple, place: Callable[[Tensor], Place]) -> Flat:
    """The launch compiled[grid](*args), of which no tensor is kept. Unknown if that cannot be."""
    launcher = launcher_of(compiled)
    flat = Flat(launcher, (*grid, 1, 1)[:3], [], [], [])
    maps = iter(launcher.maps)
    for arg in args:
        if isinstance(arg, Tensor):
            flat.pointers.append((len(flat.args), *place(arg)))
            flat.args.append(None)
        elif arg is None or isinstance(arg, (int, float, str)):
            flat.args.append(arg)
        else:
            how = _encoding(next(maps, None), arg, launcher.dtypes)
            flat.maps.append((len(flat.args), *place(arg.base), how))
            flat.args.extend((None, *arg.shape, *arg.strides))
    return flat


def _encoding(form: dict | None, arg: Any, dtypes: dict[int, int]) -> tuple:
    special = arg.padding != "zero" or getattr(arg, "round_f32_to_tf32", False)
    if form is None or special or form["fp4_padded"] or form.get("is_im2col"):
        raise Unknown
    dtype = dtypes[form["elem_type"]]
    shape, strides = list(arg.shape), list(arg.strides)
    return form["swizzle"], form["elem_size"], dtype, form["block_size"], shape, strides, 0


def launcher_of(compiled: Any) -> Launcher:
    try:
        return _find_launcher(compiled)
    except (AttributeError, KeyError, ImportError) as error:  # not what it is known to be
        raise Unknown from error


def _find_launcher(compiled: Any) -> Launcher:
    from triton import __version__
    from triton.backends.nvidia import driver
    from triton.runtime import driver as active

    find = _LAUNCHERS[".".join(__version__.split(".")[:2])]
    run = compiled.run
    needs_scratch = run.global_scratch_size or run.profile_scratch_size
    if type(run) is not driver.CudaLauncher or needs_scratch:
        raise Unknown
    return find(compiled, run, active.active.utils, driver)


def _launcher_36(compiled: Any, run: Any, utils: Any, driver: Any) -> Launcher:
    launch = run.launch
    if inspect.isfunction(launch):  # what expands descriptors, around the launcher itself
        launch = inspect.getclosurevars(launch).nonlocals.get("launcher", launch)
    flags = run.launch_cooperative_grid, run.launch_pdl
    options = (compiled.function, *flags, None, None, compiled.packed_metadata, None, None, None)
    dtypes, maps = driver.TMA_DTYPE_DEVICE_TO_HOST, _maps(compiled)
    return Launcher(launch, options, False, utils.fill_tma_descriptor, dtypes, maps, compiled)


def _launcher_39(compiled: Any, run: Any, utils: Any, driver: Any) -> Launcher:
    if run.gsan_enabled:
        raise Unknown
    flags = run.launch_cooperative_grid, run.launch_pdl
    hooks = scratch = (None, None)
    options = (compiled.function, *flags, compiled.packed_metadata, None, *hooks, *scratch)
    options += (run.arg_annotations, run.kernel_signature)
    dtypes, maps = driver.TMA_DTYPE_DEVICE_TO_HOST, _maps(compiled)
    encode = utils.fill_tma_descriptor_tiled
    return Launcher(utils.launch, options, True, encode, dtypes, maps, compiled)


_LAUNCHERS = {"3.6": _launcher_36, "3.9": _launcher_39}


def _maps(compiled: Any) -> Sequence[dict]:
    return getattr(compiled.metadata, "tensordesc_meta", None) or ()


class Runtime(NamedTuple):
    """What Triton knows when kernels are launched."""

    knobs: Any
    stream_of: Callable[[int], int]  # the current one of a device

    @property
    def is_hooked(self) -> bool:
        """Whether somebody wants to hear of launches, a profiler: flat ones tell nobody."""
        knobs = self.knobs
        return _listens(knobs.launch_enter_hook) or _listens(knobs.launch_exit_hook)


def _listens(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))


@cache
def runtime() -> Runtime:
    from triton import knobs
    from triton.runtime import driver

    return Runtime(knobs.runtime, driver.active.get_current_stream)
