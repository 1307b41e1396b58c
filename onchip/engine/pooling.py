"""Embeddings: one vector for a prompt, from the hidden states of its tokens.

    last: of the last token             the prefix may come from the cache
    mean: of all tokens, averaged       every token is computed

A request with `PoolingParams` computes its prompt and ends: no logits are computed, and nothing is
sampled. The vector has the norm 1, in fp32. Example, mean: the chunks 0-6 and 7-9 of a prompt of 10
tokens add their hidden states to one sum, which is divided by its norm (the mean has the same
direction).
"""

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.engine.request import Request
from onchip.engine.step import Chunk, ScheduledStep


def needs_all_rows(step: ScheduledStep) -> bool:
    """A chunk adds the hidden states of all of its tokens."""
    return any([_is_mean(chunk.sample.request) for chunk in step.chunks])


class PooledRows(NamedTuple):
    """Rows of a step that an embedding adds up. is_last: no more rows of the request follow."""

    request: Request
    rows: range
    is_last: bool


def claim_rows(step: ScheduledStep, ends: Sequence[int]) -> list[PooledRows]:
    """The rows of the embeddings of a step that is being launched. ends: where each chunk ends
    among the tokens of the step. They are counted now, not when the step is collected: a prompt
    that was preempted meanwhile and is recomputed adds no token twice.
    """
    claimed = []
    for chunk, end in zip(step.chunks, ends, strict=True):
        request = chunk.sample.request
        if request.pooling is not None and (new := _num_new_rows(chunk)):
            request.num_pooled += new
            is_last = chunk.stop == len(request.prompt_token_ids)
            claimed.append(PooledRows(request, range(end - new, end), is_last))
    return claimed


def _num_new_rows(chunk: Chunk) -> int:
    request = chunk.sample.request
    if _is_mean(request):
        return max(0, chunk.stop - max(chunk.start, request.num_pooled))
    return int(chunk.stop == len(request.prompt_token_ids) and not request.num_pooled)


def _is_mean(request: Request) -> bool:
    return request.pooling is not None and request.pooling.pooling == "mean"


def add_rows(pooled: PooledRows, rows_sum: Tensor) -> None:
    """Add the sum of the rows, fp32 (width,) on the host. After the last row, the request's
    `pooled` is its embedding, or None if it is not finite.
    """
    request = pooled.request
    total = rows_sum if request.pooled is None else rows_sum + _as_tensor(request.pooled)
    request.pooled = _normalize(total) if pooled.is_last else array("f", total.tolist())


def _as_tensor(numbers: array) -> Tensor:
    return torch.frombuffer(numbers, dtype=torch.float32)


def _normalize(vector: Tensor) -> array | None:
    """The vector with the norm 1; None if it has no direction."""
    vector = vector.double()  # squares of fp32 may overflow
    norm = vector.norm().item()
    return array("f", (vector / norm).tolist()) if 0 < norm < math.inf else None
