"""What `python -m benchmarks ring` prints, draws and puts into the documents."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.memory_report import GREY, Sheet, Sheets, grid, print_sheets
from benchmarks.ring_timeline import COMPUTE, MERGE, SEND_DKV, SEND_KV, Timeline, TimeSpan
from onchip.cli.bench.harness import Row
from onchip.parallel.machines import LINKS, Fabric
from onchip.parallel.simulate import RingStep

Line = Callable[[Row], tuple[str, ...]]
Cell = Callable[[Row], str]
UNITS = (
    (365.25 * 86400, "years"),
    (86400, "days"),
    (3600, "h"),
    (60, "min"),
    (1, "s"),
    (1e-3, "ms"),
    (1e-6, "us"),
)
BYTES = ((1e6, "PB"), (1e3, "TB"), (1, "GB"), (1e-3, "MB"))
ASSUMED = (
    "Kernels: TFLOP/s of benchmarks/results/h200-forward.json and h200-backward.json by head_dim,"
    " mask and length: linear in the logarithm of the length between what was measured, constant"
    " above 16,384 keys, in proportion to the keys below 512; less where a call has fewer tiles"
    " of 128 queries than the GPU has processors (132); never less than the 35 us that a call"
    " takes on the host. Merging moves fp32 at 4.5 TB/s: out of a round and, for four rounds at"
    " once, the total twice; backward dq, dk and dv three times.",
    "Heads: 32 over 8 of 128, bf16 (Llama 3 8B), one layer. Nodes of 8 GPUs: NVLink 4 inside,"
    " InfiniBand NDR to the next node. Links have their nominal speed, latency as in NCCL's cost"
    " model; what NCCL's own kernels take from the GPU is not modelled.",
    "Efficiency: all flops of the mask at the rate of the longest calls on every device, over the"
    " step. Exposed: what communication adds to the time of the busiest device.",
    "70 GB of each GPU are for this layer. What does not fit is cut into slabs and lies in host"
    " memory (256 GB a GPU, 54.8 GB/s) or on disk (drives of 15.36 TB, 13 GB/s read, 6.6 written).",
)


def span_of(seconds: float) -> str:
    """1.5e-4 -> 150 us; years have thousands."""
    scale, unit = next((u for u in UNITS if seconds >= u[0]), UNITS[-1])
    value = seconds / scale
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def size_of(gigabytes: float) -> str:
    scale, unit = next((u for u in BYTES if gigabytes >= u[0]), BYTES[-1])
    return f"{gigabytes / scale:.3g} {unit}"


def count_of(tokens: float) -> str:
    """100000 -> 100k, 10**12 -> 10^12."""
    if tokens >= 1e9:
        return f"10^{len(str(int(tokens))) - 1}"
    return f"{tokens / 1e6:g}M" if tokens >= 1e6 else f"{tokens / 1e3:g}k"


def _grid(rows: Iterable[Row], line: Line, column: Cell, cell: Cell) -> Sheet:
    """(columns, lines of cells), lines by their first cell."""
    columns, body = grid(rows, line, column, cell)
    return columns, sorted(body, key=lambda cells: _order(cells[0]))


def _order(cell: str) -> float:
    """Lines of the same context together, shorter ones first."""
    power = cell.removeprefix("10^")
    if power != cell:
        return 10.0 ** int(power)
    scale = {"k": 1e3, "M": 1e6}.get(cell[-1:], 0)
    return float(cell[:-1]) * scale if scale else 0.0


def _rows(rows: list[Row], bench: str, way: str | None = None) -> list[Row]:
    return [r for r in rows if r["bench"] == bench and way in (None, r["pass"])]


def _devices(row: Row) -> str:
    return "1 device" if row["devices"] == 1 else f"{row['devices']:,}"


def efficiency_sheet(way: str) -> Callable[[list[Row]], Sheet]:
    """Contexts and layouts down, devices across: efficiency and the time of a step."""

    def sheet(rows: list[Row]) -> Sheet:
        line = lambda r: (count_of(r["seqlen"]), _layout(r))
        cell = lambda r: f"{r['value']:.0f} % {span_of(r['step_s'])}"
        columns, body = _grid(_rows(rows, "ring", way), line, _devices, cell)
        return ["tokens", "layout", *columns], body

    return sheet


def _layout(row: Row) -> str:
    return row["kernel"] if row["mask"] == "causal" else "no mask"


def memory_sheet(rows: list[Row]) -> Sheet:
    """Contexts down, devices across: bytes on a device, or the cut and layout of the context."""
    chosen = [r for r in _rows(rows, "ring") if _layout(r) == "zigzag"]
    line = lambda r: (count_of(r["seqlen"]), r["pass"])
    columns, body = _grid(chosen, line, _devices, _memory)
    return ["tokens", "pass", *columns], body


def _memory(row: Row) -> str:
    if row["tier"] is None:
        ring = row["pass"] == "forward" and row["devices"] > 1
        blocks = f" ({size_of(row['six_blocks_gb'])})" if ring else ""
        return size_of(row["memory_gb"]) + blocks
    drives = f", {row['modules']:,} drives" if row["modules"] > 1 else ""
    return f"{row['slabs']:,} slabs, {size_of(row['stored_gb'])} on {row['tier']}{drives}"


def exposed_sheet(rows: list[Row]) -> Sheet:
    """Contexts down, devices across: what communication adds, in per cent of the step."""
    chosen = [r for r in _rows(rows, "ring") if _layout(r) == "zigzag" and r["devices"] > 1]
    line = lambda r: (count_of(r["seqlen"]), r["pass"])
    cell = lambda r: f"{100 * r['exposed_s'] / r['step_s']:.2g} %{' hides' if r['hides'] else ''}"
    columns, body = _grid(chosen, line, _devices, cell)
    return ["tokens", "pass", *columns], body


def path_sheet(rows: list[Row]) -> Sheet:
    """One context on ever more devices, zigzag: what the critical path is made of, in per cent."""
    kinds = (COMPUTE, MERGE, SEND_KV, SEND_DKV)
    share = lambda r, kind: f"{100 * r['critical_s'].get(kind, 0.0) / r['step_s']:.1f}"
    body = [
        [f"{r['devices']:,}", r["pass"], span_of(r["step_s"]), f"{r['value']:.0f} %"]
        + [share(r, kind) for kind in kinds]
        for r in _rows(rows, "scaling")
    ]
    return ["devices", "pass", "step", "efficiency", *kinds], body


def hybrid_sheet(rows: list[Row]) -> Sheet:
    """One context on ever more devices: a ring of all, and heads dealt inside nodes of 8."""
    chosen = [*_rows(rows, "scaling"), *_rows(rows, "hybrid")]
    chosen = [r for r in chosen if r["devices"] >= 8]
    line = lambda r: (f"{r['devices']:,}",)
    column = lambda r: f"{r['pass']}, {'ring' if r['bench'] == 'scaling' else 'hybrid'}"
    cell = lambda r: f"{r['value']:.0f} % {span_of(r['step_s'])}"
    columns, body = _grid(chosen, line, column, cell)
    return ["devices", *columns], body


def link_sheet(rows: list[Row]) -> Sheet:
    """How 8 devices are wired, down; tokens on each, across: efficiency and what is exposed."""
    line = lambda r: (r["fabric"], r["pass"])
    column = lambda r: f"{r['seqlen'] // r['devices']:,} each"
    cell = lambda r: f"{r['value']:.0f} % ({100 * r['exposed_s'] / r['step_s']:.1f} exposed)"
    columns, body = _grid(_rows(rows, "link"), line, column, cell)
    return ["link", "pass", *columns], body


def hide_sheet(rows: list[Row]) -> Sheet:
    """Links down; pass and mask across: tokens per device by the formula, and by simulation."""
    line = lambda r: (r["link"], f"{r['gb_s']:g}", f"{r['latency_us']:.1f}")
    column = lambda r: f"{r['pass']}, {'causal' if r['mask'] == 'causal' else 'no mask'}"
    any_ = lambda tokens: f"{tokens:,}" if tokens > 1 else "any"
    cell = lambda r: f"{r['value']:,.0f} ({any_(r['simulated_tokens'])})"
    columns, body = _grid(_rows(rows, "hide"), line, column, cell)
    return ["link", "GB/s", "latency, us", *columns], body


def step_sheet(rows: list[Row]) -> Sheet:
    """Two ranks on two cores: a step, its kernels alone, its messages alone, in ms."""
    heads = ["tokens", "pass", "step", "kernels", "messages", "step / longer", "sent", "in flight"]
    body = [
        [
            f"{r['seqlen']:,}{' *' if r['doubts'] else ''}",
            r["pass"] + (", slow link" if r.get("message_share") else ""),
            *(f"{r[f'{name}_ms']:.1f}" for name in ("step", "kernels", "messages")),
            f"{r['value']:.2f}",
            f"{r['messages']} x {r['sent_bytes'] / r['messages'] / 1e6:.2g} MB",
            _in_flight(r["traces"]),
        ]
        for r in _rows(rows, "step")
    ]
    return heads, body


def _in_flight(traces: list[list[list[float]]]) -> str:
    """The share of the time of messages that a rank was not waiting for them."""
    spans = [span for trace in traces for span in trace]
    whole = sum(there - posted for posted, _, there in spans)
    overlapped = sum(waited - posted for posted, waited, _ in spans)
    return f"{100 * overlapped / whole:.0f} % during kernels"


def work_sheet(rows: list[Row]) -> Sheet:
    """Layouts down, ranks across: the busiest rank over the mean."""
    cell = lambda r: f"{r['value']:.3f}"
    columns, body = _grid(_rows(rows, "work"), lambda r: (r["kernel"],), _ranks, cell)
    doubted = lambda r: " *" if r["doubts"] else ""
    timed = {r["kernel"]: cell(r) + doubted(r) for r in _rows(rows, "kernels")}
    heads = ["layout", *columns, "time of 2 ranks"]
    return heads, [[*line, timed.get(line[0], "")] for line in body]


def _ranks(row: Row) -> str:
    return f"{row['devices']} rank{'s' if row['devices'] > 1 else ''}"


def precision_sheet(rows: list[Row]) -> Sheet:
    """Ranks down: RMSE of the ring in bf16, of one call, of a ring of rounded partials."""
    heads = ["ranks", "mask", "ring", "one call", "bf16 partials", "ring / one call"]
    body = [
        [str(r["devices"]), r["mask"], f"{r['value']:.2e}"]
        + [f"{r['peers'][name]:.2e}" for name in heads[3:5]]
        + [f"{r['value'] / r['peers']['one call']:.2f}"]
        for r in _rows(rows, "precision")
    ]
    return heads, body


def sums_sheet(rows: list[Row]) -> Sheet:
    """Ranks down: relative RMSE of dk, by what is rounded on the way."""
    names = ("bf16 terms", "bf16 sum")
    cells = lambda r: [f"{x:.2e}" for x in (r["value"], *(r["peers"][name] for name in names))]
    return ["ranks", "fp32 terms", *names], [
        [str(r["devices"]), *cells(r)] for r in _rows(rows, "sums")
    ]


def chunks_sheet(rows: list[Row]) -> Sheet:
    """Passes down: ms of one call, of all rounds without merging, of all that a ring computes."""
    heads = ["pass", "one call", "kernels of the rounds", "with merging"]
    over = lambda r, name, share: f"{r['ms'][name]:.1f} ({share:+.1f} %)"
    return heads, [
        [r["pass"], f"{r['ms']['one call']:.1f}", over(r, "kernels", r["kernels_alone"])]
        + [over(r, "rounds", r["value"])]
        for r in _rows(rows, "chunks")
    ]


def published_sheet(rows: list[Row]) -> Sheet:
    """GPUs and layouts down: what others measured, and what the simulation gives."""
    line = lambda r: (f"8 x {r['gpu']}", r["kernel"])
    cell = lambda r: f"{r['peers']['published']:.1f} ({r['value']:.1f})"
    columns, body = _grid(_rows(rows, "published"), line, lambda r: r["pass"], cell)
    return ["GPUs", "layout", *columns], body


WIDTH = 64  # columns of a trace


def trace_lines(row: Row) -> list[str]:
    """The ranks over time: = a message is in flight during kernels, w a rank waits for it."""
    last = max(there for trace in row["traces"] for *_, there in trace)
    at = lambda ms: min(WIDTH - 1, int(WIDTH * ms / last))
    lines = []
    for rank, trace in enumerate(row["traces"]):
        for i, (posted, waited, there) in enumerate(trace):
            bar = ["."] * WIDTH
            bar[at(posted) : at(waited)] = "=" * (at(waited) - at(posted))
            bar[at(waited) : at(there) + 1] = "w" * (at(there) + 1 - at(waited))
            span = f"{posted:7.1f} to {there:7.1f} ms"
            lines.append(f"rank {rank}, message {i}  {''.join(bar)}  {span}")
    return lines


SHEETS: Sheets = {
    "step": step_sheet,
    "work": work_sheet,
    "precision": precision_sheet,
    "sums": sums_sheet,
    "chunks": chunks_sheet,
    "hide": hide_sheet,
    "link": link_sheet,
    "forward": efficiency_sheet("forward"),
    "backward": efficiency_sheet("backward"),
    "exposed": exposed_sheet,
    "memory": memory_sheet,
    "path": path_sheet,
    "hybrid": hybrid_sheet,
    "published": published_sheet,
}
TITLES = {
    "step": "Two ranks on two cores over gloo, fp32, 8 heads of 64, causal, zigzag; ms",
    "work": "Causal: work of the busiest rank over the mean, by layout",
    "precision": "bf16, 4,096 tokens, 2 heads of 64: RMSE against fp64",
    "sums": "dk in bf16 as a sum over ranks: relative RMSE against fp64",
    "chunks": "65,536 tokens cut for 8 ranks on one GPU, bf16, 16 heads of 128, causal, zigzag; ms",
    "hide": "Tokens per device from which on messages hide: by the formula (by simulation, < 1 %)",
    "link": "8 devices, causal, zigzag: efficiency by link and tokens on each device",
    "forward": "Forward, causal: efficiency, and the time of a step",
    "backward": "Backward, causal: efficiency, and the time of a step",
    "exposed": "Exposed communication, zigzag; hides: the condition holds on the slowest link",
    "memory": "Memory of a device (six blocks alone); or how what does not fit is cut, and lies",
    "path": "1M tokens, causal, zigzag: the critical path in per cent",
    "hybrid": "1M tokens, causal, zigzag: a ring of all devices, and of nodes that deal heads",
    "published": "Per cent of the ideal that others measured (and that the simulation gives)",
}


def print_report(console: Any, rows: list[Row], picture: Path | None = None) -> None:
    """Print the tables and the assumptions; draw the timeline if a picture is given."""
    say = lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
    print_sheets(console, rows, SHEETS, TITLES)
    for doubt in dict.fromkeys(doubt for row in rows for doubt in row.get("doubts", ())):
        say(f"* does not count: {doubt}")
    for row in _rows(rows, "step"):
        say(f"{row['seqlen']:,} tokens, {row['pass']}: = in flight during kernels, w waited for")
        for line in trace_lines(row):
            say(line)
    for sentence in ASSUMED if _rows(rows, "ring") else ():
        say(sentence)
    if picture:
        plot(picture)


COLOURS = {COMPUTE: "#238c43", MERGE: "#d9691f", SEND_KV: "#2f81f7", SEND_DKV: "#9a5fd0"}
DRAWN_DEVICES, DRAWN_TOKENS = 4, 4 * 8192
DRAWN = (
    ("contiguous, forward", RingStep(DRAWN_TOKENS, DRAWN_DEVICES, "contiguous")),
    ("zigzag, forward", RingStep(DRAWN_TOKENS, DRAWN_DEVICES, "zigzag")),
    ("zigzag, backward", RingStep(DRAWN_TOKENS, DRAWN_DEVICES, "zigzag", backward=True)),
)
LINK = LINKS["PCIe 5 x16"]


def plot(path: Path) -> None:
    """Timelines of four devices: what each computes, sends and receives."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    style = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), GREY)
    with matplotlib.rc_context({**style, "svg.fonttype": "none", "svg.hashsalt": "ring"}):
        figure = Figure(figsize=(8.6, 8.4), layout="constrained")
        lines = [(title, Timeline(step, Fabric(LINK))) for title, step in DRAWN]
        for axes, (title, line) in zip(figure.subplots(len(lines), 1), lines, strict=True):
            _panel(axes, title, line)
            alike = (x.seconds for _, x in lines if x.step.backward == line.step.backward)
            axes.set_xlim(0, 1e3 * max(alike))
        figure.axes[-1].set_xlabel("ms", fontsize=10)
        handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
        figure.legend(handles=handles, ncols=4, loc="outside upper center", frameon=False)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, transparent=True, dpi=150, metadata=metadata)


LANES = ("compute", "send", "receive")


def _panel(axes: Any, title: str, line: Timeline) -> None:
    names: dict[float, str] = {}
    for device in range(line.step.num_devices):
        for i, (lane, spans) in enumerate(zip(LANES, _lanes(line, device), strict=True)):
            y = device * (len(LANES) + 0.6) + i
            names[y] = f"rank {device}  {lane}" if not i else lane
            for span in spans:
                _bar(axes, span, y, gap=2 * line.seconds)
    axes.set_yticks(list(names), names.values(), fontsize=7)
    axes.invert_yaxis()
    work = f"{span_of(line.seconds)}, {span_of(line.busy)} of them computing on the busiest device"
    axes.set_title(f"{title}: {work}", fontsize=10, loc="left")
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)


def _lanes(line: Timeline, device: int) -> tuple[list[TimeSpan], list[TimeSpan], list[TimeSpan]]:
    """What a device computes, sends, and receives from the one before."""
    mine = list(line.events.spans(device))
    before = line.events.spans((device - 1) % line.step.num_devices)
    sends = (SEND_KV, SEND_DKV)
    computes = [s for s in mine if s.what not in sends]
    return computes, [s for s in mine if s.what in sends], [s for s in before if s.what in sends]


def _bar(axes: Any, span: TimeSpan, y: float, gap: float) -> None:
    """In ms; neighbours do not touch."""
    start, length = 1e3 * span.start, 1e3 * (span.end - span.start)
    axes.barh(
        y, max(length - gap, gap), left=start, height=0.9, color=COLOURS[span.what], linewidth=0
    )
    if span.what != MERGE:
        axes.text(
            start + length / 2, y, span.round, ha="center", va="center", fontsize=6, color="w"
        )
