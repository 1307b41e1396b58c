"""What `python -m benchmarks models` prints at its end, draws, and puts into the documents."""

from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.memory_report import Sheet, Sheets, print_sheets
from benchmarks.plots import layer_title, model_ratios
from onchip.cli.bench.harness import Row
from onchip.cli.bench.plots import write

PASSES = ("forward", "backward", "prefill", "decode")
SENTENCE = 90  # characters of a refusal


def passes_sheet(rows: list[Row]) -> Sheet:
    """Models down, passes across: the ratio and the best peer; the share of the roofline where no
    peer runs; * if in doubt.
    """
    cells: dict[str, dict[str, Row]] = {}
    for row in rows:
        cells.setdefault(layer_title(row), {})[row["pass"]] = row
    body = []
    for name, of in cells.items():
        shown = [_cell(of[way]) if way in of else "" for way in PASSES]
        body.append([name, _heads(next(iter(of.values()))), *shown])
    return ["model", "heads x head_dim", *PASSES], body


def _heads(row: Row) -> str:
    heads, kv_heads, width = row["num_heads"], row["num_kv_heads"], str(row["head_dim"])
    grouped = str(heads) if heads == kv_heads else f"{heads}/{kv_heads}"
    return f"{grouped} x {width}" + (f"/{row['head_dim_v']}" if "head_dim_v" in row else "")


def _cell(row: Row) -> str:
    if row["ratio"] is not None:
        shown = f"{row['ratio']:.2f} {row['best_peer']}"
    else:
        share = row["roofline"]
        shown = "no peer" if share is None else f"{share:.0%} of the roofline"
    return shown + (" *" if row["doubts"] else "")


def refusals_sheet(rows: list[Row]) -> Sheet:
    """A line for each peer and reason, with the layers and passes that it refuses."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for row in rows:
        for peer, sentence in row["refusals"].items():
            at = found.setdefault((peer, _shorten(sentence)), {})
            at.setdefault(layer_title(row), []).append(row["pass"])
    named = lambda at: "; ".join(f"{name} ({', '.join(ways)})" for name, ways in at.items())
    return ["peer", "refusal", "calls"], [[*key, named(at)] for key, at in sorted(found.items())]


def _shorten(sentence: str) -> str:
    return sentence if len(sentence) <= SENTENCE else f"{sentence[: SENTENCE - 3].rstrip()}..."


SHEETS: Sheets = {"passes": passes_sheet, "refusals": refusals_sheet}
TITLES = {
    "passes": "Speed over the best peer's, by model and pass",
    "refusals": "Peers that cannot run a call",
}


def print_report(console: Any, rows: list[Row], picture: Path | None = None) -> None:
    print_sheets(console, rows, SHEETS, TITLES)
    if picture:
        write(picture, partial(model_ratios, rows))
