"""`onchip bench forward`: the forward pass, cell by cell, against the peers of the same run.

Rows named "forward" are what a plain call gets; "forward triton" and "forward hopper" are kernels
asked for by name, where a plain call gets another one. A row without FlashAttention-3 beside it
does not count.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import onchip
from onchip.cli.bench import gpu, patterns, peers
from onchip.cli.bench.gpu import Claim, Contender, Inputs, Judge
from onchip.cli.bench.harness import Bar, Case, Row, Session, worst_cell
from onchip.cli.bench.patterns import Pattern

KERNELS = ("hopper", "triton")
SDPA = ("cudnn", "fa2", "efficient")


def _plain(row: Row) -> bool:
    return row["bench"] == "forward" and gpu.counts(row)


def _beside_flex(row: Row) -> bool:
    return row["kernel"] == "triton" and "flex" in row["ratios"]


BARS = (
    Bar("forward", _plain, at_least=1.0),
    Bar("forward, worst cell", _plain, at_least=0.92, measure=worst_cell(0.92)),
    Bar(
        "RMSE over cuDNN's",
        lambda row: row["bench"] == "forward" and gpu.beside_cudnn(row),
        at_most=1.02,
        measure=gpu.worst_error,
        unit="x",
    ),
    Bar(
        "triton over FlexAttention",
        _beside_flex,
        at_least=1.0,
        measure=gpu.against_flex,
        optional=True,
    ),
)


def run(session: Session) -> None:
    gpu.run(session, lambda: steps(session))


def steps(session: Session) -> Iterator[gpu.Step]:
    for case in gpu.grid(session, "forward"):
        yield str(case), partial(measure, session, case)


def measure(session: Session, case: Case) -> list[Row]:
    pattern = patterns.plain(case.seqlen, case.mask)
    sets = gpu.draw_sets(case, session.device)
    samples = {"normal": sets[0], "outlier": gpu.draw(case, session.device, "outlier")}
    judge = gpu.OutputJudge(samples, pattern.visible)
    rivals = [*sdpa_rivals(case, sets, judge, SDPA), *other_rivals(session, case, sets, judge)]
    claims = our_claims("forward", pattern, sets, judge, rivals)
    return gpu.contest(session, case, claims, gpu.tflops(case), required=("fa3",))


def our_claims(
    bench: str,
    pattern: Pattern,
    sets: Sequence[Inputs],
    judge: Judge,
    rivals: Sequence[Contender],
    kernel: str | None = None,
) -> list[Claim]:
    """A plain call, then by name each GPU kernel that is not `kernel`, the one it gets."""
    attend = partial(onchip.attention, **pattern.options)
    plain = kernel or onchip.explain(*sets[0][:3], **pattern.options).plan.kernel
    claims = [Claim(bench, plain, Contender("onchip", attend, sets, judge, ours=True), rivals)]
    for name in KERNELS:
        if name != plain:
            by_name = Contender(name, partial(attend, kernel=name), sets, judge, ours=True)
            claims.append(Claim(f"{bench} {name}", name, by_name, rivals))
    return claims


def sdpa_rivals(
    case: Case, sets: Sequence[Inputs], judge: Judge, names: Sequence[str]
) -> list[Contender]:
    """Each SDPA backend in either layout: the faster one will count."""
    causal = case.mask == "causal"
    attends = {name: peers.backend(name, is_causal=causal) for name in names}
    pairs = (gpu.both_layouts(name, attend, sets, judge) for name, attend in attends.items())
    return [contender for pair in pairs for contender in pair]


def other_rivals(
    session: Session, case: Case, sets: Sequence[Inputs], judge: Judge
) -> list[Contender]:
    """FlashAttention-3 if it is installed, FlexAttention if it was asked for."""
    causal = case.mask == "causal"
    makers = {"fa3": lambda: peers.fa3(causal=causal)}
    return available(session, makers, sets, judge) + flex_rivals(session, case, sets, judge)


def flex_rivals(
    session: Session, case: Case, sets: Sequence[Inputs], judge: Judge
) -> list[Contender]:
    if not session.flex:
        return []
    mod = (lambda b, h, q, k: q >= k) if case.mask == "causal" else None
    makers = {"flex": lambda: peers.flex(case.seqlen, mod, session.device)}
    return available(session, makers, sets, judge)


def available(session: Session, makers: dict, sets, judge: Judge) -> list[Contender]:
    """The contenders that can be made here; why another cannot is said once."""
    found = []
    for name, make in makers.items():
        layout = peers.heads_first if name == "flex" else (lambda x: x)
        try:
            found.append(Contender(name, make(), sets, judge, layout=layout))
        except Exception as error:
            session.note(f"{name} is left out: {gpu.sentence(error)}")
    return found
