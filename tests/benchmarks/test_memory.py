"""The memory benchmark: its arithmetic, its rows, and the figures that are committed."""

import json
from pathlib import Path

import pytest

from benchmarks import markdown, memory, memory_report, tables
from onchip.cli import bench, main
from onchip.cli.bench.harness import Session, check_thresholds

ROOT = Path(__file__).parents[2]
COMMITTED = json.loads((ROOT / "benchmarks" / "results" / "memory.json").read_text())["rows"]


@pytest.fixture(scope="module")
def quick():
    session = Session(quick=True)
    memory.run(session)
    assert not session.refused
    return session.rows


def test_the_arithmetic_of_a_13b_model():
    model = memory.MODEL
    assert model.token_bytes == 2 * 40 * 40 * 128 * 2 == 800 * 1024
    for gib, left_gib, reservations in ((40, 11.8, 7), (80, 47.8, 30)):
        slots = model.slots(gib)
        assert slots * model.token_bytes / 2**30 == pytest.approx(left_gib, abs=0.06)
        assert slots // model.max_length == reservations


def test_rows_have_the_columns_of_the_schema(quick):
    plain = memory._case("x", "y").row("z", 1.0, "s")
    assert all(plain.keys() <= row.keys() for row in quick)
    kinds = {row["bench"] for row in quick}
    assert kinds == {"allocation", "sensitivity", "page size", "sharing", "simulation"}
    for row in quick:
        if "slots" in row:
            assert row["used"] + memory.waste(row) == pytest.approx(1)  # a request always waits


def test_pages_are_held_against_every_reservation(quick):
    rows = [r for r in quick if r["bench"] == "allocation" and r["kernel"] == memory.PAGED]
    assert [r["mask"] for r in rows] == ["chat", "instruct", "uniform"]
    for row in rows:
        assert set(row["peers"]) == set(memory.RESERVED)
        assert row["ratio"] == row["value"] / max(row["peers"].values()) > 1


def test_larger_pages_never_waste_less(quick):
    for mask in ("chat", "instruct"):
        rows = [r for r in quick if (r["bench"], r["mask"]) == ("page size", mask)]
        wastes = [memory.waste(r) for r in rows]
        assert len(wastes) == 3 and wastes == sorted(wastes)


@pytest.mark.parametrize("name", ["max", "oracle buddy", "paged 16"])
def test_the_committed_figures_are_what_the_code_computes(name):
    """A simulation has no noise: if this fails, run the benchmark and write its file again."""
    rows = memory.allocation("allocation", 40, memory.CHAT, (name,), memory.LIFETIMES[40])
    selected = {"bench": "allocation", "kernel": name, "mask": "chat", "gib": 40}
    [committed] = [row for row in COMMITTED if selected.items() <= row.items()]
    for column in ("value", "used", "reserved", "internal", "external", "again", "slots"):
        assert rows[0][column] == pytest.approx(committed[column]), column


def test_the_committed_figures_reach_the_thresholds():
    assert all(verdict.ok for verdict in check_thresholds(COMMITTED, memory.THRESHOLDS))


def test_claims_that_do_not_hold_get_a_verdict():
    claims = memory_report.claims(COMMITTED)
    verdicts = {claim.published: claim.verdict for claim in claims}
    assert len(verdicts) == 8
    tutorial = next(text for claim, text in verdicts.items() if "about 8 sequences" in claim)
    assert tutorial.startswith("does not follow: 30 reservations of 2,048 fit")
    assert any("not for instruct" in text for text in verdicts.values())


def test_a_verdict_depends_on_the_rows():
    bent = [row | {"used": row.get("used", 0) / 2} for row in COMMITTED]
    used = lambda rows: memory_report.claims(rows)[2].verdict
    assert used(COMMITTED).startswith("follows") and used(bent).startswith("does not follow")
    pages = lambda rows: memory_report.claims(rows)[1].verdict
    none = dict.fromkeys(("reserved", "internal", "external"), 0.0)
    assert "not for instruct" in pages(COMMITTED)
    assert pages([row | none for row in COMMITTED]) == "follows for chat, instruct, uniform"


@pytest.mark.parametrize("form", memory_report.SHEETS)
def test_the_documents_can_have_every_table(form):
    text = tables.table(f"bench:memory:{form}")
    heads, body = memory_report.SHEETS[form](COMMITTED)
    assert body and text.startswith(markdown.table(heads, body) + "\n\n")
    assert "a simulation, seed 0" in text


def test_the_command_prints_tables_and_draws(quick, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(memory, "run", lambda session: session.run([("", lambda: quick)]))
    picture, rows = tmp_path / "memory.svg", tmp_path / "memory.json"
    assert main(["bench", "memory", "--quick", "--plot", str(picture), "--json", str(rows)]) == 0
    out = capsys.readouterr().out
    assert "819,200 (800 KiB)" in out and "oracle buddy" in out and "Poisson" in out
    assert [title in out for title in memory_report.TITLES.values()] == [True] * 3 + [False]
    assert "pages of 16" in picture.read_text()
    assert json.loads(rows.read_text())["rows"] == quick


def test_options_of_other_benchmarks_are_refused(capsys):
    assert main(["bench", "memory", "--seqlens", "64"]) == 2
    assert main(["bench", "cpu", "--plot", "x.svg"]) == 2
    assert "cpu draws nothing; --plot is for:" in capsys.readouterr().err
    assert bench.report("cpu") is None
