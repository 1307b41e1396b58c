"""`onchip bench paged`: one query a sequence over a cache, which memory sets the pace of.

"decode" rows read the cache through a page table, "decode dense" rows as one tensor; both against
the dense kernels of SDPA on the same numbers. "page size" rows are ours against ours with pages of
256 slots; "decode MHA" has as many key heads as query heads; "decode skewed" is one long sequence
among short ones. A value is the keys and values of a call over its time; `page_size` is a column.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import onchip
from onchip.bench import gpu, peers
from onchip.bench.gpu import Claim, Contender, Inputs, Scale
from onchip.bench.harness import Bar, Case, Inaccurate, Row, Session, worst_cell
from onchip.testing import assert_accurate, oracle, rmse

CELLS = ((1, 16384), (1, 131072), (16, 4096), (64, 4096), (128, 8192))  # (batch, keys)
PAGE_SIZE, LARGEST = 16, 256
PAGE_SIZES = (1, 2, 8, 16, 64)
MHA = (64, 2048, 8)  # batch, keys, page_size
SKEWED = (131072, *[1024] * 63)
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
CHECKED = 4  # sequences of a batch that fp64 judges
AT_LEAST, SMALL_PAGES, MHA_TBS = 0.98, 0.90, 3.5


def _is(bench: str, page_size: int | None = None) -> Callable[[Row], bool]:
    fits = lambda row: page_size in (None, row["page_size"])
    return lambda row: row["bench"] == bench and fits(row) and gpu.counts(row)


def _least_value(rows: list[Row]) -> float:
    return min(row["value"] for row in rows)


BARS = (
    Bar("paged decode, worst cell", _is("decode"), AT_LEAST, measure=worst_cell(AT_LEAST)),
    Bar("dense decode, worst cell", _is("decode dense"), AT_LEAST, measure=worst_cell(AT_LEAST)),
    Bar("page size 1 over 256", _is("page size", 1), SMALL_PAGES, measure=worst_cell(SMALL_PAGES)),
    Bar("MHA decode, pages of 8", _is("decode MHA"), MHA_TBS, measure=_least_value, unit="TB/s"),
)


@dataclass(frozen=True)
class Cache:
    """What is in the cache: keys of each sequence, and the heads they have."""

    lengths: tuple[int, ...]
    num_kv_heads: int = KV_HEADS

    @property
    def num_bytes(self) -> int:
        return sum(self.lengths) * self.num_kv_heads * HEAD_DIM * 2 * 2

    @property
    def scale(self) -> Scale:
        return Scale("TB/s", lambda ms: self.num_bytes / ms / 1e9)

    def case(self, bench: str) -> Case:
        keys, batch = max(self.lengths), len(self.lengths)
        return Case(bench, "none", torch.bfloat16, HEAD_DIM, keys, batch, HEADS, way="decode")

    def draw(self, device: torch.device, seed: int) -> Inputs:
        """q (batch, 1, heads, head_dim); k and v (batch, keys, kv_heads, head_dim), rows past the
        end of a shorter sequence unused.
        """
        generator = torch.Generator(device).manual_seed(seed)
        shape = (len(self.lengths), max(self.lengths), self.num_kv_heads, HEAD_DIM)
        draw = lambda *shape: torch.randn(
            shape, generator=generator, device=device, dtype=torch.bfloat16
        )
        return draw(len(self.lengths), 1, HEADS, HEAD_DIM), draw(*shape), draw(*shape)

    def draw_sets(self, device: torch.device) -> list[Inputs]:
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        return [self.draw(device, i) for i in range(gpu.num_sets(self.num_bytes, l2_bytes))]


class DecodeJudge:
    """fp64 on the first CHECKED sequences of the first set."""

    def __init__(self, cache: Cache, inputs: Inputs):
        self.sequences = [
            tuple(x[b : b + 1, : cache.lengths[b]] for x in inputs)
            for b in range(min(CHECKED, len(cache.lengths)))
        ]

    def __call__(self, contender: Contender, strict: bool) -> dict[str, float]:
        out = contender.forward(contender.sets[0])
        errors = []
        for b, (q, k, v) in enumerate(self.sequences):
            if strict:
                self._hold(out[b : b + 1], q, k, v)
            errors.append(rmse(out[b : b + 1], oracle(q, k, v).out))
        return {"normal": max(errors)}

    def _hold(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        try:
            assert_accurate(out, q, k, v)
        except AssertionError as error:
            raise Inaccurate(str(error)) from error


def run(session: Session) -> None:
    gpu.run(session, lambda: steps(session))


def steps(session: Session) -> Iterator[gpu.Step]:
    """--seqlens chooses among the cells by their keys."""
    cells = CELLS[2:3] if session.quick else CELLS
    for batch, keys in cells:
        if keys in (session.seqlens or (keys,)):
            yield f"decode, {batch} x {keys:,} keys", partial(decode, session, batch, keys)
    for page_size in (1,) if session.quick else PAGE_SIZES:
        yield f"pages of {page_size}", partial(page_sizes, session, page_size)
    if not session.quick:
        yield "decode, as many key heads as query heads", partial(mha, session)
        yield "decode, one long sequence", partial(skewed, session)


def decode(session: Session, batch: int, keys: int) -> list[Row]:
    cache = Cache((keys,) * batch)
    sets = cache.draw_sets(session.device)
    judge = DecodeJudge(cache, sets[0])
    rivals = gpu.both_layouts("cudnn", peers.backend("cudnn", enable_gqa=True), sets, judge)
    paged = our_paged("onchip", cache, sets, PAGE_SIZE)
    dense = Contender("dense", onchip.attention, sets, judge, ours=True)
    plan = onchip.explain(*sets[0]).plan.kernel
    claims = [Claim("decode", "triton", paged, rivals), Claim("decode dense", plan, dense, rivals)]
    rows = gpu.contest(session, cache.case("decode"), claims, cache.scale, required=("cudnn",))
    sizes = {"decode": PAGE_SIZE, "decode dense": None}
    return [_columns(row, cache, sizes[row["bench"]]) for row in rows]


def page_sizes(session: Session, page_size: int) -> list[Row]:
    """Ours with small pages against ours with the largest."""
    cache = Cache((4096,) * 64)
    sets = cache.draw_sets(session.device)
    large = our_paged(f"pages of {LARGEST}", cache, sets, LARGEST)
    claim = Claim("page size", "triton", our_paged("onchip", cache, sets, page_size), [large])
    rows = gpu.contest(session, cache.case("page size"), [claim], cache.scale)
    return [_columns(row, cache, page_size) for row in rows]


def mha(session: Session) -> list[Row]:
    batch, keys, page_size = MHA
    cache = Cache((keys,) * batch, HEADS)
    sets = cache.draw_sets(session.device)
    judge = DecodeJudge(cache, sets[0])
    rivals = gpu.both_layouts("cudnn", peers.backend("cudnn"), sets, judge)
    claim = Claim("decode MHA", "triton", our_paged("onchip", cache, sets, page_size), rivals)
    rows = gpu.contest(session, cache.case("decode MHA"), [claim], cache.scale)
    return [_columns(row, cache, page_size) for row in rows]


def skewed(session: Session) -> list[Row]:
    """Against ours over as many keys in equal sequences: what the skew costs."""
    cache = Cache(SKEWED)
    even = Cache((sum(SKEWED) // len(SKEWED) // PAGE_SIZE * PAGE_SIZE,) * len(SKEWED))
    rival = our_paged("equal lengths", even, even.draw_sets(session.device), PAGE_SIZE)
    sets = cache.draw_sets(session.device)
    claim = Claim("decode skewed", "triton", our_paged("onchip", cache, sets, PAGE_SIZE), [rival])
    rows = gpu.contest(session, cache.case("decode skewed"), [claim], cache.scale)
    return [_columns(row, cache, PAGE_SIZE) for row in rows]


def our_paged(name: str, cache: Cache, sets: Sequence[Inputs], page_size: int) -> Contender:
    """paged_attention over the same numbers; every set is (q, pages of k and v, page table)."""
    lengths = torch.tensor(cache.lengths, dtype=torch.int32, device=sets[0][0].device)
    laid = [in_pages(inputs, cache.lengths, page_size) for inputs in sets]
    attend = lambda q, pages, table: onchip.paged_attention(q, pages[0], pages[1], table, lengths)
    return Contender(name, attend, laid, DecodeJudge(cache, sets[0]), ours=True)


def in_pages(inputs: Inputs, lengths: Sequence[int], page_size: int) -> Inputs:
    """(q, (2, num_pages, page_size, kv_heads, head_dim), page_table), pages in random order. Every
    length is a multiple of page_size.
    """
    q, k, v = inputs
    width = k.shape[1] // page_size
    taken = torch.arange(width) < torch.tensor(lengths)[:, None] // page_size
    order = torch.randperm(int(taken.sum()), generator=torch.Generator().manual_seed(page_size))
    table = torch.zeros(taken.shape, dtype=torch.int64)
    table[taken] = order
    pages = k.new_empty(2, len(order), page_size, *k.shape[2:])
    for part, x in zip(pages, (k, v), strict=True):
        part[order.to(k.device)] = x.unflatten(1, (width, page_size))[taken.to(k.device)]
    return q, pages, table.to(k.device, torch.int32)


def _columns(row: Row, cache: Cache, page_size: int | None) -> Row:
    return row | {"num_kv_heads": cache.num_kv_heads, "page_size": page_size}
