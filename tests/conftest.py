"""Shared by all tests: which tests a run selects, reproducible random numbers, durations, and
stand-ins for streams and for kernel launches.
"""

import gc
import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import is_hypothesis_test, settings

from tests import bounds, grids
from tests.durations import Durations
from tests.interpreted import INTERPRETED, has_interpreted_tests, skip_repeated_work

TESTS = Path(__file__).parent
# Tile rows that somebody measured on this machine's GPU must not change what tests see.
os.environ["ONCHIP_TUNED"] = "off"
# Tests in these folders are marked `extras`: `make test-extras` runs them, `make test` does not.
EXTRAS = ("benchmarks", "examples", "lab")

settings.register_profile("onchip", deadline=None, derandomize=True)
for name in ("quick", "ci"):  # see _draw_fewer_examples
    settings.register_profile(name, settings.get_profile("onchip"))
settings.load_profile("onchip")


@pytest.fixture(autouse=True)
def _seeded():
    """For a device that is not here, manual_seed formats and keeps a stack trace for later."""
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(0)


def pytest_addoption(parser):
    help = "write the seconds of every test file, and of tests over 1 s, as JSON"
    parser.addoption("--durations-file", metavar="PATH", help=help)


def pytest_configure(config):
    missing = [folder for folder in EXTRAS if not (TESTS / folder).is_dir()]
    if missing:
        raise pytest.UsageError(f"no such folder, but in EXTRAS of tests/conftest.py: {missing}")
    if INTERPRETED and find_spec("triton") is None:
        pytest.exit("Triton is not installed: no test is interpreted", 0)
    if INTERPRETED:
        bounds.install()
        skip_repeated_work()
    # A background job of a shell ignores SIGINT, and so would the commands that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(Durations(config))


def pytest_ignore_collect(collection_path):
    is_test = collection_path.match("test_*.py")
    if INTERPRETED and is_test and not has_interpreted_tests(collection_path):
        return True
    return None


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(config, items):
    gpu = torch.cuda.is_available()
    hopper = gpu and torch.cuda.get_device_capability() == (9, 0)
    for item in items:
        if any(item.path.is_relative_to(TESTS / folder) for folder in EXTRAS):
            item.add_marker("extras")
        # by marker, not by keyword: folders are keywords too, and one is called hopper
        if item.get_closest_marker("gpu") and not gpu:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))
        if item.get_closest_marker("hopper") and not hopper:
            item.add_marker(pytest.mark.skip(reason="no device of compute capability 9.0 here"))
        if _is_interpreted(item) and not INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="runs with TRITON_INTERPRET=1"))
    grids.mark(items)
    _draw_fewer_examples(items, config.getoption("--hypothesis-profile"))
    if INTERPRETED:
        config.hook.pytest_deselected(items=[x for x in items if not _is_interpreted(x)])
        items[:] = filter(_is_interpreted, items)
    if hasattr(config, "workerinput"):  # minutes first, or one worker is left alone with them
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish():
    """The garbage collector no longer looks through the objects of all modules and tests."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # so that they are freed at the end, as without pytest


def _draw_fewer_examples(items, profile):
    """quick: a fifth of the examples. ci: two fifths of those of slow tests. A profile cannot do
    this: `max_examples` of a test overrides it.
    """
    share = {"quick": 0.2, "ci": 0.4}.get(profile)
    if share is None:
        return
    items = [x for x in items if profile == "quick" or x.get_closest_marker("slow")]
    for test in filter(is_hypothesis_test, {getattr(x.obj, "__func__", x.obj) for x in items}):
        full = test._hypothesis_internal_use_settings
        fewer = settings(full, max_examples=max(5, int(full.max_examples * share)))
        test._hypothesis_internal_use_settings = fewer


def _is_interpreted(item):
    return item.get_closest_marker("interpreted") is not None


class LateMover:
    """Delays copies as long as a stream may: until `run`, or until a `wait` for them."""

    def __init__(self, mover):
        self.mover = mover
        self.queue = []

    def move_out(self, pages, chunks):
        return self._delay(self.mover.move_out, list(pages), list(chunks))

    def move_in(self, pages, chunks):
        return self._delay(self.mover.move_in, list(pages), list(chunks))

    def _delay(self, *copy):
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
    """late(tier) delays all later copies of a host tier to the last moment."""

    def delay(tier):
        tier._mover = LateMover(tier._mover)

    return delay


@pytest.fixture
def launches():
    """Every launch of a Triton kernel, as (kernel, positional arguments, keyword arguments). The
    launches are recorded and not run (benchmarks/cross_compile.py).

    Tests that compile these launches share Triton's cache with other runs. Its key covers the
    source, the options and the version of Triton, so that only changed kernels compile again.
    """
    from benchmarks.cross_compile import record_launches

    with record_launches() as recorded:
        yield recorded
