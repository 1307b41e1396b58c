"""FlashAttention-2 (Dao, arXiv 2307.08691): Algorithms 1 and 2. FlashAttention-3 moves the same
bytes.

    for i in row tiles:      load q_i                      once
        for j in key tiles:  load k_j, v_j                 every visit
                             fold s = q_i k_j^T; m, l, acc stay on the chip
        store out_i, lse_i                                 once

O is divided by l once, and lse is all that is saved of the softmax. Tiles that causal and window
hide completely are skipped (section 3.1), and EMPTY blocks of a mask.

Worked shape: one head, 300 tokens, tiles of 128, causal: 6 of 9 tiles are visited, out is stored
once. The teaching version in Triton is examples/versions/v2.py.
"""

import torch
from torch import Tensor

from onchip.core.backend import Grads, Result, make_backend
from onchip.core.problem import Problem, Tensors
from onchip.kernels.tiles import TileConfig, paper_v2_backward_tiles, paper_v2_tiles

from .arithmetic import EXACT, Arithmetic
from .call import OPTIONS, PaperCall, calls, overlaps, results, supports
from .gradients import Gradients
from .ledger import current
from .memory import Array, Span, Tile, accumulate

State = tuple[Tile, Tile, Tile]  # m, l, acc


def forward(problem: Problem, x: Tensors) -> Result:
    return attend(problem, x, EXACT)


def attend(problem: Problem, x: Tensors, arithmetic: Arithmetic) -> Result:
    book, result = current(), results(problem, x)
    for call in calls(problem, x, book):
        out, lse = call.take_queries("o", result.out), call.take_rows("lse", result.lse)
        flash_attention_2(call, out, lse, book.tiles_for(problem, paper_v2_tiles), arithmetic)
    return result


def flash_attention_2(
    call: PaperCall, out: Array, lse: Array, tiles: TileConfig, arithmetic: Arithmetic = EXACT
) -> None:
    """Algorithm 1."""
    rows = call.row_tiles(tiles)
    keys = call.key_tiles(tiles)
    for i, spans in zip(rows, call.visited_spans(rows, skips=True), strict=True):
        q_i = call.q.load(i)
        m, l, acc = lse.zeros(i), lse.zeros(i), out.zeros(i)
        m = m.select(lambda x: x - torch.inf)
        for j in keys:
            if overlaps(j, spans):
                m, l, acc = visit(call, q_i, (m, l, acc), (i, j), arithmetic)
        out.store(acc.over(l), i)
        lse.store(m + l.log(), i)


def visit(
    call: PaperCall, q_i: Tile, state: State, at: tuple[Span, Span], arithmetic: Arithmetic
) -> State:
    """Lines 7 to 10 of Algorithm 1."""
    (i, j), (m, l, acc) = at, state
    k_j, v_j = call.k.load(j), call.v.load(j)
    s = call.mask_scores(q_i @ k_j.T * call.problem.softmax_scale, i, j)
    m_new = arithmetic.choose_maximum(m, m.maximum(s.rowmax()))
    p = arithmetic.exp(s.below(m_new))
    alpha = arithmetic.exp(m.below(m_new))
    l = alpha * l + p.rowsum()
    acc = accumulate(arithmetic.rescale(acc, alpha), call.apply_dropout(p, i, j), v_j)
    call.report_visit(arithmetic.kernel, i, j, s, (m_new, l, acc))
    return m_new, l, acc


def backward(
    problem: Problem, x: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    return attend_backward(problem, x, (out, lse, dout, dlse), EXACT)


def attend_backward(
    problem: Problem,
    x: Tensors,
    given: tuple[Tensor, Tensor, Tensor, Tensor | None],
    arithmetic: Arithmetic,
) -> Grads:
    out, lse, dout, dlse = given
    book = current()
    grads, tiles = Gradients(problem, x, book), book.tiles_for(problem, paper_v2_backward_tiles)
    safe = lse.masked_fill(lse == -torch.inf, 0.0)  # rows with only scores of -inf
    for call in calls(problem, x, book):
        o, do = call.take_queries("o", out), call.take_queries("do", dout)
        D = call.new("delta", 1, call.wide)
        dlse_rows = None if dlse is None else call.take_rows("dlse", dlse)
        row_products(o, do, D, call.row_tiles(tiles), dlse_rows)
        saved = {"do": do, "lse": call.take_rows("lse", safe), "delta": D}
        flash_attention_2_backward(call, saved, grads.of(call), tiles, arithmetic)
    return grads.finish()


def row_products(o: Array, do: Array, D: Array, rows: list[Span], dlse: Array | None) -> None:
    """D = rowsum(dO * O) (- dlse), line 4 of Algorithm 2, written to HBM."""
    for i in rows:
        d_i = (do.load(i) * o.load(i)).rowsum()
        D.store(d_i if dlse is None else d_i - dlse.load(i), i)


def flash_attention_2_backward(
    call: PaperCall,
    saved: dict[str, Array],
    grads: tuple[Array, Array, Array],
    tiles: TileConfig,
    arithmetic: Arithmetic = EXACT,
) -> None:
    """Algorithm 2 from line 5 on."""
    dQ, dK, dV = grads
    dQ.fill(0.0)
    rows = call.row_tiles(tiles)
    spans_by_row = call.visited_spans(rows, skips=True)
    for j in call.key_tiles(tiles):
        kv = call.k.load(j), call.v.load(j)
        dkv = dK.zeros(j), dV.zeros(j)
        for i, spans in zip(rows, spans_by_row, strict=True):
            if overlaps(j, spans):
                dkv = visit_backward(call, saved, kv, dkv, dQ, (i, j), arithmetic)
        dK.store(dkv[0], j), dV.store(dkv[1], j)


def visit_backward(
    call: PaperCall,
    saved: dict[str, Array],
    kv: tuple[Tile, Tile],
    dkv: tuple[Tile, Tile],
    dQ: Array,
    at: tuple[Span, Span],
    arithmetic: Arithmetic,
) -> tuple[Tile, Tile]:
    """The inner loop of Algorithm 2. (The paper also lists O_i among its loads, but does not use
    it.)
    """
    (i, j), (k_j, v_j), (dk_j, dv_j) = at, kv, dkv
    q_i, do_i, lse_i, d_i = (x.load(i) for x in (call.q, saved["do"], saved["lse"], saved["delta"]))
    tau = call.problem.softmax_scale
    p = arithmetic.exp(call.mask_scores(q_i @ k_j.T * tau, i, j) - lse_i)
    dv_j = accumulate(dv_j, call.apply_dropout(p, i, j).T, do_i)
    dp = call.apply_dropout(do_i @ v_j.T, i, j)
    ds = p * (dp - d_i) * tau
    dQ.store(accumulate(dQ.load(i), ds, k_j), i)
    return accumulate(dk_j, ds.T, q_i), dv_j


backend = make_backend(supports, forward, backward, options=OPTIONS)
