"""Steps that were recorded once and are replayed: a launch instead of hundreds."""

import threading
from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.engine.step import Step
from onchip.kvcache import BatchShape, KVCache, PagedBatch
from onchip.models import Decoder, positions_of
from onchip.models.rotary import frequencies

_FIRST_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_SIZE_STEP = 32
# Tokens of a step that also prefills. Longer ones keep a GPU busy for longer than their launches
# take (H200, Qwen3-0.6B, 2026-11-15: 20 ms, as long as some 8,000 tokens).
_TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
_TRIALS = 4  # recordings to judge all by
_one_at_a_time = threading.Lock()  # torch can record one graph in a process, whoever's it is


class Recorded(NamedTuple):
    """A step of a static batch, and where the hidden states are that are drawn from."""

    graph: "torch.cuda.CUDAGraph"
    batch: PagedBatch
    hidden: Tensor


class Graphs:
    """Graphs of a model on a GPU. Those of steps that only decode by batch size, those of others by
    their tokens. Smaller batches are padded: with sequences of no tokens, which read and write
    nothing, and with tokens that nobody looks at. How long sequences are, kernels read on the
    device: a graph serves all lengths, so that none has to be recorded while requests wait.

    A graph holds addresses: of the weights, of the pages, of the frequencies of rotary embeddings,
    of `last` (the tokens drawn last), of one page table for all graphs, as wide as any sequence may
    get, and of a batch of its own. All of them live as long as this object. Graphs share one memory
    pool: they are replayed one after another, and hidden states are used before the next replay.
    """

    def __init__(self, model: Decoder, cache: KVCache, last: Tensor):
        self._model, self._cache, self._last = model, cache, last
        self.sizes = sizes_up_to(cache.max_seqs)
        self._table = cache.static_table()
        self._frequencies = [frequencies(r, cache.device) for r in model.rotaries]
        self._recorded: dict[BatchShape, Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def shapes(self, most_tokens: int) -> list[BatchShape]:
        """Of the batches that steps of at most so many tokens need, the largest first: what is
        recorded after it fits into its memory.
        """
        found = [self._mixed(n) for n in _TOKENS[: bisect_left(_TOKENS, most_tokens) + 1]]
        found += [self._decoding(size) for size in self.sizes]
        return sorted(found, key=lambda shape: shape.num_tokens, reverse=True)

    def record_all(self, most_tokens: int) -> None:
        for shape in self.shapes(most_tokens):
            self._find(shape)

    def estimate_bytes(self, most_tokens: int, used_bytes: Callable[[], int]) -> int:
        """What `record_all` would take of the device, after a few recordings: the first brings the
        memory that all of them share, another what is its own, of which the most counts.
        """
        shapes, marks = self.shapes(most_tokens), [used_bytes()]
        for shape in shapes[:_TRIALS]:
            self._find(shape)
            marks.append(used_bytes())
        first, *others = [after - before for before, after in pairwise(marks)]
        return first + (len(shapes) - 1) * max(others, default=0)

    def takes(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens has a graph, whatever they are."""
        return num_tokens <= _TOKENS[-1]

    def replay(self, step: Step, ids: Tensor) -> Tensor:
        """Hidden states of a step of one token for each run; ids: as `filled_in` takes them."""
        recorded = self._find(self._decoding(len(ids)))
        self._cache.view(step.sequences, out=recorded.batch, extra=ids)
        recorded.graph.replay()
        return recorded.hidden[: len(ids)]

    def replay_mixed(self, step: Step, ids: Tensor, rows: Tensor) -> Tensor:
        """Hidden states of these rows of any step that `takes` allows."""
        shape = self._mixed(len(ids))
        extra = torch.zeros(shape.num_extra, dtype=torch.int32)
        extra[: len(ids)] = ids
        extra[shape.num_tokens : shape.num_tokens + len(rows)] = rows
        recorded = self._find(shape)
        self._cache.view(step.sequences, out=recorded.batch, extra=extra)
        recorded.graph.replay()
        return recorded.hidden[: len(rows)]

    def _decoding(self, num_seqs: int) -> BatchShape:
        """The static batch for so many sequences of one token each: ids come along."""
        size = self.sizes[bisect_left(self.sizes, num_seqs)]
        return BatchShape(size, size, self._table.shape[1], 1, size)

    def _mixed(self, num_tokens: int) -> BatchShape:
        """The one for so many tokens of any sequences: ids and rows come along."""
        tokens, (seqs, width) = _TOKENS[bisect_left(_TOKENS, num_tokens)], self._table.shape
        return BatchShape(seqs, tokens, width, tokens, tokens + seqs)

    def _find(self, shape: BatchShape) -> Recorded:
        if shape not in self._recorded:
            self._recorded[shape] = self._record(shape)
        return self._recorded[shape]

    def _record(self, shape: BatchShape) -> Recorded:
        """The batch shows no sequence yet, so recording touches no page of anybody."""
        batch = self._cache.static_batch(shape, self._table)
        graph = torch.cuda.CUDAGraph()
        stream = recording_stream(self._cache.device)
        # thread_local: what other threads allocate meanwhile, for another engine, breaks nothing.
        how = {"pool": self._pool, "stream": stream, "capture_error_mode": "thread_local"}
        with _one_at_a_time, torch.cuda.device(self._cache.device):
            self._forward(batch)  # kernels are compiled, and frequencies computed, before
            with torch.cuda.graph(graph, **how):
                hidden = self._forward(batch)
        return Recorded(graph, batch, hidden)

    def _forward(self, batch: PagedBatch) -> Tensor:
        """In the batch of a mixed step, rows follow the ids."""
        num_tokens = batch.slot_mapping.shape[0]
        tokens = filled_in(batch.extra[:num_tokens], self._last)
        rows = None if batch.max_seqlen_q == 1 else batch.extra[num_tokens:]
        return self._model(tokens, positions_of(batch), batch, self._cache, rows)


@cache
def recording_stream(device: torch.device) -> "torch.cuda.Stream":
    """One for each device, for good: libraries keep memory for every stream that they have seen.
    Torch's own is on the device that was current when anybody recorded first, and records nothing
    of another.
    """
    return torch.cuda.Stream(device)


def sizes_up_to(most: int) -> list[int]:
    """Batch sizes worth a graph: close together where a padded batch would cost most."""
    steps = range(_FIRST_SIZES[-1] + _SIZE_STEP, most, _SIZE_STEP)
    return [size for size in (*_FIRST_SIZES, *steps) if size < most] + [most]


def filled_in(ids: Tensor, last: Tensor) -> Tensor:
    """Token ids; ~i stands for the i-th token that the last step drew."""
    return torch.where(ids < 0, last[(~ids).clamp_(min=0)], ids)
