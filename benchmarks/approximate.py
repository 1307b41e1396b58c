"""`python -m benchmarks approximate`: approximations of attention beside exact attention, on a CPU.

The methods are those of examples/approximate.py, which measures the same without this harness.
"""

from functools import partial

import torch

from benchmarks.approximate_report import load_example
from onchip.cli.bench.harness import Case, Row, Session, Threshold

PARTS = ("random", "model")
THRESHOLDS: tuple[Threshold, ...] = ()  # an approximation has none


def run(session: Session) -> None:
    example = load_example()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    session.where["threads"] = 1
    lengths = session.seqlens or example["QUICK_LENGTHS" if session.quick else "LENGTHS"]
    cells = [(n, part) for n in lengths for part in session.only or PARTS]
    cells = [(n, part) for n, part in cells if part == "random" or n <= example["MODEL_LENGTH"]]
    try:
        session.run(
            (f"{part}, {n:,} tokens", partial(_rows, example, n, part)) for n, part in cells
        )
    finally:
        torch.set_num_threads(threads)


def _rows(example: dict, seqlen: int, inputs: str) -> list[Row]:
    sizes = (example["HEAD_DIM"], seqlen, 1, example["HEADS"])
    case = Case("approximate", inputs, torch.float32, *sizes)
    with torch.no_grad():
        found = list(example["measure"](seqlen, inputs))
    return [case.row(r.method, r.ms, "ms", relative=r.error, peak_mb=r.mb) for r in found]
