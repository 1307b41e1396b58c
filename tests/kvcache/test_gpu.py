"""On a GPU: bytes survive a round trip, and copies overlap with computation. `python -m benchmarks
paged --only swap` measures their speed.
"""

from itertools import pairwise

import pytest
import torch

import onchip
from onchip.kvcache import BatchShape, HostTier, KVCache, Spec
from onchip.kvcache.swap import SwapStatus
from onchip.quant.kv8 import quantise

pytestmark = pytest.mark.gpu

HEADS, KV_HEADS, DIM = 8, 2, 64


def make(num_pages=64, page_size=16, num_layers=3, **options):
    spec = Spec(num_layers, KV_HEADS, DIM, page_size=page_size, device="cuda")
    cache = KVCache(spec, num_pages, **options)
    cache.pages.k.fill_(float("nan"))
    cache.pages.v.fill_(float("nan"))
    return cache


def step(cache, sequences):
    """Random keys and values for tokens not computed: (k, v) per sequence, (layers, new, ...)."""
    batch, spec = cache.view(sequences), cache.spec
    shape = (spec.num_layers, len(batch.slot_mapping), KV_HEADS, DIM)
    k, v = (torch.randn(shape, dtype=spec.dtype, device="cuda") for _ in range(2))
    for layer in range(spec.num_layers):
        cache.write(layer, k[layer], v[layer], batch.slot_mapping)
    for sequence in sequences:
        cache.commit(sequence)
    cuts = batch.cu_seqlens_q.tolist()
    return [(k[:, a:b], v[:, a:b]) for a, b in pairwise(cuts)]


def start(cache, count, first=0):
    sequence = cache.open(list(range(first, first + count)))
    assert cache.append(sequence, list(range(first + sequence.length, first + count))) is None
    return sequence


def read(cache, sequence):
    pages = torch.tensor(sequence.table.pages, device="cuda")
    return [t[:, pages].flatten(1, 2)[:, : sequence.length] for t in (cache.pages.k, cache.pages.v)]


def same(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_bytes_written_are_bytes_read_through_forks_and_copies(page_size):
    cache = make(400 if page_size == 1 else 64, page_size)
    parent = start(cache, 37)
    (wrote,) = step(cache, [parent])
    same(read(cache, parent), wrote)
    child = cache.fork(parent)
    assert cache.append_all([parent, child], [[1], [2]]) is None
    for sequence, new in zip((parent, child), step(cache, [parent, child]), strict=True):
        same(read(cache, sequence), [torch.cat(x, 1) for x in zip(wrote, new, strict=True)])
    again = start(cache, 37)
    assert again.hit_tokens == 36
    same([t[:, :36] for t in read(cache, again)], [t[:, :36] for t in wrote])
    cache.check()


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_quantised_pages_are_written_copied_and_swapped_with_their_scales(kv_dtype):
    """Bit for bit as on the CPU."""
    spec = Spec(3, KV_HEADS, DIM, device="cuda").stored_as(kv_dtype)
    cache = KVCache(spec, 64)
    tier = HostTier(cache, 32)
    parent = start(cache, 37)
    (wrote,) = step(cache, [parent])
    child = cache.fork(parent)
    assert cache.append(child, [2]) is None
    (new,) = step(cache, [child])
    wrote = [torch.cat(x, 1) for x in zip(wrote, new, strict=True)]
    group = tier.swap_out([parent, child])
    tier.synchronize()
    for t in cache.pages.tensors:
        t.zero_()
    assert tier.swap_in(group) is None
    pages = torch.tensor(cache.resident(child).pages, device="cuda")
    held = cache.pages
    for stored, scales, x in zip(
        (held.k, held.v), (held.k_scales, held.v_scales), wrote, strict=True
    ):
        want, want_scales = quantise(x, spec.kv_dtype)
        got = stored[:, pages].flatten(1, 2)[:, : child.length]
        assert torch.equal(got.float(), want.float())
        got = scales[:, pages].transpose(2, 3).flatten(1, 2)[:, : child.length]
        assert torch.equal(got, want_scales)


def test_padding_writes_nothing():
    cache = make()
    sequence = start(cache, 3)
    (wrote,) = step(cache, [sequence])
    slots = torch.full((5,), -1, dtype=torch.int32, device="cuda")
    cache.write(0, *torch.ones(2, 5, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda"), slots)
    same(read(cache, sequence), wrote)
    assert cache.pages.k[:, 2:].isnan().all()


def test_slots_are_checked_when_checks_are_on():
    cache = make()
    start(cache, 3)
    slots = torch.full((1,), 999_999, dtype=torch.int32, device="cuda")
    k = torch.ones(1, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    with onchip.checks(True), pytest.raises(ValueError, match="points to page"):
        cache.write(0, k, k, slots)


def test_a_graph_is_replayed_over_a_static_batch():
    """Two steps of different sequences and lengths through one captured graph."""
    cache = make()
    sequences = [start(cache, n, first) for n, first in ((37, 0), (5, 100), (64, 200))]
    step(cache, sequences)
    static = cache.static_batch(BatchShape(num_seqs=4, num_tokens=4, max_pages=8, max_seqlen_q=1))
    q, k, v = (
        torch.randn(4, heads, DIM, dtype=torch.bfloat16, device="cuda")
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )

    def layer():
        cache.write(0, k, v, static.slot_mapping)
        return onchip.paged_attention(
            q,
            *cache.layer(0),
            static.page_table,
            static.cache_seqlens,
            cu_seqlens_q=static.cu_seqlens_q,
            max_seqlen_q=1,
        )

    def prepare(chosen):
        assert cache.append_all(chosen, [[7]] * len(chosen)) is None
        cache.view(chosen, out=static)

    prepare(sequences)
    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for chosen in (sequences, sequences[:1], sequences[1:]):
        for sequence in sequences:
            cache.truncate(sequence, sequence.computed)
        prepare(chosen)
        graph.replay()
        for row, sequence in enumerate(chosen):
            rows = slice(row, row + 1)
            keys, values = (t[0][None] for t in read(cache, sequence))
            onchip.testing.assert_accurate(out[None, rows].clone(), q[None, rows], keys, values)


def test_a_group_is_swapped_in_while_the_device_computes():
    cache = make(num_pages=40)
    tier = HostTier(cache, 30, chunk_pages=4)
    a = start(cache, 150)
    step(cache, [a])
    b = cache.fork(a)
    assert cache.append_all([a, b], [[1], [2]]) is None
    step(cache, [a, b])
    cache.prefix.clear()
    expected = [[t.clone() for t in read(cache, s)] for s in (a, b)]
    # The first copy loads CUDA modules and allocates pinned memory, which waits for the device.
    warm = tier.swap_out([a, b])
    tier.synchronize()
    assert tier.swap_in(warm) is None
    tier.synchronize()
    busy(20)
    group = tier.swap_out([a, b])
    assert group.status is SwapStatus.SWAPPING_OUT, (
        "the copy waits for queued work, the host does not"
    )
    tier.synchronize()
    assert group.status is SwapStatus.SWAPPED_OUT and cache.pool.num_free == cache.pool.capacity
    cache.pages.k.fill_(float("nan"))
    cache.pages.v.fill_(float("nan"))
    busy(20)
    assert tier.swap_in(group) is None
    for sequence, data in zip((a, b), expected, strict=True):
        cache.resident(sequence)
        same(read(cache, sequence), data)
    tier.synchronize()
    assert tier.num_free == tier.capacity
    cache.check()


def busy(milliseconds):
    """Work on the current stream, about 1 ms per iteration."""
    x = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    for _ in range(milliseconds * 4):
        x @ x
