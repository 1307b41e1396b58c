"""Which sequences begin with the same pages: a radix tree of page ids. No tensors here.

    pages of a   1 2 3 4 5        root --[1 2]-- node 2 --[3 4 5]-- a
    pages of b   1 2 3 4 6   ->                      \
    pages of c   1 2 7                                +--[7]-- c      (b splits [3 4 5] after 4)

A sequence is added once, with the full pages that it has by then, and removed when it loses one of
them: adding and removing cost its own pages, and nothing is done for a sequence that grows.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any


class PrefixNode:
    """Pages `start` to `stop` - 1 of all sequences at or below this node."""

    __slots__ = ("children", "members", "pages", "parent", "start")

    def __init__(self, pages: list[int], start: int, parent: "PrefixNode | None"):
        self.pages, self.start, self.parent = pages, start, parent
        self.children: dict[int, PrefixNode] = {}  # by the first of their pages
        self.members: set[Any] = set()  # sequences that end here

    @property
    def stop(self) -> int:
        return self.start + len(self.pages)

    def ancestors(self) -> Iterator["PrefixNode"]:
        """This node and all nodes above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class PrefixTree:
    """version changes with every sequence that is added or removed."""

    version: int

    def __init__(self) -> None:
        self.version = 0
        self._root = PrefixNode([], 0, None)
        self._nodes: dict[Any, PrefixNode] = {}  # at which the pages of each sequence end

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, sequence: Any) -> bool:
        return sequence in self._nodes

    @property
    def sequences(self) -> list[Any]:
        return list(self._nodes)

    @property
    def has_shared(self) -> bool:
        """Whether any two sequences begin with the same page."""
        return len(self._root.children) < len(self._nodes)

    def find(self, sequence: Any) -> PrefixNode | None:
        """The node at which the pages of a sequence end; None if it was not added."""
        return self._nodes.get(sequence)

    def num_pages(self, sequence: Any) -> int:
        """Pages with which the sequence was added; 0 if it was not."""
        node = self._nodes.get(sequence)
        return 0 if node is None else node.stop

    def add(self, sequence: Any, pages: list[int]) -> None:
        """Add a sequence with its first pages, at least one."""
        if not pages or sequence in self._nodes:
            raise ValueError(f"{len(pages)} pages of a new sequence: at least one, and added once")
        node, at = self._root, 0
        while at < len(pages) and (child := node.children.get(pages[at])) is not None:
            common = _common_length(child.pages, pages, at)
            node = child if common == len(child.pages) else _split(child, common)
            at += common
        if at < len(pages):
            leaf = PrefixNode(pages[at:], at, node)
            node.children[pages[at]] = node = leaf
        node.members.add(sequence)
        self._nodes[sequence] = node
        self.version += 1

    def remove(self, sequence: Any) -> None:
        """Remove a sequence, if it was added."""
        node = self._nodes.pop(sequence, None)
        if node is None:
            return
        node.members.discard(sequence)
        self.version += 1
        _prune(node)
        if node.parent is not None and not node.children:  # its parent may separate nothing now
            _prune(node.parent)

    def check(self, tables: Iterable[tuple[Any, list[int]]]) -> None:
        """Raise AssertionError unless the nodes of each sequence have the first of its pages, and
        no node is superfluous. tables: the sequences, with their pages.
        """
        by_sequence = dict(tables)
        for sequence, node in self._nodes.items():
            path = [page for each in reversed([*node.ancestors()]) for page in each.pages]
            if by_sequence[sequence][: len(path)] != path or sequence not in node.members:
                raise AssertionError("the prefix tree has other pages than a sequence")
        todo, num_members = list(self._root.children.values()), 0
        while todo:
            node = todo.pop()
            num_members += len(node.members)
            todo += node.children.values()
            if not node.members and len(node.children) < 2:
                raise AssertionError("the prefix tree has a node that separates nothing")
        if num_members != len(self._nodes):
            raise AssertionError("the prefix tree has a sequence twice, or one that was removed")


def _split(node: PrefixNode, length: int) -> PrefixNode:
    """Insert a node with the first `length` pages of this one above it."""
    parent, above = node.parent, PrefixNode(node.pages[:length], node.start, node.parent)
    parent.children[above.pages[0]] = above
    node.pages, node.start, node.parent = node.pages[length:], node.start + length, above
    above.children[node.pages[0]] = node
    return above


def _prune(node: PrefixNode) -> None:
    """Drop a node without sequences below it, or join it with its only child. Not the root."""
    parent = node.parent
    if parent is None or node.members or len(node.children) > 1:
        return
    if not node.children:
        del parent.children[node.pages[0]]
        return
    (child,) = node.children.values()
    child.pages, child.start, child.parent = node.pages + child.pages, node.start, parent
    parent.children[child.pages[0]] = child


def _common_length(run: list[int], pages: list[int], at: int) -> int:
    """How many pages of `run` equal the pages of `pages` from `at` on. Slices compare in C."""
    most = min(len(run), len(pages) - at)
    if run[:most] == pages[at : at + most]:
        return most
    lengths = range(1, most + 1)
    return bisect_left(lengths, True, key=lambda n: run[:n] != pages[at : at + n])
