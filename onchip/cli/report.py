"""The demo's results: tables in the terminal, and one self-contained HTML file."""

import html
import io
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any, cast

from onchip import __version__
from onchip.cli.demo import (
    CHECKED_ROWS,
    HEAD_DIM,
    MEMORY_CAP_BYTES,
    METHODS,
    NUM_HEADS,
    Measurement,
    Results,
)
from onchip.core import explain

LABELS = {"standard": "standard attention", "sdpa": "torch SDPA", "onchip": "onchip"}
COLUMNS = ("tokens", "mask", "method", "time", "peak extra memory", "max error")
SHORT_LABELS = {**LABELS, "standard": "standard"}
NEXT_STEPS = (
    ("doctor", "the kernels that this machine can run, and why it cannot run the others"),
    ("explain --seqlen 8192 --causal", "the kernel that serves a call, its flops and its bytes"),
    ("bench cpu --quick", "the ratios to torch SDPA; each row is checked first"),
    ("bench cpu --json cpu.json", "the same in full, as a results file"),
)


def program() -> str:
    """The command that started this program, so that suggested commands can be copied."""
    script = Path(sys.argv[0])
    if script.name == "onchip" and shutil.which("onchip") != str(script):
        return os.path.relpath(script)
    return "python -m onchip" if script.name == "__main__.py" else "onchip"


def human_bytes(n: float | None) -> str:
    """1,234,567 -> '1.23 MB' (powers of 1000)."""
    return "n/a" if n is None else explain.human_bytes(int(n))


def human_time(seconds: float | None) -> str:
    """0.00123 -> '1.23 ms'."""
    if seconds is None:
        return "n/a"
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def short_length(n: float) -> str:
    return f"{n / 1024:g}k" if n >= 1024 else f"{n:g}"


def cells(m: Measurement) -> tuple[str, str, str]:
    """Time, peak memory, error."""
    if m.refused_bytes is not None:
        return "refused", f"needs {human_bytes(m.refused_bytes)}", ""
    memory = ("≥ " if m.is_below_resolution else "") + human_bytes(m.held_bytes)
    return human_time(m.time_s), memory, f"{m.error:.1e}"


def groups(measurements: Iterable[Measurement]) -> list[tuple[str, str, list[Measurement]]]:
    """(tokens, mask, measurements) of each problem, in the order of measurement."""
    problem = lambda m: (f"{m.seqlen:,}", m.mask)
    return [(*key, list(group)) for key, group in groupby(measurements, problem)]


def refusals(results: Results) -> list[str]:
    """One sentence for each refused call."""
    budget = human_bytes(results.budget_bytes)
    return [
        f"Standard attention over {m.seqlen:,} tokens: refused to allocate"
        f" {m.refused_bytes:,} bytes ({human_bytes(m.refused_bytes)}) for S and P;"
        f" the budget here is {budget}."
        for m in results.lengths
        if m.refused_bytes is not None
    ]


def memory_notes(results: Results) -> list[str]:
    """The meaning of "≥", if a measurement has it."""
    if not any(m.is_below_resolution for m in results.lengths + results.masked):
        return []
    return [
        "Memory with ≥: the measured peak is less than the size of the result, because the process"
        " reused memory that it had already. The least that the call can hold is shown, as a hollow"
        " point in the chart."
    ]


def omissions(results: Results) -> list[str]:
    """What was not measured, a sentence for each reason."""
    lengths = ", ".join(f"{n:,}" for n in results.omitted)
    why = [f"Left out to stay near a minute on this machine: {lengths} tokens."] if lengths else []
    if results.interrupted_at:
        why.append(f"Interrupted during {results.interrupted_at}; the later parts are missing.")
    return why


def merge_sentence(results: Results) -> str:
    a, b = results.merge_cut
    if a + b == 0:
        return "Merged sets of keys were not measured."
    return (
        f"Attention over {a:,} and over {b:,} keys, merged by merge_states, differs from attention"
        f" over all {a + b:,} by at most {results.merge_gap:.1e}."
    )


def masked_speedups(results: Results) -> dict[str, float]:
    """mask -> the speed of onchip relative to SDPA with the dense mask."""
    times = {(m.mask, m.method): m.time_s for m in results.masked if m.time_s}
    return {
        mask: times[mask, "sdpa"] / time_s
        for (mask, method), time_s in times.items()
        if method == "onchip" and (mask, "sdpa") in times
    }


def print_results(console, results: Results) -> None:
    for measurements in (results.lengths, results.masked):
        console.print(_terminal_table(measurements))
    sentences = refusals(results) + omissions(results) + memory_notes(results)
    sentences.append(merge_sentence(results))
    for mask, ratio in masked_speedups(results).items():
        sentences.append(f"{mask}: {ratio:.1f}x the speed of SDPA with the dense mask.")
    for sentence in sentences:
        console.print(f"- {sentence}", highlight=False)
    console.print("\n[bold]Try next[/bold]")
    for command, what in NEXT_STEPS:
        console.print(f"  [cyan]{program()} {command}[/cyan]\n      {what}", highlight=False)


def _terminal_table(measurements: list[Measurement]):
    from rich.table import Table

    table = Table("tokens", "mask", "method")
    for column in ("time", "peak memory", "error vs fp64"):
        table.add_column(column, justify="right")
    for tokens, mask, group in groups(measurements):
        table.add_section()
        for m in group:
            first = (tokens, mask) if m is group[0] else ("", "")
            style = "bold" if m.method == "onchip" else None
            table.add_row(*first, SHORT_LABELS[m.method], *cells(m), style=style)
    return table


# Plots. matplotlib draws in placeholder colours, and `inline_svg` replaces them by variables of the
# style sheet: one SVG serves light and dark screens. Text stays text, in the font of the page.

PLACEHOLDERS = {
    "#010101": "currentColor",
    "#020202": "var(--grid)",
    "#030303": "var(--standard)",
    "#040404": "var(--sdpa)",
    "#050505": "var(--onchip)",
}
INK, GRID = "#010101", "#020202"
COLOURS = {"standard": "#030303", "sdpa": "#040404", "onchip": "#050505"}
LINES = {
    "standard": {"marker": "s", "markersize": 5, "linewidth": 1.8},
    "sdpa": {"marker": "o", "markersize": 9, "linewidth": 3.5, "alpha": 0.55},
    "onchip": {"marker": "o", "markersize": 4.5, "linewidth": 1.8},
}
RC = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
}


def length_plot(results: Results, value: str, label: Callable[[float], str]) -> str:
    """One quantity over the lengths, log-log, one line per method."""

    def draw(axes: Any) -> None:
        for method in METHODS:
            points = [m for m in results.lengths if m.method == method]
            measured = [(m.seqlen, getattr(m, value)) for m in points if getattr(m, value)]
            if measured:
                axes.plot(*zip(*measured, strict=True), color=COLOURS[method], **LINES[method])
            if measured and value == "held_bytes":
                _draw_lower_bounds(axes, points)
                _draw_refused(axes, measured, points)
        ticks = sorted({m.seqlen for m in results.lengths})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks, [short_length(n) for n in ticks])
        axes.yaxis.set_major_formatter(lambda y, _: label(y))
        axes.minorticks_off()
        axes.set_ylim(*whole_decades(axes.get_ylim()))
        axes.set_xlabel("tokens")

    return plot_svg(f"{value}-", draw)


def whole_decades(limits: tuple[float, float]) -> tuple[float, float]:
    """Limits of a log axis, extended to powers of ten and to at least three decades: on fewer,
    noise looks like a trend."""
    low, high = (math.log10(x) for x in limits)
    low, high = math.floor(low), math.ceil(high)
    margin = 1 if high - low < 3 else 0
    return 10.0 ** (low - margin), 10.0 ** (high + margin)


def _draw_lower_bounds(axes, points: list[Measurement]) -> None:
    """Hollow points at lower bounds of a call's memory."""
    bounds = [(m.seqlen, m.held_bytes) for m in points if m.is_below_resolution]
    if bounds:
        style = {"markersize": 9, "markerfacecolor": "none", "linestyle": ""}
        colour = COLOURS[points[0].method]
        axes.plot(*zip(*bounds, strict=True), color=colour, marker="o", **style)


def _draw_refused(axes, measured: list[tuple[int, int]], points: list[Measurement]) -> None:
    """Crosses at the memory that refused calls would have taken."""
    refused = [(m.seqlen, m.refused_bytes) for m in points if m.refused_bytes]
    if refused:
        colour = COLOURS[points[0].method]
        axes.plot(
            *zip(*measured[-1:], *refused, strict=True), color=colour, linestyle=":", linewidth=1.5
        )
        axes.plot(*zip(*refused, strict=True), color=colour, marker="x", linestyle="", markersize=8)
        n, need = refused[-1]
        axes.annotate(
            f"refused: {human_bytes(need)}",
            (n, need),
            (-10, -3),
            textcoords="offset points",
            ha="right",
        )


def masked_plot(results: Results) -> str:
    """Bars of time: SDPA with a dense mask above, onchip below, for each mask."""
    speedups = masked_speedups(results)
    times = {(m.mask, m.method): m.time_s or 0.0 for m in results.masked}

    def draw(axes: Any) -> None:
        for i, mask in enumerate(speedups):
            for j, method in enumerate(("sdpa", "onchip")):
                y, time_s = i + 0.4 * j, times[mask, method]
                note = human_time(time_s) + (f", {speedups[mask]:.1f}x the speed" if j else "")
                axes.barh(y, time_s, height=0.34, color=COLOURS[method])
                axes.annotate(note, (time_s, y), (6, 0), textcoords="offset points", va="center")
        axes.set_yticks([i + 0.2 for i in range(len(speedups))], list(speedups))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.25 * max(times.values(), default=1.0))
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter(lambda x, _: human_time(x) if x else "0")
        axes.grid(visible=False, axis="y")

    return plot_svg("masked-", draw)


def plot_svg(prefix: str, draw: Callable[[Any], None]) -> str:
    """The plot of draw(axes) as inline SVG in the style of the page. prefix: of its ids."""
    import matplotlib
    from matplotlib.figure import Figure

    file = io.StringIO()
    with matplotlib.rc_context(cast(Any, {**RC, "svg.hashsalt": prefix})):
        figure = Figure(figsize=(5.4, 3.7), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=0)
        draw(axes)
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return inline_svg(file.getvalue(), prefix)


def inline_svg(svg: str, prefix: str) -> str:
    """The <svg> element alone, sized and coloured by the page, its ids unique in the page."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'\b(id="|url\(#|href="#)', rf"\g<1>{prefix}", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    for placeholder, colour in PLACEHOLDERS.items():
        svg = svg.replace(placeholder, colour)
    return svg.strip()


def write_html(results: Results, path: Path) -> None:
    """Write one file that links to no other."""
    path.write_text(page(results), encoding="utf-8")


def page(results: Results) -> str:
    escape = html.escape
    fill = {
        "version": __version__,
        "machine": escape(results.machine),
        "problem": f"{NUM_HEADS} heads of {HEAD_DIM}, {results.dtype}, one sequence",
        "cards": "".join(_card(*card) for card in headline(results)),
        "legend": _legend(METHODS),
        "legend_masked": _legend(METHODS[1:]),
        "time_plot": length_plot(results, "time_s", human_time),
        "memory_plot": length_plot(results, "held_bytes", human_bytes),
        "error_plot": length_plot(results, "error", lambda y: f"{y:.0e}"),
        "masked_plot": masked_plot(results),
        "notes": "".join(
            f"<li>{escape(x)}</li>"
            for x in refusals(results) + omissions(results) + memory_notes(results)
        ),
        "merge": escape(merge_sentence(results)),
        "columns": "".join(f"<th>{name}</th>" for name in COLUMNS),
        "table": _table(results),
        "method": "".join(f"<li>{escape(x)}</li>" for x in method_notes(results)),
        "next": "".join(
            f"<li><code>{program()} {c}</code><span>{escape(w)}</span></li>" for c, w in NEXT_STEPS
        ),
    }
    return Template((Path(__file__).parent / "report.html").read_text(encoding="utf-8")).substitute(
        fill
    )


def headline(results: Results) -> list[tuple[str, str]]:
    """(number, description), for the top of the page."""
    by_key = {(m.method, m.seqlen): m for m in results.lengths}
    cards = []
    shared = [m for m in results.lengths if m.method == "standard" and m.peak_bytes]
    if shared:
        last = shared[-1]
        ours = by_key["onchip", last.seqlen]
        is_measured = not (ours.is_below_resolution or last.is_below_resolution)
        if is_measured and ours.peak_bytes and last.peak_bytes and ours.time_s and last.time_s:
            less, faster = last.peak_bytes / ours.peak_bytes, last.time_s / ours.time_s
            cards.append(
                (f"{less:,.0f}x", f"less memory than standard attention at {last.seqlen:,} tokens")
            )
            cards.append(
                (f"{faster:.1f}x", f"the speed of standard attention at {last.seqlen:,} tokens")
            )
    cards += [
        (f"{ratio:.1f}x", f"the speed of SDPA with a dense mask: {mask}")
        for mask, ratio in masked_speedups(results).items()
    ]
    return cards


def method_notes(results: Results) -> list[str]:
    return [
        "Time: the shortest of several runs. The methods alternate, in reverse order every other"
        " round. Fp64 is not timed.",
        "Memory: the peak of one call, without its inputs, with its result. On a CPU it is the"
        " system's high-water mark of the resident set, reset before the call; on a GPU it is the"
        " allocator's.",
        f"Error: largest absolute difference from attention in fp64, over {CHECKED_ROWS} query rows"
        " of every head: the first, the last and a fixed random sample.",
        "Standard attention is refused if S and P together exceed"
        f" {human_bytes(results.budget_bytes)}: a quarter of the memory that was available when the"
        f" demo began, and at most {human_bytes(MEMORY_CAP_BYTES)}.",
        f"The whole demo took {results.elapsed_s:.0f} s.",
    ]


def _card(number: str, what: str) -> str:
    return f"<div class=card><b>{html.escape(number)}</b><span>{html.escape(what)}</span></div>"


def _legend(methods: Iterable[str]) -> str:
    return "".join(f'<span class="key {m}">{LABELS[m]}</span>' for m in methods)


def _table(results: Results) -> str:
    rows = []
    for tokens, mask, group in groups(results.lengths + results.masked):
        for m in group:
            first = (tokens, mask) if m is group[0] else ("", "")
            texts = zip(COLUMNS, (*first, LABELS[m.method], *cells(m)), strict=True)
            body = "".join(f'<td data-name="{name}">{html.escape(x)}</td>' for name, x in texts)
            rows.append(f'<tr class="{m.method}{" first" if m is group[0] else ""}">{body}</tr>')
    return "".join(rows)
