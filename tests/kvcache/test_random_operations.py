"""Random operations against a naive model: no leak, no double free, and bytes read back are the
bytes written, with any mix of fork, rollback, cancellation, eviction and swapping.
"""

import random
from array import array
from hashlib import blake2b, sha256

import pytest
import torch

from onchip.kvcache import HostTier, KVCache, NoRoom, SequenceGroup, Spec
from tests.grids import mark_all_after

LAYERS = 2
SALTS = ("blue", "gold")


def content(salt, tokens):
    """The number written as keys and values at each position: a hash of the salt and of all tokens
    up to it.
    """
    state, values = salt.encode(), []
    for token in tokens:
        state = blake2b(state + b"%d," % token, digest_size=6).digest()
        values.append(float(int.from_bytes(state, "little")))
    return torch.tensor(values, dtype=torch.float64)


class CacheModel:
    """The cache under test, and a naive list of lists with its expected contents."""

    def __init__(self, late, seed, num_pages, page_size, max_seqs, host_pages):
        self.random = random.Random(seed)
        spec = Spec(LAYERS, 1, 2, 1, page_size, torch.float64)
        self.cache = KVCache(spec, num_pages, max_seqs=max_seqs)
        self.cache.pages.k.fill_(float("nan"))
        self.cache.pages.v.fill_(float("nan"))
        self.tier = HostTier(self.cache, host_pages, chunk_pages=3)
        late(self.tier)
        self.live = {}  # sequence -> (salt, tokens)
        self.away = {}  # swapped-out group -> the same, for each sequence
        self.unpublished = set()  # swapped in since their last commit
        self.prompts = [[]]
        self.histories = {}  # key -> (salt, tokens)
        self.seen = dict.fromkeys(
            ("hit", "copied", "shared_write", "no_room", "host_full", "evicted", "group"), 0
        )

    def snapshot(self):
        pool = self.cache.pool
        state = (pool._refs, pool._filled, pool._blank, pool._next, pool._prev)
        tables = {t: (t.length, t.pages) for t in pool.tables}
        rows = list(self.cache.host_table.free_rows)
        return [list(part) for part in state], tables, rows, self.tier.num_free

    def pick(self):
        return self.random.choice(list(self.live)) if self.live else None

    def guarded(self, call, *args):
        """The result of a call; after NoRoom, the state must be unchanged."""
        self.tier.poll()
        before = self.snapshot()
        answer = call(*args)
        if isinstance(answer, NoRoom):
            assert answer.needed > answer.free
            assert self.snapshot() == before
            self.seen["host_full" if answer.what == "host pages" else "no_room"] += 1
        return answer

    def open(self):
        draw = self.random
        prompt = draw.choice(self.prompts)
        prompt = prompt[: draw.randrange(len(prompt) + 1)]
        prompt = prompt + [draw.randrange(2) for _ in range(draw.randrange(1, 9))]
        salt = draw.choice(SALTS)
        sequence = self.guarded(lambda: self.cache.open(prompt, salt=salt))
        if isinstance(sequence, NoRoom):
            return
        assert sequence.length == sequence.hit_tokens < len(prompt)
        assert sequence.hit_tokens >= self.least_hit(prompt, salt)
        self.seen["hit"] += sequence.hit_tokens > 0
        self.seen["copied"] += sequence.copied_tokens > 0
        self.live[sequence] = salt, prompt[: sequence.length]
        self.remember(prompt)
        self.extend(sequence, prompt[sequence.length :])

    def remember(self, tokens):
        """Keep a prompt, so that a later request may repeat it."""
        self.prompts = [*self.prompts[-20:], list(tokens)]

    def least_hit(self, prompt, salt):
        """The number of tokens in full pages that a live sequence has committed: a lower bound."""
        best, size = 0, self.cache.spec.page_size
        for sequence, (_, tokens) in self.live.items():
            findable = sequence.chain.root == self.cache.prefix.root(salt)
            if findable and sequence not in self.unpublished:
                pairs = zip(prompt[:-1], tokens[: sequence.computed], strict=False)
                common = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
                common = min(len(prompt) - 1, sequence.computed) if common is None else common
                best = max(best, common // size * size)
        return best

    def extend(self, sequence, tokens):
        if self.guarded(self.cache.append, sequence, tokens) is None:
            self.live[sequence][1].extend(tokens)

    def append(self):
        if sequence := self.pick():
            count = self.random.randrange(0, 7)
            self.extend(sequence, [self.random.randrange(2) for _ in range(count)])

    def append_many(self):
        chosen = self.random.sample(list(self.live), min(4, len(self.live)))
        tokens = [[self.random.randrange(2)] for _ in chosen]
        shared = [s.table[-1] for s in chosen if s.length % self.cache.spec.page_size]
        self.seen["shared_write"] += any(self.cache.pool.refs(page) > 1 for page in shared)
        if self.guarded(self.append_or_reserve, chosen, tokens) is None:
            for sequence, more in zip(chosen, tokens, strict=True):
                self.live[sequence][1].extend(more)

    def append_or_reserve(self, chosen, tokens):
        """Append ids together with their slots, or reserve the slots first."""
        if self.random.random() < 0.5:
            return self.cache.append_all(chosen, tokens)
        full = self.cache.reserve_each(chosen)
        for sequence, more in zip(chosen, tokens, strict=True) if full is None else ():
            self.cache.append_tokens(sequence, more)
        return full

    def step(self):
        """Write the tokens of some sequences that are not computed, then commit most of them."""
        chosen = self.random.sample(list(self.live), self.random.randrange(len(self.live) + 1))
        batch = self.cache.view(chosen)
        values = [content(*self.live[s])[s.computed :] for s in chosen]
        values = torch.cat([*values, torch.empty(0, dtype=torch.float64)])
        for layer in range(LAYERS):
            k = torch.stack((values, values + layer), -1)[:, None]
            self.cache.write(layer, k, -values[:, None, None] - layer, batch.slot_mapping)
        for sequence in chosen:
            if self.random.random() < 0.9:
                self.record_keys(sequence)
                length = self.random.choice((None, sequence.computed, sequence.length))
                self.cache.commit(sequence, length)
                self.unpublished.discard(sequence)

    def fork(self):
        sequence = self.pick()
        if sequence is None or sequence.computed < sequence.length:
            return
        child = self.guarded(self.cache.fork, sequence)
        if not isinstance(child, NoRoom):
            salt, tokens = self.live[sequence]
            self.live[child] = salt, list(tokens)
            if sequence in self.unpublished:
                self.unpublished.add(child)

    def truncate(self):
        if sequence := self.pick():
            length = self.random.randrange(sequence.length + 1)
            self.remember(self.live[sequence][1])
            self.cache.truncate(sequence, length)
            del self.live[sequence][1][length:]

    def free(self):
        """Free a sequence that finished, or one that was cancelled before it was computed."""
        if sequence := self.pick():
            self.remember(self.live[sequence][1])
            self.cache.free(sequence)
            del self.live[sequence]

    def clear(self):
        if self.random.random() < 0.05:
            self.cache.prefix.clear()

    def swap_out(self):
        if not self.live:
            return
        chosen = self.random.sample(
            list(self.live), self.random.randrange(1, 3) % len(self.live) or 1
        )
        try:
            group = self.guarded(self.tier.swap_out, chosen)
        except ValueError as error:
            assert "exceed the host tier" in str(error)
            return
        if isinstance(group, SequenceGroup):
            self.seen["group"] += len(chosen) > 1
            self.away[group] = [self.live.pop(sequence) for sequence in chosen]

    def swap_in(self):
        if not self.away:
            return
        group = self.random.choice(list(self.away))
        if self.guarded(self.tier.swap_in, group) is None:
            self.live |= zip(group.sequences, self.away.pop(group), strict=True)
            self.unpublished.update(group.sequences)

    def discard(self):
        if self.away and self.random.random() < 0.3:
            group = self.random.choice(list(self.away))
            self.tier.discard(group)
            del self.away[group]

    def copies_happen(self):
        self.tier._mover.run()

    def check(self):
        self.cache.check()
        tables = {s.table for s in self.live}
        tables |= {s.table for group in self.away for s in group.sequences}
        assert tables == self.cache.pool.tables
        assert set(self.away) == self.tier.groups
        used = sum(len(group.chunks) for group in self.away)
        used += sum(len(f.chunks) for _, f in self.tier._moving if f not in self.away)
        assert used * 3 == self.tier.capacity - self.tier.num_free

    def check_bytes(self):
        """Read every computed token of every live sequence through the page table of the view."""
        sequences = list(self.live)
        if not sequences:
            return
        batch, size = self.cache.view(sequences), self.cache.spec.page_size
        assert batch.cache_seqlens.tolist() == [len(self.live[s][1]) for s in sequences]
        for row, sequence in enumerate(sequences):
            position = torch.arange(sequence.computed)
            slots = batch.page_table[row, position // size].long() * size + position % size
            expected = content(*self.live[sequence])[: sequence.computed]
            for layer in range(LAYERS):
                k, v = (pages.flatten(0, 1)[slots, 0] for pages in self.cache.layer(layer))
                assert torch.equal(k, torch.stack((expected, expected + layer), -1))
                assert torch.equal(v[:, 0], -expected - layer)

    def check_published(self):
        """Each published page holds the tokens that it is published under."""
        index = self.cache.prefix
        for page, entry in index._entries.items():
            salt, before = self.histories[entry.parent]
            expected = content(salt, [*before, *array("q", entry.ids)])[len(before) :]
            assert torch.equal(self.cache.layer(0)[0][page, : len(expected), 0, 0], expected)

    def record_keys(self, sequence):
        """Record the key of each history of full pages, by the definition."""
        salt, tokens = self.live[sequence]
        size, key = self.cache.spec.page_size, sequence.chain.root
        for start in range(0, len(tokens) + 1, size):
            self.histories[key] = salt, tokens[:start].copy()
            page = array("q", tokens[start : start + size])
            key = sha256(key + array("q", [8 * len(page)]).tobytes() + page.tobytes()).digest()

    def finish(self):
        """Free all sequences: no page may stay in use."""
        self.tier.synchronize()
        for group in list(self.away):
            self.tier.discard(group)
        for sequence in list(self.live):
            self.cache.free(sequence)
        self.cache.check()
        assert self.cache.pool.num_free == self.cache.pool.capacity
        assert self.tier.num_free == self.tier.capacity
        assert not self.cache.pool.tables


MOVES = {
    "open": 6,
    "append": 6,
    "append_many": 8,
    "step": 10,
    "fork": 4,
    "truncate": 3,
    "free": 4,
    "clear": 1,
    "swap_out": 4,
    "swap_in": 4,
    "discard": 2,
    "copies_happen": 3,
}


def run_random_operations(late, steps, seed, **sizes):
    model = CacheModel(late, seed, **sizes)
    evicted = model.cache.prefix._remove

    def forget(page):
        model.seen["evicted"] += 1
        evicted(page)

    model.cache.pool.watch(forget)
    moves = model.random.choices(list(MOVES), list(MOVES.values()), k=steps)
    for i, move in enumerate(moves):
        getattr(model, move)()
        model.check()
        if i % 3 == 0:
            model.check_bytes()
            model.check_published()
    model.check_bytes()
    model.finish()
    return model.seen


def test_two_thousand_random_steps(late):
    cases = run_random_operations(
        late, 2_000, seed=1, num_pages=24, page_size=4, max_seqs=8, host_pages=20
    )
    assert all(cases.values()), f"a case never occurred: {cases}"


@pytest.mark.slow
@pytest.mark.parametrize("steps", mark_all_after(1, (3_000, 8_000)))
@pytest.mark.parametrize(
    "seed, sizes",
    [
        (2, {"num_pages": 24, "page_size": 4, "max_seqs": 8, "host_pages": 20}),
        (3, {"num_pages": 60, "page_size": 2, "max_seqs": 12, "host_pages": 45}),
        (4, {"num_pages": 80, "page_size": 1, "max_seqs": 10, "host_pages": 60}),
    ],
)
def test_many_random_steps(late, seed, sizes, steps):
    """Three profiles of 3,000 steps, and of 8,000 with ALL=1. Page size 1 has no page that is
    filled in part.
    """
    cases = run_random_operations(late, steps, seed, **sizes)
    never = {"copied", "shared_write"} if sizes["page_size"] == 1 else set()
    assert {name for name, count in cases.items() if not count} == never, cases
