"""How many threads compute a step on the CPU: torch's number, or one if the step is too small.

torch distributes even products of microseconds over all its threads, and the first to finish waits
for the others. On shared cores each wait costs a time slice: a step of a tiny model took 60 ms with
two threads on two busy cores, and 4 ms with one.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

from onchip.models import Model

MIN_PARALLEL_MACS = 1 << 26  # multiply-adds of a layer, or of the head: 2 ms of a core
_READ_MACS = 16  # reading a weight from memory takes as long as this many multiply-adds


class HasSpan(Protocol):
    """Tokens start to stop - 1 of a sequence, which a step computes: a Chunk is one."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...


class Span(NamedTuple):
    start: int
    stop: int


class StepThreads:
    """The number of threads for a model's steps. torch counts threads per calling thread, so other
    threads keep theirs; but a thread that first calls torch during a small step gets one thread,
    too.
    """

    def __init__(self, model: Model):
        config = model.config
        self._on_cpu = model.device.type == "cpu"
        self._layer = model.layer_weights
        self._pair = 2 * config.num_heads * config.head_dim
        self._head = config.vocab_size * config.hidden_size

    def estimate_work(self, spans: Iterable[HasSpan], num_rows: int) -> int:
        """Multiply-adds of a layer, or of the head for num_rows rows, whichever is more."""
        num_tokens = num_pairs = 0
        for span in spans:
            num_tokens += span.stop - span.start
            num_pairs += (span.stop - span.start) * span.stop
        layer = (num_tokens + _READ_MACS) * self._layer + num_pairs * self._pair
        return max(layer, (num_rows + _READ_MACS) * self._head)

    @contextmanager
    def limit_for(self, spans: Iterable[HasSpan], num_rows: int) -> Iterator[None]:
        """Inside this block torch uses as many threads as the step is worth."""
        if not self._on_cpu or (before := torch.get_num_threads()) == 1:
            yield
            return
        is_large = self.estimate_work(spans, num_rows) >= MIN_PARALLEL_MACS
        torch.set_num_threads(before if is_large else 1)
        try:
            yield
        finally:
            torch.set_num_threads(before)
