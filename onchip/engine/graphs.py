"""Decoding steps that were recorded once and are replayed: a launch instead of hundreds."""

from bisect import bisect_left
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.engine.step import Step
from onchip.kvcache import KVCache, PagedBatch, Shape
from onchip.models import Decoder, positions_of
from onchip.models.rotary import frequencies

_FIRST_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_SIZE_STEP = 32
_FIRST_WIDTH = 256  # pages of a sequence: 4,096 tokens in pages of 16
_WIDTH_STEP = 4


class Recorded(NamedTuple):
    """A step of batch.shape.num_seqs sequences, one token each, and where its hidden states are."""

    graph: "torch.cuda.CUDAGraph"
    batch: PagedBatch
    hidden: Tensor


class Graphs:
    """Graphs of a model on a GPU by batch size and length of the longest sequence; smaller batches
    are padded with sequences of no tokens, which read and write nothing.

    A graph holds addresses: of the weights, of the pages, of the frequencies of rotary embeddings,
    of `last` (the tokens drawn last), and of a batch of its own. All of them live as long as this
    object. Graphs share one memory pool: they are replayed one after another, and hidden states are
    used before the next replay.
    """

    def __init__(self, model: Decoder, cache: KVCache, last: Tensor):
        self._model, self._cache, self._last = model, cache, last
        self.sizes = sizes_up_to(cache.max_seqs)
        self.widths = widths_up_to(cache.host_table.pages.shape[1])
        self._frequencies = [frequencies(r, cache.device) for r in model.rotaries]
        self._recorded: dict[tuple[int, int], Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def record_all(self) -> None:
        """Every batch size, for sequences of ordinary length; longer ones when they come. The
        largest first: the others fit into its memory.
        """
        for size in reversed(self.sizes):
            self._find(size, 1)

    def replay(self, step: Step, ids: Tensor) -> Tensor:
        """Hidden states of a step of one token for each run; ids: as `filled_in` takes them."""
        longest = max([run.stop for run in step.runs])
        recorded = self._find(len(ids), -(-longest // self._cache.spec.page_size))
        self._cache.view(step.sequences, out=recorded.batch, extra=ids)
        recorded.graph.replay()
        return recorded.hidden[: len(ids)]

    def _find(self, num_seqs: int, pages: int) -> Recorded:
        size = self.sizes[bisect_left(self.sizes, num_seqs)]
        width = self.widths[bisect_left(self.widths, pages)]
        if (size, width) not in self._recorded:
            self._recorded[size, width] = self._record(size, width)
        return self._recorded[size, width]

    def _record(self, size: int, width: int) -> Recorded:
        """The batch shows no sequence yet, so recording touches no page of anybody."""
        batch = self._cache.static_batch(Shape(size, size, width, 1, size))
        self._forward(batch)  # kernels are compiled, and frequencies computed, before
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = self._forward(batch)
        return Recorded(graph, batch, hidden)

    def _forward(self, batch: PagedBatch) -> Tensor:
        tokens = filled_in(batch.extra, self._last)
        return self._model(tokens, positions_of(batch), batch, self._cache)


def sizes_up_to(most: int) -> list[int]:
    """Batch sizes worth a graph: close together where a padded batch would cost most."""
    steps = range(_FIRST_SIZES[-1] + _SIZE_STEP, most, _SIZE_STEP)
    return [size for size in (*_FIRST_SIZES, *steps) if size < most] + [most]


def widths_up_to(most: int) -> list[int]:
    """Widths of page tables: what is sent with each step should not be that of a context which
    nobody uses.
    """
    widths, width = [], _FIRST_WIDTH
    while width < most:
        widths.append(width)
        width *= _WIDTH_STEP
    return [*widths, most]


def filled_in(ids: Tensor, last: Tensor) -> Tensor:
    """Token ids; ~i stands for the i-th token that the last step drew."""
    return torch.where(ids < 0, last[(~ids).clamp_(min=0)], ids)
