"""The pool: every page is null, free or held; forks share pages; a written page has one holder."""

import pytest

from onchip.kvcache import NoRoom, Pool


def state(pool):
    arrays = (pool._refs, pool._filled, pool._blank, pool._next, pool._prev)
    return [list(a) for a in arrays], {t: (t.length, t.pages) for t in pool.tables}


def refused(pool, match, call, *args):
    """The call raises one clear error and changes nothing."""
    before = state(pool)
    with pytest.raises(ValueError, match=match):
        call(*args)
    assert state(pool) == before
    pool.check()


def test_pages_are_taken_in_order_and_never_the_null_page():
    pool = Pool(8, 4)
    table = pool.alloc(5)
    assert table.pages == (1, 2) and table.length == 5 and len(table) == 2
    assert pool.extend(table, 3) == [] and table.pages == (1, 2)
    assert pool.extend(table, 1) == [] and table.pages == (1, 2, 3)
    assert pool.alloc(0).pages == () and pool.num_free == 4 and pool.capacity == 7
    pool.check()


def test_the_page_freed_last_is_taken_first():
    pool = Pool(8, 4)
    a, b = pool.alloc(8), pool.alloc(8)
    pool.free(a)
    pool.free(b)
    assert pool.alloc(16).pages == (3, 4, 1, 2)


def test_a_write_copies_a_shared_page_except_for_the_last_holder():
    pool = Pool(8, 4)
    parent = pool.alloc(6)
    child = pool.fork(parent)
    assert child.pages == parent.pages and pool.refs(1) == pool.refs(2) == 2
    assert pool.extend(child, 1) == [(2, 3)]
    assert child.pages == (1, 3) and parent.pages == (1, 2)
    assert pool.extend(parent, 1) == []
    assert pool.extend(child, 1) == []
    assert (pool.refs(1), pool.refs(2), pool.refs(3)) == (2, 1, 1)
    pool.check()


def test_a_full_last_page_is_not_copied():
    pool = Pool(8, 4)
    parent = pool.alloc(4)
    child = pool.fork(parent)
    assert pool.extend(child, 1) == [] and child.pages == (1, 2)


def test_extending_by_no_token_copies_nothing():
    pool = Pool(8, 4)
    child = pool.fork(pool.alloc(3))
    assert pool.extend(child, 0) == [] and child.pages == (1,)


def test_write_copies_each_shared_page_it_touches():
    pool = Pool(12, 4)
    parent = pool.alloc(14)
    child = pool.fork(parent)
    assert pool.write(child, 5, 5) == []
    assert pool.write(child, 7, 9) == [(2, 5), (3, 6)]
    assert child.pages == (1, 5, 6, 4)
    assert pool.write(child, 4, 12) == []
    pool.check()


def test_truncate_releases_pages_and_keeps_a_partial_page():
    pool = Pool(8, 4)
    table = pool.alloc(13)
    pool.truncate(table, 5)
    assert table.pages == (1, 2) and pool.num_free == 5
    pool.truncate(table, 0)
    assert table.pages == () and pool.num_free == 7
    pool.check()


def test_a_rolled_back_fork_does_not_change_its_parent():
    """Speculation: the draft's pages are released, and the shared page has one writer."""
    pool = Pool(12, 4)
    table = pool.alloc(6)
    draft = pool.fork(table)
    assert pool.extend(draft, 7) == [(2, 3)]
    pool.truncate(draft, 6)
    assert pool.extend(table, 1) == [] and pool.extend(draft, 1) == []
    pool.free(draft)
    assert table.pages == (1, 2) and pool.num_free == 9
    pool.check()


def test_exhaustion_returns_no_room():
    """nano-vllm #274: decoding into a full pool stopped at an assert."""
    pool = Pool(6, 4)
    table, other = pool.alloc(8), pool.alloc(8)
    before = state(pool)
    assert pool.extend(table, 5) == NoRoom(needed=2, free=1)
    assert pool.alloc(8) == NoRoom(needed=2, free=1)
    assert state(pool) == before
    pool.free(other)
    assert pool.extend(table, 5) == [] and table.length == 13


def test_a_copy_on_write_needs_a_free_page():
    pool = Pool(3, 4)
    parent = pool.alloc(5)
    child = pool.fork(parent)
    before = state(pool)
    assert pool.extend(child, 1) == NoRoom(1, 0)
    assert pool.write(child, 0, 5) == NoRoom(2, 0)
    assert state(pool) == before
    pool.free(parent)
    assert pool.extend(child, 1) == [], "the last holder writes in place"


def test_many_tables_extend_together_or_not_at_all():
    """transformers' fork_blocks incremented references, then stopped half way."""
    pool = Pool(7, 4)
    a = pool.alloc(6)
    b, c = pool.fork(a), pool.fork(a)
    before = state(pool)
    assert pool.extend_all([a, b, c], [3, 3, 3]) == NoRoom(5, 4)
    assert state(pool) == before
    copies = pool.extend_all([a, b, c], [1, 1, 1])
    assert copies == [(2, 3), (2, 4)] and c.pages == (1, 2)
    pool.check()


def test_extend_each_equals_extend():
    """A table within a page, at a page end, with a shared page, with a cached page: `extend_each`
    gives the same as one `extend` after the other.
    """
    pools = []
    for _ in range(2):
        pool = Pool(12, 4)
        within, at_end, shared, cached = (pool.alloc(n) for n in (5, 8, 6, 3))
        fork = pool.fork(shared)
        pool.truncate(cached, 2)
        pool.mark_cached(cached[0], 3)
        pools.append((pool, [within, at_end, shared, fork, cached]))
    (one, tables), (other, others) = pools
    moved, copies = one.extend_each(tables)
    expected = [copy for table in others for copy in other.extend(table, 1)]
    assert copies == expected and len(copies) == 1 and set(moved) >= {1, 2}
    assert [t.length for t in tables] == [t.length for t in others] == [6, 9, 7, 7, 3]
    assert [len(t) for t in tables] == [len(t) for t in others] and one.num_free == other.num_free
    one.check()


def test_extend_each_is_all_or_none():
    pool = Pool(4, 4)
    within, full, also = pool.alloc(2), pool.alloc(4), pool.alloc(4)
    before = state(pool)
    assert pool.extend_each([within, full]) == NoRoom(1, 0) and state(pool) == before
    refused(pool, "no table may occur twice", pool.extend_each, [within, within])
    pool.free(also)
    refused(pool, "freed already", pool.extend_each, [within, also])
    assert pool.extend_each([within, full]) == ([1], []) and pool.num_free == 0
    assert pool.extend_each([]) == ([], [])
    pool.check()


def test_num_shared_counts_the_pages_saved():
    pool = Pool(12, 4)
    a = pool.alloc(10)
    assert pool.num_shared == 0
    forks = [pool.fork(a), pool.fork(a)]
    assert pool.num_shared == 6
    pool.extend(forks[0], 1)
    assert pool.num_shared == 5
    pool.swap_out([forks[0]], [forks[0][2]])
    assert pool.num_shared == 5, "swapped-out pages do not count as shared"
    for table in (a, *forks):
        pool.free(table)
    assert pool.num_shared == 0


def test_misuse_is_refused_and_changes_nothing():
    pool, other = Pool(6, 4), Pool(6, 4)
    table, foreign = pool.alloc(6), other.alloc(4)
    freed = pool.alloc(2)
    pool.free(freed)
    refused(pool, "freed already", pool.free, freed)
    refused(pool, "freed already", pool.extend, freed, 1)
    refused(pool, "another pool", pool.fork, foreign)
    refused(pool, "another pool", pool.free, foreign)
    refused(pool, r"write \[4, 7\) of a table of 6", pool.write, table, 4, 7)
    refused(pool, "between 0 and the table's 6", pool.truncate, table, 7)
    refused(pool, "cannot be -1", pool.extend, table, -1)
    refused(pool, "cannot be -1", pool.alloc, -1)
    refused(pool, "no table twice", pool.extend_all, [table, table], [1, 1])
    refused(pool, "page 0 is not one", pool.adopt, [0])
    refused(pool, "page 6 is not one", pool.adopt, [6])
    refused(pool, "page 5 is free and holds no prefix", pool.adopt, [1, 5])
    refused(pool, "no page may occur twice", pool.adopt, [1, 1])
    refused(pool, "page 5 is free", pool.mark_cached, 5, 4)
    refused(pool, "cannot copy", pool.copy_partial_page, table, 1, 2)


def test_a_sequence_longer_than_the_pool_is_refused_not_postponed():
    """vllm #39734: a request larger than the cache waited for ever."""
    pool = Pool(4, 4)
    table = pool.alloc(4)
    refused(pool, "13 tokens need 4 pages, the pool has only 3", pool.alloc, 13)
    refused(pool, "13 tokens need 4 pages", pool.extend, table, 9)
    refused(pool, "13 tokens need 4 pages", pool.extend_all, [table], [9])


@pytest.mark.parametrize("sizes, match", [((1, 4), "at least 2"), ((4, 0), "at least 1")])
def test_sizes_are_checked(sizes, match):
    with pytest.raises(ValueError, match=match):
        Pool(*sizes)


def test_a_double_free_is_refused():
    """sglang-jax #982: a request that finished while it was retracted freed its pages twice."""
    pool = Pool(6, 4)
    parent = pool.alloc(8)
    child = pool.fork(parent)
    pool.free(child)
    refused(pool, "freed already", pool.free, child)
    assert pool.refs(1) == 1 and pool.num_free == 3


class TestCachedPages:
    """Free pages with a prefix are listed oldest first and can be removed anywhere in the list."""

    def pool(self):
        pool, forgotten = Pool(6, 4), []
        pool.watch(forgotten.append)
        table = pool.alloc(12)
        for page in table.pages:
            pool.mark_cached(page, 4)
        pool.free(table)
        return pool, forgotten

    def test_blank_pages_are_taken_first_then_the_tail_of_the_oldest(self):
        pool, forgotten = self.pool()
        assert pool.num_free == 5 and pool.num_cached == 3
        assert pool.alloc(8).pages == (4, 5) and forgotten == []
        assert pool.alloc(8).pages == (3, 2) and forgotten == [3, 2]
        pool.check()

    def test_a_page_is_removed_from_the_middle(self):
        pool, _ = self.pool()
        table = pool.adopt([2])
        assert pool.num_cached == 2 and pool._walk_cached_list() == [3, 1]
        pool.free(table)
        assert pool._walk_cached_list() == [3, 1, 2]
        pool.mark_cached(1, 0)
        assert pool._walk_cached_list() == [3, 2] and pool.alloc(4).pages == (1,)
        pool.check()

    def test_free_pages_are_counted_once(self):
        """sglang #35270: pages counted as evictable twice stopped an idle server."""
        pool, _ = self.pool()
        a = pool.adopt([1, 2])
        b = pool.fork(a)
        assert pool.num_free == 3
        pool.free(a)
        assert pool.num_free == 3
        pool.free(b)
        assert pool.num_free == 5
        pool.check()

    def test_a_partial_page_is_never_copied_onto_itself(self):
        """The only free page is the source: it must not become the destination."""
        pool = Pool(4, 4)
        source = pool.alloc(4)
        pool.mark_cached(1, 4)
        pool.free(source)
        others = pool.alloc(8)
        table = pool.alloc(0)
        before = state(pool)
        assert pool.copy_partial_page(table, 1, 3) == NoRoom(1, 0)
        assert state(pool) == before
        pool.free(others)
        assert pool.copy_partial_page(table, 1, 3) == [(1, 2)] and table.length == 3
        pool.check()

    def test_overwriting_evicts_only_prefixes_that_cover_the_slot(self):
        """nano-vllm #163, vllm #4764: a page was found by the hash of its earlier contents."""
        pool = Pool(6, 4)
        forgotten = []
        pool.watch(forgotten.append)
        table = pool.alloc(3)
        pool.mark_cached(1, 3)
        pool.extend(table, 1)
        assert forgotten == [], "slot 3 was not part of the prefix"
        pool.truncate(table, 2)
        assert forgotten == [], "nothing is written yet"
        pool.extend(table, 1)
        assert forgotten == [1] and pool.filled(1) == 0

    def test_copy_on_write_keeps_the_source_page_published(self):
        pool = Pool(6, 4)
        table = pool.alloc(4)
        pool.mark_cached(1, 4)
        child = pool.fork(table)
        pool.truncate(child, 2)
        assert pool.extend(child, 1) == [(1, 2)]
        assert pool.filled(1) == 4 and pool.filled(2) == 0


class TestSwappedOut:
    """Tables with pages on the host."""

    def test_shared_pages_are_copied_once_and_shared_again(self):
        pool = Pool(10, 4)
        a = pool.alloc(10)
        b = pool.fork(a)
        pool.extend(b, 1)
        travellers = pool.exclusive([a, b])
        assert sorted(travellers) == [1, 2, 3, 4]
        pool.swap_out([a, b], travellers)
        assert pool.num_free == 9 and a.pages[:2] == b.pages[:2] and max(a.pages) < 0
        pool.check()
        fresh = pool.swap_in([a, b], len(travellers))
        assert len(fresh) == 4 and a.pages[:2] == b.pages[:2] and a.pages[2] != b.pages[2]
        assert pool.refs(a[0]) == 2 and pool.refs(a[2]) == 1
        pool.check()

    def test_pages_of_other_tables_stay(self):
        pool = Pool(10, 4)
        a = pool.alloc(10)
        b = pool.fork(a)
        pool.extend(b, 1)
        assert pool.exclusive([b]) == [b[2]]
        pool.swap_out([b], [b[2]])
        assert b.pages[:2] == a.pages[:2] and pool.refs(1) == 2
        pool.check()

    def test_a_swapped_out_table_can_only_be_freed(self):
        pool = Pool(5, 4)
        a = pool.alloc(10)
        pool.swap_out([a], pool.exclusive([a]))
        refused(pool, "is swapped out", pool.extend, a, 1)
        refused(pool, "is swapped out", pool.fork, a)
        blocker = pool.alloc(8)
        assert pool.swap_in([a], 3) == NoRoom(3, 2)
        pool.free(a)
        pool.free(blocker)
        assert pool.num_free == pool.capacity
        pool.check()


def test_check_detects_each_inconsistency():
    for spoil in (
        lambda pool: pool._refs.__setitem__(1, 2),
        lambda pool: pool._blank.pop(),
        lambda pool: pool._blank.append(1),
        lambda pool: pool._filled.__setitem__(4, 1),
        lambda pool: pool._prev.__setitem__(2, 3),
        lambda pool: pool._tables.clear(),
    ):
        pool = Pool(6, 4)
        pool.alloc(4)
        cached = pool.alloc(4)
        pool.mark_cached(2, 4)
        pool.free(cached)
        pool.check()
        spoil(pool)
        with pytest.raises(AssertionError):
            pool.check()
