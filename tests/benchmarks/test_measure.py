import platform
import time

import pytest
import torch

from onchip.cli.bench import measure
from onchip.cli.bench.measure import alternate, available_bytes, peak_extra_bytes, sample_rows

CPU = torch.device("cpu")
MIB = 1 << 20
linux = pytest.mark.skipif(not measure.STATUS.exists(), reason="needs /proc")
glibc = pytest.mark.skipif(
    platform.machine() == "aarch64",
    reason="torch for ARM brings an allocator that cannot be told to return what it keeps",
)


def test_contenders_take_turns_and_the_order_reverses():
    log = []
    jobs = {name: (lambda name=name: log.append(name)) for name in "abc"}
    assert list(alternate(jobs, CPU, rounds=3)) == ["a", "b", "c"]
    assert "".join(log) == "abccbaabc"


def test_the_least_time_counts():
    naps = iter([0.03, 0.001, 0.03])
    assert alternate({"nap": lambda: time.sleep(next(naps))}, CPU, rounds=3)["nap"] < 0.02


def test_a_time_budget_adds_rounds_up_to_a_limit():
    calls = []
    alternate({"job": lambda: calls.append(0)}, CPU, rounds=2, budget_s=60)
    assert len(calls) == 40


def hold(mib):
    """Touches a temporary of that size and returns half of it."""
    temporary = torch.ones(mib * MIB, dtype=torch.uint8)
    return temporary[: mib * MIB // 2].clone()


@linux
def test_the_peak_includes_temporaries_and_the_result():
    peak, result = peak_extra_bytes(lambda: hold(64), CPU)
    assert 94 * MIB < peak < 110 * MIB
    assert result.numel() == 32 * MIB


@linux
@glibc
def test_memory_that_malloc_kept_is_not_hidden():
    small = lambda: [torch.ones(MIB // 8, dtype=torch.uint8) for _ in range(128)]
    small()
    assert peak_extra_bytes(small, CPU)[0] > 14 * MIB


@linux
@glibc
def test_without_a_mark_to_reset_a_thread_samples(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "RESET", tmp_path / "missing" / "clear_refs")
    slow = lambda: (hold(64), time.sleep(0.05))
    assert 28 * MIB < peak_extra_bytes(slow, CPU)[0] < 110 * MIB


def test_peak_memory_is_none_without_proc_status(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "STATUS", tmp_path / "status")
    assert peak_extra_bytes(lambda: 7, CPU) == (None, 7)


def test_available_memory_is_plausible():
    assert 64 * MIB < available_bytes(CPU) < 1 << 46


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 799])
def test_sampled_rows_are_distinct_sorted_and_hold_both_ends(n):
    rows = sample_rows(n, 64)
    assert len(rows) == min(n, 64)
    assert (rows.diff() > 0).all()
    assert (rows[0], rows[-1]) == (0, n - 1)
    assert torch.equal(rows, sample_rows(n, 64))
