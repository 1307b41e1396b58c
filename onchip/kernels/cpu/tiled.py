"""FlashAttention v2 in torch: the outer loop over tiles of queries, the inner loop over tiles of
keys, one division at the end, lse saved, backward by recomputation.

Supports every option of the contract on any torch device. Products and softmax run in fp32 (fp64
for fp64 inputs). No temporary is larger than one tile of scores per head.
"""

import torch
from torch import Tensor

from onchip.core.backend import (
    Backend,
    Grads,
    Result,
    Stats,
    accumulator_dtype,
    empty_result,
    grad_dtype,
    lacks,
    make_backend,
    row_delta,
    sink_gradient,
)
from onchip.core.device import DeviceInfo
from onchip.core.problem import Problem, Tensors
from onchip.core.state import State, add_sink, finalize, fold_tiles
from onchip.kernels.cpu import fixed_order
from onchip.kernels.cpu.head_slice import head_slices
from onchip.kernels.cpu.scores import Scorer, TileBounds, grouped_matmul, sum_over_groups
from onchip.kernels.cpu.second import tangent_gradients
from onchip.kernels.cpu.tangent import supports_tangents, tangents
from onchip.kernels.cpu.tile_loop import key_tiles, load_operands, row_tiles

# Every option but those of pages, which are gathered first.
OPTIONS = {
    *("causal", "window_size", "packed", "has_mask", "deterministic", "return_stats"),
    *("softcap", "score_mod", "has_alibi", "has_bias", "has_sinks"),
    *("dropout_p", "has_positions", "first_head", "wide_grads", "reproducible"),
}


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    if problem.dtype == torch.float64 and device.type != "cpu":
        return "float64 is served on the CPU"
    return _refuse_reproducible(problem, device) if problem.reproducible else None


def _refuse_reproducible(problem: Problem, device: DeviceInfo) -> str | None:
    if device.type != "cpu":
        return f"computes with reproducible=True on the CPU only, not on {device.type}"
    if problem.page_dtype is not None:
        return "has no 8-bit pages with reproducible=True"
    reason = lacks(problem, {*fixed_order.SERVED, "page_size", "reproducible"})
    return reason and f"{reason} with reproducible=True"


def forward(problem: Problem, x: Tensors) -> Result:
    if problem.reproducible:
        return fixed_order.forward(problem, x)
    out, lse = empty_result(problem, x)
    stats = Stats(torch.empty_like(lse), torch.empty_like(lse)) if problem.return_stats else None
    for head_slice in head_slices(problem, x):
        scorer = Scorer(problem, x, head_slice)
        q, k, v = load_operands(problem, x, head_slice)
        for q0, q1 in row_tiles(head_slice, q):
            state, weighted = _fold_row_tile(scorer, q[:, :, q0:q1], k, v, q0)
            if stats is not None:
                head_slice.take_rows(stats.max_logit)[:, :, q0:q1] = state.m
            if x.sinks is not None:
                state, weighted = _with_sink(state, weighted, x.sinks[head_slice.heads])
            tile_out, tile_lse = finalize(state)
            head_slice.take_queries(out)[:, q0:q1] = tile_out.transpose(1, 2)
            head_slice.take_rows(lse)[:, :, q0:q1] = tile_lse
            if weighted is not None:
                entropy = _entropy(state, weighted, tile_lse)
                head_slice.take_rows(stats.entropy)[:, :, q0:q1] = entropy
    return Result(out, lse, stats)


def _fold_row_tile(
    scorer: Scorer, q: Tensor, k: Tensor, v: Tensor, q0: int
) -> tuple[State, Tensor | None]:
    """The state of one tile of queries over all keys that it sees, and the running sum of p * s if
    the call returns statistics.
    """

    def score(at: TileBounds) -> Tensor:
        return scorer.scores(q, k[:, :, at.k0 : at.k1], at).s

    def add_values(acc: Tensor, p: Tensor, at: TileBounds) -> Tensor:
        return acc + grouped_matmul(scorer.apply_dropout(p, at), v[:, :, at.k0 : at.k1])

    tiles = key_tiles(scorer.head_slice, q, q0)
    return fold_tiles(q, v.shape[-1], tiles, score, add_values, scorer.problem.return_stats)


def _with_sink(state: State, weighted: Tensor | None, sinks: Tensor) -> tuple[State, Tensor | None]:
    sink = sinks.to(state.m.dtype)[:, None]
    new = add_sink(state, sink)
    if weighted is not None:
        pivot = new.m.masked_fill(new.m == -torch.inf, 0.0)
        p = torch.exp(sink - pivot)
        weighted = weighted * torch.exp(state.m - pivot) + p * sink.masked_fill(p == 0, 0.0)
    return new, weighted


def _entropy(state: State, weighted: Tensor, lse: Tensor) -> Tensor:
    """H = lse - E[s]; 0 for a row that sees no key."""
    return torch.where(state.l > 0, lse - weighted / state.l, 0.0)


def backward(
    problem: Problem, x: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    wide = accumulator_dtype(problem.dtype)
    dq, dk, dv = (t.new_zeros(t.shape, dtype=wide) for t in (x.q, x.k, x.v))
    captured = None if problem.captured_is_constant else x.captured
    dbias, dcaptured = (
        None if t is None else t.new_zeros(t.shape, dtype=wide) for t in (x.bias, captured)
    )
    sums = Grads(dq, dk, dv, dbias, dcaptured=dcaptured)
    delta = row_delta(out, dout, dlse)
    safe_lse = lse.masked_fill(lse == -torch.inf, 0.0)  # such rows have s = -inf throughout: p = 0
    for head_slice in head_slices(problem, x):
        scorer = Scorer(problem, x, head_slice)
        _backward_head_slice(scorer, safe_lse, delta, dout, sums)
    dsinks = None if x.sinks is None else sink_gradient(x.sinks, lse, delta)
    dq, dk, dv = (t.to(grad_dtype(problem)) for t in (dq, dk, dv))
    return Grads(dq, dk, dv, dbias, dsinks, dcaptured)


def _backward_head_slice(
    scorer: Scorer,
    lse: Tensor,
    delta: Tensor,
    dout: Tensor,
    grads: Grads,
) -> None:
    """Recompute p tile by tile and add the gradients of this head slice, in place."""
    problem, head_slice = scorer.problem, scorer.head_slice
    q, k, v = load_operands(problem, scorer.x, head_slice)
    dout = head_slice.take_queries(dout).transpose(1, 2).to(q.dtype)
    lse, delta = head_slice.take_rows(lse)[..., None], head_slice.take_rows(delta)[..., None]
    dq = head_slice.take_queries(grads.dq).transpose(1, 2)
    dk, dv = (head_slice.take_keys(t).transpose(1, 2) for t in (grads.dk, grads.dv))
    for q0, q1 in row_tiles(head_slice, q):
        rows = slice(q0, q1)
        for at in key_tiles(head_slice, q[:, :, rows], q0):
            keys = slice(at.k0, at.k1)
            scores = scorer.scores(q[:, :, rows], k[:, :, keys], at)
            p = torch.exp(scores.s - lse[:, :, rows])
            dp = grouped_matmul(dout[:, :, rows], v[:, :, keys].transpose(-1, -2))
            dropped = scorer.apply_dropout(p, at)
            dv[:, :, keys] += sum_over_groups(dropped, dout[:, :, rows], k.shape[1])
            ds = p * (scorer.apply_dropout(dp, at) - delta[:, :, rows])
            if scores.modified is not None and grads.dcaptured is not None:
                scores.modified.add_captured_gradient(grads.dcaptured, ds)
            ds = scores.before_score_mod(ds)
            if grads.dbias is not None:
                scorer.add_bias_gradient(grads.dbias, ds, at)
            ds = scores.product_gradient(ds) * problem.softmax_scale
            dq[:, :, rows] += grouped_matmul(ds, k[:, :, keys])
            dk[:, :, keys] += sum_over_groups(ds, q[:, :, rows], k.shape[1])


backend: Backend = make_backend(
    supports,
    forward,
    backward,
    options=OPTIONS,
    supports_tangents=supports_tangents,
    tangents=tangents,
    tangent_gradients=tangent_gradients,
)
