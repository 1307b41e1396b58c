import json

import pytest
import torch

import onchip
from onchip.cli.bench import BENCHES, harness, load
from onchip.cli.bench.harness import (
    Candidate,
    Case,
    Exact,
    Inaccurate,
    Session,
    Threshold,
    check_thresholds,
)
from onchip.cli.bench.patterns import blocks, causal, dense, documents, window
from onchip.cli.bench.peers import heads_first, sdpa, standard
from onchip.testing import make_qkv
from tests.benchmarks.skewed import skewed

COLUMNS = ["bench", "kernel", "pass", "mask", "dtype", "head_dim", "seqlen", "batch", "num_heads"]
COLUMNS += ["num_kv_heads", "value", "unit", "peers", "best_peer", "ratio", "error", "peer_error"]
CASE = Case("test", "causal", torch.float32, 16, 199, num_heads=2)


@pytest.fixture
def problem():
    q, k, v = make_qkv(1, 199, num_heads=2, head_dim=16)
    return (q, k, v), Exact(q, k, v, causal(199).visible)


def ours(inputs, attend=lambda q, k, v: onchip.attention(q, k, v, causal=True)):
    return Candidate("onchip", attend, inputs)


def test_unknown_benchmarks_are_named_and_known_ones_load():
    with pytest.raises(ValueError, match="no benchmark 'gpu9'.*cpu"):
        load("gpu9")
    for name in BENCHES:
        assert callable(load(name).run) and isinstance(load(name).THRESHOLDS, tuple | list)


@pytest.mark.parametrize("backward", [False, True])
def test_a_row_has_exactly_the_columns_of_the_schema(problem, backward):
    inputs, exact = problem
    case = Case("test", "causal", torch.float32, 16, 199, num_heads=2, backward=backward)
    theirs = [heads_first(x) for x in inputs]
    peer = Candidate("sdpa", lambda q, k, v: sdpa(q, k, v, is_causal=True), theirs)
    row = Session(quick=True).contest(case, "tiled", ours(inputs), [peer], exact)
    assert list(row) == COLUMNS
    assert row["pass"] == ("forward+backward" if backward else "forward")
    assert row["ratio"] == pytest.approx(row["peers"]["sdpa"] / row["value"])
    assert 0 < row["error"] < 1e-6 and 0 < row["peer_error"] < 1e-6
    json.dumps(row)


@pytest.mark.parametrize("backward", [False, True])
def test_a_wrong_answer_gets_no_row(problem, backward):
    inputs, exact = problem
    wrong = ours(inputs, lambda q, k, v: onchip.attention(q, k, v, causal=True) * 1.001)
    with pytest.raises(Inaccurate, match="out"):
        exact.check(wrong, backward)
    session = Session(quick=True)
    session.run([("wrong", lambda: session.contest(CASE, "tiled", wrong, [wrong], exact))])
    assert session.rows == []
    assert session.refused[0].startswith("wrong: ")


def test_a_wrong_gradient_gets_no_row(problem):
    inputs, exact = problem
    wrong = ours(inputs, lambda q, k, v: onchip.attention(q, skewed(k, 1.001), v, causal=True))
    exact.check(wrong, backward=False)
    with pytest.raises(Inaccurate, match="dk"):
        exact.check(wrong, backward=True)


def test_the_fastest_peer_is_the_one_that_counts(problem, monkeypatch):
    inputs, _ = problem
    peers = [Candidate(name, standard, inputs) for name in ("slow", "fast")]
    times = {"slow": 2.0, "fast": 1.0}
    monkeypatch.setattr(harness, "alternate", lambda jobs, device, rounds: times)
    assert Session().fastest(peers, backward=False).name == "fast"


def test_at_least_seven_rounds_unless_quick(monkeypatch):
    calls = []
    monkeypatch.setattr(harness, "alternate", lambda *args: calls.append(args[2:]))
    Session().clock({})
    assert calls[0][0] >= 7


def row(**columns):
    return CASE.row("tiled", 1.0, "ms") | columns


def test_thresholds_check_geomeans_of_ratios_and_the_worst_value():
    rows = [row(ratio=0.5), row(ratio=2.0), row(bench="memory", value=70.0, unit="MB")]
    is_test = lambda r: r["bench"] == "test"
    verdicts = check_thresholds(
        rows,
        [
            Threshold("even", is_test, at_least=1.0),
            Threshold("ahead", is_test, at_least=1.01),
            Threshold("small", lambda r: r["bench"] == "memory", at_most=64),
            Threshold("nobody", lambda r: False, at_least=0),
        ],
    )
    assert [v.ok for v in verdicts] == [True, False, False, False]
    assert verdicts[0].measured == pytest.approx(1.0)
    assert (verdicts[2].measured, verdicts[2].unit) == (70.0, "MB")


def test_a_results_file_names_its_machine_and_commit(tmp_path):
    path = tmp_path / "results.json"
    harness.write_results([row()], path)
    document = json.loads(path.read_text())
    assert list(document) == ["meta", "schema", "rows"]
    assert list(document["meta"]) == ["device", "torch", "triton", "commit", "date", "clocks"]
    assert document["schema"] == 1
    assert document["rows"] == [row()]


@pytest.mark.parametrize("build", [dense, causal, window, documents, blocks])
@pytest.mark.parametrize("n", [1, 111, 799])
def test_a_pattern_is_the_same_mask_for_oracle_and_onchip(build, n):
    pattern = build(n)
    q, k, v = make_qkv(1, n, num_heads=1, head_dim=8)
    check = Exact(q, k, v, pattern.visible)
    attend = lambda q, k, v: onchip.attention(q, k, v, **pattern.options)
    assert check.check(Candidate("onchip", attend, (q, k, v)), backward=False) < 1e-6


def test_standard_attention_is_what_sdpa_computes():
    q, k, v = make_qkv(2, 63, num_heads=3, head_dim=8)
    assert torch.allclose(standard(q, k, v), sdpa(q, k, v, is_causal=True), atol=1e-6)
