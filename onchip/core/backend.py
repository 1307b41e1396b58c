"""What a kernel takes and gives. A kernel is a module with three functions:

supports(problem, device) -> str | None                       None, or the reason it cannot
forward(problem, tensors) -> Result
backward(problem, tensors, out, lse, dout, dlse) -> Grads     dlse may be None

out and lse may be those of the same queries over more keys than the call has (a ring, a split): the
gradients are then what these keys contribute. So kernels take p = exp(s - lse) and delta from them,
not from what they could recompute.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.core.problem import Problem, Tensors


class Stats(NamedTuple):
    """Per row (batch, heads, seqlen_q): the largest score, and the entropy of the probabilities (a
    sink is one more outcome).
    """

    max_logit: Tensor
    entropy: Tensor


class Result(NamedTuple):
    out: Tensor
    lse: Tensor
    stats: Stats | None = None


class Grads(NamedTuple):
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None
    dsinks: Tensor | None = None


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Softmax and sums run in fp32, for fp64 inputs in fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def grad_dtype(problem: Problem) -> torch.dtype:
    """Of dq, dk and dv."""
    return accumulator_dtype(problem.dtype) if problem.wide_grads else problem.dtype


def row_delta(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """delta = rowsum(out * dout) - dlse, shaped like lse: the one number per row that the backward
    pass needs of the forward.

    d loss / d score_j = p_j * (dout . v_j - rowsum(out * dout) + dlse), because d lse / d score_j =
    p_j.
    """
    wide = accumulator_dtype(out.dtype)
    delta = (out.to(wide) * dout.to(wide)).sum(-1).transpose(-1, -2)
    return delta if dlse is None else delta - dlse


def split(out: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(out in dtype, the residual that this rounding leaves, in dtype, too)"""
    rounded = out.to(dtype, copy=True)  # an op returns no tensor that it was given
    return rounded, (out - rounded).to(dtype)


def with_residual(dlse: Tensor | None, residual: Tensor, dout: Tensor) -> Tensor:
    """What a backward takes for dlse, to find the delta of out + residual where it is given out:
    delta is rowsum(out * dout) - dlse, and nothing else depends on either.
    """
    return -row_delta(residual, dout, dlse).contiguous()


def scale_strides(scales: Tensor | None) -> tuple[int, ...]:
    """(page, slot, head) of the scales of 8-bit pages."""
    return (0, 0, 0) if scales is None else scales.stride()


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """dsinks (heads): a sink is a key with probability exp(sink - lse) and value zero, so its
    score's gradient is -p * delta. Where lse is -inf, the sink is, too, and p = 0.
    """
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    per_row = -torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta
    return per_row.sum(-1) if per_row.dim() == 2 else per_row.sum((0, 2))


def empty_result(problem: Problem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Uninitialised (out, lse) in the layout of the call."""
    q = tensors.q
    *entries, seqlen, heads, _ = q.shape  # a packed tensor has no entries
    out = q.new_empty(*entries, seqlen, heads, problem.head_dim_v, dtype=problem.out_dtype)
    wide = accumulator_dtype(problem.dtype)
    return out, q.new_empty(*entries, heads, seqlen, dtype=wide)


def lacks(options: dict[str, object]) -> str | None:
    """'has no a and no b': what a call asks for and a kernel does not have, or None."""
    missing = [name for name, wanted in options.items() if wanted]
    return f"has no {' and no '.join(missing)}" if missing else None
