"""Kernels that Triton's interpreter runs. Interpreting and compiling cannot share a process: a file
runs its tests once more in one that interprets.
"""

import os
import subprocess
import sys

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
inside = pytest.mark.skipif(not INTERPRETED, reason="runs in a process with TRITON_INTERPRET=1")
outside = pytest.mark.skipif(INTERPRETED, reason="for the process that does not interpret")
here = pytest.mark.skipif(False, reason="") if INTERPRETED else pytest.mark.gpu


def run_inside(file: str, *arguments: str, **environment: str) -> None:
    """The tests of a file where kernels are interpreted; what needs a GPU is for the outside."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, *arguments]
    told = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    environment = {**os.environ, **told}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
