"""Standard attention: Algorithm 0 of the FlashAttention paper, and Algorithm 3, its backward. S and
P are N x N in HBM; nothing is skipped.

    HBM:   q, k --> S = q k^T --> P = softmax(S) --> out = P v      each arrow: load tiles, store

Algorithm 3 needs P. Inside a `ledger` block HBM still holds it. Elsewhere, and if (out, lse) cover
more keys, P is first written again from lse, under separate names in the ledger.

Worked shape: one head, 300 tokens, head_dim 64: S and P have 90,000 numbers each, q, k, v and out
19,200 each. examples/versions/v1.py is the first version without them.
"""

import torch
from torch import Tensor

from onchip.core.backend import Grads, Result, make_backend
from onchip.core.problem import Problem, Tensors
from onchip.kernels.tiles import paper_sram

from .call import OPTIONS, PaperCall, calls, cuts, results, supports
from .gradients import Gradients
from .ledger import current
from .matmul import product
from .memory import Array, Span, Tile


def forward(problem: Problem, x: Tensors) -> Result:
    book, result = current(), results(problem, x)
    stored = []
    for call in calls(problem, x, book):
        out, lse = call.take_queries("o", result.out), call.take_rows("lse", result.lse)
        stored.append(standard_attention(call, out, lse).data)
    if result.lse.numel():  # an empty tensor has no address, and nothing to save
        book.saved[result.lse.data_ptr()] = (result.lse, *stored)
    return result


def standard_attention(call: PaperCall, out: Array, lse: Array) -> Array:
    """Algorithm 0. Returns P, which stays in HBM. (lse is for the contract, 4 bytes a row.)"""
    S, P = (call.new(name, call.k.shape[-2], call.scratch) for name in "sp")
    tau, sram = call.problem.softmax_scale, sram_of(call)
    product(call.q, call.k.T, S, sram, of_c=lambda s, i, j: s * tau)
    for i in cuts(P.shape[-2], max(1, sram // max(1, P.shape[-1])), False):
        softmax(call, S, P, lse, i)
    product(P, call.v, out, sram, of_a=call.apply_dropout)
    return P


def softmax(call: PaperCall, S: Array, P: Array, lse: Array, i: Span) -> None:
    """Rows i of P = softmax(S): one load if a row fits on the chip, else online in two passes."""
    tiles = cuts(S.shape[-1], sram_of(call), False)
    if len(tiles) == 1:
        s = call.mask_scores(S.load(i, tiles[0]), i, tiles[0])
        m = s.rowmax()
        p = s.below(m).exp()
        l = p.rowsum()
        P.store(p.over(l), i)
    else:
        m, l = online(call, S, lse, i, tiles)
        for j in tiles:
            P.store(call.mask_scores(S.load(i, j), i, j).below(m).exp().over(l), i, j)
    lse.store(m + l.log(), i)


def online(call: PaperCall, S: Array, lse: Array, i: Span, tiles: list[Span]) -> tuple[Tile, Tile]:
    m, l = lse.zeros(i).select(lambda x: x - torch.inf), lse.zeros(i)
    for j in tiles:
        s = call.mask_scores(S.load(i, j), i, j)
        m_new = m.maximum(s.rowmax())
        l = l * m.below(m_new).exp() + s.below(m_new).exp().rowsum()
        m = m_new
    return m, l


def backward(
    problem: Problem, x: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    book = current()
    grads = Gradients(problem, x, book, summed_in_hbm=False)
    saved = book.saved.pop(lse.data_ptr(), None)
    for n, call in enumerate(calls(problem, x, book)):
        do, D = call.take_queries("do", dout), None
        if saved is None or dlse is not None:
            D = _delta(call, out, dout, dlse)
        P = _rewritten(call, lse) if saved is None else Array(book, "p", saved[1 + n], call.wide)
        standard_backward(call, P, do, D, grads.of(call))
    return grads.finish()


def standard_backward(
    call: PaperCall, P: Array, do: Array, D: Array | None, grads: tuple[Array, Array, Array]
) -> None:
    """Algorithm 3. D, if given, holds the row sums of P * dP that line 3 computes."""
    (dQ, dK, dV), sram = grads, sram_of(call)
    columns = P.shape[-1]
    transposed = lambda p, j, i: call.apply_dropout(p.T, i, j).T
    product(P.T, do, dV, sram, of_a=transposed)
    dP, dS = (call.new(name, columns, call.scratch) for name in ("dp", "ds"))
    product(do, call.v.T, dP, sram, of_c=call.apply_dropout)
    for i in cuts(P.shape[-2], max(1, sram // max(1, 2 * columns)), False):
        softmax_backward(call, (P, dP, dS), D, i)
    product(dS, call.k, dQ, sram)
    product(dS.T, call.q, dK, sram)


def softmax_backward(
    call: PaperCall, arrays: tuple[Array, Array, Array], D: Array | None, i: Span
) -> None:
    """Rows i of dS = P * (dP - rowsum(P * dP)); two loads of each if a row of both does not fit."""
    P, dP, dS = arrays
    tiles = cuts(P.shape[-1], max(1, sram_of(call) // 2), False)
    tau, held = call.problem.softmax_scale, None
    if D is not None:
        d_i = D.load(i)
    else:
        d_i = Tile(P.data.new_zeros(*P.shape[:-2], i[1] - i[0], 1, dtype=call.wide), call.book)
        for j in tiles:
            held = P.load(i, j), dP.load(i, j)
            d_i = d_i + (held[0] * held[1]).rowsum()
    for j in tiles:
        if held is None or len(tiles) > 1:
            held = P.load(i, j), dP.load(i, j)
        dS.store(held[0] * (held[1] - d_i) * tau, i, j)


def sram_of(call: PaperCall) -> int:
    return paper_sram(call.book.sram, call.problem.dtype.itemsize)


def _delta(call: PaperCall, out: Tensor, dout: Tensor, dlse: Tensor | None) -> Array:
    """rowsum(dO * O) - dlse, written to HBM."""
    D = call.new("delta", 1, call.wide)
    o, do = call.take_queries("o.delta", out), call.take_queries("do.delta", dout)
    everything = 0, D.shape[-2]
    d = (do.load(everything) * o.load(everything)).rowsum()
    if dlse is not None:
        d = d - call.take_rows("dlse", dlse).load(everything)
    D.store(d, everything)
    return D


def _rewritten(call: PaperCall, lse: Tensor) -> Array:
    """P = exp(S - lse) in HBM, again."""
    P = call.new("p.rewritten", call.k.shape[-2], call.scratch)
    q, k = (Array(call.book, f"{x.name}.rewritten", x.data, call.wide) for x in (call.q, call.k))
    rows = call.take_rows("lse", lse.masked_fill(lse == -torch.inf, 0.0))
    tau = call.problem.softmax_scale

    def to_p(s: Tile, i: Span, j: Span) -> Tile:
        return (call.mask_scores(s * tau, i, j) - rows.load(i)).exp()

    product(q, k.T, P, sram_of(call), of_c=to_p)
    return Array(call.book, "p", P.data, call.wide)


backend = make_backend(supports, forward, backward, options=OPTIONS)
