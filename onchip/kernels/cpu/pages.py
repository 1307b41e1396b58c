"""Decoding on the CPU: few queries of many sequences over pages. Sequences of similar lengths are
computed together, because a loop over sequences would spend its time between the products.

A bucket of sequences is padded to its longest. Keys and values are copied out of the pages tile by
tile, a tile at most as large as a cache, and each tile is folded into the state of its rows.
Padding repeats the last key of its sequence and is masked: no unwritten slot is read.
"""

from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple, cast

import torch
from torch import Tensor

from onchip.core.backend import Backend, Result, accumulator_dtype, empty_result, make_backend
from onchip.core.device import DeviceInfo
from onchip.core.problem import Problem, Tensors, keys_hold_values
from onchip.core.state import State, add_sink, finalize, lift, merge
from onchip.quant.kv8 import dequantise

OPTIONS = {
    *("causal", "window_size", "softcap", "has_alibi", "has_sinks"),
    *("page_size", "page_dtype"),
}
MAX_SEQLEN_Q = 8
# Elements of the keys that are copied at a time, 4 MB in fp32. Half of it took as long; twice or an
# eighth of it took a third longer (Xeon with 2 MB of L2 a core, 2026-11-15).
_TILE = 1 << 20
_BUCKET_COST = 1 << 17  # a bucket costs 150 us besides its keys: as much as so many elements


class SequenceBucket(NamedTuple):
    """Sequences that are computed together: their batch indices, int64 (n,); the first key that any
    of their queries sees, and their number of keys, int64 (n, 1).
    """

    at: Tensor
    first: Tensor
    seqlen_k: Tensor
    longest: int  # keys from the first on

    @classmethod
    def of(cls, seqlens: Tensor, first: Tensor, at: Tensor, longest: int) -> "SequenceBucket":
        pick = lambda t: t.index_select(0, at)[:, None]
        return cls(at, pick(first), pick(seqlens), longest)


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    if device.type != "cpu":
        return f"runs on the CPU only, not on {device.type}"
    if not problem.page_size:
        return "serves paged keys only"
    if problem.packed or problem.seqlen_q > MAX_SEQLEN_Q:
        return f"serves the same number of queries for all sequences, at most {MAX_SEQLEN_Q}"
    if problem.deterministic:
        return "has no deterministic mode: the bits of a sequence depend on its bucket"
    return None


def forward(problem: Problem, x: Tensors) -> Result:
    out, lse = empty_result(problem, x)
    for bucket in _buckets(problem, x):
        state = _fold(problem, x, bucket)
        if x.sinks is not None:
            state = add_sink(state, x.sinks.to(lse.dtype)[:, None])
        rows, row_lse = finalize(state)
        out.index_copy_(0, bucket.at, rows.transpose(1, 2).to(out.dtype))
        lse.index_copy_(0, bucket.at, row_lse)
    return Result(out, lse)


def _buckets(problem: Problem, x: Tensors) -> Iterator[SequenceBucket]:
    """Buckets, from the longest sequences to the shortest. A bucket ends when it would be more
    padding than keys and another bucket is cheaper, or when it fills a tile. Sequences without keys
    have a bucket of their own: no key could pad them.
    """
    seqlens = cast(Tensor, x.cache_seqlens).long()
    first = _first(problem, seqlens)
    counts, at = (seqlens - first).sort(descending=True)
    width = problem.num_kv_heads * problem.head_dim
    start = used = padded = 0
    keys = counts.tolist()
    for i, count in enumerate(keys):
        longest = keys[start]
        used, padded = used + count, padded + longest - count
        sparse = padded > max(used - count, _BUCKET_COST // width)
        full = (i + 1 - start) * longest * width > _TILE
        if i > start and (sparse or full or (longest and not count)):
            yield SequenceBucket.of(seqlens, first, at[start:i], longest)
            start, used, padded = i, count, 0
    if keys:
        yield SequenceBucket.of(seqlens, first, at[start:], keys[start])


def _first(problem: Problem, seqlens: Tensor) -> Tensor:
    left = problem.window_size[0]
    if left is None:
        return torch.zeros_like(seqlens)
    return (seqlens - problem.seqlen_q - left).clamp_(min=0)


def _fold(problem: Problem, x: Tensors, bucket: SequenceBucket) -> State:
    """m, l (n, heads, seqlen_q), acc (n, heads, seqlen_q, head_dim_v) over all keys."""
    n, wide = len(bucket.at), accumulator_dtype(problem.dtype)
    rows = problem.num_kv_heads, problem.group_size * problem.seqlen_q
    q = x.q.index_select(0, bucket.at).transpose(1, 2).to(wide) * problem.softmax_scale
    q = q.reshape(n, *rows, problem.head_dim)
    tile_n = max(1, _TILE // (n * problem.num_kv_heads * problem.head_dim))
    states = []
    for start in range(0, max(1, bucket.longest), tile_n):
        keys = bucket.first + torch.arange(start, min(start + tile_n, bucket.longest))
        k, v = _gather(x, _slots(x, bucket, keys), wide)
        s = _scores(problem, x, bucket, keys, q @ k.transpose(-1, -2))
        states.append(lift(s.view(n, *rows, keys.shape[1]), v))
    m, l, acc = reduce(merge, states)
    shape = n, problem.num_heads, problem.seqlen_q
    return State(m.view(shape), l.view(shape), acc.view(*shape, problem.head_dim_v))


def _slots(x: Tensors, bucket: SequenceBucket, keys: Tensor) -> Tensor:
    """The slots of the keys (n, tile_n) of a bucket; keys past the end repeat the last one."""
    page_size = x.k.shape[1]
    keys = torch.minimum(keys, bucket.seqlen_k - 1)
    pages = x.page_table.index_select(0, bucket.at).gather(1, keys // page_size)
    return pages.long() * page_size + keys % page_size


def _gather(x: Tensors, slots: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """k and v of the slots (n, tile_n) in a wider dtype: (n, num_kv_heads, tile_n, dim)."""
    k = _select(x.k, x.k_scales, slots, wide)
    if keys_hold_values(x):
        return k, k[..., : x.v.shape[3]]
    return k, _select(x.v, x.v_scales, slots, wide)


def _select(pages: Tensor, scales: Tensor | None, slots: Tensor, wide: torch.dtype) -> Tensor:
    _, page_size, num_kv_heads, dim = pages.shape
    at = slots // page_size, slots % page_size
    if pages.is_contiguous():
        rows = slots[:, None] * num_kv_heads + torch.arange(num_kv_heads)[:, None]
        selected = pages.view(-1, dim).index_select(0, rows.view(-1)).view(*rows.shape, dim)
    else:  # viewing pages as rows of one head would copy them
        selected = pages[at].transpose(1, 2)
    if scales is None:
        return selected.to(wide)
    return dequantise(selected, scales[at].transpose(1, 2), wide)


def _scores(
    problem: Problem, x: Tensors, bucket: SequenceBucket, keys: Tensor, s: Tensor
) -> Tensor:
    """The score of the contract, (n, heads, seqlen_q, tile_n), computed in place of s:
    softmax_scale * q.k of the same shape.
    """
    s = s.view(len(s), problem.num_heads, problem.seqlen_q, keys.shape[1])
    if problem.softcap:
        s = s.div_(problem.softcap).tanh_().mul_(problem.softcap)
    if x.alibi_slopes is not None:
        slopes = x.alibi_slopes if x.alibi_slopes.dim() == 1 else x.alibi_slopes[bucket.at]
        s -= slopes.to(s.dtype)[..., None, None] * _ahead(problem, bucket, keys).abs()
    return s.masked_fill_(_hidden_keys(problem, bucket, keys), -torch.inf)


def _ahead(problem: Problem, bucket: SequenceBucket, keys: Tensor) -> Tensor:
    """The distance of a key after a query, (n, 1, seqlen_q, tile_n)."""
    position = torch.arange(problem.seqlen_q) + (bucket.seqlen_k - problem.seqlen_q)
    return keys[:, None, None] - position[:, None, :, None]


def _hidden_keys(problem: Problem, bucket: SequenceBucket, keys: Tensor) -> Tensor:
    """Keys hidden by the end of the sequence, causal and window, (n, 1, seqlen_q | 1, tile_n). A
    single query has the position of the last key, and a bucket starts at the first key that it
    sees.
    """
    hidden = (keys >= bucket.seqlen_k)[:, None, None]
    if problem.seqlen_q == 1:
        return hidden
    ahead, (left, right) = _ahead(problem, bucket, keys), problem.window
    hidden = hidden if right is None else hidden | (ahead > right)
    return hidden if left is None else hidden | (ahead < -left)


backend: Backend = make_backend(supports, forward, options=OPTIONS)
