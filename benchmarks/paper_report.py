"""What `python -m benchmarks paper` prints, draws and puts into the documents."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.memory_report import GREY, Sheet
from onchip.cli.bench.harness import Row

PUBLISHED, PREDICTED, MEASURED = "#d9691f", "#2f81f7", "#238c43"
MARKS = {
    "published": (PUBLISHED, "s"),
    "predicted": (PREDICTED, ""),
    "measured": (MEASURED, "o"),
}
SAID = (
    "published: by the text named. predicted: onchip.cost, bytes of fp16, an A100 where a time"
    " is asked. measured: here; bytes by the ledger of the executed paper, one head multiplied by"
    " their number; memory and times on this CPU, times of one thread by its own clock."
)


def claims_sheet(rows: list[Row]) -> Sheet:
    heads = ["", "figure", "published", "predicted", "measured", "verdict"]
    body, before = [], ""
    for row in rows:
        if "verdict" not in row:
            continue
        section = row["bench"]
        numbers = [number_with_unit(row[name], row["unit"]) for name in MARKS]
        title = row["kernel"] + (f" ({row['source']})" if row["published"] is not None else "")
        body.append([section if section != before else "", title, *numbers, row["verdict"]])
        before = section
    return heads, body


def number_with_unit(value: float | None, unit: str) -> str:
    """Three digits and the unit; nothing for None."""
    if value is None:
        return ""
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return digits + (unit if unit == "x" else f" {unit}".rstrip())


SHEETS: dict[str, Callable[[list[Row]], Sheet]] = {"claims": claims_sheet}


def print_report(console: Any, rows: list[Row], picture: Path | None = None) -> None:
    """Three lines for each figure: a table of six columns needs more than a terminal has."""
    say = lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
    for section, title, *numbers, outcome in claims_sheet(rows)[1]:
        if section:
            console.print(f"\n[bold]{section}[/bold]", highlight=False)
        say(f"  {title}")
        say("    " + ", ".join(f"{x} {n}" for x, n in zip(numbers, MARKS, strict=True) if x))
        if outcome:
            say(f"    {outcome}")
    say(f"\n{SAID}")
    if picture:
        plot(rows, picture)


def plot(rows: list[Row], path: Path) -> None:
    """Figure 2 of the paper, and memory by length, as the extension of path says."""
    import matplotlib
    from matplotlib.figure import Figure

    style = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), GREY)
    style |= {"axes.edgecolor": GREY, "font.size": 9}
    with matplotlib.rc_context({**style, "svg.fonttype": "none", "svg.hashsalt": "paper"}):
        figure = Figure(figsize=(9.6, 6.4), layout="constrained")
        panels = figure.subplots(2, 2).flat
        for axes, draw in zip(panels, (_traffic, _blocks, _sparsity, _memory), strict=True):
            draw(axes, rows)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25, linewidth=0.6)
        entries = [axes.get_legend_handles_labels() for axes in figure.axes]
        labelled = {label: h for hs, labels in entries for h, label in zip(hs, labels, strict=True)}
        figure.legend(
            labelled.values(), labelled, ncols=5, loc="outside upper center", frameon=False
        )
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, transparent=True, dpi=150, metadata=metadata)


def _find(rows: list[Row], section: str, start: str) -> dict[str, Row]:
    """Rows of a section with this prefix of the title, by the rest of the title."""
    chosen = (r for r in rows if r["bench"] == section and r["kernel"].startswith(start))
    return {r["kernel"].removeprefix(start): r for r in chosen}


def _traffic(axes: Any, rows: list[Row]) -> None:
    found = _find(rows, "figure 2, left", "HBM traffic, ")
    for shift, (name, (colour, _)) in enumerate(MARKS.items()):
        heights = [row[name] or 0.0 for row in found.values()]
        places = [i + 0.27 * (shift - 1) for i in range(len(found))]
        bars = axes.bar(places, heights, width=0.25, color=colour, label=name)
        axes.bar_label(bars, fmt="%.3g", fontsize=8, color=GREY)
    axes.set_xticks(range(len(found)), ["standard", "FlashAttention"])
    axes.set_ylabel("GB over HBM")
    axes.set_title("GPT-2 medium, forward and backward", fontsize=10, loc="left")


def _lines(axes: Any, points: dict[float, Row]) -> None:
    """Every kind of figure over x: predictions as a line, the others as marks upon it."""
    for name, (colour, mark) in MARKS.items():
        xy = [(x, row[name]) for x, row in points.items() if row[name] is not None]
        if not xy:
            continue
        look = {"color": colour, "label": name, "linestyle": "none", "zorder": 3}
        if name == "predicted":
            look |= {"linestyle": "-", "linewidth": 2, "zorder": 2}
        size = 9 if name == "published" else 5
        axes.plot(*zip(*xy, strict=True), marker=mark, markersize=size, **look)


def _blocks(axes: Any, rows: list[Row]) -> None:
    found = _find(rows, "figure 2, middle", "HBM traffic, blocks of ")
    _lines(axes, {int(n): row for n, row in found.items()})
    axes.set_xscale("log", base=2)
    axes.set_xticks([int(n) for n in found], list(found))
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("keys of a block")
    axes.set_ylabel("GB over HBM")
    axes.set_title("v1, forward, by the size of its K/V blocks", fontsize=10, loc="left")


def _sparsity(axes: Any, rows: list[Row]) -> None:
    found = _find(rows, "figure 2, right", "time at ")
    points = {float(title.partition("%")[0]): row for title, row in found.items()}
    _lines(axes, points)
    axes.set_xlim(0, 105)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("per cent of the blocks")
    axes.set_ylabel("time over that of no mask")
    axes.set_title("block-sparse, 4,096 tokens, forward and backward", fontsize=10, loc="left")


def _memory(axes: Any, rows: list[Row]) -> None:
    for name in ("standard", "flash"):
        found = _find(rows, "by length", f"memory, {name}, ")
        points = {int(n.replace(",", "")): row for n, row in found.items()}
        _lines(axes, points)
        x, last = list(points.items())[-1]
        axes.annotate(name, (x, last["predicted"]), xytext=(-30, 2), ha="right", fontsize=9,
                      textcoords="offset points", color=GREY)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([1024, 4096, 16384, 65536], ["1k", "4k", "16k", "64k"])
    axes.minorticks_off()
    axes.set_xlabel("tokens")
    axes.set_ylabel("MiB")
    axes.set_title("memory beyond the inputs, one head of 128", fontsize=10, loc="left")
