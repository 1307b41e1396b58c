"""`python -m benchmarks short`: sequences of at most 512 tokens, where launches and tails decide.

Rows are GPU time by graph replay against the fastest backend of SDPA; what a call costs the host is
`python -m benchmarks host`.
"""

from collections.abc import Iterator
from functools import partial
from itertools import product

import torch

from onchip.cli.bench import gpu, patterns
from onchip.cli.bench.forward import our_specs, sdpa_rivals
from onchip.cli.bench.harness import Case, Row, Session, worst_cell

# (batch, seqlen, head_dim, mask): alone or as a large batch; 197 is a 14 x 14 image and its class
CELLS = tuple(product((1, 64), (64, 197, 512), (64, 128), ("none", "causal")))
SDPA = ("cudnn", "fa2", "efficient", "math")
AT_LEAST = 1 / 1.03


def _short(row: Row) -> bool:
    return row["bench"] == "short" and gpu.counts(row)


THRESHOLDS = (worst_cell("short, worst cell", _short, AT_LEAST),)


def run(session: Session) -> None:
    gpu.run(session, lambda: steps(session))


def cases(session: Session) -> Iterator[Case]:
    for batch, n, head_dim, mask in CELLS:
        wanted = n in (session.seqlens or (n,)) and head_dim in (session.head_dims or (head_dim,))
        if wanted and not (session.quick and n != 197):
            sizes = (head_dim, n, batch, gpu.HIDDEN // head_dim)
            yield Case("short", mask, torch.bfloat16, *sizes)


def steps(session: Session) -> Iterator[gpu.Step]:
    for case in cases(session):
        yield str(case), partial(measure, session, case)


def measure(session: Session, case: Case) -> list[Row]:
    pattern = patterns.plain(case.seqlen, case.mask)
    sets = gpu.draw_sets(case, session.device)
    check = gpu.OutputCheck({"normal": sets[0]}, pattern.visible)
    specs = our_specs("short", pattern, sets, check, sdpa_rivals(case, sets, check, SDPA))
    return gpu.contest(session, case, specs, gpu.MICROSECONDS)
