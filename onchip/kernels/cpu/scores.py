"""The score of the contract for one tile of one head slice: scale, softcap, ALiBi, bias, score_mod,
then masking, in that order.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from onchip.core.backend import Tangents
from onchip.core.problem import Problem, Tensors
from onchip.kernels.cpu import philox
from onchip.kernels.cpu.head_slice import HeadSlice
from onchip.kernels.cpu.score_mod import ModifiedTile
from onchip.score_mods.evaluate import Cells


class TileBounds(NamedTuple):
    """Queries [q0, q1) and keys [k0, k1) of a head slice."""

    q0: int
    q1: int
    k0: int
    k1: int


class TileScores(NamedTuple):
    """The scores of a tile, (batch, heads, rows, keys), and what their chain rule needs."""

    s: Tensor  # -inf where hidden
    softcap_grad: Tensor | None  # d softcap(product) / d product; None without softcap
    modified: ModifiedTile | None  # of score_mod

    def before_score_mod(self, ds: Tensor) -> Tensor:
        """The gradient of the scores before score_mod, from that of s."""
        return ds if self.modified is None else self.modified.score_gradient(ds)

    def product_gradient(self, ds: Tensor) -> Tensor:
        """The gradient of the scaled product, from that of the scores before score_mod."""
        return ds if self.softcap_grad is None else ds * self.softcap_grad


class Scorer(NamedTuple):
    """Scores, dropout and their gradients for tiles of one head slice; tensors are (batch, heads,
    rows, keys).
    """

    problem: Problem
    x: Tensors
    head_slice: HeadSlice

    def scores(self, q: Tensor, k: Tensor, at: TileBounds) -> TileScores:
        """The scores of q (b, h, m, d) and k (b, h_kv, n, d)."""
        return self.finish_scores(self.scaled_product(q, k), at)

    def scaled_product(self, q: Tensor, k: Tensor) -> Tensor:
        """softmax_scale * q.k"""
        return grouped_matmul(q, k.transpose(-1, -2)) * self.problem.softmax_scale

    def finish_scores(self, product: Tensor, at: TileBounds) -> TileScores:
        """`scores` of a scaled product."""
        s, softcap_grad = self.apply_softcap(product)
        s = self._add_linear_terms(s, self.x, at)
        visible = self.head_slice.visibility.tile(*at, s.device)
        modified = self._modify(s, visible, at)
        s = s if modified is None else modified.scores()
        s = s if visible is None else s.masked_fill(~visible, -torch.inf)
        return TileScores(s, softcap_grad, modified)

    def _modify(self, s: Tensor, visible: Tensor | None, at: TileBounds) -> ModifiedTile | None:
        """score_mod on the scores of a tile."""
        if self.problem.score_mod is None:
            return None
        first_head = self.head_slice.first_head + self.problem.first_head
        corner = self.head_slice.first_batch, first_head, at.q0, at.k0
        b, h, q, k = (
            torch.arange(first, first + size, device=s.device)
            for first, size in zip(corner, s.shape, strict=True)
        )
        b, h, q = b.view(-1, 1, 1, 1), h.view(-1, 1, 1), q.view(-1, 1)
        return ModifiedTile(self.problem.score_mod, self.x, s, Cells(b, h, q, k, visible))

    def tangents(self, product: Tensor, of: TileScores, dx: Tangents, at: TileBounds) -> Tensor:
        """ds from the tangent of q.k, (b, h, m, n), and those of the other tensors in the scores
        `of`. Hidden cells hold any value.
        """
        ds = self.tangents_before_score_mod(product, of, dx, at)
        return ds if of.modified is None else of.modified.tangent(ds, dx.captured)

    def tangents_before_score_mod(
        self, product: Tensor, of: TileScores, dx: Tangents, at: TileBounds
    ) -> Tensor:
        """The tangents of the scores before score_mod."""
        ds = of.product_gradient(product * self.problem.softmax_scale)
        return self._add_linear_terms(ds, dx, at)

    def _add_linear_terms(self, s: Tensor, x: Tensors | Tangents, at: TileBounds) -> Tensor:
        """s - slope * distance + bias. Their tangents add to ds in the same way."""
        if x.alibi_slopes is not None:
            slopes = self.head_slice.take_slopes(x.alibi_slopes).to(s.dtype)
            s = s - slopes * self._distance(at, s)
        return s if x.bias is None else s + self._bias_tile(x.bias, at).to(s.dtype)

    def apply_softcap(self, s: Tensor) -> tuple[Tensor, Tensor | None]:
        """softcap * tanh(s / softcap) and its derivative; (s, None) without softcap."""
        if not self.problem.softcap:
            return s, None
        t = torch.tanh(s / self.problem.softcap)
        return self.problem.softcap * t, 1.0 - t * t

    def softcap_curvature(self, product: Tensor, softcap_grad: Tensor) -> Tensor:
        """The second derivative of apply_softcap at a scaled product, from the first one."""
        cap = self.problem.softcap
        return -2.0 / cap * torch.tanh(product / cap) * softcap_grad

    def apply_dropout(self, p: Tensor, at: TileBounds) -> Tensor:
        """p with dropout applied: zero or p / (1 - dropout_p)."""
        if not self.problem.dropout_p:
            return p
        first = self.head_slice.first_batch, self.head_slice.first_head + self.problem.first_head
        corner, seed = philox.Corner(*first, at.q0, at.k0), self.x.dropout_seed
        if self.x.positions_q is None:
            keep = philox.keep(seed, p.shape, corner, self.problem.dropout_p)
        else:
            keep = philox.keep_at(seed, p.shape, corner, self._places(at), self.problem.dropout_p)
        return p * keep / (1.0 - self.problem.dropout_p)

    def add_bias_gradient(self, dbias: Tensor, ds: Tensor, at: TileBounds) -> None:
        """Add ds to its tile of dbias, summed over the dimensions in which bias broadcasts."""
        tile = self._bias_tile(dbias, at)
        for dim in range(3):
            if tile.shape[dim] == 1:
                ds = ds.sum(dim, keepdim=True)
        tile += ds

    def _bias_tile(self, bias: Tensor, at: TileBounds) -> Tensor:
        bias = self.head_slice.take_bias(bias)
        bias = bias if bias.shape[2] == 1 else bias[:, :, at.q0 : at.q1]
        return bias[..., at.k0 : at.k1]

    def _places(self, at: TileBounds) -> tuple[Tensor, Tensor]:
        q, k = cast(Tensor, self.x.positions_q), cast(Tensor, self.x.positions_k)
        return q[:, at.q0 : at.q1], k[at.k0 : at.k1]

    def _distance(self, at: TileBounds, like: Tensor) -> Tensor:
        """|i + seqlen_k - seqlen_q - j| as (rows, keys), or |positions_q - positions_k| if
        given.
        """
        if self.x.positions_q is not None:
            (i, _), j = self._places(at)
            return (i[:, None] - j).abs().to(like.dtype)
        rule = self.head_slice.visibility
        i = torch.arange(at.q0, at.q1, device=like.device) + (rule.seqlen_k - rule.seqlen_q)
        j = torch.arange(at.k0, at.k1, device=like.device)
        return (i[:, None] - j).abs().to(like.dtype)


def grouped_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a (batch, heads, m, x) @ b (batch, kv_heads, x, n). The query heads of a group share b: they
    are stacked as rows of one product.
    """
    batch, heads, m, inner = a.shape
    rows = a.reshape(batch, b.shape[1], heads // b.shape[1] * m, inner)
    return (rows @ b).view(batch, heads, m, b.shape[-1])


def sum_over_groups(a: Tensor, b: Tensor, kv_heads: int) -> Tensor:
    """a^T @ b for a (batch, heads, m, x), b (batch, heads, m, y), summed over the heads of each
    group: (batch, kv_heads, x, y).
    """
    rows = a.shape[1] // kv_heads * a.shape[2]
    a, b = (t.reshape(t.shape[0], kv_heads, rows, t.shape[-1]) for t in (a, b))
    return a.transpose(-1, -2) @ b
