"""UlyssesFunction: each rank attends some heads over all tokens, so that any kernel and any mask serves as
on one device; two all-to-alls turn tokens into heads and heads into tokens (Jacobs et al. 2023,
arXiv:2309.14509). Hybrid: groups of ranks do so, and between groups a ring turns, over which each
rank sends the keys of its heads (Fang and Zhao 2024, arXiv:2405.07719).

Every rank of a group sends one message to each other, forward q, k and v, then out and lse;
backward dout and dlse, then dq, dk and dv. Heads are dealt as evenly as they can be, in whole
groups of GQA where these are as even. A key head whose group is cut goes to every rank that has
part of it, and its gradients come back unrounded and are summed.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.derivatives import first_order, refuse_forward_mode
from onchip.kernels.protocol import Grads, accumulator_dtype
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
from onchip.problem import Tensors


class UlyssesPlan(NamedTuple):
    """Who of a group gets which heads, and what he does with them: rank_attention is that of all heads."""

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
        call: RoundOptions,
        x: Tensors,
        out_dtype: torch.dtype,
        before_backward: Callable[[], None],
    ) -> "UlyssesPlan":
        """x has q, k and v of this rank's positions in the layout, of as many ranks as the mesh."""
        outer, inner, device = mesh.outer, mesh.inner, x.q.device
        num_heads, num_kv_heads = x.q.shape[2], x.k.shape[2]
        heads, group_size = (
            assign_heads(num_heads, num_kv_heads, inner.size),
            num_heads // num_kv_heads,
        )
        keys = tuple(kv_heads_of(span, group_size) for span in heads)
        held = GroupedLayout(layout, inner.size)
        exchange = HeadAllToAll(inner, held.rows(outer.rank, global_mask.seqlen, device))
        call = call._replace(wide_grads=outer.size > 1 or _overlap(keys))
        rounds = plan_rounds(held, global_mask, outer.rank, device)
        rank_attention = RankAttention(outer, ring, rounds, call, out_dtype, before_backward)
        return cls(exchange, rank_attention, tuple(heads), keys, group_size)

    @property
    def mine(self) -> HeadSpan:
        return self.heads[self.exchange.comm.rank]

    @property
    def of_keys_and_queries(self) -> tuple[tuple[HeadSpan, ...], ...]:
        """Who gets which heads of (k, v, q)."""
        return self.kv_heads, self.kv_heads, self.heads

    @property
    def cuts_groups(self) -> bool:
        """Whether some key head goes to several ranks."""
        return _overlap(self.kv_heads)

    def parts(self) -> Iterator[tuple[RankAttention, slice, slice, slice]]:
        """The calls that serve my heads: their rank_attention; their heads among mine, their key heads among
        mine, and their heads among all.
        """
        first = self.mine[0]
        for heads, keys in split_by_kv_head(self.mine, self.group_size):
            lo, hi = first + heads.start, first + heads.stop
            yield self.rank_attention.of_heads(lo, hi), heads, keys, slice(lo, hi)


class UlyssesFunction(torch.autograd.Function):
    """(out, lse) of a rank's tokens. origin is no element of q, k and v: the heads that are saved
    are not those tensors, and a second derivative must find the way back to them, to be refused.
    """

    @classmethod
    def of(cls, plan: UlyssesPlan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None):
        origin = torch.cat([t[:0].flatten() for t in (q, k, v)])
        return cls.apply(plan, origin, q, k, v, sinks)

    @staticmethod
    def forward(ctx, plan: UlyssesPlan, origin, q, k, v, sinks):
        k, v, q = plan.exchange.to_heads((k, v, q), plan.of_keys_and_queries)
        out, lse, residual = _attend(plan, q, k, v, sinks)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, sinks, out, lse, residual, origin)
        lse, out = plan.exchange.to_tokens((_columns(lse), out), (plan.heads, plan.heads))
        return out, _rows(lse)

    @staticmethod
    @first_order
    def backward(ctx, dout, dlse):  # pyright: ignore[reportIncompatibleMethodOverride]
        plan, (q, k, v, sinks, out, lse, residual, _) = ctx.plan, ctx.saved_tensors
        plan.rank_attention.before_backward()
        both = plan.heads, plan.heads
        dlse, dout = plan.exchange.to_heads((_columns(dlse), dout), both)
        saved = out, lse, dout, _rows(dlse), residual
        grads = _differentiate(plan, (q, k, v, sinks), saved)
        found = plan.exchange.to_tokens((grads.dk, grads.dv, grads.dq), plan.of_keys_and_queries)
        dk, dv, dq = (t.to(q.dtype) for t in found)
        dsinks = None if sinks is None else grads.dsinks.to(sinks.dtype)
        return None, None, dq, dk, dv, dsinks

    jvp = staticmethod(refuse_forward_mode)


def _attend(
    plan: UlyssesPlan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> OutLseResidual:
    """Of my heads, maybe none, over the tokens of the group."""
    batch, seqlen, heads, _ = q.shape
    out = q.new_empty(batch, seqlen, heads, v.shape[3], dtype=plan.rank_attention.out_dtype)
    lse = q.new_empty(batch, heads, seqlen, dtype=accumulator_dtype(q.dtype))
    residual = torch.empty_like(out) if plan.rank_attention.call.precise_delta else None
    for rank_attention, own, keys, all_ in plan.parts():
        own_sinks = None if sinks is None else sinks[all_]
        found = rank_attention.attend(q[:, :, own], k[:, :, keys], v[:, :, keys], own_sinks)
        out[:, :, own], lse[:, own] = found[:2]
        if residual is not None:
            residual[:, :, own] = found[2]
    return out, lse, residual


def _differentiate(plan: UlyssesPlan, tensors: tuple, saved: tuple) -> Grads:
    """Of my heads over the tokens of the group; dsinks (heads) is zero for the heads of others."""
    (q, k, v, sinks), (out, lse, dout, dlse, residual) = tensors, saved
    wide = accumulator_dtype(q.dtype)
    of_keys = wide if plan.cuts_groups else k.dtype
    dq, dk, dv = (
        torch.empty_like(q),
        torch.empty_like(k, dtype=of_keys),
        torch.empty_like(v, dtype=of_keys),
    )
    dsinks = None if sinks is None else sinks.new_zeros(sinks.shape, dtype=wide)
    for rank_attention, own, keys, all_ in plan.parts():
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


def _columns(lse: Tensor) -> Tensor:
    """(batch, heads, seqlen) as (batch, seqlen, heads, 1), which travels like out."""
    return lse.transpose(1, 2)[..., None]


def _rows(columns: Tensor) -> Tensor:
    return columns[..., 0].transpose(1, 2).contiguous()
