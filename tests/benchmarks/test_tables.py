"""Tables contain every measured row and every `supports` result."""

import json
import sys

import pytest
import torch

from benchmarks import tables
from onchip.cli.bench.harness import Case, meta
from onchip.core.dispatch import BUILT_IN, get_backend


def results(tmp_path, rows, schema=1):
    folder = tmp_path / "benchmarks" / "results"
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
    assert "| 0.90 |" in text and "onchip bench cpu --json benchmarks/results/cpu.json" in text


def test_every_row_is_there(tmp_path):
    rows = [contest(n, r) for n, r in ((512, 0.5), (1024, 1.1), (2048, 0.97))]
    text = tables.table("bench:cpu:rows", results(tmp_path, rows))
    assert [line.split(" | ")[7] for line in text.splitlines()[2:5]] == ["0.50", "1.10", "0.97"]


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
    assert all(f"`{kernel}`" in table.splitlines()[0] for kernel in BUILT_IN)


def test_every_option_of_a_backend_has_a_row():
    """Except those that change no score by themselves."""
    inner = {"has_positions", "first_head", "wide_grads", "page_dtype", "has_tree_mask"}
    rows = {name for fields in tables.SUPPORT_ROWS.values() for name in fields}
    declared = set().union(*(get_backend(name).options for name in BUILT_IN))
    assert declared - inner - {"deterministic"} == rows


def test_the_command_says_which_pages_changed(tmp_path, monkeypatch, capsys):
    (tmp_path / "README.md").write_text("<!-- options -->\n<!-- /options -->\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert tables.main() == 0 and "README.md: rewritten" in capsys.readouterr().out
    assert tables.main() == 0 and "README.md: up to date" in capsys.readouterr().out


def test_the_command_needs_a_source_tree(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert tables.main() == 2 and "source tree" in capsys.readouterr().err


def gpu_row(seqlen, ratio, doubts=()):
    row = Case("forward", "none", torch.bfloat16, 128, seqlen).row(
        "hopper", 600.0, "TFLOP/s", peers={"fa3": 600 / ratio}, best_peer="fa3", ratio=ratio
    )
    return row | {"band": [ratio - 0.01, ratio + 0.01], "doubts": list(doubts)}


def gpu_results(tmp_path):
    root = results(tmp_path, [gpu_row(512, 1.02), gpu_row(16384, 0.5, ["no fa3 in this run"])])
    folder = root / "benchmarks" / "results"
    (folder / "cpu.json").rename(folder / "h200-forward.json")
    return root


def test_rows_that_do_not_count_are_in_no_mean(tmp_path):
    text = tables.table("bench:h200-forward", gpu_results(tmp_path))
    assert "| forward, no mask, 512 tokens | fa3 | forward | 1.02 |" in text
    assert "1 rows that do not count (no fa3 in this run)" in text
    assert "`onchip bench forward --json benchmarks/results/h200-forward.json`" in text


def test_bands_and_doubts_are_shown_row_by_row(tmp_path):
    text = tables.table("bench:h200-forward:rows", gpu_results(tmp_path))
    assert "| 1.02 (1.01 to 1.03) |" in text
    assert "| 0.50 (0.49 to 0.51), does not count: no fa3 in this run |" in text


def test_rows_name_their_page_size_and_kv_heads(tmp_path):
    row = gpu_row(512, 1.02)
    rows = [row | {"page_size": size, "num_kv_heads": 4} for size in (1, None)]
    text = tables.table("bench:cpu:rows", results(tmp_path, rows))
    assert "| forward, pages of 1 | bf16 |" in text and "| forward | bf16 |" in text
    assert text.count(f"{row['num_heads']} over 4 x 128 |") == 2


def test_a_grid_has_its_lengths_across(tmp_path):
    text = tables.table("bench:h200-forward:grid", gpu_results(tmp_path))
    assert text.startswith("| TFLOP/s (ratio) | 512 | 16,384 |")
    assert "| head_dim 128, no mask | 600 (1.02) | 600 (0.50) * |" in text
    with pytest.raises(ValueError, match="no form 'heap'"):
        tables.table("bench:h200-forward:heap", tmp_path)


def test_kernels_side_by_side(tmp_path):
    case = lambda batch, heads: Case("versions", "causal", torch.bfloat16, 128, 4096, batch, heads)
    rows = [case(4, 16).row(name, x, "TFLOP/s") for name, x in (("v1", 9.0), ("v2", 400.0))]
    rows.append(case(1, 8).row("v2", 300.0, "TFLOP/s"))
    text = tables.table("bench:cpu:kernels", results(tmp_path, rows))
    assert text.startswith("| TFLOP/s | v1 | v2 |")
    assert "| 4 x 4,096 tokens, 16 heads of 128, causal | 9 | 400 |" in text
    assert "| 1 x 4,096 tokens, 8 heads of 128, causal | | 300 |" in text


def test_steps_go_down_with_what_each_bought(tmp_path):
    steps = {"none": ("v2", "TMA"), "causal": ("v2", "TMA", "longest first")}
    rows = [
        Case("ablation", mask, torch.bfloat16, 64, 4096).row(
            name, 500.0, "TFLOP/s", ratio=1.25 if i else None
        )
        for mask, names in steps.items()
        for i, name in enumerate(names)
    ]
    lines = tables.table("bench:cpu:steps", results(tmp_path, rows)).splitlines()
    assert lines[0].endswith("| head_dim 64, no mask, 4,096 | head_dim 64, causal, 4,096 |")
    assert lines[2:5] == [
        "| v2 | 500 | 500 |",
        "| TMA | 500 (1.25) | 500 (1.25) |",
        "| longest first | | 500 (1.25) |",
    ]
