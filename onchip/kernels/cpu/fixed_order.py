"""The forward of `tiled` with reproducible=True: every row folds the same tiles of keys in the same
order, by products of one shape.

    sequence of 150 keys    tiles of 64 keys from position 0:  [0, 64) [64, 128) [128, 192)
    queries at 130 ... 149  tiles of TILE_ROWS / group_size queries: 130 ... 137, 138 ... 145, ...
    one query at 130        the same tile of queries; its other rows repeat the query
    (group_size 4)

    tile of queries   (kv_heads, 32 rows, head_dim)     s = q k^T      (kv_heads, 32 rows, 64 keys)
    tile of keys      (kv_heads, 64 keys, head_dim)     acc += p v     (kv_heads, 32 rows, head_dim)

So the bits of a row depend on its query and on the keys that it sees. A tile of keys of which a row
sees none changes no bit of its state: alpha is 1 and p is 0. Tiles of queries of all sequences are
one batch of products, and the bits of one product do not depend on the batch (checked by
tests/kernels/cpu/test_fixed_order.py, and for a model by `models/order_check.py`). One thread
computes: with more, torch cuts operations at other elements, and MKL the sums of a product.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.backend import Result, accumulator_dtype, empty_result
from onchip.core.machine import one_thread
from onchip.core.problem import Problem, Tensors
from onchip.core.state import State, add_sink, finalize, fold_tiles

TILE_ROWS, TILE_KEYS = 32, 64
# Elements of the scores of one batch of tiles, 4 MB in fp32.
_BATCH_ELEMENTS = 1 << 20
SERVED = {"causal", "window_size", "packed", "softcap", "has_sinks", "deterministic"}


class QueryTile(NamedTuple):
    """Queries [row, row + queries) of one sequence: their rows in q, the position of the first one
    among the keys, and the sequence's keys [key, key + seqlen_k) as rows of k.
    """

    row: int
    queries: int
    position: int
    key: int
    seqlen_k: int

    def key_tiles(self, left: int | None, right: int | None) -> range:
        """The numbers of the tiles of keys that at least one of the queries sees."""
        last = self.position + self.queries - 1
        first_key = 0 if left is None else max(0, self.position - left)
        end = self.seqlen_k if right is None else min(self.seqlen_k, last + right + 1)
        return range(first_key // TILE_KEYS, max(0, -(-end // TILE_KEYS)))


def forward(problem: Problem, x: Tensors) -> Result:
    out, lse = empty_result(problem, x)
    qkv = [t if problem.packed else t.flatten(0, 1) for t in (x.q, x.k, x.v)]
    rows_out = out if problem.packed else out.flatten(0, 1)
    rows_lse = lse.new_empty(rows_out.shape[:2])
    with one_thread():
        for tiles in _batches(problem, x):
            at, is_row = _index_rows(problem, tiles)
            tile_out, tile_lse = _attend(problem, x.sinks, qkv, tiles, at)
            rows_out[at[is_row]] = tile_out[is_row].to(out.dtype)
            rows_lse[at[is_row]] = tile_lse[is_row]
    lse.copy_(rows_lse.T if problem.packed else rows_lse.unflatten(0, out.shape[:2]).mT)
    return Result(out, lse)


def _query_tiles(problem: Problem, x: Tensors) -> Iterator[QueryTile]:
    size = _queries_per_tile(problem)
    for row, seqlen_q, key, seqlen_k in _sequences(problem, x):
        for start in range(0, seqlen_q, size):
            position = start + seqlen_k - seqlen_q
            count = min(size, seqlen_q - start)
            yield QueryTile(row + start, count, position, key, seqlen_k)


def _sequences(problem: Problem, x: Tensors) -> Iterator[tuple[int, int, int, int]]:
    """(first row, seqlen_q, first key, seqlen_k) of each sequence."""
    if not problem.packed:
        seqlen_q, seqlen_k = problem.seqlen_q, problem.seqlen_k
        for b in range(problem.batch):
            yield b * seqlen_q, seqlen_q, b * seqlen_k, seqlen_k
        return
    offsets_q, offsets_k = x.cu_seqlens_q.tolist(), x.cu_seqlens_k.tolist()
    for b in range(problem.batch):
        row, key = offsets_q[b], offsets_k[b]
        yield row, offsets_q[b + 1] - row, key, offsets_k[b + 1] - key


def _batches(problem: Problem, x: Tensors) -> Iterator[list[QueryTile]]:
    """The tiles of queries, so many at a time that their scores fit a cache. Tiles with as many
    tiles of keys are together: the loop over keys ends with the longest.
    """
    tiles = list(_query_tiles(problem, x))
    tiles.sort(key=lambda tile: tile.key_tiles(*problem.window).stop)
    count = max(1, _BATCH_ELEMENTS // (problem.num_kv_heads * TILE_ROWS * TILE_KEYS))
    for start in range(0, len(tiles), count):
        yield tiles[start : start + count]


def _queries_per_tile(problem: Problem) -> int:
    return max(1, TILE_ROWS // problem.group_size)


def _index_rows(problem: Problem, tiles: list[QueryTile]) -> tuple[Tensor, Tensor]:
    """int64 (tiles, queries): the rows of q, the last one repeated; bool: False for repetitions."""
    step = torch.arange(_queries_per_tile(problem))
    row, count = (torch.tensor(column)[:, None] for column in list(zip(*tiles, strict=True))[:2])
    return row + step.clamp(max=count - 1), step < count


def _attend(
    problem: Problem, sinks: Tensor | None, qkv: list[Tensor], tiles: list[QueryTile], at: Tensor
) -> tuple[Tensor, Tensor]:
    """out (tiles, queries, heads, head_dim_v) and lse (tiles, queries, heads)."""
    q, k, v = qkv
    kv_heads, wide = problem.num_kv_heads, accumulator_dtype(problem.dtype)
    # (tiles * kv_heads, group_size * queries, head_dim)
    rows = q[at].to(wide).mul_(problem.softmax_scale).transpose(1, 2)
    rows = rows.reshape(len(tiles) * kv_heads, -1, problem.head_dim)
    ranges = [tile.key_tiles(*problem.window) for tile in tiles]
    numbers = range(min(r.start for r in ranges), max(r.stop for r in ranges))
    loader = partial(_load_keys, tiles=tiles, wide=wide)

    def score(number: int) -> Tensor:
        s = torch.bmm(rows, loader(k, number=number).transpose(1, 2))
        if problem.softcap:
            s = s.div_(problem.softcap).tanh_().mul_(problem.softcap)
        s = s.view(len(tiles), -1, at.shape[1], TILE_KEYS)
        hidden = _hidden_keys(problem, tiles, number, at.shape[1])
        return s.masked_fill_(hidden[:, None], -torch.inf).view(*rows.shape[:2], TILE_KEYS)

    def add_values(acc: Tensor, p: Tensor, number: int) -> Tensor:
        return acc + torch.bmm(p, loader(v, number=number))

    state, _ = fold_tiles(rows, problem.head_dim_v, numbers, score, add_values)
    return _finish(problem, state, sinks, at)


def _load_keys(t: Tensor, tiles: list[QueryTile], wide: torch.dtype, number: int) -> Tensor:
    """(tiles * kv_heads, TILE_KEYS, dim) of the keys of this tile. Past the end of a sequence its
    last key is repeated, which `_hidden_keys` hides.
    """
    step = torch.arange(number * TILE_KEYS, (number + 1) * TILE_KEYS)
    key, seqlen_k = (torch.tensor(column)[:, None] for column in list(zip(*tiles, strict=True))[3:])
    at = (key + step.clamp(max=seqlen_k - 1)).clamp_(0, len(t) - 1)
    rows = t.index_select(0, at.view(-1)).view(*at.shape, *t.shape[1:]).to(wide)
    return rows.transpose(1, 2).reshape(-1, TILE_KEYS, t.shape[-1])


def _hidden_keys(problem: Problem, tiles: list[QueryTile], number: int, queries: int) -> Tensor:
    """bool (tiles, queries, TILE_KEYS)"""
    j = torch.arange(number * TILE_KEYS, (number + 1) * TILE_KEYS)
    position, seqlen_k = (torch.tensor([tile[i] for tile in tiles])[:, None, None] for i in (2, 4))
    ahead = j - (position + torch.arange(queries)[:, None])
    hidden, (left, right) = (j >= seqlen_k).expand_as(ahead), problem.window
    hidden = hidden if right is None else hidden | (ahead > right)
    return hidden if left is None else hidden | (ahead < -left)


def _finish(
    problem: Problem, state: State, sinks: Tensor | None, at: Tensor
) -> tuple[Tensor, Tensor]:
    by_head = lambda t: t.view(len(at), problem.num_heads, at.shape[1], *t.shape[2:])
    state = State(*map(by_head, state))
    if sinks is not None:
        state = add_sink(state, sinks.to(state.m.dtype)[:, None])
    out, lse = finalize(state)
    return out.transpose(1, 2), lse.transpose(1, 2)
