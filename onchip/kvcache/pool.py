"""The page pool: which page tables hold which pages, and which pages are free. No tensors here,
only page ids.

A free page is blank or cached. Blank pages form a stack: the page freed last is handed out first. A
cached page still holds a prefix that a request may reuse. Cached pages form a doubly linked list in
two arrays, oldest first; they are taken only when no blank page is left. Page 0 is the null page:
it is never handed out, it pads page tables, and it is the head of the list.

Every operation is O(1) per page, and whole tables move by slices: no object and no Python call per
page.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import index

Copy = tuple[int, int]  # (source page, destination page)


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Returned when a resource is exhausted for now: the call needed `needed` of `what`, and `free`
    are free. The call has changed nothing. Free or truncate a sequence and call again.
    """

    needed: int
    free: int
    what: str = "pages"


class PageTable:
    """The pages of one sequence, in order, and its length in tokens. Only a Pool changes it."""

    __slots__ = ("_length", "_pages", "_pool", "_swapped_out")

    def __init__(self, pool: "Pool", pages: list[int], length: int):
        self._pool: Pool | None = pool
        self._pages = pages
        self._length = length
        self._swapped_out = False

    @property
    def pages(self) -> tuple[int, ...]:
        """Page ids. After `Pool.swap_out` a negative entry ~i means its i-th page."""
        return tuple(self._pages)

    def __len__(self) -> int:
        return len(self._pages)

    def __getitem__(self, place: int) -> int:
        return self._pages[place]

    def pages_from(self, place: int) -> list[int]:
        """The page ids from `place` on."""
        return self._pages[place:]

    @property
    def length(self) -> int:
        """Tokens that have a slot: ceil(length / page_size) pages."""
        return self._length

    def __repr__(self) -> str:
        state = "" if self._pool else ", freed"
        return f"PageTable(length={self._length}, pages={self._pages}{state})"


class Pool:
    """num_pages pages of page_size tokens, page 0 reserved, counted by reference.

    Only one table writes to a page: `extend` and `write` return the (source, destination) page
    copies that the caller must perform before it writes, one for each page that is shared. The last
    holder of a page writes in place. Exhaustion returns `NoRoom`, misuse raises ValueError; both
    leave the pool unchanged.
    """

    def __init__(self, num_pages: int, page_size: int = 16):
        if num_pages < 2:
            raise ValueError(f"{num_pages=} must be at least 2: page 0 is reserved")
        if page_size < 1:
            raise ValueError(f"{page_size=} must be at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        self._refs = [0] * num_pages
        self._filled = [0] * num_pages  # leading slots that belong to a cached prefix
        self._blank = list(range(num_pages - 1, 0, -1))
        self._next = [0] * num_pages
        self._prev = [0] * num_pages
        self._num_cached = 0  # pages in the linked list
        self._tables: set[PageTable] = set()
        self._on_evict: Callable[[int], None] = lambda page: None

    @property
    def capacity(self) -> int:
        """Pages that can be handed out: all but the null page."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that `extend` can take: blank pages, and cached pages that no table holds."""
        return len(self._blank) + self._num_cached

    @property
    def num_cached(self) -> int:
        """Free pages that still hold a prefix."""
        return self._num_cached

    @property
    def num_shared(self) -> int:
        """Pages saved by sharing: the entries of all tables minus the pages in use."""
        held = sum(len(t._pages) for t in self._tables)
        away = sum(page < 0 for t in self._tables if t._swapped_out for page in t._pages)
        return held - away - (self.capacity - self.num_free)

    @property
    def tables(self) -> frozenset[PageTable]:
        """The tables that are not freed yet. A table that is left here at the end has leaked."""
        return frozenset(self._tables)

    def refs(self, page: int) -> int:
        """How many tables hold the page."""
        return self._refs[self._check_page(page)]

    def filled(self, page: int) -> int:
        """Leading slots of the page that belong to a cached prefix; 0 if none do."""
        return self._filled[self._check_page(page)]

    def alloc(self, num_tokens: int = 0) -> PageTable | NoRoom:
        """A new table with slots for num_tokens."""
        num_tokens = as_int("num_tokens", num_tokens)
        need = self._pages_for(num_tokens)
        if need > self.num_free:
            return NoRoom(need, self.num_free)
        return self._register(self._take(need), num_tokens)

    def extend(self, table: PageTable, num_tokens: int) -> list[Copy] | NoRoom:
        """Allocate slots for num_tokens that are about to be written. If the last page is not full
        and is shared, the table gets a copy of it: perform the returned page copy first.
        """
        num_tokens = as_int("num_tokens", num_tokens)
        need, tail = self._plan_growth(table, num_tokens)
        pages = need + (self._refs[tail] > 1)
        if pages > len(self._blank) + self._num_cached:
            return NoRoom(pages, self.num_free)
        return self._grow(table, num_tokens, need, tail)

    def extend_all(
        self, tables: Sequence[PageTable], num_tokens: Sequence[int]
    ) -> list[Copy] | NoRoom:
        """`extend` for many tables, all or none."""
        if len(tables) != len(num_tokens) or len(set(tables)) != len(tables):
            raise ValueError(
                f"{len(tables)} tables and {len(num_tokens)} counts must be as many, no table twice"
            )
        num_tokens = as_ints("num_tokens", num_tokens)
        growth = list(map(self._plan_growth, tables, num_tokens))
        writers = Counter(tail for _, tail in growth if self._refs[tail] > 1)
        # When all holders of a page write to it, the last one writes in place.
        copied = sum(min(count, self._refs[page] - 1) for page, count in writers.items())
        pages = copied + sum(need for need, _ in growth)
        if pages > self.num_free:
            return NoRoom(pages, self.num_free)
        copies: list[Copy] = []
        for table, count, (need, tail) in zip(tables, num_tokens, growth, strict=True):
            copies += self._grow(table, count, need, tail)
        return copies

    def extend_each(self, tables: Sequence[PageTable]) -> tuple[list[int], list[Copy]] | NoRoom:
        """`extend` by one token for many tables, all or none: (indices of the tables with a new
        last page, copies to perform first). Most tables have a free slot on a private page, which
        one comparison shows.
        """
        size, refs, filled = self.page_size, self._refs, self._filled
        others = []
        for i, table in enumerate(tables):
            if type(table) is not PageTable or table._pool is not self or table._swapped_out:
                self._pages_of(table)
            pages, offset = table._pages, table._length % size
            if not offset or refs[pages[-1]] > 1 or filled[pages[-1]] > offset:
                others.append(i)
        if len(set(tables)) != len(tables):
            raise ValueError(f"{len(tables)} tables: no table may occur twice")
        copies = self.extend_all([tables[i] for i in others], [1] * len(others))
        if isinstance(copies, NoRoom):
            return copies
        for table in tables:
            table._length += 1
        for i in others:
            tables[i]._length -= 1
        return others, copies

    def write(self, table: PageTable, start: int, stop: int) -> list[Copy] | NoRoom:
        """Positions start to stop - 1, which have slots already, are about to be overwritten:
        perform the returned page copies first.
        """
        pages = self._pages_of(table)
        start, stop = as_int("start", start), as_int("stop", stop)
        if not 0 <= start <= stop <= table._length:
            raise ValueError(f"cannot write [{start}, {stop}) of a table of {table._length} tokens")
        size = self.page_size
        touched = range(start // size, -(-stop // size)) if start < stop else range(0)
        shared = [i for i in touched if self._refs[pages[i]] > 1]
        if len(shared) > self.num_free:
            return NoRoom(len(shared), self.num_free)
        copies = self._make_private(pages, shared)
        for i in touched:
            self._overwrite(pages[i], max(0, start - i * size))
        return copies

    def fork(self, table: PageTable) -> PageTable:
        """A second table over the same pages; the first write to a shared page copies it."""
        pages = self._pages_of(table)
        refs = self._refs
        for page in pages:
            refs[page] += 1
        return self._register(pages.copy(), table._length)

    def truncate(self, table: PageTable, length: int) -> None:
        """Drop the tokens from `length` on (rejected speculative tokens)."""
        pages, length = self._pages_of(table), as_int("length", length)
        if not 0 <= length <= table._length:
            raise ValueError(f"{length=} must be between 0 and the table's {table._length} tokens")
        keep = self._pages_for(length)
        dropped = pages[keep:]
        del pages[keep:]
        table._length = length
        self._release(dropped)

    def drop_first(self, table: PageTable, num_pages: int) -> None:
        """Release the first pages of a table, which are full, and shift it: its tokens are counted
        from the first page that is left.
        """
        pages, num_pages = self._pages_of(table), as_int("num_pages", num_pages)
        full = table._length // self.page_size
        if not 0 <= num_pages <= full:
            raise ValueError(f"{num_pages=} must be between 0 and the table's {full} full pages")
        dropped = pages[:num_pages]
        del pages[:num_pages]
        table._length -= num_pages * self.page_size
        self._release(dropped)

    def free(self, table: PageTable) -> None:
        """Release the pages, last page first, so that a cached sequence loses its tail first."""
        if getattr(table, "_pool", None) is not self:
            raise ValueError(self._describe_foreign(table))
        self._tables.discard(table)
        table._pool = None
        pages, table._pages, table._length = table._pages, [], 0
        self._release([page for page in pages if page > 0] if table._swapped_out else pages)

    def watch(self, on_evict: Callable[[int], None]) -> None:
        """Call on_evict(page) when a cached page is taken for other tokens or overwritten."""
        if not callable(on_evict):
            raise ValueError(f"{on_evict=} must be a function of a page")
        self._on_evict = on_evict

    def mark_cached(self, page: int, filled: int) -> None:
        """Mark the first `filled` slots of a page in use as a cached prefix: after its release the
        page stays in the cached list. filled=0 unmarks the page; a free one becomes blank.
        """
        page, filled = self._check_page(page), as_int("filled", filled)
        if not 0 <= filled <= self.page_size:
            raise ValueError(f"{filled=} of page {page} must be between 0 and {self.page_size}")
        if filled and not self._refs[page]:
            raise ValueError(f"page {page} is free: publish a prefix before its table is freed")
        if not filled and self._filled[page] and not self._refs[page]:
            self._unlink(page)
            self._blank.append(page)
        self._filled[page] = filled

    def adopt(self, pages: Iterable[int]) -> PageTable:
        """A new table over full pages that are cached or in use."""
        pages = [self._check_page(page) for page in pages]
        for page in pages:
            if not (self._refs[page] or self._filled[page]):
                raise ValueError(f"page {page} is free and holds no prefix")
        if len(set(pages)) != len(pages):
            raise ValueError(f"pages {pages}: no page may occur twice")
        for page in pages:
            self._pin(page)
        return self._register(pages, len(pages) * self.page_size)

    def copy_partial_page(
        self, table: PageTable, source: int, num_tokens: int
    ) -> list[Copy] | NoRoom:
        """Extend a table of full pages by a copy of the first num_tokens of page `source`."""
        pages, num_tokens = self._pages_of(table), as_int("num_tokens", num_tokens)
        if table._length % self.page_size or not 0 < num_tokens <= self.filled(source):
            raise ValueError(
                f"cannot copy {num_tokens=} of page {source}, which caches {self.filled(source)},"
                f" to a table of {table._length} tokens"
            )
        free = self.num_free - (not self._refs[source])  # the source cannot be its own copy
        if not free:
            return NoRoom(1, free)
        self._pin(source)
        self._grow(table, num_tokens, 1, 0)
        self._release([source])
        return [(source, pages[-1])]

    def holds(self, tables: Sequence[PageTable]) -> bool:
        """Whether these are live tables of this pool with all their pages on the device."""
        for table in tables:  # a loop, not all(...): it runs over the whole batch in every step
            if type(table) is not PageTable or table._pool is not self or table._swapped_out:
                return False
        return True

    def exclusive(self, tables: Iterable[PageTable]) -> list[int]:
        """The pages that these tables and no others hold, each once."""
        held = Counter(page for table in tables for page in self._pages_of(table))
        return [page for page, count in held.items() if self._refs[page] == count]

    def swap_out(self, tables: Sequence[PageTable], pages: Sequence[int]) -> None:
        """Release `pages` of these tables; the tables stay alive, and page i becomes entry ~i."""
        new_ids = {page: ~i for i, page in enumerate(pages)}
        held_pages = {page for table in tables for page in self._pages_of(table)}
        if len(set(tables)) != len(tables) or len(new_ids) != len(pages):
            raise ValueError(f"{len(tables)} tables and {len(pages)} pages: none may occur twice")
        if not new_ids.keys() <= held_pages:
            raise ValueError(f"pages {sorted(new_ids.keys() - held_pages)} are not of these tables")
        for table in tables:
            held = table._pages
            swapped = [page for page in held if page in new_ids]
            held[:] = [new_ids.get(page, page) for page in held]
            table._swapped_out = True
            self._release(swapped)

    def swap_in(self, tables: Sequence[PageTable], num_pages: int) -> list[int] | NoRoom:
        """Take new pages for the swapped-out ones: entry ~i becomes the i-th returned page."""
        away = [t for t in tables if getattr(t, "_pool", None) is self and t._swapped_out]
        if len(away) != len(tables) or len(set(tables)) != len(tables):
            raise ValueError(f"{len(tables)} tables: each must be swapped out, none twice")
        missing = {~page for table in tables for page in table._pages if page < 0}
        count = len(missing)
        if count != as_int("num_pages", num_pages) or missing != set(range(count)):
            raise ValueError(f"{num_pages=}, but {len(missing)} pages are swapped out")
        if num_pages > self.num_free:
            return NoRoom(num_pages, self.num_free)
        fresh = self._take(num_pages)
        for page in fresh:
            self._refs[page] = 0
        for table in tables:
            held, table._swapped_out = table._pages, False
            for place, page in enumerate(held):
                if page < 0:
                    held[place] = fresh[~page]
                    self._refs[fresh[~page]] += 1
        return fresh

    def check(self) -> None:
        """Raise AssertionError unless these invariants hold: every page is the null page, free once
        or held; each reference count equals the number of tables that hold the page; both
        directions of the linked list agree.
        """
        held = Counter(page for t in self._tables for page in t._pages if page >= 0)
        cached = self._walk_cached_list()
        free = self._blank + cached
        _check_invariant(len(free) == len(set(free)) == self.num_free, "a page is free twice")
        _check_invariant(
            not held[0] and not self._refs[0] and 0 not in free, "the null page is in use"
        )
        _check_invariant(
            all(self._refs[p] == held[p] for p in range(self.num_pages)), "reference counts"
        )
        _check_invariant(
            set(free) == {p for p in range(1, self.num_pages) if not held[p]}, "a page is lost"
        )
        _check_invariant(all(self._filled[p] for p in cached), "a blank page is in the cached list")
        _check_invariant(
            not any(self._filled[p] for p in self._blank), "a cached page is on the blank stack"
        )
        for table in self._tables:
            _check_invariant(
                len(table._pages) == self._pages_for(table._length), f"{table} has other pages"
            )

    def _walk_cached_list(self) -> list[int]:
        """The cached free pages, oldest first, checked in both directions of the list."""
        pages, page = [], self._next[0]
        while page:
            _check_invariant(self._next[self._prev[page]] == page, f"links around page {page}")
            _check_invariant(len(pages) < self.num_pages, "the list has a loop")
            pages.append(page)
            page = self._next[page]
        _check_invariant(self._prev[0] == (pages[-1] if pages else 0), "the end of the list")
        _check_invariant(len(pages) == self._num_cached, "the counter of the list")
        return pages

    def _pages_for(self, length: int, num_tokens: int = 0) -> int:
        if length < 0 or num_tokens < 0:
            raise ValueError(f"a number of tokens cannot be {min(length, num_tokens)}")
        pages = -(-length // self.page_size)
        if pages >= self.num_pages:
            raise ValueError(
                f"{length} tokens need {pages} pages, the pool has only {self.capacity}"
            )
        return pages

    def _plan_growth(self, table: PageTable, num_tokens: int) -> tuple[int, int]:
        """(pages to add, the last page if it is not full and will be written, else 0)"""
        pages = self._pages_of(table)
        length = table._length
        need = self._pages_for(length + num_tokens, num_tokens) - len(pages)
        return need, (pages[-1] if num_tokens and length % self.page_size else 0)

    def _grow(self, table: PageTable, num_tokens: int, need: int, tail: int) -> list[Copy]:
        pages, copies = table._pages, []
        if tail:
            if self._refs[tail] > 1:
                copies = self._make_private(pages, (len(pages) - 1,))
            self._overwrite(pages[-1], table._length % self.page_size)
        if need:
            pages += self._take(need)
        table._length += num_tokens
        return copies

    def _register(self, pages: list[int], length: int) -> PageTable:
        table = PageTable(self, pages, length)
        self._tables.add(table)
        return table

    def _pages_of(self, table: PageTable) -> list[int]:
        if getattr(table, "_pool", None) is not self:
            raise ValueError(self._describe_foreign(table))
        if table._swapped_out:
            raise ValueError("the table is swapped out: swap it in before using it")
        return table._pages

    def _describe_foreign(self, table: PageTable) -> str:
        if not isinstance(table, PageTable):
            return f"{table!r} is not a page table"
        return "the table was freed already" if table._pool is None else "a table of another pool"

    def _check_page(self, page: int) -> int:
        page = as_int("page", page)
        if not 0 < page < self.num_pages:
            raise ValueError(f"page {page} is not one of the pool's pages 1 to {self.capacity}")
        return page

    def _take(self, count: int) -> list[int]:
        """Take count free pages with one reference each; the caller has checked num_free."""
        blank = self._blank
        if count == 1 and blank:  # a decoding sequence takes one page at a time
            page = blank.pop()
            self._refs[page] = 1
            return [page]
        cut = max(0, len(blank) - count)
        pages = blank[cut:]
        del blank[cut:]
        pages.reverse()
        while len(pages) < count:
            page = self._next[0]
            self._unlink(page)
            self._evict(page)
            pages.append(page)
        refs = self._refs
        for page in pages:
            refs[page] = 1
        return pages

    def _release(self, pages: list[int]) -> None:
        refs, filled, blank = self._refs, self._filled, self._blank
        for page in reversed(pages):
            count = refs[page] - 1
            refs[page] = count
            if not count:
                if filled[page]:
                    self._append(page)
                else:
                    blank.append(page)

    def _make_private(self, pages: list[int], places: Sequence[int]) -> list[Copy]:
        """Replace shared pages of a table by fresh pages."""
        copies = []
        for place, fresh in zip(places, self._take(len(places)), strict=True):
            copies.append((pages[place], fresh))
            self._refs[pages[place]] -= 1
            pages[place] = fresh
        return copies

    def _overwrite(self, page: int, offset: int) -> None:
        """Slots from `offset` on change: a cached prefix that covers them is evicted."""
        if self._filled[page] > offset:
            self._evict(page)

    def _evict(self, page: int) -> None:
        self._filled[page] = 0
        self._on_evict(page)

    def _pin(self, page: int) -> None:
        if not self._refs[page]:
            self._unlink(page)
        self._refs[page] += 1

    def _append(self, page: int) -> None:
        last = self._prev[0]
        self._next[last] = self._prev[0] = page
        self._prev[page], self._next[page] = last, 0
        self._num_cached += 1

    def _unlink(self, page: int) -> None:
        before, after = self._prev[page], self._next[page]
        self._next[before], self._prev[after] = after, before
        self._num_cached -= 1


def as_int(name: str, number: int) -> int:
    """The number as a Python int; a ValueError if it is not an integer. Lengths are stored: a
    fraction that passed here would make every later call fail.
    """
    try:
        return int(index(number))
    except TypeError:
        raise ValueError(f"{name}={number!r} must be an integer") from None


def as_ints(name: str, numbers: Sequence[int]) -> Sequence[int]:
    """`as_int` for many numbers; nearly all are ints already."""
    for number in numbers:
        if type(number) is not int:
            return [as_int(name, number) for number in numbers]
    return numbers


def _check_invariant(holds: bool, broken: str) -> None:
    if not holds:
        raise AssertionError(f"the pool is inconsistent: {broken}")
