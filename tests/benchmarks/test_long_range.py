"""benchmarks/long_range.py: the table has every accuracy of the results file."""

import json
from pathlib import Path

import pytest

from benchmarks import tables

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "examples" / "data" / "long-range-cpu.json"


def row(task, attention, accuracies):
    summary = {"mean": 0.5, "min": min(accuracies), "max": max(accuracies)} if accuracies else {}
    values = {"seqlen": 2048, "constant": 0.25, "accuracies": accuracies} | summary
    return {"task": task, "attention": attention} | values


@pytest.fixture
def root(tmp_path):
    """A repository with results in which Ctrl-C ended the second task."""
    facts = {"seeds": 2, "steps": 9, "batch": 4, "held_out": 64, "layers": 2, "width": 32}
    facts |= {"dtype": "float32", "device": "a CPU", "torch": "2.0", "commit": "abc"}
    facts |= {"date": "2026-11-19T01:02:03+00:00"}
    rows = [row("text", "dense", [0.4, 0.6]), row("text", "sparse", [0.45, 0.55])]
    rows += [row("retrieval", "dense", [0.5]), row("retrieval", "sparse", [])]
    file = tmp_path / "examples" / "data" / "long-range-cpu.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(facts | {"rows": rows}))
    return tmp_path


def test_a_task_has_its_accuracies(root):
    lines = tables.table("long-range:cpu", root).splitlines()
    assert lines[0] == "| task | tokens | best constant answer | dense | sparse |"
    assert lines[2] == "| text | 2,048 | 25.0 % | 50.0 % (40.0 to 60.0) | 50.0 % (45.0 to 55.0) |"
    assert lines[3] == "| retrieval | 2 x 2,048 | 25.0 % | 50.0 % (50.0 to 50.0) | |"
    caption = " ".join(lines[5:])
    assert "64 held-out examples, 2 seeds, 9 steps of 4 examples" in caption
    assert "commit abc, 2026-11-19: `python examples/long_range.py --seeds 2 --steps 9" in caption


def test_without_results_it_says_how_to_get_them(tmp_path):
    assert tables.table("long-range:h200", tmp_path) == (
        "Not measured yet: `python examples/long_range.py --results"
        " examples/data/long-range-h200.json` writes the accuracies."
    )


def test_the_committed_rows_are_complete_and_as_the_page_says():
    """Three seeds of every task with both attentions. Listops alone is learnt."""
    rows = json.loads(COMMITTED.read_text(encoding="utf-8"))["rows"]
    tasks = ("listops", "text", "retrieval", "image", "pathfinder")
    assert [(r["task"], r["attention"]) for r in rows] == [
        (task, attention) for task in tasks for attention in ("dense", "sparse")
    ]
    assert all(len(r["accuracies"]) == 3 for r in rows)
    learnt = {r["task"] for r in rows if r["min"] > 1.8 * r["constant"]}
    assert learnt == {"listops"}
    assert all(r["max"] < r["constant"] + 0.08 for r in rows if r["task"] != "listops")
