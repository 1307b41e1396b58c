"""A public method raises before it changes anything, or leaves the cache consistent: seeded random
calls, with valid and invalid arguments.
"""

import inspect
import random

import pytest
import torch

from onchip.kvcache import (
    HostTier,
    KVCache,
    NoRoom,
    PageTable,
    Pool,
    PrefixIndex,
    Sequence,
    SequenceGroup,
    Spec,
)
from onchip.kvcache.prefix import Chain

JUNK = [None, True, 1.5, float("nan"), -1, 2**70, "x", "12", b"12345678", object(), [None], ["x"]]
JUNK += [[1.5], [2**70], [[1]], {}, torch.tensor([0.5]), torch.tensor(3)]
REFUSED = ValueError, TypeError, AttributeError, IndexError


def public(kind):
    """The methods of a class by name: a new method is included without a change here."""
    members = inspect.getmembers(kind, inspect.isfunction)
    return {name: f for name, f in members if not name.startswith("_")}


def parameters(method):
    return [p.name for p in list(inspect.signature(method).parameters.values())[1:]]


def pool_state(pool):
    arrays = (pool._refs, pool._filled, pool._blank, pool._next, pool._prev)
    tables = {t: (t.length, t.pages, t._swapped_out) for t in pool.tables}
    return [list(a) for a in arrays], tables, pool._on_evict


class Rig:
    """A cache with sequences in every state, and a snapshot of that state."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.cache, self.strange = (self._cache() for _ in range(2))
        self.tier = HostTier(self.cache, 12, chunk_pages=2)
        self.sequences, self.groups = [], []
        self.gone = self.cache.open()
        self.cache.free(self.gone)
        self.foreign = self.strange.open()

    def _cache(self):
        spec = Spec(1, 1, 2, page_size=4, dtype=torch.float32)
        return KVCache(spec, 24, max_seqs=8, offload_pages=40)

    def state(self):
        index, cache = self.cache.prefix, self.cache
        handles = [
            (s.tokens.copy(), s.computed, s.row, s.length, s.chain.keys.copy(), s.host_tokens)
            for s in (*self.sequences, self.gone, self.foreign)
        ]
        entries = (
            dict(index._entries),
            {k: list(m) for k, m in index._followers.items()},
            index._epoch,
        )
        host = list(self.tier._free_chunks), {f: f.status for f in self.tier.groups}
        host += ([(r.first, r.capacity, r.num_pages) for r in cache.offloaded._ranges],)
        return pool_state(cache.pool), entries, handles, list(cache.host_table.free_rows), host

    def value(self, name):
        """An argument that is valid more often than not."""
        chance, some = self.chance, [*self.sequences, self.gone, self.foreign]
        ids = lambda: [chance.randrange(3) for _ in range(chance.randrange(7))]
        few = lambda make: [make() for _ in range(self.count)]
        if chance.random() < 0.2:
            return chance.choice(JUNK)
        makes = {
            "sequence": lambda: chance.choice(some),
            "sequences": lambda: few(lambda: chance.choice(some)),
            "num_tokens": lambda: chance.randrange(-1, 7),
            "num_pages": lambda: chance.randrange(-1, 3),
            "offload_pages": lambda: chance.choice([0, 0, 0, 5, 41]),
            "length": lambda: chance.randrange(-1, 6),
            "counts": lambda: few(lambda: chance.randrange(-1, 7)),
            "lengths": lambda: few(lambda: chance.randrange(0, 6)),
            "group": lambda: chance.choice([*self.groups, None]),
            "tokens": lambda: few(ids) if self.name == "append_all" else ids(),
            "salt": lambda: chance.choice(["", "a"]),
            "layer": lambda: 0,
            **dict.fromkeys(("out", "extra"), lambda: None),
        }
        return makes.get(name, lambda: chance.choice(JUNK))()

    def step(self):
        owner = self.chance.choice([self.cache, self.cache, self.cache, self.tier])
        # The second line belongs to the host tier.
        skip = {"reset", "release_memory", "take_memory"}
        skip |= {"assign_row", "release_row", "release_host_range"}
        self.name = name = self.chance.choice(sorted(set(public(type(owner))) - skip))
        self.count = self.chance.randrange(3)  # the length of every list argument
        args = {n: self.value(n) for n in parameters(getattr(type(owner), name))}
        self.tier.poll()  # every method of the tier does so first
        before = self.state()
        try:
            result = getattr(owner, name)(**args)
        except REFUSED:
            assert self.state() == before, (name, args)
            return name, False
        if isinstance(result, Sequence):
            self.sequences.append(result)
        elif isinstance(result, SequenceGroup):
            self.groups.append(result)
        elif isinstance(result, NoRoom):
            assert self.state() == before, (name, args)
        self.sequences = [s for s in self.sequences if s.table in self.cache.pool.tables]
        self.cache.check()
        return name, True

    def end(self):
        """Every sequence can be freed, and then every page and row is free."""
        for group in list(self.tier.groups):
            self.tier.discard(group)
        for sequence in self.sequences:
            if sequence.row is not None:
                self.cache.free(sequence)
        self.cache.check()
        pool = self.cache.pool
        assert not pool.tables and pool.num_free == pool.capacity
        assert len(self.cache.host_table.free_rows) == self.cache.max_seqs
        assert not self.cache.offloaded.num_reserved


def test_a_cache_survives_invalid_arguments():
    served, refused = set(), set()
    for seed in range(20):
        rig = Rig(seed)
        for _ in range(150):
            name, good = rig.step()
            (served if good else refused).add(name)
        rig.end()
    wanted = {
        "open",
        "append",
        "append_all",
        "reserve",
        "append_tokens",
        "fork",
        "truncate",
        "commit",
    }
    wanted |= {"commit_all", "free", "view", "reserve_all", "reserve_each", "swap_out", "offload"}
    assert wanted <= served and wanted <= refused


def pool_value(chance, pool, name, tables):
    few = lambda make: [make() for _ in range(chance.randrange(3))]
    page = lambda: chance.choice([1, 1, 2, chance.randrange(-2, pool.num_pages + 1)])
    if chance.random() < 0.25:
        return chance.choice(JUNK)
    makes = {
        "table": lambda: chance.choice(tables),
        "tables": lambda: few(lambda: chance.choice(tables)),
        "pages": lambda: few(page),
        **dict.fromkeys(("page", "source"), page),
        "on_evict": lambda: lambda page: None,
    }
    if name == "num_tokens":
        return chance.choice([lambda: chance.randrange(-1, 5), lambda: [1, 2]])()
    most = pool.page_size + 1 if name == "filled" else 9
    return makes.get(name, lambda: chance.randrange(-1, most))()


def test_a_pool_survives_invalid_arguments():
    served, refused = set(), set()
    for seed in range(40):
        chance, pool, strange = random.Random(seed), Pool(10, 4), Pool(10, 4)
        freed = pool.alloc(3)
        pool.free(freed)
        tables = [freed, strange.alloc(3), pool.alloc(4)]
        pool.mark_cached(tables[-1][0], 4)
        for _ in range(150):
            name, method = chance.choice(sorted(public(Pool).items()))
            args = {n: pool_value(chance, pool, n, tables) for n in parameters(method)}
            before = pool_state(pool), pool_state(strange)
            try:
                result = method(pool, **args)
            except REFUSED:
                assert (pool_state(pool), pool_state(strange)) == before, (name, args)
                refused.add(name)
                continue
            served.add(name)
            tables += [result] if isinstance(result, PageTable) else []
            assert not isinstance(result, NoRoom) or pool_state(pool) == before[0]
            pool.check()
        for table in pool.tables:
            pool.free(table)
        pool.check()
        assert pool.num_free == pool.capacity
    assert served == set(public(Pool)) and refused >= set(public(Pool)) - {"check", "holds"}


@pytest.mark.parametrize(
    "ids, match",
    [
        (["x"], "token ids must be integers"),
        ([1.5], "token ids must be integers"),
        ([2**70], "token ids must be integers"),
        ("12", "token ids must be integers"),
        ([None, 3], "token ids must be integers"),
        ([1, 2, 3], "3 ids for 2 reserved"),
    ],
)
def test_invalid_token_ids_are_refused_when_they_are_appended(ids, match):
    """Accepted ids reach `free`, which publishes them and then failed every time."""
    cache = Rig(0).cache
    sequence = cache.open()
    cache.reserve(sequence, 2)
    with pytest.raises(ValueError, match=match):
        cache.append_tokens(sequence, ids)
    assert sequence.tokens == []
    cache.append_tokens(sequence, torch.tensor([4]))
    cache.append_tokens(sequence, b"\x05")
    cache.commit(sequence)
    cache.free(sequence)
    assert sorted(cache.prefix._entries.values())[0].ids[0] == 4
    with pytest.raises(ValueError, match="freed already"):
        cache.append_tokens(sequence, [1])


def test_handles_from_before_a_reset_are_foreign():
    cache = Rig(0).cache
    sequence = cache.open()
    cache.append(sequence, [1, 2, 3, 4, 5])
    cache.commit(sequence)
    cache.reset()
    for call in (cache.free, cache.commit, cache.fork, lambda s: cache.view([s])):
        with pytest.raises(ValueError, match="freed already"):
            call(sequence)
    cache.check()
    assert len(cache.host_table.free_rows) == cache.max_seqs


def test_prefixes_of_other_tables_are_not_published():
    pool, other = Pool(8, 4), Pool(8, 4)
    index, chain = PrefixIndex(pool), Chain(b"root")
    table = pool.alloc(6)
    for wrong, ids, length in (
        (other.alloc(6), range(6), 6),
        (table, range(6), 7),
        (table, [1], 4),
    ):
        with pytest.raises(ValueError, match="cannot publish"):
            index.publish(wrong, list(ids), length, chain)
    index.check()
    assert isinstance(table, PageTable) and not len(index)
