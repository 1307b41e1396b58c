"""Shared pages read once, against paged_attention over all pages of each sequence."""

import random
from types import SimpleNamespace

import pytest
import torch

from onchip.core.functional import paged_attention
from onchip.kvcache import PagedBatch
from onchip.kvcache.shared_prefixes import SharedShape, SharedSlot, pack_slots
from onchip.models.attend import PagedAttend
from onchip.models.shared_prefix import _attend_level, can_share
from onchip.quant import kv8

SIZE, HEADS, KV_HEADS, DIM = 4, 6, 2, 16


class Pages:
    """Random pages with the interface of a cache that attention needs."""

    def __init__(self, num_pages, dtype, kv_format=None, sizes=(SIZE, KV_HEADS, DIM), device="cpu"):
        shape = num_pages, *sizes
        self.pages = tuple(torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
        self.written, self.spec = [], SimpleNamespace(page_size=SIZE)
        self._scales = {}
        if kv_format is not None:
            stored = [kv8.quantise(t, kv8.parse_kv_dtype(kv_format)) for t in self.pages]
            self.pages = tuple(t for t, _ in stored)
            self._scales = dict(zip(("k_scales", "v_scales"), (s for _, s in stored), strict=True))

    def layer(self, layer):
        return self.pages

    def scales(self, layer):
        return self._scales


def make_batch(groups, counts, draw, padded_seqs=0):
    """groups: (members, shared pages); every sequence has a few pages of its own."""
    shared = {m: (pages, g) for g, (members, pages) in enumerate(groups) for m in members}
    free, runs, tables, lengths = iter(range(1, 999)), {}, [], []
    for i, count in enumerate(counts):
        pages, group = shared.get(i, (0, None))
        run = runs.setdefault(group, [next(free) for _ in range(pages)]) if pages else []
        length = len(run) * SIZE + draw.randrange(1, 9) + count
        own = -(-length // SIZE) - len(run)
        tables.append([*run, *(next(free) for _ in range(own))])
        lengths.append(length)
    width = max(map(len, tables)) + 1
    table = torch.zeros(len(counts) + padded_seqs, width, dtype=torch.int32)
    for row, pages in zip(table, tables, strict=False):
        row[: len(pages)] = torch.tensor(pages)
    as_int32 = lambda numbers: torch.tensor(numbers, dtype=torch.int32)
    lengths = as_int32([*lengths, *[0] * padded_seqs])
    counts = [*counts, *[0] * padded_seqs]
    cu = torch.cat([as_int32([0]), as_int32(counts).cumsum(0, dtype=torch.int32)])
    empty = torch.empty(0, dtype=torch.int32)
    return PagedBatch(table, lengths, empty, cu, max(counts), empty, empty), next(free)


def share(batch, groups, counts, shape):
    starts = batch.cu_seqlens_q.tolist()
    slots, own_from = [], [0] * len(batch.page_table)
    for members, pages in groups:
        tokens = [t for m in members for t in range(starts[m], starts[m] + counts[m])]
        for at in range(0, len(tokens), shape.rows):
            slots.append(SharedSlot(members[0], pages, tokens[at : at + shape.rows]))
        for member in members:
            own_from[member] = pages
    assert len(slots) <= shape.slots
    numbers = pack_slots(slots, own_from, shape, starts[-1])
    return batch.share(torch.tensor(numbers, dtype=torch.int32), shape, SIZE)


GROUPS = {
    "one": ([([0, 1, 2, 3, 4], 11)], [1] * 5),
    "some_alone": ([([1, 3, 4], 9)], [1] * 6),
    "several": ([([0, 5], 3), ([1, 2, 6, 7], 13)], [1] * 8),
    "drafts": ([([0, 2], 6), ([3, 4, 5], 2)], [3, 1, 2, 1, 4, 1]),
    "beside_a_prompt": ([([0, 1, 3], 7)], [1, 1, 29, 2]),
}
SHAPES = [SharedShape(9, 1), SharedShape(4, 5), SharedShape(2, 8, 3, 2), SharedShape(5, 4, 4, 1)]


@pytest.mark.parametrize("kv_format", [None, "fp8", "int8"])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", GROUPS)
def test_the_same_attention_as_over_all_pages(name, shape, softcap, has_sinks, kv_format):
    (groups, counts), draw = GROUPS[name], random.Random(5)
    torch.manual_seed(1)
    needed = sum(-(-sum(counts[m] for m in members) // shape.rows) for members, _ in groups)
    shape = shape._replace(slots=max(needed, shape.slots))
    batch, num_pages = make_batch(groups, counts, draw)
    cache = Pages(num_pages, torch.float32, kv_format)
    q = torch.randn(sum(counts), HEADS, DIM)
    options = {"softmax_scale": 0.3, "softcap": softcap}
    options |= {"sinks": torch.randn(HEADS)} if has_sinks else {}
    plain = PagedAttend(batch, cache).read(0, q, **options)
    shared = share(batch, groups, counts, shape)
    assert can_share(shared, options) and not can_share(batch, options)
    got = PagedAttend(shared, cache).read(0, q, **options)
    torch.testing.assert_close(got, plain, atol=2e-6, rtol=2e-5)


def test_every_page_is_read_once():
    """Pages of the prefix are read by one sequence of one call; the rest by their owners."""
    (groups, counts), draw = GROUPS["several"], random.Random(5)
    batch, num_pages = make_batch(groups, counts, draw)
    shared = share(batch, groups, counts, SharedShape(3, 4, 2, 2)).shared
    read = [
        page
        for table, lengths in (
            (shared.page_table, shared.seqlens),
            (shared.own_table, shared.own_seqlens),
        )
        for row, length in zip(table.tolist(), lengths.tolist(), strict=True)
        for page in row[: -(-length // SIZE)]
    ]
    held = {
        page
        for row, length in zip(batch.page_table.tolist(), batch.cache_seqlens.tolist(), strict=True)
        for page in row[: -(-length // SIZE)]
    }
    assert sorted(read) == sorted(held)


def test_padding_reads_nothing():
    """Sequences without tokens, slots without pages, rows without queries: as in a CUDA graph."""
    groups, counts = [([0, 2, 3], 5)], [1] * 5
    batch, num_pages = make_batch(groups, counts, random.Random(2), padded_seqs=3)
    cache, q = Pages(num_pages, torch.float32), torch.randn(8, HEADS, DIM)
    starts = [0, 1, 2, 3, 4]
    shape = SharedShape(4, 2, 2, 1)
    slots = [SharedSlot(0, 5, [starts[0], starts[2]]), SharedSlot(0, 5, [starts[3]])]
    numbers = pack_slots(slots, [5, 0, 5, 5, 0, 0, 0, 0], shape, 8)
    padded = batch.share(torch.tensor(numbers, dtype=torch.int32), shape, SIZE)
    assert padded.shared.seqlens.tolist() == [12, 12, 0, 0, 8, 8, 0, 0]
    assert padded.shared.row_index.tolist() == [0, -1, 1, 2, -1, -1, -1, -1]
    for pages in cache.pages:
        pages[0] = float("nan")  # the null page
    got = PagedAttend(padded, cache).read(0, q)[:5]
    tables = batch.page_table[:5], batch.cache_seqlens[:5]
    plain = paged_attention(q[:5, None], *cache.layer(0), *tables)[:, 0]
    torch.testing.assert_close(got, plain, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize(
    "options", [{"window_size": (7, 0)}, {"alibi_slopes": torch.ones(HEADS)}], ids=str
)
def test_layers_with_a_window_or_alibi_read_all_pages(options, monkeypatch):
    (groups, counts), draw = GROUPS["one"], random.Random(5)
    batch, num_pages = make_batch(groups, counts, draw)
    cache, q = Pages(num_pages, torch.float32), torch.randn(sum(counts), HEADS, DIM)
    plain = PagedAttend(batch, cache).read(0, q, **options)
    shared = share(batch, groups, counts, SharedShape(2, 4))
    monkeypatch.setattr("onchip.models.attend.attend_shared", None)
    assert torch.equal(PagedAttend(shared, cache).read(0, q, **options), plain)


def test_parts_are_merged_unrounded():
    """In bf16, the error is that of one call: the accuracy rule of onchip.testing."""
    (groups, counts), draw = GROUPS["one"], random.Random(5)
    batch, num_pages = make_batch(groups, counts, draw)
    cache = Pages(num_pages, torch.bfloat16)
    q = torch.randn(sum(counts), HEADS, DIM, dtype=torch.bfloat16)
    exact = paged_attention(
        q[:, None].double(),
        *(t.double() for t in cache.layer(0)),
        batch.page_table,
        batch.cache_seqlens,
    )[:, 0]
    shared = share(batch, groups, counts, SharedShape(2, 4, 2))
    rmse = lambda batch: (PagedAttend(batch, cache).read(0, q) - exact).square().mean().sqrt()
    assert rmse(shared) <= 1.05 * rmse(batch)


def test_the_lse_of_slots_of_one_row_is_contiguous():
    """The merge in one launch reads the rows of a head one after another."""
    (groups, counts), draw = GROUPS["one"], random.Random(5)
    batch, num_pages = make_batch(groups, counts, draw)
    cache = Pages(num_pages, torch.float32)
    q = torch.randn(sum(counts), HEADS, DIM)
    shared = share(batch, groups, counts, SharedShape(len(counts), 1)).shared
    _, lse = _attend_level(q, cache.layer(0), shared, {"return_lse": True})
    assert lse.shape == (1, HEADS, len(counts)) and lse.is_contiguous()


def rmse(got, exact):
    return (got.double() - exact).square().mean().sqrt().item()


@pytest.mark.gpu
@pytest.mark.parametrize("kv_format", [None, "fp8", "int8"])
@pytest.mark.parametrize(
    ("num_seqs", "shape"),
    [
        (8, SharedShape(4, 8)),
        (32, SharedShape(1, 32)),
        (64, SharedShape(1, 64, 16, 32)),
        (64, SharedShape(4, 64, 4, 32)),
        (200, SharedShape(8, 64, 2, 32)),
    ],
    ids=str,
)
def test_the_shapes_of_graphs_on_a_gpu(num_seqs, shape, kv_format):
    """bf16, pages of 16, 16 heads over 8, 3,040 shared tokens: errors against fp64
    equal the errors of one call, whichever kernels serve the parts.
    """
    torch.manual_seed(3)
    size, shared_pages, own_pages = 16, 190, 3
    half = num_seqs // 2 if shape.slots > 1 else num_seqs
    groups = [g for g in (range(half), range(half, num_seqs - num_seqs // 8)) if g]
    runs = [torch.arange(shared_pages) + 1 + g * shared_pages for g in range(len(groups))]
    first_own = 1 + len(groups) * shared_pages
    table = torch.zeros(num_seqs, shared_pages + own_pages, dtype=torch.int32)
    own = first_own + torch.arange(num_seqs * own_pages).view(num_seqs, own_pages)
    lengths = torch.randint(1, own_pages * size + 1, (num_seqs,))
    table[:, :own_pages] = own
    own_from, slots = [0] * num_seqs, []
    for group, run in zip(groups, runs, strict=True):
        for i in group:
            table[i, :shared_pages], table[i, shared_pages:] = run, own[i]
            own_from[i] = shared_pages
            lengths[i] += shared_pages * size
        for at in range(0, len(group), shape.rows):
            slots.append(SharedSlot(group[0], shared_pages, group[at : at + shape.rows]))
    sizes = size, 8, 128
    num_pages = first_own + num_seqs * own_pages
    cache = Pages(num_pages, torch.bfloat16, kv_format, sizes, "cuda")
    lengths, empty = lengths.int().cuda(), torch.empty(0, dtype=torch.int32, device="cuda")
    cu = torch.arange(num_seqs + 1, dtype=torch.int32, device="cuda")
    batch = PagedBatch(table.cuda(), lengths, empty, cu, 1, empty, empty)
    numbers = torch.tensor(pack_slots(slots, own_from, shape, num_seqs), dtype=torch.int32)
    shared = batch.share(numbers.cuda(), shape, size)
    q = torch.randn(num_seqs, 16, 128, dtype=torch.bfloat16, device="cuda")
    host = [t.cpu() for t in cache.layer(0)]
    if kv_format is not None:
        scales = [t.cpu() for t in cache.scales(0).values()]
        host = [kv8.dequantise(t, s, torch.float64) for t, s in zip(host, scales, strict=True)]
    some = torch.arange(0, num_seqs, max(1, num_seqs // 12))  # fp64 on the CPU takes long
    some_q, some_tables = q.cpu()[some, None].double(), (table[some], lengths.cpu()[some])
    exact = paged_attention(some_q, *(t.double() for t in host), *some_tables)[:, 0]
    read = lambda each: PagedAttend(each, cache).read(0, q).cpu()[some]
    errors = [rmse(read(each), exact) for each in (batch, shared)]
    assert errors[1] <= 1.05 * errors[0]
