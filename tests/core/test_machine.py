"""Dtypes that the CPU multiplies slowly are computed in fp32, by calls and models, with a note."""

import logging
import platform
import time
import warnings

import pytest
import torch

import onchip
import onchip.testing as ot
from onchip.cli import doctor
from onchip.core import machine
from onchip.core.problem import Options, Tensors
from onchip.core.validation import describe
from onchip.engine import ranks
from onchip.kernels.cpu import aten
from onchip.models import Decoder, builtin, save

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def cpu(monkeypatch):
    """A function that pretends a CPU with or without bf16 and fp16 instructions."""

    def become(bf16, fp16, name="x86_64", mkldnn=True):
        answers = {BF16: bf16, FP16: fp16 and name == "x86_64"}
        fast = lambda dtype: dtype.itemsize != 2 or (mkldnn and answers[dtype])
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: mkldnn)
        ops = torch.ops.mkldnn
        monkeypatch.setattr(ops, "_is_mkldnn_bf16_supported", lambda: bf16)
        monkeypatch.setattr(ops, "_is_mkldnn_fp16_supported", lambda: fp16)
        monkeypatch.setattr(platform, "machine", lambda: name)
        machine.has_fast_matmul.cache_clear()
        for dtype in (BF16, FP16, FP32, torch.float64):
            assert machine.has_fast_matmul(dtype) == fast(dtype)

    yield become
    machine.has_fast_matmul.cache_clear()


def test_has_fast_matmul_follows_the_cpu(cpu):
    cpu(True, True)
    cpu(True, False)
    cpu(False, False)
    cpu(False, True, name="aarch64")  # its fp16 products are slow although it reports fp16
    cpu(True, True, name="aarch64")
    cpu(True, True, mkldnn=False)


@pytest.mark.parametrize("fast", [False, True])
def test_calls_compute_in_a_fast_dtype(cpu, fast):
    cpu(fast, fast)
    for dtype in (BF16, FP16):
        q, k, v = ot.make_qkv(1, 9, dtype=dtype)
        problem = describe(Tensors(q, k, v), Options())
        assert aten._compute_dtype(problem) == (dtype if fast else FP32)
        ot.assert_accurate(onchip.attention, q, k, v, causal=True, grad=True)


@pytest.mark.parametrize("backward", [False, True])
def test_16_bits_take_about_the_time_of_fp32(backward):
    """In CPU time, the least of several, with a margin for a busy machine. torch's scalar loops
    would take 50 to 400 times as long.
    """

    def least(dtype):
        leaves = [t.requires_grad_(backward) for t in ot.make_qkv(1, 256, num_heads=8, dtype=dtype)]
        spent = []
        for _ in range(7):
            start = time.process_time()
            out = onchip.attention(*leaves)
            if backward:
                out.sum().backward()
            spent.append(time.process_time() - start)
        return min(spent)

    fp32 = least(FP32)
    assert max(least(BF16), least(FP16)) < 3 * fp32


@pytest.mark.parametrize("fast", [False, True])
def test_models_compute_in_a_fast_dtype(cpu, fast, tmp_path, caplog):
    cpu(fast, fast)
    tiny = builtin.tiny()
    stored = Decoder(tiny.config, dtype=BF16)
    stored.load_state_dict(tiny.state_dict())
    save(stored, tmp_path)
    alone = ranks.Ranks(1, None)
    with caplog.at_level(logging.WARNING, "onchip"):
        assert alone.load(tmp_path, "cpu", "auto").dtype == (BF16 if fast else FP32)
        assert bool(caplog.messages) != fast
        if not fast:
            assert "no instructions for bfloat16: the model is computed in float32" in caplog.text
        caplog.clear()
        with warnings.catch_warnings():
            assert alone.load(tmp_path, "cpu", "bfloat16").dtype == BF16
            assert bool(caplog.messages) != fast
        caplog.clear()
        assert alone.load(tmp_path, "cpu", "float32").dtype == FP32 and not caplog.messages


def test_doctor_reports_slow_dtypes(cpu):
    cpu(False, False)
    assert doctor._cpu().advice == "No instructions for bf16 and fp16: calls compute in fp32."
    cpu(True, False)
    assert doctor._cpu().advice == "No instructions for fp16: calls compute in fp32."
    cpu(True, True)
    assert doctor._cpu().advice == ""
