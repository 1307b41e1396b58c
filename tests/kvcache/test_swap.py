"""The host tier: a swapped group returns unchanged; pages are free when their copy is done."""

import pytest
import torch

from onchip.kvcache import HostTier, KVCache, NoRoom, Spec
from onchip.kvcache.swap import SwapStatus


def make(num_pages=20, host_pages=12, chunk_pages=3, late=None, spec=None, waits=False):
    cache = KVCache(spec or Spec(2, 1, 3, 2, 4, torch.float32), num_pages, max_seqs=6)
    tier = HostTier(cache, host_pages, chunk_pages=chunk_pages, waits=waits)
    if late:
        late(tier)
    return cache, tier


def start(cache, tokens):
    """A sequence with random keys and values."""
    sequence = cache.open(tokens)
    cache.append(sequence, tokens[sequence.length :])
    write(cache, sequence)
    return sequence


def write(cache, sequence):
    spec, slots = cache.spec, cache.view([sequence]).slot_mapping
    for layer in range(spec.num_layers):
        k, v = (
            torch.randn(len(slots), spec.num_kv_heads, dim, dtype=spec.dtype)
            for dim in (spec.head_dim, spec.head_dim_v)
        )
        cache.write(layer, k, v, slots)
    cache.commit(sequence)


def read(cache, sequence):
    """Keys, values and scales of its tokens, as bytes."""
    pages, held = cache.view([sequence]).page_table[0].long(), cache.pages
    tensors = [held.k, held.v]
    if held.k_scales is not None:
        tensors += [t.transpose(2, 3)[..., None] for t in (held.k_scales, held.v_scales)]
    rows = [t[:, pages].flatten(1, 2)[:, : sequence.length] for t in tensors]
    return [t.contiguous().view(torch.uint8) for t in rows]


def spoil(cache):
    """Take every free page for another sequence and write to it."""
    free = [p for p in range(1, cache.pool.num_pages) if not cache.pool.refs(p)]
    for t in cache.pages.tensors:
        t[:, free] = torch.full(t[:, free].shape, 77.0).to(t.dtype)


@pytest.mark.parametrize("page_size, dim, dtype", [(1, 1, torch.bfloat16), (4, 3, torch.float32)])
@pytest.mark.parametrize("kv_dtype", [None, "fp8", "int8"])
def test_swapped_sequences_return_unchanged(page_size, dim, dtype, kv_dtype):
    """Rows of 2 bytes and of 8 n bytes take different code paths."""
    cache, tier = make(spec=Spec(2, 1, dim, 1, page_size, dtype).stored_as(kv_dtype))
    sequence = start(cache, list(range(10)))
    cache.prefix.clear()
    before = [t.clone() for t in read(cache, sequence)]
    used = len(sequence.table)
    group = tier.swap_out([sequence])
    assert group.status is SwapStatus.SWAPPED_OUT and cache.pool.num_free == cache.pool.capacity
    assert tier.num_free == 12 - -(-used // 3) * 3
    spoil(cache)
    blocker = cache.open()
    cache.reserve(blocker, 4)
    assert tier.swap_in(group) is None
    torch.testing.assert_close(read(cache, sequence), before, rtol=0, atol=0)
    assert group.status is SwapStatus.RESIDENT and sequence.computed == 10
    tier.poll()
    assert tier.num_free == tier.capacity
    cache.check()


def test_a_swapped_group_of_forks_shares_again():
    """vllm #4422: parallel samples that were preempted together."""
    cache, tier = make()
    a = start(cache, list(range(10)))
    b = cache.fork(a)
    cache.append_all([a, b], [[1], [2]])
    write(cache, a)
    write(cache, b)
    expected = [[t.clone() for t in read(cache, s)] for s in (a, b)]
    group = tier.swap_out([a, b])
    assert len(group.pages) == 4 and cache.pool.num_free == cache.pool.capacity
    spoil(cache)
    assert tier.swap_in(group) is None
    assert a.table.pages[:2] == b.table.pages[:2] and a.table[2] != b.table[2]
    assert cache.pool.refs(a.table[0]) == 2
    for sequence, data in zip((a, b), expected, strict=True):
        torch.testing.assert_close(read(cache, sequence), data, rtol=0, atol=0)
    cache.check()


def test_pages_with_other_holders_stay_on_the_device():
    cache, tier = make()
    a = start(cache, list(range(10)))
    b = cache.fork(a)
    cache.append(b, [1])
    write(cache, b)
    expected = [t.clone() for t in read(cache, b)]
    free = cache.pool.num_free
    group = tier.swap_out([b])
    assert len(group.pages) == 1 and cache.pool.num_free == free + 1
    cache.free(a)
    assert cache.pool.refs(b.table[0]) == 1, "still held by the swapped-out sequence"
    spoil(cache)
    assert tier.swap_in(group) is None
    torch.testing.assert_close(read(cache, b), expected, rtol=0, atol=0)
    cache.check()


def test_a_sequence_that_shares_all_its_pages_copies_none():
    cache, tier = make()
    a = start(cache, list(range(8)))
    b = cache.fork(a)
    group = tier.swap_out([b])
    assert group.pages == [] and tier.num_free == tier.capacity
    assert tier.swap_in(group) is None and b.table.pages == a.table.pages
    cache.check()


def test_device_pages_are_free_when_the_copy_is_done_not_before(late):
    cache, tier = make(late=late)
    sequence = start(cache, list(range(10)))
    expected = [t.clone() for t in read(cache, sequence)]
    free = cache.pool.num_free
    group = tier.swap_out([sequence])
    tier.poll()
    assert group.status is SwapStatus.SWAPPING_OUT and cache.pool.num_free == free
    tier.synchronize()
    assert group.status is SwapStatus.SWAPPED_OUT and cache.pool.num_free == free + 3
    spoil(cache)
    assert tier.swap_in(group) is None
    assert tier.num_free == tier.capacity - 3, "the chunk is read until the copy is done"
    torch.testing.assert_close(read(cache, sequence), expected, rtol=0, atol=0)
    tier.poll()
    assert tier.num_free == tier.capacity


def test_a_tier_that_waits_frees_pages_at_once(late):
    """Several ranks decide by free pages, which must not depend on the time of a copy."""
    cache, tier = make(late=late, waits=True)
    before, free = cache.pool.num_free, tier.num_free
    group = tier.swap_out([start(cache, list(range(10)))])
    assert group.status is SwapStatus.SWAPPED_OUT and cache.pool.num_free == before
    assert tier.swap_in(group) is None
    tier.poll()
    assert tier.num_free == free


def test_swap_in_before_the_copy_out_is_done(late):
    cache, tier = make(late=late)
    sequence = start(cache, list(range(10)))
    pages, expected = sequence.table.pages, [t.clone() for t in read(cache, sequence)]
    group = tier.swap_out([sequence])
    assert tier.swap_in(group) is None and sequence.table.pages == pages
    torch.testing.assert_close(read(cache, sequence), expected, rtol=0, atol=0)
    assert tier.num_free == tier.capacity - 3
    tier.synchronize()
    assert tier.num_free == tier.capacity
    cache.check()


@pytest.mark.parametrize("when", ["leaving", "away", "arriving"])
def test_a_group_discarded_during_a_copy_leaks_nothing(when, late):
    """vllm #46283: a request aborted while its pages were being loaded kept them."""
    cache, tier = make(late=late)
    group = tier.swap_out([start(cache, list(range(10)))])
    if when != "leaving":
        tier.synchronize()
    if when == "arriving":
        assert tier.swap_in(group) is None
        cache.free(group.sequences[0])
    else:
        tier.discard(group)
    tier.synchronize()
    cache.check()
    assert cache.pool.num_free == cache.pool.capacity and tier.num_free == tier.capacity
    assert not cache.pool.tables and not tier.groups


def test_a_full_host_tier_returns_no_room():
    cache, tier = make(host_pages=6)
    a, b, c = (start(cache, list(range(at, at + 12))) for at in (0, 50, 90))
    tier.swap_out([a])
    group = tier.swap_out([b])
    assert tier.swap_out([c]) == NoRoom(3, 0, "host pages")
    assert c.row is not None and cache.pool.refs(c.table[0]) == 1
    tier.discard(group)
    assert not isinstance(tier.swap_out([c]), NoRoom)
    cache.check()


def test_swap_in_without_free_pages_changes_nothing():
    cache, tier = make(num_pages=6)
    group = tier.swap_out([start(cache, list(range(12)))])
    blocker = cache.open()
    cache.reserve(blocker, 12)
    assert tier.swap_in(group) == NoRoom(3, 2)
    assert group.status is SwapStatus.SWAPPED_OUT and group in tier.groups
    cache.free(blocker)
    assert tier.swap_in(group) is None


def test_rows_are_free_while_swapped_out():
    cache, tier = make()
    group = tier.swap_out([start(cache, [1, 2, 3])])
    others = [cache.open() for _ in range(6)]
    assert tier.swap_in(group) == NoRoom(1, 0, "sequences")
    cache.free(others[0])
    assert tier.swap_in(group) is None


def test_swapped_in_pages_are_found_after_the_next_commit():
    cache, tier = make()
    sequence = start(cache, list(range(10)))
    group = tier.swap_out([sequence])
    blocker = cache.open()
    cache.reserve(blocker, cache.pool.num_free * 4)  # takes the pages still cached on the device
    cache.free(blocker)
    tier.swap_in(group)
    assert cache.open(list(range(10))).hit_tokens == 0
    cache.append(sequence, [10])
    write(cache, sequence)
    assert cache.open(list(range(12))).hit_tokens == 11
    cache.check()


def test_misuse_is_refused():
    cache, tier = make(host_pages=3)
    sequence = start(cache, list(range(10)))
    with pytest.raises(ValueError, match="at least one, none twice"):
        tier.swap_out([])
    with pytest.raises(ValueError, match="at least one, none twice"):
        tier.swap_out([sequence, sequence])
    long = start(cache, list(range(50, 70)))
    with pytest.raises(ValueError, match="5 pages exceed the host tier's capacity 3"):
        tier.swap_out([long])
    group = tier.swap_out([sequence])
    for call in (cache.view, lambda s: cache.free(s[0]), tier.swap_out):
        with pytest.raises(ValueError, match="was swapped out"):
            call([sequence])
    tier.swap_in(group)
    with pytest.raises(ValueError, match="not in this host tier: it is on the device again"):
        tier.swap_in(group)
    with pytest.raises(ValueError, match="not in this host tier"):
        tier.discard(group)
    with pytest.raises(ValueError, match="at least 1"):
        HostTier(cache, 0)
    cache.check()


def test_chunks_are_megabytes_and_never_more_than_the_tier():
    assert HostTier(make()[0], 7).chunk_pages == 7
    cache = KVCache(Spec(4, 8, 128, page_size=16), 2)
    assert HostTier(cache, 200).chunk_pages == 16 * 2**20 // cache.spec.page_bytes == 64
    assert HostTier(cache, 200).capacity == 192
