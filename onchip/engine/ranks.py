"""One process, or the ranks that hold a model together."""

import logging
import os
import time
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch

from onchip.core.device import find_device
from onchip.core.machine import matmul_dtype
from onchip.models import (
    Model,
    builtin,
    inspect,
    inspect_foreign,
    is_native,
    load,
    load_foreign,
)

LOG = logging.getLogger("onchip")

_DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float16", "fp16", "half"), torch.float16),
    **dict.fromkeys(("float32", "fp32", "float"), torch.float32),
}


class RankClock:
    """A clock that shows the same on all ranks: the number of its calls or, once `set` was called,
    the time of the last `set`.
    """

    def __init__(self) -> None:
        self._calls, self._now = count(), None

    def __call__(self) -> float:
        return next(self._calls) if self._now is None else self._now

    def set(self, now: float) -> None:
        self._now = now


class Ranks:
    """One process per part of a model. A single process does not communicate."""

    def __init__(self, world_size: int, seed: int | None):
        if not isinstance(world_size, int) or world_size < 1:
            raise ValueError(f"tensor_parallel_size={world_size!r} must be a number from 1 on")
        if world_size > 1 and seed is None:
            raise ValueError("all ranks must sample the same tokens: give a seed")
        self._world_size = world_size
        self._job: Any = None

    @property
    def is_single(self) -> bool:
        return self._world_size == 1

    @property
    def clock(self) -> Callable[[], float]:
        """The same on all ranks: seconds for a single process, otherwise the number of calls."""
        return time.monotonic if self.is_single else RankClock()

    def load(
        self,
        model: str | Path | Model,
        device: str | torch.device | None,
        dtype: str | torch.dtype,
    ) -> Model:
        """Load the model, or the part of this rank."""
        if not isinstance(model, (str, Path)):
            return self._check_single(model)
        device, chosen = self._device(device), _dtype(dtype)
        check_divisible(model, self._world_size)
        if model in builtin.NAMES:
            return builtin.load_builtin(str(model), device, chosen or torch.float32)
        if not is_native(model):
            return self._load_foreign(model, device, chosen)
        checkpoint = inspect(model)
        chosen = _computed_dtype(checkpoint.dtype, device, chosen)
        if self.is_single:
            return load(checkpoint, device, chosen)
        from onchip.parallel import (
            tensor_parallel,
        )  # not before: torch.distributed is slow to import

        self._job = tensor_parallel.join_group(self._world_size, device)
        sizes = {"rank": self._job.rank, "world_size": self._world_size}
        return self._job.connect(load(checkpoint, device, chosen, **sizes))

    def take_minimum(self, number: int) -> int:
        """The smallest value of all ranks."""
        return number if self.is_single else self._job.reduce_min(number)

    def shut_down(self) -> None:
        if self._job is not None:
            self._job.leave()

    def _load_foreign(
        self, folder: str | Path, device: torch.device, dtype: torch.dtype | None
    ) -> Model:
        stored = inspect_foreign(folder, dtype).dtype
        return load_foreign(folder, device, _computed_dtype(stored, device, dtype))

    def _check_single(self, model: Model) -> Model:
        if not self.is_single:
            raise ValueError(
                f"tensor_parallel_size={self._world_size} needs the folder of a checkpoint, which"
                " the ranks load in parts"
            )
        return model

    def _device(self, device: str | torch.device | None) -> torch.device:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        is_own = not self.is_single and str(device) == "cuda"  # each rank uses one device only
        own_device = find_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if is_own else device)
        if is_own:
            torch.cuda.set_device(own_device)
        return own_device


def check_divisible(model: str | Path, world_size: int) -> None:
    """ValueError: why the ranks cannot load the model in parts. Weights are not read."""
    if world_size == 1:
        return
    if model in builtin.NAMES:
        config = builtin.read_config(str(model))
    elif is_native(model):
        config = inspect(model).config
    else:
        raise ValueError(
            f"tensor_parallel_size={world_size} needs a native model; the one of {model} runs"
            " through transformers, on one device"
        )
    try:
        config.shard(world_size)
    except ValueError as error:
        raise ValueError(
            f"tensor_parallel_size={world_size} does not divide {model}: {error}"
        ) from None


def _computed_dtype(
    stored: torch.dtype, device: torch.device, requested: torch.dtype | None
) -> torch.dtype | None:
    """The dtype of a model's weights; None for the stored one. A CPU without 16-bit instructions
    uses fp32 unless another dtype is requested.
    """
    dtype = requested or stored
    if device.type != "cpu" or matmul_dtype(dtype) == dtype:
        return requested
    name = str(dtype).removeprefix("torch.")
    if requested is None:
        LOG.warning("this CPU has no instructions for %s: the model is computed in float32", name)
        return torch.float32
    LOG.warning("this CPU has no instructions for %s: float32 would be many times faster", name)
    warnings.filterwarnings("ignore", "mkldnn_matmul failed")  # torch's own warning is a C++ trace
    return requested


def _dtype(name: str | torch.dtype) -> torch.dtype | None:
    if isinstance(name, torch.dtype) or name == "auto":
        return None if name == "auto" else name
    if name not in _DTYPES:
        raise ValueError(f"dtype={name!r} is not one of auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]
