"""Trees of drafts: several continuations of a sample that one step verifies.

    known token   c          path         a path has the rank of each child: (0, 1) is the second
                  |- d       (0,)         choice after the first one
                  |  |- f    (0, 0)
                  |  `- g    (0, 1)
                  `- e       (1,)
    drafts        d e f g    parents -1 -1 0 0

Drafts are in the order of their paths, shorter paths first: every draft follows its parent. Their
keys and values have slots in this order, too. A chain is the tree in which every draft follows the
one before.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

Path = tuple[int, ...]
MAX_CHUNK_TOKENS = 64  # of a sample in a step with trees, as in kvcache/draft_trees.py
MAX_TREE_DRAFTS = MAX_CHUNK_TOKENS - 1


class DraftTree(NamedTuple):
    """Drafts of a sample. parents: the index of the draft before each one, -1: the known token; ()
    for a chain.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...] = ()

    def first_path(self) -> "DraftTree":
        """The chain of first choices."""
        if not self.parents:
            return self
        tokens, last = [], -1
        while last in self.parents:
            last = self.parents.index(last)
            tokens.append(self.tokens[last])
        return DraftTree(tuple(tokens))


def find_path(parents: Sequence[int], draft: int) -> list[int]:
    """The drafts from the first one after the known token to this one; parents as in a DraftTree
    that is no chain.
    """
    path = []
    while draft >= 0:
        path.append(draft)
        draft = parents[draft]
    return path[::-1]


@dataclass(frozen=True)
class TreeShape:
    """The paths of a tree, shorter ones first."""

    paths: tuple[Path, ...]

    @classmethod
    def chain(cls, num_drafts: int) -> "TreeShape":
        return cls(tuple([(0,) * n for n in range(1, num_drafts + 1)]))

    @classmethod
    def parse(cls, text: str) -> "TreeShape":
        """From a list of tuples, as vLLM takes it: "[(0,), (1,), (0, 0)]"."""
        named = f"speculative_token_tree={text!r:.60} of speculative_config"
        if not isinstance(text, str):
            raise ValueError(f"{named} must be a str")
        try:
            paths = [tuple(path) for path in ast.literal_eval(text)]
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            raise ValueError(f"{named} is not a list of tuples of numbers") from None
        _check_paths(named, paths)
        return cls(tuple(sorted(paths, key=lambda path: (len(path), path))))

    @property
    def is_chain(self) -> bool:
        return self.depth == len(self.paths)

    @cached_property
    def depth(self) -> int:
        return max(map(len, self.paths))

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """As in a DraftTree, also for a chain."""
        places = {path: i for i, path in enumerate(self.paths)}
        return tuple([places.get(path[:-1], -1) for path in self.paths])

    @cached_property
    def num_children(self) -> tuple[int, ...]:
        """Of each draft; the last number is that of the known token."""
        return tuple([self.parents.count(i) for i in (*range(len(self.paths)), -1)])

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """By depth, from the known token on: the drafts of this depth that have children."""
        inner = [i for i in range(len(self.paths)) if self.num_children[i]]
        depths = range(1, self.depth)
        levels = [tuple([i for i in inner if len(self.paths[i]) == depth]) for depth in depths]
        return (-1,), *levels

    @property
    def branches_late(self) -> bool:
        """Two drafts of one depth have children. Otherwise those that have some are a chain."""
        return any([len(level) > 1 for level in self.levels])

    def cut(self, num_drafts: int) -> "TreeShape":
        """A part with at most num_drafts drafts: the paths with the smallest sum of ranks + 1."""
        return self if num_drafts >= len(self.paths) else _cut(self, num_drafts)


@cache
def _cut(shape: TreeShape, num_drafts: int) -> TreeShape:
    by_rank = sorted(shape.paths, key=lambda path: (sum(path) + len(path), path))
    kept = sorted(by_rank[:num_drafts], key=lambda path: (len(path), path))
    return TreeShape(tuple(kept))


def _check_paths(named: str, paths: Sequence[Path]) -> None:
    is_rank = lambda n: isinstance(n, int) and not isinstance(n, bool) and n >= 0
    if not all([path and all(map(is_rank, path)) for path in paths]):
        raise ValueError(f"{named} is not a list of tuples of numbers")
    if not 1 <= len(paths) <= MAX_TREE_DRAFTS or len(set(paths)) < len(paths):
        raise ValueError(f"{named} must have 1 to {MAX_TREE_DRAFTS} paths, none of them twice")
    for path in paths:
        before = path[:-1] if not path[-1] else (*path[:-1], path[-1] - 1)
        if before and before not in paths:
            raise ValueError(f"{named} has {path} without {before}")
