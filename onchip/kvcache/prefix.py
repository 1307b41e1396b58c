"""Prefixes that were computed before: found again by what they say, never by where they lie.

The key of a full page is SHA-256 over the key of the page before it and its token ids; the first
key is made from the page size and a salt, so tenants with different salts share nothing, and equal
keys mean equal histories. All 256 bits are compared. A page that is filled in part, or that agrees
with a request in part, is found by comparing token ids among the pages that follow the same key,
and is reused by copying it.

A page enters when its keys and values are written (`publish`), and leaves when the pool takes the
page for something else or a table overwrites it.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from hashlib import sha256
from itertools import takewhile
from typing import NamedTuple

from onchip.kvcache.pool import Pool, Table

_ROOT = b"onchip.kvcache.prefix.1"


class Chain:
    """The keys of a sequence: the root, then one for each full page that was published."""

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
    """What a request finds: full pages to share, then `copied` tokens of page `source` to copy."""

    pages: tuple[int, ...]
    keys: tuple[bytes, ...]
    source: int | None
    copied: int
    tokens: int  # shared and copied, always less than the request


class Stats(NamedTuple):
    """Totals over all matches: tokens asked for, found in shared pages, found by copy."""

    asked_tokens: int = 0
    shared_tokens: int = 0
    copied_tokens: int = 0


class _Entry(NamedTuple):
    parent: bytes
    tokens: tuple[int, ...]
    key: bytes | None  # None: the page is not full


class PrefixIndex:
    """Which pages of a pool hold which prefixes.

    The shortest hit is one token, whatever the page size; the longest leaves one token of the
    request to compute. If two pages hold the same prefix the first stays in the index: tables are
    never re-mapped. Cached pages that no table holds are taken least recently used first, the tail
    of a sequence before its head.
    """

    def __init__(self, pool: Pool):
        self._pool = pool
        self._page_size = pool.page_size
        self._page_of: dict[bytes, int] = {}
        self._entries: dict[int, _Entry] = {}
        # parent key -> its (tokens, page) in order: the longest common start is a neighbour
        self._children: dict[bytes, list[tuple[tuple[int, ...], int]]] = {}
        self.stats = Stats()
        pool.watch(self._remove)

    def __len__(self) -> int:
        return len(self._entries)

    def root(self, salt: str = "") -> bytes:
        """The start of every chain under this salt."""
        secret = salt.encode()
        sizes = array("q", (self._page_size, len(secret))).tobytes()
        return sha256(_ROOT + sizes + secret).digest()

    def match(self, tokens: Sequence[int], root: bytes) -> Hit:
        """The longest computed prefix of a request, at most all of its tokens but one."""
        size, limit = self._page_size, len(tokens) - 1
        words = _words(tokens)
        pages: list[int] = []
        chain = Chain(root)
        for start in range(0, limit - size + 1, size):
            key = _key(chain.last, words[start : start + size])
            if (page := self._page_of.get(key)) is None:
                break
            pages.append(page)
            chain.keys.append(key)
        start = len(pages) * size
        rest = tuple(tokens[start : max(start, min(start + size, limit))])
        source, copied = self._nearest(chain.last, rest)
        self._count(len(tokens), start, copied)
        return Hit(tuple(pages), tuple(chain.keys), source, copied, start + copied)

    def publish(
        self, table: Table, tokens: Sequence[int], length: int, chain: Chain, final: bool = False
    ) -> None:
        """Keys and values of tokens[:length] are written to the table's pages; chain knows the full
        pages that were published before and learns the new ones. A last page that is not full
        enters when it is first seen, and with all its tokens when it is `final`.
        """
        size = self._page_size
        done, full = len(chain.keys), length // size
        words = _words(tokens[done * size : full * size])
        for i in range(done, full):
            at = (i - done) * size
            key = _key(chain.last, words[at : at + size])
            self._insert(table[i], _Entry(chain.last, tuple(words[at : at + size]), key))
            chain.keys.append(key)
        tail = length - full * size
        if tail and self._pool.filled(table[full]) < (tail if final else 1):
            self._insert(table[full], _Entry(chain.last, tuple(tokens[full * size : length]), None))

    def clear(self) -> None:
        """Forget everything (new weights, say); cached free pages go blank."""
        for page in list(self._entries):
            self._drop(page)

    def check(self) -> None:
        """Raise AssertionError unless pages, keys and children tell the same story and the pool
        keeps exactly these pages.
        """
        pool = self._pool
        kept = {page for page in range(1, pool.num_pages) if pool.filled(page)}
        keys = {e.key: page for page, e in self._entries.items() if e.key}
        children = sorted((e.parent, e.tokens, page) for page, e in self._entries.items())
        listed = [(parent, *c) for parent, many in self._children.items() for c in many]
        if kept != set(self._entries) or keys != self._page_of or children != sorted(listed):
            raise AssertionError("the prefix index is inconsistent with itself or its pool")
        for page, entry in self._entries.items():
            exact = entry.key in (None, _key(entry.parent, array("q", entry.tokens)))
            if not exact or pool.filled(page) != len(entry.tokens):
                raise AssertionError(f"page {page} is published as something else")

    def _nearest(self, parent: bytes, wanted: tuple[int, ...]) -> tuple[int | None, int]:
        """The page after `parent` that starts most like `wanted`, and by how many tokens."""
        many = self._children.get(parent, [])
        at = bisect_left(many, (wanted,))
        near = many[max(0, at - 1) : at + 1]
        copied, page = max(((_common(start, wanted), page) for start, page in near), default=(0, 0))
        return (page, copied) if copied else (None, 0)

    def _insert(self, page: int, entry: _Entry) -> None:
        if page in self._entries:
            self._drop(page)
        many = self._children.get(entry.parent, [])
        at = bisect_left(many, (entry.tokens,))
        if at < len(many) and many[at][0] == entry.tokens:
            return  # another page says the same
        insort(self._children.setdefault(entry.parent, []), (entry.tokens, page))
        self._entries[page] = entry
        if entry.key:
            self._page_of[entry.key] = page
        self._pool.keep(page, len(entry.tokens))

    def _drop(self, page: int) -> None:
        self._remove(page)
        self._pool.keep(page, 0)

    def _remove(self, page: int) -> None:
        """The pool has given the page to something else."""
        entry = self._entries.pop(page)
        many = self._children[entry.parent]
        del many[bisect_left(many, (entry.tokens, page))]
        if not many:
            del self._children[entry.parent]
        if entry.key:
            del self._page_of[entry.key]

    def _count(self, asked: int, shared: int, copied: int) -> None:
        a, s, c = self.stats
        self.stats = Stats(a + asked, s + shared, c + copied)


def _words(tokens: Sequence[int]) -> array:
    """Token ids as 64-bit words, refused in a sentence if they are something else."""
    try:
        return array("q", tokens)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"token ids must be integers of 64 bits: {error}") from None


def _key(parent: bytes, words: array) -> bytes:
    """Length-prefixed, so that no two histories are the same bytes."""
    return sha256(parent + len(words).to_bytes(8, "little") + words.tobytes()).digest()


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
