"""`python -m benchmarks versions`: FlashAttention v1 to v4 as examples/versions writes them, side
by side.

Every row is one of them, or onchip itself, on one problem; its ratio is to the version before it,
onchip's to the last. By the papers' protocol there are many heads to fill the GPU with; the cells
with one sequence of eight heads show what it means that v1 has nothing else to be parallel over.
"""

import sys
from collections.abc import Iterator
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

import onchip
from onchip.cli.bench import gpu, patterns
from onchip.cli.bench.gpu import GpuCandidate, RowSpec
from onchip.cli.bench.harness import Case, Row, Session, Threshold
from onchip.cli.bench.peers import Attend

FOLDER = Path(__file__).parents[1] / "examples" / "versions"
VERSIONS = ("v1", "v2", "v3", "v4")
LENGTHS, HEAD_DIMS = (1024, 4096, 16384), (64, 128)
FEW_HEADS, FEW_HEADS_DIM = 8, 128
THRESHOLDS: tuple[Threshold, ...] = ()  # they are to be read, not to be fastest


def run(session: Session) -> None:
    folder()
    gpu.run(session, lambda: steps(session))


def steps(session: Session) -> Iterator[gpu.Step]:
    for case in cases(session):
        yield f"{case}, batch {case.batch}", partial(measure, session, case)


def cases(session: Session) -> Iterator[Case]:
    """The papers' protocol, then one sequence of few heads."""
    yield from gpu.grid(session, "versions", lengths=LENGTHS, head_dims=HEAD_DIMS)
    lengths = session.seqlens or (gpu.QUICK_LENGTHS if session.quick else LENGTHS)
    if FEW_HEADS_DIM in (session.head_dims or HEAD_DIMS):
        for n in lengths:
            yield Case("versions", "none", torch.bfloat16, FEW_HEADS_DIM, n, 1, FEW_HEADS)


def measure(session: Session, case: Case) -> list[Row]:
    makers = {name: version(name, case.mask == "causal") for name in VERSIONS}
    before = dict(zip((*VERSIONS[1:], "onchip"), VERSIONS, strict=True))
    return contest(session, case, enter(session, case, makers), before)


def contest(
    session: Session, case: Case, candidates: dict[str, GpuCandidate], before: dict[str, str]
) -> list[Row]:
    """A row each, its ratio to the candidate that `before` names; onchip is the control."""

    def spec(name: str) -> RowSpec:
        against = [candidates[before[name]]] if name in before else []
        return RowSpec(case.bench, name, candidates[name], against)

    order = ["onchip", *(name for name in candidates if name != "onchip")]
    rows = gpu.contest(session, case, [spec(name) for name in order], gpu.tflops(case))
    return rows[1:] + rows[:1]


def enter(session: Session, case: Case, makers: dict[str, Attend]) -> dict[str, GpuCandidate]:
    """The candidates of examples/versions and a plain call of onchip, under the accuracy rule."""
    pattern = patterns.plain(case.seqlen, case.mask)
    sets = gpu.draw_sets(case, session.device)
    samples = {"normal": sets[0], "outlier": gpu.draw(case, session.device, "outlier")}
    check = gpu.OutputCheck(samples, pattern.visible)
    functions = makers | {"onchip": partial(onchip.attention, **pattern.options)}
    return {name: GpuCandidate(name, f, sets, check, ours=True) for name, f in functions.items()}


def version(name: str, causal: bool, **options: int) -> Attend:
    """`attention` of examples/versions/NAME.py without its lse."""
    attention = load(name).attention
    return lambda q, k, v: attention(q, k, v, causal, **options)[0]


@cache
def load(name: str) -> ModuleType:
    """A file of the examples as a module: they import one another as scripts do."""
    path = str(folder())
    sys.path.insert(0, path)
    try:
        return import_module(name)
    finally:
        sys.path.remove(path)


def folder() -> Path:
    """Where the examples are; ValueError where there are none."""
    if not FOLDER.is_dir():
        raise ValueError(f"this benchmark times the examples of a source tree: no {FOLDER} here")
    return FOLDER
