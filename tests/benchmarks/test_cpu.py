import json

import pytest
import torch

from onchip.cli import main
from onchip.cli.bench import cpu, harness
from onchip.cli.bench.harness import Case, Session


@pytest.fixture
def all_dtypes(monkeypatch):
    """As on a CPU that multiplies every dtype at speed."""
    monkeypatch.setattr(cpu, "has_fast_matmul", lambda dtype: True)


@pytest.fixture
def tiny(monkeypatch, all_dtypes):
    """The whole benchmark at sizes that take a second, its subprocesses replaced."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(cpu, "LENGTHS", (65,))
    monkeypatch.setattr(cpu, "HEAD_DIMS", (16,))
    monkeypatch.setattr(cpu, "MASKED_LENGTH", 130)
    monkeypatch.setattr(cpu, "PACKED_LENGTHS", [3, 17, 40])
    monkeypatch.setattr(cpu, "MASK_TOKENS", 4096)
    monkeypatch.setattr(cpu, "child", lambda code: "1e6" if "peak" in code else "0.01")
    monkeypatch.setattr(harness, "BUDGET_S", 0.0)
    yield
    torch.set_num_threads(threads)


def test_every_threshold_has_its_rows(tiny, tmp_path, capsys):
    path = tmp_path / "cpu.json"
    code = main(["bench", "cpu", "--json", str(path), "--threads", "1"])
    rows = json.loads(path.read_text())["rows"]
    verdicts = harness.check_thresholds(rows, cpu.THRESHOLDS)
    assert all(v.measured is not None for v in verdicts)
    assert code == (0 if all(v.ok for v in verdicts) else 1)
    out = capsys.readouterr().out
    assert "refused" not in out
    assert all(threshold.name in out for threshold in cpu.THRESHOLDS)


def test_the_grid_has_all_combinations(all_dtypes):
    titles = [title for title, _ in cpu.dense_steps(Session())]
    assert len(titles) == len(set(titles)) == 5 * 2 * 2 * 2 * 2
    assert any("8,192 tokens, head_dim 128, bfloat16, forward+backward" in t for t in titles)


def test_padding_puts_every_token_in_its_place():
    real = torch.tensor([[True, True, False], [True, False, False]])
    x = torch.arange(6.0).view(3, 1, 2)
    padded = cpu.pad(x, real)
    assert torch.equal(padded[real], x)
    assert padded[~real].eq(0).all()


def test_packed_rows_are_checked_too(monkeypatch):
    case = Case("packed", "none", torch.float32, 16, 60, 3, num_heads=2)
    monkeypatch.setattr(cpu.onchip, "varlen_attention", lambda q, k, v, **options: q * 0)
    session = Session(quick=True)
    session.run([("packed", lambda: cpu.packed_contest(session, case, [3, 17, 40], False))])
    assert session.rows == [] and "outside the accuracy rule" in session.refused[0]


def test_memory_is_measured_in_a_process_of_its_own():
    case = Case("memory", "none", torch.float32, 64, 4096, num_heads=1, backward=True)
    row = cpu.memory(case)
    out_and_gradients = 4 * 4096 * 64 * 4 / 1e6
    assert out_and_gradients / 2 < row["value"] < 100
    assert row["unit"] == "MB"


def test_a_failing_child_is_reported():
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        cpu.child("1 / 0")
