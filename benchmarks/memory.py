"""`python -m benchmarks memory`: the waste of a key/value cache by allocator; a simulation.

A 13B model of 2023 (40 layers, 40 heads of 128, fp16, 26 GB of weights) on 40 and 80 GiB, offered
1.5 times the load that a perfect allocator could hold, so that a request always waits:

  max            2,048 slots for every request, contiguous, first fit
  pow2           the prompt, and the output rounded up to a power of two; likewise
  oracle         exactly the final length, known in advance; likewise
  pow2 buddy     the last two from a buddy allocator, which the PagedAttention paper gave its
  oracle buddy   baselines
  paged 16       pages of a real onchip.kvcache.Pool, on demand; the newest is preempted
  paged, 5 %     the same, with 5 % instead of 1 % of the pages withheld from new requests

Thresholds are the claims about long conversations. memory_report.py compares every published figure
with these rows, and reports each figure that does not follow from its own assumptions.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, product
from typing import NamedTuple

import torch

from benchmarks.simulation import (
    Allocator,
    Buddy,
    Contiguous,
    Lognormal,
    Paged,
    Sharing,
    SimRequest,
    SimServer,
    SimUsage,
    SimWorkload,
    Uniform,
    arrivals,
    beam_search,
    parallel_sampling,
    power_of_two,
    rate_of,
)
from onchip.cli.bench.harness import Case, Row, Session, Threshold

SEED = 0
GIB = 2**30
LOAD = 1.5
# A run lasts as many mean outputs, of which the first are not averaged. Four times the slots serve
# as many requests in less time; page sizes are compared with one another, on the same requests.
LIFETIMES, WARMUP, SWEPT = {40: 90, 80: 30}, 10, 20
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WIDTHS = (2, 4, 6)
TURNOVERS = (0.1, 1.0)
Step = tuple[str, Callable[[], Row | list[Row]]]


class CacheModel(NamedTuple):
    """What decides the bytes of a cache."""

    num_layers: int = 40
    num_kv_heads: int = 40
    head_dim: int = 128
    itemsize: int = 2
    weights_bytes: int = 26_000_000_000
    max_length: int = 2048

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in every layer."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.itemsize

    def slots(self, gib: int) -> int:
        """The tokens that fit into 90 % of a GPU's memory next to the weights."""
        return int((0.9 * gib * GIB - self.weights_bytes) // self.token_bytes)


MODEL = CacheModel()
CHAT = SimWorkload("chat", Lognormal(161, 1.0), Lognormal(338, 1.0))
INSTRUCT = SimWorkload("instruct", Lognormal(19.3, 1.0), Lognormal(58.5, 1.0))
UNIFORM = SimWorkload("uniform", Uniform(100, 1024), Uniform(100, 1024))
EVEN = SimWorkload("even", Lognormal(161, 0.5), Lognormal(338, 0.5))
SKEWED = SimWorkload("skewed", Lognormal(161, 1.5), Lognormal(338, 1.5))
WORKLOADS = (CHAT, INSTRUCT, UNIFORM)


def _max(request: SimRequest) -> int:
    return MODEL.max_length


def _pow2(request: SimRequest) -> int:
    return min(MODEL.max_length, request.prompt + power_of_two(request.output))


def _oracle(request: SimRequest) -> int:
    return request.final


ALLOCATORS: dict[str, Callable[[int], Allocator]] = {
    "max": lambda slots: Contiguous(slots, _max),
    "pow2": lambda slots: Contiguous(slots, _pow2),
    "pow2 buddy": lambda slots: Contiguous(slots, _pow2, Buddy),
    "oracle": lambda slots: Contiguous(slots, _oracle),
    "oracle buddy": lambda slots: Contiguous(slots, _oracle, Buddy),
    "paged 16": lambda slots: Paged(slots, 16),
    "paged, 5 %": lambda slots: Paged(slots, 16, spare=0.05),
}
RESERVED = ("max", "pow2", "pow2 buddy", "oracle", "oracle buddy")
PAGED, WASTEFUL = "paged 16", "max"


def _is(bench: str, kernel: str, mask: str = CHAT.name) -> Callable[[Row], bool]:
    return lambda row: (row["bench"], row["kernel"], row["mask"]) == (bench, kernel, mask)


def _waste(choose: Callable[..., float]) -> Callable[[list[Row]], float]:
    return lambda rows: choose(100 * waste(row) for row in rows)


THRESHOLDS = (
    Threshold("waste of max, chat, least", _is("allocation", WASTEFUL), 60, None, _waste(min), "%"),
    Threshold("waste of max, chat, most", _is("allocation", WASTEFUL), None, 80, _waste(max), "%"),
    Threshold("waste of pages of 16, chat", _is("allocation", PAGED), None, 4, _waste(max), "%"),
    Threshold(
        "sequences, pages of 16 against max",
        _is("allocation", PAGED),
        at_least=2,
        measure=lambda rows: min(row["value"] / row["peers"][WASTEFUL] for row in rows),
        unit="x",
    ),
    Threshold("the whole simulation", lambda row: row["bench"] == "simulation", at_most=30),
)


def run(session: Session) -> None:
    if session.seqlens or session.head_dims or session.flex:
        raise ValueError("--seqlens, --head-dims and --flex are for the benchmarks of a GPU")
    start = time.perf_counter()
    session.where = {"device": f"a simulation, seed {SEED}", "triton": None, "clocks": {}}
    session.run(
        [
            *allocation_steps({40: WARMUP + 5} if session.quick else LIFETIMES),
            *sensitivity_steps(WARMUP + 5 if session.quick else LIFETIMES[40]),
            *page_size_steps(PAGE_SIZES[3::2] if session.quick else PAGE_SIZES),
            *sharing_steps(8 if session.quick else 60),
            ("the clock", lambda: _case("simulation", "none").row("", _since(start), "s")),
        ]
    )


def _since(start: float) -> float:
    return time.perf_counter() - start


def _case(bench: str, mask: str) -> Case:
    return Case(
        bench,
        mask,
        torch.float16,
        MODEL.head_dim,
        MODEL.max_length,
        num_heads=MODEL.num_kv_heads,
        way="simulation",
    )


def allocation_steps(lifetimes: dict[int, int]) -> Iterator[Step]:
    for (gib, spans), workload in product(lifetimes.items(), WORKLOADS):
        names = (*RESERVED, PAGED)
        contest = partial(allocation, "allocation", gib, workload, names, spans)
        yield f"{workload.name} on {gib} GiB", contest


def sensitivity_steps(lifetimes: int) -> Iterator[Step]:
    """Other spreads of the lengths, and more pages that newcomers leave alone."""
    for workload in (EVEN, SKEWED, CHAT):
        names = (WASTEFUL, "oracle buddy", PAGED) if workload is not CHAT else ("paged, 5 %",)
        contest = partial(allocation, "sensitivity", 40, workload, names, lifetimes)
        yield workload.name, contest


def page_size_steps(sizes: tuple[int, ...]) -> Iterator[Step]:
    for size, workload in product(sizes, (CHAT, INSTRUCT)):
        yield f"pages of {size}", partial(page_size_row, size, workload)


def sharing_steps(requests: int) -> Iterator[Step]:
    for workload, width in product((CHAT, INSTRUCT), WIDTHS):
        lengths = list(islice(workload.lengths(SEED), requests))
        sampling = partial(parallel_sampling, lengths, width)
        row = partial(sharing_row, "samples", workload, width, sampling)
        yield f"{width} samples", row
        for turnover in TURNOVERS:
            search = partial(beam_search, lengths, width, turnover)
            name = f"beams, turnover {turnover:g}"
            yield f"{width} beams", partial(sharing_row, name, workload, width, search)


def simulate(
    allocator: Allocator, workload: SimWorkload, lifetimes: int, sample_every: int = 1000
) -> SimUsage:
    """The allocator under LOAD for as many times the workload's mean output."""
    mean_output = sum(o for _, o in islice(workload.lengths(SEED), 4096)) / 4096
    steps = round(lifetimes * mean_output)
    coming = arrivals(workload, rate_of(workload, allocator.slots, LOAD, SEED), steps, SEED)
    return SimServer(allocator, round(WARMUP * mean_output), sample_every).run(coming, steps)


def allocation(
    bench: str, gib: int, workload: SimWorkload, names: tuple[str, ...], lifetimes: int
) -> list[Row]:
    """A row per allocator; pages have the contiguous ones as peers."""
    slots = MODEL.slots(gib)
    usages = {n: simulate(ALLOCATORS[n](slots), workload, lifetimes) for n in names}
    peers = {n: usages[n].mean.sequences for n in names if n in RESERVED}
    rows = [
        usage_row(bench, n, workload, slots, usage) | {"gib": gib} for n, usage in usages.items()
    ]
    contest = lambda row: _against(peers, row["value"]) if row["kernel"] not in RESERVED else {}
    return [row | contest(row) for row in rows] if peers else rows


def _against(peers: dict[str, float], value: float) -> Row:
    best = max(peers, key=lambda name: peers[name])
    return {"peers": peers, "best_peer": best, "ratio": value / peers[best]}


def usage_row(bench: str, kernel: str, workload: SimWorkload, slots: int, usage: SimUsage) -> Row:
    """`value` is the mean number of sequences that run; the parts are fractions of all slots."""
    mean = usage.mean
    parts = {n: getattr(mean, n) / slots for n in ("used", "reserved", "internal", "external")}
    row = _case(bench, workload.name).row(kernel, mean.sequences, "sequences", **parts)
    return row | {"slots": slots, "again": usage.recomputed / usage.generated}


def page_size_row(page_size: int, workload: SimWorkload) -> Row:
    slots = MODEL.slots(40)
    usage = simulate(Paged(slots, page_size), workload, SWEPT)
    row = usage_row("page size", f"paged {page_size}", workload, slots, usage)
    return row | {"gib": 40, "page_size": page_size}


def sharing_row(
    name: str, workload: SimWorkload, width: int, simulated: Callable[[], Sharing]
) -> Row:
    """`copied` and `moved` are tokens per token generated, by pages and in one piece."""
    shared = simulated()
    per_token = {n: getattr(shared, n) / shared.generated for n in ("copied", "moved")}
    case = _case("sharing", workload.name)
    return case.row(name, 100 * shared.saved, "% saved", width=width, **per_token)


def waste(row: Row) -> float:
    """The fraction of the slots that is empty while a request waits."""
    return row["reserved"] + row["internal"] + row["external"]
