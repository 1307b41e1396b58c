"""Check that all ranks make the same call.

Every call compares a digest of its arguments, the *fields*: each rank sends 16 bytes to each other
rank. The fields themselves travel, as text, only where digests differ. Then the error names the
field, its values and their ranks. No object of one process is rebuilt in another.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

from onchip.parallel.comm_base import ParallelError

DIGEST_BYTES = 16
MAX_REMEMBERED = 4096  # texts found equal; all ranks forget the oldest in the same call


class ConsistencyCache:
    """The texts that the ranks of one communicator found equal, and the deferred comparison."""

    def __init__(self):
        self._texts: dict[str, None] = {}
        self._deferred: Callable[[], None] | None = None

    def __contains__(self, text: str) -> bool:
        return text in self._texts

    def add(self, text: str) -> None:
        self._texts[text] = None
        if len(self._texts) > MAX_REMEMBERED:
            del self._texts[next(iter(self._texts))]

    def defer(self, check: Callable[[], None]) -> None:
        self._deferred = check

    def run_deferred(self) -> None:
        """Finish the comparison that the last call deferred, if any."""
        check, self._deferred = self._deferred, None
        if check is not None:
            check()


class ConsistencyComm(Protocol):
    """The part of a communicator that `check_consistent` needs; see `messages.Comm`."""

    @property
    def consistency(self) -> ConsistencyCache: ...

    def exchange_digests(self, digest: bytes) -> Callable[[], list[bytes]]: ...

    def exchange_texts(self, text: str) -> dict[int, str]: ...


def check_consistent(
    comm: ConsistencyComm, fields: Mapping[str, object], defer: bool = False
) -> None:
    """Compare the fields of all ranks. Every rank raises a ParallelError that names the difference.

    defer: fields that were equal in an earlier call are only posted; the next call compares them.
    """
    cache, text = comm.consistency, encode_fields(fields)
    cache.run_deferred()
    digests = comm.exchange_digests(digest_of(text.encode()))

    def check() -> None:
        if len(set(digests())) > 1:
            error = find_difference(comm.exchange_texts(text))
            raise error or ParallelError("the ranks do not agree")
        cache.add(text)

    if defer and text in cache:
        cache.defer(check)
    else:
        check()


def digest_of(data: bytes) -> bytes:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def encode_fields(fields: Mapping[str, object]) -> str:
    """JSON; types that JSON lacks (dtypes, devices) as their str."""
    return json.dumps(dict(fields), sort_keys=True, default=str)


def find_difference(texts: Mapping[int, str]) -> ParallelError | None:
    """The error that names the fields in which these ranks differ, or None. Its rank belongs to the
    smallest group of equal ranks; of two ranks it is the first.
    """
    if len(set(texts.values())) == 1:
        return None
    fields_of = {rank: json.loads(text) for rank, text in texts.items()}
    names = sorted({name for fields in fields_of.values() for name in fields})
    ranks_by_value = {name: _ranks_by_value(name, fields_of) for name in names}
    sentences = [_sentence(n, values) for n, values in ranks_by_value.items() if len(values) > 1]
    return ParallelError(f"the ranks do not agree: {'; '.join(sentences)}", _minority_rank(texts))


def _minority_rank(texts: Mapping[int, str]) -> int:
    """Groups ranks by all fields together, because single fields may split them in other ways."""
    groups: dict[str, list[int]] = {}
    for rank, text in texts.items():
        groups.setdefault(text, []).append(rank)
    return min(groups.values(), key=len)[0]


def name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _ranks_by_value(name: str, fields_of: Mapping[int, Mapping]) -> dict[str, list[int]]:
    """{value of the field, as JSON: ranks that have it}"""
    ranks: dict[str, list[int]] = {}
    for rank, fields in fields_of.items():
        value = json.dumps(fields[name]) if name in fields else "nothing"
        ranks.setdefault(value, []).append(rank)
    return ranks


def _sentence(name: str, ranks_by_value: Mapping[str, list[int]]) -> str:
    parts = [f"{value} on {name_ranks(ranks)}" for value, ranks in ranks_by_value.items()]
    return f"{name} is {', '.join(parts)}"
