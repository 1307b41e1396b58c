"""Ulysses: each rank computes some heads over all tokens, so that any kernel and any mask works as
on one device. One all-to-all turns tokens into heads, a second turns heads back into tokens (Jacobs
et al. 2023, arXiv:2309.14509). Hybrid: groups of ranks exchange heads, and the groups form a ring,
over which each rank sends the keys of its heads (Fang and Zhao 2024, arXiv:2405.07719).

    4 ranks, 8 heads, 1,024 tokens, zigzag
      before            rank r has 256 tokens of 8 heads
      all-to-all        q, k, v: one message to each other rank
      attention         rank r has 1,024 tokens of 2 heads
      all-to-all        out, lse
      after             rank r has 256 tokens of 8 heads

Backward, the first exchange carries dout and dlse, the second dq, dk and dv. Heads are split as
evenly as possible, in whole GQA groups where this is as even. A key head with query heads on
several ranks is sent to all of them; its gradients travel unrounded and are summed.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.backend import Grads, accumulator_dtype
from onchip.core.derivatives import first_order, refuse_forward_mode
from onchip.core.problem import Tensors
from onchip.parallel import ring
from onchip.parallel.all_to_all import (
    HeadAllToAll,
    HeadSpan,
    assign_heads,
    kv_heads_of,
    split_by_kv_head,
)
from onchip.parallel.mesh2d import GroupedLayout, Mesh2D
from onchip.parallel.rank_attention import OutLseResidual, RankAttention
from onchip.parallel.rounds import GlobalMask, RoundOptions, plan_rounds
from onchip.parallel.sharding import Layout


class UlyssesPlan(NamedTuple):
    """The heads of each rank of a group, and the call over all heads."""

    exchange: HeadAllToAll
    rank_attention: RankAttention
    heads: tuple[HeadSpan, ...]
    kv_heads: tuple[HeadSpan, ...]
    group_size: int

    @classmethod
    def of(
        cls,
        mesh: Mesh2D,
        layout: Layout,
        global_mask: GlobalMask,
        options: RoundOptions,
        x: Tensors,
        out_dtype: torch.dtype,
        before_backward: Callable[[], None],
    ) -> "UlyssesPlan":
        """x: q, k and v at this rank's positions. The layout has as many ranks as the mesh."""
        outer, inner, device = mesh.outer, mesh.inner, x.q.device
        num_heads, num_kv_heads = x.q.shape[2], x.k.shape[2]
        heads = assign_heads(num_heads, num_kv_heads, inner.size)
        group_size = num_heads // num_kv_heads
        keys = tuple(kv_heads_of(span, group_size) for span in heads)
        grouped = GroupedLayout(layout, inner.size)
        exchange = HeadAllToAll(inner, grouped.rows(outer.rank, global_mask.seqlen, device))
        options = options._replace(wide_grads=outer.size > 1 or _overlap(keys))
        rounds = plan_rounds(grouped, global_mask, outer.rank, device)
        rank_attention = RankAttention(outer, ring, rounds, options, out_dtype, before_backward)
        return cls(exchange, rank_attention, tuple(heads), keys, group_size)

    @property
    def own_heads(self) -> HeadSpan:
        return self.heads[self.exchange.comm.rank]

    @property
    def heads_of_kvq(self) -> tuple[tuple[HeadSpan, ...], ...]:
        """The heads of each rank, of (k, v, q)."""
        return self.kv_heads, self.kv_heads, self.heads

    @property
    def shares_kv_heads(self) -> bool:
        """Whether some key head is needed by several ranks."""
        return _overlap(self.kv_heads)

    def calls(self) -> Iterator[tuple[RankAttention, slice, slice, slice]]:
        """The calls over this rank's heads: (call, heads and key heads counted from this rank's
        first, heads counted from the first of all).
        """
        first = self.own_heads[0]
        for heads, keys in split_by_kv_head(self.own_heads, self.group_size):
            lo, hi = first + heads.start, first + heads.stop
            yield self.rank_attention.of_heads(lo, hi), heads, keys, slice(lo, hi)


class UlyssesFunction(torch.autograd.Function):
    """(out, lse) of a rank's tokens. origin: an empty tensor made of q, k and v. The saved heads
    are other tensors, so that without origin a second derivative would find no path back to
    them, and could not be refused.
    """

    @classmethod
    def of(
        cls, plan: UlyssesPlan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        origin = torch.cat([t[:0].flatten() for t in (q, k, v)])
        return cls.apply(plan, origin, q, k, v, sinks)

    @staticmethod
    def forward(
        ctx: Any,
        plan: UlyssesPlan,
        origin: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        k, v, q = plan.exchange.to_heads((k, v, q), plan.heads_of_kvq)
        out, lse, residual = _attend(plan, q, k, v, sinks)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, sinks, out, lse, residual, origin)
        lse, out = plan.exchange.to_tokens((_lse_to_columns(lse), out), (plan.heads, plan.heads))
        return out, _columns_to_lse(lse)

    @staticmethod
    @first_order
    def backward(ctx, dout, dlse):  # pyright: ignore[reportIncompatibleMethodOverride]
        plan, (q, k, v, sinks, out, lse, residual, _) = ctx.plan, ctx.saved_tensors
        plan.rank_attention.before_backward()
        both = plan.heads, plan.heads
        dlse, dout = plan.exchange.to_heads((_lse_to_columns(dlse), dout), both)
        saved = out, lse, dout, _columns_to_lse(dlse), residual
        grads = _differentiate(plan, (q, k, v, sinks), saved)
        exchanged = plan.exchange.to_tokens((grads.dk, grads.dv, grads.dq), plan.heads_of_kvq)
        dk, dv, dq = (t.to(q.dtype) for t in exchanged)
        dsinks = None if sinks is None else grads.dsinks.to(sinks.dtype)
        return None, None, dq, dk, dv, dsinks

    jvp = staticmethod(refuse_forward_mode)


def _attend(
    plan: UlyssesPlan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> OutLseResidual:
    """Attention of this rank's heads, maybe none, over the tokens of the group."""
    batch, seqlen, heads, _ = q.shape
    out = q.new_empty(batch, seqlen, heads, v.shape[3], dtype=plan.rank_attention.out_dtype)
    lse = q.new_empty(batch, heads, seqlen, dtype=accumulator_dtype(q.dtype))
    residual = torch.empty_like(out) if plan.rank_attention.options.precise_delta else None
    for rank_attention, own, keys, all_ in plan.calls():
        own_sinks = None if sinks is None else sinks[all_]
        result = rank_attention.attend(q[:, :, own], k[:, :, keys], v[:, :, keys], own_sinks)
        out[:, :, own], lse[:, own] = result[:2]
        if residual is not None:
            residual[:, :, own] = result[2]
    return out, lse, residual


def _differentiate(plan: UlyssesPlan, tensors: tuple, saved: tuple) -> Grads:
    """Gradients of this rank's heads; dsinks (heads,) is zero for the heads of other ranks."""
    (q, k, v, sinks), (out, lse, dout, dlse, residual) = tensors, saved
    wide = accumulator_dtype(q.dtype)
    of_keys = wide if plan.shares_kv_heads else k.dtype
    dq, dk, dv = (
        torch.empty_like(q),
        torch.empty_like(k, dtype=of_keys),
        torch.empty_like(v, dtype=of_keys),
    )
    dsinks = None if sinks is None else sinks.new_zeros(sinks.shape, dtype=wide)
    for rank_attention, own, keys, all_ in plan.calls():
        own_sinks = None if sinks is None else sinks[all_]
        inputs = q[:, :, own], k[:, :, keys], v[:, :, keys], own_sinks
        own_residual = None if residual is None else residual[:, :, own]
        of_rows = out[:, :, own], lse[:, own], dout[:, :, own], dlse[:, own], own_residual
        grads = rank_attention.differentiate(*inputs, of_rows)
        dq[:, :, own], dk[:, :, keys], dv[:, :, keys] = grads[:3]
        if dsinks is not None:
            dsinks[all_] = grads.dsinks
    return Grads(dq, dk, dv, dsinks=dsinks)


def _overlap(spans: Sequence[HeadSpan]) -> bool:
    some = [span for span in spans if span[0] < span[1]]
    return any(a[1] > b[0] for a, b in pairwise(some))


def _lse_to_columns(lse: Tensor) -> Tensor:
    """(batch, heads, seqlen) as (batch, seqlen, heads, 1), the layout of out."""
    return lse.transpose(1, 2)[..., None]


def _columns_to_lse(columns: Tensor) -> Tensor:
    return columns[..., 0].transpose(1, 2).contiguous()
