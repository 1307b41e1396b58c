"""FlashAttention (Dao et al., arXiv 2205.14135) as published: Algorithms 1, 2 and 4, and 5 if a
mask has EMPTY blocks.

    for j in key tiles:      load k_j, v_j                 once per key tile
        for i in row tiles:  load q_i, o_i, l_i, m_i       every visit
                             fold s = q_i k_j^T
                             store o_i, l_i, m_i           every visit

Causal and window are applied as masks and skip no tile; given as a block mask, `masks.causal()`,
they skip.

Worked shape: one head, 300 tokens, tiles of 128: 3 x 3 visits, so o, l and m are moved 3 times each
way. The teaching version in Triton is examples/versions/v1.py.
"""

import torch
from torch import Tensor

from onchip.core.backend import Grads, Result, make_backend
from onchip.core.problem import Problem, Tensors
from onchip.kernels.tiles import TileConfig, paper_v1_tiles

from .call import OPTIONS, PaperCall, calls, convert, overlaps, results, supports
from .gradients import Gradients
from .ledger import current
from .memory import Array, Span, Tile, accumulate


def forward(problem: Problem, x: Tensors) -> Result:
    """lse = m + log l is computed after the algorithm, which returns l and m."""
    book, result = current(), results(problem, x)
    for call in calls(problem, x, book):
        out = call.take_queries("o", result.out)
        O = out if out.data.dtype == call.scratch else call.new("o", out.shape[-1], call.scratch)
        l, m = (call.new(name, 1, call.wide) for name in "lm")
        flash_attention(call, O, l, m, book.tiles_for(problem, paper_v1_tiles))
        if O is not out:
            convert(O, out)
        call.take_rows("lse", result.lse).data.copy_(m.data + l.data.log())
    return result


def flash_attention(call: PaperCall, O: Array, l: Array, m: Array, tiles: TileConfig) -> None:
    """Algorithms 1 and 5. O, l and m in HBM are the running state, O divided by l."""
    O.fill(0.0), l.fill(0.0), m.fill(-torch.inf)
    rows = call.row_tiles(tiles)
    spans_by_row = call.visited_spans(rows, skips=False)
    for j in call.key_tiles(tiles):
        k_j, v_j = call.k.load(j), call.v.load(j)
        for i, spans in zip(rows, spans_by_row, strict=True):
            if overlaps(j, spans):
                visit(call, (O, l, m), (k_j, v_j), i, j)


def visit(
    call: PaperCall, state: tuple[Array, Array, Array], kv: tuple[Tile, Tile], i: Span, j: Span
) -> None:
    """Lines 8 to 13 of Algorithm 1."""
    O, l, m = state
    k_j, v_j = kv
    q_i, o_i, l_i, m_i = (x.load(i) for x in (call.q, O, l, m))
    s = call.mask_scores(q_i @ k_j.T * call.problem.softmax_scale, i, j)
    m_ij = s.rowmax()
    p = s.below(m_ij).exp()
    l_ij = p.rowsum()
    m_new = m_i.maximum(m_ij)
    alpha, beta = m_i.below(m_new).exp(), m_ij.below(m_new).exp()
    l_old = alpha * l_i
    l_new = l_old + beta * l_ij
    o_new = (l_old * o_i + beta * (call.apply_dropout(p, i, j) @ v_j)).over(l_new)
    O.store(o_new, i), l.store(l_new, i), m.store(m_new, i)
    call.report_visit("paper_v1", i, j, s, (m_new, l_new, o_new))


def backward(
    problem: Problem, x: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    """Algorithm 4, which takes l and m: (1, lse) is equivalent to (l, m)."""
    book = current()
    grads, tiles = Gradients(problem, x, book), book.tiles_for(problem, paper_v1_tiles)
    safe = lse.masked_fill(lse == -torch.inf, 0.0)  # rows with only scores of -inf
    for call in calls(problem, x, book):
        saved = {
            "o": call.take_queries("o", out),
            "do": call.take_queries("do", dout),
            "l": call.take_rows("l", torch.ones_like(lse)),
            "m": call.take_rows("m", safe),
        }
        if dlse is not None:
            saved["dlse"] = call.take_rows("dlse", dlse)
        flash_attention_backward(call, saved, grads.of(call), tiles)
    return grads.finish()


def flash_attention_backward(
    call: PaperCall, saved: dict[str, Array], grads: tuple[Array, Array, Array], tiles: TileConfig
) -> None:
    """Algorithm 4: dK and dV of the key tile stay on the chip, dQ is loaded and stored in every
    visit.
    """
    dQ, dK, dV = (x.fill(0.0) for x in grads)
    rows = call.row_tiles(tiles)
    spans_by_row = call.visited_spans(rows, skips=False)
    for j in call.key_tiles(tiles):
        kv = call.k.load(j), call.v.load(j)
        dkv = dK.zeros(j), dV.zeros(j)
        for i, spans in zip(rows, spans_by_row, strict=True):
            if overlaps(j, spans):
                dkv = visit_backward(call, saved, kv, dkv, dQ, (i, j))
        dK.store(dkv[0], j), dV.store(dkv[1], j)


def visit_backward(
    call: PaperCall,
    saved: dict[str, Array],
    kv: tuple[Tile, Tile],
    dkv: tuple[Tile, Tile],
    dQ: Array,
    at: tuple[Span, Span],
) -> tuple[Tile, Tile]:
    """Lines 10 to 22 of Algorithm 4."""
    (i, j), (k_j, v_j), (dk_j, dv_j) = at, kv, dkv
    q_i, o_i, do_i, dq_i, l_i, m_i = (
        x.load(i) for x in (call.q, saved["o"], saved["do"], dQ, saved["l"], saved["m"])
    )
    tau = call.problem.softmax_scale
    s = call.mask_scores(q_i @ k_j.T * tau, i, j)
    p = (s - m_i).exp() / l_i
    dv_j = accumulate(dv_j, call.apply_dropout(p, i, j).T, do_i)
    dp = call.apply_dropout(do_i @ v_j.T, i, j)
    d_i = (do_i * o_i).rowsum()
    if "dlse" in saved:
        d_i = d_i - saved["dlse"].load(i)
    ds = p * (dp - d_i) * tau
    dQ.store(accumulate(dq_i, ds, k_j), i)
    return accumulate(dk_j, ds.T, q_i), dv_j


backend = make_backend(supports, forward, backward, options=OPTIONS)
