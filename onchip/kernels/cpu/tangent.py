"""Forward mode of the tile loop: the tangents of out and lse in one pass over tiles of keys.

    q0..q1 |  S = scores(q, K[j])    dS = dscores(dq, dK[j], ...)     one tile of each
           |  lift_dual -> (m, l, acc), (m, dl, dacc)                 p is computed once for both
           |  merge_dual into the state of the rows so far
           |  finalize_dual at the end: dlse = dl / l, dout = dacc / l - out dlse

The tangent of a state is a state with the same m, so it merges as states do (docs/fold.md,
"Tangents merge"). Batch 1, one head, 300 tokens, tiles of 128: row tile 0..128 reads the key tiles
0..128, 128..256 and 256..300; causal, only the first. The forward saves nothing for it, and no
temporary is larger than one tile of scores per head. tiled.py is the loop without tangents.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.backend import Tangents, empty_result, lacks
from onchip.core.device import DeviceInfo
from onchip.core.problem import Problem, Tensors
from onchip.core.state import (
    DualState,
    State,
    add_sink_dual,
    finalize_dual,
    lift_dual,
    merge_dual,
)
from onchip.kernels.cpu.head_slice import HeadSlice, head_slices
from onchip.kernels.cpu.scores import Scorer, TileBounds, grouped_matmul
from onchip.kernels.cpu.tile_loop import key_tiles, load_operands, load_tangents, row_tiles

OPTIONS = {
    *("causal", "window_size", "packed", "has_mask", "deterministic"),
    *("softcap", "score_mod", "has_alibi", "has_bias", "has_sinks"),
}


def supports_tangents(problem: Problem, device: DeviceInfo) -> str | None:
    if device.type != "cpu":
        return f"serves forward mode on the CPU only, not on {device.type}"
    return lacks(problem, OPTIONS)


def tangents(problem: Problem, x: Tensors, dx: Tangents) -> tuple[Tensor, Tensor]:
    dout, dlse = empty_result(problem, x)
    for head_slice in head_slices(problem, x):
        operands = DualOperands.load(problem, x, dx, head_slice)
        scorer = Scorer(problem, x, head_slice)
        for q0, q1 in row_tiles(head_slice, operands.q):
            state = fold_row_tile(scorer, dx, operands.take_rows(q0, q1), q0)
            tile_dout, tile_dlse = finalize_dual(state)
            head_slice.take_queries(dout)[:, q0:q1] = tile_dout.transpose(1, 2)
            head_slice.take_rows(dlse)[:, :, q0:q1] = tile_dlse
    return dout, dlse


class DualOperands(NamedTuple):
    """q, k and v, (batch, heads, seqlen, dim) in accumulator precision, and their tangents, None
    where there is none.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None

    @classmethod
    def load(cls, problem: Problem, x: Tensors, dx: Tangents, at: HeadSlice) -> "DualOperands":
        return cls(*load_operands(problem, x, at), *load_tangents(problem, dx, at))

    def take_rows(self, q0: int, q1: int) -> "DualOperands":
        dq = None if self.dq is None else self.dq[:, :, q0:q1]
        return self._replace(q=self.q[:, :, q0:q1], dq=dq)

    def take_keys(self, k0: int, k1: int) -> "DualOperands":
        dk, dv = (None if t is None else t[:, :, k0:k1] for t in (self.dk, self.dv))
        return self._replace(k=self.k[:, :, k0:k1], v=self.v[:, :, k0:k1], dk=dk, dv=dv)

    def product_tangent(self) -> Tensor | None:
        """The tangent of q.k, dq.k + q.dk; None if neither has one."""
        terms = [
            grouped_matmul(a, b.transpose(-1, -2))
            for a, b in ((self.dq, self.k), (self.q, self.dk))
            if a is not None and b is not None
        ]
        return sum(terms[1:], terms[0]) if terms else None


def fold_row_tile(scorer: Scorer, dx: Tangents, rows: DualOperands, q0: int) -> DualState:
    """The state and its tangent of one tile of queries over the keys and the sink that it sees."""
    state = _empty(rows)
    for at in key_tiles(scorer.head_slice, rows.q, q0):
        tile = rows.take_keys(at.k0, at.k1)
        s, ds = _scores(scorer, dx, tile, at)
        state = merge_dual(state, lift_dual(s, ds, tile.v, tile.dv, grouped_matmul))
    sinks = scorer.x.sinks
    return state if sinks is None else _with_sink(state, sinks, dx.sinks, scorer.head_slice)


def _scores(
    scorer: Scorer, dx: Tangents, tile: DualOperands, at: TileBounds
) -> tuple[Tensor, Tensor]:
    scores = scorer.scores(tile.q, tile.k, at)
    product = tile.product_tangent()
    product = torch.zeros_like(scores.s) if product is None else product
    return scores.s, scorer.tangents(product, scores, dx, at)


def _empty(rows: DualOperands) -> DualState:
    m = rows.q.new_full(rows.q.shape[:-1], -torch.inf)
    state = State(m, torch.zeros_like(m), rows.q.new_zeros(*m.shape, rows.v.shape[-1]))
    return DualState(state, state)


def _with_sink(
    state: DualState, sinks: Tensor, dsinks: Tensor | None, head_slice: HeadSlice
) -> DualState:
    return add_sink_dual(state, *load_sinks(sinks, dsinks, head_slice, state.value.m.dtype))


def load_sinks(
    sinks: Tensor, dsinks: Tensor | None, head_slice: HeadSlice, wide: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The sinks of a head slice and their tangents, (heads, 1), in accumulator precision."""
    dsinks = torch.zeros_like(sinks) if dsinks is None else dsinks
    sink, dsink = (t[head_slice.heads].to(wide)[:, None] for t in (sinks, dsinks))
    return sink, dsink
