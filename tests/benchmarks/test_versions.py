"""The benchmarks of the examples, tested without a GPU: captures and kernels are stand-ins."""

import inspect
from types import SimpleNamespace

import pytest
import torch

import onchip
from benchmarks import ablation, versions
from onchip.cli import main
from onchip.cli.bench import gpu
from onchip.cli.bench.gpu import Capture
from onchip.cli.bench.harness import Case, Session

CPU = torch.device("cpu")
CASE = Case("versions", "causal", torch.bfloat16, 16, 111, 2, 2)


@pytest.fixture
def stand_ins(monkeypatch):
    """Every example computes attention; a capture takes as long as its name says."""
    took = {"v1": 12.0, "v2": 3.0, "v3": 2.0, "v4": 1.6, "onchip": 1.0}
    capture = lambda candidate, backward: Capture(lambda: None, 1, took.get(candidate.name, 2.0))
    attend = lambda q, k, v, causal, **options: (onchip.attention(q, k, v, causal=causal), None)
    monkeypatch.setattr(versions, "load", lambda name: SimpleNamespace(attention=attend))
    monkeypatch.setattr(gpu, "capture_calls", capture)
    monkeypatch.setattr(gpu, "replay_in_order", lambda captures: [x.ms for x in captures])
    monkeypatch.setattr(gpu, "still_there", lambda device: None)
    monkeypatch.setattr(gpu, "draw_sets", lambda case, device: [gpu.draw(case, device)])


@pytest.mark.usefixtures("stand_ins")
def test_a_version_is_compared_with_the_one_before():
    rows = versions.measure(Session(device=CPU), CASE)
    assert [row["kernel"] for row in rows] == ["v1", "v2", "v3", "v4", "onchip"]
    assert [row["best_peer"] for row in rows] == [None, "v1", "v2", "v3", "v4"]
    assert [row["ratio"] for row in rows[1:]] == pytest.approx([4.0, 1.5, 1.25, 1.6])
    assert all(set(row["errors"][row["kernel"]]) == {"normal", "outlier"} for row in rows)


@pytest.mark.usefixtures("stand_ins")
def test_a_version_that_is_wrong_gets_no_row(monkeypatch):
    right = versions.load("v3").attention
    wrong = lambda *x, **o: (right(*x, **o)[0] * 1.01, None)
    of = lambda name: SimpleNamespace(attention=wrong if name == "v3" else right)
    monkeypatch.setattr(versions, "load", of)
    session = Session(device=CPU)
    rows = versions.measure(session, CASE)
    assert [row["kernel"] for row in rows] == ["v1", "v2", "v4", "onchip"]
    assert "v3: outside the accuracy rule" in session.refused[0]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_each_step_is_compared_with_the_one_before(mask):
    case = Case("ablation", mask, torch.bfloat16, 16, 111, 2, 2)
    rows = {row["kernel"]: row["best_peer"] for row in ablation.measure(Session(device=CPU), case)}
    last = "dynamic hand-out" if mask == "causal" else "persistence"
    assert rows["TMA"] == "v2 by hand" and rows["persistence"] == "ping-pong"
    assert rows["lazy rescale"] == rows["polynomial exp2"] == rows["onchip"] == last
    assert ("longest first" in rows) == (mask == "causal")


def test_cells_follow_the_papers_and_then_have_few_heads():
    cases = list(versions.cases(Session()))
    papers = [c for c in cases if c.batch * c.seqlen == 16384 and c.num_heads * c.head_dim == 2048]
    assert len(papers) == 12 and all((c.batch, c.num_heads) == (1, 8) for c in cases[12:])
    assert len(cases) == 15 and len(list(versions.cases(Session(head_dims=[64])))) == 6


def test_the_options_of_every_step_are_those_of_its_example():
    pytest.importorskip("triton")
    for step in ablation.STEPS:
        accepted = inspect.signature(versions.load(step.example).attention).parameters
        assert set(step.options) <= set(accepted) - {"q", "k", "v", "causal"}, step.name


@pytest.mark.parametrize("name", ["versions", "ablation"])
def test_without_the_examples_it_says_so(monkeypatch, capsys, tmp_path, name):
    monkeypatch.setattr(versions, "FOLDER", tmp_path / "none")
    assert main(["bench", name]) == 2
    assert "times the examples of a source tree" in capsys.readouterr().err
