"""A small page pool to play with: sequences of words that are added, continued, forked,
beam-searched, rolled back and freed.

Pool and PrefixIndex are the classes of the key/value cache. A slot holds its word in place of keys
and values, which shows the shared pages, the copied pages, and the contents that a free page keeps.
site/pool.js is the same in JavaScript; a test runs both through the same random operations.
"""

from collections import abc
from dataclasses import dataclass
from typing import Any, TypeVar

from onchip.kvcache.pool import Copy, NoRoom, PageTable, Pool
from onchip.kvcache.prefix import Chain, PrefixIndex

NUM_PAGES, PAGE_SIZE = 25, 4
MAX_SEQUENCES, MAX_WORDS, MAX_LETTERS, MAX_VOCABULARY = 12, 48, 16, 2000
BEAM_WIDTH, PROPOSALS = 3, 2
DRAWN = (
    *("the", "river", "carries", "every", "page", "to", "its", "other", "bank", "and"),
    *("no", "one", "copies", "what", "they", "can", "share"),
)
STRIDE, COSTS = 5, (3, 8, 5, 13, 2, 7)  # of draws: arbitrary numbers, the same in pool.js
PROMPTS = (
    "the river bank is the place where we swim",
    "the river bank is the place where we fish",
    "every page has four slots and a number",
)
OPENING = (  # the state of the page when it opens
    {"do": "add", "text": PROMPTS[0]},
    {"do": "fork", "name": "A"},
    {"do": "generate", "name": None},
)
STORY = (  # the operations of "show me", from a blank pool
    {"do": "reset"},
    *({"do": "add", "text": text} for text in PROMPTS[:2]),
    *({"do": "fork", "name": "A"}, {"do": "generate", "name": None}),
    *({"do": "beam", "name": "B"}, {"do": "beam", "name": "B"}, {"do": "beam", "name": "B"}),
    *({"do": "add", "text": PROMPTS[2]}, {"do": "generate", "name": None}),
    *({"do": "free", "name": "A"}, {"do": "free", "name": "C"}),
    *({"do": "add", "text": PROMPTS[0]}, {"do": "generate", "name": None}),
)
OPERATIONS = ("add", "generate", "fork", "beam", "truncate", "free", "reset")

Operation = abc.Mapping[str, Any]
T = TypeVar("T")


@dataclass(eq=False)
class WordSequence:
    """A page table, its word ids, keys of its published pages, and its cost in a beam search."""

    name: str
    family: str
    table: PageTable
    tokens: list[int]
    chain: Chain
    cost: int = 0


class OperationRefused(Exception):
    """An operation that is not possible now. It has no effect; the message is a sentence."""


class Playground:
    """`do` runs an operation given as JSON and returns a sentence; `state` returns the data to
    draw.
    """

    pool: Pool
    index: PrefixIndex
    memory: list[list[str]]
    drawn: int
    named: int

    def __init__(self, num_pages: int = NUM_PAGES, page_size: int = PAGE_SIZE):
        self.pool = Pool(num_pages, page_size)
        self.index = PrefixIndex(self.pool)
        self.memory = [[""] * page_size for _ in range(num_pages)]  # a word for each slot
        self.sequences: dict[str, WordSequence] = {}
        self.ids: dict[str, int] = {}
        self.named = self.drawn = 0
        self.copies: list[Copy] = []  # of the last operation

    def do(self, operation: Operation) -> dict[str, Any]:
        """{"do": NAME, ...}: add (text), generate (name; null: all), fork, beam, free (name),
        truncate (name, count), reset. Returns {"ok", "say"}. ValueError: no such operation.
        """
        name = operation.get("do")
        if name not in OPERATIONS:
            raise ValueError(f"do={name!r} must be one of: {', '.join(OPERATIONS)}")
        self.copies = []
        try:
            return {"ok": True, "say": getattr(self, f"_{name}")(operation)}
        except OperationRefused as refusal:
            return {"ok": False, "say": str(refusal)}

    def state(self) -> dict[str, Any]:
        """Tables, and for each page but the null page how many hold it, how many of its slots a
        cached prefix relies on, and its words.
        """
        pool = self.pool
        pages = range(1, pool.num_pages)
        return {
            "tables": [self._row(s) for s in self.sequences.values()],
            "refs": [pool.refs(page) for page in pages],
            "filled": [pool.filled(page) for page in pages],
            "memory": [slots.copy() for slots in self.memory[1:]],
            "free": pool.num_free,
            "cached": pool.num_cached,
            "shared": pool.num_shared,
            "stats": list(self.index.stats),
            "copies": [list(copy) for copy in self.copies],
        }

    def read(self, sequence: WordSequence) -> list[str]:
        """The words of a sequence, read from its pages."""
        slots = (divmod(i, self.pool.page_size) for i in range(sequence.table.length))
        return [self.memory[sequence.table[place]][slot] for place, slot in slots]

    def words(self, sequence: WordSequence) -> list[str]:
        """The words of a sequence, from its token ids."""
        known = list(self.ids)
        return [known[token] for token in sequence.tokens]

    def _row(self, s: WordSequence) -> dict[str, Any]:
        pages = list(s.table.pages)
        return {"name": s.name, "family": s.family, "pages": pages, "words": self.words(s)}

    def _add(self, operation: Operation) -> str:
        words = _words(operation.get("text"))
        if len(self.ids) > MAX_VOCABULARY:
            raise OperationRefused(f"More than {MAX_VOCABULARY} words were used: start over.")
        self._check_num_sequences(1)
        tokens = [self._id(word) for word in words]
        root = self.index.root()
        hit = self.index.match(tokens, root)
        table = self.pool.adopt(hit.pages)
        copied = self._copy_partial_page(table, hit.source, hit.copied)
        num_cached = table.length
        grown = self.pool.extend(table, len(tokens) - num_cached)
        if isinstance(grown, NoRoom):
            self.pool.free(table)
            self.copies = []
        name = self._name()
        sequence = WordSequence(name, name, table, tokens, Chain(root, hit.keys))
        self._write([sequence], [num_cached], _require_room(grown))
        self.sequences[name] = sequence
        return _describe_hit(name, len(tokens), len(hit.pages), copied)

    def _copy_partial_page(self, table: PageTable, source: int | None, count: int) -> int:
        """The number of words that a copy of a page's start provides; 0 if no page is free."""
        copies = [] if source is None else self.pool.copy_partial_page(table, source, count)
        if not copies or isinstance(copies, NoRoom):
            return 0
        self._copy(copies)
        return count

    def _generate(self, operation: Operation) -> str:
        name = operation.get("name")
        chosen = list(self.sequences.values()) if name is None else [self._find_sequence(name)]
        if not chosen:
            raise OperationRefused("There is no sequence yet: add one.")
        self._grow(chosen, range(self.drawn, self.drawn + len(chosen)))
        self.drawn += len(chosen)
        return f"{_names(chosen)} drew a word.{_describe_copies(self.copies)}"

    def _fork(self, operation: Operation) -> str:
        parent = self._find_sequence(operation.get("name"))
        self._check_num_sequences(1)
        child = self._child(parent)
        held = _count(len(child.table), "page")
        return f"{child.name} is {parent.name} forked: {held}, none of them new."

    def _beam(self, operation: Operation) -> str:
        """One step of beam search over all sequences with the same root. Every beam proposes words
        and the cheapest BEAM_WIDTH proposals survive. A beam with several survivors is forked, a
        beam without any is freed.
        """
        family = self._find_sequence(operation.get("name")).family
        beams = [s for s in self.sequences.values() if s.family == family]
        winners, drawn = self._winners(beams)
        self._check_num_sequences(len(winners) - len({parent.name for _, _, parent in winners}))
        survivors: list[WordSequence] = []
        for _, _, parent in winners:
            survivors.append(self._child(parent) if parent in survivors else parent)
        try:
            self._grow(survivors, [draw for _, draw, _ in winners])
        except OperationRefused:
            self._drop([s for s in survivors if s not in beams])
            raise
        for survivor, (cost, _, _) in zip(survivors, winners, strict=True):
            survivor.cost = cost
        self.drawn += drawn
        losers = [s for s in beams if s not in survivors]
        self._drop(losers)
        dropped = f" {_names(losers)} dropped." if losers else ""
        return f"The beams are now {_names(survivors)}.{dropped}{_describe_copies(self.copies)}"

    def _winners(
        self, beams: list[WordSequence]
    ) -> tuple[list[tuple[int, int, WordSequence]], int]:
        """(cost, draw, parent) of the cheapest proposals, and the number of draws."""
        each = BEAM_WIDTH if len(beams) == 1 else PROPOSALS
        proposed = []
        for beam in beams:
            for _ in range(each):
                draw = self.drawn + len(proposed)
                proposed.append((beam.cost + COSTS[draw % len(COSTS)], draw, beam))
        return sorted(proposed, key=lambda one: one[:2])[:BEAM_WIDTH], len(proposed)

    def _truncate(self, operation: Operation) -> str:
        sequence, count = self._find_sequence(operation.get("name")), operation.get("count", 1)
        if type(count) is not int or count < 0:
            raise ValueError(f"{count=} must be a number of words")
        length = max(1, sequence.table.length - count)
        num_removed = sequence.table.length - length
        self.pool.truncate(sequence.table, length)
        del sequence.tokens[length:]
        del sequence.chain.keys[length // self.pool.page_size :]
        return f"{sequence.name} lost {_count(num_removed, 'word')}."

    def _free(self, operation: Operation) -> str:
        sequence = self._find_sequence(operation.get("name"))
        before = self.pool.num_free
        self._drop([sequence])
        held = _count(self.pool.num_free - before, "page")
        return f"{sequence.name} is freed: {held} free again, and cached until taken."

    def _reset(self, operation: Operation) -> str:
        self.__init__(self.pool.num_pages, self.pool.page_size)
        return f"All {self.pool.capacity} pages are blank."

    def _grow(self, sequences: list[WordSequence], draws: abc.Iterable[int]) -> None:
        """Add one word to each sequence, or to none if pages are short."""
        if longest := next((s for s in sequences if s.table.length >= MAX_WORDS), None):
            raise OperationRefused(
                f"{longest.name} has {MAX_WORDS} words, the most that a sequence may have here."
            )
        starts = [s.table.length for s in sequences]
        copies = _require_room(
            self.pool.extend_all([s.table for s in sequences], [1] * len(sequences))
        )
        for sequence, draw in zip(sequences, draws, strict=True):
            sequence.tokens.append(self._id(DRAWN[draw * STRIDE % len(DRAWN)]))
        self._write(sequences, starts, copies)

    def _write(self, sequences: list[WordSequence], starts: list[int], copies: list[Copy]) -> None:
        """Copy pages, write the words from `starts` on, and publish them to the prefix index."""
        size = self.pool.page_size
        self._copy(copies)
        for s, start in zip(sequences, starts, strict=True):
            for i, word in enumerate(self.words(s)[start:], start):
                self.memory[s.table[i // size]][i % size] = word
            full, tail = divmod(s.table.length, size)
            if full > len(s.chain.keys) or (tail and not self.pool.filled(s.table[full])):
                self.index.publish(s.table, s.tokens, s.table.length, s.chain)

    def _copy(self, copies: list[Copy]) -> None:
        for source, destination in copies:
            self.memory[destination] = self.memory[source].copy()
        self.copies += copies

    def _child(self, parent: WordSequence) -> WordSequence:
        name, table = self._name(), self.pool.fork(parent.table)
        tokens, chain = parent.tokens.copy(), parent.chain.fork()
        self.sequences[name] = WordSequence(name, parent.family, table, tokens, chain, parent.cost)
        return self.sequences[name]

    def _drop(self, sequences: list[WordSequence]) -> None:
        for s in sequences:
            self.index.publish(s.table, s.tokens, s.table.length, s.chain, final=True)
            self.pool.free(s.table)
            del self.sequences[s.name]

    def _find_sequence(self, name: object) -> WordSequence:
        if name not in self.sequences:
            raise OperationRefused(f"There is no sequence {name}.")
        return self.sequences[str(name)]

    def _check_num_sequences(self, count: int) -> None:
        if len(self.sequences) + count > MAX_SEQUENCES:
            raise OperationRefused(f"{MAX_SEQUENCES} sequences are the most: free one.")

    def _name(self) -> str:
        self.named += 1
        turn, letter = divmod(self.named - 1, 26)
        return chr(ord("A") + letter) + (str(turn) if turn else "")

    def _id(self, word: str) -> int:
        return self.ids.setdefault(word, len(self.ids))


def _words(text: object) -> list[str]:
    if not isinstance(text, str):
        raise ValueError(f"{text=} must be words")
    words = text.split()
    if not words:
        raise OperationRefused("Type some words first.")
    if len(words) > MAX_WORDS or max(map(len, words)) > MAX_LETTERS:
        raise OperationRefused(f"At most {MAX_WORDS} words of {MAX_LETTERS} letters are accepted.")
    return words


def _require_room(answer: T | NoRoom) -> T:
    if isinstance(answer, NoRoom):
        raise OperationRefused(
            f"That needs {_count(answer.needed, 'page')} and {answer.free} are free: free a"
            " sequence, or remove words."
        )
    return answer


def _describe_hit(name: str, num_words: int, shared: int, copied: int) -> str:
    if not shared and not copied:
        return f"{name} has {_count(num_words, 'word')}, all of them new."
    parts = [_count(shared, "page") + " shared"] if shared else []
    parts += [_count(copied, "word") + " copied"] if copied else []
    return f"{name} is partly cached: {', '.join(parts)}. Only the rest is computed."


def _describe_copies(copies: list[Copy]) -> str:
    pages = " ".join(f"Page {a} was shared, so it was copied to {b}." for a, b in copies)
    return f" {pages}" if pages else ""


def _names(sequences: list[WordSequence]) -> str:
    return ", ".join(s.name for s in sequences)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
