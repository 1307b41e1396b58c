"""The Triton backend as dispatch sees it: supports() returns sentences, and nothing is imported
early.
"""

import subprocess
import sys

import pytest
import torch

from onchip.core.device import DeviceInfo
from onchip.core.problem import Problem
from onchip.kernels.triton.entry import backend

PROBLEM = Problem(1, 5, 5, 2, 2, 64, 64, torch.bfloat16, torch.bfloat16, 0.125)
DOUBLE = PROBLEM._replace(dtype=torch.float64, out_dtype=torch.float64)


@pytest.mark.parametrize(
    ("problem", "device", "reason"),
    [
        (PROBLEM, DeviceInfo("cpu"), "needs a GPU"),
        (PROBLEM, DeviceInfo("mps"), "needs a GPU"),
        (PROBLEM, DeviceInfo("cuda", "Tesla T4", (7, 5)), "compute capability 8.0"),
        (DOUBLE, DeviceInfo("cuda", "H200", (9, 0)), "float64"),
    ],
)
def test_refusals_are_sentences(monkeypatch, problem, device, reason):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert reason in backend.supports(problem, device)


def test_the_interpreter_serves_the_cpu(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.supports(PROBLEM, DeviceInfo("cpu")) is None


def test_a_call_on_the_cpu_does_not_import_triton():
    code = (
        "import sys, torch, onchip; before = 'triton' in sys.modules; q = torch.randn(1, 5, 2, 8);"
        "onchip.attention(q, q, q); assert ('triton' in sys.modules) == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
