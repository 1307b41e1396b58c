"""`python -m benchmarks approximate`: rows of the example, and their tables."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import approximate, approximate_report
from onchip.cli import bench
from onchip.cli.bench.harness import Session

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "cpu-approximate.json"
COMMITTED = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]


def test_rows_are_those_of_the_example():
    threads = torch.get_num_threads()
    session = Session(seqlens=[130], threads=threads)
    approximate.run(session)
    assert torch.get_num_threads() == threads and not session.refused
    assert {(row["mask"], row["kernel"]) for row in session.rows} == {
        (part, name)
        for part in approximate.PARTS
        for name in approximate_report.load_example()["methods"](130, part == "model")
    }
    assert all(row["value"] > 0 and row["relative"] >= 0 for row in session.rows)
    assert bench.report("approximate") is approximate_report


@pytest.mark.parametrize("name", ["random", "model", "cost"])
def test_the_tables_have_every_method(name):
    heads, body = approximate_report.SHEETS[name](COMMITTED)
    assert heads[1:4] == ["512", "1,024", "2,048"] and len(heads) == (4 if name == "model" else 6)
    first = ["exact", "Performer"] if name == "model" else ["exact", "Linformer", "Performer"]
    assert [line[0] for line in body] == [*first, "Reformer", "Longformer", "BigBird", "window"]
    assert all(cell for line in body for cell in line)


def test_exact_attention_has_no_error_and_pooling_none_at_full_rank():
    errors = {(r["mask"], r["kernel"], r["seqlen"]): r["relative"] for r in COMMITTED}
    assert all(error < 1e-6 for (_, name, _), error in errors.items() if name == "exact")
    assert errors["random", "Linformer", 512] < 1e-6 < errors["random", "Linformer", 1024]


def test_the_rows_are_as_the_page_says():
    rows = {(r["mask"], r["kernel"], r["seqlen"]): r for r in COMMITTED}
    ms = {at: row["value"] for at, row in rows.items()}
    shortest = [row["value"] for (part, _, n), row in rows.items() if (part, n) == ("random", 512)]
    assert min(shortest) == ms["random", "exact", 512]  # at 512 none gains
    for n in (512, 1024, 2048, 4096, 8192):
        assert ms["random", "Reformer", n] > ms["random", "exact", n]
        assert rows["random", "Performer", n]["relative"] > 1
    for name in ("Longformer", "BigBird", "window"):  # all but a few per cent
        assert all(rows["model", name, n]["relative"] < 0.1 for n in (512, 1024, 2048))
        assert rows["random", name, 8192]["relative"] > 1


def test_it_draws_the_committed_rows(tmp_path):
    pytest.importorskip("matplotlib")
    approximate_report.plot(COMMITTED, tmp_path / "picture.svg")
    for picture in (tmp_path / "picture.svg", ROOT / "docs" / "approximations.svg"):
        assert "built-in model" in picture.read_text(encoding="utf-8")
