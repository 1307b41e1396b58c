"""What `python -m benchmarks accuracy` prints, draws and puts into the documents."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import delta_accuracy
from benchmarks.accuracy_kernels import CAST, LABELS, OURS
from benchmarks.accuracy_thresholds import FP4_THRESHOLDS, THRESHOLDS, select
from benchmarks.memory_report import GREY, Sheet, Sheets, grid, print_sheets
from benchmarks.ring_report import precision_sheet, sums_sheet
from onchip.cli.bench.harness import SHORT, Row, Threshold, check_thresholds

FAMILIES = list(delta_accuracy.FAMILIES)
TYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "int8", "float4_e2m1fn_x2")
COLOURS = ("#238c43", "#d9691f", "#2f81f7", "#a855c7", "#c0392b")
number = lambda x: "" if x is None else "0" if x == 0 else f"{x:.1e}"
percent = lambda x: f"{100 * x:.2g}" if x < 0.995 else f"{100 * x:.0f}"


def _of(rows: list[Row], bench: str, **columns: object) -> list[Row]:
    """Rows of a bench by type, in measured order within each type."""
    chosen = filter(select(bench, **columns), rows)
    return sorted(chosen, key=lambda row: TYPES.index(row["dtype"]))


def _who(row: Row) -> tuple[str, str]:
    """A star: the arithmetic was emulated."""
    return SHORT[row["dtype"]], row["kernel"] + (" *" if row["kind"] == "emulated" else "")


def _merged(body: list[list[str]], at: int = 1) -> list[list[str]]:
    """Lines that differ in the kernel alone, in column `at`, as one line that names them all; a
    first cell that repeats the one above is left blank.
    """
    named: dict[tuple, list[str]] = {}
    for line in body:
        named.setdefault((*line[:at], *line[at + 1 :]), []).append(line[at])
    merged = [[*key[:at], ", ".join(names), *key[at:]] for key, names in named.items()]
    repeats = lambda i: at > 0 and i > 0 and merged[i][0] == merged[i - 1][0]
    return [["" if repeats(i) else line[0], *line[1:]] for i, line in enumerate(merged)]


def forward_sheet(rows: list[Row]) -> Sheet:
    """Types and kernels down, families across: RMSE."""
    chosen = _of(rows, "forward")
    columns, body = grid(chosen, _who, lambda r: r["family"], lambda r: number(r["value"]))
    return ["type", "kernel", *columns], _merged(body)


def family_sheet(family: str) -> Callable[[list[Row]], Sheet]:
    """Every measure of one family."""
    columns = ("value", "drawn_rmse", "max_error", "lse_error")

    def sheet(rows: list[Row]) -> Sheet:
        heads = ["type", "kernel", "RMSE", "as drawn", "largest", "lse", "ulp", "ulp, 99 %"]
        body = [
            [*_who(r), *(number(r[c]) for c in columns), *(f"{r[c]:.3g}" for c in ULPS)]
            for r in _of(rows, "forward", family=family)
        ]
        return heads, _merged(body)

    return sheet


ULPS = ("ulp_median", "ulp_99")


def relative_sheet(bench: str, column: str) -> Callable[[list[Row]], Sheet]:
    """Kernels down, gaps or families across: relative RMSE in per cent."""

    def sheet(rows: list[Row]) -> Sheet:
        across, cell = lambda r: str(r[column]), lambda r: percent(r["relative"])
        columns, body = grid(_of(rows, bench), _who, across, cell)
        return ["type", "kernel", *columns], _merged(body)

    return sheet


def long_sheet(rows: list[Row]) -> Sheet:
    """Kernels down: the largest error by value."""
    column, cell = lambda r: r["family"], lambda r: number(r["max_error"])
    columns, body = grid(_of(rows, "long"), lambda r: (r["kernel"],), column, cell)
    return ["kernel", *columns], _merged(body, at=0)


def accumulator_sheet(rows: list[Row]) -> Sheet:
    """Sums down, families across: relative RMSE in per cent."""
    chosen = _of(rows, "accumulator")
    columns, body = grid(
        chosen, lambda r: (r["kernel"],), lambda r: r["family"], lambda r: percent(r["relative"])
    )
    return ["products are added in", *columns], body


def backward_sheet(rows: list[Row]) -> Sheet:
    """Types and kernels down, families and gradients across: relative RMSE."""
    chosen = _of(rows, "backward")
    column = lambda r: f"{r['tensor']}, {r['family']}"
    columns, body = grid(chosen, _who, column, lambda r: number(r["relative"]))
    return ["type", "kernel", *columns], _merged(body)


def delta_sheet(rows: list[Row]) -> Sheet:
    """Families, kernels and precise_delta down: relative errors, and the mean error of delta."""
    precise = {False: "", True: "yes"}
    columns = ("value", "dk", "dv", "drift")
    chosen = sorted(_of(rows, "delta"), key=lambda r: FAMILIES.index(r["family"]))
    line = lambda r: [r["family"], r["kernel"], precise[r["precise_delta"]]]
    body = [[*line(r), *(number(r[c]) for c in columns)] for r in chosen]
    heads = ["family", "kernel", "precise_delta", "dq", "dk", "dv", "mean error of delta"]
    return heads, _merged(body)


def cache_sheet(rows: list[Row]) -> Sheet:
    """What the built-in model says over pages of each type."""
    heads = ["cache", "bytes a token", "perplexity", "change, %", "RMSE of logits", "largest"]
    body = []
    for r in rows:
        if r["bench"] == "cache":
            change, other = 100 * r["perplexity_change"], percent(r["other_top"])
            logits = (number(r[c]) for c in ("error", "largest_logit_error", "divergence"))
            cells = [r["kernel"], f"{r['token_bytes']:,}", f"{r['value']:.4f}", f"{change:+.4f}"]
            body.append([*cells, *logits, other])
    return [*heads, "divergence, nats", "another likeliest byte, %"], body


def exp2_sheet(rows: list[Row]) -> Sheet:
    numbers, shares = ("value", "mean_relative"), ("differs_bf16", "differs_fp16")
    heads = ["2^x by", "largest", "mean", "bf16, %", "fp16, %", "all bf16, %", "all fp16, %"]
    body = []
    for r in _of(rows, "exp2"):
        cells = [percent(r[c]) for c in (*shares, "all_bf16", "all_fp16")]
        ends = number(r["at_minus_infinity"])
        body.append([r["kernel"], *(number(r[c]) for c in numbers), *cells, ends])
    return [*heads, "2^-inf"], body


def thresholds_sheet(thresholds: Sequence[Threshold]) -> Callable[[list[Row]], Sheet]:
    """What was promised, and what was found."""

    def sheet(rows: list[Row]) -> Sheet:
        body = []
        for v in check_thresholds(rows, thresholds):
            found = "no row" if v.measured is None else f"{v.measured:.3g} {v.unit}"
            required = f"at most {v.threshold.at_most:.3g} {v.unit}"
            verdict = "met" if v.ok else "missed"
            body.append([v.threshold.name, found.strip(), required.strip(), verdict])
        return ["threshold", "measured", "required", ""], body

    return sheet


SHEETS: Sheets = {
    "forward": forward_sheet,
    "outliers": family_sheet("outliers"),
    "sink": relative_sheet("sink", "gap"),
    "long": long_sheet,
    "accumulator": accumulator_sheet,
    "cache": cache_sheet,
    "backward": backward_sheet,
    "delta": delta_sheet,
    "precision": precision_sheet,
    "sums": sums_sheet,
    "exp2": exp2_sheet,
    "thresholds": thresholds_sheet(THRESHOLDS),
    "fp4": relative_sheet("fp4", "family"),
    "fp4_sink": relative_sheet("fp4 sink", "gap"),
    "fp4_thresholds": thresholds_sheet(FP4_THRESHOLDS),
}
TITLES = {
    "forward": "RMSE of out against fp64 of the same inputs",
    "outliers": "N(0,1) + N(0,100) Bernoulli(0.001), in full",
    "sink": "Relative RMSE in per cent, one key so far above the others",
    "long": "A million keys of one value: largest error of out, bf16",
    "accumulator": "fp8 with its products added in fewer bits: relative RMSE in per cent",
    "cache": "The built-in model over pages of each type, against fp32 pages",
    "backward": "Gradients: RMSE over the root mean square of the exact ones",
    "delta": "Gradients in bf16, without and with precise_delta: relative errors",
    "precision": "A ring in bf16, 4,096 tokens, 2 heads of 64: RMSE against fp64",
    "sums": "dk in bf16 as a sum over ranks: relative RMSE against fp64",
    "exp2": "2^x: relative error, share of results that round to another number, and 2^-inf",
    "fp4": "Operands of 4 bits, emulated: relative RMSE in per cent",
    "fp4_sink": "The same with one key so far above the others",
}


SAID = (
    "RMSE: root mean square of the error against fp64. as drawn: the inputs' own rounding counts."
    " ulp: error in steps of the output's type at the exact value, median and 99 % of all elements;"
    " rounding alone has 0.25 and 0.5. *: emulated, the arithmetic of the recipe in fp32; out is"
    " bf16. rounding model: fp64 in which only P and out are rounded."
)


def print_report(console: Any, rows: list[Row], picture: Path | None = None) -> None:
    print_sheets(console, rows, SHEETS, TITLES)
    console.print(SAID, markup=False, highlight=False, soft_wrap=True)
    if picture:
        plot(rows, picture)


def plot(rows: list[Row], path: Path) -> None:
    """Four panels, as the extension of path says."""
    import matplotlib
    from matplotlib.figure import Figure

    style = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), GREY)
    style |= {"axes.edgecolor": GREY, "font.size": 9}
    with matplotlib.rc_context({**style, "svg.fonttype": "none", "svg.hashsalt": "accuracy"}):
        figure = Figure(figsize=(10.4, 8.2), layout="constrained")
        panels = figure.subplots(2, 2, width_ratios=(1.15, 1)).flat
        for axes, draw in zip(panels, (_types, _sinks, _families, _powers), strict=True):
            draw(axes, rows)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25, linewidth=0.6)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, transparent=True, dpi=150, metadata=metadata)


def _types(axes: Any, rows: list[Row]) -> None:
    """A dot for every kernel: RMSE on outliers, by type."""
    chosen = [r for r in _of(rows, "forward", family="outliers") if "paper" not in r["kernel"]]
    for i, row in enumerate(reversed(chosen)):
        ours = row["kind"] == "onchip" or row["kernel"].startswith("onchip")
        look = {"color": COLOURS[TYPES.index(row["dtype"])], "markersize": 6}
        shape = {"marker": "o"} if ours else {"marker": "s", "fillstyle": "none"}
        axes.plot(row["value"], i, linestyle="none", **shape, **look)
    names = ["  ".join(_who(r)) for r in reversed(chosen)]
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), names, fontsize=7.5)
    axes.set_title("RMSE on outliers (filled: onchip's; *: emulated)", fontsize=10, loc="left")


def _sinks(axes: Any, rows: list[Row]) -> None:
    """Relative RMSE over the gap."""
    drawn = ("P alone, x 1, first key first", "P alone, x 1", CAST)
    drawn += tuple(LABELS[name] for name in ("fa3_fp8", *OURS))
    colours = ("#d9691f", "#e0a878", "#238c43", "#9aa4af", "#c0392b", "#2f81f7", "#a855c7")
    for name, colour in zip(drawn, colours, strict=True):
        points = [(r["gap"], 100 * r["relative"]) for r in rows if select("sink", kernel=name)(r)]
        if points:
            axes.plot(
                *zip(*points, strict=True), color=colour, marker="o", markersize=4, label=name
            )
    axes.axhline(3, color=GREY, linewidth=0.8, linestyle="--")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("score of one key above the others")
    axes.set_ylabel("relative RMSE, %")
    axes.set_title("An attention sink, emulated", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=7.5)


def _families(axes: Any, rows: list[Row]) -> None:
    """8 bits: a line for every kernel, a mark for every family."""
    narrow = [r for r in _of(rows, "forward") if r["dtype"] in TYPES[3:]][::-1]
    names = list(dict.fromkeys("  ".join(_who(r)) for r in narrow))
    families = list(dict.fromkeys(r["family"] for r in narrow))[::-1]
    for family, colour, mark in zip(families, COLOURS, "osD^v", strict=True):
        found = [(r["value"], "  ".join(_who(r))) for r in narrow if r["family"] == family]
        x, y = zip(*((value, names.index(name)) for value, name in found), strict=True)
        axes.plot(x, y, linestyle="none", marker=mark, color=colour, label=family, alpha=0.85)
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), names, fontsize=7.5)
    axes.set_xlabel("RMSE")
    axes.set_title("8 bits, by family of inputs", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=7.5)


def _powers(axes: Any, rows: list[Row]) -> None:
    """Results of 2^x that round to another number, by degree."""
    found = {r["kernel"].removeprefix("degree "): r for r in rows if r["bench"] == "exp2"}
    degrees = [name for name in found if name.isdigit()]
    for column, label, colour in (
        ("differs_fp16", "differ in fp16", COLOURS[1]),
        ("differs_bf16", "differ in bf16", COLOURS[2]),
        ("value", "largest relative error", COLOURS[0]),
    ):
        points = [(int(d), 100 * found[d][column]) for d in degrees if found[d][column]]
        look = {"marker": "o", "markersize": 5, "color": colour}
        axes.plot(*zip(*points, strict=True), **look, label=label)
    axes.set_xticks([int(d) for d in degrees])
    axes.set_yscale("log")
    axes.set_xlabel("degree of the polynomial")
    axes.set_ylabel("% (0 is not drawn)")
    axes.set_title("2^x by multiply-adds", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=7.5)
