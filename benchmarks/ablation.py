"""`python -m benchmarks ablation`: from v2 to v4 one idea at a time, with the kernels of
examples/versions.

A row is a step: `kernel` names the added idea, and the ratio is to the step before. Two steps go
back to v1 in one respect each, normalising and dividing keys among warps. Lazy rescaling
and the polynomial are each added alone to the last step of the scheduler. Steps about the order of
tiles concern causal calls only, where tiles differ in length. The last row is onchip's own kernel,
which is also compared with that last step of the scheduler.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from benchmarks import versions
from onchip.cli.bench import gpu
from onchip.cli.bench.harness import Case, Row, Session

LENGTHS, HEAD_DIMS = (4096,), (64, 128)
THRESHOLDS = versions.THRESHOLDS


class AblationStep(NamedTuple):
    """One more idea: the example that has it, with which options, and what it is compared with."""

    name: str
    example: str
    options: dict[str, int]
    before: str | None
    causal_only: bool = False


_PLAIN = {"lazy": False, "poly": False, "dynamic": False}
_ALL = 1 << 30  # heads
_ORDERED = {"lazy": False, "poly": False}
LAST = "polynomial exp2"
STEPS = (
    AblationStep("v2", "v2", {}, None),
    AblationStep("v2 by hand", "v2_gluon", {"tma": False}, "v2"),
    AblationStep("TMA", "v2_gluon", {"tma": True}, "v2 by hand"),
    AblationStep("normalised always", "v2_warps", {"normalise": True}, "TMA"),
    AblationStep("keys over warps", "v2_warps", {"split_keys": True}, "TMA"),
    AblationStep("specialisation", "v3", {"overlap": False, "pingpong": False}, "TMA"),
    AblationStep("overlap", "v3", {"overlap": True, "pingpong": False}, "specialisation"),
    AblationStep("ping-pong", "v3", {"overlap": True, "pingpong": True}, "overlap"),
    AblationStep("persistence", "v4", _PLAIN | {"section": 1}, "ping-pong"),
    AblationStep("longest first", "v4", _PLAIN | {"section": _ALL}, "persistence", True),
    AblationStep("L2 sections", "v4", _PLAIN, "longest first", True),
    AblationStep("dynamic hand-out", "v4", _ORDERED, "L2 sections", True),
    AblationStep("lazy rescale", "v4", _ORDERED | {"lazy": True}, "dynamic hand-out"),
    AblationStep(LAST, "v4", _ORDERED | {"poly": True}, "dynamic hand-out"),
)


def run(session: Session) -> None:
    versions.folder()
    gpu.run(session, lambda: steps(session))


def steps(session: Session) -> Iterator[gpu.Step]:
    for case in gpu.grid(session, "ablation", lengths=LENGTHS, head_dims=HEAD_DIMS):
        yield str(case), partial(measure, session, case)


def measure(session: Session, case: Case) -> list[Row]:
    causal = case.mask == "causal"
    chosen = [step for step in STEPS if causal or not step.causal_only]
    makers = {s.name: versions.version(s.example, causal, **s.options) for s in chosen}
    before = {step.name: before_of(step, causal) for step in chosen if step.before is not None}
    before["onchip"] = before[LAST]
    return versions.contest(session, case, versions.enter(session, case, makers), before)


def before_of(step: AblationStep, causal: bool) -> str:
    """What step is compared with; where tiles are of one length, steps about order fall out."""
    before = next(s for s in STEPS if s.name == step.before)
    return before.name if causal or not before.causal_only else before_of(before, causal)
