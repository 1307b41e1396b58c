"""CUDA graphs of steps: one launch instead of hundreds."""

import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core import dispatch
from onchip.core.device import device_info
from onchip.engine.cascade import BatchRows, CascadePlanner, CascadeStep
from onchip.engine.layer_call import layer_call
from onchip.kvcache import BatchShape, KVCache, PagedBatch
from onchip.kvcache.draft_trees import count_tree_numbers, pack_trees
from onchip.kvcache.shared_prefixes import SharedShape
from onchip.models import Decoder, Model, positions_of
from onchip.models.rotary import frequencies

_FIRST_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_SIZE_STEP = 32
# Tokens of a step that also prefills. Longer steps take the GPU longer than their launches take
# the host (H200, Qwen3-0.6B, 2026-11-15: 20 ms, as long as some 8,000 tokens).
_TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
MOST_GRAPH_TOKENS = _TOKENS[-1]
# The same with a cascade: fewer, because padding costs less than another graph. Batch sizes of
# decode-only steps with a cascade are powers of two from _SHARED_SIZE on.
_SHARED_TOKENS = (64, 256, 1024, 2048)
_SHARED_SIZE = 8
_TRIALS = 4  # recordings from which the memory of all is estimated
_capture_lock = threading.Lock()  # torch can record only one graph at a time in a process


class RecordedGraph(NamedTuple):
    """A graph, its static batch, and the hidden states of the rows to sample."""

    graph: "torch.cuda.CUDAGraph"
    batch: PagedBatch
    hidden: Tensor


class StepGraphs:
    """The CUDA graphs of a model: one per batch size for decode-only steps, one per number of
    tokens for all others. Smaller batches are padded with empty sequences, which read and write
    nothing, and with tokens whose results are ignored. Kernels read sequence lengths on the device,
    so a graph serves all lengths and none is recorded while requests wait. chunk_lengths: steps in
    which no sequence has more new tokens than this have graphs by batch size, too (drafts).
    has_trees: in these graphs, new tokens may form trees.

    A graph holds addresses: of the weights, the pages, the rotary frequencies, `last` (the tokens
    sampled last), one page table for all graphs, as wide as the longest sequence, and its own
    batch. This object keeps all of them alive. Graphs share one memory pool: they are replayed one
    after another, and hidden states are used before the next replay.

    cascade: further graphs for steps with shared prefixes, each for the sizes of a SharedShape.
    Which sequences share which pages is read on the device.
    """

    sizes: list[int]

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        last: Tensor,
        cascade: CascadePlanner | None = None,
        chunk_lengths: Sequence[int] = (),
        has_trees: bool = False,
    ):
        self._has_trees = has_trees
        self._model, self._cache, self._last, self._cascade = model, cache, last, cascade
        self._chunk_lengths, self._chunk_seqs = chunk_lengths, chunk_sizes(cache.max_seqs)
        self._shared_shapes: dict[BatchShape, SharedShape] = {}
        self.sizes, self.shared_sizes = batch_sizes(cache.max_seqs), shared_sizes(cache.max_seqs)
        self._table = cache.static_table()
        self._tree_shapes = set(self._chunk_shapes() if has_trees else ())
        self._frequencies = [frequencies(r, cache.device) for r in model.rotaries]
        self._recorded: dict[BatchShape, RecordedGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def shapes(self, most_tokens: int) -> list[BatchShape]:
        """Shapes of the batches for steps of at most this many tokens, largest first: deferred
        recordings fit into its memory.
        """
        shapes = [self._mixed_shape(n) for n in _TOKENS[: bisect_left(_TOKENS, most_tokens) + 1]]
        shapes += [self._decode_shape(size) for size in self.sizes] + self._chunk_shapes()
        if self._cascade is not None:
            most = _SHARED_TOKENS[: bisect_left(_SHARED_TOKENS, most_tokens) + 1]
            batches = [self._shared_mixed_shape(n) for n in most]
            batches += [self._shared_decode_shape(size) for size in self.shared_sizes]
            shapes += [self._shared_shape(b, each) for b in batches for each in self._slots(b)]
        return sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_extra), reverse=True)

    def record_all(self, most_tokens: int) -> None:
        for shape in self.shapes(most_tokens):
            self._get_graph(shape)

    def estimate_bytes(self, most_tokens: int, used_bytes: Callable[[], int]) -> int:
        """Estimate the memory of `record_all` from a few recordings. The first includes the memory
        that all graphs share; the largest of the others is the memory of each further graph.
        """
        shapes, marks = self.shapes(most_tokens), [used_bytes()]
        for shape in shapes[:_TRIALS]:
            self._get_graph(shape)
            marks.append(used_bytes())
        first, *others = [after - before for before, after in pairwise(marks)]
        return first + (len(shapes) - 1) * max(others, default=0)

    def has_graph_for(
        self, sequences: Sequence[Any], num_rows: int, has_trees: bool = False
    ) -> bool:
        """Whether a step with the new tokens of these sequences, and hidden states of so many rows,
        has a graph.
        """
        return self._find_shape(sequences, num_rows, has_trees) is not None

    def plan(self, batch: BatchRows, is_decode_only: bool) -> CascadeStep | None:
        """The cascade of a step that has a graph."""
        if self._cascade is None or sum(batch.counts) > _SHARED_TOKENS[-1]:
            return None
        find_shape = self._shared_decode_shape if is_decode_only else self._shared_mixed_shape
        shape = find_shape(sum(batch.counts))
        padded = batch._replace(padded=(shape.num_seqs, shape.num_tokens))
        return self._cascade.plan(padded, self._slots(shape))

    def replay(
        self, sequences: Sequence[Any], ids: Tensor, shared: CascadeStep | None = None
    ) -> Tensor:
        """Hidden states of a decode-only step; ids: as for `fill_in_sampled`."""
        if shared is None:
            shape, extra = self._decode_shape(len(ids)), ids
        else:
            base = self._shared_decode_shape(len(ids))
            shape = self._shared_shape(base, shared.shape)
            extra = _join(shape.num_extra, {0: ids, base.num_extra: shared.numbers})
        recorded = self._get_graph(shape)
        self._cache.view(sequences, out=recorded.batch, extra=extra)
        recorded.graph.replay()
        return recorded.hidden[: len(ids)]

    def replay_mixed(
        self,
        sequences: Sequence[Any],
        ids: Tensor,
        rows: Tensor,
        shared: CascadeStep | None = None,
        parents: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Hidden states of these rows, for any step that `has_graph_for` allows. With a cascade,
        there are no more rows than `max_seqs`, and no parents. parents: of trees, as for
        `pack_trees`.
        """
        if shared is None:
            shape, parts = self._find_shape(sequences, len(rows), parents is not None), {}
            if shape in self._tree_shapes:
                trees = parents or [range(-1, s.length - s.computed - 1) for s in sequences]
                numbers = torch.tensor(pack_trees(trees), dtype=torch.int32)
                parts = {2 * shape.num_tokens: numbers}
        else:
            base = self._shared_mixed_shape(len(ids))
            shape, parts = self._shared_shape(base, shared.shape), {base.num_extra: shared.numbers}
        extra = _join(shape.num_extra, {0: ids, shape.num_tokens: rows, **parts})
        recorded = self._get_graph(shape)
        self._cache.view(sequences, out=recorded.batch, extra=extra)
        recorded.graph.replay()
        return recorded.hidden[: len(rows)]

    def _decode_shape(self, num_seqs: int) -> BatchShape:
        """The static batch for this many sequences of one token each; it includes the ids."""
        size = self.sizes[bisect_left(self.sizes, num_seqs)]
        return BatchShape(size, size, self._table.shape[1], 1, size)

    def _mixed_shape(self, num_tokens: int) -> BatchShape:
        """The static batch for this many tokens of any sequences; it includes ids and rows."""
        tokens, (seqs, width) = _TOKENS[bisect_left(_TOKENS, num_tokens)], self._table.shape
        return BatchShape(seqs, tokens, width, tokens, tokens + seqs)

    def _find_shape(
        self, sequences: Sequence[Any], num_rows: int, has_trees: bool = False
    ) -> BatchShape | None:
        """The static batch with the fewest tokens for the new tokens of these sequences."""
        counts = [s.length - s.computed for s in sequences]
        longest, num_tokens = max(counts), sum(counts)
        shapes = []
        if num_tokens <= _TOKENS[-1] and num_rows <= self._cache.max_seqs and not has_trees:
            shapes.append(self._mixed_shape(num_tokens))
        for shape in self._chunk_shapes():
            fits = shape.num_seqs >= len(counts) and shape.max_seqlen_q >= longest
            if fits and shape.num_tokens >= num_rows:  # samples of one prompt repeat its row
                shapes.append(shape)
        return min(shapes, key=lambda shape: (shape.num_tokens, shape.num_seqs), default=None)

    def _chunk_shapes(self) -> list[BatchShape]:
        """Static batches for chunks of few tokens, each of which may be a row; they include ids
        and rows, then trees.
        """
        sizes = [(n, length) for length in self._chunk_lengths for n in self._chunk_seqs]
        width, most = self._table.shape[1], max(_TOKENS[-1], self._cache.max_seqs)
        return [
            BatchShape(n, n * length, width, length, self._num_chunk_numbers(n * length))
            for n, length in sizes
            if n * length <= most
        ]

    def _num_chunk_numbers(self, num_tokens: int) -> int:
        return 2 * num_tokens + (count_tree_numbers(num_tokens) if self._has_trees else 0)

    def _shared_decode_shape(self, num_seqs: int) -> BatchShape:
        size = self.shared_sizes[bisect_left(self.shared_sizes, num_seqs)]
        return BatchShape(size, size, self._table.shape[1], 1, size)

    def _shared_mixed_shape(self, num_tokens: int) -> BatchShape:
        tokens = _SHARED_TOKENS[bisect_left(_SHARED_TOKENS, num_tokens)]
        seqs, width = self._table.shape
        return BatchShape(seqs, tokens, width, tokens, tokens + seqs)

    def _slots(self, shape: BatchShape) -> list[SharedShape]:
        """The graphs of a static batch: for one group and for several, or for several alone."""
        shapes = self._cascade.graph_shapes(min(shape.num_tokens, self._table.shape[0]))
        return shapes if shape.max_seqlen_q == 1 else shapes[-1:]

    def _shared_shape(self, shape: BatchShape, shared: SharedShape) -> BatchShape:
        """The static batch with room for the numbers of a cascade, which follow the others."""
        numbers = shared.num_numbers(shape.num_seqs, shape.num_tokens)
        shape = shape._replace(num_extra=shape.num_extra + numbers)
        self._shared_shapes[shape] = shared
        return shape

    def _get_graph(self, shape: BatchShape) -> RecordedGraph:
        if shape not in self._recorded:
            self._recorded[shape] = self._record(shape)
        return self._recorded[shape]

    def _record(self, shape: BatchShape) -> RecordedGraph:
        """Record a graph. The static batch holds no sequence yet, so recording touches no page in
        use.
        """
        batch, shared = self._cache.static_batch(shape, self._table), self._shared_shapes.get(shape)
        has_trees = shape in self._tree_shapes
        graph = torch.cuda.CUDAGraph()
        stream = recording_stream(self._cache.device)
        # thread_local: allocations of other threads do not break the capture.
        how = {"pool": self._pool, "stream": stream, "capture_error_mode": "thread_local"}
        with _capture_lock, torch.cuda.device(self._cache.device):
            # Compile kernels and compute frequencies before the capture.
            self._forward(batch, shared, has_trees)
            with torch.cuda.graph(graph, **how):
                hidden = self._forward(batch, shared, has_trees)
        return RecordedGraph(graph, batch, hidden)

    def _forward(
        self, batch: PagedBatch, shared: SharedShape | None = None, has_trees: bool = False
    ) -> Tensor:
        """In the batch of a mixed step, rows follow the ids. The numbers of trees or of a cascade
        come last.
        """
        num_tokens, num_extra = batch.slot_mapping.shape[0], batch.extra.shape[0]
        if has_trees:
            num_extra -= count_tree_numbers(num_tokens)
            batch = batch.grow_trees(batch.extra[num_extra:])
        if shared is not None:
            num_extra -= shared.num_numbers(batch.page_table.shape[0], num_tokens)
            batch = batch.share(batch.extra[num_extra:], shared, self._cache.spec.page_size)
        tokens = fill_in_sampled(batch.extra[:num_tokens], self._last)
        rows = None if batch.max_seqlen_q == 1 else batch.extra[num_tokens:num_extra]
        return self._model(tokens, positions_of(batch), batch, self._cache, rows)


@cache
def recording_stream(device: torch.device) -> "torch.cuda.Stream":
    """One stream per device, never freed: libraries keep memory for every stream they have seen.
    Torch's own capture stream belongs to the device of the first capture and cannot capture on
    another.
    """
    return torch.cuda.Stream(device)


def batch_sizes(most: int) -> list[int]:
    """Batch sizes with a graph, denser where padding would cost most."""
    steps = range(_FIRST_SIZES[-1] + _SIZE_STEP, most, _SIZE_STEP)
    return [size for size in (*_FIRST_SIZES, *steps) if size < most] + [most]


def chunk_sizes(most: int) -> list[int]:
    """Batch sizes with a graph for chunks of few tokens: powers of two."""
    return [1 << i for i in range(most.bit_length()) if 1 << i < most] + [most]


def shared_sizes(most: int) -> list[int]:
    """Batch sizes with a graph for a cascade: powers of two."""
    sizes = [_SHARED_SIZE << i for i in range(most.bit_length())]
    return [size for size in sizes if size < most] + [most]


def _join(size: int, parts: dict[int, Tensor]) -> Tensor:
    """int32 numbers, each part at its place, zeros in between."""
    joined = torch.zeros(size, dtype=torch.int32)
    for at, part in parts.items():
        joined[at : at + len(part)] = part
    return joined


def can_record(model: Model, cache: KVCache) -> bool:
    """Whether steps can be recorded in graphs. Modules of transformers may branch on values of
    tensors, which a graph cannot record, most forms of experts read values on the host, and so
    does `tiled`, which serves what no kernel of a GPU does.
    """
    if not isinstance(model, Decoder) or cache.device.type != "cuda" or not model.is_recordable:
        return False
    chosen = dispatch.plan(layer_call(model, cache, 1), device_info(cache.device))
    return chosen.kernel != "tiled"


def fill_in_sampled(ids: Tensor, last: Tensor) -> Tensor:
    """Replace each id ~i by the i-th token that the last step sampled."""
    return torch.where(ids < 0, last[(~ids).clamp_(min=0)], ids)
