"""The ring benchmark: its simulation, its tables, its picture."""

import json
from pathlib import Path

import pytest

from onchip.bench import ring, ring_report, ring_simulation, tables
from onchip.bench.harness import Session, judge
from onchip.cli import main
from onchip.parallel.machines import LINKS, Fabric
from onchip.parallel.simulate import Step

ROOT = Path(__file__).parents[2]
COMMITTED = json.loads((ROOT / "bench" / "results" / "simulated-ring.json").read_text())["rows"]


@pytest.fixture(scope="module")
def quick():
    session = Session(quick=True, simulate=True)
    ring.run(session)
    assert not session.refused
    return session.rows


def test_rows_have_the_columns_of_the_schema(quick):
    plain = ring_simulation._case("x", Step(1, 1)).row("y", 1.0, "s")
    assert all(plain.keys() <= row.keys() for row in quick)
    assert {row["bench"] for row in quick} == {"ring", "scaling", "link", "hide", "simulation"}


def test_the_committed_figures_are_what_the_code_computes(quick):
    """A simulation has no noise: if this fails, run the benchmark and write its file again."""
    asked = ("bench", "kernel", "pass", "mask", "seqlen", "devices", "fabric", "link")
    key = lambda row: tuple(row.get(name) for name in asked)
    committed = {key(row): row for row in COMMITTED}
    assert len(committed) == len(COMMITTED)
    for row in quick[:-1]:
        assert row["value"] == pytest.approx(committed[key(row)]["value"])
        assert row.get("step_s") == pytest.approx(committed[key(row)].get("step_s"))


def test_the_committed_figures_reach_the_bars():
    verdicts = judge(COMMITTED, ring.BARS)
    assert len(verdicts) == 2 and all(verdict.ok for verdict in verdicts)


def test_every_table_has_lines(quick):
    for name, sheet in ring_report.SHEETS.items():
        heads, body = sheet(COMMITTED)
        assert body and all(len(line) == len(heads) for line in body), name
    assert "1,024" in ring_report.SHEETS["forward"](COMMITTED)[0]


def test_tables_name_the_command_that_made_them():
    text = tables.table("bench:simulated-ring:hide")
    command = "onchip bench ring --simulate --json bench/results/simulated-ring.json"
    assert f"`{command}`" in text and "NVLink 4" in text


def test_the_length_that_simulation_finds_is_below_the_formula():
    """Its kernels are no faster than those of the formula, and merging gives messages more time."""
    for row in (r for r in COMMITTED if r["bench"] == "hide" and r["gb_s"] < 100):
        assert 0.75 * row["value"] < row["simulated_tokens"] < row["value"]


@pytest.mark.parametrize(
    "seconds, said",
    [(1.5e-4, "150 us"), (0.0123, "12.3 ms"), (90, "1.5 min"), (3.2e12, "101,402 years")],
)
def test_times_are_told_as_people_tell_them(seconds, said):
    assert ring_report.span_of(seconds) == said


def test_the_command_prints_tables_and_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ring_simulation, "CONTEXTS", (10**5, 10**8))
    picture, results = tmp_path / "ring.svg", tmp_path / "ring.json"
    flags = ["--simulate", "--quick", "--plot", str(picture), "--json", str(results)]
    assert main(["bench", "ring", *flags]) == 0
    printed = capsys.readouterr().out
    assert "messages hide" in printed and "zigzag" in printed and "Efficiency:" in printed
    assert "rank 3" in picture.read_text() and json.loads(results.read_text())["rows"]


def test_only_ring_simulates(capsys):
    assert main(["bench", "memory", "--simulate"]) == 2
    assert "--simulate is for: ring" in capsys.readouterr().err


def test_a_link_that_is_slow_is_seen():
    step = Step(8 * 2048, 8)
    fast, slow = (
        ring_simulation.step_row("link", step, Fabric(LINKS[name]))
        for name in ("NVLink 4", "100 GbE")
    )
    assert fast["hides"] and not slow["hides"]
    assert fast["exposed_s"] < 1e-4 < slow["exposed_s"] < slow["step_s"]
