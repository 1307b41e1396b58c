"""The prefix index: it finds computed pages by their token ids.

A history of full pages has a key: SHA-256 over the key of the history before its last page and the
token ids of that page. The first key is made from the page size and a salt, so tenants with
different salts share nothing. Pages that follow the same key are sorted by their token ids, and the
ids themselves are compared: a page that agrees in full is shared; a page that agrees at its start
(it need not be full) is reused by copy.

`publish` enters a page when its keys and values are written. The page is removed when the pool
takes it for other tokens or a table overwrites it.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from onchip.kvcache.pool import PageTable, Pool, as_int

_ROOT = b"onchip.kvcache.prefix.1"
_ID_BYTES = 8  # bytes of a token id


class Chain:
    """The keys of a sequence: the root, then one for each full page that was published."""

    root: bytes
    keys: list[bytes]

    __slots__ = ("keys", "root")

    def __init__(self, root: bytes, keys: Sequence[bytes] = ()):
        self.root = root
        self.keys = list(keys)

    @property
    def last(self) -> bytes:
        return self.keys[-1] if self.keys else self.root

    def fork(self) -> "Chain":
        return Chain(self.root, self.keys)


class Hit(NamedTuple):
    """The match of a request: full pages to share, then `copied` tokens of page `source`."""

    pages: tuple[int, ...]
    keys: tuple[bytes, ...]
    source: int | None
    copied: int
    tokens: int  # shared and copied, always less than the length of the request


class PrefixStats(NamedTuple):
    """Totals over all matches: tokens requested, found in shared pages, found by copy."""

    requested_tokens: int = 0
    shared_tokens: int = 0
    copied_tokens: int = 0


class _Entry(NamedTuple):
    """The contents of a page: its token ids, 8 bytes each, after the history `parent`."""

    parent: bytes
    ids: bytes


class PrefixIndex:
    """Which pages of a pool hold which prefixes.

    The shortest hit is one token, whatever the page size; the longest leaves one token of the
    request to compute. Several pages may hold the same prefix: tables are never re-mapped. The pool
    takes cached pages that no table holds least recently used first, the tail of a sequence before
    its head.
    """

    stats: PrefixStats

    def __init__(self, pool: Pool):
        self._pool = pool
        self._page_size = pool.page_size
        self._entries: dict[int, _Entry] = {}
        # key -> sorted (ids, page) of the pages that follow: the best match is a neighbour
        self._followers: dict[bytes, list[tuple[bytes, int]]] = {}
        self._epoch = 0
        self.stats = PrefixStats()
        pool.watch(self._remove)

    def __len__(self) -> int:
        return len(self._entries)

    def root(self, salt: str = "") -> bytes:
        """The first key of every chain under this salt, until the next `clear`."""
        if not isinstance(salt, str):
            raise ValueError(f"{salt=} must be a string")
        secret = salt.encode()
        numbers = array("q", (self._page_size, self._epoch, len(secret))).tobytes()
        return sha256(_ROOT + numbers + secret).digest()

    def match(self, tokens: Sequence[int], root: bytes) -> Hit:
        """The longest computed prefix of a request, at most all of its tokens but one."""
        size, limit = self._page_size, len(tokens) - 1
        ids = pack_token_ids(tokens).tobytes()
        pages: list[int] = []
        chain = Chain(root)
        while True:
            start = len(pages) * size
            wanted = ids[start * _ID_BYTES : min(start + size, limit) * _ID_BYTES]
            page, agreed = self._longest_match(chain.last, wanted)
            if agreed < size:
                break
            pages.append(page)
            chain.keys.append(_key(chain.last, wanted))
        self._add_stats(len(tokens), start, agreed)
        source = page if agreed else None
        return Hit(tuple(pages), tuple(chain.keys), source, agreed, start + agreed)

    def publish(
        self,
        table: PageTable,
        tokens: Sequence[int],
        length: int,
        chain: Chain,
        final: bool = False,
    ) -> None:
        """Enter the pages of tokens[:length], after their keys and values are written. chain holds
        the keys of the full pages published before and gets the new keys. A last page that is not
        full enters when it begins, and again with all its tokens when `final`.
        """
        size, length = self._page_size, as_int("length", length)
        done, full = len(chain.keys), length // size
        if (
            not self._pool.holds([table])
            or not done <= full
            or length > min(len(tokens), table.length)
        ):
            raise ValueError(
                f"cannot publish {length=} of {len(tokens)} tokens of {table}, after {done} pages"
            )
        ids = pack_token_ids(tokens[done * size : length]).tobytes()
        for i in range(done, full):
            page_ids = ids[(i - done) * size * _ID_BYTES : (i - done + 1) * size * _ID_BYTES]
            self._insert(table[i], _Entry(chain.last, page_ids))
            chain.keys.append(_key(chain.last, page_ids))
        tail = length - full * size
        if tail and self._pool.filled(table[full]) < (tail if final else 1):
            self._insert(table[full], _Entry(chain.last, ids[-tail * _ID_BYTES :]))

    def clear(self) -> None:
        """Remove all entries, for example for new weights; cached free pages become blank. Pages
        that older sequences publish afterwards never match.
        """
        self._epoch += 1
        for page in list(self._entries):
            self._remove(page)
            self._pool.mark_cached(page, 0)

    def check(self) -> None:
        """Raise AssertionError unless each page is listed once, in order, and the pool marks
        exactly these pages as cached, with as many slots.
        """
        pool = self._pool
        cached = {page: n for page in range(1, pool.num_pages) if (n := pool.filled(page))}
        listed = [(key, *pair) for key, pairs in self._followers.items() for pair in pairs]
        entries = [(e.parent, e.ids, page) for page, e in self._entries.items()]
        if cached != {page: len(e.ids) // _ID_BYTES for page, e in self._entries.items()}:
            raise AssertionError("the pool caches other pages than the prefix index")
        if sorted(listed) != sorted(entries) or any(
            m != sorted(m) for m in self._followers.values()
        ):
            raise AssertionError("the prefix index lists other pages than it holds")

    def _longest_match(self, key: bytes, wanted: bytes) -> tuple[int, int]:
        """The page after `key` with the longest common start with `wanted`, and the number of
        tokens in common (0: no page).
        """
        many = self._followers.get(key, ())
        at = bisect_left(many, (wanted,))
        best = (0, 0)
        for ids, page in many[max(0, at - 1) : at + 1]:
            best = max(best, (_common_prefix(ids, wanted), page))
        return best[1], best[0]

    def _insert(self, page: int, entry: _Entry) -> None:
        if page in self._entries:
            self._remove(page)
        insort(self._followers.setdefault(entry.parent, []), (entry.ids, page))
        self._entries[page] = entry
        self._pool.mark_cached(page, len(entry.ids) // _ID_BYTES)

    def _remove(self, page: int) -> None:
        entry = self._entries.pop(page)
        many = self._followers[entry.parent]
        del many[bisect_left(many, (entry.ids, page))]
        if not many:
            del self._followers[entry.parent]

    def _add_stats(self, requested: int, shared: int, copied: int) -> None:
        a, s, c = self.stats
        self.stats = PrefixStats(a + requested, s + shared, c + copied)


def chain_keys(root: bytes, ids: bytes, block_bytes: int, max_keys: int) -> list[bytes]:
    """The key of every history of full blocks, shortest first, at most max_keys. ids: token ids, or
    any other bytes that two prompts with a common prefix have in common.
    """
    chain = Chain(root)
    for end in range(block_bytes, min(len(ids), max_keys * block_bytes) + 1, block_bytes):
        chain.keys.append(_key(chain.last, ids[end - block_bytes : end]))
    return chain.keys


def pack_token_ids(tokens: Sequence[int]) -> "array[int]":
    """Token ids as 64-bit integers; a ValueError if they are anything else."""
    if isinstance(tokens, (bytes, bytearray)):  # array would read them as raw memory
        tokens = list(tokens)
    try:
        return array("q", tokens)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"token ids must be integers of 64 bits: {error}") from None


def _key(parent: bytes, ids: bytes) -> bytes:
    """Length-prefixed, so that no two histories are the same bytes."""
    return sha256(parent + len(ids).to_bytes(8, "little") + ids).digest()


def _common_prefix(a: bytes, b: bytes) -> int:
    """The number of token ids before the first that differs."""
    if a == b:
        return len(a) // _ID_BYTES
    ends = range(_ID_BYTES, min(len(a), len(b)) + 1, _ID_BYTES)
    return bisect_left(ends, True, key=lambda end: a[:end] != b[:end])
