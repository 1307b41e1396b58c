"""FlashAttention-2 over keys in segments, each giving (out, lse), and their merge: split-KV
decoding, pages, a shared prefix, a ring. The ledger shows their additional traffic.

All functions take a Problem without a mask and its Tensors, and return out and lse.
"""

import torch
from torch import Tensor

from onchip.core.backend import Result
from onchip.core.problem import Problem, Tensors
from onchip.kernels.cpu.head_slice import ALL, HeadSlice, head_slices
from onchip.kernels.tiles import paper_v2_tiles
from onchip.lab.visits import even_parts
from onchip.masks.visibility import Visibility

from .call import PaperCall, convert, results
from .ledger import current
from .memory import Array, Span, Tile
from .v2 import flash_attention_2

Part = tuple[Array, Array]  # out, lse


def split_kv(problem: Problem, x: Tensors, num_splits: int) -> Result:
    """Flash-decoding: each program takes a share of the keys, unrounded, and one more merges."""
    book, result = current(), results(problem, x)
    for head_slice in head_slices(problem, x):
        rule = head_slice.visibility
        rows = 0, rule.seqlen_q
        parts = []
        for keys in even_parts(rule.seqlen_k, num_splits):
            call = PaperCall(problem, x, _segment(head_slice, rows, keys), book)
            parts.append(_attend(call, ("o.parts", "lse.parts")))
        whole = PaperCall(problem, x, head_slice, book)
        out, lse = whole.take_queries("o", result.out), whole.take_rows("lse", result.lse)
        merge(parts, (out, lse), whole.row_tiles(book.tiles_for(problem, paper_v2_tiles)))
    return result


def paged(problem: Problem, x: Tensors) -> Result:
    """PagedAttention: x.k and x.v are pages. A tile of keys is located through the page table;
    every visit reads its entries.
    """
    book, result = current(), results(problem, x)
    tables = x.page_table.tolist()
    for b, seqlen_k in enumerate(x.cache_seqlens.tolist()):
        rule = Visibility(problem.seqlen_q, seqlen_k, problem.causal, problem.window_size)
        head_slice = HeadSlice(slice(b, b + 1), ALL, slice(0, 0), ALL, ALL, b, 0, rule)
        call = PaperCall(problem, x, head_slice, book)
        group = call.q.shape[2]
        call.k = PagedArray(call.k, x.k, tables[b], group, counted=True)
        call.v = PagedArray(call.v, x.v, tables[b], group, counted=False)
        out, lse = call.take_queries("o", result.out), call.take_rows("lse", result.lse)
        flash_attention_2(call, out, lse, book.tiles_for(problem, paper_v2_tiles))
    return result


class PagedArray(Array):
    """Keys or values of one sequence, spread over a pool (num_pages, page_size, kv_heads, dim).
    counted: whether loads also read page ids. Only k does: v uses the same ids.
    """

    pages: list[int]
    group: int
    counted: bool

    def __init__(self, like: Array, pool: Tensor, pages: list[int], group: int, counted: bool):
        super().__init__(like.book, like.name, pool, like.wide)
        self.pages, self.group, self.counted = pages, group, counted

    def load(self, rows: Span, columns: Span | None = None) -> Tile:
        size, parts = self.data.shape[1], []
        for i in range(rows[0] // size, -(-rows[1] // size)):
            slots = max(rows[0] - i * size, 0), min(rows[1] - i * size, size)
            parts.append(self.data[self.pages[i], slots[0] : slots[1]])
        tile = torch.cat(parts).transpose(0, 1)[None, :, None]  # (1, kv_heads, 1, rows, dim)
        tile = tile.expand(-1, -1, self.group, -1, -1)
        self.book.reads[self.name] += tile.numel() * tile.element_size()
        heads = tile.shape[1] * self.group
        self.book.reads["page_table"] += 4 * len(parts) * heads * self.counted
        return Tile(tile.to(self.wide), self.book)


def cascade(problem: Problem, x: Tensors, prefix: tuple[Tensor, Tensor]) -> Result:
    """All sequences begin with the keys and values of `prefix`, (seqlen, kv_heads, dim) each. The
    prefix is attended once, by the queries of the whole batch as rows of one tile; x.k and x.v by
    their own sequence. Causal and window begin after the prefix.
    """
    book, result = current(), results(problem, x)
    batch, seqlen_q, heads, _ = x.q.shape
    shared = x._replace(q=x.q.flatten(0, 1)[None], k=prefix[0][None], v=prefix[1][None])
    rule = Visibility(batch * seqlen_q, len(prefix[0]))
    first = PaperCall(problem, shared, HeadSlice(ALL, ALL, ALL, ALL, ALL, 0, 0, rule), book)
    out, lse = _attend(first, ("o.parts", "lse.parts"))
    per_sequence = lambda t: t.data[0].unflatten(-2, (batch, seqlen_q)).movedim(-3, 0)
    prefix_part = tuple(Array(book, t.name, per_sequence(t), t.wide) for t in (out, lse))
    for call in (PaperCall(problem, x, head_slice, book) for head_slice in head_slices(problem, x)):
        part = _attend(call, ("o.parts", "lse.parts"))
        whole = call.take_queries("o", result.out), call.take_rows("lse", result.lse)
        merge([prefix_part, part], whole, call.row_tiles(book.tiles_for(problem, paper_v2_tiles)))
    return result


def ring(problem: Problem, x: Tensors, num_ranks: int) -> Result:
    """Ring Attention, all ranks in one ledger: each rank holds a chunk of queries and of keys. In
    every round it receives the keys of its neighbour (`k.sent`, `k.received`) and merges the result
    into a state in HBM. Rounds without visible pairs are not computed.
    """
    book, result = current(), results(problem, x)
    for head_slice in head_slices(problem, x):
        rule = head_slice.visibility
        chunks = even_parts(rule.seqlen_k, num_ranks)
        for rank, rows in enumerate(even_parts(rule.seqlen_q, num_ranks)):
            state = None
            for keys in (chunks[(rank - n) % num_ranks] for n in range(num_ranks)):
                call = PaperCall(problem, x, _segment(head_slice, rows, keys), book)
                if keys != chunks[rank]:
                    _receive(call)
                if call.rule.spans(0, call.rule.seqlen_q):
                    state = _merge_states(call, state)
            _finish(
                PaperCall(problem, x, _segment(head_slice, rows, chunks[rank]), book), state, result
            )
    return result


def merge(parts: list[Part], whole: Part, rows: list[Span]) -> None:
    """Merge the states of the same queries over several segments of keys."""
    out, lse = whole
    for i in rows:
        zero = lse.zeros(i)
        m, l, acc = zero.select(lambda t: t - torch.inf), zero, out.zeros(i)
        for part_out, part_lse in parts:
            lse_s, o_s = part_lse.load(i), part_out.load(i)
            m_new = m.maximum(lse_s)
            alpha, w = m.below(m_new).exp(), lse_s.below(m_new).exp()
            m, l, acc = m_new, l * alpha + w, acc * alpha + o_s * w
        out.store(acc.over(l), i)
        lse.store(m + l.log(), i)


def _segment(head_slice: HeadSlice, rows: Span, keys: Span) -> HeadSlice:
    shifted = lambda old, new: slice((old.start or 0) + new[0], (old.start or 0) + new[1])
    rule = head_slice.visibility.restrict(rows, keys)
    return head_slice._replace(
        rows=shifted(head_slice.rows, rows), keys=shifted(head_slice.keys, keys), visibility=rule
    )


def _attend(call: PaperCall, names: tuple[str, str]) -> Part:
    """(out, lse) of one segment, unrounded, in HBM."""
    part = call.new(names[0], call.v.shape[-1], call.wide), call.new(names[1], 1, call.wide)
    flash_attention_2(call, *part, call.book.tiles_for(call.problem, paper_v2_tiles))
    return part


def _receive(call: PaperCall) -> None:
    """Receive the keys and values of a neighbour, one copy for all query heads of a group."""
    for array in (call.k, call.v):
        one = array.data[:, :, 0]
        everything = 0, one.shape[-2]
        tile = Array(call.book, f"{array.name}.sent", one).load(everything)
        arrived = Array(call.book, f"{array.name}.received", torch.empty_like(one))
        arrived.store(tile, everything)


def _merge_states(call: PaperCall, state: Part | None) -> Part:
    if state is None:
        return _attend(call, ("o.state", "lse.state"))
    part = _attend(call, ("o.parts", "lse.parts"))
    merge([state, part], state, call.row_tiles(call.book.tiles_for(call.problem, paper_v2_tiles)))
    return state


def _finish(call: PaperCall, state: Part | None, result: Result) -> None:
    out, lse = call.take_queries("o", result.out), call.take_rows("lse", result.lse)
    if state is None:
        out.fill(0.0), lse.fill(-torch.inf)
    else:
        convert(state[0], out)
        convert(state[1], lse)
