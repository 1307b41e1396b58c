"""`python -m benchmarks roofline`: how long cost says that our Hopper kernels take, against what
was measured on an H200 (benchmarks/results/h200-forward.json and h200-backward.json, with which in
view the model was made, and h200-short.json, which was held out). Computes only.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from onchip.cli.bench.harness import Case, Row, RowRefused, Session, Threshold
from onchip.cost import make_problem, roofline
from onchip.cost.hardware import H200

RESULTS = Path(__file__).parent / "results"
SEEN = ("forward", "backward", "deterministic")  # while the model was made
HELD_OUT = "short"
PARTS = (*SEEN, HELD_OUT)
BAR = 15.0  # per cent


def run(session: Session) -> None:
    session.where["device"] = f"{H200.name}, predicted"
    chosen = session.only or PARTS
    cells = [row for row in measured() if row["bench"] in chosen]
    session.run((row["bench"], lambda row=row: predicted(row)) for row in cells)
    if not cells:
        raise RowRefused(f"there are no measurements in {RESULTS}: run this from a source tree")


def measured() -> Iterator[Row]:
    """Every row of the Hopper kernels."""
    for way in ("forward", "backward", HELD_OUT):
        path = RESULTS / f"h200-{way}.json"
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
        yield from (row for row in rows if row["kernel"] == "hopper")


def predicted(row: Row) -> Row:
    """The same cell in microseconds, with the measurement as its peer; ratio: measured over
    predicted.
    """
    backward, causal = row["pass"] == "backward", row["mask"] == "causal"
    shape = {name: row[name] for name in ("batch", "num_heads", "head_dim")}
    problem = make_problem(row["seqlen"], dtype=torch.bfloat16, causal=causal, **shape)
    problem = problem._replace(deterministic=row["bench"] == "deterministic")
    found = roofline.predict(problem, H200, "hopper", backward)
    pairs = row["seqlen"] ** 2 / (2 if causal else 1)
    flops = 4 * row["batch"] * row["num_heads"] * pairs * row["head_dim"]
    took_us = (roofline.backward_ratio(problem) if backward else 1) * flops / row["value"] / 1e6
    took_us = row["value"] if row["unit"] == "us" else took_us
    case = Case(
        row["bench"], row["mask"], problem.dtype, row["head_dim"], row["seqlen"], row["batch"],
        row["num_heads"], way=row["pass"],
    )  # fmt: skip
    return case.row(
        "hopper",
        1e6 * found.seconds,
        "us",
        peers={"measured": took_us},
        best_peer="measured",
        ratio=took_us / (1e6 * found.seconds),
        binds=found.binds,
        modelled=found.modelled,
        why=str(found),
    )


def gap(row: Row) -> float:
    """By how much of what was measured the prediction is off, in per cent."""
    return 100 * (1 / row["ratio"] - 1)


THRESHOLDS = tuple(
    Threshold(
        f"{part}: the worst cell is predicted within",
        lambda row, part=part: row["bench"] == part,
        at_most=BAR,
        measure=lambda rows: max(abs(gap(row)) for row in rows),
        unit="%",
    )
    for part in SEEN
)
