"""What `python -m benchmarks memory` prints, draws and puts into the documents."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.memory import ALLOCATORS, CHAT, GIB, LIFETIMES, MODEL, RESERVED, simulate, waste
from onchip.cli.bench.harness import Row

SPREAD = ("sensitivity", "max")
PARTS = ("used", "reserved", "internal", "external")
Sheet = tuple[list[str], list[list[str]]]  # heads and body of a table
Sheets = dict[str, Callable[[list[Row]], Sheet]]
percent = lambda x: f"{100 * x:.1f}"

ASSUMED = (
    "Lengths: chat is lognormal with the means of ShareGPT in the PagedAttention paper (161 tokens"
    " of prompt, 338 of output) and sigma 1; even is chat with sigma 0.5, skewed with 1.5; instruct"
    " has the means of Alpaca (19 and 58) and sigma 1; uniform is 100 to 1,024 for both. A request"
    " of more than 2,048 tokens is drawn again: the mean output of chat is then 304.",
    "Arrivals are Poisson, 1.5 times what would fill every slot. A step gives every sequence that"
    " runs a token; a prompt is stored when it is admitted. How long a step takes is not selected.",
    "In per cent of the slots, averaged over time: used hold a token; reserved will hold one of the"
    " sequence that has them; internal never will; external are free, but not for the request at"
    " the head of the queue. Waste is all but the first.",
    "again: tokens computed a second time after a preemption, per token generated. Newcomers leave"
    " 1 % of the pages alone, in the row that says so 5 %.",
    "Saved, by number of samples or beams: per cent of the pages that they hold unshared. copied:"
    " tokens copied on write, per token generated, of the most; contiguous: tokens copied if each"
    " is in one piece. turnover: how likely it is, at each step, that a beam is replaced by a child"
    " of any beam.",
)


def arithmetic(rows: list[Row]) -> list[str]:
    """From the model to the slots, in one line for each GPU."""
    m = MODEL
    lines = [
        f"bytes per token = 2 x {m.num_layers} layers x {m.num_kv_heads} kv heads x {m.head_dim} x"
        f" {m.itemsize} bytes = {m.token_bytes:,} ({m.token_bytes / 1024:g} KiB)"
    ]
    for gib in sorted({row["gib"] for row in rows if "gib" in row}):
        left, slots = 0.9 * gib - m.weights_bytes / GIB, m.slots(gib)
        lines.append(
            f"{gib} GiB: 0.9 x {gib} - {m.weights_bytes / GIB:.1f} of weights = {left:.1f} GiB ="
            f" {slots:,} slots = {slots // m.max_length} sequences of {m.max_length:,}"
        )
    return lines


def allocation_sheet(rows: list[Row]) -> Sheet:
    heads = ["GiB", "lengths", "allocator", "running", *PARTS, "waste", "again"]
    body, before = [], ("", "")
    for row in rows:
        if row["bench"] not in ("allocation", "sensitivity"):
            continue
        where = (str(row["gib"]), row["mask"])
        again = "" if row["kernel"] in RESERVED else f"{row['again']:.2f}"
        parts = [percent(x) for x in (*(row[part] for part in PARTS), waste(row))]
        shown = where if where != before else ("", "")
        body.append([*shown, row["kernel"], f"{row['value']:.1f}", *parts, again])
        before = where
    return heads, body


def page_size_sheet(rows: list[Row]) -> Sheet:
    """A line for each page size, two columns for each workload."""
    rows = [row for row in rows if row["bench"] == "page size"]
    workloads = list(dict.fromkeys(row["mask"] for row in rows))
    cells = {(r["page_size"], r["mask"]): [percent(waste(r)), f"{r['value']:.1f}"] for r in rows}
    sizes = list(dict.fromkeys(row["page_size"] for row in rows))
    heads = ["page size", *(f"{w} {what}" for w in workloads for what in ("waste", "running"))]
    return heads, [[str(n), *(c for w in workloads for c in cells[n, w])] for n in sizes]


def sharing_sheet(rows: list[Row]) -> Sheet:
    """A line for each workload and way to share, a column for each width; then what was copied."""
    lines: dict[tuple[str, str], dict[int, Row]] = {}
    for row in rows:
        if row["bench"] == "sharing":
            lines.setdefault((row["mask"], row["kernel"]), {})[row["width"]] = row
    widths = list(dict.fromkeys(width for line in lines.values() for width in line))
    body = []
    for name, line in lines.items():
        most = line[max(line)]
        copied = f"{most['copied']:.2f}", f"{most['moved']:.1f}"
        body.append([*name, *(f"{line[width]['value']:.1f}" for width in widths), *copied])
    return ["lengths", "saved by", *map(str, widths), "copied", "contiguous"], body


class MemoryClaim(NamedTuple):
    """A published figure, what was simulated, and whether the one follows from its assumptions."""

    published: str
    simulated: str
    verdict: str


def claims(rows: list[Row]) -> list[MemoryClaim]:
    """Every published figure that the rows can confirm or contradict."""
    waste = (_max_claim(rows), _paged_claim(rows), _used_claim(rows))
    sequences = (_more_claim(rows), _tutorial_claim(rows), _bytes_claim())
    return [*waste, *sequences, _samples_claim(rows), _beams_claim(rows)]


def claims_sheet(rows: list[Row]) -> Sheet:
    return ["published", "here", "verdict"], [list(claim) for claim in claims(rows)]


def _find(rows: list[Row], kernel: str, mask: str = "chat", gib: int = 40) -> Row:
    selected = {"bench": "allocation", "kernel": kernel, "mask": mask, "gib": gib}
    return next(row for row in rows if selected.items() <= row.items())


def _wastes(rows: list[Row], kernel: str) -> dict[str, list[float]]:
    """Per workload: the waste in per cent, on each GPU."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if (row["bench"], row["kernel"]) == ("allocation", kernel):
            found.setdefault(row["mask"], []).append(100 * waste(row))
    return found


def _listed(wastes: dict[str, list[float]]) -> str:
    span = lambda values: " and ".join(f"{x:.1f}" for x in values)
    return "; ".join(f"{name} {span(values)} %" for name, values in wastes.items())


def _max_claim(rows: list[Row]) -> MemoryClaim:
    found = _wastes(rows, "max")
    inside = [name for name, values in found.items() if all(60 <= x <= 80 for x in values)]
    spread = [f"{100 * waste(r):.1f}" for r in rows if (r["bench"], r["kernel"]) == SPREAD]
    verdict = (
        f"follows for {', '.join(inside) or 'none'}, where other spreads of the same means give"
        f" {' and '.join(spread)}; it is a fact about lengths"
    )
    return MemoryClaim("contiguous allocation wastes 60-80 % (vLLM, 2023)", _listed(found), verdict)


def _paged_claim(rows: list[Row]) -> MemoryClaim:
    found = _wastes(rows, "paged 16")
    inside = [name for name, values in found.items() if all(x < 4 for x in values)]
    outside = [_half_a_page(rows, name) for name in found if name not in inside]
    verdict = "; ".join([f"follows for {', '.join(inside) or 'none'}", *outside])
    return MemoryClaim("pages of 16 waste under 4 % (vLLM, 2023)", _listed(found), verdict)


def _half_a_page(rows: list[Row], mask: str) -> str:
    row = _find(rows, "paged 16", mask)
    tokens = row["used"] * row["slots"] / row["value"]
    return (
        f"not for {mask}: its sequences hold {tokens:.0f} tokens on average, of which half a page"
        f" is {800 / tokens:.0f} %"
    )


def _used_claim(rows: list[Row]) -> MemoryClaim:
    used = {name: 100 * _find(rows, name)["used"] for name in ("max", "oracle buddy", "oracle")}
    close = abs(used["max"] - 20.4) < 2 and abs(used["oracle buddy"] - 38.2) < 2
    return MemoryClaim(
        "20.4 % (max) to 38.2 % (oracle) of the slots hold tokens (PagedAttention, SOSP 2023)",
        f"max {used['max']:.1f} %, oracle buddy {used['oracle buddy']:.1f} % on 40 GiB",
        f"{_follows(close)} with the buddy allocator that the paper gave its baselines; first fit"
        f" gives the oracle {used['oracle']:.1f} %",
    )


def _follows(yes: bool) -> str:
    return "follows" if yes else "does not follow"


def _more_claim(rows: list[Row]) -> MemoryClaim:
    paged = _find(rows, "paged 16", gib=80)
    ratios = {name: paged["value"] / value for name, value in paged["peers"].items()}
    inside = [name for name, ratio in ratios.items() if 2 <= ratio <= 4]
    return MemoryClaim(
        "2-4x more sequences in the same memory",
        "80 GiB, against " + ", ".join(f"{name} {ratio:.1f}x" for name, ratio in ratios.items()),
        f"follows against {', '.join(inside)}; not as throughput: a step with more sequences takes"
        " longer, and what was preempted is computed again",
    )


def _tutorial_claim(rows: list[Row]) -> MemoryClaim:
    both = lambda gib: [_find(rows, kernel, gib=gib)["value"] for kernel in ("max", "paged 16")]
    contiguous, paged = both(80)
    return MemoryClaim(
        "LLaMA-13B on 80 GB: about 8 sequences contiguous, 40 paged (a tutorial)",
        "80 GiB: {:.0f} and {:.0f}; 40 GiB: {:.0f} and {:.0f}".format(*both(80), *both(40)),
        f"does not follow: {contiguous:.0f} reservations of 2,048 fit; 8 would be of"
        f" {_find(rows, 'max', gib=80)['slots'] // 8:,}. Both figures are near those of 40 GiB, and"
        " 40 is 5x of 8 where the same text says 2-4x",
    )


def _savings(rows: list[Row], kernel: str, mask: str) -> list[float]:
    """In per cent, by width."""
    selected = {"bench": "sharing", "kernel": kernel, "mask": mask}
    return [row["value"] for row in rows if selected.items() <= row.items()]


def _span(values: list[float]) -> str:
    return f"{min(values):.1f}-{max(values):.1f} %"


def _samples_claim(rows: list[Row]) -> MemoryClaim:
    found = {mask: _savings(rows, "samples", mask) for mask in ("instruct", "chat")}
    published = {"instruct": (6.1, 9.8), "chat": (16.2, 30.5)}
    gaps = [abs(f(found[m]) - f(published[m])) for m in found for f in (min, max)]
    return MemoryClaim(
        "2 to 6 samples save 6.1-9.8 % (Alpaca), 16.2-30.5 % (ShareGPT) (SOSP 2023)",
        ", ".join(f"{mask} {_span(values)}" for mask, values in found.items()),
        f"follows within {max(gaps):.0f} points: (n - 1) / n of what full pages of prompts hold",
    )


def _beams_claim(rows: list[Row]) -> MemoryClaim:
    low, high = "samples", "beams, turnover 1"  # beams that are never replaced, and always
    span = lambda mask: f"{_span(_savings(rows, low, mask))} to {_span(_savings(rows, high, mask))}"
    between = all(
        f(_savings(rows, low, mask)) <= f(published) <= f(_savings(rows, high, mask))
        for mask, published in (("instruct", (37.6, 55.2)), ("chat", (44.3, 66.3)))
        for f in (min, max)
    )
    return MemoryClaim(
        "2 to 6 beams save 37.6-55.2 % (Alpaca), 44.3-66.3 % (ShareGPT) (SOSP 2023)",
        f"turnover 0 to 1: instruct {span('instruct')}, chat {span('chat')}",
        f"{'lies between' if between else 'lies outside'}, but does not follow: it depends on how"
        " often beams are replaced, which was not published",
    )


def _bytes_claim() -> MemoryClaim:
    token_bytes = 2 * 80 * 8 * 128 * 2
    gib = lambda tokens: f"{token_bytes * tokens / GIB:.1f} GiB"
    return MemoryClaim(
        "LLaMA-2 70B: 320 KB per token, 39 GB at 128K (a tutorial)",
        f"2 x 80 x 8 x 128 x 2 = {token_bytes:,}; x 131,072 = {gib(131_072)}",
        f"the first follows; the second is that of 128,000 tokens, {gib(128_000)}",
    )


SHEETS: Sheets = {
    "allocation": allocation_sheet,
    "page-size": page_size_sheet,
    "sharing": sharing_sheet,
    "claims": claims_sheet,
}
TITLES = {
    "allocation": "Sequences that run, and what the slots hold in per cent, by allocator",
    "page-size": "Waste in per cent and sequences that run, by page size (40 GiB)",
    "sharing": "Pages saved by sharing, in per cent, for so many sequences",
    "claims": "Published figures, held against these rows",
}


def print_report(console: Any, rows: list[Row], picture: Path | None = None) -> None:
    """Print the arithmetic, the tables and the assumptions; draw memory over time if a picture is
    given.
    """
    say = lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
    for line in (*arithmetic(rows), ""):
        say(line)
    for name, sheet in SHEETS.items():
        if name != "claims" or any(row.get("gib") == 80 for row in rows):
            say(TITLES[name])
            console.print("", as_table(*sheet(rows)), "")
    for sentence in ASSUMED:
        say(sentence)
    if picture:
        plot(picture)


def grid(
    rows: Iterable[Row],
    line: Callable[[Row], tuple[str, ...]],
    column: Callable[[Row], str],
    cell: Callable[[Row], str],
) -> Sheet:
    """(columns, lines of cells), both in the order of the rows."""
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    columns: dict[str, None] = {}
    for row in rows:
        columns[column(row)] = None
        lines.setdefault(line(row), {})[column(row)] = cell(row)
    return list(columns), [[*at, *(x.get(c, "") for c in columns)] for at, x in lines.items()]


def print_sheets(console: Any, rows: list[Row], sheets: Sheets, titles: dict[str, str]) -> None:
    """The sheets that have a title and at least one line."""
    for name, title in titles.items():
        heads, body = sheets[name](rows)
        if body:
            console.print(title, markup=False, highlight=False, soft_wrap=True)
            console.print("", as_table(heads, body), "")


def as_table(heads: list[str], body: list[list[str]]) -> Any:
    from rich import box
    from rich.table import Table

    tight = len(heads) > 8  # it should fit 80 columns
    padding = (0, 0) if tight else (0, 1, 0, 0)
    table = Table(box=box.SIMPLE_HEAD, padding=padding, show_edge=False)
    for head, *column in zip(heads, *body, strict=True):
        numbers = all(cell[:1].isdigit() for cell in column if cell)
        table.add_column(head, justify="right" if numbers else "left")
    for cells in body:
        table.add_row(*cells)
    return table


DRAWN_STEPS = 5000
COLOURS = {"used": "#238c43", "reserved": "#2f81f7", "internal": "#d9691f", "external": "#9aa4af"}
GREY = "#717b87"  # readable on white and on black
DRAWN = {
    "max": "max: 2,048 slots each",
    "pow2 buddy": "pow2, buddy allocator",
    "oracle": "oracle: the exact length",
    "paged 16": "pages of 16",
}


def plot(path: Path) -> None:
    """Memory over time on 40 GiB, one panel for each allocator, as the extension of path says."""
    import matplotlib
    from matplotlib.figure import Figure

    style = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), GREY)
    with matplotlib.rc_context({**style, "svg.fonttype": "none", "svg.hashsalt": "memory"}):
        figure = Figure(figsize=(8.6, 5.2), layout="constrained")
        panels = figure.subplots(2, 2, sharex=True, sharey=True).flat
        for axes, name in zip(panels, DRAWN, strict=True):
            _panel(axes, name)
            axes.set_xlim(0, DRAWN_STEPS)
            axes.xaxis.set_major_formatter("{x:,.0f}")
        figure.supxlabel("steps", fontsize=10, color=GREY)
        figure.supylabel("GiB of cache", fontsize=10, color=GREY)
        handles, labels = next(iter(figure.axes)).get_legend_handles_labels()
        figure.legend(handles, labels, ncols=4, loc="outside upper center", frameon=False)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, transparent=True, dpi=150, metadata=metadata)


def _panel(axes: Any, name: str) -> None:
    usage = simulate(ALLOCATORS[name](MODEL.slots(40)), CHAT, LIFETIMES[40], sample_every=50)
    drawn = [x for x in usage.timeline if x[0] <= 1.1 * DRAWN_STEPS]  # past the edge
    steps, samples = zip(*drawn, strict=True)
    gib = lambda part: [getattr(s, part) * MODEL.token_bytes / GIB for s in samples]
    layers = [gib(part) for part in PARTS]
    axes.stackplot(steps, layers, labels=PARTS, colors=COLOURS.values(), linewidth=0)
    sequences = f"{usage.mean.sequences:.0f} sequences, {usage.mean.waste:.0%} waste"
    axes.set_title(f"{DRAWN[name]}: {sequences}", fontsize=10, loc="left")
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes.margins(0)
