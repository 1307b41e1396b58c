"""Peak memory: measured, or extrapolated by a stated formula; here on the CPU."""

import pytest
import torch

from benchmarks import peak
from benchmarks.peak import Rival, measure
from onchip.cli.bench import gpu
from onchip.cli.bench.harness import Case, Inaccurate, Session, check_thresholds

CPU = torch.device("cpu")


def case(n, backward=False):
    return Case("peak", "causal", torch.bfloat16, 16, n, 1, 2, backward=backward)


@pytest.mark.parametrize("backward", [False, True])
def test_a_row_has_a_right_answer_and_both_peaks(backward):
    rival = Rival()
    (row,) = measure(Session(device=CPU), case(333, backward), rival)
    assert row["unit"] == "MB" and row["value"] >= 0 and row["error"] > 0
    assert row["peer_measured"] and rival.measured.keys() == {333}
    assert row["pass"] == ("forward+backward" if backward else "forward")


def test_beyond_the_memory_it_is_the_square_law(monkeypatch):
    rival = Rival({1024: 1000, 2048: 4100})
    assert rival.extrapolate(8192) == 16 * 4100
    monkeypatch.setattr(peak, "available_bytes", lambda device: 50_000)
    monkeypatch.setattr(peak, "peak_extra_bytes", lambda job, device: pytest.fail("it was run"))
    assert rival.bytes(case(8192), (), CPU) == 16 * 4100 and 8192 not in rival.measured


def test_a_rival_that_does_not_fit_after_all_is_predicted(monkeypatch):
    def no_memory(job, device):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(peak, "peak_extra_bytes", no_memory)
    rival = Rival({64: 1000})
    inputs = gpu.draw(case(128), CPU)
    assert rival.bytes(case(128), inputs, CPU) == 4000 and rival.measured == {64: 1000}


def test_a_wrong_answer_gets_no_row():
    inputs = gpu.draw(case(333), CPU)
    with pytest.raises(Inaccurate):
        peak.check_accuracy(lambda q, k, v: v + 1, inputs, False)


def test_the_threshold_sees_memory_that_grows_faster_than_the_length():
    def rows(power):
        for name in ("forward", "forward+backward"):
            for n in (1024, 16384, 1 << 20):
                values = {"value": n**power, "unit": "MB", "ratio": 1.0}
                yield {"bench": "peak", "pass": name, "seqlen": n, **values}

    assert check_thresholds(list(rows(1.0)), peak.THRESHOLDS)[0].ok
    assert not check_thresholds(list(rows(1.02)), peak.THRESHOLDS)[0].ok
