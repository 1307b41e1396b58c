"""The generated tables of the documents: `python -m benchmarks.tables`.

The text between `<!-- NAME -->` and `<!-- /NAME -->` in README.md and docs/*.md is rewritten. NAME
is `support` (every kernel's `supports`), `options` (the signatures), `bench:FILE` (a summary of
benchmarks/results/FILE.json), `bench:FILE:rows` (every row of it), `bench:FILE:grid` (its first
benchmark with lengths across), `bench:FILE:kernels` (problems down, kernels across),
`bench:FILE:steps` (kernels down, problems across), `bench:FILE:SHEET` (a table that a benchmark
makes itself), `long-range:DEVICE` (accuracies of examples/data/long-range-DEVICE.json) or
`verdicts:TEXT` (claims of a text). Rows that do not count appear in full tables, and in no mean.
"""

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

import torch

import onchip
from benchmarks import long_range, markdown, verdicts
from onchip.cli import bench
from onchip.cli.bench.harness import SCHEMA, SHORT, Row, geomean, group_size
from onchip.cli.doctor import DEVICES, ordinary
from onchip.core.device import DeviceInfo
from onchip.core.dispatch import BUILT_IN, find_refusal, get_backend
from onchip.core.problem import Problem

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- ([\w:-]+) -->\n).*?(<!-- /\2 -->)", re.DOTALL)
YES, NO = "✓", ""
OTHER_DEVICES = {n: d for n, d in DEVICES.items() if d.type != "cpu"} | {
    "mps": DeviceInfo("mps"),
    "xpu": DeviceInfo("xpu"),
}
SUPPORT_ROWS = {
    "causal": {"causal": True},
    "window": {"window_size": (255, 0)},
    "block mask": {"has_mask": True},
    "packed sequences": {"packed": True},
    "softcap": {"softcap": 30.0},
    "score_mod": {"score_mod": "|score"},
    "ALiBi": {"has_alibi": True},
    "additive bias": {"has_bias": True},
    "sinks": {"has_sinks": True},
    "dropout": {"dropout_p": 0.1},
    "row statistics": {"return_stats": True},
    "reproducible": {"reproducible": True},
    "pages": {"page_size": 16},
}
DECODE = {"seqlen_q": 1, "page_size": 16}
PRECISIONS = {
    "fp64": (torch.float64,),
    "fp32": (torch.float32,),
    "bf16, fp16": (torch.bfloat16, torch.float16),
}
FUNCTIONS = (
    "attention",
    "varlen_attention",
    "paged_attention",
    "cascade_attention",
    "offload_attention",
    "attention_weights",
)
MEASURED = {
    "memory": "peak memory beyond the inputs, one head",
    "mask build": "building a mask",
    "mask size": "the size of that mask",
    "import": "`import onchip`, after `import torch`",
    "host": "host time of a call too small to matter otherwise",
    "host grad": "host time of such a call that records gradients",
    "host backward": "host time of its backward pass",
    "peak": "peak memory beyond the inputs, four heads of 128",
}


def rewrite(text: str, root: Path = ROOT) -> str:
    """text with every marked table written anew."""
    return MARKED.sub(lambda m: f"{m[1]}\n{table(m[2], root)}\n\n{m[3]}", text)


def table(name: str, root: Path = ROOT) -> str:
    """The Markdown that belongs between the markers of `name`."""
    kind, _, rest = name.partition(":")
    if kind == "bench":
        stem, _, form = rest.partition(":")
        return _bench(root / "benchmarks" / "results" / f"{stem}.json", form)
    if kind == "verdicts":
        return verdicts.table(rest)
    if kind == "long-range":
        return long_range.table(root / "examples" / "data" / f"long-range-{rest}.json")
    makers: dict[str, Callable[[], str]] = {"support": support, "options": options}
    if kind not in makers:
        raise ValueError(
            f"there is no table {name!r}; choose from: {', '.join(makers)}, bench:FILE"
        )
    return makers[kind]()


def support() -> str:
    """Features down, kernels across; a blank is a refusal, which `onchip explain` words."""
    with _any_machine():
        columns = {name: _support_column(name) for name in BUILT_IN}
    features = next(iter(columns.values()))
    rows = ([f, *(column[f] for column in columns.values())] for f in features)
    return markdown.table(["", *(f"`{name}`" for name in columns)], rows, centred=True)


def _support_column(kernel: str) -> dict[str, str]:
    """What a kernel answers about each feature, where it is at home: alone, on a plain call, or on
    one query over pages if it serves no other.
    """
    backend = get_backend(kernel)
    refusal = partial(find_refusal, backend)
    homes = product(({}, DECODE), (torch.float32, torch.bfloat16), DEVICES.values())
    served = lambda change, t, device: refusal(_plain(t, change), device) is None
    change, dtype, home = next(case for case in homes if served(*case))
    plain = {t: _plain(t, change) for ts in PRECISIONS.values() for t in ts}
    base = plain[dtype]
    mark = lambda answers: YES if all(answer is None for answer in answers) else NO
    there = lambda device: any(refusal(p, device) is None for p in plain.values())
    others = [name for name, device in OTHER_DEVICES.items() if there(device)]
    return {
        "forward": YES,
        "backward": YES if backend.has_backward else NO,
        "forward mode": YES if backend.has_tangents else NO,
        "second derivatives": YES if backend.has_second_order else NO,
        **{o: mark([refusal(base._replace(**x), home)]) for o, x in SUPPORT_ROWS.items()},
        **{p: mark(refusal(plain[t], home) for t in ts) for p, ts in PRECISIONS.items()},
        "CPU": YES if there(DEVICES["CPU"]) else NO,
        "other torch devices": YES if len(others) == len(OTHER_DEVICES) else ", ".join(others),
    }


def _plain(dtype: torch.dtype, change: dict[str, int]) -> Problem:
    return ordinary(dtype)._replace(causal=False, **change)


@contextmanager
def _any_machine() -> Iterator[None]:
    """The table is about the kernels, not about where it is written: nothing is interpreted."""
    interpreted = os.environ.pop("TRITON_INTERPRET", None)
    try:
        yield
    finally:
        if interpreted is not None:
            os.environ["TRITON_INTERPRET"] = interpreted


def options() -> str:
    """Options down, functions across; a cell is the default, a blank means not accepted."""
    accepted = {name: keyword_options(name) for name in FUNCTIONS}
    names = dict.fromkeys(option for defaults in accepted.values() for option in defaults)
    cell = lambda defaults, option: f"`{defaults[option]}`" if option in defaults else NO
    rows = ([f"`{o}`", *(cell(d, o) for d in accepted.values())] for o in names)
    return markdown.table(["", *FUNCTIONS], rows)


def keyword_options(function: str) -> dict[str, object]:
    """The keyword-only parameters of a public function, with their defaults."""
    parameters = inspect.signature(getattr(onchip, function)).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def _command(name: str) -> str:
    """The command that runs a benchmark: installed, or in a clone."""
    is_installed = bench.BENCHES[name].module.startswith("onchip.")
    return f"onchip bench {name}" if is_installed else f"python -m benchmarks {name}"


def _bench(path: Path, form: str) -> str:
    source = f"benchmarks/results/{path.name}"
    name = _benchmark(path.stem)
    forms = {"": _summary, "rows": _every_row, "grid": _grid}
    forms |= {"kernels": _kernels, "steps": _steps} | _sheets(name)
    if form not in forms:
        choices = ", ".join(filter(None, forms))
        raise ValueError(f"there is no form {form!r} of {name}; choose from: {choices}")
    command = f"`{_command(name)} --json {source}`" if name in bench.BENCHES else f"`{source}`"
    unknown = f"Not measured yet: {command} writes the numbers."
    if not path.exists():
        return unknown
    document = json.loads(path.read_text(encoding="utf-8"))
    if document["schema"] != SCHEMA:
        raise ValueError(f"{path} has schema {document['schema']}, expected {SCHEMA}")
    meta, rows = document["meta"], document["rows"]
    if "flags" in meta:
        command = command.replace(" --json", f" {meta['flags']} --json")
    triton = f", Triton {meta['triton']}" if meta["triton"] and path.stem != "cpu" else ""
    where = f"{meta['device']}, torch {meta['torch']}{triton}"
    caption = markdown.wrap(f"{where}, commit {meta['commit']}, {meta['date'][:10]}: {command}.")
    table = forms[form](rows)
    return f"{table}\n\n{caption}" if table else unknown


def _benchmark(stem: str) -> str:
    """The benchmark that wrote a file: score_mods of h200-score-mods, forward of h200-forward."""
    name = stem.partition("-")[2].replace("-", "_")
    return name if name in bench.BENCHES else stem.rpartition("-")[2]


def _sheets(name: str) -> dict[str, Callable[[list[Row]], str]]:
    """The tables that a benchmark makes of its rows itself; nothing where it has none for them."""
    report = bench.report(name)
    made = report.SHEETS if report else {}

    def table(rows: list[Row], sheet: Callable) -> str:
        heads, body = sheet(rows)
        return markdown.table(heads, body) if body else ""

    return {form: partial(table, sheet=sheet) for form, sheet in made.items()}


def _summary(rows: list[Row]) -> str:
    """Ratios as geometric means with their slowest and fastest cell, then what has no ratio."""
    contests = [r for r in rows if r["ratio"] is not None and r["bench"] not in MEASURED]
    values = [[_measure(r), _value(r), _peer(r)] for r in rows if r not in contests]
    doubtful = [r for r in contests if r.get("doubts")]
    contests = [r for r in contests if not r.get("doubts")]
    dtypes = list(dict.fromkeys(r["dtype"] for r in contests))
    groups: dict[tuple, list[Row]] = {}
    for r in contests:
        groups.setdefault((r["bench"], r["mask"], r["pass"]), []).append(r)
    ratios = (
        [_problem(g), _peers(g), g[0]["pass"], *(_ratio_of(g, dtype) for dtype in dtypes)]
        for g in groups.values()
    )
    heads = ["problem", "against", "pass", *(SHORT[dtype] for dtype in dtypes)]
    parts = [markdown.table(heads, ratios)] if groups else []
    parts += [markdown.table(["measured", "onchip", "peer"], values)] if values else []
    parts += [_left_out(doubtful)] if doubtful else []
    return "\n\n".join(parts)


def _left_out(rows: list[Row]) -> str:
    reasons = dict.fromkeys(doubt for r in rows for doubt in r["doubts"])
    return f"Not in these means: {len(rows)} rows that do not count ({', '.join(reasons)})."


def _grid(rows: list[Row]) -> str:
    """head_dim, mask and group down, lengths across: the value, in brackets the ratio; * if in
    doubt.
    """
    rows = [r for r in rows if r["bench"] == rows[0]["bench"]]
    lengths = sorted({r["seqlen"] for r in rows})
    at = lambda r: (r["head_dim"], r["mask"], group_size(r))
    cells = {(*at(r), r["seqlen"]): _grid_cell(r) for r in rows}
    lines = dict.fromkeys(map(at, rows))
    heads = [f"{rows[0]['unit']} (ratio)" if rows else "", *(f"{n:,}" for n in lengths)]
    masks = lambda mask: "no mask" if mask == "none" else mask
    groups = lambda group: f", groups of {group}" if group > 1 else ""
    named = lambda head_dim, mask, group: f"head_dim {head_dim}, {masks(mask)}{groups(group)}"
    body = ([named(*line), *(cells.get((*line, n), NO) for n in lengths)] for line in lines)
    return markdown.table(heads, body)


def _grid_cell(r: Row) -> str:
    ratio = "" if r["ratio"] is None else f" ({r['ratio']:.2f})"
    return f"{r['value']:.3g}{ratio}{' *' if r.get('doubts') else ''}"


def _kernels(rows: list[Row]) -> str:
    """Problems down, kernels across; * if in doubt."""
    lines: dict[tuple, dict[str, str]] = {}
    for r in rows:
        at = (r["head_dim"], r["mask"], r["batch"], r["num_heads"], r["seqlen"])
        lines.setdefault(at, {})[r["kernel"]] = _grid_cell(r | {"ratio": None})
    named = lambda d, mask, batch, heads, n: [
        f"{batch} x {n:,} tokens, {heads} heads of {d}{'' if mask == 'none' else f', {mask}'}"
    ]
    kernels = max(lines.values(), key=len, default={})  # in their order where none is missing
    body = ([*named(*at), *(cells.get(k, NO) for k in kernels)] for at, cells in lines.items())
    return markdown.table([rows[0]["unit"] if rows else "", *kernels], body)


def _steps(rows: list[Row]) -> str:
    """Kernels in the order of their steps down, problems across: the value, and the ratio to the
    step before.
    """
    problems = list(dict.fromkeys((r["head_dim"], r["mask"], r["seqlen"]) for r in rows))
    kernels = max(_by_problem(rows).values(), key=len, default={})
    cells = {at: {k: _grid_cell(r) for k, r in of.items()} for at, of in _by_problem(rows).items()}
    named = lambda d, mask, n: f"head_dim {d}, {'no mask' if mask == 'none' else mask}, {n:,}"
    heads = [f"{rows[0]['unit']} (ratio)" if rows else "", *(named(*at) for at in problems)]
    return markdown.table(heads, ([k, *(cells[at].get(k, NO) for at in problems)] for k in kernels))


def _by_problem(rows: list[Row]) -> dict[tuple, dict[str, Row]]:
    found: dict[tuple, dict[str, Row]] = {}
    for r in rows:
        found.setdefault((r["head_dim"], r["mask"], r["seqlen"]), {})[r["kernel"]] = r
    return found


def _problem(group: list[Row]) -> str:
    lengths = sorted({r["seqlen"] for r in group})
    tokens = " to ".join(f"{n:,}" for n in dict.fromkeys((lengths[0], lengths[-1])))
    mask = "no mask" if group[0]["mask"] == "none" else group[0]["mask"]
    return f"{group[0]['bench']}, {mask}, {tokens} tokens"


def _peers(group: list[Row]) -> str:
    return " or ".join(sorted({r["best_peer"] for r in group}))


def _ratio_of(group: list[Row], dtype: str) -> str:
    ratios = [r["ratio"] for r in group if r["dtype"] == dtype]
    if len(ratios) < 2:
        return "".join(f"{x:.2f}" for x in ratios)
    return f"{geomean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _measure(r: Row) -> str:
    way = f", {r['pass']}" if r["bench"] in ("memory", "peak") else ""
    mask = f", {r['mask']}" if r["mask"] != "none" else ""
    tokens = f", {r['seqlen']:,} tokens" if r["seqlen"] else ""
    return f"{MEASURED.get(r['bench'], r['bench'])}{way}{mask}{tokens}"


def _value(r: Row) -> str:
    return f"{r['value']:.3g} {r['unit']}"


def _peer(r: Row) -> str:
    return f"{r['best_peer']} {r['peers'][r['best_peer']]:.3g}" if r["best_peer"] else NO


def _every_row(rows: list[Row]) -> str:
    heads = ["problem", "type", "tokens", "batch x heads x head_dim", "kernel", "onchip"]
    heads += ["best peer", "ratio", "RMSE", "peer's RMSE"]
    return markdown.table(heads, map(_cells, rows))


def _cells(r: Row) -> list[str]:
    number = lambda x, form: "" if x is None else format(x, form)
    return [
        _named(r),
        SHORT[r["dtype"]],
        f"{r['seqlen']:,}" if r["seqlen"] else "",
        " x ".join(filter(None, (str(r["batch"]), _heads(r), str(r["head_dim"] or "")))),
        r["kernel"],
        _value(r),
        _peer(r),
        number(r["ratio"], ".2f") + _band(r),
        *(number(r[name], ".2e") for name in ("error", "peer_error")),
    ]


def _named(r: Row) -> str:
    """The benchmark, its mask and its pass; neither "none" nor a word twice."""
    pages = f"pages of {r['page_size']}" if r.get("page_size") else ""
    mask = "" if r["mask"] in ("none", pages) else r["mask"]
    way = "" if r["pass"] in r["bench"].split() else r["pass"]
    return ", ".join(filter(None, (r["bench"], pages, mask, way)))


def _heads(r: Row) -> str:
    heads, kv_heads = r["num_heads"], r["num_kv_heads"]
    return str(heads) if heads == kv_heads else f"{heads} over {kv_heads}"


def _band(r: Row) -> str:
    band = " ({:.2f} to {:.2f})".format(*r["band"]) if r.get("band") else ""
    return band + (f", does not count: {', '.join(r['doubts'])}" if r.get("doubts") else "")


def main() -> int:
    """Rewrite the pages of the repository, and say which of them changed."""
    if not (ROOT / "README.md").exists():
        print(f"there is no README.md in {ROOT}: run this from a source tree", file=sys.stderr)
        return 2
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        new = rewrite(text)
        if new != text:
            page.write_text(new, encoding="utf-8")
        print(f"{page.relative_to(ROOT)}: {'rewritten' if new != text else 'up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
