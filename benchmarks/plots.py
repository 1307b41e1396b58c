"""Pictures of results files: `python -m benchmarks.plots [RESULTS.json PICTURE]`.

Without arguments, the pictures of the documents are drawn again: speeds, as `onchip bench` draws
them; memory over the length; loss curves, one over the other, and their distance; models, with
the ratio of every pass as a bar; time over bytes of every algorithm; memory of a training step with
tangents.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import hbm
from onchip.cli.bench.harness import Row
from onchip.cli.bench.plots import OURS, PEERS, label_tokens, paper, save, speeds, xy
from onchip.cost.hardware import H200

ROOT = Path(__file__).parents[1]
MEANFLOW = "MeanFlow memory"  # a `bench` of rows
PICTURES = {
    "h200-forward": "forward.svg",
    "h200-backward": "backward.svg",
    "h200-peak": "peak.svg",
    "h200-train": "curves.svg",
    "h200-models": "models.svg",
    "h200-hbm": "hbm.svg",
    "h200-score-mods": "meanflow.svg",
}


def draw(document: dict[str, Any], path: Path) -> None:
    """The picture of a results file; ValueError if it has nothing that can be drawn."""
    save(document, path, _figure)


def _figure(rows: list[Row]):
    if any(row["bench"] == "peak" for row in rows):
        return _memory([row for row in rows if row["bench"] == "peak"])
    if any(row["bench"] == "train curves" for row in rows):
        return curves(rows)
    if any(row["bench"] == "models" for row in rows):
        return model_ratios(rows)
    if any(row["bench"] == "hbm" for row in rows):
        return bytes_and_times(rows)
    if any(row["bench"] == MEANFLOW for row in rows):
        return meanflow_memory([row for row in rows if row["bench"] == MEANFLOW])
    return speeds(rows)


def _memory(rows: list[Row]):
    """Bytes over the length, standard attention dashed where it was not measured."""
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    figure = paper(4.2 * len(passes), 3.4)
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
    axes.plot(*xy(measured), **gray, marker="s", markersize=4, label="standard attention")
    axes.plot(*xy(beyond), **gray, linestyle="--", label="its square law")
    axes.plot(*xy({row["seqlen"]: row["value"] for row in rows}), **OURS, label="onchip")
    axes.set_yscale("log")
    label_tokens(axes, standard)


def meanflow_memory(rows: list[Row]):
    """Bytes of a training step over the length, a panel for each way to differentiate it."""
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    figure = paper(4.2 * len(passes), 3.4)
    for axes, name in zip(figure.subplots(1, len(passes), squeeze=False)[0], passes, strict=True):
        chosen = [row for row in rows if row["pass"] == name]
        math = {r["seqlen"]: r["peers"]["math"] for r in chosen if "math" in r["peers"]}
        label, _ = PEERS["math"]
        axes.plot(*xy(math), color="#7f8c8d", linewidth=1.2, marker="s", markersize=4, label=label)
        axes.plot(*xy({r["seqlen"]: r["value"] for r in chosen}), **OURS, label="onchip")
        axes.set_yscale("log")
        label_tokens(axes, [row["seqlen"] for row in chosen])
        unit = f"{chosen[0]['unit']} beyond the inputs"
        axes.set(title=f"MeanFlow, {name}", ylabel=unit, xlabel="tokens")
        axes.legend(frameon=False)
    return figure


def curves(rows: list[Row]):
    """Loss curves one over the other, and below how far from the first of SDPA's they are."""
    loss_curves = [row["curves"] for row in rows if row["bench"] == "train curves"]
    if not loss_curves:
        raise ValueError("there are no loss curves in these results: --only must name curves")
    figure = paper(7, 4.6)
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


def layer_title(row: Row) -> str:
    """The model of a row, and the kind of its layer if it has several."""
    return f"{row['model']}, {row['layer']}" if row["layer"] else row["model"]


def model_ratios(rows: list[Row]):
    """A panel for each pass, a bar for each model: the ratio to the best peer, in its colour."""
    rows = [row for row in rows if row["bench"] == "models" and row["ratio"] is not None]
    if not rows:
        raise ValueError("there are no models with a peer in these results")
    titles = list(dict.fromkeys(map(layer_title, rows)))
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    figure = paper(1.6 + 2.2 * len(passes), 1.2 + 0.2 * len(titles))
    panels = figure.subplots(1, len(passes), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, passes, strict=True):
        own = [row for row in rows if row["pass"] == name]  # without bars, a label has no colour
        for peer in dict.fromkeys(row["best_peer"] for row in own):
            chosen = [r for r in own if r["best_peer"] == peer]
            label, color = PEERS.get(peer, (peer, "#999999"))
            places = [titles.index(layer_title(r)) for r in chosen]
            axes.barh(places, [r["ratio"] for r in chosen], color=color, label=label)
        axes.axvline(1.0, color="#333333", linewidth=0.8)
        axes.set_title(name)
        axes.set_xlabel("speed over the best peer's")
    panels[0].set_yticks(range(len(titles)), titles)
    panels[0].invert_yaxis()
    entries = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in panels)
    labelled = {label: bars for pairs in entries for bars, label in pairs}
    figure.legend(labelled.values(), labelled, loc="outside upper center", ncols=6, frameon=False)
    return figure


ALGORITHMS = {
    "standard": ("standard attention", "#7f8c8d"),
    "compiled": ("standard, compiled", "#b7a57a"),
    "v1": ("v1", "#e08e45"),
    "v2": ("v2", "#8e6bb0"),
    "v3": ("v3", "#3d9bb3"),
    "fa2": ("FlashAttention-2", "#1f5f8b"),
    "onchip": ("onchip", OURS["color"]),
}


def bytes_and_times(rows: list[Row]):
    """Figure 2 of FlashAttention, measured: time over bytes, tiles of v1, blocks of a mask."""
    panels = {
        "time over bytes": [row for row in rows if row["bench"] == "hbm" and row["hbm_bytes"]],
        "v1: keys of a tile": [row for row in rows if row["bench"] == "hbm tiles"],
        "onchip: share of the blocks": [row for row in rows if row["bench"] == "hbm blocks"],
    }
    drawn = {title: chosen for title, chosen in panels.items() if chosen}
    if not drawn:
        raise ValueError("no algorithm of these results was timed and counted")
    draws = dict(zip(panels, (_time_over_bytes, _over_tiles, _over_blocks), strict=True))
    figure = paper(4.2 * len(drawn), 3.6)
    for axes, (title, chosen) in zip(
        figure.subplots(1, len(drawn), squeeze=False)[0], drawn.items(), strict=True
    ):
        draws[title](axes, chosen)
        axes.set_title(title)
        axes.legend(frameon=False, fontsize=7)
    return figure


def _time_over_bytes(axes, rows: list[Row]) -> None:
    """A point for every algorithm, length and pass; the line is the bandwidth of an H200."""
    for name, (label, color) in ALGORITHMS.items():
        for marker, way in (("o", "forward"), ("s", "backward")):
            of_pass = [p for p in hbm.points([r for r in rows if r["pass"] == way])]
            chosen = [point for point in of_pass if point.name == name]
            places = [[p.hbm_bytes / 1e9 for p in chosen], [p.ms for p in chosen]]
            shown = label if way == "forward" else None
            axes.scatter(*places, s=14, marker=marker, color=color, label=shown)
    ends = [min(p.hbm_bytes for p in hbm.points(rows)), max(p.hbm_bytes for p in hbm.points(rows))]
    least = [1e3 * x / H200.memory_bytes_s for x in ends]
    axes.plot([x / 1e9 for x in ends], least, color="#333333", linewidth=0.8, label="HBM alone")
    axes.set(xscale="log", yscale="log", xlabel="GB over HBM", ylabel="ms (squares: backward)")


def _over_tiles(axes, rows: list[Row]) -> None:
    """Times, and dashed the bytes at an H200's bandwidth."""
    for row, color in zip(rows, ("#e08e45", "#1f5f8b", "#2e8b57"), strict=False):
        label, keys = f"{row['seqlen']:,} tokens", lambda name: int(name.partition("/")[2])
        axes.plot(
            *xy({keys(n): ms for n, ms in row["peers"].items()}), "o-", color=color, label=label
        )
        moved = {n: x for n, x in row["hbm_bytes"].items() if n in row["peers"]}
        least = {keys(n): 1e3 * x / H200.memory_bytes_s for n, x in moved.items()}
        axes.plot(*xy(least), "--", color=color, linewidth=0.8, label=f"{label}, HBM alone")
    axes.set(xscale="log", yscale="log", xlabel="keys of a tile", ylabel="ms, forward")


def _over_blocks(axes, rows: list[Row]) -> None:
    share = lambda row: round(100 * hbm.density_of(row["kernel"]))
    axes.plot(*xy({share(row): row["value"] for row in rows}), **OURS, label="forward + backward")
    axes.set(xlabel="% of the blocks", ylabel="ms", ylim=(0, None))


def main(args: list[str]) -> int:
    if len(args) not in (0, 2):
        print("usage: python -m benchmarks.plots [RESULTS.json PICTURE]", file=sys.stderr)
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
