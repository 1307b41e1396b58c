"""FlashAttention v2's loop in torch: queries outside, keys inside, one division at the end, lse
saved, backward by recomputation.

Every option of the contract on any torch device. Products and softmax run in fp32 (fp64 for fp64
inputs), and no temporary is larger than one tile of scores per head.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from onchip.core.backend import (
    Grads,
    Result,
    Stats,
    accumulator_dtype,
    empty_result,
    grad_dtype,
    make_backend,
    row_delta,
    sink_gradient,
)
from onchip.core.problem import DeviceInfo, Problem, Tensors
from onchip.core.state import State, add_sink, finalize
from onchip.kernels.cpu.head_slice import Plane, planes
from onchip.kernels.cpu.scores import Rectangle, Scorer, grouped_matmul, sum_over_groups
from onchip.kernels.tiles import tiled_config
from onchip.masks.blockmask import BLOCK


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    if problem.dtype == torch.float64 and device.type != "cpu":
        return "float64 is served on the CPU"
    return None


def forward(problem: Problem, x: Tensors) -> Result:
    out, lse = empty_result(problem, x)
    stats = Stats(torch.empty_like(lse), torch.empty_like(lse)) if problem.return_stats else None
    for plane in planes(problem, x):
        scorer = Scorer(problem, x, plane)
        q, k, v = _operands(problem, x, plane)
        for q0, q1 in _row_tiles(plane, q):
            state, weighted = _fold_row_tile(scorer, q[:, :, q0:q1], k, v, q0)
            if stats is not None:
                plane.of_rows(stats.max_logit)[:, :, q0:q1] = state.m
            if x.sinks is not None:
                state, weighted = _with_sink(state, weighted, x.sinks[plane.heads])
            tile_out, tile_lse = finalize(state)
            plane.of_queries(out)[:, q0:q1] = tile_out.transpose(1, 2)
            plane.of_rows(lse)[:, :, q0:q1] = tile_lse
            if weighted is not None:
                plane.of_rows(stats.entropy)[:, :, q0:q1] = _entropy(state, weighted, tile_lse)
    return Result(out, lse, stats)


def _fold_row_tile(
    scorer: Scorer, q: Tensor, k: Tensor, v: Tensor, q0: int
) -> tuple[State, Tensor | None]:
    """The state of one tile of queries over all keys it sees, and the running sum of p * s where
    statistics are asked for.
    """
    m = q.new_full(q.shape[:-1], -torch.inf)
    l = torch.zeros_like(m)
    acc = q.new_zeros(*q.shape[:-1], v.shape[-1])
    weighted = torch.zeros_like(m) if scorer.problem.return_stats else None
    for at in _rectangles(scorer.plane, q, q0):
        s, _ = scorer.scores(q, k[:, :, at.k0 : at.k1], at)
        m_new = torch.maximum(m, s.amax(-1))
        pivot = m_new.masked_fill(m_new == -torch.inf, 0.0)  # rows that have seen nothing yet
        alpha = torch.exp(m - pivot)
        p = torch.exp(s - pivot[..., None])
        l = l * alpha + p.sum(-1)
        if weighted is not None:
            weighted = weighted * alpha + (p * s.masked_fill(p == 0, 0.0)).sum(-1)
        acc = acc * alpha[..., None] + grouped_matmul(scorer.dropped(p, at), v[:, :, at.k0 : at.k1])
        m = m_new
    return State(m, l, acc), weighted


def _with_sink(state: State, weighted: Tensor | None, sinks: Tensor) -> tuple[State, Tensor | None]:
    sink = sinks.to(state.m.dtype)[:, None]
    new = add_sink(state, sink)
    if weighted is not None:
        pivot = new.m.masked_fill(new.m == -torch.inf, 0.0)
        p = torch.exp(sink - pivot)
        weighted = weighted * torch.exp(state.m - pivot) + p * sink.masked_fill(p == 0, 0.0)
    return new, weighted


def _entropy(state: State, weighted: Tensor, lse: Tensor) -> Tensor:
    """H = lse - E[s]; 0 for a row that sees nothing."""
    return torch.where(state.l > 0, lse - weighted / state.l, 0.0)


def backward(
    problem: Problem, x: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    wide = accumulator_dtype(problem.dtype)
    dq, dk, dv = (t.new_zeros(t.shape, dtype=wide) for t in (x.q, x.k, x.v))
    dbias = None if x.bias is None else x.bias.new_zeros(x.bias.shape, dtype=wide)
    delta = row_delta(out, dout, dlse)
    safe_lse = lse.masked_fill(lse == -torch.inf, 0.0)  # such rows have s = -inf throughout: p = 0
    for plane in planes(problem, x):
        _backward_plane(Scorer(problem, x, plane), safe_lse, delta, dout, (dq, dk, dv, dbias))
    dsinks = None if x.sinks is None else sink_gradient(x.sinks, lse, delta)
    dq, dk, dv = (t.to(grad_dtype(problem)) for t in (dq, dk, dv))
    return Grads(dq, dk, dv, dbias, dsinks)


def _backward_plane(
    scorer: Scorer,
    lse: Tensor,
    delta: Tensor,
    dout: Tensor,
    grads: tuple[Tensor, Tensor, Tensor, Tensor | None],
) -> None:
    """Recompute p tile by tile and add this plane's share to the gradients, in place."""
    problem, plane = scorer.problem, scorer.plane
    q, k, v = _operands(problem, scorer.x, plane)
    dout = plane.of_queries(dout).transpose(1, 2).to(q.dtype)
    lse, delta = plane.of_rows(lse)[..., None], plane.of_rows(delta)[..., None]
    dq = plane.of_queries(grads[0]).transpose(1, 2)
    dk, dv = (plane.of_keys(t).transpose(1, 2) for t in grads[1:3])
    for q0, q1 in _row_tiles(plane, q):
        rows = slice(q0, q1)
        for at in _rectangles(plane, q[:, :, rows], q0):
            keys = slice(at.k0, at.k1)
            s, bend = scorer.scores(q[:, :, rows], k[:, :, keys], at)
            p = torch.exp(s - lse[:, :, rows])
            dp = grouped_matmul(dout[:, :, rows], v[:, :, keys].transpose(-1, -2))
            dv[:, :, keys] += sum_over_groups(scorer.dropped(p, at), dout[:, :, rows], k.shape[1])
            ds = p * (scorer.dropped(dp, at) - delta[:, :, rows])
            if grads[3] is not None:
                scorer.add_bias_gradient(grads[3], ds, at)
            ds = ds * problem.softmax_scale if bend is None else ds * bend * problem.softmax_scale
            dq[:, :, rows] += grouped_matmul(ds, k[:, :, keys])
            dk[:, :, keys] += sum_over_groups(ds, q[:, :, rows], k.shape[1])


def _operands(problem: Problem, x: Tensors, plane: Plane) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a plane as (batch, heads, seqlen, dim) in accumulator precision; views when no
    conversion is needed.
    """
    wide = accumulator_dtype(problem.dtype)
    views = plane.of_queries(x.q), plane.of_keys(x.k), plane.of_keys(x.v)
    q, k, v = (t.transpose(1, 2).to(wide) for t in views)
    return q, k, v


def _row_tiles(plane: Plane, q: Tensor) -> Iterator[tuple[int, int]]:
    batch, heads, seqlen_q, _ = q.shape
    tile_m = tiled_config(max(1, batch * heads)).tile_m
    if plane.visibility.mask is not None:
        tile_m = min(tile_m, BLOCK)  # a row must not meet a block that is EMPTY to it
    for q0 in range(0, seqlen_q, tile_m):
        yield q0, min(q0 + tile_m, seqlen_q)


def _rectangles(plane: Plane, q: Tensor, q0: int) -> Iterator[Rectangle]:
    """The tiles of keys that some query of this row tile sees."""
    batch, heads, rows, _ = q.shape
    tile_n = tiled_config(max(1, batch * heads)).tile_n
    for k0, k1 in plane.visibility.spans(q0, q0 + rows):
        for n in range(k0, k1, tile_n):
            yield Rectangle(q0, q0 + rows, n, min(n + tile_n, k1))


backend = make_backend(supports, forward, backward)
