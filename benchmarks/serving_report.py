"""What `python -m benchmarks serving` prints at its end, draws, and puts into the documents."""

from pathlib import Path
from typing import Any

from benchmarks.memory_report import GREY, Sheet, Sheets, print_sheets
from onchip.cli.bench.harness import Row

COLOUR = "#238c43"


def served_sheet(rows: list[Row]) -> Sheet:
    """The whole workload, with all pages and with few."""
    heads = ["model", "pages", "preempted by", "tokens/s", "lost", "s", "first token", "then"]
    heads += ["of the roofline", "steps", "ms each", "host", "swapped", "again"]
    return heads, [_served(row) for row in rows if row["bench"] in ("throughput", "capped")]


def _served(row: Row) -> list[str]:
    capped = row["bench"] == "capped"
    return [
        row["mask"],
        f"{row['kv_bytes'] / 1e9:.3g} GB",
        row["kernel"] if capped else "",
        f"{row['value']:,.0f}",
        f"{row['lost']:.0f} %" if capped else "",
        f"{row['seconds']:.2f}",
        _waits(row, "first_token_ms"),
        _waits(row, "between_tokens_ms"),
        _percent(row["roofline_share"]),
        f"{row['steps']:,}",
        f"{row['step_ms']['mean']:.2f}",
        _percent(row["host_share"]),
        str(row["swapped"]),
        str(row["recomputed"]),
    ]


def allocation_sheet(rows: list[Row]) -> Sheet:
    """One budget of pages by policy; the ratio is to the first of them."""
    rows = [row for row in rows if row["bench"] == "allocation"]
    heads = [
        "policy",
        "pages",
        "run at a time",
        "mean",
        "tokens/s",
        "ratio",
        "steps",
        "first token",
    ]
    body = [
        [
            row["kernel"],
            f"{row['kv_bytes'] / 1e9:.3g} GB",
            f"at most {row['seats']}",
            f"{row['output_tokens'] / row['steps']:.0f}",
            f"{row['value']:,.0f}",
            f"{row['value'] / rows[0]['value']:.2f}",
            f"{row['steps']:,}",
            _waits(row, "first_token_ms"),
        ]
        for row in rows
    ]
    return heads, body


def peers_sheet(rows: list[Row]) -> Sheet:
    """Tokens a second of everyone on the same part of the workload."""
    rows = [row for row in rows if row["bench"] == "peers"]
    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    heads = ["model", "requests", "tokens", "onchip", *names, "ratio to the best"]
    number = lambda value: "" if value is None else f"{value:,.0f}"
    body = [
        [
            row["mask"],
            f"{row['requests']:,}",
            f"{row['output_tokens']:,}",
            number(row["value"]),
            *(number(row["peers"].get(name)) for name in names),
            "" if row["ratio"] is None else f"{row['ratio']:.1f}",
        ]
        for row in rows
    ]
    return heads, body


def samples_sheet(rows: list[Row]) -> Sheet:
    """Many samples of one prompt; ratios are to the row without a cascade."""
    heads = ["model", "samples", "prompt", "shared pages", "tokens/s", "ratio"]
    heads += ["decoding", "ratio", "first tokens", "steps with a cascade"]
    ratio = lambda value: "" if value is None else f"{value:.2f}"
    body = [
        [
            row["mask"],
            f"{row['batch']}",
            f"{row['seqlen']:,}",
            "read once" if row["cascade_steps"] else "read by each",
            f"{row['value']:,.0f}",
            ratio(row["ratio"]),
            f"{row['decode_per_s']:,.0f}",
            ratio(row.get("decode_ratio")),
            f"{row['first_token_ms']:,.0f} ms",
            f"{row['cascade_steps']:,} of {row['steps']:,}",
        ]
        for row in rows
        if row["bench"] == "samples"
    ]
    return heads, body


def prefill_sheet(rows: list[Row]) -> Sheet:
    """The first token of long prompts; ratios are to the row in 16 bits."""
    ratio = lambda value: "" if value is None else f"{value:.2f}"
    body = [
        [
            row["mask"],
            f"{row['seqlen']:,}",
            row["kernel"],
            f"{row['value']:,.1f} ms",
            ratio(row["ratio"]),
            ratio(row.get("predicted_ratio")),
        ]
        for row in rows
        if row["bench"] == "prefill"
    ]
    return ["model", "prompt", "attention", "first token", "ratio", "predicted"], body


def http_sheet(rows: list[Row]) -> Sheet:
    heads = ["load", "s", "answered", "tokens/s", "first token", "then"]
    heads += ["fairness", "MiB at the end", "grown by"]
    return heads, [_http(row) for row in rows if row["bench"] in ("http", "crowd")]


def _http(row: Row) -> list[str]:
    return [
        _load(row),
        f"{row['span_s']:g}",
        f"{row['answered']:,} of {row['requests']:,}",
        f"{row['value']:,.0f}",
        _waits(row, "first_token_ms"),
        _waits(row, "between_pieces_ms"),
        f"{row['fairness']:.3f}",
        f"{row['memory_mib'][-1]:.0f}",
        f"{row['memory_growth_mib']:.1f} MiB",
    ]


def _load(row: Row) -> str:
    if row["bench"] == "http":
        return f"{row['rate']:g} requests a second"
    fewest, most = row["answers"]
    return f"{row['clients']:,} clients, {fewest} to {most} answers each"


def _waits(row: Row, name: str) -> str:
    number = lambda ms: f"{ms:.1f}" if ms < 100 else f"{ms:,.0f}"
    return " / ".join(number(row[name][at]) for at in ("p50", "p99")) + " ms" if row[name] else ""


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


SHEETS: Sheets = {
    "served": served_sheet,
    "allocation": allocation_sheet,
    "samples": samples_sheet,
    "prefill": prefill_sheet,
    "peers": peers_sheet,
    "http": http_sheet,
}
TITLES = {
    "allocation": "One budget of pages, by who may have them",
    "samples": "Many samples of one prompt",
    "prefill": "The first token of a long prompt, with attention in FP8",
    "peers": "A part of the workload, in the same run",
    "http": "A server on the CPU under load",
}


def print_report(console: Any, rows: list[Row], picture: Path | None = None) -> None:
    """Print the tables that fit a terminal; each row was printed in full when it was measured."""
    print_sheets(console, rows, SHEETS, TITLES)
    if picture:
        plot(rows, picture)


def plot(rows: list[Row], path: Path) -> None:
    """A bar for each row that has tokens a second."""
    import matplotlib
    from matplotlib.figure import Figure

    bars = {f"{r['mask']}, {r['bench']}, {r['kernel']}": r["value"] for r in reversed(rows)
            if r["unit"] == "tokens/s"}  # fmt: skip
    style = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), GREY)
    with matplotlib.rc_context({**style, "svg.fonttype": "none", "svg.hashsalt": "serving"}):
        figure = Figure(figsize=(8.6, 0.6 + 0.35 * len(bars)), layout="constrained")
        axes = figure.subplots()
        drawn = axes.barh(list(bars), list(bars.values()), color=COLOUR)
        axes.bar_label(drawn, fmt="{:,.0f}", padding=3, color=GREY)
        axes.set_xlabel("output tokens a second")
        axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, transparent=True, dpi=150, metadata=metadata)
