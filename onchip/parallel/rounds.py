"""One round: some queries of a long sequence against some of its keys, as one call of a kernel.

Positions ascend on both sides, so under causal, window and documents each query sees an interval of
the keys at hand. Where the intervals are what a kernel knows (all keys, causal, a window aligned
bottom-right) after rows and keys that take no part are cut off, the kernel is asked for that: every
round of contiguous, zigzag and striped layouts under a causal mask, and of contiguous ones with a
window. Any other round is a block mask. ALiBi and dropout go by positions in the whole sequence,
which the call then carries (`Tensors.places_q`); nothing else in a kernel asks where it is.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip import library
from onchip.dispatch import kernel_module
from onchip.kernels.protocol import Grads, accumulator_dtype
from onchip.masks import BlockMask, Mask
from onchip.masks.nodes import Grid, Interval, Node, both, build
from onchip.masks.submask import node_of, submask
from onchip.parallel.sharding import Layout, documents_of, visible_cells
from onchip.problem import Options, Question, Tensors, Window, ask, describe, device_info

Pair = tuple[Tensor, Tensor]
CPU = torch.device("cpu")
PLANS = 64  # a training step has a few kinds of layers; documents change with every batch


class Rule(NamedTuple):
    """What the queries of a whole sequence see. `documents` are the offsets of packed ones. planes
    are (batch, heads) of the call, for masks that differ between them. `placed`: ALiBi or dropout
    ask where queries and keys stand.
    """

    seqlen: int
    causal: bool = False
    window_size: Window = (None, None)
    documents: tuple[int, ...] | None = None
    mask: Mask | BlockMask | None = None
    planes: tuple[int, int] = (1, 1)
    placed: bool = False

    def spans(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[lo, hi): the keys that causal, window and documents leave to queries at `rows`."""
        left, right = self.window_size
        right = 0 if self.causal else right
        lo = torch.zeros_like(rows) if left is None else (rows - left).clamp(min=0)
        hi = torch.full_like(rows, self.seqlen)
        if right is not None:
            hi = (rows + right + 1).clamp(max=self.seqlen)
        if self.documents is not None:
            starts = torch.tensor(self.documents)
            document = documents_of(rows, starts)
            lo, hi = torch.maximum(lo, starts[document]), torch.minimum(hi, starts[document + 1])
        return lo, hi

    def places(self, at: Tensor) -> Tensor:
        """int32 (2, n): where positions stand in their own sequence, and which one that is."""
        if self.documents is None:
            return torch.stack([at, torch.zeros_like(at)]).int()
        starts = torch.tensor(self.documents)
        document = documents_of(at, starts)
        return torch.stack([at - starts[document], document]).int()


class Round(NamedTuple):
    """Local queries `rows` see of the local keys `keys` what causal and window say, aligned
    bottom-right, or what the mask says.
    """

    rows: slice
    keys: slice
    causal: bool = False
    window_size: Window = (None, None)
    mask: BlockMask | None = None
    places: tuple[Tensor, Tensor] | None = None

    def pairs(self, planes: tuple[int, int]) -> int:
        """How many (query, key) pairs are visible over (batch, heads)."""
        batch, heads = planes
        if self.mask is not None:
            planes_b, planes_h = self.mask.shape[:2]
            return int(visible_cells(self.mask).sum()) * (batch // planes_b) * (heads // planes_h)
        rows, keys = (s.stop - s.start for s in (self.rows, self.keys))
        lo, hi = Rule(keys, self.causal, self.window_size).spans(torch.arange(rows) + keys - rows)
        return batch * heads * int((hi - lo).clamp(min=0).sum())


class Schedule(NamedTuple):
    """What one rank does: rounds[i] is over the keys of rank - i, None where it sees none of them.
    Keys travel as many hops as any rank needs. `lengths` are what each rank holds.
    """

    rounds: tuple[Round | None, ...]
    lengths: tuple[int, ...]

    @property
    def hops(self) -> int:
        return len(self.rounds) - 1


@lru_cache(maxsize=PLANS)
def schedule(layout: Layout, rule: Rule, rank: int, device: torch.device) -> Schedule:
    """The rounds of a ring."""
    rows = layout.positions(rank, rule.seqlen)
    sources = [(rank - hop) % layout.size for hop in range(hops(layout, rule) + 1)]
    columns = (layout.positions(source, rule.seqlen) for source in sources)
    whole = _whole(rule, device)
    rounds = tuple(plan(rule, rows, cols, device, whole) for cols in columns)
    return Schedule(rounds, tuple(layout.lengths(rule.seqlen)))


def pairs_of_rounds(layout: Layout, rule: Rule, rank: int) -> list[int]:
    """(query, key) pairs of one head that causal, window and documents leave to each round of a
    rank; a mask is not counted.
    """
    lo, hi = rule.spans(layout.positions(rank, rule.seqlen))
    found = []
    for hop in range(hops(layout, rule) + 1):
        cols = layout.positions((rank - hop) % layout.size, rule.seqlen)
        seen = torch.searchsorted(cols, hi) - torch.searchsorted(cols, lo)
        found.append(int(seen.clamp(min=0).sum()))
    return found


@lru_cache(maxsize=PLANS)
def hops(layout: Layout, rule: Rule) -> int:
    """How far keys must travel, which every rank finds alike: less than a full turn only where
    windows or documents end.
    """
    if rule.window_size == (None, None) and rule.documents is None:
        return layout.size - 1
    reaches = [_reach(layout.pieces(rank, rule.seqlen), rule) for rank in range(layout.size)]
    held = [torch.tensor(layout.pieces(r, rule.seqlen)).view(-1, 3) for r in range(layout.size)]
    for hop in range(layout.size - 1, 0, -1):
        if any(_meet(reaches[r], held[(r - hop) % layout.size]) for r in range(layout.size)):
            return hop
    return 0


def _reach(pieces: list, rule: Rule) -> Tensor:
    """(pieces, 2): the keys that queries of each piece see lie in [lo, hi), which both ascend."""
    ends = torch.tensor([(a, a + (b - a - 1) // s * s) for a, b, s in pieces]).view(-1, 2)
    return torch.stack([rule.spans(ends[:, 0])[0], rule.spans(ends[:, 1])[1]], 1)


def _meet(reach: Tensor, pieces: Tensor) -> bool:
    """Whether some interval meets some piece, both ascending: the first piece that ends after the
    interval begins must begin before it ends.
    """
    if not (len(reach) and len(pieces)):
        return False
    first = torch.searchsorted(pieces[:, 1].contiguous(), reach[:, 0].contiguous(), right=True)
    starts = torch.cat([pieces[:, 0], pieces.new_tensor([torch.iinfo(torch.int64).max])])
    return bool(((starts[first] < reach[:, 1]) & (reach[:, 0] < reach[:, 1])).any())


def _whole(rule: Rule, device: torch.device) -> Node | None:
    if rule.mask is None:
        return None
    return node_of(rule.mask, rule.planes, (rule.seqlen, rule.seqlen), device)


def plan(
    rule: Rule, rows: Tensor, cols: Tensor, device: torch.device, whole: Node | None = None
) -> Round | None:
    """The round of queries and keys at these positions, both ascending; None if no key is seen.
    whole: the rule's mask, if it was resolved before.
    """
    if not (len(rows) and len(cols)):
        return None
    lo, hi = (torch.searchsorted(cols, ends) for ends in rule.spans(rows))
    if rule.mask is not None:
        seen = submask(whole or _whole(rule, device), rows, cols)
        node = both(Interval(seen.grid, lo, hi), seen)
        if not isinstance(node, Interval) or len(node.bounds[0]) > 1:
            return _masked(rule, node, rows, cols, device)
        lo, hi = (ends[0].long() for ends in node.bounds)
    found = _of_intervals(lo, hi, device)
    return found and _placed(rule, found, rows, cols, device)


def _masked(
    rule: Rule, node: Node, rows: Tensor, cols: Tensor, device: torch.device
) -> Round | None:
    mask = build(node).to(device)
    if not (mask.num_full or mask.num_partial):
        return None
    found = Round(slice(0, len(rows)), slice(0, len(cols)), mask=mask)
    return _placed(rule, found, rows, cols, device)


def _placed(rule: Rule, found: Round, rows: Tensor, cols: Tensor, device: torch.device) -> Round:
    if not rule.placed:
        return found
    places = rule.places(rows[found.rows]), rule.places(cols[found.keys])[0]
    return found._replace(places=(places[0].to(device), places[1].contiguous().to(device)))


def _of_intervals(lo: Tensor, hi: Tensor, device: torch.device) -> Round | None:
    """The round in which query i sees the keys [lo[i], hi[i]), which both ascend where it sees any:
    without the rows and keys at its ends that take no part.
    """
    seeing = (lo < hi).nonzero().flatten()
    if not len(seeing):
        return None
    rows = slice(int(seeing[0]), int(seeing[-1]) + 1)
    keys = slice(int(lo[seeing].min()), int(hi[seeing].max()))
    lo, hi = lo[rows] - keys.start, hi[rows] - keys.start
    band = _band(lo, hi, keys.stop - keys.start)
    if band is not None:
        left, right = band
        if right == 0:
            return Round(rows, keys, True, (left, None))
        return Round(rows, keys, False, (left, right))
    grid = Grid(1, 1, len(lo), keys.stop - keys.start, CPU)
    return Round(rows, keys, mask=build(Interval(grid, lo, hi)).to(device))


def _band(lo: Tensor, hi: Tensor, num_keys: int) -> Window | None:
    """The window, aligned bottom-right, in which query i sees the keys [lo[i], hi[i]); None if
    there is none.
    """
    if bool((lo >= hi).any()):
        return None
    p = torch.arange(len(lo)) + num_keys - len(lo)  # where query i stands
    left = right = None
    if bool((cut := hi < num_keys).any()):
        right = int((hi - 1 - p)[cut][0])
        if not torch.equal(hi, (p + right + 1).clamp(max=num_keys)):
            return None
    if bool((cut := lo > 0).any()):
        left = int((p - lo)[cut][0])
        if not torch.equal(lo, (p - left).clamp(min=0)):
            return None
    return left, right


class Call(NamedTuple):
    """What all rounds of a call share."""

    softmax_scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False
    kernel: str | None = None
    alibi_slopes: Tensor | None = None
    dropout_seed: Tensor | None = None
    first_head: int = 0
    wide_grads: bool = True  # needed where gradients of rounds are summed
    precise_delta: bool = False  # what rounding takes from out is kept for the backward


def attend(call: Call, round: Round, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of the round's rows, unrounded; q, k, v (batch, seqlen, heads, head_dim) are all
    that is at hand.
    """
    question, x = pose(call, round, q, k, v)
    return library.run(question, x, call.kernel)[:2]


def gradients(call: Call, round: Round, q: Tensor, k: Tensor, v: Tensor, saved: tuple) -> Grads:
    """What the round contributes to dq of its rows and to dk and dv of its keys, unrounded if the
    call has wide_grads. saved is (out, lse, dout, dlse or None) of all rows over all keys.
    """
    question, x = pose(call, round, q, k, v, call.wide_grads)
    return library.run_backward(question, x, call.kernel, *_of_rows(round, saved))


def _of_rows(round: Round, saved: tuple) -> tuple:
    out, lse, dout, dlse = saved
    of_lse = lambda t: None if t is None else t[:, :, round.rows].contiguous()
    out, dout = (t[:, round.rows].contiguous() for t in (out, dout))
    return out, of_lse(lse), dout, of_lse(dlse)


def pose(
    call: Call, round: Round, q: Tensor, k: Tensor, v: Tensor, wide_grads: bool = False
) -> tuple[Question, Tensors]:
    """The checked question of a round, and its tensors."""
    places = (None, None) if round.places is None else round.places
    x = Tensors(
        q[:, round.rows],
        k[:, round.keys],
        v[:, round.keys],
        alibi_slopes=call.alibi_slopes,
        dropout_seed=call.dropout_seed,
        places_q=places[0],
        places_k=places[1],
        mask=round.mask,
    )
    options = Options(
        round.causal,
        round.window_size,
        call.softmax_scale,
        call.softcap,
        call.dropout_p,
        deterministic=call.deterministic,
        out_dtype=accumulator_dtype(q.dtype),
    )
    problem = ask(describe, x, options, ()).problem
    problem = problem._replace(first_head=call.first_head, wide_grads=wide_grads)
    return library.posed(x, problem), x


State = tuple[Tensor, Tensor]  # (out, lse)


class Total:
    """(out, lse) of local queries over the rounds so far, at rest and unrounded. lse is kept in
    fp64: of a hundred rounds each would round the sum of all before it.
    """

    def __init__(self, q: Tensor, head_dim_v: int):
        self._shape = (*q.shape[:3], head_dim_v)
        self._like = q.new_empty(0, dtype=accumulator_dtype(q.dtype))
        self._state: State | None = None

    def fold(self, call: Call, round: Round, q: Tensor, k: Tensor, v: Tensor) -> None:
        """One more round."""
        self.add(round.rows, *attend(call, round, q, k, v))

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge in what `rows` saw in one more round: out may be the total from now on."""
        if self._state is None and (rows.start, rows.stop) == (0, self._shape[1]):
            self._state = out, lse.double()
            return
        total_out, total_lse = self._begun()
        total_out, total_lse = total_out[:, rows], total_lse[:, :, rows]
        merged = torch.logaddexp(total_lse, lse.double())
        pivot = merged.masked_fill(merged == -torch.inf, 0.0)
        share = torch.exp(lse - pivot).to(out.dtype)  # and 1 - share is that of the total
        total_out.lerp_(out, share.transpose(1, 2)[..., None])
        total_lse.copy_(merged)

    def result(self) -> State:
        out, lse = self._begun()
        return out, lse.to(out.dtype)

    def _begun(self) -> State:
        if self._state is None:
            batch, seqlen, heads, _ = self._shape
            lse = self._like.new_full((batch, heads, seqlen), -torch.inf, dtype=torch.float64)
            self._state = self._like.new_zeros(self._shape), lse
        return self._state


class Patient(Total):
    """A total on a GPU. A kernel that merges its result into the total reads and writes it while
    others of its programs compute. Rounds of other kernels wait for one another: to merge them
    costs to read the total and to write it, which one launch does for several of them.
    """

    WAITING = 4

    def __init__(self, q: Tensor, head_dim_v: int):
        super().__init__(q, head_dim_v)
        self._waiting: list[tuple[int, Tensor, Tensor]] = []

    def fold(self, call: Call, round: Round, q: Tensor, k: Tensor, v: Tensor) -> None:
        question, x = pose(call, round, q, k, v)
        merge = library.merging(question, x, call.kernel)
        begins = self._state is None and round.rows == slice(0, self._shape[1])
        if merge is None:
            self.add(round.rows, *library.run(question, x, call.kernel)[:2])
        elif begins:
            super().add(round.rows, *library.run(question, x, call.kernel)[:2])
        else:
            out, lse = self._begun()
            merge(out[:, round.rows], lse[:, :, round.rows])

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        self._waiting.append((rows.start, out, lse))
        if len(self._waiting) == self.WAITING:
            self._merge()

    def result(self) -> State:
        if self._waiting:
            self._merge()
        return super().result()

    def _merge(self) -> None:
        fresh = self._state is None
        if self._state is None:
            batch, seqlen, heads, _ = self._shape
            lse = self._like.new_empty(batch, heads, seqlen, dtype=torch.float64)
            self._state = self._like.new_empty(self._shape), lse
        kernel_module("triton").fold(self._state, self._waiting, fresh)
        self._waiting = []


def total_of(q: Tensor, head_dim_v: int) -> Total:
    """Nothing so far."""
    fused = q.is_cuda and device_info(q.device).has_triton
    return (Patient if fused else Total)(q, head_dim_v)


class Backward:
    """The rounds of local queries, backward. saved is (out, lse, dout, dlse or None) of them over
    all keys; dq is a sum, fp32 (fp64 for fp64), to which theirs is added when it is `settled`.

    A kernel that adds gradients to sums itself saves their way to memory and back. What it needs of
    queries is prepared once for all rounds of the same rows, and their dq is finished once.
    """

    HELD = 2  # kinds of rows that are not finished: all and half of them, in a zigzag

    def __init__(self, call: Call, q: Tensor, saved: tuple, dq: Tensor):
        self._call, self._q, self._saved, self._dq = call, q, saved, dq
        self._held: dict[tuple[int, int], Any] = {}

    def add(self, round: Round, k: Tensor, v: Tensor, keys: Pair | None = None) -> Pair | None:
        """One more round. Its share of dk and dv is added to `keys`, sums of all keys at hand; or
        it is returned, for sums that are still on their way.
        """
        question, x = pose(self._call, round, self._q, k, v, self._call.wide_grads)
        sums = None if keys is None else (keys[0][:, round.keys], keys[1][:, round.keys])
        begin = library.adding(question, x, self._call.kernel)
        if begin is None:
            return self._add_found(question, x, round, sums)
        return self._queries(begin, question, x, round).add(question.problem, x, sums)

    def settled(self) -> Tensor:
        """dq, with all rounds so far."""
        for rows in list(self._held):
            self._finish(rows)
        return self._dq

    def _add_found(
        self, question: Question, x: Tensors, round: Round, sums: Pair | None
    ) -> Pair | None:
        saved = _of_rows(round, self._saved)
        found = library.run_backward(question, x, self._call.kernel, *saved)
        self._dq[:, round.rows] += found.dq
        if sums is None:
            return found.dk, found.dv
        for total, share in zip(sums, (found.dk, found.dv), strict=True):
            total += share
        return None

    def _queries(self, begin: Callable, question: Question, x: Tensors, round: Round) -> Any:
        rows = round.rows.start, round.rows.stop
        if rows not in self._held:
            if len(self._held) == self.HELD:
                self._finish(next(iter(self._held)))
            self._held[rows] = begin(question.problem, x, *_of_rows(round, self._saved))
        return self._held[rows]

    def _finish(self, rows: tuple[int, int]) -> None:
        self._held.pop(rows).finish(self._dq[:, slice(*rows)])
