"""What `python -m benchmarks train` prints at its end, draws, and puts into the documents."""

from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.memory_report import Sheet, Sheets, print_sheets
from benchmarks.plots import curves
from onchip.cli.bench.harness import Row
from onchip.cli.bench.plots import write

NAMES = {"gpt2": "GPT-2 medium", "llama": "Llama 1.1B", "bert": "BERT-large"}
KINDS = {"train": "", "train padded": ", packed against padded", "train packed": ", both packed"}


def steps_sheet(rows: list[Row]) -> Sheet:
    """A line for each model and length: tokens a second of everybody, and the ratio."""
    rows = [row for row in rows if row["bench"] in KINDS]
    heads = ["model", "tokens", "batch", "onchip, tokens/s", "of the peak", "others, tokens/s"]
    return [*heads, "ratio to the best"], [_step(row) for row in rows]


def _step(row: Row) -> list[str]:
    return [
        f"{NAMES.get(row['mask'], row['mask'])}{KINDS[row['bench']]}",
        f"{row['seqlen']:,}",
        str(row["batch"]),
        f"{row['value']:,.0f}",
        f"{row['mfu']['onchip']:.0%}" if row["mfu"] else "",
        ", ".join(f"{name} {value:,.0f}" for name, value in row["peers"].items()),
        _ratio(row),
    ]


def _ratio(row: Row) -> str:
    if row["ratio"] is None:
        return ""
    low, high = row["band"]
    doubts = "".join(f"; does not count: {doubt}" for doubt in row["doubts"])
    return f"{row['ratio']:.3f} [{low:.3f}, {high:.3f}]{doubts}"


def curves_sheet(rows: list[Row]) -> Sheet:
    """How far curves come apart: root mean square and largest difference over all steps."""
    heads = ["curves", "steps", "apart, RMS", "apart, largest", "last loss"]
    return heads, [line for row in rows if row["bench"] == "train curves" for line in _pairs(row)]


def _pairs(row: Row) -> list[list[str]]:
    (ours, _), (base, _), (other, _) = row["curves"].items()
    apart = {ours: row["value"], other: row["peers"][row["best_peer"]]}
    return [
        [
            f"{name} and {base}",
            str(len(row["curves"][name])),
            f"{value:.2e}",
            f"{row['largest'][name]:.2e}",
            f"{row['curves'][name][-1]:.4f} and {row['curves'][base][-1]:.4f}",
        ]
        for name, value in apart.items()
    ]


SHEETS: Sheets = {"models": steps_sheet, "curves": curves_sheet}
TITLES = {"models": "Steps of training", "curves": "Loss curves, same weights and batches"}


def print_report(console: Any, rows: list[Row], picture: Path | None = None) -> None:
    print_sheets(console, rows, SHEETS, TITLES)
    if picture:
        write(picture, partial(curves, rows))
