"""Shared by all tests: reproducible draws, missing devices skip their tests, stand-ins for streams
and for launches.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings

from tests import bounds
from tests.interpreted import INTERPRETED

settings.register_profile("onchip", deadline=None, derandomize=True)
settings.load_profile("onchip")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def pytest_configure():
    if INTERPRETED:
        bounds.install()


def pytest_collection_modifyitems(items):
    gpu = torch.cuda.is_available()
    hopper = gpu and torch.cuda.get_device_capability() == (9, 0)
    for item in items:
        # by marker, not by keyword: folders are keywords too, and one is called hopper
        if item.get_closest_marker("gpu") and not gpu:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))
        if item.get_closest_marker("hopper") and not hopper:
            item.add_marker(pytest.mark.skip(reason="no device of compute capability 9.0 here"))


class LateMover:
    """Copies that happen as late as a stream may delay them: at `run`, or when somebody waits."""

    def __init__(self, plain):
        self.plain = plain
        self.queue = []

    def move_out(self, pages, chunks):
        return self._later(self.plain.move_out, list(pages), list(chunks))

    def move_in(self, pages, chunks):
        return self._later(self.plain.move_in, list(pages), list(chunks))

    def _later(self, *copy):
        self.queue.append(LateTransfer(self, copy))
        return self.queue[-1]

    def run(self, last=None):
        while self.queue:
            transfer = self.queue.pop(0)
            transfer.copy[0](*transfer.copy[1:])
            transfer.finished = True
            if transfer is last:
                return


class LateTransfer:
    def __init__(self, mover, copy):
        self.mover, self.copy, self.finished = mover, copy, False

    def done(self):
        return self.finished

    def wait(self):
        if not self.finished:
            self.mover.run(self)

    synchronize = wait


@pytest.fixture
def late():
    """late(tier): its copies happen at the last moment from now on."""

    def delay(tier):
        tier._mover = LateMover(tier._mover)

    return delay


@pytest.fixture
def launches(monkeypatch, tmp_path):
    """(kernel, positional arguments, keyword arguments) of every launch of Triton, none of which
    happens; the card has 132 processors.
    """
    from triton.runtime.jit import JITFunction

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    found = []
    run = lambda self, *args, grid, warmup, **kwargs: found.append((self, args, kwargs))
    monkeypatch.setattr(JITFunction, "run", run)
    return found
