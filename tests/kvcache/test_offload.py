"""Host memory for long sequences: ranges are disjoint, offloaded pages keep their contents, and
nothing else in the cache notices.
"""

import pytest
import torch

from onchip.core.problem import UnsupportedError
from onchip.kvcache import HostTier, KVCache, NoRoom, Spec
from onchip.kvcache.offload import OffloadMemory

SPEC = Spec(2, 1, 3, 2, 4, torch.float32)


def make(num_pages=8, offload_pages=20, **options):
    return KVCache(SPEC, num_pages, max_seqs=3, offload_pages=offload_pages, **options)


def compute(cache, sequence, tokens):
    """Append tokens whose keys and values are their ids."""
    assert cache.append(sequence, tokens) is None
    slots = cache.view([sequence]).slot_mapping
    numbers = torch.tensor(tokens, dtype=torch.float32)[:, None, None]
    for layer in range(SPEC.num_layers):
        cache.write(layer, numbers.expand(-1, 1, 3) + layer, numbers.expand(-1, 1, 2), slots)
    cache.commit(sequence)


def read(cache, sequence, layer=1):
    """The ids of all tokens, from the keys on the host and on the device."""
    host = cache.offloaded.layer(layer, sequence.host_range, sequence.host_tokens)[0][0, :, 0, 0]
    pages = torch.tensor(sequence.table.pages, dtype=torch.int64)
    own = cache.layer(layer)[0][pages].flatten(0, 1)[: sequence.table.length, 0, 0]
    return (torch.cat([host, own]) - layer).int().tolist()


def test_ranges_are_taken_first_fit_and_released():
    memory = OffloadMemory(make().pages, 10)
    first, second, third = (memory.reserve(n) for n in (3, 4, 3))
    assert [held.first for held in (first, second, third)] == [0, 3, 7]
    assert memory.reserve(1) == NoRoom(1, 0, "host pages")
    memory.release(second)
    assert memory.reserve(5) == NoRoom(5, 4, "host pages")
    assert memory.reserve(2).first == 3 and memory.reserve(2).first == 5
    memory.check()
    with pytest.raises(ValueError, match=r"num_pages=11 of host memory must lie in \[1, 10\]"):
        memory.reserve(11)
    third.capacity = 4
    with pytest.raises(AssertionError, match="overlap"):
        memory.check()


def test_a_sequence_of_several_pools_keeps_its_contents():
    cache = make()
    sequence = cache.open(offload_pages=20)
    for start in range(0, 75, 5):
        if -(-(sequence.table.length + 5) // 4) > cache.pool.capacity:
            assert cache.offload(sequence, 2) == 2
            cache.pages.k[:, [p for p in range(1, 8) if not cache.pool.refs(p)]] = float("nan")
        compute(cache, sequence, list(range(start, start + 5)))
        assert read(cache, sequence) == list(range(start + 5))
        cache.check()
    assert sequence.length == sequence.computed == 75 and sequence.host_tokens >= 48
    assert cache.num_offloaded * 4 == sequence.host_tokens
    cache.truncate(sequence, 74)
    assert cache.offload(sequence, 100) and sequence.host_tokens == 72
    assert read(cache, sequence) == list(range(74))
    with pytest.raises(ValueError, match="would drop some of 72 tokens in host memory"):
        cache.truncate(sequence, sequence.host_tokens - 1)
    cache.free(sequence)
    assert not cache.offloaded.num_reserved and cache.pool.num_free == cache.pool.capacity


def test_only_full_pages_of_computed_tokens_move():
    cache = make()
    sequence = cache.open(offload_pages=3)
    compute(cache, sequence, list(range(6)))
    cache.append(sequence, list(range(6, 14)))
    assert cache.offload(sequence, 9) == 1 and sequence.computed == 6
    batch = cache.view([sequence])
    assert batch.cache_seqlens.tolist() == [10] and len(batch.slot_mapping) == 8
    (prefix,) = batch.host_prefixes
    assert (prefix.num_tokens, prefix.start, prefix.stop, prefix.computed) == (4, 0, 8, 6)
    cache.commit(sequence)
    assert cache.offload(sequence, 9) == 2, "its range has three pages"
    assert cache.offload(sequence, 9) == 0


def test_as_many_pages_become_free_as_are_asked_for():
    """Shared pages move only together with private pages behind them."""
    cache = make(num_pages=12)
    sequence = cache.open(offload_pages=9)
    compute(cache, sequence, list(range(10)))
    other = cache.open(list(range(9)))
    assert other.hit_tokens == 8 and cache.num_offloadable(sequence) == 0
    assert cache.offload(sequence, 2) == 0 and not sequence.host_tokens
    compute(cache, sequence, list(range(10, 18)))
    free = cache.pool.num_free
    assert cache.num_offloadable(sequence) == 2
    assert cache.offload(sequence, 1) == 1 and sequence.host_tokens == 12
    assert cache.pool.num_free == free + 1
    assert read(cache, sequence) == list(range(18)) and read_device(cache, other) == [*range(8)]


def test_a_token_more_counts_those_in_host_memory():
    cache = make(max_seqlen=30)
    sequence = cache.open(offload_pages=8)
    for start in (0, 15):
        compute(cache, sequence, list(range(start, start + 15)))
        cache.offload(sequence, 3)
    for reserve in (cache.reserve_each, lambda sequences: cache.reserve_all(sequences, [1])):
        with pytest.raises(ValueError, match="31 tokens exceed the cache's max_seqlen=30"):
            reserve([sequence])


def test_the_prefix_cache_survives_offloading():
    """Pages that were published before stay valid, also those that another sequence shares; none
    is published afterwards.
    """
    cache = make(num_pages=12)
    sequence = cache.open(offload_pages=9)
    compute(cache, sequence, list(range(18)))
    other = cache.open(list(range(9)))
    assert other.hit_tokens == 8
    cache.offload(sequence, 3)
    cache.check()
    compute(cache, sequence, list(range(18, 22)))
    third = cache.open(list(range(22)))
    assert third.hit_tokens == 18, "16 in full pages, 2 of the last page that was published"
    assert read_device(cache, third) == list(range(18)) and read_device(cache, other)[:8] == [
        *range(8)
    ]
    for held in (sequence, other, third):
        cache.free(held)
        cache.check()


def read_device(cache, sequence):
    pages = torch.tensor(sequence.table.pages, dtype=torch.int64)
    return cache.layer(0)[0][pages].flatten(0, 1)[: sequence.length, 0, 0].int().tolist()


@pytest.mark.parametrize("returns", [True, False])
def test_a_swapped_sequence_keeps_its_range(returns):
    cache = make()
    tier = HostTier(cache, 8, chunk_pages=1)
    sequence = cache.open(offload_pages=9)
    compute(cache, sequence, list(range(21)))
    cache.offload(sequence, 3)
    group = tier.swap_out([sequence])
    assert cache.pool.num_free == cache.pool.capacity and cache.num_offloaded == 3
    if returns:
        assert tier.swap_in(group) is None
        assert read(cache, sequence) == list(range(21))
        cache.free(sequence)
    else:
        tier.discard(group)
    assert not cache.offloaded.num_reserved and not cache.pool.tables


def test_what_is_not_served_is_refused(monkeypatch):
    cache = make()
    plain, long = cache.open(), cache.open(offload_pages=9)
    with pytest.raises(ValueError, match="opened without offload_pages"):
        cache.offload(plain, 1)
    with pytest.raises(ValueError, match="cannot be forked"):
        cache.fork(long)
    compute(cache, long, list(range(9)))
    cache.offload(long, 1)
    cache.reserve(long, 1)
    with pytest.raises(ValueError, match="a static batch takes no sequence with pages in host"):
        cache.view([long], out=cache.static_batch(cache.view([long]).shape))
    with pytest.raises(ValueError, match="the cache has no offload_pages"):
        KVCache(SPEC, 8).open(offload_pages=1)
    with pytest.raises(UnsupportedError, match="int8 cannot be offloaded"):
        KVCache(SPEC.stored_as("int8"), 8, offload_pages=4)

    def exhausted(*_, **__):
        raise RuntimeError("not enough memory: you tried to allocate\nmore")

    monkeypatch.setattr(torch, "empty", exhausted)
    with pytest.raises(ValueError, match="640 bytes of host memory .* cannot be alloc.*not enough"):
        OffloadMemory(cache.pages, 4)
