"""Pictures of speeds: TFLOP/s over the length, one panel for each mask and head_dim, one line for
each candidate. A caption names the measurement.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from onchip.cli.bench.harness import Row, group_size

OURS = {"color": "#c0392b", "linewidth": 2.2, "marker": "o", "markersize": 4, "zorder": 3}
PEERS = {
    "fa3": ("FlashAttention-3", "#1f5f8b"),
    "fa4": ("FlashAttention-4", "#3d9bb3"),
    "cudnn": ("cuDNN", "#2e8b57"),
    "fa2": ("FlashAttention-2", "#7f8c8d"),
    "efficient": ("memory-efficient SDPA", "#b7a57a"),
    "math": ("math SDPA", "#cccccc"),
    "flex": ("FlexAttention", "#8e6bb0"),
}
RC = {
    **{
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 9,
        "svg.hashsalt": "onchip",
    },
    **{"axes.spines.top": False, "axes.spines.right": False},
}


def draw(document: dict[str, Any], path: Path) -> None:
    """The picture of a results file; ValueError if it has no speeds."""
    save(document, path, speeds)


def save(document: dict[str, Any], path: Path, figure_of: Callable[[list[Row]], Any]) -> None:
    """Write figure_of(rows) of a results file, with the caption, in the style of all pictures."""

    def make_figure() -> Any:
        figure = figure_of(document["rows"])
        figure.text(0.5, 0.005, caption(document["meta"]), ha="center", fontsize=7, color="#555555")
        return figure

    write(path, make_figure)


def write(path: Path, make_figure: Callable[[], Any]) -> None:
    """Write a figure that is made in the style of all pictures."""
    import matplotlib

    with matplotlib.rc_context(RC):
        make_figure().savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def caption(meta: dict[str, Any]) -> str:
    day = meta["date"][:10]
    return f"{meta['device']}, torch {meta['torch']}, commit {meta['commit']}, {day}"


def paper(width: float, height: float):
    """An empty figure, with space for the caption below."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    caption = 0.2 / height
    layout = ConstrainedLayoutEngine(rect=(0, caption, 1, 1 - caption))
    return Figure(figsize=(width, height), layout=layout)


def speeds(rows: list[Row]):
    rows = [row for row in rows if row["unit"] == "TFLOP/s" and group_size(row) == 1]
    if not rows:
        raise ValueError("there are no speeds in TFLOP/s without grouped heads in these results")
    plain = rows[0]["bench"]
    dims = sorted({row["head_dim"] for row in rows})
    masks = list(dict.fromkeys(row["mask"] for row in rows))
    figure = paper(3.3 * len(dims), 2.6 * len(masks) + 0.6)
    grid = figure.subplots(len(masks), len(dims), sharex=True, squeeze=False)
    for i, mask in enumerate(masks):
        for j, dim in enumerate(dims):
            cell = [r for r in rows if (r["mask"], r["head_dim"]) == (mask, dim)]
            _panel(grid[i][j], cell, plain)
            grid[i][j].set_title(f"head_dim {dim}, {'no mask' if mask == 'none' else mask}")
    grid[0][0].set_ylabel("TFLOP/s")
    grid[-1][0].set_xlabel("tokens")
    entries = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in grid.flat)
    labelled = {label: line for pairs in entries for line, label in pairs}
    figure.legend(labelled.values(), labelled, loc="outside upper center", ncols=6, frameon=False)
    return figure


def _panel(axes, rows: list[Row], plain: str) -> None:
    ours = [row for row in rows if row["bench"] == plain]
    for name, (label, color) in PEERS.items():
        points = {row["seqlen"]: row["peers"][name] for row in ours if name in row["peers"]}
        if points:
            axes.plot(*xy(points), label=label, color=color, linewidth=1.2)
    named = {row["seqlen"]: row["value"] for row in rows if row["bench"] == f"{plain} triton"}
    if named:
        axes.plot(*xy(named), **{**OURS, "linewidth": 1.2}, linestyle=":", label="onchip, triton")
    axes.plot(*xy({row["seqlen"]: row["value"] for row in ours}), **OURS, label="onchip")
    label_tokens(axes, [row["seqlen"] for row in rows])
    axes.set_ylim(bottom=0)


def xy(points: dict[int, float]) -> tuple[list[int], list[float]]:
    lengths = sorted(points)
    return lengths, [points[n] for n in lengths]


def label_tokens(axes, lengths: Iterable[int]) -> None:
    axes.set_xscale("log", base=2)
    ticks = sorted(set(lengths))[:: 2 if len(set(lengths)) > 7 else 1]
    axes.set_xticks(ticks, [short_count(n) for n in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.25)


def short_count(n: int) -> str:
    """1024 -> 1k, 1048576 -> 1M."""
    for size, letter in ((1 << 20, "M"), (1 << 10, "k")):
        if n >= size and n % size == 0:
            return f"{n // size}{letter}"
    return str(n)
