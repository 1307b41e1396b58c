"""Prompt lookup: the tokens that followed the last ones earlier in the same sequence.

    the cat sat. the cat  ->  " sat."       the last two tokens occurred before
    a b a b a b           ->  a b a b ...   a copy that overlaps itself goes on, as in LZ77

A tree gets the continuations of several matches, the preferred one first. Its first path is what a
chain would have.

Copied names, quoted passages and edited code are found; new text is not, and costs one search.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from onchip.engine.request import Sample
from onchip.engine.speculation.config import SpeculativeConfig
from onchip.engine.speculation.tree import DraftTree, Path, TreeShape

_ITEM = array("i").itemsize
_MAX_MATCHES = 64  # that are tried to fill a tree


class NgramProposer:
    """Proposes without a model. Longer matches are preferred to shorter ones, then later ones to
    earlier ones. Tokens are searched as bytes, which takes microseconds for thousands of them.
    """

    def __init__(self, config: SpeculativeConfig):
        self._lengths, self._shape = config.lookup_lengths, config.shape

    def propose(self, wanted: Sequence[tuple[Sample, int]]) -> list[DraftTree]:
        """For each (sample, limit) at most `limit` drafts: a chain has as many, or none. All tokens
        must be known.
        """
        return [self._propose(sample, self._shape.cut(limit)) for sample, limit in wanted]

    def _propose(self, sample: Sample, shape: TreeShape) -> DraftTree:
        packed = sample.packed_tokens
        new = sample.tokens(len(packed) // _ITEM, sample.length)
        packed += array("i", new).tobytes()
        found = self._find_continuations(packed, shape.depth)
        if shape.is_chain:
            return DraftTree(next(found, ()))
        return _merge(islice(found, _MAX_MATCHES), shape)

    def _find_continuations(self, packed: bytearray, count: int) -> Iterator[tuple[int, ...]]:
        """The `count` tokens after each match, the preferred first."""
        for at in chain.from_iterable(find_earlier(packed, length) for length in self._lengths):
            followed = array("i", bytes(packed[at : at + count * _ITEM]))
            yield tuple([followed[i % len(followed)] for i in range(count)])


def find_earlier(packed: bytearray, length: int) -> Iterator[int]:
    """The offset behind each earlier occurrence of the last `length` tokens, the last one first."""
    wanted = packed[-length * _ITEM :]
    end = len(packed) - _ITEM  # the occurrence ends at least one token before the end
    while (at := packed.rfind(wanted, 0, end)) >= 0:
        if at % _ITEM == 0:
            yield at + len(wanted)
        end = at + len(wanted) - 1  # or across the bytes of two tokens


def _merge(continuations: Iterator[tuple[int, ...]], shape: TreeShape) -> DraftTree:
    """A tree of these continuations, as far as its shape has paths: a new child of a draft gets the
    next rank.
    """
    paths: dict[tuple[Path, int], Path] = {}  # of a token after a path
    tokens: dict[Path, int] = {}
    free = set(shape.paths)
    for continuation in continuations:
        path: Path = ()
        for token in continuation:
            if (path, token) not in paths:
                rank = sum([before == path for before, _ in paths])
                if (*path, rank) not in free:
                    break
                paths[path, token] = (*path, rank)
                tokens[*path, rank] = token
            path = paths[path, token]
        if len(tokens) == len(free):
            break
    ordered = sorted(tokens, key=lambda path: (len(path), path))
    found = TreeShape(tuple(ordered))
    is_chain = not ordered or found.is_chain
    return DraftTree(tuple([tokens[path] for path in ordered]), () if is_chain else found.parents)
