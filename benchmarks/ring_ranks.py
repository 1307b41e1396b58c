"""`python -m benchmarks ring`: ring attention over two processes of this machine, and ranks in one
process.

- "step": two ranks on two cores, over gloo. The whole step against its kernels alone (the
  neighbour's keys are present at once) and its messages alone (the same messages, no computation).
  `value` is the step over the longer of the two. Messages over loopback are short, so one row has a
  link on which a message takes four fifths of a round's kernel.
- "kernels": the slower rank over the mean, of the kernels alone, by layout.
- "work": the same for the pairs that a causal mask leaves to each rank, counted from the layout's
  positions.
- "precision": the RMSE of a ring in bf16 against fp64, with one call and a ring that rounds its
  partial results before merging as peers.
- "sums": the same for dk, which is a sum over ranks, relative to its size.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

import onchip
from benchmarks.processes import run_processes
from onchip.cli.bench.harness import Case, Row, Session, Threshold
from onchip.parallel.attention import context_parallel_attention
from onchip.parallel.comm import Comm, CommWork, CountingComm, run_ranks
from onchip.parallel.sharding import LAYOUTS, Layout, as_layout
from onchip.testing import oracle, rmse

RANKS = 2
TOKENS, QUICK_TOKENS = (1024, 4096), (512,)
HEADS, HEAD_DIM = 8, 64
COUNTED = 8192  # tokens of the counted pairs
ROUNDS, QUICK_ROUNDS = 9, 3
SIZES = (2, 4, 8)  # numbers of ranks of the counted layouts
PRECISE, PRECISE_TOKENS, PRECISE_HEADS = (1, 2, 8, 64), 4096, 2
SUMMED_TOKENS = 2048
SLOW = 0.4  # of all kernels: of two equal rounds the first overlaps a message
OVERLAP, ROUNDED = 1.15, 1.02  # the thresholds
QUIET = 0.1  # of the CPUs that others may use while times are measured
Job = tuple[str, Callable[[], Row | list[Row]]]
Parts = Sequence[dict[str, Any]]  # what each rank measured
attend = cast(Callable[..., Tensor], context_parallel_attention)  # the decorator hides its type


THRESHOLDS = (
    Threshold(
        f"a step of {max(TOKENS):,} tokens, against the longer of kernels and messages",
        lambda row: row["bench"] == "step" and row["seqlen"] == max(TOKENS) and not row["doubts"],
        at_most=OVERLAP,
        optional=True,
    ),
    Threshold(
        "RMSE of the ring in bf16, against one call",
        lambda row: row["bench"] == "precision" and row["devices"] > 1,
        at_most=ROUNDED,
        measure=lambda rows: max(row["value"] / row["peers"]["one call"] for row in rows),
        unit="x",
        optional=True,
    ),
    Threshold(
        "work of the busiest rank over the mean, zigzag",
        lambda row: row["bench"] == "work" and row["kernel"] == "zigzag",
        at_most=1.01,
        optional=True,
    ),
)


def run(session: Session) -> None:
    processes = "two ranks over gloo", partial(process_rows, session.quick)
    sums = [(f"a sum over {n} ranks", partial(sums_row, n)) for n in PRECISE[1:]]
    session.run([processes, *work_jobs(), *precision_jobs(session.quick), *sums])


class StepSpec(NamedTuple):
    """The parameters of a measured step, the same on every rank."""

    tokens: int
    layout: str
    backward: bool
    rounds: int
    message_share: float = 0.0  # of the kernels' time that a message takes, at least


def process_rows(quick: bool) -> list[Row]:
    """All that two processes measure: they are started once."""
    lengths, rounds = (QUICK_TOKENS, QUICK_ROUNDS) if quick else (TOKENS, ROUNDS)
    ways = product(lengths, (False, True))
    steps = [StepSpec(tokens, "zigzag", backward, rounds) for tokens, backward in ways]
    steps.append(StepSpec(lengths[-1], "zigzag", False, rounds, SLOW))
    layouts = [StepSpec(lengths[-1], layout, False, rounds) for layout in LAYOUTS]
    before = busy_share()
    ranks = run_processes(RANKS, measure_all, [*steps, *layouts], timeout_s=120.0)
    busy = max(before, busy_share())
    both = list(zip(*ranks, strict=True))  # measurements of the ranks by StepSpec
    rows = [step_row(spec, parts) for spec, parts in zip(steps, both, strict=False)]
    rest = zip(layouts, both[len(steps) :], strict=True)
    rows += [kernel_row(spec, parts) for spec, parts in rest]
    doubts = [f"others used {100 * busy:.0f} % of the CPUs"] if busy > QUIET else []
    return [row | {"doubts": doubts} for row in rows]


def busy_share(seconds: float = 0.5) -> float:
    """The CPU share of other processes, on Linux; 0 on other systems."""

    def ticks() -> list[int]:
        try:
            return [int(x) for x in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        except OSError:
            return []

    before = ticks()
    time.sleep(seconds)
    spent = [b - a for a, b in zip(before, ticks(), strict=True)]
    idle = sum(spent[3:5])  # nothing to do, or waiting for a disk
    return 1 - idle / sum(spent) if sum(spent) else 0.0


def step_row(spec: StepSpec, parts: Parts) -> Row:
    """Times are the least over rounds; the traces are from one extra round."""
    best = {name: 1e3 * _slower_rank([p["seconds"][name] for p in parts]) for name in JOBS}
    return _case("step", spec).row(
        spec.layout,
        best["step"] / max(best["kernels"], best["messages"]),
        "x of the longer",
        devices=RANKS,
        message_share=spec.message_share,
        link_ms=1e3 * max(part["link"] for part in parts),
        **{f"{name}_ms": ms for name, ms in best.items()},
        messages=parts[0]["messages"],
        sent_bytes=parts[0]["bytes"],
        traces=[part["trace"] for part in parts],
    )


def kernel_row(spec: StepSpec, parts: Parts) -> Row:
    times = [1e3 * min(part["seconds"]["kernels"]) for part in parts]
    value = max(times) * RANKS / sum(times)
    row = _case("kernels", spec).row(spec.layout, value, "max/mean")
    return row | {"devices": RANKS, "ranks_ms": times}


def _slower_rank(times: list[list[float]]) -> float:
    """The least of the rounds; a round lasts as long as its slower rank."""
    return min(max(round) for round in zip(*times, strict=True))


JOBS = ("step", "kernels", "messages")


def measure_all(comm: Comm, specs: list[StepSpec]) -> list[dict[str, Any]]:
    _own_core(comm.rank)
    return [measure(comm, spec) for spec in specs]


def measure(comm: Comm, spec: StepSpec) -> dict[str, Any]:
    """On every rank: the three jobs in turns, and the messages of a step."""
    q, k, v, dout = _inputs(comm, spec)
    counted = CountingComm(comm)
    step = lambda comm: _step(comm, spec, q, k, v, dout)
    step(counted)  # also the warm-up, and the agreement
    kernels = min(_timed(comm, lambda: step(NoTransferComm(comm))) for _ in range(3))
    link = spec.message_share * kernels
    if link:
        comm = cast(Comm, DelayedComm(comm, link))
    sent = [torch.zeros(2, e.bytes, dtype=torch.uint8) for e in counted.log if e.kind == "shift"]
    jobs = {"step": lambda: step(comm), "kernels": lambda: step(NoTransferComm(comm))}
    jobs["messages"] = lambda: [comm.shift(*rooms).wait() for rooms in sent]
    seconds = {name: [] for name in JOBS}
    for _, name in product(range(spec.rounds), JOBS):
        seconds[name].append(_timed(comm, jobs[name]))
    start, trace = traced(comm, step)
    return {
        "seconds": seconds,
        "link": link,
        "messages": sum(counted.messages.values()),
        "bytes": sum(counted.bytes.values()),
        "trace": [[round(1e3 * (t - start), 4) for t in event] for event in trace],
    }


def traced(comm: Comm, step: Callable[[Comm], object]) -> tuple[float, list[tuple[float, ...]]]:
    """(start of a step, [(posted, waited for, complete) for each message]), in seconds."""
    _together(comm)
    start = time.perf_counter()
    counted = CountingComm(comm)
    step(counted)
    shifts = [event for event in counted.log if event.kind == "shift"]
    return start, [(e.posted, e.wait_began, e.wait_ended) for e in shifts]


def _own_core(rank: int) -> None:
    """A rank that moves between cores disturbs the other."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})


def _inputs(comm: Comm, spec: StepSpec) -> tuple[Tensor, ...]:
    layout, generator = as_layout(spec.layout, comm.size), torch.Generator().manual_seed(0)
    whole = torch.randn(4, 1, spec.tokens, HEADS, HEAD_DIM, generator=generator)
    q, k, v, dout = (layout.shard(t, comm.rank).clone() for t in whole)
    return *(t.requires_grad_(spec.backward) for t in (q, k, v)), dout


def _step(comm: Comm, spec: StepSpec, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> None:
    out = attend(
        q, k, v, comm, strategy="ring", layout=spec.layout, causal=True, seqlen=spec.tokens
    )
    if spec.backward:
        torch.autograd.grad(out, (q, k, v), dout)


def _timed(comm: Comm, job: Callable[[], object]) -> float:
    _together(comm)
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def _together(comm: Comm) -> None:
    comm.sum(torch.zeros(1)).wait()


class NoTransferComm:
    """A communicator that copies the own keys instead of receiving the neighbour's, without a
    message.
    """

    def __init__(self, comm: Comm):
        self.rank, self.size = comm.rank, comm.size

    def shift(self, send: Tensor, recv: Tensor, hops: int = 1) -> CommWork:
        with torch.no_grad():
            recv.copy_(send)
        return self

    def wait(self) -> None:
        return

    def check_consistent(self, facts: object, device: object = None) -> None:
        return


class DelayedComm:
    """A communicator with messages that take at least `seconds`, without using a core."""

    def __init__(self, comm: Comm, seconds: float):
        self.rank, self.size, self._comm, self._seconds = comm.rank, comm.size, comm, seconds
        self.check_consistent, self.sum = comm.check_consistent, comm.sum

    def shift(self, send: Tensor, recv: Tensor, hops: int = 1) -> CommWork:
        return DelayedWork(self._comm.shift(send, recv, hops), time.perf_counter() + self._seconds)


class DelayedWork:
    def __init__(self, work: CommWork, until: float):
        self._work, self._until = work, until

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(self._until - time.perf_counter(), 0.0))


def work_jobs() -> Iterator[Job]:
    for size, layout in product(SIZES, LAYOUTS):
        yield f"work of {size} ranks, {layout}", partial(work_row, size, layout)


def work_row(size: int, layout: str) -> Row:
    """The pairs that a causal mask leaves to the busiest rank over the mean of all ranks."""
    ranks = (as_layout(layout, size).positions(rank, COUNTED) for rank in range(size))
    pairs = [int((positions + 1).sum()) for positions in ranks]
    value = max(pairs) * size / sum(pairs)
    case = _case("work", StepSpec(COUNTED, layout, False, 0))
    return case.row(layout, value, "max/mean", devices=size)


def precision_jobs(quick: bool) -> Iterator[Job]:
    for size, causal in product(PRECISE[:3] if quick else PRECISE, (False, True)):
        yield f"bf16 over {size} ranks", partial(precision_row, size, causal)


def precision_row(size: int, causal: bool) -> Row:
    """`value` is the RMSE of a ring of `size` ranks in one process; peers are others' RMSEs."""
    torch.manual_seed(0)
    shape = 1, PRECISE_TOKENS, PRECISE_HEADS, HEAD_DIM
    q, k, v = (torch.randn(shape).bfloat16() for _ in range(3))
    exact = oracle(q, k, v, causal=causal).out
    layout = as_layout("zigzag" if causal else "contiguous", size)
    out = layout.unshard(run_ranks(size, _ring, (q, k, v), layout, causal))
    peers = {
        "one call": rmse(onchip.attention(q, k, v, causal=causal), exact),
        "bf16 partials": rmse(_rounded(q, k, v, size, causal), exact),
    }
    case = Case("precision", "causal" if causal else "none", q.dtype, HEAD_DIM, PRECISE_TOKENS)
    row = case.row("ring", rmse(out, exact), "RMSE", peers=peers, devices=size)
    return row | {"num_heads": PRECISE_HEADS, "num_kv_heads": PRECISE_HEADS}


def _ring(comm: Comm, whole: tuple[Tensor, ...], layout: Layout, causal: bool) -> Tensor:
    q, k, v = (layout.shard(t, comm.rank) for t in whole)
    seqlen = whole[0].shape[1]
    return attend(q, k, v, comm, strategy="ring", layout=layout, causal=causal, seqlen=seqlen)


def _rounded(q: Tensor, k: Tensor, v: Tensor, size: int, causal: bool) -> Tensor:
    """A ring with kernels that round: chunks of queries over chunks of keys, each result in the
    type of the inputs, merged in fp32.
    """
    chunks = [t.chunk(size, 1) for t in (q, k, v)]
    outs = []
    for r, q_chunk in enumerate(chunks[0]):
        seen = range(r + 1 if causal else size)
        parts = (_partial(q_chunk, chunks[1][s], chunks[2][s], causal and s == r) for s in seen)
        outs.append(onchip.merge_states(*map(list, zip(*parts, strict=True)))[0].to(q.dtype))
    return torch.cat(outs, 1)


def _partial(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) by two calls: with lse requested, a CPU kernel computes out in fp32 as well."""
    out = cast(Tensor, onchip.attention(q, k, v, causal=causal))
    return out, onchip.attention(q, k, v, causal=causal, return_lse=True)[1]


def sums_row(size: int) -> Row:
    """`value` is the relative RMSE of dk in bf16 if the terms of ranks are summed in fp32; peers
    round the terms first, or every sum of them.
    """
    torch.manual_seed(0)
    terms = list(_dk_terms(SUMMED_TOKENS, size))
    exact = sum(terms, torch.zeros(()))
    relative = lambda dk: rmse(dk.bfloat16(), exact) / float(exact.square().mean().sqrt())
    rounded = [term.bfloat16() for term in terms]
    peers = {
        "bf16 terms": relative(sum((t.float() for t in rounded), torch.zeros(()))),
        "bf16 sum": relative(reduce(torch.add, rounded)),
    }
    wide = sum((term.float() for term in terms), torch.zeros(()))
    case = Case(
        "sums", "none", torch.bfloat16, HEAD_DIM, SUMMED_TOKENS, num_heads=1, way="backward"
    )
    return case.row("fp32 terms", relative(wide), "relative RMSE", peers=peers, devices=size)


def _dk_terms(tokens: int, size: int) -> Iterator[Tensor]:
    """What the queries of each rank add to dk, in fp64."""
    q, k, v, dout = torch.randn(4, tokens, HEAD_DIM).bfloat16().double()
    softmax_scale = HEAD_DIM**-0.5
    for q_chunk, dout_chunk in zip(q.chunk(size), dout.chunk(size), strict=True):
        p = torch.softmax(softmax_scale * q_chunk @ k.T, -1)
        dp = dout_chunk @ v.T
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        yield softmax_scale * ds.T @ q_chunk


def _case(bench: str, spec: StepSpec) -> Case:
    way = "forward+backward" if spec.backward else "forward"
    sizes = HEAD_DIM, spec.tokens, 1, HEADS
    return Case(bench, "causal", torch.float32, *sizes, way=way)
