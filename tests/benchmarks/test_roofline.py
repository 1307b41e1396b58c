"""Predictions against measurements: every cell, its columns, and the table of the documents."""

import json
from pathlib import Path

import pytest

from benchmarks import roofline, roofline_report
from onchip.cli import bench, main
from onchip.cli.bench.harness import Session, check_thresholds

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rows():
    session = Session()
    roofline.run(session)
    return session.rows


def test_thresholds_are_met(rows):
    verdicts = check_thresholds(rows, roofline.THRESHOLDS)
    assert [v.ok for v in verdicts] == [True, True, True] and len(rows) == 3 * 36 + 16


def test_a_cell_holds_both_times(rows):
    selected = {"bench": "forward", "mask": "none", "head_dim": 128, "seqlen": 8192}
    (row,) = (r for r in rows if selected.items() <= r.items())
    source = json.loads((ROOT / "benchmarks/results/h200-forward.json").read_text())["rows"]
    (measured,) = (r for r in source if selected.items() <= r.items())
    flops = 4 * 2 * 16 * 8192**2 * 128
    assert row["peers"]["measured"] == pytest.approx(flops / measured["value"] / 1e6)
    assert row["ratio"] == row["peers"]["measured"] / row["value"] and row["binds"] in row["why"]
    assert roofline.gap(row) == pytest.approx(100 * (row["value"] / row["peers"]["measured"] - 1))


def test_the_table_has_a_line_for_each_mask_and_dim(rows):
    heads, body = roofline_report.SHEETS["cells"](rows)
    assert heads[-1] == "16k" and len(body) == 18 and {len(line) for line in body} == {len(heads)}
    assert list(dict.fromkeys(line[0] for line in body)) == list(roofline.SEEN)
    assert body[0][3] == "exp unit" and body[0][-1].endswith("%)")


def test_what_was_held_out_has_a_table_and_no_threshold(rows):
    _, body = roofline_report.SHEETS["held-out"](rows)
    assert len(body) == 16 and not any(line[-1].startswith("bound") for line in body)
    assert not any(t.selects({"bench": roofline.HELD_OUT}) for t in roofline.THRESHOLDS)


def test_the_committed_table_is_what_the_code_computes(rows):
    committed = json.loads((ROOT / "benchmarks/results/h200-roofline.json").read_text())["rows"]
    assert [r["value"] for r in committed] == pytest.approx([r["value"] for r in rows])


def test_it_runs_from_the_command_line(capsys):
    assert main(["bench", "roofline", "--only", "backward"]) == 0
    out = capsys.readouterr().out
    assert "36 of 36 cells that the model was made with lie within 15 %" in out
    assert bench.report("roofline") is roofline_report
    assert main(["bench", "roofline", "--plot", "x.svg"]) == 2
