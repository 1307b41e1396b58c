"""Pictures of results files: `python -m onchip.cli.bench.plots [RESULTS.json PICTURE]`.

Without arguments, the pictures of the documents are drawn again. Speeds: TFLOP/s over the length,
one panel for each mask and head_dim, one line for each candidate. Memory: bytes over the length,
standard attention dashed where it was not measured. Loss curves: one over the other, and their
distance. A caption names the measurement.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from onchip.cli.bench.harness import Row

ROOT = Path(__file__).parents[3]
PICTURES = {
    "h200-forward": "forward.svg",
    "h200-backward": "backward.svg",
    "h200-peak": "peak.svg",
    "h200-train": "curves.svg",
}
BENCHES = ("forward", "backward", "peak")  # benchmarks with rows that can be drawn
OURS = {"color": "#c0392b", "linewidth": 2.2, "marker": "o", "markersize": 4, "zorder": 3}
PEERS = {
    "fa3": ("FlashAttention-3", "#1f5f8b"),
    "cudnn": ("cuDNN", "#2e8b57"),
    "fa2": ("FlashAttention-2", "#7f8c8d"),
    "efficient": ("memory-efficient SDPA", "#b7a57a"),
    "math": ("math SDPA", "#cccccc"),
    "flex": ("FlexAttention", "#8e6bb0"),
}
RC = {"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9, "svg.hashsalt": "onchip"}


def draw(document: dict[str, Any], path: Path) -> None:
    """The picture of a results file; ValueError if it has nothing that can be drawn."""
    import matplotlib

    with matplotlib.rc_context({**RC, "axes.spines.top": False, "axes.spines.right": False}):
        figure = _figure(document["rows"])
        figure.text(0.5, 0.005, caption(document["meta"]), ha="center", fontsize=7, color="#555555")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def caption(meta: dict[str, Any]) -> str:
    day = meta["date"][:10]
    return f"{meta['device']}, torch {meta['torch']}, commit {meta['commit']}, {day}"


def _figure(rows: list[Row]):
    if any(row["bench"] == "peak" for row in rows):
        return _memory([row for row in rows if row["bench"] == "peak"])
    if any(row["bench"] == "train curves" for row in rows):
        return curves(rows)
    speeds = [row for row in rows if row["unit"] == "TFLOP/s"]
    if not speeds:
        raise ValueError("there are neither speeds in TFLOP/s nor peaks of memory in these results")
    return _speeds(speeds)


def _paper(width: float, height: float):
    """An empty figure, with space for the caption below."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    caption = 0.2 / height
    layout = ConstrainedLayoutEngine(rect=(0, caption, 1, 1 - caption))
    return Figure(figsize=(width, height), layout=layout)


def _speeds(rows: list[Row]):
    plain = rows[0]["bench"]
    dims = sorted({row["head_dim"] for row in rows})
    masks = list(dict.fromkeys(row["mask"] for row in rows))
    figure = _paper(3.3 * len(dims), 2.6 * len(masks) + 0.6)
    grid = figure.subplots(len(masks), len(dims), sharex=True, squeeze=False)
    for i, mask in enumerate(masks):
        for j, dim in enumerate(dims):
            cell = [r for r in rows if (r["mask"], r["head_dim"]) == (mask, dim)]
            _panel(grid[i][j], cell, plain)
            grid[i][j].set_title(f"head_dim {dim}, {'no mask' if mask == 'none' else mask}")
    grid[0][0].set_ylabel("TFLOP/s")
    grid[-1][0].set_xlabel("tokens")
    labelled = {label: line for axes in grid.flat for line, label in _entries(axes)}
    figure.legend(labelled.values(), labelled, loc="outside upper center", ncols=6, frameon=False)
    return figure


def _entries(axes) -> Iterable[tuple[Any, str]]:
    return zip(*axes.get_legend_handles_labels(), strict=True)


def _panel(axes, rows: list[Row], plain: str) -> None:
    ours = [row for row in rows if row["bench"] == plain]
    for name, (label, color) in PEERS.items():
        points = {row["seqlen"]: row["peers"][name] for row in ours if name in row["peers"]}
        if points:
            axes.plot(*_xy(points), label=label, color=color, linewidth=1.2)
    named = {row["seqlen"]: row["value"] for row in rows if row["bench"] == f"{plain} triton"}
    if named:
        axes.plot(*_xy(named), **{**OURS, "linewidth": 1.2}, linestyle=":", label="onchip, triton")
    axes.plot(*_xy({row["seqlen"]: row["value"] for row in ours}), **OURS, label="onchip")
    _tokens(axes, [row["seqlen"] for row in rows])
    axes.set_ylim(bottom=0)


def _xy(points: dict[int, float]) -> tuple[list[int], list[float]]:
    lengths = sorted(points)
    return lengths, [points[n] for n in lengths]


def _tokens(axes, lengths: Iterable[int]) -> None:
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


def _memory(rows: list[Row]):
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    figure = _paper(4.2 * len(passes), 3.4)
    for axes, name in zip(figure.subplots(1, len(passes), squeeze=False)[0], passes, strict=True):
        chosen = [row for row in rows if row["pass"] == name]
        _peaks(axes, chosen)
        axes.set_title(f"{name}, beyond the inputs")
        axes.set_ylabel(chosen[0]["unit"])
        axes.set_xlabel("tokens")
        axes.legend(frameon=False)
    return figure


def _peaks(axes, rows: list[Row]) -> None:
    standard = {row["seqlen"]: row["peers"]["standard"] for row in rows}
    measured = {row["seqlen"]: standard[row["seqlen"]] for row in rows if row["peer_measured"]}
    beyond = {n: value for n, value in standard.items() if n >= max(measured, default=0)}
    gray = {"color": "#7f8c8d", "linewidth": 1.2}
    axes.plot(*_xy(measured), **gray, marker="s", markersize=4, label="standard attention")
    axes.plot(*_xy(beyond), **gray, linestyle="--", label="its square law")
    axes.plot(*_xy({row["seqlen"]: row["value"] for row in rows}), **OURS, label="onchip")
    axes.set_yscale("log")
    _tokens(axes, standard)


def curves(rows: list[Row]):
    """Loss curves one over the other, and below how far from the first of SDPA's they are."""
    loss_curves = [row["curves"] for row in rows if row["bench"] == "train curves"]
    if not loss_curves:
        raise ValueError("there are no loss curves in these results: --only must name curves")
    figure = _paper(7, 4.6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    base = list(loss_curves[-1])[1]
    for name, curve in reversed(loss_curves[-1].items()):
        label, color = PEERS.get(name, ("onchip", OURS["color"]))
        style = {"color": color, "linewidth": 1.0, "label": label}
        above.plot(curve, **style)
        if name != base:
            pairs = zip(curve, loss_curves[-1][base], strict=True)
            below.semilogy([abs(x - y) / y for x, y in pairs], **style)
    above.set_ylabel("loss, nats")
    above.legend(frameon=False)
    below.set(xlabel="step", ylabel=f"apart from {PEERS[base][0]}")
    return figure


def main(args: list[str]) -> int:
    if len(args) not in (0, 2):
        print("usage: python -m onchip.cli.bench.plots [RESULTS.json PICTURE]", file=sys.stderr)
        return 2
    measured = ROOT / "benchmarks/results"
    pairs = [(measured / f"{stem}.json", ROOT / "docs" / name) for stem, name in PICTURES.items()]
    known = [(source, picture) for source, picture in pairs if source.exists()]
    for source, picture in [(Path(args[0]), Path(args[1]))] if args else known:
        draw(json.loads(source.read_text(encoding="utf-8")), picture)
        print(f"{picture}: drawn from {source}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
