"""The chunks of a step that compute their attention in 8 bits, and the rest of the step."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from onchip.kvcache.paged_batch import PagedBatch


class PrefillChunk(NamedTuple):
    """New tokens of one sequence of a batch: which one, its rows start to stop - 1, and the number
    of its keys, with those of the new tokens.
    """

    sequence: int
    start: int
    stop: int
    num_keys: int


class PrefillChunks(NamedTuple):
    """precision: of `onchip.paged_attention`, and the kernel that serves it. chunks: in the order
    of their rows. others: the other sequences of the batch as a batch of their own, for reading;
    None if there are none.
    """

    precision: str
    kernel: str
    chunks: tuple[PrefillChunk, ...]
    others: "PagedBatch | None" = None

    @property
    def num_tokens(self) -> int:
        return sum(chunk.stop - chunk.start for chunk in self.chunks)

    def rows_between(self, num_tokens: int) -> Iterator[tuple[PrefillChunk | None, slice]]:
        """All rows of a batch in their order, in pieces: (chunk, its rows), or (None, rows of
        other sequences).
        """
        start = 0
        for chunk in self.chunks:
            if start < chunk.start:
                yield None, slice(start, chunk.start)
            yield chunk, slice(chunk.start, chunk.stop)
            start = chunk.stop
        if start < num_tokens:
            yield None, slice(start, num_tokens)
