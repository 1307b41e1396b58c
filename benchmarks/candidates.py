"""`python -m benchmarks candidates`: rows of the Hopper forward that are not in use
(tiles.HOPPER_CANDIDATES), beside the row in use and against the peers, in one process.

A row of the results is a row of the tile tables; `kernel` has its name, and the first of a cell is
the one in use. Ratios are to the best peer. A candidate that breaks the accuracy rule gets no row.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

import onchip
from onchip.cli.bench import forward, gpu
from onchip.cli.bench.gpu import GpuAccuracyCheck, GpuCandidate, Inputs, RowSpec
from onchip.cli.bench.harness import Case, Row, Session
from onchip.cli.bench.patterns import Pattern
from onchip.kernels import tiles

IN_USE = "in use"
LENGTHS, QUICK_LENGTHS = (1024, 4096, 16384), (4096, 16384)
THRESHOLDS = ()  # a candidate that wins becomes a row in use, and is then held to those of forward


def run(session: Session) -> None:
    gpu.run(session, lambda: steps(session))


def steps(session: Session) -> Iterator[gpu.Step]:
    dims = session.head_dims or tuple(tiles.HOPPER_CANDIDATES)
    lengths = session.seqlens or (QUICK_LENGTHS if session.quick else LENGTHS)
    for head_dim in dims:
        for mask in ("none", "causal"):
            for n in lengths:
                sizes = head_dim, n, max(1, gpu.TOKENS // n), gpu.HIDDEN // head_dim
                case = Case("candidates", mask, torch.bfloat16, *sizes)
                yield str(case), partial(measure, session, case)


def measure(session: Session, case: Case) -> list[Row]:
    pattern, sets, check = forward.prepare(session, case)
    rivals = [
        *forward.sdpa_rivals(case, sets, check, ("cudnn",)),
        *forward.other_rivals(session, case, sets, check),
    ]
    return gpu.contest(session, case, _specs(case, pattern, sets, check, rivals), gpu.tflops(case))


def _specs(
    case: Case,
    pattern: Pattern,
    sets: Sequence[Inputs],
    check: GpuAccuracyCheck,
    rivals: Sequence[GpuCandidate],
) -> list[RowSpec]:
    """The row in use, then every candidate of the width."""
    plain = partial(onchip.attention, kernel="hopper", **pattern.options)
    width = tiles.hopper_forward_width(case.head_dim)
    attends = {IN_USE: plain}
    for name, row in tiles.HOPPER_CANDIDATES.get(width, {}).items():
        attends[name] = partial(_attend_with, plain, width, row)
    made = [GpuCandidate(name, f, sets, check, ours=True) for name, f in attends.items()]
    return [RowSpec("candidates", ours.name, ours, rivals) for ours in made]


def _attend_with(
    attend: partial, width: int, row: tiles.HopperConfig, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """The output with a candidate's row. A CUDA graph keeps the row it is captured with."""
    with tiles.candidate_trial(width, row):
        return attend(q, k, v)
