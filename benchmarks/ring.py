"""`python -m benchmarks ring`: ring attention over processes of this machine, cut on one GPU, or
simulated on many.
"""

import torch

from benchmarks import ring_chunks, ring_ranks, ring_simulation
from onchip.cli.bench.harness import Session

PARTS = ("ranks", "chunks")
THRESHOLDS = (*ring_ranks.THRESHOLDS, *ring_chunks.THRESHOLDS, *ring_simulation.THRESHOLDS)


def run(session: Session) -> None:
    if session.seqlens or session.head_dims or session.flex:
        raise ValueError("--seqlens, --head-dims and --flex are for the benchmarks of a GPU")
    parts = session.only or (PARTS if torch.cuda.is_available() else PARTS[:1])
    if session.simulate:
        ring_simulation.run(session)
        return
    if "ranks" in parts:
        ring_ranks.run(session)
    if "chunks" in parts:
        ring_chunks.run(session)
