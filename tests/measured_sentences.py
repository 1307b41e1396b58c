"""Sentences of the documents whose numbers follow from rows of benchmarks/results.

`{}` takes a number that is computed from the rows: if a benchmark is run again, the test of
tests/test_claims.py shows each sentence as it must read now.
"""

import json
import math
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.model_shapes import NAMES
from benchmarks.roofline import BAR, HELD_OUT, gap
from onchip.cli.bench.harness import Row, geomean
from onchip.parallel.machines import H200

ROOT = Path(__file__).parents[1]
SDPA = ("cudnn", "fa2", "efficient")


class Sentence(NamedTuple):
    page: str
    text: str  # one line, with a field for each number
    numbers: Callable[[], Iterable[Any]]

    def current(self) -> str:
        return self.text.format(*self.numbers())


@cache
def rows(file: str) -> list[Row]:
    path = ROOT / "benchmarks" / "results" / f"{file}.json"
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


def select(file: str, **columns: Any) -> list[Row]:
    return [r for r in rows(file) if all(r.get(name) == x for name, x in columns.items())]


def spread(values: Iterable[float]) -> tuple[float, float, float]:
    """Geometric mean, least and largest."""
    values = list(values)
    return geomean(values), min(values), max(values)


def over(row: Row, peer: str) -> float:
    """The median ratio to this peer."""
    return row["ratios"][peer][0]


def ratios(file: str, **columns: Any) -> list[float]:
    """To the best peer of each row."""
    return [row["ratio"] for row in select(file, **columns)]


def over_sdpa(file: str, bench: str) -> list[float]:
    """To the fastest backend of torch's SDPA."""
    chosen = select(file, bench=bench)
    return [min(over(row, peer) for peer in SDPA if peer in row["ratios"]) for row in chosen]


def over_flex(file: str, bench: str, **columns: Any) -> list[float]:
    chosen = select(file, bench=bench, **columns)
    return [over(row, "flex") for row in chosen if "flex" in row["ratios"]]


def host_overheads() -> tuple[float, float]:
    slower = [1 / ratio for ratio in ratios("h200-host")]
    return min(slower), max(slower)


def readme_ratios() -> Iterable[float]:
    forward = over_sdpa("h200-forward", "forward")
    yield from (spread(forward)[0], len(forward), *spread(forward)[1:])
    yield from spread(over_sdpa("h200-backward", "backward"))
    yield from spread(ratios("h200-forward", bench="forward"))
    yield from spread(ratios("h200-backward", bench="backward"))


def portable_ratios() -> Iterable[float]:
    for way in ("forward", "backward"):
        yield geomean(ratios(f"h200-{way}", kernel="triton"))


def control_range() -> tuple[float, float]:
    controls = [row["control"] for row in select("h200-forward", bench="forward")]
    return min(controls), max(controls)


def measured_models() -> tuple[int, int]:
    return len({row["model"] for row in rows("h200-models")}), len(NAMES)


def widths() -> tuple[float, float]:
    return spread(ratios("h200-forward-widths", kernel="hopper"))[:2]


def forward_flex() -> Iterable[float]:
    for bench in ("forward triton", "forward"):
        yield from spread(over_flex("h200-forward-flex", bench))


def eight_bits() -> Iterable[float]:
    operands, whole = (
        [over(row, "fa3 fp8") for row in select("h200-forward8", bench=bench)]
        for bench in ("forward fp8", "forward fp8 whole")
    )
    return len(operands), *spread(operands)[:2], geomean(whole)


def backward_ratios() -> Iterable[float]:
    for head_dim in (64, 128, 256):
        yield geomean(ratios("h200-backward", bench="backward", head_dim=head_dim))


def short_backward() -> Iterable[float]:
    """The two shortest causal calls at head_dim 64, and the worst deterministic cell."""
    for seqlen in (512, 1024):
        cell = {"bench": "backward", "head_dim": 64, "mask": "causal", "seqlen": seqlen}
        yield from ratios("h200-backward", **cell)
    yield min(ratios("h200-backward", bench="deterministic"))


def backward_groups() -> tuple[float, float]:
    return spread(ratios("h200-backward-groups", bench="backward"))[:2]


def deterministic_groups() -> tuple[float, float]:
    return spread(ratios("h200-backward-groups", bench="deterministic"))[1:]


def backward_flex() -> Iterable[float]:
    """Of the portable kernels, in all and by head_dim."""
    find = lambda **columns: over_flex("h200-backward-flex", "backward triton", **columns)
    yield geomean(find())
    for head_dim in (128, 64, 256):
        yield from spread(find(head_dim=head_dim))[1:]


def masks_of_bits() -> Iterable[float]:
    """The largest share of the dense time, then bits over closed form."""
    (cell,) = select("h200-masks", mask="75% of blocks", head_dim=64)
    yield 1 / cell["ratio"]
    for mask in ("causal", "window 1024"):
        yield from (1 / ratio for ratio in ratios("h200-masks", bench="bits", mask=mask))


def videos() -> tuple[float, ...]:
    """Forward and backward over FlexAttention: the worst cell, then the range of the others."""
    found = sorted(over_flex("h200-video", "video", **{"pass": "forward+backward"}))
    return found[0], found[1], found[-1]


def gaps(**columns: Any) -> list[float]:
    found = select("h200-roofline", **columns)
    return [gap(row) for row in found if row["bench"] != HELD_OUT]


def largest_gaps() -> tuple[float, float]:
    """Of forward rows at head_dim 128, and of backward rows at head_dim 256 without a mask."""
    long = max(gaps(bench="forward", head_dim=128))
    return long, -min(gaps(head_dim=256, mask="none"))


def predicted_cells() -> tuple[int, int]:
    found = gaps()
    return len(found), math.ceil(max(map(abs, found)))


def short_calls() -> tuple[int, int]:
    found = select("h200-roofline", bench=HELD_OUT)
    return sum(abs(gap(row)) <= BAR for row in found), len(found)


def cascades() -> Iterable[float]:
    chosen = sorted(select("h200-paged", bench="cascade"), key=lambda row: row["seqlen"])
    yield from (row["peers"]["one call"] for row in chosen)
    yield from (row["value"] for row in chosen[1:])


def loop_swap() -> Iterable[float]:
    """v2 over v1 where a batch fills the device, then of one long sequence of many heads."""
    cells: dict[tuple, dict[str, float]] = {}
    for r in rows("h200-versions"):
        at = r["head_dim"], r["mask"], r["batch"], r["seqlen"]
        cells.setdefault(at, {})[r["kernel"]] = r["value"]
    faster = {at: found["v2"] / found["v1"] for at, found in cells.items()}
    for is_chosen in (lambda at: at[2] > 1, lambda at: at[3] == 16384):
        chosen = [ratio for at, ratio in faster.items() if is_chosen(at)]
        yield from (min(chosen), max(chosen))


def step_gain(step: str, head_dim: int) -> float:
    """The mean gain of one step of the ablation."""
    return geomean(ratios("h200-ablation", kernel=step, head_dim=head_dim))


def ablation_steps() -> tuple[float, float, float]:
    overlap = 100 * (step_gain("overlap", 128) - 1)
    return step_gain("specialisation", 128), overlap, step_gain("TMA", 64)


def dynamic_order() -> tuple[float, float]:
    return spread(ratios("h200-ablation", kernel="dynamic hand-out"))[1:]


def errors_of(kernel: str, **columns: Any) -> dict[str, float]:
    """RMSE by family of inputs."""
    chosen = select("h200-accuracy", bench="forward", kernel=kernel, **columns)
    return {row["family"]: row["value"] for row in chosen}


def relative_errors(kernel: str, other: str, **columns: Any) -> dict[str, float]:
    ours, theirs = errors_of(kernel, **columns), errors_of(other, **columns)
    return {family: ours[family] / theirs[family] for family in ours}


def fp32_errors() -> tuple[float, float]:
    found = relative_errors("triton", "unfused, GPU", dtype="float32").values()
    return min(found), max(found)


def errors_over_fa2() -> Iterable[float]:
    for kernel in ("hopper", "triton"):
        found = relative_errors(kernel, "sdpa fa2, GPU", dtype="bfloat16")
        yield from (found["N(0,1)"], found["sink"])


def fp8_over_fa3() -> list[float]:
    found = relative_errors("hopper fp8", "FA3 FP8, GPU")
    return [found[name] for name in ("outliers", "channel bias", "ties", "N(0,1)", "sink")]


def ring_rates() -> list[float]:
    """The rates of the hide condition, TFLOP/s."""
    return [H200.best(backward, 128) / 1e12 for backward in (False, True)]


def fastest_long_call() -> list[float]:
    """Milliseconds of 16 heads of 128 over 16,384 tokens."""
    (row,) = select("h200-forward", bench="forward", mask="none", head_dim=128, seqlen=16384)
    return [4 * 16384**2 * 128 * 16 / row["value"] / 1e9]


def approximation_gains(seqlen: int) -> list[float]:
    """How many times less time than exact attention: Linformer, then the patterns' range."""
    cells = {
        row["kernel"]: row["value"]
        for row in select("cpu-approximate", seqlen=seqlen, mask="random")
    }
    patterns = [cells["exact"] / cells[name] for name in ("Longformer", "BigBird", "window")]
    return [cells["exact"] / cells["Linformer"], min(patterns), max(patterns)]


BENCHMARKS, IO, KERNELS, NUMERICS = (
    f"docs/{page}.md" for page in ("benchmarks", "io", "kernels", "numerics")
)
SENTENCES = (
    Sentence(
        "README.md",
        "On an H200 in bf16 it runs at {:.2f} times the speed of SDPA's fastest backend (geometric"
        " mean over {} shapes, {:.2f} to {:.2f}), its backward at {:.2f} times ({:.2f} to {:.2f})."
        " Beside the fastest peer of each shape the forward runs at {:.2f} times the speed ({:.2f}"
        " to {:.2f}, with FlashAttention-3), the backward at {:.2f} times ({:.2f} to {:.2f}, with"
        " FlashAttention-4)",
        readme_ratios,
    ),
    Sentence(
        "README.md",
        "they reach {:.2f} of the fastest peer's speed forward and {:.2f} backward",
        portable_ratios,
    ),
    Sentence(
        "README.md", "A call takes {:.1f} to {:.1f} times the host time of SDPA's", host_overheads
    ),
    Sentence(
        BENCHMARKS, "in the forward rows below the control is {:.3f} to {:.3f}", control_range
    ),
    Sentence(BENCHMARKS, "{} of {} models are measured yet", measured_models),
    Sentence(
        BENCHMARKS,
        "geomean {:.3f}, where the threshold is 1.00, and {:.2f} in the worst cell",
        widths,
    ),
    Sentence(
        BENCHMARKS,
        "Geomean of all 36 ratios to the best of FlashAttention-3 and cuDNN: {:.3f}, the least"
        " {:.3f}",
        lambda: spread(ratios("h200-forward", bench="forward"))[:2],
    ),
    Sentence(
        BENCHMARKS,
        "a geomean of {:.2f} ({:.2f} to {:.2f}) for the portable kernels and {:.2f} ({:.2f} to"
        " {:.2f}) for the Hopper kernels",
        forward_flex,
    ),
    Sentence(
        BENCHMARKS,
        "the geomean of the {} ratios is {:.3f} (least {:.3f}: head_dim 256, causal, 16k), and"
        " {:.2f} with the quantisation",
        eight_bits,
    ),
    Sentence(
        BENCHMARKS,
        "{:.3f} at head_dim 64, where the threshold is 1.00, {:.3f} at 128, {:.3f} at 256",
        backward_ratios,
    ),
    Sentence(
        BENCHMARKS,
        "causal calls of 512 ({:.2f}) and 1,024 tokens ({:.2f}) at head_dim 64. The deterministic"
        " backward is at {:.2f} of the default in the worst cell",
        short_backward,
    ),
    Sentence(
        BENCHMARKS,
        "Grouped heads, the same tokens and hidden size: geomean {:.3f} over the best peer, {:.2f}"
        " in the worst cell",
        backward_groups,
    ),
    Sentence(
        BENCHMARKS,
        "`deterministic=True` is at {:.2f} to {:.2f} of the default here",
        deterministic_groups,
    ),
    Sentence(
        BENCHMARKS,
        "a geomean of {:.2f} of it ({:.2f} to {:.2f} at head_dim 128, {:.2f} to {:.2f} at 64,"
        " {:.2f} to {:.2f} at 256)",
        backward_flex,
    ),
    Sentence(
        BENCHMARKS,
        "75 % at head_dim 64, takes {:.3f}. The same mask as bits should take at most 1.1 times as"
        " long as its closed form: causal masks take {:.2f} (head_dim 64) and {:.2f} (128), windows"
        " {:.2f} and {:.2f}",
        masks_of_bits,
    ),
    Sentence(
        BENCHMARKS,
        "{:.1f} in the worst cell, a sliding tile of whole blocks, {:.1f} to {:.1f} in the others",
        videos,
    ),
    Sentence(
        "docs/masks.md",
        "{:.1f} to {:.0f} times as fast with gradients on an H200",
        lambda: videos()[::2],
    ),
    Sentence(
        BENCHMARKS,
        "predicted up to {:.0f} % too long. The worst cells are those, and the kernels of one"
        " gradient at head_dim 256 without a mask, predicted up to {:.0f} % too short",
        largest_gaps,
    ),
    Sentence(
        BENCHMARKS, "Of the rows in the file now, {} are within 15 %", lambda: short_calls()[:1]
    ),
    Sentence(
        IO,
        "[the {} cells it was made with](benchmarks.md#h200-predicted) within {} %",
        predicted_cells,
    ),
    Sentence(IO, "when they were held out, and {} of {} since a change", short_calls),
    Sentence(IO, "# measured: {:.2f} ms", fastest_long_call),
    Sentence(
        IO,
        "Measured were {:.1f} us, {:.1f} us and {:,.0f} us for the one calls, {:.1f} us and {:.1f}"
        " us with overlap",
        cascades,
    ),
    Sentence(
        KERNELS,
        "gains a factor of {:.0f} to {:.0f} where a batch fills the card, and {:.0f} to {:.0f}"
        " where one long sequence does not",
        loop_swap,
    ),
    Sentence(
        KERNELS,
        "specialisation is the largest step ({:.1f}x). Overlap adds {:.0f} %, ping-pong loses 1 to"
        " 2 %. At head_dim 64 it is TMA ({:.1f}x)",
        ablation_steps,
    ),
    Sentence(
        KERNELS,
        "Dynamic hand-out is the part of v4 that pays on Hopper ({:.2f}x to {:.2f}x, causal)",
        dynamic_order,
    ),
    Sentence(
        NUMERICS,
        "`triton` has {:.2f} to {:.2f} times the RMSE of unfused attention on the same GPU",
        fp32_errors,
    ),
    Sentence(
        NUMERICS,
        "`hopper` has {:.2f} times its RMSE on N(0,1) and {:.2f} with a sink, `triton` {:.2f} and"
        " {:.2f}",
        errors_over_fa2,
    ),
    Sentence(
        NUMERICS,
        "{:.2f} of its RMSE on outliers (the threshold is 0.6), {:.2f} with biased channels,"
        " {:.2f} on ties, {:.2f} on N(0,1), {:.2f} with a sink",
        fp8_over_fa3,
    ),
    Sentence(
        "docs/approximations.md",
        "At 8,192 tokens Linformer takes {:.0f} times less time than exact attention, the patterns"
        " {:.0f} to {:.0f} times",
        lambda: approximation_gains(8192),
    ),
    Sentence(
        "docs/ring.md",
        "F = {:.0f} TFLOP/s forward and {:.0f} backward (an H200's kernels",
        ring_rates,
    ),
)
