"""One rank's part in a call, whatever the strategy: the strategy's forward over the keys of all
ranks, then the sink, then the rounding; and the gradient of all three.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.backend import Grads, row_delta, sink_gradient
from onchip.core.derivatives import first_order, refuse_forward_mode
from onchip.core.state import add_sink, finalize, resume
from onchip.core.torch_op import split, with_residual
from onchip.parallel.comm import Comm
from onchip.parallel.rounds import RingSchedule, RoundOptions

OutLseResidual = tuple[Tensor, Tensor, Tensor | None]  # (out, lse, residual)


class RankAttention(NamedTuple):
    """One call on one rank. A strategy has `forward(comm, schedule, options, q, k, v)` and
    `backward(comm, schedule, options, q, k, v, saved)`, as ring.py has them.
    """

    comm: Comm
    strategy: Any
    schedule: RingSchedule
    options: RoundOptions
    out_dtype: torch.dtype
    before_backward: Callable[[], None]  # compares the call with the other ranks again

    def of_heads(self, lo: int, hi: int) -> "RankAttention":
        """The same call for heads [lo, hi) alone."""
        rounds = self.schedule.rounds
        cut = lambda r: (
            r if r is None or r.mask is None else r._replace(mask=r.mask.of_heads(lo, hi))
        )
        slopes = self.options.alibi_slopes
        slopes = None if slopes is None else slopes[..., lo:hi]
        return self._replace(
            schedule=self.schedule._replace(rounds=tuple(map(cut, rounds))),
            options=self.options._replace(alibi_slopes=slopes, first_head=lo),
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> OutLseResidual:
        """(out, lse, residual of out or None) of local queries. The sink enters once, after all
        keys.
        """
        out, lse = self.strategy.forward(self.comm, self.schedule, self.options, q, k, v)
        if sinks is not None:
            state = add_sink(resume(out.transpose(1, 2), lse), sinks.to(lse.dtype)[:, None])
            out, lse = finalize(state)
            out = out.transpose(1, 2)
        residual = None
        if self.options.precise_delta:
            out, residual = split(out.contiguous(), self.out_dtype)
        return out.to(self.out_dtype).contiguous(), lse, residual

    def differentiate(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, saved: tuple[Any, ...]
    ) -> Grads:
        """The gradients, unrounded. saved: (out, lse, dout, dlse or None, residual or None)."""
        out, lse, dout, dlse, residual = saved
        dlse = dlse if residual is None else with_residual(dlse, residual, dout)
        shared = self.comm, self.schedule, self.options
        grads = self.strategy.backward(*shared, q, k, v, (out, lse, dout, dlse))
        if sinks is None:
            return Grads(*grads)
        return Grads(*grads, dsinks=sink_gradient(sinks, lse, row_delta(out, dout, dlse)))


class RankAttentionFunction(torch.autograd.Function):
    """(out, lse) of q, k, v and sinks, by `RankAttention`."""

    @staticmethod
    def forward(
        ctx: Any,
        rank_attention: RankAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse, residual = rank_attention.attend(q, k, v, sinks)
        ctx.rank_attention = rank_attention
        ctx.save_for_backward(q, k, v, sinks, out, lse, residual)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @first_order
    def backward(ctx, dout, dlse):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.rank_attention.before_backward()
        q, k, v, sinks, out, lse, residual = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * 5
        dout = torch.zeros_like(out) if dout is None else dout
        grads = ctx.rank_attention.differentiate(q, k, v, sinks, (out, lse, dout, dlse, residual))
        dq, dk, dv = (g.to(q.dtype) for g in grads[:3])
        dsinks = None if sinks is None else grads.dsinks.to(sinks.dtype)
        return None, dq, dk, dv, dsinks

    jvp = staticmethod(refuse_forward_mode)
