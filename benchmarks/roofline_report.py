"""What `python -m benchmarks roofline` prints and puts into the documents."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.memory_report import Sheet, as_table
from benchmarks.roofline import BAR, HELD_OUT, PARTS, gap
from onchip.cli.bench.harness import Row
from onchip.cli.bench.plots import short_count

MODEL = (
    "Consumers of 64 rows go round tensor cores, exp unit with lanes, and shared memory of their"
    " processor, as in a closed queueing network; a tile costs one step more than it has; what one"
    " buffer cannot hide of moving own rows is added, and so are launches. Clock, rates and"
    " bandwidth are those of onchip/cost/hardware.py. No factor was fitted, but the structure"
    " was decided with the forward and both backwards in view; the short calls were held out."
)


def cells_sheet(rows: list[Row], cell: Callable[[Row], str] | None = None) -> Sheet:
    """Pass, head_dim and mask down, lengths across: microseconds, and how far off they are."""
    shown = cell or (lambda row: f"{row['value']:,.0f} ({gap(row):+.0f} %)")
    rows = [row for row in rows if row["bench"] != HELD_OUT]
    lengths = sorted({row["seqlen"] for row in rows})
    lines: dict[tuple[str, str, str], dict[int, Row]] = {}
    for row in sorted(rows, key=lambda row: PARTS.index(row["bench"])):
        mask = "no mask" if row["mask"] == "none" else row["mask"]
        lines.setdefault((row["bench"], str(row["head_dim"]), mask), {})[row["seqlen"]] = row
    body = []
    for line, cells in lines.items():
        numbers = [shown(cells[n]) if n in cells else "" for n in lengths]
        body.append([*line, cells[max(cells)]["binds"], *numbers])
    return ["pass", "dim", "mask", "binds", *(short_count(n) for n in lengths)], body


def held_out_sheet(rows: list[Row]) -> Sheet:
    """Short calls, which were not used to fit the model; a bound where the pipeline is not
    modelled.
    """
    body = []
    for row in rows:
        if row["bench"] == HELD_OUT:
            mask = "no mask" if row["mask"] == "none" else row["mask"]
            shape = f"{row['batch']} x {row['seqlen']}", str(row["head_dim"]), mask
            times = (f"{x:.1f}" for x in (row["value"], row["peers"]["measured"]))
            off = f"{gap(row):+.0f} %" if row["modelled"] else f"bound, {gap(row):+.0f} %"
            body.append([*shape, *times, off])
    return ["tokens", "dim", "mask", "predicted, us", "measured, us", "off"], body


SHEETS: dict[str, Callable[[list[Row]], Sheet]] = {
    "cells": cells_sheet,
    "held-out": held_out_sheet,
}


def print_report(console: Any, rows: list[Row], picture: Path | None = None) -> None:
    if picture:
        raise ValueError("roofline draws nothing")
    console.print("How far the predicted times are from the measured ones, in per cent:")
    console.print("", as_table(*cells_sheet(rows, lambda row: f"{gap(row):+.0f}")), "")
    say = lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
    held_out = [row for row in rows if row["bench"] == HELD_OUT and row["modelled"]]
    seen = [row for row in rows if row["bench"] != HELD_OUT]
    for name, chosen in (("that the model was made with", seen), ("held out", held_out)):
        inside = sum(abs(gap(row)) <= BAR for row in chosen)
        say(f"{inside} of {len(chosen)} cells {name} lie within {BAR:.0f} %.")
    say(MODEL)
