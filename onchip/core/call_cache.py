"""The cache of calls: a call that repeats an earlier one is not validated again."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from onchip.core.problem import Options, Problem, Tensors
from onchip.core.torch_mode import PLAIN, is_eager


class CachedCall(NamedTuple):
    """A Problem and the cache of its launches (kernels/runtime/replay.py). Calls with the same
    options, and tensors of the same shapes, strides, dtypes and devices that require gradients
    alike, share one CachedCall. `cache` is None for calls that are not cached.
    """

    problem: Problem
    cache: dict[tuple[Any, ...], Any] | None = None


T = TypeVar("T")
MAX_CACHED_CALLS = 1024  # a few kB each
Describe = Callable[[Tensors, Any, Any], Problem]
_cached_calls: dict[tuple | None, CachedCall] = {}
_lock = threading.Lock()


def prepare(describe: Describe, x: Tensors, options: Options | Problem, lengths: Any) -> CachedCall:
    """Look up the CachedCall of describe(x, options, lengths), or make one. A repeated call is not
    validated again: the key holds everything that validation reads, which is no value of a tensor.
    Not cached: calls with a mask, and calls under torch.compile or tracing, where lengths may be
    SymInts.
    """
    if x.mask is not None or not is_eager(x.q):
        return CachedCall(describe(x, options, lengths))
    try:
        key = _signature(describe, x, options, lengths)
        call = _cached_calls.get(key)
    except (TypeError, RuntimeError):  # a window that is a list, a subclass of Tensor
        return CachedCall(describe(x, options, lengths))
    if call is not None:
        return call
    call = CachedCall(describe(x, options, lengths), {})
    return insert_bounded(_cached_calls, key, call, MAX_CACHED_CALLS)


def _signature(describe: Describe, x: Tensors, options: Options | Problem, lengths: Any) -> tuple:
    """The key of a call. It has the types of numbers, too: True == 1, but True is not a length."""
    numbers = lengths if isinstance(lengths, tuple) else (lengths,)
    key = [describe, options, lengths, *map(type, (*options, *options.window_size, *numbers))]
    records = torch.is_grad_enabled()  # validation refuses gradients to some tensors
    for t in x[:-1]:
        if t is None:
            key.append(None)
        elif type(t) in PLAIN:
            key += (t.shape, t.stride(), t.dtype, t.device, records and t.requires_grad)
        else:
            raise TypeError(f"{type(t).__name__} has no signature")
    return tuple(key)


def insert_bounded(table: dict[Any, T], key: tuple[Any, ...], value: T, max_entries: int) -> T:
    """Return table[key], inserting value if the key is missing. A full table evicts its oldest
    entry, not the least recently used one: recording each use would cost every call, and an evicted
    entry still in use costs one slow call per `max_entries` new ones.
    """
    with _lock:
        if key not in table and len(table) >= max_entries:
            del table[next(iter(table))]
        return table.setdefault(key, value)


def clear_call_cache() -> None:
    """Forget all cached calls. Code that changes how calls run, such as a row of the tile tables,
    must call this: cached launches would go on as before.
    """
    with _lock:
        _cached_calls.clear()
