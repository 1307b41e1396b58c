"""Published figures: what is predicted is what runs, and each has its verdict."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import paper, paper_claims, paper_report, paper_runs
from benchmarks.paper_claims import PaperClaim, claims, verdict
from onchip.cli import bench
from onchip.cli.bench.harness import Session, check_thresholds
from onchip.lab import traffic
from onchip.lab.traffic import Chip

ROOT = Path(__file__).parents[2]
COMMITTED = json.loads((ROOT / "benchmarks" / "results" / "cpu-paper.json").read_text())["rows"]


def find(what):
    return next(row for row in COMMITTED if row["kernel"] == what)


def test_the_committed_rows_are_of_these_claims_and_meet_their_thresholds():
    """If this fails because a figure was added, run `python -m benchmarks paper` again."""
    specs = list(claims())
    rows = [row for row in COMMITTED if "verdict" in row]
    assert [(r["bench"], r["kernel"]) for r in rows] == [(c.section, c.what) for c in specs]
    for row, claim in zip(rows, specs, strict=True):
        assert row["published"] == claim.published
        assert row["verdict"] == verdict(claim, row["measured"])
        assert row["predicted"] == pytest.approx(claim.predicted)
    assert all(v.ok for v in check_thresholds(COMMITTED, paper.THRESHOLDS))


def test_what_the_ledgers_counted_is_what_was_predicted():
    exact = [row for row in COMMITTED if row.get("exact") and row["measured"] is not None]
    assert len(exact) >= 15 and all(
        row["measured"] == pytest.approx(row["predicted"]) for row in exact
    )


def test_verdicts():
    claim = PaperClaim("", "", "", "GB", 10.0, 10.9)
    assert verdict(claim) == "follows"
    assert verdict(claim._replace(predicted=11.1)) == "does not follow"
    assert verdict(claim._replace(reason="because")) == "follows; because"
    assert verdict(claim._replace(published=None, reason="because")) == "because"
    counted = claim._replace(published=None, predicted=7.0, exact=True)
    assert verdict(counted, 7.0) == "as predicted" and verdict(counted) == ""
    assert verdict(counted._replace(reason="because"), 7.1) == "not as predicted; because"
    bound = claim._replace(predicted=5.0, bound=True)
    assert verdict(bound) == "possible: the units' best is 50% of it"
    assert verdict(bound._replace(predicted=11.0)) == "impossible"


def test_known_mistakes_are_found():
    assert find("HBM traffic, v1")["verdict"].startswith("follows")
    assert find("operations, standard")["predicted"] == pytest.approx(824.6, abs=0.1)
    assert find("more operations in all")["predicted"] == pytest.approx(100 / 6)
    assert find("standard over flash")["predicted"] == pytest.approx(1.97, abs=0.01)
    assert find("128K tokens")["verdict"].startswith("does not follow")
    assert find("LLaMA-2 70B, a token")["measured"] == 320
    for what in ("tiles of 256, d 128", "16,384 tokens, of a layer", "32K, more than", "flash"):
        assert find(what)["verdict"].startswith("does not follow"), what


def test_one_head_executed_is_one_head_predicted():
    chip = Chip(sram=4096, scratch=torch.float16)
    problem = paper_claims.problem(111, 40)
    for kernel, name in (("paper_v0", "standard"), ("paper_v1", "v1"), ("paper_v2", "v2")):
        counted, moved = (
            paper_runs.counted(kernel, 111, 40, chip),
            paper_claims.both(name, problem, chip),
        )
        assert (counted.hbm_bytes, counted.flops) == (moved.hbm_bytes, moved.flops), kernel
    assert counted.forward_bytes == traffic.v2(problem, chip).hbm_bytes


def test_softmax_reads_its_input_once_per_pass():
    assert [paper_runs.passes(f"{n}_pass", 999) for n in ("three", "two", "one")] == [3, 2, 1]


def test_times_are_of_one_thread_and_the_number_is_restored():
    num_threads, before = [], torch.get_num_threads()
    job = lambda: num_threads.append(torch.get_num_threads())
    seconds = paper_runs.thread_seconds({"job": job}, rounds=2)
    assert seconds["job"] >= 0 and num_threads == [1, 1] and torch.get_num_threads() == before
    assert paper_runs.speedup(127, 32, 2, "both") > 0
    assert paper_runs.cache_token_bytes(3, 2, 64) == 2 * 3 * 2 * 64 * 2


def test_unfused_attention_is_attention():
    q, k, v = paper_runs._inputs(63, 16, 3, torch.float64)
    want = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    assert torch.allclose(paper_runs.unfused(q, k, v), want.transpose(1, 2))


def test_a_quick_run_counts_and_does_not_time(monkeypatch):
    counted = next(c for c in paper_claims.softmaxes())
    timed = PaperClaim("x", "timed", "", "s", 1.0, 2.0, lambda: pytest.fail("was timed"))
    monkeypatch.setattr(paper, "claims", lambda: iter([counted, timed]))
    session = Session(quick=True, threads=torch.get_num_threads())
    paper.run(session)
    rows = {row["kernel"]: row for row in session.rows}
    assert rows["three pass"]["measured"] == 3 and rows["timed"]["value"] == 2.0
    assert not session.refused and session.rows[-1]["bench"] == "elapsed"


def test_counter_rows_have_the_prediction(monkeypatch):
    call = paper.COUNTED[0]
    kernels = [paper.counters.KernelBytes("forward_kernel", 2.0e8, 7.0e7)]
    monkeypatch.setattr(paper.counters, "count", lambda calls: [kernels] * len(calls))
    row = paper.counter_row(0)
    assert row["measured"] == 0.27 and row["predicted"] == pytest.approx(0.2705, rel=0.001)
    assert row["num_heads"] == call.num_heads and "of each tensor once" in row["verdict"]
    assert {c.batch * c.seqlen for c in paper.COUNTED} == {16384}


def test_standard_attention_beside_ours(monkeypatch):
    monkeypatch.setitem(paper.LENGTHS, 64, 1.3)
    row = paper.unfused_row(64, torch.device("cpu"))
    assert row["num_heads"] == 16 and row["measured"] == row["value"] > 0
    assert row["published"] == 1.3 and " ms over " in row["verdict"]
    assert "unfused" in paper.PARTS and "unfused" not in paper.DEFAULT_PARTS


def test_the_table_of_the_documents():
    heads, body = paper_report.SHEETS["claims"](COMMITTED)
    assert heads[2:] == ["published", "predicted", "measured", "verdict"]
    assert body[1][2:5] == ["40.3 GB", "29.5 GB", "29.5 GB"] and len(body) == len(list(claims()))
    assert bench.report("paper") is paper_report


def test_it_draws_the_committed_rows(tmp_path):
    pytest.importorskip("matplotlib")
    paper_report.plot(COMMITTED, tmp_path / "paper.svg")
    for picture in (tmp_path / "paper.svg", ROOT / "docs" / "paper.svg"):
        text = picture.read_text()
        assert "GB over HBM" in text and "memory beyond the inputs" in text and "29.5" in text
