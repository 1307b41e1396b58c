"""Published figures about attention and its bytes, each with the prediction of onchip.cost, its
measurement here, and the reason if it does not follow.

Bytes are for fp16, one head executed and multiplied by the number of heads: heads share nothing.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import NamedTuple

import torch

from benchmarks import footprint
from benchmarks import paper_runs as runs
from onchip.core.problem import Problem
from onchip.cost import make_problem, roofline
from onchip.cost.hardware import A100, H100, H200
from onchip.kernels.tiles import HOPPER_FORWARD
from onchip.lab import bounds, traffic
from onchip.lab.traffic import Chip, Traffic

PAPER = "FlashAttention, NeurIPS 2022"
SURVEY, BLOG, TUTORIAL = "a survey, 2025", "a blog, 2025", "a tutorial, 2025"
KIB, MIB, GIB = 2**10, 2**20, 2**30
HALF = torch.float16
# Figure 2: GPT-2 medium on an A100 of 40 GB, with 192 KB of on-chip memory per processor.
SEQLEN, HEAD_DIM, HEADS = 1024, 64, 64 * 16
A100_40GB = 1.555e12  # bytes a second: NVIDIA A100 datasheet
A100_CLOCK = 1.41e9  # boost clock: NVIDIA A100 datasheet
ALL_SRAM = Chip(sram=192 * KIB // 2, scratch=HALF)
SRAM = Chip(sram=100_000, scratch=HALF)  # "about 100K fp16 elements"
BLOCKS = (64, 128, 256, 512)
DENSITIES = (0.2, 0.4, 0.6, 0.8, 1.0)
LENGTHS = {1024: 1.3, 4096: 2.1, 16384: 3.5, 65536: 4.2, 131072: None}
MEASURED_LENGTH = 16384  # longer ones would take minutes here
NOT_LINEAR = "N^2 d^2 / M is quadratic in N, whatever M"


class PaperClaim(NamedTuple):
    """One figure. measure() runs something here; exact: it must give what was predicted."""

    section: str
    what: str
    source: str
    unit: str
    published: float | None
    predicted: float | None
    measure: Callable[[], float | None] | None = None
    reason: str = ""
    exact: bool = False
    bound: bool = False  # what was predicted is the least that is possible
    tolerance: float | None = 0.1  # None: not checked


def verdict(claim: PaperClaim, measured: float | None = None) -> str:
    """Whether the published figure follows from what is known, or, where none was published, a
    ledger from what was predicted; the reason, if there is one.
    """
    if claim.predicted is None or claim.tolerance is None:
        return claim.reason
    if claim.published is None:
        outcome = _counted(claim.predicted, measured) if claim.exact else ""
        return "; ".join(filter(None, (outcome, claim.reason)))
    share = claim.predicted / claim.published
    if claim.bound:
        outcome = f"possible: the units' best is {share:.0%} of it" if share <= 1 else "impossible"
    else:
        outcome = "follows" if abs(share - 1) <= claim.tolerance else "does not follow"
    return "; ".join(filter(None, (outcome, claim.reason)))


def _counted(predicted: float, measured: float | None) -> str:
    if measured is None:
        return ""
    same = abs(measured - predicted) <= 1e-9 * predicted
    return "as predicted" if same else "not as predicted"


def claims() -> Iterator[PaperClaim]:
    for section in SECTIONS:
        yield from section()


@cache
def problem(seqlen: int = SEQLEN, head_dim: int = HEAD_DIM) -> Problem:
    return make_problem(seqlen, head_dim=head_dim, dtype=HALF)


def both(algorithm: str, asked: Problem, chip: Chip) -> Traffic:
    """Forward and backward: standard, v1 or v2."""
    forward, backward = (getattr(traffic, algorithm + way) for way in ("", "_backward"))
    return forward(asked, chip) + backward(asked, chip)


def a100_seconds(moved: Traffic) -> float:
    """The slower of memory and tensor cores of the A100 of Figure 2, if the other is hidden."""
    return max(moved.hbm_bytes / A100_40GB, moved.flops / A100.flops(HALF))


def figure_left() -> Iterator[PaperClaim]:
    """The table of Figure 2: forward and backward."""
    make = partial(PaperClaim, "figure 2, left", source=PAPER)
    sums = {name: both(name, problem(), ALL_SRAM) * HEADS for name in ("standard", "v1")}
    published = {"standard": (66.6, 40.3, 41.7), "v1": (75.2, 4.4, 7.3)}
    for name, moved in sums.items():
        flops, bytes_, ms = published[name]
        kernel = "paper_v0" if name == "standard" else "paper_v1"
        ledger = partial(runs.counted, kernel, SEQLEN, HEAD_DIM, ALL_SRAM)
        yield make(
            f"operations, {name}", unit="GFLOP", published=flops, predicted=moved.flops / 1e9,
            measure=lambda ledger=ledger: HEADS * ledger().flops / 1e9, exact=True,
            reason="the stated shape has 1,024 heads of 4 N^2 d forward alone: 275",
        )  # fmt: skip
        yield make(
            f"HBM traffic, {name}", unit="GB", published=bytes_, predicted=moved.hbm_bytes / 1e9,
            measure=lambda ledger=ledger: HEADS * ledger().hbm_bytes / 1e9, exact=True,
            reason="with all 192 KB of a processor" if name == "v1" else
            "25.2 on a chip that holds all; theirs scales, masks and drops in kernels of their own,"
            " two passes over N^2 each",
        )  # fmt: skip
        yield make(
            f"time, {name}", unit="ms", published=ms, predicted=1e3 * a100_seconds(moved),
            bound=True,
        )  # fmt: skip
    yield make(
        "time, standard over flash", unit="x", published=41.7 / 7.3,
        predicted=a100_seconds(sums["standard"]) / a100_seconds(sums["v1"]),
        measure=lambda: runs.speedup(SEQLEN, HEAD_DIM, 16, "both"),
        reason="measured: this CPU, 16 heads, ours over unfused",
    )  # fmt: skip


def figure_middle() -> Iterator[PaperClaim]:
    """Forward traffic and time of v1 by the size of its K/V blocks; read off the plot."""
    make = partial(PaperClaim, "figure 2, middle", source=PAPER)
    found = {n: traffic.v1(problem(), Chip(scratch=HALF, tiles=(64, n))) * HEADS for n in BLOCKS}
    for n, moved in found.items():
        ledger = partial(runs.counted, "paper_v1", SEQLEN, HEAD_DIM, Chip(tiles=(64, n)), False)
        yield make(
            f"HBM traffic, blocks of {n}", unit="GB", published={64: 8.0, 512: 1.0}.get(n),
            predicted=moved.hbm_bytes / 1e9, exact=True, tolerance=0.3,
            measure=lambda ledger=ledger: HEADS * ledger().hbm_bytes / 1e9,
        )  # fmt: skip
    for n, moved in found.items():
        yield make(
            f"time, blocks of {n}", unit="ms", published={64: 6.0, 256: 2.0, 512: 2.0}.get(n),
            predicted=1e3 * a100_seconds(moved), bound=True,
            reason="" if n < 512 else "from here on the tensor cores bind: it levels off",
        )  # fmt: skip
    yield make(
        "time, blocks of 64 over 512", unit="x", published=3.0,
        predicted=a100_seconds(found[64]) / a100_seconds(found[512]),
        measure=lambda: _first_over_last(runs.loop_seconds(BLOCKS)),
        reason="at 512 the tensor cores bind, not memory; measured: the loop in torch on this CPU",
    )  # fmt: skip


def _first_over_last(seconds: dict[int, float]) -> float:
    return seconds[BLOCKS[0]] / seconds[BLOCKS[-1]]


def figure_right() -> Iterator[PaperClaim]:
    """Time of block-sparse over dense flash at 4K, forward and backward; read off the plot."""
    for density in DENSITIES[:-1]:
        ms = {0.2: 30.0, 0.6: 100.0}.get(density)
        yield PaperClaim(
            "figure 2, right", f"time at {density:.0%} of the blocks over all of them", PAPER, "x",
            ms and ms / 100.0, density, partial(_sparse_share, density),
            "no proportion; nor on this CPU, which gathers the blocks" if density == 0.6 else
            "measured: this CPU, which gathers the blocks",
            tolerance=0.34,
        )  # fmt: skip


def _sparse_share(density: float) -> float:
    seconds = runs.sparse_seconds(DENSITIES)
    return seconds[density] / seconds[1.0]


def by_length() -> Iterator[PaperClaim]:
    """Memory of one head of 128 in fp32, and speed, by length."""
    make = partial(PaperClaim, "by length", source=TUTORIAL)
    for n, faster in LENGTHS.items():
        here = n <= MEASURED_LENGTH
        mib = lambda name, n=n: _mib(runs.peak_bytes(name, n))
        asked, chip = problem(n, 128), Chip(scratch=HALF)
        yield make(
            f"memory, standard, {n:,}", unit="MiB", published=n * n * 4 / MIB,
            predicted=n * n * 4 / MIB, measure=partial(mib, "unfused") if here else None,
            reason="S alone, in fp32; P is as large"
            + ("; 64 GiB are no more than 80 GB" if n == 131072 else ""),
        )  # fmt: skip
        yield make(
            f"memory, flash, {n:,}", unit="MiB", published=n / 2048,
            predicted=(n * 128 * 4 + n * 4) / MIB, measure=partial(mib, "onchip") if here else None,
            reason="out in fp32 and its lse, not m and l, which are 8 bytes a token",
        )  # fmt: skip
        yield make(
            f"time, standard over flash, {n:,}", unit="x", published=faster,
            predicted=a100_seconds(traffic.standard(asked, chip))
            / a100_seconds(traffic.v2(asked, chip)),
            measure=partial(runs.speedup, n, 128, 1) if here else None,
            reason="not judged: how near either comes to what an A100 allows was not published",
            tolerance=None,
        )  # fmt: skip


def _mib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / MIB


def ridge() -> Iterator[PaperClaim]:
    make = partial(PaperClaim, "ridge point")
    asked, all_in = problem(8192, 128), Chip(sram=float("inf"), scratch=HALF)
    standard = traffic.standard(asked, all_in)
    scores = 2 * 8192**2 * 128 / (2 * (2 * 8192 * 128 + 8192**2))
    yield make(
        "A100, operations a byte", source=TUTORIAL, unit="FLOP/B", published=156,
        predicted=A100.flops(HALF) / 2.0e12,
        reason=f"{A100.ridge(HALF):.0f} at 2.039 TB/s; H200 {H200.ridge(HALF):.0f}",
    )  # fmt: skip
    yield make(
        "QK^T that writes S is compute-bound: at least", source=SURVEY, unit="FLOP/B",
        published=156, predicted=scores,
        reason="N 8,192, d 128: below the ridge of an A100, writing S costs more than reading",
    )  # fmt: skip
    yield make(
        "all of standard attention", source=TUTORIAL, unit="FLOP/B", published=None,
        predicted=standard.flops / standard.hbm_bytes,
        reason="memory-bound on every device of the table; the softmax alone is near 1",
    )  # fmt: skip


def hierarchy() -> Iterator[PaperClaim]:
    """The memory tables of two texts against datasheets."""
    make = partial(PaperClaim, "memory hierarchy")
    on_chip = lambda row: (row.levels[2].bytes_s or 0.0) / 1e12
    memory = lambda row: (row.memory.bytes_s or 0.0) / 1e12
    yield make("A100, registers", TUTORIAL, "MiB", 27, A100.levels[3].size_bytes / MIB)
    yield make(
        "A100, on-chip memory", TUTORIAL, "MiB", 20, 108 * 192 * KIB / MIB,
        reason="192 KB with the L1 cache; 164 of them can be shared memory",
    )  # fmt: skip
    yield make("A100, on-chip memory", TUTORIAL, "TB/s", 19, on_chip(A100))
    yield make("A100, HBM", TUTORIAL, "TB/s", 2.0, memory(A100))
    yield make(
        "H100, HBM", SURVEY, "TB/s", 3.0, memory(H100),
        reason="not \"higher bandwidth\" than on-chip memory, as the text has it",
    )  # fmt: skip
    yield make(
        "H100, on-chip memory", BLOG, "TB/s", 20, on_chip(H100),
        reason="that is an A100's",
    )  # fmt: skip
    yield make(
        "A100 of 40 GB, HBM", SURVEY, "TB/s", 1.6, A100_40GB / 1e12, reason="HBM2, not HBM2e",
    )  # fmt: skip
    yield make("A100, on-chip memory over HBM", TUTORIAL, "x", 10, on_chip(A100) / memory(A100))
    yield make("H100, on-chip memory over HBM", BLOG, "x", 10, on_chip(H100) / memory(H100))
    yield make("A100, HBM over CPU memory of 50 GB/s", TUTORIAL, "x", 40, memory(A100) / 0.05)
    for name, row, size in (("A100", A100, 40), ("H100", H100, 50)):
        yield make(f"{name}, L2", BLOG, "MiB", size, row.levels[1].size_bytes / MIB)
    clocks = lambda level: (level.latency_s or 0.0) * A100_CLOCK
    for level, source, published in zip(
        A100.levels, (TUTORIAL, BLOG, TUTORIAL, TUTORIAL), (400, 30, 20, 1), strict=True
    ):
        yield make(
            f"A100, latency of {level.name}", source, "clocks", published, clocks(level),
            reason="30 is that of the on-chip memory" if level.name == "L2" else "",
            tolerance=0.34,
        )  # fmt: skip
    yield make(
        "A100, on-chip memory in fp16", TUTORIAL, "M", 10, 108 * 192 * KIB / 2 / 1e6,
    )  # fmt: skip
    yield make("A100, registers of a processor", SURVEY, "KiB", 256, 65_536 * 4 / KIB)
    yield make("128 x 128 numbers, fp16", TUTORIAL, "KiB", 32, 128 * 128 * 2 / KIB)
    tiles = footprint.hopper_forward(HOPPER_FORWARD[128], 128, 128).shared_bytes
    fill = (3 * 256 * 128 * 2 + 256 * 128 * 4 + 256 * 256 * 4) / KIB
    yield make(
        "tiles of 256, d 128", BLOG, "KiB", 64, fill,
        reason="64 is one fp16 tile: Q, K, V, O and S take 576, more than a processor has; ours of"
        f" 128 take {tiles / KIB:.0f}",
    )  # fmt: skip


def sizes() -> Iterator[PaperClaim]:
    """What N x N takes."""
    make = partial(PaperClaim, "N x N")
    square = lambda n, itemsize: n * n * itemsize
    yield make("2,048 tokens", SURVEY, "MiB", 16, square(2048, 4) / MIB, reason="fp32, of one head")
    yield make(
        "16,384 tokens, of a layer", SURVEY, "GiB", 1, 16 * square(16384, 4) / GIB,
        reason="1 is one head's; 16 heads have 16",
    )  # fmt: skip
    for n, gigabytes in {512: 1.5, 2048: 24, 8192: 384, 65536: 6000}.items():
        yield make(
            f"{n:,} tokens, d 768 in 12 heads", SURVEY, "GiB", gigabytes,
            12 * square(n, 4) / GIB,
            reason="published: N^2 x 768 x 8 bytes, which nobody stores" if n < 65536 else
            "by its own formula 24 TiB",
        )  # fmt: skip
    yield make("16,000 tokens, fp16", BLOG, "MB", 512, square(16000, 2) / 1e6)
    yield make(
        "the same, 32 x 32 heads", BLOG, "GB", 512, 1024 * square(16000, 2) / 1e9,
        reason="512 GiB are of 16,384 tokens",
    )  # fmt: skip
    yield make(
        "32K, more than", BLOG, "GiB", 4, square(32768, 2) / GIB,
        reason="4 only with both S and P of one head",
    )  # fmt: skip
    yield make(
        "4K, standard", BLOG, "GB", 4.2, 256 * square(4096, 1) / 1e9,
        reason="needs batch x heads x bytes = 256, which the text does not state",
    )  # fmt: skip
    yield make(
        "4K, flash", BLOG, "GB", 0.21, 256 * (4096 * 128 + 2 * 4096) / 1e9,
        reason="out at d 128 and lse, for the same batch x heads x bytes; d is not stated",
    )  # fmt: skip
    yield make("65,536 tokens over 512", SURVEY, "x", 16384, square(65536, 1) / square(512, 1))
    yield make("8,192 tokens, entries", TUTORIAL, "M", 67, square(8192, 1) / 1e6)
    yield make(
        "128K, entries", TUTORIAL, "G", 16.4, square(131072, 1) / 1e9,
        reason="16.4 is 128,000 squared", tolerance=0.01,
    )  # fmt: skip
    yield make("128K, fp16", TUTORIAL, "GiB", 32, square(131072, 2) / GIB)
    yield make("8,192 tokens, d 128, Q K V O", TUTORIAL, "MiB", 8, 4 * 8192 * 128 * 2 / MIB)
    yield make("8,192 tokens, S and P", TUTORIAL, "MiB", 256, 2 * square(8192, 2) / MIB)
    yield make(
        "the same, over Q K V O", TUTORIAL, "x", 33, 2 * square(8192, 1) / (4 * 8192 * 128),
        reason="in size; S and P are each written and read, so that they move 64 times as much",
    )  # fmt: skip
    yield make(
        "the same, entries of Q K V O", TUTORIAL, "M", 2, 4 * 8192 * 128 / 1e6,
        reason="four matrices of a million each",
    )  # fmt: skip


def accesses() -> Iterator[PaperClaim]:
    """N 8,192, d 128, in elements."""
    make = partial(PaperClaim, "accesses", source=TUTORIAL)
    asked = problem(8192, 128)
    standard = traffic.standard(asked, Chip(sram=float("inf"), scratch=HALF)).hbm_bytes / 2e6
    v1, v2 = (f(asked, SRAM).hbm_bytes / 2e6 for f in (traffic.v1, traffic.v2))
    yield make(
        "standard", unit="M", published=134, predicted=standard,
        reason="134 is S written and read once; P is, too",
    )  # fmt: skip
    yield make(
        "flash", unit="M", published=17, predicted=v1,
        reason="Q is read and O is read and written for each of 42 K/V blocks",
    )  # fmt: skip
    yield make(
        "flash, v2", unit="M", published=None, predicted=v2, reason="O leaves the chip once",
    )  # fmt: skip
    yield make(
        "no algorithm moves less than", unit="M", published=None,
        predicted=bounds.lower_bound(asked, SRAM.sram or 0.0) / 1e6,
        reason="\"optimal\" says that none stays below N^2 d^2 / M for every M, not for this one",
    )  # fmt: skip
    yield make(
        "standard over flash", unit="x", published=8, predicted=standard / v1,
        reason="d^2 is 6 times smaller than M here, and each pass moves three matrices",
    )  # fmt: skip
    twice = lambda n: traffic.v1(problem(n), SRAM).hbm_bytes
    grown = lambda n: runs.counted("paper_v1", n, HEAD_DIM, SRAM, False).forward_bytes
    yield PaperClaim(
        "accesses", "\"about O(N)\": traffic at 2,048 over that at 1,024", BLOG, "x", 2,
        twice(2048) / twice(1024), lambda: grown(2048) / grown(1024), NOT_LINEAR, exact=True,
    )  # fmt: skip


def caches() -> Iterator[PaperClaim]:
    """Keys and values of a token, in every layer."""
    make = partial(PaperClaim, "key/value cache", source=TUTORIAL)
    token = 2 * 80 * 8 * 128 * 2
    real = lambda: runs.cache_token_bytes(80, 8, 128)
    yield make(
        "LLaMA-2 70B, a token", unit="KiB", published=320, predicted=token / KIB, exact=True,
        measure=lambda: real() / KIB,
    )  # fmt: skip
    yield make("4,096 tokens", unit="GiB", published=1.25, predicted=4096 * token / GIB)
    yield make(
        "128K tokens", unit="GiB", published=39, predicted=131072 * token / GIB,
        reason="39.1 are of 128,000 tokens", tolerance=0.01,
    )  # fmt: skip
    yield make(
        "a page of 16 tokens, one layer and head", unit="KiB", published=8,
        predicted=2 * 16 * 128 * 2 / KIB, measure=lambda: 16 * real() / (80 * 8) / KIB, exact=True,
    )  # fmt: skip
    yield make(
        "LLaMA-13B on 80 GB, contiguous sequences", unit="", published=8,
        predicted=(0.9 * 80 * GIB - 26e9) // (2 * 40 * 40 * 128 * 2 * 2048),
        reason="8 fit a card of 40 GB; `python -m benchmarks memory` has the rest",
    )  # fmt: skip


def recomputation() -> Iterator[PaperClaim]:
    """Storing P against computing it again."""
    make = partial(PaperClaim, "recomputation")
    stored, again = (both(name, problem(), ALL_SRAM) for name in ("standard", "v1"))
    passes = traffic.standard_backward, traffic.v1_backward
    with_p, without = (backward(problem(), ALL_SRAM) for backward in passes)
    ledger = lambda kernel: runs.counted(kernel, SEQLEN, HEAD_DIM, ALL_SRAM)
    more = lambda a, b: 100 * (a / b - 1)
    yield make(
        "more operations in all", source=TUTORIAL, unit="%", published=25, exact=True,
        predicted=more(again.flops, stored.flops),
        measure=lambda: more(ledger("paper_v1").flops, ledger("paper_v0").flops),
        reason="25 % of the backward, a sixth of the total",
    )  # fmt: skip
    ratio = lambda a, b: a.backward_bytes / b.backward_bytes
    yield make(
        "backward traffic, storing P over recomputing", source=SURVEY, unit="x", published=None,
        predicted=with_p.hbm_bytes / without.hbm_bytes, exact=True,
        measure=lambda: ratio(ledger("paper_v0"), ledger("paper_v1")),
        reason="recomputation reads Q, K, V again and again, not O(N d)",
    )  # fmt: skip
    yield make(
        "backward time, storing P over recomputing", source=SURVEY, unit="x", published=None,
        predicted=a100_seconds(with_p) / a100_seconds(without),
        measure=lambda: runs.speedup(SEQLEN, HEAD_DIM, 16, "backward"),
        reason="measured: this CPU, ours over unfused",
    )  # fmt: skip
    yield make(
        "head_dim below which recomputing wins on an A100", source=SURVEY, unit="", published=None,
        predicted=bounds.recompute_below(HALF.itemsize, A100.ridge(HALF)),
        reason="2 d operations for a score against 4 bytes of P, there and back",
    )  # fmt: skip


def softmaxes() -> Iterator[PaperClaim]:
    make = partial(PaperClaim, "softmax", unit="passes", exact=True)
    for name, published, source, reason in (
        ("three_pass", 3, SURVEY, ""),
        ("two_pass", 2, BLOG, ""),
        ("one_pass", 1, "lecture notes, 2025", "with the values; softmax itself needs two"),
    ):
        yield make(
            name.replace("_", " "), source, published=published, predicted=published,
            measure=partial(runs.passes, name), reason=reason,
        )  # fmt: skip


def numerics() -> Iterator[PaperClaim]:
    yield PaperClaim(
        "numerics", "bf16 error, flash over unfused", BLOG, "x", 10, None, runs.error_ratio,
        "does not follow: with fp32 inside it is the smaller one; 10 is of a loop that rounds all",
    )  # fmt: skip
    skipped = lambda: 100 * (1 - _rescales("paper_v4") / _rescales("paper_v2"))
    yield PaperClaim(
        "numerics", "rescales that v4 leaves out", "FlashAttention-4, its authors", "%", 90, None,
        skipped, "of those that v2 makes, on N(0, 1), 1,024 tokens",
    )  # fmt: skip


def _rescales(kernel: str) -> int:
    return runs.counted(kernel, SEQLEN, HEAD_DIM, Chip(scratch=HALF)).rescales


def speeds() -> Iterator[PaperClaim]:
    asked = make_problem(16384, num_heads=8, head_dim=256, dtype=torch.bfloat16)
    tflops = asked.flops / roofline.predict(asked, H200, "hopper").seconds / 1e12
    yield PaperClaim(
        "speed", "forward on Hopper, at most", "FlashAttention-3, 2024", "TFLOP/s", 740, tflops,
        reason="predicted: our kernel, head_dim 256, 16,384 tokens;"
        " benchmarks/results/h200-forward.json has the measured ones",
    )  # fmt: skip


SECTIONS: tuple[Callable[[], Iterator[PaperClaim]], ...] = (
    figure_left, figure_middle, figure_right, by_length, recomputation, accesses, softmaxes, ridge,
    hierarchy, sizes, caches, numerics, speeds,
)  # fmt: skip
