"""`python -m benchmarks masks`: what a mask saves, and what its form costs.

"window" rows: a sliding window over 65,536 tokens against peers that have one: FlashAttention-2,
FlexAttention (--flex), and FlashAttention-3 where it was built with it, which fa3-fwd was not.
"blocks" rows: a random share of the blocks against our own dense call, column `density` being the
share. "bits" rows: a mask given as blocks and bits against our own call that says the same by its
options.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch

import onchip
from onchip.cli.bench import gpu, patterns, peers
from onchip.cli.bench.forward import available
from onchip.cli.bench.gpu import GpuCandidate, Inputs, RowSpec
from onchip.cli.bench.harness import Case, Row, Session, Threshold, worst_cell
from onchip.cli.bench.patterns import Pattern
from onchip.cli.bench.peers import Attend

WINDOW, WINDOW_TOKENS = 1024, 65536
LENGTH = 16384
DENSITIES = (0.05, 0.1, 0.25, 0.5, 0.75)
HEAD_DIMS = (64, 128)
CLOSED_FORM = 1 / 1.10


def _is(bench: str) -> Callable[[Row], bool]:
    return lambda row: row["bench"] == bench and gpu.counts(row)


def _excess(rows: list[Row]) -> float:
    """The most by which time / dense time exceeds the density."""
    return max(1 / row["ratio"] - row["density"] for row in rows)


THRESHOLDS = (
    worst_cell("window against its best peer, worst cell", _is("window"), 1.0),
    Threshold(
        "blocks: time / dense time - density", _is("blocks"), at_most=0.05, measure=_excess, unit=""
    ),
    worst_cell("bits over closed form, worst cell", _is("bits"), CLOSED_FORM),
)


def run(session: Session) -> None:
    gpu.run(session, lambda: steps(session))


def steps(session: Session) -> Iterator[gpu.Step]:
    """--seqlens sets the length of blocks and bits; windows keep their own."""
    head_dims = session.head_dims or HEAD_DIMS
    lengths = session.seqlens or ((4096,) if session.quick else (LENGTH,))
    tokens = 8192 if session.quick else WINDOW_TOKENS
    for head_dim in head_dims:
        case = _case("window", f"window {WINDOW}", head_dim, tokens)
        yield str(case), partial(window, session, case)
    for n, head_dim, density in product(lengths, head_dims, DENSITIES):
        case = _case("blocks", f"{density:.0%} of blocks", head_dim, n)
        yield str(case), partial(blocks, session, case, density)
    for n, head_dim, closed in product(lengths, head_dims, (patterns.causal, wide_window)):
        case = _case("bits", closed(n).name, head_dim, n)
        yield str(case), partial(bits, session, case, closed(n))


def wide_window(n: int) -> Pattern:
    return patterns.window(n, WINDOW)


def _case(bench: str, mask: str, head_dim: int, n: int) -> Case:
    return Case(bench, mask, torch.bfloat16, head_dim, n, num_heads=gpu.HIDDEN // head_dim)


def window(session: Session, case: Case) -> list[Row]:
    pattern = wide_window(case.seqlen)
    sets = gpu.draw_sets(case, session.device)
    check = gpu.OutputCheck({"normal": sets[0]}, pattern.visible)
    makers = {
        "fa3": lambda: peers.fa3(causal=True, window_size=(WINDOW - 1, 0)),
        "fa2": lambda: fa2_window(WINDOW),
    }
    if session.flex:
        mod = lambda b, h, q, k: (q >= k) & (q - k < WINDOW)
        makers["flex"] = lambda: peers.flex(case.seqlen, mod, session.device)
    rivals = available(session, makers, sets, check)
    spec = RowSpec(case.bench, *_ours("onchip", pattern, sets), rivals)
    return gpu.contest(session, case, [spec], gpu.MILLISECONDS, required=("fa2",))


def fa2_window(window: int) -> Attend:
    """FlashAttention-2, causal with a window."""
    return peers.fa2(causal=True, window=window)


def blocks(session: Session, case: Case, density: float) -> list[Row]:
    pattern = patterns.blocks(case.seqlen, density, session.device)
    rows = compare(session, case, pattern, "dense", patterns.dense(case.seqlen))
    return [row | {"density": pattern.options["mask"].density()} for row in rows]


def bits(session: Session, case: Case, closed: Pattern) -> list[Row]:
    rule = onchip.masks.causal() if closed.name == "causal" else onchip.masks.window(WINDOW - 1, 0)
    mask = rule.build(1, 1, case.seqlen, case.seqlen, str(session.device))
    return compare(session, case, closed._replace(options={"mask": mask}), "closed form", closed)


def compare(session: Session, case: Case, ours: Pattern, name: str, other: Pattern) -> list[Row]:
    """Our call under one pattern against our call under another, both held to the rule."""
    sets = gpu.draw_sets(case, session.device)
    spec = RowSpec(case.bench, *_ours("onchip", ours, sets), [_ours(name, other, sets)[1]])
    return gpu.contest(session, case, [spec], gpu.MILLISECONDS)


def _ours(name: str, pattern: Pattern, sets: Sequence[Inputs]) -> tuple[str, GpuCandidate]:
    """The kernel that serves the pattern, and the candidate."""
    kernel = onchip.explain(*sets[0], **pattern.options).plan.kernel
    attend = partial(onchip.attention, **pattern.options)
    check = gpu.OutputCheck({"normal": sets[0]}, pattern.visible)
    return kernel, GpuCandidate(name, attend, sets, check, ours=True)
