"""Pictures of results files: `python -m benchmarks.plots [RESULTS.json PICTURE]`.

Without arguments, the pictures of the documents are drawn again: speeds, as `onchip bench` draws
them; memory over the length; loss curves, one over the other, and their distance.
"""

import json
import sys
from pathlib import Path
from typing import Any

from onchip.cli.bench.harness import Row
from onchip.cli.bench.plots import OURS, PEERS, label_tokens, paper, save, speeds, xy

ROOT = Path(__file__).parents[1]
PICTURES = {
    "h200-forward": "forward.svg",
    "h200-backward": "backward.svg",
    "h200-peak": "peak.svg",
    "h200-train": "curves.svg",
}


def draw(document: dict[str, Any], path: Path) -> None:
    """The picture of a results file; ValueError if it has nothing that can be drawn."""
    save(document, path, _figure)


def _figure(rows: list[Row]):
    if any(row["bench"] == "peak" for row in rows):
        return _memory([row for row in rows if row["bench"] == "peak"])
    if any(row["bench"] == "train curves" for row in rows):
        return curves(rows)
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
