"""Fixtures for tests of the kernels' host code without a GPU."""

from types import SimpleNamespace

import pytest
import torch

from onchip.kernels import tiles
from onchip.kernels.runtime import counters


@pytest.fixture
def now(monkeypatch):
    """The current stream, whether it is captured, and the number of synchronisations: stand-ins,
    with counters on the CPU.
    """
    state = SimpleNamespace(stream=0, capturing=False, waits=0)

    def wait():
        state.waits += 1

    stream = SimpleNamespace(synchronize=wait)
    monkeypatch.setattr(counters, "_pools", {})
    monkeypatch.setattr(counters, "has_streams", lambda device: True)
    raw = lambda device: state.stream
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", raw, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return state


SPLIT_KEYS = tiles.HOPPER_SPLIT_KEYS


@pytest.fixture(autouse=True)
def one_kernel_for_all_gradients(monkeypatch):
    """The backward of these short calls is that of long ones."""
    monkeypatch.setattr(tiles, "HOPPER_SPLIT_KEYS", dict.fromkeys(SPLIT_KEYS, 0))


@pytest.fixture
def few_keys(monkeypatch, one_kernel_for_all_gradients):
    """The backward of short calls is their own, however few tiles they have."""
    monkeypatch.setattr(tiles, "HOPPER_SPLIT_KEYS", SPLIT_KEYS)
    monkeypatch.setattr(tiles, "_MANY_TILES", 0)
