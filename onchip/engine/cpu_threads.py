"""How many threads compute a step on the CPU: torch's number, or one if the step is too small.

torch distributes even products of microseconds over all its threads, and the first to finish waits
for the others. On shared cores each wait costs a time slice: a step of a tiny model took 60 ms with
two threads on two busy cores, and 4 ms with one.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from onchip.engine.step import ScheduledStep
from onchip.models import Model

MIN_PARALLEL_MACS = 1 << 26  # multiply-adds of a layer, or of the head: 2 ms of a core
_READ_MACS = 16  # reading a weight from memory takes as long as this many multiply-adds


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

    def estimate_work(self, step: ScheduledStep) -> int:
        """Multiply-adds of a layer or of the head, whichever is more."""
        pairs = sum([(stop - start) * stop for _, start, stop, *_ in step.chunks])
        layer = (step.num_tokens + _READ_MACS) * self._layer + pairs * self._pair
        return max(layer, (len(step.rows_to_sample) + _READ_MACS) * self._head)

    @contextmanager
    def limit_for(self, step: ScheduledStep) -> Iterator[None]:
        """Inside this block torch uses as many threads as the step is worth."""
        if not self._on_cpu or (before := torch.get_num_threads()) == 1:
            yield
            return
        torch.set_num_threads(before if self.estimate_work(step) >= MIN_PARALLEL_MACS else 1)
        try:
            yield
        finally:
            torch.set_num_threads(before)
