"""Tests of Triton kernels that Triton's interpreter runs on the CPU.

A process either interprets or compiles: Triton decides when it decorates a kernel. So pytest runs
twice over these files. A plain run compiles, and skips the tests marked `interpreted`; a run with
TRITON_INTERPRET=1 (`make test` starts both) collects the files that import this module, and of
these only the marked tests.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
interpreted = pytest.mark.interpreted
interpreted_or_gpu = pytest.mark.interpreted if INTERPRETED else pytest.mark.gpu


def skip_repeated_work() -> None:
    """Spare Triton's interpreter most of its time, in this process, without a change of results.

    - It replaces the functions of `triton.language` at each launch, and again whenever the kernel
      calls a function. From now on the functions of a module do this once in a launch.
    - It computes whether integers overflow, and ignores the answer unless it debugs: from now on it
      does not compute it. Addresses are checked: tests/bounds.py.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    patch, execute = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_lang(fn):
        module = id(fn.__globals__)
        if module in patched:
            return None
        patched.add(module)
        return patch(fn)

    def launch(self, *args, **kwargs):
        patched.clear()
        return execute(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_lang, launch


def has_interpreted_tests(path: Path) -> bool:
    return "tests.interpreted" in path.read_text(encoding="utf-8")


def mark_slow_except(quick: tuple[int, ...], cases: Iterable) -> list:
    """The cases as parameters of a test. Cases that are not at the `quick` indices are marked slow,
    because the interpreter takes seconds for each.
    """
    marks = lambda i: () if i in quick else (pytest.mark.slow,)
    return [pytest.param(case, marks=marks(i)) for i, case in enumerate(cases)]
