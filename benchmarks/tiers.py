"""`python -m benchmarks paged`: `onchip bench paged`, and the rows about bytes that move or need
not: prefixes found again, sequences swapped to host memory, keys and values streamed from it.

Copies are compared with a plain copy between pinned memory and the device in the same rounds; a
ratio is our bytes a second over its. Nothing here is replayed from a graph: the host takes part.
"""

import statistics
from collections import abc
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import onchip
from onchip.cli.bench import gpu, paged
from onchip.cli.bench.harness import (
    Case,
    Inaccurate,
    Row,
    Session,
    Threshold,
    hold,
    worst_cell,
)
from onchip.cli.bench.measure import peak_extra_bytes, seconds
from onchip.fold import offload
from onchip.kvcache import HostTier, KVCache, NoRoom, Sequence, SequenceGroup, Spec
from onchip.testing import oracle, rmse

PROMPT = 50_000  # tokens of a prefix that is found again
SWAPPED, LAYERS = 16_384, 32  # tokens and layers of a sequence that is swapped out
KV_HEADS, HEADS, HEAD_DIM = 8, 32, 128
STREAMED = 1 << 20  # keys that stay in host memory
LINK_BYTES = 1 << 28  # of one plain copy
WORK = 2048  # rows and columns of the matrices that are multiplied meanwhile
ROUNDS, QUICK_ROUNDS = 9, 3
COPY = "pinned copy"
COPIED, BESIDE, DEVICE_GB = 0.8, 1.25, 2.0
TIERS = ("prefix", "swap", "offload")
PARTS = (*paged.PARTS, *TIERS)  # of --only
Job = Callable[[], object]


def _named(*benches: str) -> Callable[[Row], bool]:
    return lambda row: row["bench"] in benches and not row["doubts"]


THRESHOLDS = (
    *paged.THRESHOLDS,
    worst_cell("swap of a plain copy", _named("swap out", "swap in"), COPIED),
    Threshold("swap out beside computation", _named("swap beside"), at_most=BESIDE),
    worst_cell("offload of a plain copy", _named("offload"), COPIED),
    Threshold(
        "offload, most on the device",
        _named("offload"),
        at_most=DEVICE_GB,
        measure=lambda rows: max(row["device_gb"] for row in rows),
        unit="GB",
    ),
)


def run(session: Session) -> None:
    """--only prefix needs no GPU."""
    if set(session.only) == {"prefix"}:
        session.run(steps(session))
    else:
        gpu.run(session, lambda: steps(session))


def steps(session: Session) -> Iterator[gpu.Step]:
    yield from paged.steps(session)
    for name, measure in zip(TIERS, (prefix, swap, stream), strict=True):
        if name in (session.only or (name,)):
            yield name, partial(measure, session)


def prefix(session: Session, num_tokens: int = PROMPT) -> list[Row]:
    """Host time of finding a prompt again, and of publishing it; no device takes part."""
    spec = Spec(1, 1, 8, dtype=torch.float32)  # what a page holds does not matter to the index
    num_pages = 2 * -(-num_tokens // spec.page_size) + 1
    prompt = torch.randint(0, 1 << 17, (num_tokens,)).tolist()
    publish, hits, num_shared = [], [], 0
    for _ in range(_rounds(session)):
        cache = KVCache(spec, num_pages)
        publish.append(seconds(lambda cache=cache: _publish(cache, prompt), session.device))
        hits.append(seconds(lambda cache=cache: cache.open(prompt), session.device))
        num_shared = cache.prefix.stats.shared_tokens + cache.prefix.stats.copied_tokens
    if num_shared != num_tokens - 1:
        raise Inaccurate(f"{num_shared} of {num_tokens} tokens were found again")
    case = Case("prefix hit", "pages of 16", None, 0, num_tokens, num_heads=0, way="host")
    named = {"prefix hit": (hits, num_shared), "prefix publish": (publish, None)}
    return [_prefix_row(case, name, *measured) for name, measured in named.items()]


def _publish(cache: KVCache, prompt: list[int]) -> None:
    sequence = cache.open()
    cache.append(sequence, prompt)
    cache.commit(sequence)
    cache.free(sequence)


def _prefix_row(case: Case, name: str, times: list[float], num_shared: int | None) -> Row:
    ms = 1e3 * min(times)
    row = case.row("host", ms, "ms") | {"bench": name, "doubts": [], "page_size": 16}
    return row | {"saved_tokens": num_shared, "token_ns": ms * 1e6 / case.seqlen}


class Swapper:
    """A sequence with its cache, its host tier, and a plain copy to compare with."""

    def __init__(self, device: torch.device, num_tokens: int, num_layers: int):
        spec = Spec(num_layers, KV_HEADS, HEAD_DIM, device=device)
        num_pages = -(-num_tokens // spec.page_size)
        self.cache = KVCache(spec, num_pages + 1, prefix_reuse=False)
        self.tier = HostTier(self.cache, num_pages)
        self.sequence = self._sequence(num_tokens)
        self.group: SequenceGroup | None = None
        self.num_bytes = num_pages * spec.page_bytes
        self.link = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
        self.host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def _sequence(self, num_tokens: int) -> Sequence:
        sequence = self.cache.open()
        if isinstance(sequence, NoRoom) or self.cache.reserve(sequence, num_tokens) is not None:
            raise RuntimeError(f"{num_tokens} tokens do not fit into their own cache")
        return sequence

    def swap_out(self, overlap: Job = lambda: None) -> None:
        group = self.tier.swap_out([self.sequence])
        if isinstance(group, NoRoom):
            raise RuntimeError(f"the host tier is too small for the sequence: {group}")
        self.group = group
        overlap()
        self.tier.synchronize()

    def swap_in(self) -> None:
        if self.group is None or self.tier.swap_in(self.group) is not None:
            raise RuntimeError("the sequence is not away, or its pages are gone")
        self.tier.synchronize()

    def copy_out(self) -> None:
        self.host.copy_(self.link, non_blocking=True)

    def copy_in(self) -> None:
        self.link.copy_(self.host, non_blocking=True)

    def check(self) -> None:
        """Raise Inaccurate unless a sequence returns unchanged after its pages are overwritten."""
        pages = self.cache.pages
        for t in (pages.k, pages.v):
            t.normal_()
        before = [t.clone() for t in self._read()]
        self.swap_out()
        for t in (pages.k, pages.v):
            t.zero_()
        self.swap_in()
        if not all(map(torch.equal, before, self._read())):
            raise Inaccurate("a swapped sequence came back with other bytes")

    def _read(self) -> list[Tensor]:
        held = torch.tensor(self.sequence.table.pages, device=self.cache.device)
        return [t[:, held] for t in (self.cache.pages.k, self.cache.pages.v)]


def swap(session: Session, num_tokens: int = SWAPPED, num_layers: int = LAYERS) -> list[Row]:
    """A sequence out and in, and out while the device computes for as long."""
    swapper = Swapper(session.device, num_tokens, num_layers)
    swapper.check()
    jobs = [swapper.swap_out, swapper.copy_out, swapper.swap_in, swapper.copy_in]
    out, copied_out, into, copied_in = _in_turns(session, jobs)
    work = _work(session.device, statistics.median(out))
    together = lambda: swapper.swap_out(work)
    beside, busy, _ = _in_turns(session, [together, work, swapper.swap_in])
    size = (HEAD_DIM, num_tokens, 1, KV_HEADS)
    case = Case("swap", "pages of 16", torch.bfloat16, *size, way="host")
    return [
        _copy_row(case, "swap out", (swapper.num_bytes, out), (LINK_BYTES, copied_out)),
        _copy_row(case, "swap in", (swapper.num_bytes, into), (LINK_BYTES, copied_in)),
        _beside_row(case, min(beside) / max(min(out), min(busy))),
    ]


def _in_turns(session: Session, jobs: abc.Sequence[Job]) -> list[list[float]]:
    """Seconds of each job in each round, one after another."""
    times: list[list[float]] = [[] for _ in jobs]
    for _ in range(_rounds(session)):
        for samples, job in zip(times, jobs, strict=True):
            samples.append(seconds(job, session.device))
    return times


def _work(device: torch.device, duration_s: float) -> Job:
    """Products of matrices that take about as long."""
    x, y = torch.randn(2, WORK, WORK, device=device, dtype=torch.bfloat16)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(x, x, out=y)

    multiply(1)
    once = min(seconds(lambda: multiply(20), device) for _ in range(3)) / 20
    return lambda: multiply(max(1, round(duration_s / once)))


def _beside_row(case: Case, longer: float) -> Row:
    row = case.row("copies", longer, "x of the longer") | {"bench": "swap beside"}
    return row | {"doubts": [], "page_size": 16, "num_kv_heads": KV_HEADS}


def stream(session: Session, num_keys: int = STREAMED) -> list[Row]:
    """One query a head over keys that stay in pinned memory."""
    device = session.device
    k, v = (_pinned((1, num_keys, KV_HEADS, HEAD_DIM), device, seed) for seed in (1, 2))
    q = torch.randn(1, 1, HEADS, HEAD_DIM, device=device).to(torch.bfloat16)
    source = offload.Offloaded(k, v)
    ours = lambda: onchip.offload_attention(q, source)
    peak_bytes, out = peak_extra_bytes(ours, device)
    error = _error(out, q, k, v)
    pieces = [*k.split(1 << 15, 1), *v.split(1 << 15, 1)]
    buffer = torch.empty_like(pieces[0], device=device)
    copy = lambda: [buffer[:, : len(x[0])].copy_(x, non_blocking=True) for x in pieces]
    streamed, copied = _in_turns(session, [ours, copy])
    case = Case("offload", "none", torch.bfloat16, HEAD_DIM, num_keys, 1, HEADS, way="decode")
    num_bytes = num_keys * source.token_bytes
    row = _copy_row(case, "offload", (num_bytes, streamed), (num_bytes, copied))
    return [row | {"page_size": None, "error": error, "device_gb": (peak_bytes or 0) / 1e9}]


def _pinned(shape: tuple[int, ...], device: torch.device, seed: int) -> Tensor:
    """Drawn on the device: a host takes seconds for a billion numbers."""
    generator = torch.Generator(device).manual_seed(seed)
    host = torch.empty(shape, dtype=torch.bfloat16, pin_memory=device.type == "cuda")
    for part in host.split(1 << 17, 1):
        part.copy_(torch.randn(part.shape, generator=generator, device=device, dtype=host.dtype))
    return host


def _error(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """The RMSE of one group of heads, held to the rule; fp64 of all would fill the device."""
    group = HEADS // KV_HEADS
    one = q[:, :, :group], *(x[:, :, :1].to(q.device) for x in (k, v))
    hold(out[:, :, :group], *one)
    return rmse(out[:, :, :group], oracle(*one).out)


def _copy_row(
    case: Case,
    name: str,
    ours: tuple[int, abc.Sequence[float]],
    copy: tuple[int, abc.Sequence[float]],
) -> Row:
    """ours and copy: bytes, and the seconds of each round."""
    per_byte = [[s / num_bytes for s in times] for num_bytes, times in (ours, copy)]
    ratio = gpu.paired(*per_byte)
    rates = [1e-9 / statistics.median(x) for x in per_byte]
    columns = {"peers": {COPY: rates[1]}, "best_peer": COPY, "ratio": ratio.ratio}
    row = case.row("copies", rates[0], "GB/s", **columns) | {"bench": name}
    row |= {"num_kv_heads": KV_HEADS, "page_size": 16, "band": list(ratio[1:])}
    return row | {"ratios": {COPY: list(ratio)}, "doubts": []}


def _rounds(session: Session) -> int:
    return QUICK_ROUNDS if session.quick else ROUNDS
