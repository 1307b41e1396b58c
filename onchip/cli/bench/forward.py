"""`onchip bench forward`: the forward pass, cell by cell, against the peers of the same run.

Rows named "forward" time a plain call. "forward triton" and "forward hopper" request a kernel by
name where a plain call runs another one. A row without FlashAttention-3 as a peer does not count.
--groups and --head-dims measure further cells, which have thresholds of their own.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import onchip
from onchip.cli.bench import gpu, patterns, peers
from onchip.cli.bench.gpu import GpuAccuracyCheck, GpuCandidate, Inputs, RowSpec
from onchip.cli.bench.harness import Case, Row, Session, Threshold, worst_cell
from onchip.cli.bench.patterns import Pattern

KERNELS = ("hopper", "triton")
SDPA = ("cudnn", "fa2", "efficient")


def _counts(row: Row) -> bool:
    return row["bench"] == "forward" and gpu.counts(row)


def _plain(row: Row) -> bool:
    return _counts(row) and gpu.is_of_papers(row)


THRESHOLDS = (
    Threshold("forward", _plain, at_least=1.0),
    worst_cell("forward, worst cell", _plain, 0.92),
    Threshold(
        "RMSE over cuDNN's",
        lambda row: row["bench"] == "forward" and gpu.has_cudnn(row),
        at_most=1.02,
        measure=gpu.worst_error,
        unit="x",
    ),
    gpu.OVER_FLEX,
    *gpu.other_cells("forward", _counts, groups=(1.0, 0.93), head_dims=(1.0, 0.95)),
)


def run(session: Session) -> None:
    gpu.run(session, lambda: steps(session))


def steps(session: Session) -> Iterator[gpu.Step]:
    for case in gpu.grid(session, "forward"):
        yield str(case), partial(measure, session, case)


def measure(session: Session, case: Case) -> list[Row]:
    pattern, sets, check = prepare(session, case)
    rivals = [*sdpa_rivals(case, sets, check, SDPA), *other_rivals(session, case, sets, check)]
    specs = our_specs("forward", pattern, sets, check, rivals)
    return gpu.contest(session, case, specs, gpu.tflops(case), required=("fa3",))


def prepare(
    session: Session, case: Case
) -> tuple[patterns.Pattern, list[gpu.Inputs], gpu.OutputCheck]:
    """The mask of a cell, its inputs, and the accuracy check, on ordinary inputs and outliers."""
    pattern = patterns.plain(case.seqlen, case.mask)
    sets = gpu.draw_sets(case, session.device)
    samples = {"normal": sets[0], "outlier": gpu.draw(case, session.device, "outlier")}
    return pattern, sets, gpu.OutputCheck(samples, pattern.visible)


def our_specs(
    bench: str,
    pattern: Pattern,
    sets: Sequence[Inputs],
    check: GpuAccuracyCheck,
    rivals: Sequence[GpuCandidate],
    kernel: str | None = None,
) -> list[RowSpec]:
    """A plain call, then by name each GPU kernel that is not `kernel`, the one it gets."""
    attend = partial(onchip.attention, **pattern.options)
    plain = kernel or onchip.explain(*sets[0][:3], **pattern.options).plan.kernel
    specs = [RowSpec(bench, plain, GpuCandidate("onchip", attend, sets, check, ours=True), rivals)]
    for name in KERNELS:
        if name != plain:
            by_name = GpuCandidate(name, partial(attend, kernel=name), sets, check, ours=True)
            specs.append(RowSpec(f"{bench} {name}", name, by_name, rivals))
    return specs


def sdpa_rivals(
    case: Case, sets: Sequence[Inputs], check: GpuAccuracyCheck, names: Sequence[str]
) -> list[GpuCandidate]:
    """Each SDPA backend in either layout: the faster one will count."""
    options = {"is_causal": case.mask == "causal"}
    if case.kv_heads != case.num_heads:
        options["enable_gqa"] = True
    attends = {name: peers.backend(name, **options) for name in names}
    pairs = (gpu.both_layouts(name, attend, sets, check) for name, attend in attends.items())
    return [candidate for pair in pairs for candidate in pair]


def other_rivals(
    session: Session, case: Case, sets: Sequence[Inputs], check: GpuAccuracyCheck
) -> list[GpuCandidate]:
    """FlashAttention-3 and 4 if they are installed, FlexAttention if the session has `flex`."""
    return [*flash_rivals(session, case, sets, check), *flex_rivals(session, case, sets, check)]


def flash_rivals(
    session: Session, case: Case, sets: Sequence[Inputs], check: GpuAccuracyCheck
) -> list[GpuCandidate]:
    makers = {"fa3": lambda: peers.fa3(causal=case.mask == "causal")}
    return available(session, makers, sets, check) + fa4_rivals(session, case, sets, check)


def fa4_rivals(
    session: Session, case: Case, sets: Sequence[Inputs], check: GpuAccuracyCheck
) -> list[GpuCandidate]:
    makers = {"fa4": lambda: peers.fa4(causal=case.mask == "causal")}
    return available(session, makers, sets, check)


def flex_rivals(
    session: Session, case: Case, sets: Sequence[Inputs], check: GpuAccuracyCheck
) -> list[GpuCandidate]:
    return compile_flex(session, case, sets, check) if session.flex else []


def compile_flex(
    session: Session, case: Case, sets: Sequence[Inputs], check: GpuAccuracyCheck
) -> list[GpuCandidate]:
    mod = (lambda b, h, q, k: q >= k) if case.mask == "causal" else None
    makers = {"flex": lambda: peers.flex(case.seqlen, mod, session.device)}
    return available(session, makers, sets, check)


def available(session: Session, makers: dict, sets, check: GpuAccuracyCheck) -> list[GpuCandidate]:
    """The candidates that can be built on this machine; the reason for each missing one is printed
    once.
    """
    candidates = []
    for name, make in makers.items():
        layout = peers.heads_first if name == "flex" else (lambda x: x)
        try:
            candidates.append(GpuCandidate(name, make(), sets, check, layout=layout))
        except Exception as error:
            session.note(f"{name} is left out: {gpu.sentence(error)}")
    return candidates
