"""Standard attention, unfused: the whole score matrix in memory. This is the executable
specification, and the slowest kernel. It reads every key, so a NaN in an EMPTY block of a mask
reaches the result. With precision="fp8" and the other low precisions it runs the reference of the
recipe (quant/emulation.py).
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
)
from onchip.core.device import DeviceInfo
from onchip.core.problem import DIFFERENTIABLE, LEARNED, LOW_PRECISIONS, Problem, Tensors
from onchip.kernels.cpu.head_slice import HeadSlice, head_slices
from onchip.kernels.cpu.scores import Scorer, TileBounds, grouped_matmul
from onchip.quant import emulation, recipes

# Every option but those of pages, which are gathered first.
OPTIONS = {
    *("causal", "window_size", "packed", "has_mask", "deterministic", "return_stats"),
    *("softcap", "score_mod", "has_alibi", "has_bias", "has_sinks"),
    *("dropout_p", "has_positions", "first_head", "wide_grads"),
}
RECIPE_OPTIONS = {
    *("causal", "window_size", "packed", "deterministic"),
    *("has_positions", "first_head", "wide_grads"),
}


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    if problem.dtype == torch.float64 and device.type != "cpu":
        return "float64 is served on the CPU"
    return None if problem.precision is None else _supports_recipe(problem, device)


def _supports_recipe(problem: Problem, device: DeviceInfo) -> str | None:
    if device.type != "cpu":
        return f"executes the recipe of precision={problem.precision!r} only on the CPU"
    if problem.widest > emulation.MAX_HEAD_DIM:
        dims = f"{problem.head_dim} and {problem.head_dim_v}"
        limit = f"head dims up to {emulation.MAX_HEAD_DIM}, not {dims}"
        return f"in precision={problem.precision!r} has {limit}"
    gathered = problem._replace(page_size=0, page_dtype=None)  # pages are gathered first
    reason = lacks(gathered, RECIPE_OPTIONS)
    return None if reason is None else f"in precision={problem.precision!r} {reason}"


def forward(problem: Problem, x: Tensors) -> Result:
    if problem.precision is not None:
        return _forward_recipe(problem, x)
    out, lse = empty_result(problem, x)
    stats = Stats(torch.empty_like(lse), torch.empty_like(lse)) if problem.return_stats else None
    for head_slice in head_slices(problem, x):
        row = _attend(problem, x, head_slice)
        head_slice.take_queries(out).copy_(row[0].transpose(1, 2))
        head_slice.take_rows(lse).copy_(row[1])
        if stats is not None:
            head_slice.take_rows(stats.max_logit).copy_(row[2])
            head_slice.take_rows(stats.entropy).copy_(row[3])
    return Result(out, lse, stats)


def _forward_recipe(problem: Problem, x: Tensors) -> Result:
    out, lse = emulation.attend(
        recipes.RECIPES[problem.precision],
        x.q,
        x.k,
        x.v,
        causal=problem.causal,
        window_size=problem.window_size,
        softmax_scale=problem.softmax_scale,
        cu_seqlens_q=x.cu_seqlens_q,
        cu_seqlens_k=x.cu_seqlens_k,
    )
    return Result(out.to(problem.out_dtype), lse)


def backward(
    problem: Problem, x: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    """By autograd through the formula itself. out and lse may cover more keys than this call has:
    with w = exp(lse of these keys - lse), these keys contribute w * o to out, and the gradient of
    their lse is w * (o . dout - delta).
    """
    wide, delta = accumulator_dtype(problem.dtype), row_delta(out, dout, dlse)
    names = [n for n in DIFFERENTIABLE if getattr(x, n) is not None]
    leaves = {n: getattr(x, n).detach().to(wide) for n in names}
    if problem.captured_is_constant:
        names.remove("captured")
    wanted = [leaves[n].requires_grad_() for n in names]
    with torch.enable_grad():
        y = x._replace(**leaves)
        loss = torch.zeros((), dtype=wide, device=x.q.device)
        for head_slice in head_slices(problem, y):
            o, row_lse = _attend(problem, y, head_slice)[:2]
            has_keys = row_lse > -torch.inf
            row_lse = row_lse.where(has_keys, 0.0)
            w = torch.exp(row_lse.detach() - head_slice.take_rows(lse)).where(has_keys, 0.0)
            row_dout = head_slice.take_queries(dout).transpose(1, 2).to(wide)
            row_dlse = w * ((o.detach() * row_dout).sum(-1) - head_slice.take_rows(delta))
            loss = loss + (o * w[..., None] * row_dout).sum() + (row_lse * row_dlse).sum()
        grads = torch.autograd.grad(loss, wanted, materialize_grads=True)
    g = dict(zip(names, grads, strict=True))
    dq, dk, dv = (g[n].to(grad_dtype(problem)) for n in ("q", "k", "v"))
    return Grads(dq, dk, dv, *(g.get(n) for n in LEARNED))


def probabilities(problem: Problem, x: Tensors, lse: Tensor, rows: list[int]) -> Tensor:
    """exp(s - lse) of the chosen rows, (batch, heads, len(rows), seqlen_k). Only one row of scores
    is in memory at a time.
    """
    wide = accumulator_dtype(problem.dtype)
    out = x.q.new_empty(problem.batch, problem.num_heads, len(rows), problem.seqlen_k, dtype=wide)
    for head_slice in head_slices(problem, x):
        q = head_slice.take_queries(x.q).transpose(1, 2).to(wide)
        k = head_slice.take_keys(x.k).transpose(1, 2).to(wide)
        pivot = head_slice.take_rows(lse.masked_fill(lse == -torch.inf, 0.0))
        for i, row in enumerate(rows):
            at = TileBounds(row, row + 1, 0, problem.seqlen_k)
            s = Scorer(problem, x, head_slice).scores(q[:, :, row : row + 1], k, at).s
            p = torch.exp(s - pivot[:, :, row, None, None])
            out[head_slice.batch, head_slice.heads, i] = p[:, :, 0]
    return out


def _attend(
    problem: Problem, x: Tensors, head_slice: HeadSlice
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out (b, h, m, d), lse, max_logit, entropy) of one head slice in accumulator precision."""
    wide = accumulator_dtype(problem.dtype)
    q = head_slice.take_queries(x.q).transpose(1, 2).to(wide)
    k, v = (head_slice.take_keys(t).transpose(1, 2).to(wide) for t in (x.k, x.v))
    at = TileBounds(0, q.shape[2], 0, k.shape[2])
    scorer = Scorer(problem, x, head_slice)
    s = scorer.scores(q, k, at).s
    logits = s if x.sinks is None else _append_sink(s, head_slice, x.sinks)
    p, lse = _softmax(logits)
    max_logit = s.detach().amax(-1) if s.shape[-1] else torch.full_like(lse, -torch.inf)
    out = grouped_matmul(scorer.apply_dropout(p[..., : at.k1], at), v)
    return out, lse, max_logit, torch.special.entr(p.detach()).sum(-1)


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(p, lse): 0 and -inf for a row without logits or with only -inf. p is computed from logits -
    max, not from logits - lse: lse - m would be lost in the rounding of a large lse.
    """
    if not logits.shape[-1]:
        return logits, logits.new_full(logits.shape[:-1], -torch.inf)
    m = logits.detach().amax(-1, keepdim=True)
    empty = m == -torch.inf
    pivot = m.masked_fill(empty, 0.0)
    p = torch.exp(logits - pivot)
    l = p.sum(-1, keepdim=True).masked_fill(empty, 1.0)
    return p / l, (pivot + torch.log(l)).masked_fill(empty, -torch.inf).squeeze(-1)


def _append_sink(s: Tensor, head_slice: HeadSlice, sinks: Tensor) -> Tensor:
    sink = sinks.to(s.dtype)[head_slice.heads].view(1, -1, 1, 1)
    return torch.cat([s, sink.expand(s.shape[0], -1, s.shape[2], 1)], -1)


backend: Backend = make_backend(
    supports, forward, backward, options=OPTIONS, precisions=(None, *LOW_PRECISIONS)
)
