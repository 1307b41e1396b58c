"""Facts that all ranks must bring alike. Every call compares a digest of them: 16 bytes from each
rank to each. Only where digests differ do the facts themselves travel, as text: what differs is
named, and no object of one process is rebuilt in another.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

from onchip.parallel.messages import ParallelError

DIGEST_BYTES = 16
REMEMBERED = 4096  # facts agreed on; the oldest are forgotten by all ranks in the same call


class Agreed:
    """The facts that one communicator has agreed on, and the comparison that is still open."""

    def __init__(self):
        self._texts: dict[str, None] = {}
        self._open: Callable[[], None] | None = None

    def __contains__(self, text: str) -> bool:
        return text in self._texts

    def add(self, text: str) -> None:
        self._texts[text] = None
        if len(self._texts) > REMEMBERED:
            del self._texts[next(iter(self._texts))]

    def leave_open(self, check: Callable[[], None]) -> None:
        self._open = check

    def close(self) -> None:
        """Read the comparison that was left open, if there is one."""
        check, self._open = self._open, None
        if check is not None:
            check()


class Comparable(Protocol):
    """What `agree` needs of a communicator; see `messages.Comm`."""

    @property
    def agreed(self) -> Agreed: ...

    def collect(self, digest: bytes) -> Callable[[], list[bytes]]: ...

    def texts(self, text: str) -> dict[int, str]: ...


def agree(comm: Comparable, facts: Mapping[str, object], later: bool = False) -> None:
    """Compare the facts of all ranks: ParallelError names what differs, on every rank. later: facts
    that were agreed on before are posted alone, and compared when this is called the next time.
    """
    agreed, text = comm.agreed, as_text(facts)
    agreed.close()
    digests = comm.collect(digest_of(text.encode()))

    def check() -> None:
        if len(set(digests())) > 1:
            raise compare(comm.texts(text)) or ParallelError("the ranks do not agree")
        agreed.add(text)

    if later and text in agreed:
        agreed.leave_open(check)
    else:
        check()


def digest_of(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def as_text(facts: Mapping[str, object]) -> str:
    """JSON; what JSON has no word for (dtypes, devices) by its own str."""
    return json.dumps(dict(facts), sort_keys=True, default=str)


def compare(texts: Mapping[int, str]) -> ParallelError | None:
    """The error that names what differs in the facts of these ranks, or None. Its rank is one of
    the fewest that differ from the others: of two ranks the first.
    """
    if len(set(texts.values())) == 1:
        return None
    facts = {rank: json.loads(text) for rank, text in texts.items()}
    fields = sorted({field for each in facts.values() for field in each})
    groups = {field: _groups(field, facts) for field in fields}
    differing = {field: group for field, group in groups.items() if len(group) > 1}
    sentences = [_sentence(field, group) for field, group in differing.items()]
    return ParallelError(f"the ranks do not agree: {'; '.join(sentences)}", _stray(texts))


def _stray(texts: Mapping[int, str]) -> int:
    """By all facts together: single fields may split the ranks in other ways."""
    sides: dict[str, list[int]] = {}
    for rank, text in texts.items():
        sides.setdefault(text, []).append(rank)
    return min(sides.values(), key=len)[0]


def name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _groups(field: str, facts: Mapping[int, Mapping]) -> dict[str, list[int]]:
    """value -> the ranks that bring it"""
    groups: dict[str, list[int]] = {}
    for rank, each in facts.items():
        value = json.dumps(each[field]) if field in each else "nothing"
        groups.setdefault(value, []).append(rank)
    return groups


def _sentence(field: str, groups: Mapping[str, list[int]]) -> str:
    parts = [f"{value} on {name_ranks(ranks)}" for value, ranks in groups.items()]
    return f"{field} is {', '.join(parts)}"
