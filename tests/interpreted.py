"""Tests of Triton kernels that Triton's interpreter runs on the CPU.

A process either interprets or compiles: Triton decides when it decorates a kernel. So pytest runs
twice over these files. A plain run compiles, and skips the tests marked `interpreted`; a run with
TRITON_INTERPRET=1 (`make test` starts both) collects the files that import this module, and of
these only the marked tests.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
interpreted = pytest.mark.interpreted
interpreted_or_gpu = pytest.mark.interpreted if INTERPRETED else pytest.mark.gpu


def has_interpreted_tests(path: Path) -> bool:
    return "tests.interpreted" in path.read_text(encoding="utf-8")


def mark_slow_except(quick: tuple[int, ...], cases: Iterable) -> list:
    """The cases as parameters of a test. Cases that are not at the `quick` indices are marked slow,
    because the interpreter takes seconds for each.
    """
    marks = lambda i: () if i in quick else (pytest.mark.slow,)
    return [pytest.param(case, marks=marks(i)) for i, case in enumerate(cases)]
