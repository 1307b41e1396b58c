"""What `python -m benchmarks approximate` prints, draws and puts into the documents."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.memory_report import Sheet, as_table
from onchip.cli.bench.harness import Row

EXAMPLES = Path(__file__).parents[1] / "examples"


def load_example() -> dict[str, Any]:
    """The names of examples/approximate.py."""
    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))  # examples import one another by name
    return runpy.run_path(str(EXAMPLES / "approximate.py"))


def _sheet(rows: list[Row], inputs: str, show: Callable[[Row], str]) -> Sheet:
    """Methods down, lengths across."""
    rows = [row for row in rows if row["mask"] == inputs]
    lengths = sorted({row["seqlen"] for row in rows})
    cells = {(row["kernel"], row["seqlen"]): show(row) for row in rows}
    body = [
        [name, *(cells.get((name, n), "") for n in lengths)]
        for name in dict.fromkeys(row["kernel"] for row in rows)
    ]
    return ["", *(f"{n:,}" for n in lengths)], body


def _share(row: Row) -> str:
    return f"{100 * row['relative']:.3g} %"


def _cost(row: Row) -> str:
    memory = "" if row["peak_mb"] is None else f", {row['peak_mb']:.3g} MB"
    return f"{row['value']:,.3g} ms{memory}"


SHEETS: dict[str, Callable[[list[Row]], Sheet]] = {
    "random": lambda rows: _sheet(rows, "random", _share),
    "model": lambda rows: _sheet(rows, "model", _share),
    "cost": lambda rows: _sheet(rows, "random", _cost),
}


def print_report(console: Any, rows: list[Row], picture: Path | None = None) -> None:
    for name, sheet in SHEETS.items():
        if any(row["mask"] == name or name == "cost" for row in rows):
            console.print(f"\n{name}", as_table(*sheet(rows)))
    if picture:
        plot(rows, picture)


def plot(rows: list[Row], path: Path) -> None:
    """The picture of the example."""
    example = load_example()
    columns = ("kernel", "mask", "seqlen", "relative", "value", "peak_mb")
    example["draw"]([example["Result"](*(row[name] for name in columns)) for row in rows], path)
