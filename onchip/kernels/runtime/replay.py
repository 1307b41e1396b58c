"""A call like one that came before does again what that one did: it allocates the same buffers and
launches the same kernels, without asking anew which.

Calls are alike if they pose the same problem with tensors of the same shapes, strides, dtypes and
alignment on the same device: all that a kernel's host code looks at. The second of them is recorded
while it runs: its allocations (seen by a dispatch mode) and its launches (told by `Handle`). The
recording is a tape if there was nothing else, if no tensor took part that the call was not given
and did not allocate (but for counters, which are asked for anew), and if the launches can be
flattened. Otherwise such calls run as ever.

A tape holds no tensor and no address. It runs on the current stream, allocates where a call would,
and can be captured in a CUDA graph.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onchip.core.problem import CachedCall, Problem, Tensors, insert_bounded
from onchip.kernels.runtime import raw_launch
from onchip.kernels.runtime.counters import counter, is_slot
from onchip.kernels.runtime.launcher import listening, on_device

_aten = torch.ops.aten
_EMPTY = (_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default)
_ZEROS = (_aten.zeros.default,)


class Buffer(NamedTuple):
    """What is allocated: make(size, dtype=..., device=...), contiguous."""

    make: Callable[..., Tensor]
    size: tuple[int, ...]
    dtype: torch.dtype


class Tape(NamedTuple):
    """Buffers of a call are its tensors, then those it allocates, of which it returns some."""

    buffers: list[Buffer]
    launches: list[raw_launch.Flat]
    result: type
    returned: list[int | None]

    def play(self, q: Tensor, addresses: list[int]) -> Any:
        device = q.device
        with on_device(q):
            made = [make(size, dtype=d, device=device) for make, size, d in self.buffers]
            addresses += [t.data_ptr() for t in made]
            stream = raw_launch.runtime().stream_of(device.index)
            for launch in self.launches:
                launch(addresses, stream)
        return self.result(*[None if i is None else made[i] for i in self.returned])


MAX_TAPES = 64  # of a call: kernels, passes, alignments, layouts of saved tensors
_SEEN = object()  # once: worth a recording if it comes again
_AS_EVER = object()


def replayed(compute: Callable, call: CachedCall, x: Tensors, kernel: str | None, *saved: Any):
    """compute(call.problem, x, kernel, *saved), which returns a named tuple of tensors. The
    layout of x is the call's, but for those that saved tensors bring back: hooks may change it.
    """
    if call.cache is None or not is_recordable(x.q):
        return compute(call.problem, x, kernel, *saved)
    tensors = [t for t in (*x[:-1], *saved) if t is not None]
    addresses = [t.data_ptr() for t in tensors]
    layout = [(t.shape, t.stride(), t.dtype, t.device) for t in tensors] if saved else ()
    key = (compute, kernel, len(tensors), *layout, *[address & 15 for address in addresses])
    tape = call.cache.get(key)
    if isinstance(tape, Tape) and not raw_launch.runtime().is_hooked:
        return tape.play(x.q, addresses)
    if tape is _SEEN:
        result, call.cache[key] = _record(compute, call.problem, x, kernel, saved)
        return result
    if tape is None:
        insert_bounded(call.cache, key, _SEEN, MAX_TAPES)
    return compute(call.problem, x, kernel, *saved)


def is_recordable(q: Tensor) -> bool:
    return q.is_cuda


def _record(
    compute: Callable, problem: Problem, x: Tensors, kernel: str | None, saved: tuple
) -> tuple[Any, Any]:
    """(result, tape). Every tensor gets an object of its own, by which it is known: a call may give
    one tensor twice, the next one may not.
    """
    own = [t if t is None else t.detach() for t in (*x[:-1], *saved)]
    own_x, own_saved = Tensors(*own[: len(x) - 1]), own[len(x) - 1 :]
    recorder = _Recorder([t for t in own if t is not None])
    with recorder, listening(recorder.launched):
        result = compute(problem, own_x, kernel, *own_saved)
    return result, recorder.tape(result)


class _Recorder(TorchDispatchMode):
    """Sees every torch operation and, through `launched`, every launch of a call."""

    def __init__(self, tensors: list[Tensor]):
        super().__init__()
        self.tensors = tensors
        self.made: list[Tensor] = []  # alive, so that none takes another's identity
        self.buffers: list[Buffer] = []
        self.launches: list[raw_launch.Flat] = []
        self.is_complete = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch.compile never looks into a call of ours. To hide this from it, torch would import
        all of it first: seconds of a process's second call.
        """
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY or func in _ZEROS:
            self._allocated(torch.empty if func in _EMPTY else torch.zeros, result)
        elif not func.is_view:
            self.is_complete = False
        return result

    def _allocated(self, make: Callable[..., Tensor], t: Tensor) -> None:
        self.is_complete &= t.is_contiguous() and t.device == self.tensors[0].device
        self.made.append(t)
        self.buffers.append(Buffer(make, tuple(t.shape), t.dtype))

    def launched(self, compiled: Any, grid: tuple, args: tuple) -> None:
        try:
            self.launches.append(raw_launch.flatten(compiled, grid, args, self._place))
        except raw_launch.Unknown:
            self.is_complete = False

    def _place(self, t: Tensor) -> raw_launch.Place:
        for i, given in enumerate(self.tensors):
            if t is given:
                return i, 0
        if is_slot(t):
            return self._place_counter(t), 0
        for i, made in enumerate(self.made, len(self.tensors)):
            if t.untyped_storage().data_ptr() == made.data_ptr():
                return i, int(t.storage_offset()) * t.element_size()
        raise raw_launch.Unknown

    def _place_counter(self, t: Tensor) -> int:
        """A launch may be given it several times: it also stands for what is not read."""
        if not any(t is made for made in self.made):
            self._allocated(_counter, t)
        return len(self.tensors) + next(i for i, made in enumerate(self.made) if t is made)

    def tape(self, result: Any) -> Any:
        """The Tape, or _AS_EVER."""
        if not self.is_complete or not self.launches:
            return _AS_EVER
        wholes = [_whole(t) for t in self.made]
        found = [None if t is None else _whole(t) for t in result]
        if any(whole is not None and whole not in wholes for whole in found):
            return _AS_EVER
        returned = [None if whole is None else wholes.index(whole) for whole in found]
        return Tape(self.buffers, self.launches, type(result), returned)


def _counter(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Made as a Buffer is: that of the stream or of the graph in which the tape is played."""
    return counter(device)


def _whole(t: Any) -> tuple:
    """What a buffer and a tensor that is all of it have in common; row statistics, a tuple of
    parts, are no buffer.
    """
    return (t.data_ptr(), t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else ()
