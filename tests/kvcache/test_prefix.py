"""Prefixes are found by token ids, under their salt alone, while their pages are unchanged."""

import pytest

from onchip.kvcache import Chain, Pool, PrefixIndex

SIZE = 4


def setup(num_pages=12):
    pool = Pool(num_pages, SIZE)
    return pool, PrefixIndex(pool)


def publish(pool, index, tokens, *, salt="", final=True, free=True):
    """Publish a sequence computed from scratch; returns its pages."""
    table = pool.alloc(len(tokens))
    index.publish(table, tokens, len(tokens), Chain(index.root(salt)), final)
    pages = table.pages
    if free:
        pool.free(table)
    pool.check()
    index.check()
    return pages


def match(index, tokens, salt=""):
    return index.match(tokens, index.root(salt))


def test_full_pages_are_shared_and_a_partial_match_is_copied():
    pool, index = setup()
    pages = publish(pool, index, list(range(10)))
    hit = match(index, [*range(10), 99])
    assert hit.pages == pages[:2] and (hit.source, hit.copied, hit.tokens) == (pages[2], 2, 10)
    hit = match(index, [*range(6), 99, 98])
    assert hit.pages == pages[:1] and (hit.source, hit.copied, hit.tokens) == (pages[1], 2, 6)
    assert match(index, [5, 6, 7]).tokens == 0


@pytest.mark.parametrize("length", [1, 4, 5, 8, 11])
def test_one_token_is_always_left_to_compute(length):
    """nano-vllm #144: a prompt of full pages, all cached, left no query."""
    pool, index = setup()
    publish(pool, index, list(range(length)))
    hit = match(index, list(range(length)))
    assert hit.tokens == length - 1 and len(hit.pages) == (length - 1) // SIZE


def test_an_empty_request_finds_nothing():
    """vllm #7632: an empty prompt stopped the engine."""
    _, index = setup()
    assert match(index, []).tokens == 0


def test_the_shortest_hit_is_one_token_at_any_page_size():
    """vllm #53749: pages of 2,000 tokens had no hits, without a warning."""
    pool = Pool(4, 256)
    index = PrefixIndex(pool)
    table = pool.alloc(2)
    index.publish(table, [7, 8], 2, Chain(index.root()), True)
    assert match(index, [7, 9]).tokens == 1
    assert index.stats.requested_tokens == 2 and index.stats.copied_tokens == 1


def test_the_longest_common_start_wins():
    pool, index = setup(30)
    for third in range(5):
        publish(pool, index, [1, 2, third * 2, 7], free=False)
    assert match(index, [1, 2, 4, 7, 0]).tokens == 4
    assert match(index, [1, 2, 4, 6, 0]).tokens == 3
    assert match(index, [1, 2, 5, 7, 0]).tokens == 2
    assert match(index, [1, 9, 5, 7, 0]).tokens == 1
    assert match(index, [0, 2, 4, 7, 0]).tokens == 0


def test_same_salt_hits_and_another_misses():
    """vllm #53347: only both halves together prove anything."""
    pool, index = setup()
    publish(pool, index, list(range(9)), salt="alice")
    assert match(index, list(range(9)), "alice").tokens == 8
    assert match(index, list(range(9)), "bob").tokens == 0
    assert match(index, list(range(9))).tokens == 0


def test_salts_and_page_sizes_cannot_collide():
    """vllm #51899: keys concatenated without lengths collide."""
    roots = {PrefixIndex(Pool(4, size)).root(salt) for size in (1, 2) for salt in ("", "\0", "a")}
    assert len(roots) == 6


def test_token_ids_that_python_hashes_alike_differ():
    """CVE-2025-25183: hash(-1) == hash(-2), and 64-bit keys were trusted."""
    pool, index = setup()
    publish(pool, index, [-1] * 8)
    assert hash((-1,) * 4) == hash((-2,) * 4)
    assert match(index, [-2] * 9).tokens == 0
    assert match(index, [-1] * 9).tokens == 8


def test_a_prefix_is_not_found_before_it_is_written():
    """ROCm/ATOM #902: hashes of a chunked prefill were published before its keys and values."""
    pool, index = setup()
    tokens = list(range(12))
    table, chain = pool.alloc(12), Chain(index.root())
    assert match(index, [*tokens, 0]).tokens == 0
    index.publish(table, tokens, 5, chain)
    assert match(index, [*tokens, 0]).tokens == 5
    index.publish(table, tokens, 12, chain)
    assert match(index, [*tokens, 0]).tokens == 12
    index.check()


def test_a_hit_on_a_free_page_keeps_it():
    """ROCm/ATOM #902: taking a cached page from the free list dropped its hash."""
    pool, index = setup()
    publish(pool, index, list(range(8)))
    table = pool.adopt(match(index, list(range(9))).pages)
    assert match(index, list(range(9))).pages == table.pages
    pool.free(table)
    assert match(index, list(range(9))).tokens == 8


def test_a_page_that_was_reused_is_not_found():
    """nano-vllm #163: the hash outlived the page's contents."""
    pool, index = setup(4)
    publish(pool, index, list(range(8)))
    taken = pool.alloc(8)
    assert match(index, list(range(9))).tokens == 4, "the tail is evicted, the head is not"
    pool.free(taken)
    taken = pool.alloc(12)
    assert match(index, list(range(9))).tokens == 0 and len(index) == 0
    index.check()


def test_a_tail_enters_once_and_in_full_when_final():
    pool, index = setup()
    tokens, chain = list(range(7)), Chain(index.root())
    table = pool.alloc(7)
    index.publish(table, tokens, 5, chain)
    index.publish(table, tokens, 6, chain)
    assert match(index, [*tokens, 0]).tokens == 5, "not at every step"
    index.publish(table, tokens, 7, chain, final=True)
    assert match(index, [*tokens, 0]).tokens == 7
    index.check()


def test_a_rolled_back_tail_keeps_the_published_page():
    pool, index = setup()
    tokens, chain = list(range(8)), Chain(index.root())
    table = pool.alloc(8)
    index.publish(table, tokens, 8, chain)
    pool.truncate(table, 6)
    del chain.keys[1:]
    index.publish(table, tokens, 6, chain, final=True)
    assert match(index, [*tokens, 0]).tokens == 8


def test_eviction_takes_the_oldest_sequence_first_and_its_tail_before_its_head():
    """The order that vllm's test_evict expects of its block pool: [6, 10, 5, 4, 3, 2, 1, 9, 8, 7].
    (transformers evicts the newest first.)
    """
    pool = Pool(11, 16)
    index = PrefixIndex(pool)
    first, second = pool.alloc(5 * 16 + 7), pool.alloc(3 * 16)
    index.publish(first, list(range(80)), 80, Chain(index.root()))
    index.publish(second, list(range(100, 148)), 48, Chain(index.root()))
    pool.free(first)
    pool.free(second)
    assert pool.alloc(160).pages == (6, 10, 5, 4, 3, 2, 1, 9, 8, 7)


def test_using_a_prefix_makes_it_most_recent():
    pool, index = setup(8)
    a = publish(pool, index, list(range(8)))
    b = publish(pool, index, list(range(50, 58)))
    pool.free(pool.adopt(match(index, list(range(9))).pages))
    pool.alloc(3 * SIZE)  # takes the blank pages
    assert pool.alloc(2 * SIZE).pages == (b[1], b[0])
    assert match(index, list(range(9))).pages == a


def test_two_pages_may_hold_the_same_prefix():
    """Tables are never re-mapped, so a prefix computed twice is stored twice."""
    pool, index = setup(8)
    a = publish(pool, index, list(range(4)), free=False)
    b = publish(pool, index, list(range(4)))
    assert a != b and len(index) == 2
    pool.alloc(6 * SIZE)
    assert match(index, list(range(5))).pages == a
    index.check()


def test_clear_removes_entries_and_blanks_pages():
    pool, index = setup()
    publish(pool, index, list(range(10)))
    held = publish(pool, index, list(range(20, 30)), free=False)
    index.clear()
    assert len(index) == 0 and pool.num_cached == 0 and pool.refs(held[0]) == 1
    assert match(index, list(range(10))).tokens == 0
    pool.check()
    index.check()


def test_pages_computed_before_a_clear_are_never_found():
    """New weights: a sequence that is still alive must not share its old keys and values."""
    pool, index = setup()
    tokens, chain = list(range(8)), Chain(index.root())
    table = pool.alloc(8)
    index.publish(table, tokens, 4, chain)
    index.clear()
    index.publish(table, tokens, 8, chain, final=True)
    publish(pool, index, tokens[:4])
    assert match(index, list(range(9))).tokens == 4, "the page after it has the old weights"


@pytest.mark.parametrize("tokens", [["a", "b"], [1.5, 2], [2**63, 1], [None, 1]])
def test_tokens_are_integers(tokens):
    _, index = setup()
    with pytest.raises(ValueError, match="token ids must be integers of 64 bits"):
        match(index, tokens)
