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
                f"{self.max_num_batched_tokens=} must be at least {self.max_num_seqs=}: each"
                " running sample computes a token in a step"
            )


@dataclass(frozen=True)
class Refused:
    """The answer to a request that is not taken. later: the queue is full, ask again; otherwise it
    can never be served.
    """

    reason: str
    later: bool = False


class Run(NamedTuple):
    """Tokens start to stop - 1 of a sample's sequence are computed; every sample of `draws` draws
    its next token from the logits of the last one.
    """

    sample: Sample
    start: int
    stop: int
    draws: tuple[Sample, ...]

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Step:
    """What to compute. The tokens have their slots; `cache.view(step.sequences)` is the batch.

    swapped_out, swapped_in, recomputed: requests whose pages began to travel, or were given up.
    ended: requests that got their end meanwhile: their deadline passed, or they failed.
    """

    runs: tuple[Run, ...]
    swapped_out: tuple[Request, ...] = ()
    swapped_in: tuple[Request, ...] = ()
    recomputed: tuple[Request, ...] = ()
    ended: tuple[Request, ...] = ()

    @property
    def sequences(self) -> list[Any]:
        return [run.sample.sequence for run in self.runs]

    @cached_property
    def num_tokens(self) -> int:
        return sum([run.stop - run.start for run in self.runs])

    @cached_property
    def needs_tokens(self) -> bool:
        """Some of those who draw cannot go on before they know what was drawn."""
        return any([sample.request.needs_tokens for _, sample in self.draws])

    @cached_property
    def draws(self) -> list[tuple[int, Sample]]:
        """(which run, who draws from its last row), in the order in which `update` takes them."""
        return [(i, sample) for i, run in enumerate(self.runs) for sample in run.draws]
