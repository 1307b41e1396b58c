"""`python -m benchmarks paper`: published figures about attention's bytes, predicted and measured.

The published kernels run one head at a time on the CPU, with ledgers that count every byte over the
HBM boundary; times are of this machine. On a GPU with NVIDIA's profiler the hardware counters are
compared with the prediction for our own kernel. `--only unfused` measures there how much faster a
call is than standard attention. The figures are in paper_claims.py.
"""

import time
from collections.abc import Callable, Iterator

import torch

import onchip
from benchmarks import counters
from benchmarks.paper_claims import LENGTHS, TUTORIAL, PaperClaim, claims, verdict
from benchmarks.paper_runs import unfused
from onchip.cli.bench.harness import Case, Row, RowRefused, Session, Threshold
from onchip.cli.bench.measure import alternate
from onchip.cost import make_problem

PARTS = ("claims", "counters", "unfused")
DEFAULT_PARTS = ("claims", "counters")
# 16k tokens, 2,048 of hidden size; from 4,096 on keys and values of the heads at work fit the L2.
COUNTED = tuple(
    counters.CountedCall(16384 // n, n, 2048 // d, d, causal)
    for d in (64, 128)
    for n in (4096, 16384)
    for causal in (False, True)
)
SECONDS = 180.0


def run(session: Session) -> None:
    torch.set_num_threads(session.threads)
    start = time.perf_counter()
    session.run([*_steps(session), ("seconds", lambda: elapsed_row(start))])


def _steps(session: Session) -> Iterator[tuple[str, Callable[[], Row]]]:
    parts = session.only or DEFAULT_PARTS
    if "claims" in parts:
        for claim in claims():
            slow = session.quick and claim.measure is not None and not claim.exact
            shortened = claim._replace(measure=None) if slow else claim
            yield claim.what, lambda shortened=shortened: claim_row(shortened)
    if "counters" in parts and torch.cuda.is_available():
        session.where["device"] = torch.cuda.get_device_name()
        for i, call in enumerate(COUNTED):
            yield f"counters, {call.seqlen}", lambda i=i: counter_row(i)
    if "unfused" in parts and torch.cuda.is_available():
        session.where["device"] = torch.cuda.get_device_name()
        for seqlen in LENGTHS:
            yield f"unfused, {seqlen}", lambda n=seqlen: unfused_row(n, torch.device("cuda"))


def claim_row(claim: PaperClaim) -> Row:
    """`value` is what was measured here, else what was predicted."""
    measured = claim.measure() if claim.measure else None
    value = claim.predicted if measured is None else measured
    return Case(claim.section, "none", None, 0, 0).row(
        claim.what,
        0.0 if value is None else value,
        claim.unit,
        published=claim.published,
        predicted=claim.predicted,
        measured=measured,
        exact=claim.exact,
        source=claim.source,
        verdict=verdict(claim, measured),
    )


def counter_row(which: int) -> Row:
    """All of HBM's traffic during a call of COUNTED; predicted: each tensor once, as the L2 holds
    what is read again.
    """
    call = COUNTED[which]
    shape = {"batch": call.batch, "num_heads": call.num_heads, "head_dim": call.head_dim}
    problem = make_problem(call.seqlen, dtype=torch.bfloat16, causal=call.causal, **shape)
    try:
        found = sum(kernel.hbm_bytes for kernel in counters.count(COUNTED)[which])
    except ValueError as error:
        raise RowRefused(str(error)) from error
    mask = "causal" if call.causal else "none"
    case = Case("counters", mask, problem.dtype, call.head_dim, call.seqlen, call.batch)
    gap = found / problem.min_bytes - 1
    return case.row(
        f"HBM traffic, ours, {call.seqlen:,} x {call.head_dim} {mask}",
        found / 1e9,
        "GB",
        published=None,
        predicted=problem.min_bytes / 1e9,
        measured=found / 1e9,
        exact=False,
        source="ncu",
        verdict=f"{gap:+.1%} of each tensor once",
    ) | {"num_heads": call.num_heads, "num_kv_heads": call.num_heads}


def unfused_row(seqlen: int, device: torch.device) -> Row:
    """Standard attention over ours, forward, bf16: as many heads of 128, up to 16, as scores of
    16,384 tokens in 16 heads.
    """
    heads = min(16, max(1, 16 * 16384**2 // seqlen**2))
    case = Case("unfused", "none", torch.bfloat16, 128, seqlen, 1, heads)
    q, k, v = torch.randn(3, 1, seqlen, heads, 128, device=device, dtype=torch.bfloat16)
    jobs = {"unfused": lambda: unfused(q, k, v), "onchip": lambda: onchip.attention(q, k, v)}
    try:
        best = alternate(jobs, device)
    except torch.OutOfMemoryError as error:
        raise RowRefused(f"standard attention does not fit: {error}") from error
    faster = best["unfused"] / best["onchip"]
    return case.row(
        f"time, standard over flash, {seqlen:,}",
        faster,
        "x",
        published=LENGTHS[seqlen],
        predicted=None,
        measured=faster,
        exact=False,
        source=TUTORIAL,
        verdict=f"{1e3 * best['unfused']:.3g} ms over {1e3 * best['onchip']:.3g} ms",
    )


def elapsed_row(start: float) -> Row:
    return Case("elapsed", "none", None, 0, 0).row("paper", time.perf_counter() - start, "s")


def gap(rows: list[Row]) -> float:
    """The largest share by which a measurement misses its prediction, in per cent."""
    return max(100 * abs(row["measured"] / row["predicted"] - 1) for row in rows)


THRESHOLDS = (
    Threshold(
        "ledgers are as predicted, within",
        lambda row: bool(row.get("exact")) and row["measured"] is not None,
        at_most=1e-9,
        measure=gap,
        unit="%",
    ),
    Threshold(
        "traffic of our kernels by the counters, within",
        lambda row: row["bench"] == "counters",
        at_most=5.0,
        measure=gap,
        unit="%",
        optional=True,
    ),
    Threshold("all of it", lambda row: row["bench"] == "elapsed", at_most=SECONDS),
)
