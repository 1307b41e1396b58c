"""What a scheduler is told, and what it answers."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from onchip.engine.request import Request, Sample


@dataclass(frozen=True)
class Limits:
    """max_num_batched_tokens: the budget of a step. max_num_seqs: samples that run at a time; a
    request counts as all of its samples. max_model_len: prompt and continuation together.
    aging_s: how much earlier one level of priority lets a request arrive.
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
    """The answer to a request that is not taken. later: the queue is full, ask again; otherwise it
    can never be served.
    """

    reason: str
    is_retryable: bool = False


class Chunk(NamedTuple):
    """Tokens start to stop - 1 of a sample's sequence are computed; every sample of `draws` draws
    its next token from the logits of the last one.
    """

    sample: Sample
    start: int
    stop: int
    sampled_by: tuple[Sample, ...]

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ScheduledStep:
    """What to compute. The tokens have their slots; `cache.view(step.sequences)` is the batch.

    swapped_out, swapped_in, recomputed: requests whose pages began to travel, or were given up.
    ended: requests that got their end meanwhile: their deadline passed, or they failed.
    """

    chunks: tuple[Chunk, ...]
    swapped_out: tuple[Request, ...] = ()
    swapped_in: tuple[Request, ...] = ()
    recomputed: tuple[Request, ...] = ()
    ended: tuple[Request, ...] = ()

    @property
    def sequences(self) -> list[Any]:
        return [chunk.sample.sequence for chunk in self.chunks]

    @cached_property
    def num_tokens(self) -> int:
        return sum([chunk.stop - chunk.start for chunk in self.chunks])

    @cached_property
    def needs_tokens(self) -> bool:
        """Some of those who draw cannot go on before they know what was drawn."""
        return any([sample.request.needs_tokens for _, sample in self.rows_to_sample])

    @cached_property
    def rows_to_sample(self) -> list[tuple[int, Sample]]:
        """(which run, a sample that draws there), in `apply_tokens`' order."""
        return [(i, sample) for i, chunk in enumerate(self.chunks) for sample in chunk.sampled_by]
