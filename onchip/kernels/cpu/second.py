"""Second derivatives of the tile loop: the gradients of tangents, in two passes over the keys.

    rows q0..q1 | pass 1: fold_row_tile (tangent.py) -> lse, t_lse, t_out of the rows
                |         delta = dout . out - dlse     phi = dout . t_out
                | pass 2, one tile of keys each:
                |   p = exp(s - lse)    r = ds - t_lse    g = dout . v - delta    h = dout . dv
                |   dL/d(ds) = p g      dL/ds = p (r g + h - phi)      dL/dv = (p r)^T dout
                |   chain rule through score_mod, softcap and scale -> dq, dk, dbias, dcaptured

ds and dv are the tangents of the scores and values, L = dout . t_out + dlse . t_lse. The formulas
are derived in docs/fold.md ("Second derivatives"). Batch 1, one head, 300 tokens, tiles of 128: the
rows 0..128 fold three tiles of keys (causal: one), then read the same tiles again. Nothing is
saved, and no temporary is larger than one tile of scores per head. tiled.py has the first
derivatives, whose second pass this one extends.

One kernel serves all second derivatives, because a tangent is linear in its direction:

    double backward     the gradients of a gradient in direction u: this one, at tangents u
    reverse of forward  the gradients of a tangent: this one
    forward of reverse  the tangent of a gradient: this one, at the tangents of the inputs, plus the
                        gradient for the tangents of dout and dlse (second derivatives commute)
"""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.backend import Grads, Tangents, accumulator_dtype, grad_dtype
from onchip.core.problem import Problem, Tensors
from onchip.core.state import DualState, finalize, finalize_dual
from onchip.kernels.cpu.head_slice import head_slices
from onchip.kernels.cpu.scores import Scorer, TileBounds, grouped_matmul, sum_over_groups
from onchip.kernels.cpu.tangent import DualOperands, fold_row_tile, load_sinks
from onchip.kernels.cpu.tile_loop import key_tiles, row_tiles


def tangent_gradients(
    problem: Problem, x: Tensors, dx: Tangents, dout: Tensor, dlse: Tensor | None
) -> Grads:
    wide = accumulator_dtype(problem.dtype)
    dq, dk, dv = (t.new_zeros(t.shape, dtype=wide) for t in x[:3])
    captured = None if problem.captured_is_constant else x.captured
    learned = (
        None if t is None else t.new_zeros(t.shape, dtype=wide) for t in (x.bias, x.sinks, captured)
    )
    total = Grads(dq, dk, dv, *learned)
    for head_slice in head_slices(problem, x):
        _add_head_slice(Scorer(problem, x, head_slice), dx, dout, dlse, total)
    dq, dk, dv = (t.to(grad_dtype(problem)) for t in total[:3])
    return total._replace(dq=dq, dk=dk, dv=dv)


class _Rows(NamedTuple):
    """The numbers of a tile of rows that pass 2 reads: dout is (batch, heads, rows, head_dim_v),
    the others are (batch, heads, rows, 1). lse is finite, 0 for a row without keys: its p is 0, as
    s = -inf.
    """

    dout: Tensor
    lse: Tensor
    t_lse: Tensor
    delta: Tensor
    phi: Tensor

    @classmethod
    def of(cls, state: DualState, dout: Tensor, dlse: Tensor | None) -> "_Rows":
        (out, lse), (t_out, t_lse) = finalize(state.value), finalize_dual(state)
        delta = (dout * out).sum(-1)
        delta = delta if dlse is None else delta - dlse
        columns = lse.masked_fill(lse == -torch.inf, 0.0), t_lse, delta, (dout * t_out).sum(-1)
        return cls(dout, *(t[..., None] for t in columns))


def _add_head_slice(
    scorer: Scorer, dx: Tangents, dout: Tensor, dlse: Tensor | None, total: Grads
) -> None:
    """Add the gradients of this head slice to `total`, in place."""
    head_slice = scorer.head_slice
    operands = DualOperands.load(scorer.problem, scorer.x, dx, head_slice)
    dout = head_slice.take_queries(dout).transpose(1, 2).to(operands.q.dtype)
    dlse = None if dlse is None else head_slice.take_rows(dlse)
    dq = head_slice.take_queries(total.dq).transpose(1, 2)
    dk, dv = (head_slice.take_keys(t).transpose(1, 2) for t in (total.dk, total.dv))
    own = total._replace(dq=dq, dk=dk, dv=dv)
    for q0, q1 in row_tiles(head_slice, operands.q):
        queries = operands.take_rows(q0, q1)
        state = fold_row_tile(scorer, dx, queries, q0)
        rows = _Rows.of(state, dout[:, :, q0:q1], None if dlse is None else dlse[:, :, q0:q1])
        for at in key_tiles(head_slice, queries.q, q0):
            _add_tile(scorer, dx, queries.take_keys(at.k0, at.k1), rows, at, own)
        if scorer.x.sinks is not None and total.dsinks is not None:
            total.dsinks[head_slice.heads] += _sink_gradient(scorer, scorer.x.sinks, dx, rows)


def _add_tile(
    scorer: Scorer, dx: Tangents, tile: DualOperands, rows: _Rows, at: TileBounds, grads: Grads
) -> None:
    """Add the gradients of one tile of scores. grads: dq, dk and dv of the head slice, (batch,
    heads, seqlen, dim).
    """
    product = scorer.scaled_product(tile.q, tile.k)
    scores = scorer.finish_scores(product, at)
    dproduct = tile.product_tangent()
    dproduct = torch.zeros_like(product) if dproduct is None else dproduct
    p = torch.exp(scores.s - rows.lse)
    r = (scorer.tangents(dproduct, scores, dx, at) - rows.t_lse).masked_fill(p == 0, 0.0)
    g = grouped_matmul(rows.dout, tile.v.transpose(-1, -2)) - rows.delta
    grad_ds = p * g
    grad_s = grad_ds * r - p * rows.phi
    if tile.dv is not None:
        grad_s = grad_s + p * grouped_matmul(rows.dout, tile.dv.transpose(-1, -2))
    grads.dv[:, :, at.k0 : at.k1] += sum_over_groups(p * r, rows.dout, tile.k.shape[1])
    if scores.modified is not None:
        t = scorer.tangents_before_score_mod(dproduct, scores, dx, at)
        grad_s, grad_ds = scores.modified.second_order(
            grad_s, grad_ds, t, dx.captured, grads.dcaptured
        )
    if grads.dbias is not None:
        scorer.add_bias_gradient(grads.dbias, grad_s, at)
    scale = scorer.problem.softmax_scale
    if scores.softcap_grad is not None:
        curvature = scorer.softcap_curvature(product, scores.softcap_grad) * dproduct * scale
        grad_s = scores.product_gradient(grad_s) + grad_ds * curvature
        grad_ds = scores.product_gradient(grad_ds)
    _add_product_gradients(tile, grad_s * scale, grad_ds * scale, at, grads)


def _add_product_gradients(
    tile: DualOperands, grad_s: Tensor, grad_ds: Tensor, at: TileBounds, grads: Grads
) -> None:
    """Add the gradients of q and k from those of q.k and of its tangent dq.k + q.dk."""
    dq, dk = grads.dq[:, :, at.q0 : at.q1], grads.dk[:, :, at.k0 : at.k1]
    dq += grouped_matmul(grad_s, tile.k)
    dk += sum_over_groups(grad_s, tile.q, tile.k.shape[1])
    if tile.dk is not None:
        dq += grouped_matmul(grad_ds, tile.dk)
    if tile.dq is not None:
        dk += sum_over_groups(grad_ds, tile.dq, tile.k.shape[1])


def _sink_gradient(scorer: Scorer, sinks: Tensor, dx: Tangents, rows: _Rows) -> Tensor:
    """dsinks (heads) of a tile of rows: a sink is a key with g = -delta and h = 0."""
    lse, t_lse, delta, phi = (t.squeeze(-1) for t in rows[1:])
    sink, dsink = load_sinks(sinks, dx.sinks, scorer.head_slice, lse.dtype)
    p = torch.exp(sink - lse)
    r = (dsink - t_lse).masked_fill(p == 0, 0.0)
    return (-p * (r * delta + phi)).sum((0, 2))
