"""Shared by all tests: reproducible draws, and devices that are missing skip their tests."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("onchip", deadline=None, derandomize=True)
settings.load_profile("onchip")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def pytest_collection_modifyitems(items):
    gpu = torch.cuda.is_available()
    hopper = gpu and torch.cuda.get_device_capability() == (9, 0)
    for item in items:
        # by marker, not by keyword: folders are keywords too, and one is called hopper
        if item.get_closest_marker("gpu") and not gpu:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))
        if item.get_closest_marker("hopper") and not hopper:
            item.add_marker(pytest.mark.skip(reason="no device of compute capability 9.0 here"))
