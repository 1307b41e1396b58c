"""CUDA graphs without a GPU: what a replay computes, from the same static batches."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from onchip.engine.cuda_graphs import RecordedGraph, StepGraphs
from onchip.kvcache import PagedBatch
from onchip.kvcache.draft_trees import count_tree_numbers


class Again(NamedTuple):
    replay: Callable


class Replayed(StepGraphs):
    """Graphs on the CPU: a replay computes the static batch. The padding, which a GPU computes and
    ignores, is left out. Needs torch.cuda.graph_pool_handle to be replaced.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.used = set()

    def _record(self, shape):
        batch = self._cache.static_batch(shape, self._table)
        has_trees, tokens = shape in self._tree_shapes, shape.num_tokens
        num_numbers = shape.num_extra - tokens - has_trees * count_tree_numbers(tokens)
        num_rows = max(shape.num_seqs, num_numbers)
        hidden = torch.full((num_rows, self._model.config.hidden_size), float("nan"))
        rows = slice(tokens, tokens + num_numbers)
        replay = lambda: self._compute(batch, hidden, rows, has_trees)
        return RecordedGraph(Again(replay), batch, hidden)

    def _compute(self, batch, hidden, at, has_trees):
        seqs, tokens = int((batch.cu_seqlens_q.diff() > 0).sum()), int(batch.cu_seqlens_q[-1])
        assert not batch.cache_seqlens[seqs:].any() and (batch.slot_mapping[tokens:] == -1).all()
        assert batch.cu_seqlens_q.diff().max() <= batch.max_seqlen_q
        trees = batch.extra[at.stop :][: has_trees * count_tree_numbers(tokens)]
        shown = [batch.page_table[:seqs], batch.cache_seqlens[:seqs], batch.slot_mapping[:tokens]]
        shown += [batch.cu_seqlens_q[: seqs + 1], batch.max_seqlen_q, batch.buffer]
        self.used.add(batch.shape[:2])
        hidden.fill_(float("nan"))
        extra = torch.cat([batch.extra[:tokens], batch.extra[at], trees])
        got = self._forward(PagedBatch(*shown, extra), has_trees=has_trees)
        hidden[: len(got)] = got
