"""Replay of repeated calls: allocate the same buffers and launch the same kernels as the recorded
call, without running the kernels' host code.

Two calls match if they have the same problem and tensors of the same shapes, strides, dtypes and
alignment on the same device, and both or neither have pages of keys that hold the values: the host
code of a kernel depends on nothing else. The second matching call is recorded while it runs: its
allocations (by a dispatch mode) and its launches (by `observe_launches`). From the third on,
matching calls are replayed.

A call is recordable if
- it runs no other torch operation than allocations and views;
- every tensor of its launches is an argument, an allocation of the call, or a work counter
  (each replay takes its own counter);
- its launches can be made raw (raw_launch.py).
Other calls always run their host code.

A Recording holds no tensor and no address. A replay runs on the current stream, allocates where the
call would, and can be captured in a CUDA graph.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onchip.core.call_cache import CachedCall, insert_bounded
from onchip.core.problem import Problem, Tensors
from onchip.kernels.runtime import raw_launch
from onchip.kernels.runtime.counters import counter, is_pooled
from onchip.kernels.runtime.launcher import observe_launches, on_device

_aten = torch.ops.aten
_EMPTY = (_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default)
_ZEROS = (_aten.zeros.default,)


class Buffer(NamedTuple):
    """One allocation, make(size, dtype=..., device=...), contiguous."""

    make: Callable[..., Tensor]
    size: tuple[int, ...]
    dtype: torch.dtype


class Recording(NamedTuple):
    """The buffers of a call are its argument tensors, then its allocations. `returned`: for each
    field of the result, the index of its allocation, or None.
    """

    buffers: list[Buffer]
    launches: list[raw_launch.RawLaunch]
    result: type
    returned: list[int | None]

    def replay(self, q: Tensor, addresses: list[int]) -> Any:
        device = q.device
        with on_device(q):
            allocated = [make(size, dtype=d, device=device) for make, size, d in self.buffers]
            addresses += [t.data_ptr() for t in allocated]
            stream = raw_launch.runtime().stream_of(device.index)
            for launch in self.launches:
                launch(addresses, stream)
        return self.result(*[None if i is None else allocated[i] for i in self.returned])


# Recordings of one cached call: they differ in kernel, pass, alignment, layout of saved tensors.
MAX_RECORDINGS = 64
_SEEN_ONCE = object()  # the next call with this key is recorded
_NOT_RECORDABLE = object()


def replay_or_run(
    compute: Callable[..., Any], call: CachedCall, x: Tensors, kernel: str | None, *saved: Any
) -> Any:
    """compute(call.problem, x, kernel, *saved), a named tuple of tensors, replayed if possible.
    The call fixes the layout of x. With saved tensors the layouts are part of the key, because
    hooks on saved tensors may change them.
    """
    if call.cache is None or not is_recordable(x.q):
        return compute(call.problem, x, kernel, *saved)
    tensors = [t for t in (*x[:-1], *saved) if t is not None]
    addresses = [t.data_ptr() for t in tensors]
    layout = [(t.shape, t.stride(), t.dtype, t.device) for t in tensors] if saved else ()
    # A kernel of pages may read the values where the keys are.
    latent = x.page_table is not None and addresses[1] == addresses[2]
    key = (compute, kernel, latent, len(tensors), *layout, *[a & 15 for a in addresses])
    recording = call.cache.get(key)
    if isinstance(recording, Recording) and not raw_launch.runtime().is_hooked:
        return recording.replay(x.q, addresses)
    if recording is _SEEN_ONCE:
        result, call.cache[key] = _record(compute, call.problem, x, kernel, saved)
        return result
    if recording is None:
        insert_bounded(call.cache, key, _SEEN_ONCE, MAX_RECORDINGS)
    return compute(call.problem, x, kernel, *saved)


def is_recordable(q: Tensor) -> bool:
    return q.is_cuda


def _record(
    compute: Callable, problem: Problem, x: Tensors, kernel: str | None, saved: tuple
) -> tuple[Any, Any]:
    """(result, Recording or _NOT_RECORDABLE). Every argument is detached to an object of its own:
    arguments are distinguished by identity, and this call may pass one tensor twice where the next
    passes two.
    """
    own = [t if t is None else t.detach() for t in (*x[:-1], *saved)]
    own_x, own_saved = Tensors(*own[: len(x) - 1]), own[len(x) - 1 :]
    recorder = _LaunchRecorder([t for t in own if t is not None])
    with recorder, observe_launches(recorder.add_launch):
        result = compute(problem, own_x, kernel, *own_saved)
    return result, recorder.make_recording(result)


class _LaunchRecorder(TorchDispatchMode):
    """Records every torch operation of a call and, through `add_launch`, every launch."""

    def __init__(self, tensors: list[Tensor]):
        super().__init__()
        self.tensors = tensors
        self.allocated: list[Tensor] = []  # kept alive: a freed tensor's memory could be reused
        self.buffers: list[Buffer] = []
        self.launches: list[raw_launch.RawLaunch] = []
        self.is_complete = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch.compile never traces into a recorded call. True would make torch import all of
        dynamo to hide this mode from it: seconds in a process's second call.
        """
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY or func in _ZEROS:
            self._add_buffer(torch.empty if func in _EMPTY else torch.zeros, result)
        elif not func.is_view:
            self.is_complete = False
        return result

    def _add_buffer(self, make: Callable[..., Tensor], t: Tensor) -> None:
        self.is_complete &= t.is_contiguous() and t.device == self.tensors[0].device
        self.allocated.append(t)
        self.buffers.append(Buffer(make, tuple(t.shape), t.dtype))

    def add_launch(self, compiled: Any, grid: tuple, args: tuple) -> None:
        try:
            self.launches.append(raw_launch.make_raw_launch(compiled, grid, args, self._locate))
        except raw_launch.RawLaunchUnsupported:
            self.is_complete = False

    def _locate(self, t: Tensor) -> raw_launch.BufferOffset:
        for i, argument in enumerate(self.tensors):
            if t is argument:
                return i, 0
        if is_pooled(t):
            return self._locate_counter(t), 0
        for i, buffer in enumerate(self.allocated, len(self.tensors)):
            if t.untyped_storage().data_ptr() == buffer.data_ptr():
                return i, int(t.storage_offset()) * t.element_size()
        raise raw_launch.RawLaunchUnsupported

    def _locate_counter(self, t: Tensor) -> int:
        """The counter's buffer. A launch may pass it several times: it also fills pointer arguments
        that the kernel does not read.
        """
        if not any(t is buffer for buffer in self.allocated):
            self._add_buffer(_counter, t)
        return len(self.tensors) + next(i for i, buffer in enumerate(self.allocated) if t is buffer)

    def make_recording(self, result: Any) -> Any:
        """The Recording, or _NOT_RECORDABLE."""
        if not self.is_complete or not self.launches:
            return _NOT_RECORDABLE
        allocated = [_layout(t) for t in self.allocated]
        fields = [None if t is None else _layout(t) for t in result]
        if any(layout is not None and layout not in allocated for layout in fields):
            return _NOT_RECORDABLE
        returned = [None if layout is None else allocated.index(layout) for layout in fields]
        return Recording(self.buffers, self.launches, type(result), returned)


def _counter(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Buffer.make of a work counter: the counter of the stream or graph that replays the call."""
    return counter(device)


def _layout(t: Any) -> tuple:
    """Equal for an allocation and a tensor that covers all of it. Row statistics, a tuple of views,
    cover no allocation.
    """
    return (t.data_ptr(), t.shape, t.stride(), t.dtype) if isinstance(t, Tensor) else ()
