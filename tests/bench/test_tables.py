"""Tables are written from what was measured and asked, with nothing left out."""

import json
import sys

import pytest
import torch

from onchip.bench import tables
from onchip.bench.harness import Case, meta
from onchip.dispatch import KERNELS


def results(tmp_path, rows, schema=1):
    folder = tmp_path / "bench" / "results"
    folder.mkdir(parents=True)
    document = {"meta": meta(), "schema": schema, "rows": rows}
    (folder / "cpu.json").write_text(json.dumps(document))
    return tmp_path


def contest(seqlen, ratio, dtype=torch.float32):
    peer = {"peers": {"sdpa": ratio}, "best_peer": "sdpa", "ratio": ratio, "error": 1e-7}
    return Case("dense", "none", dtype, 64, seqlen).row("aten_cpu", 1.0, "ms", **peer)


def test_a_line_shows_its_mean_and_its_worst_cell(tmp_path):
    root = results(tmp_path, [contest(512, 0.5), contest(8192, 2.0), contest(512, 0.9, torch.half)])
    text = tables.table("bench:cpu", root)
    assert "| dense, no mask, 512 to 8,192 tokens | sdpa | forward | 1.00 (0.50 to 2.00) |" in text
    assert "| 0.90 |" in text and "onchip bench cpu --json bench/results/cpu.json" in text


def test_every_row_is_there(tmp_path):
    rows = [contest(n, r) for n, r in ((512, 0.5), (1024, 1.1), (2048, 0.97))]
    text = tables.table("bench:cpu:rows", results(tmp_path, rows))
    assert [line.split(" | ")[10] for line in text.splitlines()[2:5]] == ["0.50", "1.10", "0.97"]


def test_what_has_no_ratio_is_listed_with_its_peer(tmp_path):
    memory = Case("memory", "none", torch.float32, 64, 65536, backward=True).row("x", 31.4, "MB")
    host = Case("host", "none", torch.float32, 8, 4).row(
        "x", 50.0, "us", peers={"sdpa": 9.0}, best_peer="sdpa", ratio=0.18
    )
    text = tables.table("bench:cpu", results(tmp_path, [memory, host]))
    assert "forward+backward, 65,536 tokens | 31.4 MB | |" in text
    assert "4 tokens | 50 us | sdpa 9 |" in text


def test_without_results_it_says_how_to_get_them(tmp_path):
    assert tables.table("bench:cpu", tmp_path).startswith("Not measured yet: `onchip bench cpu")


def test_results_of_another_schema_are_refused(tmp_path):
    with pytest.raises(ValueError, match="schema 2, expected 1"):
        tables.table("bench:cpu", results(tmp_path, [], schema=2))


def test_an_unknown_table_is_named():
    with pytest.raises(ValueError, match="no table 'nonsense'"):
        tables.rewrite("<!-- nonsense -->\n<!-- /nonsense -->")


def test_rewriting_touches_the_marked_lines_only():
    text = "before\n<!-- options -->\nold\n<!-- /options -->\nafter <!-- a comment -->\n"
    new = tables.rewrite(text)
    assert new.startswith("before\n<!-- options -->\n\n| |") and "old" not in new
    assert new.endswith("|\n\n<!-- /options -->\nafter <!-- a comment -->\n")
    assert tables.rewrite(new) == new


def test_the_support_table_does_not_depend_on_the_machine(monkeypatch):
    before = sys.modules.get("triton")
    table = tables.support()
    assert sys.modules.get("triton") is before
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert tables.support() == table
    assert all(f"`{kernel}`" in table.splitlines()[0] for kernel in KERNELS)


def test_the_command_says_which_pages_changed(tmp_path, monkeypatch, capsys):
    (tmp_path / "README.md").write_text("<!-- options -->\n<!-- /options -->\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert tables.main() == 0 and "README.md: rewritten" in capsys.readouterr().out
    assert tables.main() == 0 and "README.md: up to date" in capsys.readouterr().out


def test_the_command_needs_a_source_tree(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert tables.main() == 2 and "source tree" in capsys.readouterr().err
