"""Raw launches: call Triton's C launcher with the flat argument list that Triton's Python code
would build, TMA descriptors expanded. Only addresses are filled in at launch time.

Supported: the C launchers of Triton 3.6 and 3.9 for NVIDIA. Other versions, and kernels that need
Triton's scratch memory, raise RawLaunchUnsupported and are launched through Triton.
"""
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Triton may be missing where types are checked.

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

BufferOffset = tuple[int, int]  # (index of a buffer of the call, bytes from its start)


class RawLaunchUnsupported(Exception):
    """This launch must go through Triton."""


class CLauncher(NamedTuple):
    """The C launcher of a compiled kernel: launch(*grid, stream, *options, *args), with args as one
    sequence if `nested`. encode(address, *encoding) makes a TMA descriptor.
    """

    launch: Callable
    options: tuple[Any, ...]
    nested: bool
    encode: Callable[..., Any]
    dtypes: dict[int, int]  # dtype of a descriptor: the compiler's number -> the driver's number
    maps: Sequence[dict[str, Any]]  # the encoding of each descriptor in the signature
    compiled: Any  # keeps the kernel's code on the device


class RawLaunch(NamedTuple):
    """One launch. `args` has a hole for each value that depends on a buffer's address."""

    launcher: CLauncher
    grid: tuple[int, int, int]
    args: list[Any]
    pointers: list[tuple[int, int, int]]  # (hole, buffer, bytes)
    maps: list[
        tuple[int, int, int, tuple[Any, ...]]
    ]  # (hole, buffer, bytes, encoding) of each descriptor

    def __call__(self, addresses: list[int], stream: int) -> None:
        launch, options, nested, encode, *_ = self.launcher
        args = self.args.copy()
        for hole, buffer, offset in self.pointers:
            args[hole] = addresses[buffer] + offset
        for hole, buffer, offset, encoding in self.maps:
            args[hole] = encode(addresses[buffer] + offset, *encoding)
        if nested:
            launch(*self.grid, stream, *options, args)
        else:
            launch(*self.grid, stream, *options, *args)


def make_raw_launch(
    compiled: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    locate: Callable[[Tensor], BufferOffset],
) -> RawLaunch:
    """The launch compiled[grid](*args), without references to its tensors. Raises
    RawLaunchUnsupported if it must go through Triton.
    """
    launcher = get_c_launcher(compiled)
    raw_launch = RawLaunch(launcher, (*grid, 1, 1)[:3], [], [], [])
    maps = iter(launcher.maps)
    for arg in args:
        if isinstance(arg, Tensor):
            raw_launch.pointers.append((len(raw_launch.args), *locate(arg)))
            raw_launch.args.append(None)
        elif arg is None or isinstance(arg, (int, float, str)) or _is_device_function(arg):
            raw_launch.args.append(arg)
        else:
            encoding = _encoding(next(maps, None), arg, launcher.dtypes)
            raw_launch.maps.append((len(raw_launch.args), *locate(arg.base), encoding))
            raw_launch.args.extend((None, *arg.shape, *arg.strides))
    return raw_launch


def _is_device_function(arg: Any) -> bool:
    """Whether a constant of a launch is a Triton function, which its kernel calls."""
    return hasattr(arg, "cache_key")


def _encoding(form: dict | None, arg: Any, dtypes: dict[int, int]) -> tuple:
    special = arg.padding != "zero" or getattr(arg, "round_f32_to_tf32", False)
    if form is None or special or form["fp4_padded"] or form.get("is_im2col"):
        raise RawLaunchUnsupported
    dtype = dtypes[form["elem_type"]]
    shape, strides = list(arg.shape), list(arg.strides)
    return form["swizzle"], form["elem_size"], dtype, form["block_size"], shape, strides, 0


def get_c_launcher(compiled: Any) -> CLauncher:
    try:
        return _find_c_launcher(compiled)
    except (AttributeError, KeyError, ImportError) as error:  # another Triton than 3.6 or 3.9
        raise RawLaunchUnsupported from error


def _find_c_launcher(compiled: Any) -> CLauncher:
    from triton import __version__
    from triton.backends.nvidia import driver
    from triton.runtime import driver as active

    find = _C_LAUNCHERS[".".join(__version__.split(".")[:2])]
    run = compiled.run
    needs_scratch = run.global_scratch_size or run.profile_scratch_size
    if type(run) is not driver.CudaLauncher or needs_scratch:
        raise RawLaunchUnsupported
    return find(compiled, run, active.active.utils, driver)


def _c_launcher_36(compiled: Any, run: Any, utils: Any, driver: Any) -> CLauncher:
    launch = run.launch
    if inspect.isfunction(launch):  # a Python wrapper that expands descriptors
        launch = inspect.getclosurevars(launch).nonlocals.get("launcher", launch)
    flags = run.launch_cooperative_grid, run.launch_pdl
    options = (compiled.function, *flags, None, None, compiled.packed_metadata, None, None, None)
    dtypes, maps = driver.TMA_DTYPE_DEVICE_TO_HOST, _maps(compiled)
    return CLauncher(launch, options, False, utils.fill_tma_descriptor, dtypes, maps, compiled)


def _c_launcher_39(compiled: Any, run: Any, utils: Any, driver: Any) -> CLauncher:
    if run.gsan_enabled:
        raise RawLaunchUnsupported
    flags = run.launch_cooperative_grid, run.launch_pdl
    hooks = scratch = (None, None)
    options = (compiled.function, *flags, compiled.packed_metadata, None, *hooks, *scratch)
    options += (run.arg_annotations, run.kernel_signature)
    dtypes, maps = driver.TMA_DTYPE_DEVICE_TO_HOST, _maps(compiled)
    encode = utils.fill_tma_descriptor_tiled
    return CLauncher(utils.launch, options, True, encode, dtypes, maps, compiled)


_C_LAUNCHERS = {"3.6": _c_launcher_36, "3.9": _c_launcher_39}


def _maps(compiled: Any) -> Sequence[dict]:
    return getattr(compiled.metadata, "tensordesc_meta", None) or ()


class Runtime(NamedTuple):
    """Triton's launch hooks and its lookup of the current stream."""

    knobs: Any
    stream_of: Callable[[int], int]  # device index -> raw handle of its current stream

    @property
    def is_hooked(self) -> bool:
        """Whether a launch hook is set, by a profiler for example: raw launches call no hooks."""
        knobs = self.knobs
        return _has_hook(knobs.launch_enter_hook) or _has_hook(knobs.launch_exit_hook)


def _has_hook(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))


@cache
def runtime() -> Runtime:
    from triton import knobs
    from triton.runtime import driver

    return Runtime(knobs.runtime, driver.active.get_current_stream)
