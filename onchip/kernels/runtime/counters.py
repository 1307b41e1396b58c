"""Counters from which the programs of a launch draw, at 0 before it and, because kernels leave them
so (hopper/tile_scheduler.next_work_index), after it: to clear them would take a launch of its own.

Launches that share one must not run beside each other. Those of a stream do not: each starts when
the one before has ended, but for programmatic dependent launches, which must not draw. So a stream
has one counter for all its launches. A CUDA graph may be replayed on any stream, beside any other:
a captured launch gets a counter that no other launch ever gets. Beside itself no graph can run: it
would overwrite its own results. A launch that fails may leave a counter anywhere, but also takes
the device's context with it.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

SLOTS = 16384  # counters of a device; captured launches are hundreds for each engine that serves
WORDS = 4  # of a counter: 16 bytes, because kernels are specialised on how pointers are aligned
_PER_THREAD = 2  # CUDA's handle of a stream of its own for every thread


def counter(device: torch.device) -> Tensor:
    """For one launch on the current stream of this device, which is the current one."""
    slot = _slot(device) if has_streams(device) else None
    return torch.zeros(WORDS, dtype=torch.int32, device=device) if slot is None else slot


def has_streams(device: torch.device) -> bool:
    return device.type == "cuda"


def is_slot(t: Tensor) -> bool:
    """Whether t is a counter that was there before the call."""
    pool = _pools.get(t.device)
    return pool is not None and t.untyped_storage().data_ptr() == pool.counters.data_ptr()


def _slot(device: torch.device) -> Tensor | None:
    """None: it takes one that is made and cleared for this launch."""
    pool = _pools.get(device)
    if torch.cuda.is_current_stream_capturing():  # nothing can be waited for
        return None if pool is None else pool.unused()
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    if stream == _PER_THREAD:
        return None
    if pool is None:
        pool = _pools.setdefault(device, _Pool(device))
    return pool.of_stream(stream)


class _Pool:
    """The counters of a device. Threads that race for a stream's get the same one."""

    def __init__(self, device: torch.device):
        with _disable_current_modes():  # it is not the call's, should that be recorded
            self.counters = torch.zeros(SLOTS, WORDS, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()  # zeros for every stream
        self._numbers = iter(range(SLOTS))
        self._streams: dict[int, Tensor | None] = {}

    def unused(self) -> Tensor | None:
        """One that nobody has, if there is one left."""
        i = next(self._numbers, None)
        return None if i is None else self.counters[i]

    def of_stream(self, stream: int) -> Tensor | None:
        if stream not in self._streams:
            self._streams.setdefault(stream, self.unused())
        return self._streams[stream]


_pools: dict[torch.device, _Pool] = {}
