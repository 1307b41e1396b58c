"""`onchip bench short`: sequences of at most 512 tokens, where launches and tails decide.

"short" rows are GPU time by graph replay against the fastest backend of SDPA. "host" rows are what
an eager call costs the calling thread, which no graph replay shows.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

import onchip
from onchip.bench import gpu, patterns
from onchip.bench.forward import our_claims, sdpa_rivals
from onchip.bench.harness import Bar, Case, Refused, Row, Session, worst_cell
from onchip.bench.peers import heads_first, sdpa

# (batch, seqlen, head_dim, mask): alone or as a large batch; 197 is a 14 x 14 image and its class
CELLS = tuple(product((1, 64), (64, 197, 512), (64, 128), ("none", "causal")))
SDPA = ("cudnn", "fa2", "efficient", "math")
HOST_CALLS = 100
AT_LEAST = 1 / 1.03


def _short(row: Row) -> bool:
    return row["bench"] == "short" and gpu.counts(row)


BARS = (
    Bar("short, worst cell", _short, at_least=AT_LEAST, measure=worst_cell(AT_LEAST)),
    Bar("host time of a call", lambda row: row["bench"] == "host", at_most=60),
    Bar("host time, recording grad", lambda row: row["bench"] == "host grad", at_most=90),
)


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
    for bench, grad in (("host", False), ("host grad", True)):
        case = Case(bench, "none", torch.bfloat16, 64, 64, num_heads=8)
        yield str(case), partial(host, session, case, grad)


def measure(session: Session, case: Case) -> list[Row]:
    pattern = patterns.causal(case.seqlen) if case.mask == "causal" else patterns.dense(case.seqlen)
    sets = gpu.draw_sets(case, session.device)
    judge = gpu.OutputJudge({"normal": sets[0]}, pattern.visible)
    claims = our_claims("short", pattern, sets, judge, sdpa_rivals(case, sets, judge, SDPA))
    return gpu.contest(session, case, claims, gpu.MICROSECONDS)


def host(session: Session, case: Case, grad: bool) -> list[Row]:
    """Microseconds of the calling thread per call, the median over rounds in turns with SDPA.

    The problem is so small that the GPU keeps up, so that the thread never waits for it. A call
    that synchronises is refused.
    """
    q, k, v = (x.requires_grad_(grad) for x in gpu.draw(case, session.device))
    theirs = [heads_first(x.detach()).requires_grad_(grad) for x in (q, k, v)]
    jobs = {"onchip": partial(onchip.attention, q, k, v), "sdpa": partial(sdpa, *theirs)}
    for job in (*jobs.values(), *jobs.values()):
        job()
    _check_no_sync(jobs["onchip"])
    times = host_times(jobs, gpu.QUICK_ROUNDS if session.quick else gpu.ROUNDS)
    ratio = gpu.paired(times["onchip"], times["sdpa"])
    ours, peer = (statistics.median(times[name]) for name in ("onchip", "sdpa"))
    kernel = onchip.explain(q, k, v).plan.kernel
    columns = {"peers": {"sdpa": peer}, "best_peer": "sdpa", "ratio": ratio.ratio}
    row = case.row(kernel, ours, "us", **columns)
    return [row | {"band": list(ratio[1:]), "ratios": {"sdpa": list(ratio)}, "doubts": []}]


def host_times(jobs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Microseconds per call by job and round; the GPU is idle when the clock starts."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for i in range(rounds):
        for name in reversed(jobs) if i % 2 else jobs:
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(HOST_CALLS):
                jobs[name]()
            times[name].append((time.perf_counter() - start) / HOST_CALLS * 1e6)
    torch.cuda.synchronize()
    return times


def _check_no_sync(job: Callable[[], object]) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        job()
    except RuntimeError as error:
        raise Refused(f"a call synchronises: {gpu.sentence(error)}") from error
    finally:
        torch.cuda.set_sync_debug_mode("default")
