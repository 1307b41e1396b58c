"""Work counters on the device: the programs of a launch take their work indices from one.

A counter is 0 before a launch, and the kernel resets it to 0 at its end
(hopper/tile_scheduler.py): a separate memset would be another launch.

Two launches that share a counter must not overlap.
- Launches of one stream do not use their counters at the same time, so every stream has one counter
  for all its launches. A programmatic dependent launch (PDL) starts early, but waits for its
  predecessor before it draws. A launch that does not wait (`SMPartition.second`) uses no counter.
- A CUDA graph may be replayed on any stream, in parallel with other launches. So a captured launch
  gets a counter that no other launch ever gets. One graph cannot overlap with itself: it would
  overwrite its own results.
- A failed launch may leave any value in its counter, but it also destroys the device's context.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

SLOTS = 16384  # counters per device; a serving engine captures hundreds of launches
COUNTER_INTS = 4  # 16 bytes: kernels are specialised on the alignment of pointers
_PER_THREAD = 2  # cudaStreamPerThread: one handle for a different stream in every thread


def counter(device: torch.device) -> Tensor:
    """The counter of one launch on the current stream of `device`, the current device."""
    slot = _slot(device) if has_streams(device) else None
    return torch.zeros(COUNTER_INTS, dtype=torch.int32, device=device) if slot is None else slot


def has_streams(device: torch.device) -> bool:
    return device.type == "cuda"


def is_pooled(t: Tensor) -> bool:
    """Whether t is a counter of a pool, so that the call did not allocate it."""
    pool = _pools.get(t.device)
    return pool is not None and t.untyped_storage().data_ptr() == pool.counters.data_ptr()


def _slot(device: torch.device) -> Tensor | None:
    """A pooled counter, or None: the caller then allocates and clears one for this launch."""
    pool = _pools.get(device)
    if torch.cuda.is_current_stream_capturing():  # a new pool would have to synchronise
        return None if pool is None else pool.take_unused()
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    if stream == _PER_THREAD:
        return None
    if pool is None:
        pool = _pools.setdefault(device, _CounterPool(device))
    return pool.of_stream(stream)


class _CounterPool:
    """The counters of one device. Threads that race for a stream's counter get the same one."""

    def __init__(self, device: torch.device):
        with _disable_current_modes():  # a recording must not see this allocation (replay.py)
            self.counters = torch.zeros(SLOTS, COUNTER_INTS, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()  # the zeros must be visible to all streams
        self._numbers = iter(range(SLOTS))
        self._streams: dict[int, Tensor | None] = {}

    def take_unused(self) -> Tensor | None:
        """A counter that no stream and no captured launch has, or None if none is left."""
        i = next(self._numbers, None)
        return None if i is None else self.counters[i]

    def of_stream(self, stream: int) -> Tensor | None:
        if stream not in self._streams:
            self._streams.setdefault(stream, self.take_unused())
        return self._streams[stream]


_pools: dict[torch.device, _CounterPool] = {}
