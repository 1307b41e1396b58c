"""The score of the contract, for one rectangle of one plane: scale, softcap, ALiBi, bias, then
masking, in that order.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from onchip.core.problem import Problem, Tensors
from onchip.kernels.cpu import philox
from onchip.kernels.cpu.head_slice import Plane


class Rectangle(NamedTuple):
    q0: int
    q1: int
    k0: int
    k1: int


class Scorer(NamedTuple):
    """Scores, dropout and their gradients for rectangles of one plane; tensors are (batch, heads,
    rows, keys).
    """

    problem: Problem
    x: Tensors
    plane: Plane

    def scores(self, q: Tensor, k: Tensor, at: Rectangle) -> tuple[Tensor, Tensor | None]:
        """s with -inf where masked, and ds / d(softmax_scale * q.k) if softcap bends it, for q (b,
        h, m, d), k (b, h_kv, n, d).
        """
        s = grouped_matmul(q, k.transpose(-1, -2)) * self.problem.softmax_scale
        bend = None
        if self.problem.softcap:
            t = torch.tanh(s / self.problem.softcap)
            s, bend = self.problem.softcap * t, 1.0 - t * t
        if self.x.alibi_slopes is not None:
            s = s - self.plane.of_slopes(self.x.alibi_slopes).to(s.dtype) * self._distance(at, s)
        if self.x.bias is not None:
            s = s + self._bias_tile(self.x.bias, at).to(s.dtype)
        visible = self.plane.visibility.tile(*at, s.device)
        return s if visible is None else s.masked_fill(~visible, -torch.inf), bend

    def dropped(self, p: Tensor, at: Rectangle) -> Tensor:
        """p with dropout applied: zero or p / (1 - dropout_p)."""
        if not self.problem.dropout_p:
            return p
        first = self.plane.first_batch, self.plane.first_head + self.problem.first_head
        corner, seed = philox.Corner(*first, at.q0, at.k0), self.x.dropout_seed
        if self.x.positions_q is None:
            kept = philox.keep(seed, p.shape, corner, self.problem.dropout_p)
        else:
            kept = philox.keep_at(seed, p.shape, corner, self._places(at), self.problem.dropout_p)
        return p * kept / (1.0 - self.problem.dropout_p)

    def add_bias_gradient(self, dbias: Tensor, ds: Tensor, at: Rectangle) -> None:
        """Accumulate ds into its tile of dbias, summed over the dimensions that bias broadcast."""
        tile = self._bias_tile(dbias, at)
        for dim in range(3):
            if tile.shape[dim] == 1:
                ds = ds.sum(dim, keepdim=True)
        tile += ds

    def _bias_tile(self, bias: Tensor, at: Rectangle) -> Tensor:
        bias = self.plane.of_bias(bias)
        bias = bias if bias.shape[2] == 1 else bias[:, :, at.q0 : at.q1]
        return bias[..., at.k0 : at.k1]

    def _places(self, at: Rectangle) -> tuple[Tensor, Tensor]:
        q, k = cast(Tensor, self.x.positions_q), cast(Tensor, self.x.positions_k)
        return q[:, at.q0 : at.q1], k[at.k0 : at.k1]

    def _distance(self, at: Rectangle, like: Tensor) -> Tensor:
        """|i + seqlen_k - seqlen_q - j| as (rows, keys), or what the places say."""
        if self.x.positions_q is not None:
            (i, _), j = self._places(at)
            return (i[:, None] - j).abs().to(like.dtype)
        rule = self.plane.visibility
        i = torch.arange(at.q0, at.q1, device=like.device) + (rule.seqlen_k - rule.seqlen_q)
        j = torch.arange(at.k0, at.k1, device=like.device)
        return (i[:, None] - j).abs().to(like.dtype)


def grouped_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a (batch, heads, m, x) @ b (batch, kv_heads, x, n): the query heads of a group share b, as
    more rows of one product.
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
