"""The scheduler's limits, and its outputs: steps and rejected requests."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from onchip.engine.request import Request, Sample


@dataclass(frozen=True)
class Limits:
    """max_num_batched_tokens: token budget of a step. max_num_seqs: samples that run at a time; a
    request counts with all of its samples. max_model_len: tokens of prompt and continuation
    together. aging_s: seconds of waiting that one level of priority is worth.
    """

    max_model_len: int
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_queued_requests: int = 4096
    max_queued_tokens: int = 4_194_304
    aging_s: float = 10.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name}={value} must be above 0")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least"
                f" max_num_seqs={self.max_num_seqs}: each running sample computes a token in a step"
            )


@dataclass(frozen=True)
class RejectedRequest:
    """Returned for a request that is not accepted. is_retryable: the queue is full now, a later
    attempt may succeed; otherwise the request can never run.
    """

    reason: str
    is_retryable: bool = False


class Chunk(NamedTuple):
    """One sample computes tokens start to stop - 1 of its sequence. Every sample in `sampled_by`
    samples its next token from the logits of the chunk's last token: several do after the prompt of
    a request with n > 1, none before the chunk reaches the end of the known tokens. drafts: the
    last tokens of the chunk, guessed (speculation/). The sample then samples a token at each of
    them, too, and at the token before them. parents: of a DraftTree; () for a chain.
    """

    sample: Sample
    start: int
    stop: int
    sampled_by: tuple[Sample, ...]
    drafts: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @property
    def token_parents(self) -> list[int]:
        """The index in this chunk of the token before each one; -1 for the first."""
        before = range(-1, self.num_tokens - 1)
        if not self.parents:
            return list(before)
        known = self.num_tokens - len(self.drafts)
        return [*before[:known], *(known + parent for parent in self.parents)]

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ScheduledStep:
    """The work of one step. Its tokens have their slots; `cache.view(step.sequences)` is the batch.

    swapped_out, swapped_in, recomputed: requests that were swapped, or lost their pages, since the
    last step. ended: requests that expired or failed since the last step. speculates: a sample has
    drafts, or may have some in the next step. streamed_pages: pages of long requests that it reads
    from host memory.
    """

    chunks: tuple[Chunk, ...]
    swapped_out: tuple[Request, ...] = ()
    swapped_in: tuple[Request, ...] = ()
    recomputed: tuple[Request, ...] = ()
    ended: tuple[Request, ...] = ()
    speculates: bool = False
    streamed_pages: int = 0

    @property
    def sequences(self) -> list[Any]:
        return [chunk.sample.sequence for chunk in self.chunks]

    @cached_property
    def num_tokens(self) -> int:
        return sum([chunk.stop - chunk.start for chunk in self.chunks])

    @cached_property
    def num_drafts(self) -> int:
        return sum([len(chunk.drafts) for chunk in self.chunks if chunk.drafts])

    @cached_property
    def has_trees(self) -> bool:
        """The drafts of a sample are no chain."""
        return any([bool(chunk.parents) for chunk in self.chunks])

    @cached_property
    def needs_tokens(self) -> bool:
        """A sample of this step needs its sampled token before its next step can be scheduled."""
        needed = any([sample.request.needs_tokens for _, sample in self.rows_to_sample])
        return needed or self.speculates

    @cached_property
    def rows_to_sample(self) -> list[tuple[int, Sample]]:
        """(index of the chunk, sample) for each row of logits, in the order that `apply_tokens`
        takes. A sample has as many rows as drafts, and one more.
        """
        if not self.num_drafts:
            return [(i, s) for i, chunk in enumerate(self.chunks) for s in chunk.sampled_by]
        rows = [chunk.sampled_by * (1 + len(chunk.drafts)) for chunk in self.chunks]
        return [(i, sample) for i, samples in enumerate(rows) for sample in samples]
