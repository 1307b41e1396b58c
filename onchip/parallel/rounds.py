"""The rounds of a ring: each is one kernel call, some queries of a long sequence over some keys.

Queries stay. K and V travel one rank further in every round. With 4 ranks:

             round 0      round 1      round 2      round 3
    rank 0   K0 V0        K3 V3        K2 V2        K1 V1
    rank 1   K1 V1        K0 V0        K3 V3        K2 V2
    rank 2   K2 V2        K1 V1        K0 V0        K3 V3
    rank 3   K3 V3        K2 V2        K1 V1        K0 V0
    in flight: the K and V of the round go to rank + 1 while its kernel runs; none in the last round

In round i rank r attends to the K and V of rank r - i. `RunningState` merges the (out, lse) of the
rounds. In the backward pass dK and dV follow their keys one round behind (see ring.py).

Worked shape: 1,024 tokens, causal, `zigzag(4)`. Rank 1 holds the positions 128-255 and 768-895, so
that its local rows 0-127 are early and its rows 128-255 are late. `plan_rounds` gives it

    round 0   keys of rank 1, 128-255 and 768-895    rows 0-255    keys 0-255    causal
    round 1   keys of rank 0, 0-127 and 896-1023     rows 0-255    keys 0-127    all visible
    round 2   keys of rank 3, 384-639                rows 128-255  keys 0-255    all visible
    round 3   keys of rank 2, 256-383 and 640-767    rows 128-255  keys 0-255    all visible

Every round after the first has half of the (query, key) pairs, and no round needs a mask.

Positions ascend on both sides of a round. Therefore, under causal, window and documents, each query
sees an interval of the round's keys. A round first drops the rows and keys at its ends that take no
part. If the rest is all visible, causal or a window aligned bottom-right, the kernel's own options
express it: this holds for every round of contiguous, zigzag and striped layouts under a causal
mask, and of contiguous layouts with a window. Any other round gets a block mask. ALiBi and dropout
depend on positions in the global sequence, which the call then carries (`Tensors.positions_q`);
nothing else in a kernel depends on them.

docs/fold.md derives the merge of two states, docs/ring.md the cost of a ring.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core import torch_op
from onchip.core.backend import Grads, accumulator_dtype
from onchip.core.call_cache import CachedCall, prepare
from onchip.core.device import device_info
from onchip.core.problem import Options, Tensors, Window
from onchip.core.validation import describe
from onchip.masks import BlockMask, Mask
from onchip.masks.mods import node_of
from onchip.masks.nodes import Grid, Interval, Node, both, build
from onchip.parallel.sharding import Layout, documents_of

KV = tuple[Tensor, Tensor]  # keys and values, or dk and dv
OutLse = tuple[Tensor, Tensor]  # (batch, seqlen, heads, dim) and (batch, heads, seqlen)
CPU = torch.device("cpu")
MAX_PLANS = 64  # a training step has a few kinds of layers; documents change with every batch


class GlobalMask(NamedTuple):
    """The keys that each query of the global sequence sees.

    documents: offsets of packed documents. planes: (batch, heads) of the call, for masks that
    differ between them. uses_positions: ALiBi or dropout need the global positions.
    """

    seqlen: int
    causal: bool = False
    window_size: Window = (None, None)
    documents: tuple[int, ...] | None = None
    mask: Mask | BlockMask | None = None
    planes: tuple[int, int] = (1, 1)
    uses_positions: bool = False

    def key_ranges(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[lo, hi) of the keys that the queries at positions `rows` see, before the mask."""
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

    def document_positions(self, positions: Tensor) -> Tensor:
        """int32 (2, n): each position inside its own document, and the document's number."""
        if self.documents is None:
            return torch.stack([positions, torch.zeros_like(positions)]).int()
        starts = torch.tensor(self.documents)
        document = documents_of(positions, starts)
        return torch.stack([positions - starts[document], document]).int()


class Round(NamedTuple):
    """One kernel call: local queries `rows` over local keys `keys`, under causal and window aligned
    bottom-right, or under `mask`. positions: of rows and keys, if ALiBi or dropout need them.
    """

    rows: slice
    keys: slice
    causal: bool = False
    window_size: Window = (None, None)
    mask: BlockMask | None = None
    positions: tuple[Tensor, Tensor] | None = None


class RingSchedule(NamedTuple):
    """The rounds of one rank: rounds[i] is over the keys of rank - i, or None if no key of these is
    visible. All ranks have equally many rounds, as many as any rank needs. lengths: tokens of each
    rank.
    """

    rounds: tuple[Round | None, ...]
    lengths: tuple[int, ...]

    @property
    def hops(self) -> int:
        return len(self.rounds) - 1


@lru_cache(maxsize=MAX_PLANS)
def plan_rounds(
    layout: Layout, global_mask: GlobalMask, rank: int, device: torch.device
) -> RingSchedule:
    """The ring's rounds of one rank."""
    rows = layout.positions(rank, global_mask.seqlen)
    sources = [(rank - hop) % layout.size for hop in range(count_hops(layout, global_mask) + 1)]
    columns = (layout.positions(source, global_mask.seqlen) for source in sources)
    resolved = _resolve_mask(global_mask, device)
    rounds = tuple(plan_round(global_mask, rows, cols, device, resolved) for cols in columns)
    return RingSchedule(rounds, tuple(layout.lengths(global_mask.seqlen)))


def count_round_pairs(layout: Layout, global_mask: GlobalMask, rank: int) -> list[int]:
    """Visible (query, key) pairs of one head in each round of a rank, under causal, window and
    documents; a mask is not counted.
    """
    lo, hi = global_mask.key_ranges(layout.positions(rank, global_mask.seqlen))
    pairs = []
    for hop in range(count_hops(layout, global_mask) + 1):
        cols = layout.positions((rank - hop) % layout.size, global_mask.seqlen)
        num_visible = torch.searchsorted(cols, hi) - torch.searchsorted(cols, lo)
        pairs.append(int(num_visible.clamp(min=0).sum()))
    return pairs


@lru_cache(maxsize=MAX_PLANS)
def count_hops(layout: Layout, global_mask: GlobalMask) -> int:
    """Hops that K and V travel, the same on every rank: size - 1, or fewer where windows or
    documents keep all ranks from seeing distant keys.
    """
    if global_mask.window_size == (None, None) and global_mask.documents is None:
        return layout.size - 1
    ranges = [
        _visible_ranges(layout.pieces(rank, global_mask.seqlen), global_mask)
        for rank in range(layout.size)
    ]
    held = [
        torch.tensor(layout.pieces(r, global_mask.seqlen)).view(-1, 3) for r in range(layout.size)
    ]
    for hop in range(layout.size - 1, 0, -1):
        if any(_any_overlap(ranges[r], held[(r - hop) % layout.size]) for r in range(layout.size)):
            return hop
    return 0


def _visible_ranges(pieces: list, global_mask: GlobalMask) -> Tensor:
    """(pieces, 2): [lo, hi) of the keys that the queries of each piece see; both ascend."""
    ends = torch.tensor([(a, a + (b - a - 1) // s * s) for a, b, s in pieces]).view(-1, 2)
    return torch.stack(
        [global_mask.key_ranges(ends[:, 0])[0], global_mask.key_ranges(ends[:, 1])[1]], 1
    )


def _any_overlap(ranges: Tensor, pieces: Tensor) -> bool:
    """Whether some range overlaps some piece; both ascend. For each range it is enough to test the
    first piece that ends after the range begins: it must begin before the range ends.
    """
    if not (len(ranges) and len(pieces)):
        return False
    first = torch.searchsorted(pieces[:, 1].contiguous(), ranges[:, 0].contiguous(), right=True)
    starts = torch.cat([pieces[:, 0], pieces.new_tensor([torch.iinfo(torch.int64).max])])
    return bool(((starts[first] < ranges[:, 1]) & (ranges[:, 0] < ranges[:, 1])).any())


def _resolve_mask(global_mask: GlobalMask, device: torch.device) -> Node | None:
    if global_mask.mask is None:
        return None
    return node_of(
        global_mask.mask, global_mask.planes, (global_mask.seqlen, global_mask.seqlen), device
    )


def plan_round(
    global_mask: GlobalMask,
    rows: Tensor,
    cols: Tensor,
    device: torch.device,
    resolved: Node | None = None,
) -> Round | None:
    """The round of the queries at positions `rows` over the keys at `cols`, both ascending; None if
    no key is visible. resolved: `global_mask.mask`, if the caller has resolved it.
    """
    if not (len(rows) and len(cols)):
        return None
    lo, hi = (torch.searchsorted(cols, ends) for ends in global_mask.key_ranges(rows))
    if global_mask.mask is not None:
        visible = (resolved or _resolve_mask(global_mask, device)).submask(rows, cols)
        node = both(Interval(visible.grid, lo, hi), visible)
        if not isinstance(node, Interval) or len(node.bounds[0]) > 1:
            return _plan_masked(global_mask, node, rows, cols, device)
        lo, hi = (ends[0].long() for ends in node.bounds)
    round = _plan_intervals(lo, hi, device)
    return round and _with_positions(global_mask, round, rows, cols, device)


def _plan_masked(
    global_mask: GlobalMask, node: Node, rows: Tensor, cols: Tensor, device: torch.device
) -> Round | None:
    mask = build(node).to(device)
    if not (mask.num_full or mask.num_partial):
        return None
    round = Round(slice(0, len(rows)), slice(0, len(cols)), mask=mask)
    return _with_positions(global_mask, round, rows, cols, device)


def _with_positions(
    global_mask: GlobalMask, round: Round, rows: Tensor, cols: Tensor, device: torch.device
) -> Round:
    if not global_mask.uses_positions:
        return round
    of_rows = global_mask.document_positions(rows[round.rows])
    of_keys = global_mask.document_positions(cols[round.keys])[0]
    return round._replace(positions=(of_rows.to(device), of_keys.contiguous().to(device)))


def _plan_intervals(lo: Tensor, hi: Tensor, device: torch.device) -> Round | None:
    """The round in which query i sees the keys [lo[i], hi[i]). Rows and keys at the ends that take
    no part are dropped. lo and hi ascend over the queries that see any key.
    """
    seeing = (lo < hi).nonzero().flatten()
    if not len(seeing):
        return None
    rows = slice(int(seeing[0]), int(seeing[-1]) + 1)
    keys = slice(int(lo[seeing].min()), int(hi[seeing].max()))
    lo, hi = lo[rows] - keys.start, hi[rows] - keys.start
    window = _find_window(lo, hi, keys.stop - keys.start)
    if window is not None:
        left, right = window
        if right == 0:
            return Round(rows, keys, True, (left, None))
        return Round(rows, keys, False, (left, right))
    grid = Grid(1, 1, len(lo), keys.stop - keys.start, CPU)
    return Round(rows, keys, mask=build(Interval(grid, lo, hi)).to(device))


def _find_window(lo: Tensor, hi: Tensor, num_keys: int) -> Window | None:
    """The window, aligned bottom-right, in which query i sees the keys [lo[i], hi[i]); None if no
    window does that.
    """
    if bool((lo >= hi).any()):
        return None
    p = torch.arange(len(lo)) + num_keys - len(lo)  # the position of query i
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


class RoundOptions(NamedTuple):
    """The options that all rounds of a call share."""

    call_options: Options = Options()  # each round has its own causal and window_size
    kernel: str | None = None
    alibi_slopes: Tensor | None = None
    dropout_seed: Tensor | None = None
    first_head: int = 0
    wide_grads: bool = True  # unrounded: the gradients of rounds are summed
    precise_delta: bool = False  # keep what rounding takes from out for the backward


def attend(
    options: RoundOptions, round: Round, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the round's rows, unrounded. q, k, v: (batch, seqlen, heads, head_dim) of all
    local queries, and of all keys of the round's source rank.
    """
    cached_call, x = prepare_round(options, round, q, k, v)
    return torch_op.run(cached_call, x, options.kernel)[:2]


def differentiate_round(
    options: RoundOptions, round: Round, q: Tensor, k: Tensor, v: Tensor, saved: tuple[Any, ...]
) -> Grads:
    """The round's terms of dq of its rows and of dk and dv of its keys, unrounded if
    options.wide_grads. saved: (out, lse, dout, dlse or None) of all rows over all keys.
    """
    cached_call, x = prepare_round(options, round, q, k, v, options.wide_grads)
    return torch_op.run_backward(cached_call, x, options.kernel, *_slice_saved(round, saved))


def _slice_saved(round: Round, saved: tuple) -> tuple:
    out, lse, dout, dlse = saved
    of_lse = lambda t: None if t is None else t[:, :, round.rows].contiguous()
    out, dout = (t[:, round.rows].contiguous() for t in (out, dout))
    return out, of_lse(lse), dout, of_lse(dlse)


def prepare_round(
    options: RoundOptions, round: Round, q: Tensor, k: Tensor, v: Tensor, wide_grads: bool = False
) -> tuple[CachedCall, Tensors]:
    """The checked call of a round, and its tensors."""
    positions = round.positions or (None, None)
    x = Tensors(
        q[:, round.rows],
        k[:, round.keys],
        v[:, round.keys],
        alibi_slopes=options.alibi_slopes,
        dropout_seed=options.dropout_seed,
        positions_q=positions[0],
        positions_k=positions[1],
        mask=round.mask,
    )
    problem_options = options.call_options._replace(
        causal=round.causal, window_size=round.window_size, out_dtype=accumulator_dtype(q.dtype)
    )
    problem = prepare(describe, x, problem_options, ()).problem
    problem = problem._replace(first_head=options.first_head, wide_grads=wide_grads)
    return torch_op.prepare_checked(x, problem), x


class RunningState:
    """(out, lse) of local queries over the rounds so far, normalised and unrounded. lse is fp64:
    in fp32 each of a hundred rounds would round the sum of all earlier rounds again.
    """

    def __init__(self, q: Tensor, head_dim_v: int):
        self._shape = (*q.shape[:3], head_dim_v)
        self._like = q.new_empty(0, dtype=accumulator_dtype(q.dtype))
        self._state: OutLse | None = None

    def fold(self, options: RoundOptions, round: Round, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Compute one more round and merge it."""
        self.add(round.rows, *attend(options, round, q, k, v))

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge the (out, lse) of `rows` over one more round. Takes over the memory of out."""
        if self._state is None and (rows.start, rows.stop) == (0, self._shape[1]):
            self._state = out, lse.double()
            return
        state_out, state_lse = self._get_state()
        state_out, state_lse = state_out[:, rows], state_lse[:, :, rows]
        merged = torch.logaddexp(state_lse, lse.double())
        pivot = merged.masked_fill(merged == -torch.inf, 0.0)
        share = torch.exp(lse - pivot).to(
            out.dtype
        )  # the weight of the round; the state has 1 - share
        state_out.lerp_(out, share.transpose(1, 2)[..., None])
        state_lse.copy_(merged)

    def result(self) -> OutLse:
        out, lse = self._get_state()
        return out, lse.to(out.dtype)

    def _get_state(self) -> OutLse:
        if self._state is None:
            batch, seqlen, heads, _ = self._shape
            lse = self._like.new_full((batch, heads, seqlen), -torch.inf, dtype=torch.float64)
            self._state = self._like.new_zeros(self._shape), lse
        return self._state


class BatchedState(RunningState):
    """A running state on a GPU.

    A kernel with a fused merge reads and writes the state while its other programs compute. The
    results of other kernels are collected, and one launch merges up to MAX_PENDING of them: a
    launch per round would read and write the whole state each time.
    """

    MAX_PENDING = 4

    def __init__(self, q: Tensor, head_dim_v: int):
        super().__init__(q, head_dim_v)
        self._pending: list[tuple[int, Tensor, Tensor]] = []

    def fold(self, options: RoundOptions, round: Round, q: Tensor, k: Tensor, v: Tensor) -> None:
        cached_call, x = prepare_round(options, round, q, k, v)
        merge = torch_op.get_merge_fn(cached_call, x, options.kernel)
        is_first = self._state is None and round.rows == slice(0, self._shape[1])
        if merge is None:
            self.add(round.rows, *torch_op.run(cached_call, x, options.kernel)[:2])
        elif is_first:
            super().add(round.rows, *torch_op.run(cached_call, x, options.kernel)[:2])
        else:
            out, lse = self._get_state()
            merge(out[:, round.rows], lse[:, :, round.rows])

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        self._pending.append((rows.start, out, lse))
        if len(self._pending) == self.MAX_PENDING:
            self._merge()

    def result(self) -> OutLse:
        if self._pending:
            self._merge()
        return super().result()

    def _merge(self) -> None:
        is_empty = self._state is None
        if self._state is None:
            batch, seqlen, heads, _ = self._shape
            lse = self._like.new_empty(batch, heads, seqlen, dtype=torch.float64)
            self._state = self._like.new_empty(self._shape), lse
        from onchip.kernels.triton.entry import fold

        fold(self._state, self._pending, is_empty)
        self._pending = []


def make_running_state(q: Tensor, head_dim_v: int) -> RunningState:
    """The state of no round."""
    fused = q.is_cuda and device_info(q.device).has_triton
    return (BatchedState if fused else RunningState)(q, head_dim_v)


class RunningGradients:
    """The backward rounds of local queries. saved: (out, lse, dout, dlse or None) of the queries
    over all keys. dq: fp32 (fp64 for fp64); `finish` adds the terms of all rounds to it.

    A kernel with a fused accumulate adds its gradients to dq, dk and dv itself, which saves a write
    and a read of each. It prepares the queries once for all rounds with the same rows, and writes
    their dq once.
    """

    MAX_OPEN = 2  # row ranges in preparation: a zigzag has two, all rows and the late half

    def __init__(self, options: RoundOptions, q: Tensor, saved: tuple[Any, ...], dq: Tensor):
        self._options, self._q, self._saved, self._dq = options, q, saved, dq
        self._open: dict[tuple[int, int], Any] = {}

    def add(self, round: Round, k: Tensor, v: Tensor, keys: KV | None = None) -> KV | None:
        """Differentiate one more round. Adds its dk and dv to `keys`, the sums of all keys of the
        source rank. Without `keys`, which may still be in flight, returns (dk, dv).
        """
        cached_call, x = prepare_round(
            self._options, round, self._q, k, v, self._options.wide_grads
        )
        sums = None if keys is None else (keys[0][:, round.keys], keys[1][:, round.keys])
        begin = torch_op.get_accumulate_fn(cached_call, x, self._options.kernel)
        if begin is None:
            return self._add_separately(cached_call, x, round, sums)
        return self._open_rows(begin, cached_call, x, round).add(cached_call.problem, x, sums)

    def finish(self) -> Tensor:
        """dq with the terms of all rounds so far."""
        for rows in list(self._open):
            self._finish(rows)
        return self._dq

    def _add_separately(
        self, cached_call: CachedCall, x: Tensors, round: Round, sums: KV | None
    ) -> KV | None:
        saved = _slice_saved(round, self._saved)
        grads = torch_op.run_backward(cached_call, x, self._options.kernel, *saved)
        self._dq[:, round.rows] += grads.dq
        if sums is None:
            return grads.dk, grads.dv
        for total, share in zip(sums, (grads.dk, grads.dv), strict=True):
            total += share
        return None

    def _open_rows(self, begin: Callable, cached_call: CachedCall, x: Tensors, round: Round) -> Any:
        rows = round.rows.start, round.rows.stop
        if rows not in self._open:
            if len(self._open) == self.MAX_OPEN:
                self._finish(next(iter(self._open)))
            self._open[rows] = begin(cached_call.problem, x, *_slice_saved(round, self._saved))
        return self._open[rows]

    def _finish(self, rows: tuple[int, int]) -> None:
        self._open.pop(rows).finish(self._dq[:, slice(*rows)])
