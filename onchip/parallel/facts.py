"""Facts that all ranks must bring alike, as text: what differs is named, and no object of one
process is rebuilt in another.
"""

import json
from collections.abc import Mapping, Sequence

from onchip.parallel.messages import ParallelError

REMEMBERED = 4096  # facts agreed on; the oldest are forgotten by all ranks in the same call


class Agreed:
    """The facts that were agreed on: asking for them again costs no message."""

    def __init__(self):
        self._texts: dict[str, None] = {}

    def __contains__(self, text: str) -> bool:
        return text in self._texts

    def add(self, text: str) -> None:
        self._texts[text] = None
        if len(self._texts) > REMEMBERED:
            del self._texts[next(iter(self._texts))]


def as_text(facts: Mapping[str, object]) -> str:
    """JSON; what JSON has no word for (dtypes, devices) by its own str."""
    return json.dumps(dict(facts), sort_keys=True, default=str)


def compare(texts: Mapping[int, str]) -> ParallelError | None:
    """The error that names what differs in the facts of these ranks, or None."""
    if len(set(texts.values())) == 1:
        return None
    facts = {rank: json.loads(text) for rank, text in texts.items()}
    fields = sorted({field for each in facts.values() for field in each})
    groups = {field: _groups(field, facts) for field in fields}
    differing = {field: group for field, group in groups.items() if len(group) > 1}
    sentences = [_sentence(field, group) for field, group in differing.items()]
    odd = min((ranks for group in differing.values() for ranks in group.values()), key=len)
    return ParallelError(f"the ranks do not agree: {'; '.join(sentences)}", odd[0])


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
