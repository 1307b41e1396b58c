"""`onchip bench paged`: one query a sequence over a cache, which memory sets the pace of.

"decode" rows read the cache through a page table, "decode dense" rows as one tensor; both against
the dense kernels of SDPA on the same numbers. "page size" rows are ours against ours with pages of
256 slots; "decode MHA" has as many key heads as query heads; "decode skewed" is one long sequence
among short ones. "cascade" rows read a prefix once for all sequences that share it, against one
call that reads it for each. A value is the keys and values of a call over its time, of a cascade
its time; `page_size` is a column. "decode fp8" and "decode int8" (--kv-dtype) are ours over pages
of 8 bits against ours over bf16 pages of the same numbers, which 8 bits hold: tokens a second, one
of each sequence a call.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import onchip
from onchip.cli.bench import gpu, peers
from onchip.cli.bench.gpu import GpuCandidate, Inputs, RowSpec, Scale
from onchip.cli.bench.harness import Case, Row, Session, Threshold, hold, worst_cell
from onchip.core.signatures import PagedOptions
from onchip.cost.prefixes import costs
from onchip.fold import cascade
from onchip.quant.kv8 import FORMATS, quantise, snap_to_grid
from onchip.testing import oracle, rmse

CELLS = ((1, 16384), (1, 131072), (16, 4096), (64, 4096), (128, 8192))  # (batch, keys)
PAGE_SIZE, LARGEST = 16, 256
PAGE_SIZES = (1, 8, 16, 64)
MHA = (64, 2048, 8)  # batch, keys, page_size
SKEWED = (131072, *[1024] * 63)
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
CHECKED = 4  # sequences of a batch that are compared with fp64
# Sequences, keys they share, keys of their own: a prefix that stays in the L2, which then serves
# one call as well, one that does not, and one too short to be worth it.
PREFIXES = ((64, 8192, 256), (64, 32768, 256), (8, 2048, 64))
PARTS = ("decode", "pages", "cascade")  # of --only
AT_LEAST, SMALL_PAGES, MHA_TBS = 0.98, 0.90, 3.5
KV8_SPEEDUP, KV8_SPEEDUP_AT = 1.7, CELLS[-1]
CASCADE = 5.0


def _is(bench: str, page_size: int | None = None) -> Callable[[Row], bool]:
    fits = lambda row: page_size in (None, row["page_size"])
    return lambda row: row["bench"] == bench and fits(row) and gpu.counts(row)


def _first_prefix(row: Row) -> bool:
    batch, shared, own = PREFIXES[0]
    return _is("cascade")(row) and (row["batch"], row["seqlen"]) == (batch, shared + own)


def _as_kv8(kv_dtype: str) -> Callable[[Row], bool]:
    bench = _is(f"decode {kv_dtype}")
    return lambda row: bench(row) and (row["batch"], row["seqlen"]) == KV8_SPEEDUP_AT


THRESHOLDS = (
    worst_cell("paged decode, worst cell", _is("decode"), AT_LEAST),
    worst_cell("dense decode, worst cell", _is("decode dense"), AT_LEAST),
    worst_cell("page size 1 over 256", _is("page size", 1), SMALL_PAGES),
    Threshold(
        "MHA decode, pages of 8",
        _is("decode MHA"),
        at_least=MHA_TBS,
        measure=lambda rows: min(row["value"] for row in rows),
        unit="TB/s",
    ),
    worst_cell("cascade over one call, 64 x 8k", _first_prefix, CASCADE),
    *(
        worst_cell(f"{name} cache over bf16, 128 x 8k", _as_kv8(name), KV8_SPEEDUP, optional=True)
        for name in FORMATS
    ),
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

    @property
    def tokens(self) -> Scale:
        """One of each sequence, of one layer."""
        return Scale("tokens/s", lambda ms: len(self.lengths) / ms * 1e3)

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


class DecodeCheck:
    """fp64 on sequences, (q, k, v) each, that are the first ones of the batch of the first set."""

    def __init__(self, sequences: Sequence[Inputs]):
        self.sequences = sequences

    @classmethod
    def of(cls, cache: Cache, inputs: Inputs) -> "DecodeCheck":
        few = range(min(CHECKED, len(cache.lengths)))
        return cls([tuple(x[b : b + 1, : cache.lengths[b]] for x in inputs) for b in few])

    def __call__(self, candidate: GpuCandidate, strict: bool) -> dict[str, float]:
        out = candidate.forward(candidate.sets[0])
        errors = []
        for b, (q, k, v) in enumerate(self.sequences):
            if strict:
                hold(out[b : b + 1], q, k, v)
            errors.append(rmse(out[b : b + 1], oracle(q, k, v).out))
        return {"normal": max(errors)}


def run(session: Session) -> None:
    gpu.run(session, lambda: steps(session))


def steps(session: Session) -> Iterator[gpu.Step]:
    """--only chooses among the parts, --seqlens among the decode cells by number of keys;
    --kv-dtype selects 8-bit caches instead of 16-bit ones.
    """
    makers = {"decode": _decode_steps, "pages": _page_steps, "cascade": _cascade_steps}
    for name in PARTS:
        if name in (session.only or (name,)):
            yield from makers[name](session)


def _decode_steps(session: Session) -> Iterator[gpu.Step]:
    for batch, keys in CELLS[2:3] if session.quick else CELLS:
        if keys in (session.seqlens or (keys,)):
            if not session.kv_dtypes:
                yield f"decode, {batch} x {keys:,} keys", partial(decode, session, batch, keys)
            for name in session.kv_dtypes:
                title = f"decode, {batch} x {keys:,} keys, {name} cache"
                yield title, partial(kv8_rows, session, batch, keys, name)
    if not session.quick and not session.kv_dtypes:
        yield "decode, as many key heads as query heads", partial(mha, session)
        yield "decode, one long sequence", partial(skewed, session)


def _page_steps(session: Session) -> Iterator[gpu.Step]:
    for page_size in (1,) if session.quick else PAGE_SIZES:
        yield f"pages of {page_size}", partial(page_sizes, session, page_size)


def _cascade_steps(session: Session) -> Iterator[gpu.Step]:
    for batch, shared, own in PREFIXES[-1:] if session.quick else PREFIXES:
        title = f"cascade, {batch} sequences share {shared:,} keys"
        yield title, partial(cascades, session, Prefix(batch, shared, own))


def decode(session: Session, batch: int, keys: int) -> list[Row]:
    cache = Cache((keys,) * batch)
    sets = cache.draw_sets(session.device)
    check = DecodeCheck.of(cache, sets[0])
    rivals = gpu.both_layouts("cudnn", peers.backend("cudnn", enable_gqa=True), sets, check)
    paged = our_paged("onchip", cache, sets, PAGE_SIZE)
    dense = GpuCandidate("dense", onchip.attention, sets, check, ours=True)
    plan = onchip.explain(*sets[0]).plan.kernel
    specs = [RowSpec("decode", kernel_of(paged), paged, rivals)]
    specs.append(RowSpec("decode dense", plan, dense, rivals))
    rows = gpu.contest(session, cache.case("decode"), specs, cache.scale, required=("cudnn",))
    sizes = {"decode": PAGE_SIZE, "decode dense": None}
    return [_columns(row, cache, sizes[row["bench"]]) for row in rows]


def kv8_rows(session: Session, batch: int, keys: int, kv_dtype: str) -> list[Row]:
    """Ours over 8-bit pages against ours over bf16 pages that hold the same numbers."""
    cache, form = Cache((keys,) * batch), FORMATS[kv_dtype]
    drawn = cache.draw_sets(session.device)
    sets = [(q, snap_to_grid(k, form), snap_to_grid(v, form)) for q, k, v in drawn]
    wide = our_paged("bf16 cache", cache, sets, PAGE_SIZE)
    narrow = our_kv8("onchip", wide, form, cache)
    bench = f"decode {kv_dtype}"
    spec = RowSpec(bench, kernel_of(narrow), narrow, [wide])
    rows = gpu.contest(session, cache.case(bench), [spec], cache.tokens)
    return [_columns(row, cache, PAGE_SIZE) | {"kv_dtype": kv_dtype} for row in rows]


def our_kv8(name: str, wide: GpuCandidate, form: torch.dtype, cache: Cache) -> GpuCandidate:
    """paged_attention over the pages of another quantised, under the same check; every set is (q,
    (pages, scales), page table).
    """
    lengths = torch.tensor(cache.lengths, dtype=torch.int32, device=wide.sets[0][0].device)
    sets = [(q, quantised(pages, form), table) for q, pages, table in wide.sets]
    attend = lambda q, pages, table: onchip.paged_attention(
        q, pages[0][0], pages[0][1], table, lengths, **scales_of(pages[1])
    )
    return GpuCandidate(name, attend, sets, wide.check, ours=True)


def scales_of(scales: Tensor) -> PagedOptions:
    k_scales, v_scales = scales
    return {"k_scales": k_scales, "v_scales": v_scales}


def quantised(pages: Tensor, form: torch.dtype) -> tuple[Tensor, Tensor]:
    """8-bit pages and their scales as a cache keeps them, page by page: fp32 copies are large."""
    values = torch.empty(pages.shape, dtype=form, device=pages.device)
    scales = torch.empty(pages.shape[:-1], device=pages.device).transpose(2, 3).contiguous()
    scales = scales.transpose(2, 3)
    for kind in (0, 1):
        for some in torch.arange(pages.shape[1], device=pages.device).split(4096):
            values[kind, some], scales[kind, some] = quantise(pages[kind, some], form)
    return values, scales


def page_sizes(session: Session, page_size: int) -> list[Row]:
    """Ours with small pages against ours with the largest."""
    cache = Cache((4096,) * 64)
    sets = cache.draw_sets(session.device)
    large = our_paged(f"pages of {LARGEST}", cache, sets, LARGEST)
    small = our_paged("onchip", cache, sets, page_size)
    spec = RowSpec("page size", kernel_of(small), small, [large])
    rows = gpu.contest(session, cache.case("page size"), [spec], cache.scale)
    return [_columns(row, cache, page_size) for row in rows]


def mha(session: Session) -> list[Row]:
    batch, keys, page_size = MHA
    cache = Cache((keys,) * batch, HEADS)
    sets = cache.draw_sets(session.device)
    check = DecodeCheck.of(cache, sets[0])
    rivals = gpu.both_layouts("cudnn", peers.backend("cudnn"), sets, check)
    paged = our_paged("onchip", cache, sets, page_size)
    spec = RowSpec("decode MHA", kernel_of(paged), paged, rivals)
    rows = gpu.contest(session, cache.case("decode MHA"), [spec], cache.scale)
    return [_columns(row, cache, page_size) for row in rows]


def skewed(session: Session) -> list[Row]:
    """Against ours over as many keys in equal sequences: what the skew costs."""
    cache = Cache(SKEWED)
    even = Cache((sum(SKEWED) // len(SKEWED) // PAGE_SIZE * PAGE_SIZE,) * len(SKEWED))
    rival = our_paged("equal lengths", even, even.draw_sets(session.device), PAGE_SIZE)
    sets = cache.draw_sets(session.device)
    paged = our_paged("onchip", cache, sets, PAGE_SIZE)
    spec = RowSpec("decode skewed", kernel_of(paged), paged, [rival])
    rows = gpu.contest(session, cache.case("decode skewed"), [spec], cache.scale)
    return [_columns(row, cache, PAGE_SIZE) for row in rows]


@dataclass(frozen=True)
class Prefix:
    """Sequences that begin with the same keys: `shared` of them, then `own` of each."""

    batch: int
    shared: int
    own: int

    @property
    def cache(self) -> Cache:
        return Cache((self.shared + self.own,) * self.batch)

    @property
    def num_bytes(self) -> int:
        """What must be read at least."""
        return Cache((self.shared, *[self.own] * self.batch)).num_bytes

    def draw(self, device: torch.device, seed: int) -> tuple[Inputs, DecodeCheck]:
        """(q, pages of k and v, page_table), and the check of its first sequences."""
        prefix = Cache((self.shared,)).draw(device, seed)[1:]
        q, *own = Cache((self.own,) * self.batch).draw(device, seed + 1)
        rows = [torch.cat([a, b.flatten(0, 1)[None]], 1) for a, b in zip(prefix, own, strict=True)]
        width, first = (self.shared + self.own) // PAGE_SIZE, self.shared // PAGE_SIZE
        _, pages, order = in_pages((q[:1], *rows), (rows[0].shape[1],), PAGE_SIZE)
        table = order[0, first:].view(self.batch, width - first)
        table = torch.cat([order[:, :first].expand(self.batch, -1), table], 1)
        whole = lambda i: (
            torch.cat([a, b[i : i + 1]], 1) for a, b in zip(prefix, own, strict=True)
        )
        few = range(min(CHECKED, self.batch))
        return (q, pages, table), DecodeCheck([(q[i : i + 1], *whole(i)) for i in few])


def cascades(session: Session, prefix: Prefix) -> list[Row]:
    """A prefix read once for all against one call over the same tables."""
    l2_bytes = torch.cuda.get_device_properties(session.device).L2_cache_size
    count = gpu.num_sets(prefix.num_bytes, l2_bytes)
    drawn = [prefix.draw(session.device, 2 * i) for i in range(count)]
    sets, check = [inputs for inputs, _ in drawn], drawn[0][1]
    lengths = torch.tensor(prefix.cache.lengths, dtype=torch.int32, device=session.device)
    once = GpuCandidate("onchip", _cascade_of(sets, lengths), sets, check, ours=True)
    attend = lambda q, pages, table: onchip.paged_attention(q, pages[0], pages[1], table, lengths)
    plain = GpuCandidate("one call", attend, sets, check, ours=True)
    specs = [RowSpec("cascade", kernel_of(plain), once, [plain])]
    rows = gpu.contest(session, prefix.cache.case("cascade"), specs, gpu.MICROSECONDS)
    return [
        _columns(row, prefix.cache, PAGE_SIZE) | {"mask": f"{prefix.shared:,} shared"}
        for row in rows
    ]


def _cascade_of(sets: Sequence[Inputs], lengths: Tensor) -> Callable:
    """attend(q, pages, table), each table with a plan of its own."""
    plans = {}
    for q, pages, table in sets:
        model = costs(q, *pages)
        plan = cascade.plan(table.cpu(), lengths.cpu(), PAGE_SIZE, model)
        plans[table.data_ptr()] = plan.to(lengths.device)

    def attend(q: Tensor, pages: Tensor, table: Tensor):
        plan = plans[table.data_ptr()]
        return onchip.cascade_attention(q, pages[0], pages[1], table, lengths, plan=plan)

    return attend


def our_paged(name: str, cache: Cache, sets: Sequence[Inputs], page_size: int) -> GpuCandidate:
    """paged_attention over the same numbers; every set is (q, pages of k and v, page table)."""
    lengths = torch.tensor(cache.lengths, dtype=torch.int32, device=sets[0][0].device)
    laid = [in_pages(inputs, cache.lengths, page_size) for inputs in sets]
    attend = lambda q, pages, table: onchip.paged_attention(q, pages[0], pages[1], table, lengths)
    return GpuCandidate(name, attend, laid, DecodeCheck.of(cache, sets[0]), ours=True)


def kernel_of(paged: GpuCandidate) -> str:
    """Which kernel serves it: any lengths that fit its tables will do to ask."""
    q, pages, table = paged.sets[0]
    pages, scales = (pages, {}) if isinstance(pages, Tensor) else (pages[0], scales_of(pages[1]))
    seqlens = torch.full_like(table[:, 0], table.shape[1] * pages.shape[2])
    explained = onchip.explain(q, *pages, page_table=table, cache_seqlens=seqlens, **scales)
    return explained.plan.kernel


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
    mask = "none" if page_size is None else f"pages of {page_size}"
    return row | {"num_kv_heads": cache.num_kv_heads, "page_size": page_size, "mask": mask}
