"""`onchip bench ring`: ring attention over processes of this machine, or simulated on GPUs."""

from onchip.bench import ring_ranks, ring_simulation
from onchip.bench.harness import Session

BARS = (*ring_ranks.BARS, *ring_simulation.BARS)


def run(session: Session) -> None:
    if session.seqlens or session.head_dims or session.flex:
        raise ValueError("--seqlens, --head-dims and --flex are for the benchmarks of a GPU")
    (ring_simulation if session.simulate else ring_ranks).run(session)
