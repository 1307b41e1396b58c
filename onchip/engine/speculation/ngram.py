"""Prompt lookup: the tokens that followed the last ones earlier in the same sequence.

    the cat sat. the cat  ->  " sat."       the last two tokens occurred before
    a b a b a b           ->  a b a b ...   a copy that overlaps itself goes on, as in LZ77

Copied names, quoted passages and edited code are found; new text is not, and costs one search.
"""

from array import array
from collections.abc import Sequence

from onchip.engine.request import Sample
from onchip.engine.speculation.config import SpeculativeConfig

_ITEM = array("i").itemsize


class NgramProposer:
    """Proposes without a model. Longer matches are preferred to shorter ones, then later ones to
    earlier ones. Tokens are searched as bytes, which takes microseconds for thousands of them.
    """

    def __init__(self, config: SpeculativeConfig):
        self._lengths = config.lookup_lengths

    def propose(self, wanted: Sequence[tuple[Sample, int]]) -> list[tuple[int, ...]]:
        """For each (sample, limit) `limit` drafts, or none. All its tokens must be known."""
        return [self._propose(sample, limit) for sample, limit in wanted]

    def _propose(self, sample: Sample, limit: int) -> tuple[int, ...]:
        packed = sample.packed_tokens
        new = sample.tokens(len(packed) // _ITEM, sample.length)
        packed += array("i", new).tobytes()
        for length in self._lengths:
            at = find_last(packed, length)
            if at is not None:
                followed = array("i", bytes(packed[at : at + limit * _ITEM]))
                return tuple(followed[i % len(followed)] for i in range(limit))
        return ()


def find_last(packed: bytearray, length: int) -> int | None:
    """The offset behind the last earlier occurrence of the last `length` tokens."""
    wanted = packed[-length * _ITEM :]
    end = len(packed) - _ITEM  # the occurrence ends at least one token before the end
    while (at := packed.rfind(wanted, 0, end)) >= 0:
        if at % _ITEM == 0:
            return at + len(wanted)
        end = at + len(wanted) - 1  # across the bytes of two tokens
    return None
