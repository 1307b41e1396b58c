"""Which replica gets a request: the one that was sent the longest prefix of its prompt, if it is
not much busier than the others. Pure Python, without Ray.

    replica     open requests   blocks of the prompt it was sent
    a           3               0
    b           9               12      <- chosen: 9 <= 3 + slack
    c           14              20         too busy: 14 > 3 + slack

Without the slack, a system prompt that all requests share would send all of them to one replica.
With it, the prefix reaches a second replica as soon as the first is busy, and both share the load.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

MAX_ENTRIES = 1 << 18  # pairs of key and replica: under 64 MiB
SLACK = 8  # open requests


class PrefixTable:
    """Which replicas were sent which prefixes, at most max_entries pairs. The pairs that were not
    used for the longest time go first, the end of a prompt before its beginning, as pages do.
    """

    max_entries: int

    def __init__(self, max_entries: int = MAX_ENTRIES):
        self.max_entries = max_entries
        self._entries: OrderedDict[tuple[bytes, str], None] = OrderedDict()
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def count(self, replica: str) -> int:
        """How many prefixes a replica holds."""
        return self._counts[replica]

    def match(self, keys: Sequence[bytes], replicas: Iterable[str]) -> dict[str, int]:
        """How many of the keys, from the first on, each replica was sent."""
        matched = dict.fromkeys(replicas, 0)
        holders = list(matched)
        for key in keys:
            holders = [replica for replica in holders if (key, replica) in self._entries]
            if not holders:
                break
            for replica in holders:
                matched[replica] += 1
        return matched

    def record(self, keys: Sequence[bytes], replica: str) -> None:
        for key in reversed(keys):  # the beginning of the prompt becomes the most recent
            if (key, replica) in self._entries:
                self._entries.move_to_end((key, replica))
            else:
                self._entries[key, replica] = None
                self._counts[replica] += 1
        while len(self._entries) > self.max_entries:
            (_, oldest), _ = self._entries.popitem(last=False)
            self._counts[oldest] -= 1

    def forget(self, replica: str) -> None:
        """The replica is gone, and its pages with it."""
        for entry in [entry for entry in self._entries if entry[1] == replica]:
            del self._entries[entry]
        del self._counts[replica]


class PrefixBalancer:
    """Ranks replicas for a request. slack: how many more open requests than the least busy replica
    a replica may have, to be chosen for a prefix.
    """

    table: PrefixTable
    slack: int

    def __init__(self, max_entries: int = MAX_ENTRIES, slack: int = SLACK):
        self.table, self.slack = PrefixTable(max_entries), slack
        self._open: Counter[str] = Counter()
        self._replicas: set[str] = set()

    def update(self, replicas: Iterable[str]) -> None:
        """Only these replicas are left."""
        left = set(replicas)
        for replica in self._replicas - left:
            self.table.forget(replica)
            del self._open[replica]
        self._replicas = left

    def count_sent(self, replica: str) -> None:
        self._open[replica] += 1

    def count_completed(self, replica: str) -> None:
        if self._open[replica] > 0:
            self._open[replica] -= 1

    def rank(self, keys: Sequence[bytes], replicas: Sequence[str]) -> list[str]:
        """The replicas, best first: those within the slack before the others, then by the longest
        prefix, then by load, then by the fewest prefixes, so that new prefixes spread.
        """
        matched = self.table.match(keys, replicas)
        limit = min((self._open[replica] for replica in replicas), default=0) + self.slack

        def cost(replica: str) -> tuple[bool, int, int, int]:
            load = self._open[replica]
            return load > limit, -matched[replica], load, self.table.count(replica)

        return sorted(replicas, key=cost)

    def choose(self, keys: Sequence[bytes], replicas: Sequence[str]) -> list[str]:
        """`rank`, and record the prompt for the best replica at once: requests with the same new
        prefix that arrive together go to the same replica.
        """
        order = self.rank(keys, replicas)
        if order:
            self.record(keys, order[0])
        return order

    def record(self, keys: Sequence[bytes], replica: str) -> None:
        """The replica has, or will have, the pages of this prompt."""
        self.table.record(keys, replica)
