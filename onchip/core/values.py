"""Checks of the values of tensors, such as cu_seqlens, and their switch `onchip.checks`."""

import threading
from itertools import pairwise

from torch import Tensor

from onchip.core.arguments import check_flag
from onchip.core.problem import Problem, Tensors

_lock = threading.Lock()


class checks:
    """Whether *values* (cu_seqlens, page ids, lengths) on a GPU are checked, which synchronises
    with the device. Values on the CPU are always checked.

    Both a switch (`onchip.checks(True)`) and a context manager (`with onchip.checks(True): ...`),
    for all threads. The latest one that is still open decides. Contexts of several threads may end
    in any order.
    """

    enabled: bool = False
    _open: tuple["checks", ...] = ()

    def __init__(self, enabled: bool):
        check_flag("enabled", enabled)
        self._enables, self._entered = enabled, False
        with _lock:
            checks._update((*checks._open, self))

    def __enter__(self) -> "checks":
        self._entered = True
        return self

    def __exit__(self, *exc: object) -> None:
        with _lock:
            checks._update(tuple(x for x in checks._open if x is not self))

    @classmethod
    def _update(cls, still_open: tuple["checks", ...]) -> None:
        """Set the open switches and contexts. Switches are never closed, so the oldest of more than
        MAX_SWITCHES are dropped.
        """
        switches = [x for x in still_open if not x._entered]
        dropped = switches[:-MAX_SWITCHES]
        cls._open = tuple(x for x in still_open if x not in dropped)
        cls.enabled = bool(cls._open) and cls._open[-1]._enables


MAX_SWITCHES = 64


def check_values(problem: Problem, x: Tensors) -> None:
    """Check that cu_seqlens starts at 0, never decreases, ends at the total and that no sequence is
    longer than max_seqlen.
    """
    if not problem.packed or not values_are_checked(x.q):
        return
    _check_offsets("q", x.cu_seqlens_q, x.q.shape[0], problem.seqlen_q)
    if not problem.page_size:
        _check_offsets("k", x.cu_seqlens_k, x.k.shape[0], problem.seqlen_k)


def values_are_checked(q: Tensor) -> bool:
    return q.device.type == "cpu" or checks.enabled


def _check_offsets(side: str, cu: Tensor, total: int, max_seqlen: int) -> None:
    offsets = cu.tolist()
    name = f"cu_seqlens_{side}"
    if offsets[0] != 0 or offsets[-1] != total:
        raise ValueError(
            f"{name} must run from 0 to total_{side}={total}, got {offsets[0]} to {offsets[-1]}"
        )
    lengths = [b - a for a, b in pairwise(offsets)]
    if min(lengths, default=0) < 0:
        i = next(i for i, n in enumerate(lengths) if n < 0)
        raise ValueError(f"{name} must not decrease, got {offsets[i]} then {offsets[i + 1]}")
    if max(lengths, default=0) > max_seqlen:
        raise ValueError(
            f"max_seqlen_{side}={max_seqlen}, but a sequence has {max(lengths)} tokens"
        )
