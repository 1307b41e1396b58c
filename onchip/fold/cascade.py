"""Cascade: shared prefixes are attended once. Sequences with page tables that start alike form a
trie of page runs. Each run is read once for all queries below it, and the partial states are
merged. A run is cut into segments if its queries alone would leave most of a device idle.

`plan` reads host tables, once per change of the batch. `run` is called by every layer of every step
with the plan's tensors; it synchronises nothing and makes one call per level plus one. A plan stays
valid while sequences grow behind their shared pages.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.problem import SCORE_OPTIONS, SMPartition, UnsupportedError
from onchip.core.state import merge_out_lse
from onchip.cost.prefixes import OverlapPlan, PrefixCosts

OutLse = tuple[Tensor, Tensor]
KVPages = tuple[Tensor, Tensor]  # k_pages and v_pages of a layer
TableLengths = tuple[Tensor, Tensor]  # page_table and cache_seqlens


MAX_LEVELS = 4  # each level is one more call; tries of prompts are rarely deeper


class PrefixGroup(NamedTuple):
    """Sequences that share pages [start, stop) of their tables."""

    members: tuple[int, ...]
    start: int
    stop: int


class CascadeLevel(NamedTuple):
    """One paged call. Each segment of each group is a sequence of this call: its keys are a slice
    of the group's run, its queries all queries of the group's members. The first segments of all
    groups come before the second segments. No sequence is in two groups of a level.
    """

    groups: tuple[PrefixGroup, ...]
    saved: float  # seconds against reading the runs once per sequence, net of the level's costs
    segments: int
    page_table: Tensor  # (segments * groups, longest segment) int32
    seqlens: Tensor  # (segments * groups,) int32, 0 where a short run has no such segment
    cu_seqlens_q: Tensor  # (segments * groups + 1,) int32
    max_seqlen_q: int
    rows: Tensor | slice  # indices of packed queries, group by group; a slice needs no copy
    row_index: Tensor | None  # (total_q,) int32: the index of each query in `rows`, -1 if not in it


class LevelState(NamedTuple):
    """The states of a level over disjoint keys, for the queries in its `rows`."""

    out: Tensor  # (segments, rows, heads, head_dim_v), contiguous
    lse: Tensor  # (segments, heads, rows), contiguous in the last dimension
    row_index: Tensor | None  # the index of each query in the rows, -1: not in them; None: in order


class CascadePlan(NamedTuple):
    """The result of `plan`, as tensors that `run` uses unchanged; `to` moves them to a device."""

    levels: tuple[CascadeLevel, ...]
    saved: float  # predicted seconds of one layer, against one paged call
    page_size: int
    shared: tuple[int, ...]  # pages of each sequence that the levels cover
    lengths_q: tuple[int, ...]
    tables: Tensor  # the page table planned for; stays on the host
    cu_seqlens_q: Tensor  # (batch + 1,) int32
    shared_pages: Tensor  # (batch,) int64
    shared_tokens: Tensor  # (batch,) int32
    together: OverlapPlan | None = None  # the level runs concurrently with the own call

    def to(self, device: torch.device | str) -> "CascadePlan":
        """The same plan with its tensors on a device (one copy each, when the batch changes)."""
        move = lambda x: x.to(device) if isinstance(x, Tensor) else x
        levels = tuple(CascadeLevel(*map(move, level)) for level in self.levels)
        names = ("cu_seqlens_q", "shared_pages", "shared_tokens")
        return self._replace(levels=levels, **{name: move(getattr(self, name)) for name in names})

    def own(self, page_table: Tensor, cache_seqlens: Tensor) -> TableLengths:
        """(page_table, cache_seqlens) of the keys that each sequence does not share, from the
        current tables: once per step, on their device, without synchronising.
        """
        if page_table.device != self.shared_pages.device:
            here, there = page_table.device, self.shared_pages.device
            raise ValueError(
                f"the plan is on {there}, page_table on {here}: plan.to({str(here)!r})"
            )
        if page_table.device.type == "cpu":
            self._check_tables(page_table, cache_seqlens)
        if not any(self.shared):
            return page_table, cache_seqlens
        seqlens = cache_seqlens - self.shared_tokens
        least, width = min(self.shared, default=0), page_table.shape[1]
        if least == max(self.shared, default=0):
            return page_table[:, least:], seqlens
        columns = torch.arange(width - least, device=page_table.device)
        columns = (columns + self.shared_pages[:, None]).clamp(max=width - 1)
        return page_table.gather(1, columns), seqlens

    def _check_tables(self, page_table: Tensor, cache_seqlens: Tensor) -> None:
        """Raise ValueError for tables of another batch: they would give wrong rows silently."""
        batch, width = len(self.shared), max(self.shared, default=0)
        if page_table.shape[0] != batch or page_table.shape[1] < width:
            got = tuple(page_table.shape)
            raise ValueError(f"the plan is for page_table ({batch}, >= {width}), got {got}")
        inside = torch.arange(width) < self.shared_pages[:, None]
        changed = (page_table[:, :width] != self.tables[:, :width]) & inside
        first_query = cache_seqlens - torch.tensor(self.lengths_q, dtype=torch.int32)
        bad = changed.any(1) | (first_query < self.shared_tokens)
        if bad.any():
            b = int(bad.nonzero()[0])
            raise ValueError(
                f"the plan is not for these tables: sequence {b} must begin with the"
                f" {self.shared[b]} pages it was planned with and hold its {self.lengths_q[b]}"
                f" queries after them, cache_seqlens[{b}]={cache_seqlens[b]}; plan again when the"
                " batch changes"
            )


def plan(
    page_table: Tensor | Sequence[Sequence[int]],
    cache_seqlens: Tensor | Sequence[int],
    page_size: int,
    model: PrefixCosts,
    *,
    seqlen_q: int = 1,
    cu_seqlens_q: Tensor | Sequence[int] | None = None,
    max_levels: int = MAX_LEVELS,
) -> CascadePlan:
    """The levels of shared pages that save most time according to `model`, the
    `cost.prefixes.costs` of the tensors; no level if the plain call is fastest.

    page_table (batch, max_pages), cache_seqlens (batch,) and cu_seqlens_q (batch + 1,) are lists or
    CPU tensors: the host's copy, because reading the device's would synchronise. Each sequence has
    seqlen_q queries, or as many as cu_seqlens_q says; only full pages before its first query are
    shared. Takes O(pages x log batch), vectorised over pages.
    """
    table, seqlens = _host("page_table", page_table, 2), _host("cache_seqlens", cache_seqlens, 1)
    uniform = [b * seqlen_q for b in range(len(table) + 1)]
    cu = _host("cu_seqlens_q", uniform if cu_seqlens_q is None else cu_seqlens_q, 1)
    lengths = tuple(cu.diff().tolist())
    shareable = _shareable(table, seqlens, cu.diff(), page_size)
    groups = _choose(table, shareable, lengths, model, max_levels)
    levels = tuple(_level(table, cu.tolist(), chosen, page_size, model) for chosen in groups)
    saved = sum(level.saved for level in levels)
    saved -= sum(lengths) * model.partial if levels else 0
    shared = _covered(groups, len(table))
    pages = torch.tensor(shared, dtype=torch.int64)
    tokens = (pages * page_size).int()
    in_turn = CascadePlan(levels, saved, page_size, shared, lengths, table, cu, pages, tokens)
    own_pages = int((-(-seqlens // page_size) - pages).sum())
    return in_turn if cu_seqlens_q is not None else _try_together(in_turn, own_pages, model)


class AttendCall(NamedTuple):
    """The arguments of a call of attend that is not made yet."""

    args: tuple[Tensor, ...]  # q, k_pages, v_pages, page_table, cache_seqlens
    options: dict[str, Any]

    def on_partition(self, programs: int, second: bool) -> "AttendCall":
        partition = SMPartition(programs, second)
        return AttendCall(self.args, {**self.options, "sm_partition": partition})


def run(
    plan: CascadePlan,
    attend: Callable[..., OutLse],
    q: Tensor,
    pages: KVPages,
    own: TableLengths,
    *,
    merge: Callable[[OutLse, list[LevelState], torch.dtype], OutLse] | None = None,
    at_once: Callable[[AttendCall, AttendCall], list[OutLse] | None] | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = True,
    **options: object,
) -> OutLse | Tensor:
    """(out, lse), or out alone, of paged attention over the tables that `plan.own` was given: one
    call of attend per level, and one for the keys that are not shared.

    attend is called like onchip.paged_attention. q: (batch, seqlen_q, heads, head_dim), or packed.
    causal and sinks apply to the own call alone: shared keys are before every query, and a sink
    counts once. merge(own, parts, out_dtype) merges the own state, packed, with the states of the
    levels: state.merge_out_lse, unless a device has a kernel for it. at_once(own, level) gets both
    calls, each with an `sm_partition` among its options, runs them concurrently and returns the
    results of attend, or None. On None, and without at_once, the calls run one after the other.
    """
    for_all, for_own = _split_options(options)
    rows = _packed(plan, q, pages)
    if not plan.levels:
        call_options = {**options, "out_dtype": out_dtype, "return_lse": return_lse}
        call = _own_call(plan, q, pages, own, call_options)
        return attend(*call.args, **call.options)
    for_all["out_dtype"] = torch.promote_types(q.dtype, torch.float32)  # unrounded partial states
    for_all["return_lse"] = True
    calls = [_own_call(plan, q, pages, own, {**for_all, **for_own})]
    calls += [_level_call(level, rows, pages, for_all) for level in plan.levels]
    results = _run_both(plan, calls, at_once)
    if results is None:
        results = [attend(*call.args, **call.options) for call in calls]
    (out, lse), *results = results
    parts = [_level_state(level, *pair) for level, pair in zip(plan.levels, results, strict=True)]
    state = out.reshape(-1, *out.shape[-2:]), _packed_lse(lse)
    out, lse = (merge or merge_levels)(state, parts, out_dtype or q.dtype)
    if q.dim() == 4:
        out = out.unflatten(0, q.shape[:2])
        lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()
    return (out, lse) if return_lse else out


def _run_both(
    plan: CascadePlan,
    calls: list[AttendCall],
    at_once: Callable[[AttendCall, AttendCall], list[OutLse] | None] | None,
) -> list[OutLse] | None:
    """The results of the own call and the level's call if they may run concurrently, else None."""
    if plan.together is None or at_once is None:
        return None
    own, level = calls
    own_programs, level_programs, *_ = plan.together
    return at_once(own.on_partition(own_programs, False), level.on_partition(level_programs, True))


FOR_ALL = {*SCORE_OPTIONS, "kernel", "deterministic", "k_scales", "v_scales"}
FOR_OWN = {"causal", "sinks", "tree_mask"}
REFUSED = {
    "window_size": "a window hides a different part of the prefix from every query",
    "alibi_slopes": "ALiBi gives a shared key another bias for every sequence",
    "return_stats": "row statistics are not merged",
}


def _split_options(options: dict) -> tuple[dict, dict]:
    for name in sorted(set(options) - FOR_ALL - FOR_OWN):
        why = REFUSED.get(name, "it is not an option of paged attention")
        raise UnsupportedError(f"cascade does not take {name}: {why}; call paged_attention")
    pick = lambda names: {name: x for name, x in options.items() if name in names}
    return pick(FOR_ALL), pick(FOR_OWN)


def _packed(plan: CascadePlan, q: Tensor, pages: KVPages) -> Tensor:
    """q as (total_q, heads, head_dim); a ValueError unless queries and pages fit the plan."""
    if pages[0].shape[1] != plan.page_size:
        raise ValueError(
            f"k_pages {tuple(pages[0].shape)} must have page_size={plan.page_size} slots a page"
        )
    lengths = plan.lengths_q
    uniform = q.dim() == 4 and lengths == (q.shape[1],) * q.shape[0]
    if not uniform and (q.dim() != 3 or q.shape[0] != sum(lengths)):
        raise ValueError(
            f"q {tuple(q.shape)} must hold the {sum(lengths)} queries of the plan: (batch,"
            f" seqlen_q, heads, head_dim) for {len(lengths)} sequences of equal length, or packed"
        )
    return q.flatten(0, 1) if uniform else q


def _own_call(
    plan: CascadePlan, q: Tensor, pages: KVPages, own: TableLengths, options: dict
) -> AttendCall:
    packing: dict[str, object] = {}
    if q.dim() == 3:
        packing = {
            "cu_seqlens_q": plan.cu_seqlens_q,
            "max_seqlen_q": max(plan.lengths_q, default=0),
        }
    return AttendCall((q, *pages, *own), {**packing, **options})


def _level_call(level: CascadeLevel, rows: Tensor, pages: KVPages, options: dict) -> AttendCall:
    """The segments of one group are sequences of equal length, so a single group's call is not
    packed; all of them read the same queries.
    """
    q, packing = rows[level.rows], {}
    if len(level.groups) == 1:
        q = q.expand(level.segments, *q.shape)
    else:
        q = q.repeat(level.segments, 1, 1)
        packing = {"cu_seqlens_q": level.cu_seqlens_q, "max_seqlen_q": level.max_seqlen_q}
    tables = level.page_table, level.seqlens
    return AttendCall((q, *pages, *tables), {"causal": False, **packing, **options})


def _level_state(level: CascadeLevel, out: Tensor, lse: Tensor) -> LevelState:
    """The result of a level's call, as states."""
    if len(level.groups) == 1:
        return LevelState(out, lse, level.row_index)
    stacked = (level.segments, -1)
    return LevelState(
        out.unflatten(0, stacked), lse.unflatten(1, stacked).transpose(0, 1), level.row_index
    )


def _packed_lse(lse: Tensor) -> Tensor:
    """(batch, heads, seqlen_q) or packed already -> (heads, total_q)."""
    return lse.transpose(0, 1).flatten(1) if lse.dim() == 3 else lse


def merge_levels(own: OutLse, parts: list[LevelState], out_dtype: torch.dtype) -> OutLse:
    """Merge the own state, packed, with the states of levels: (out, lse), out in out_dtype."""
    states = [own, *(state for part in parts for state in _states(part))]
    outs, lses = [out.transpose(0, 1) for out, _ in states], [lse for _, lse in states]
    out, lse = merge_out_lse(outs, lses)
    return out.transpose(0, 1).to(out_dtype), lse


def _states(part: LevelState) -> Iterator[OutLse]:
    """The states in the order of all queries; queries that are not in the level have no keys."""
    out, lse, row_index = part
    if row_index is not None:
        at, absent = row_index.clamp(min=0), row_index < 0
        out = out[:, at].masked_fill(absent[:, None, None], 0.0)
        lse = lse[:, :, at].masked_fill(absent, -torch.inf)
    return zip(out.unbind(0), lse.unbind(0), strict=True)


def _host(name: str, x: object, rank: int) -> Tensor:
    if isinstance(x, Tensor) and x.device.type != "cpu":
        raise ValueError(
            f"{name} is on {x.device}: plan from the host's copy, reading the device's would"
            " synchronise with it"
        )
    t = torch.as_tensor(x, dtype=torch.int32).clone()  # the caller's tensor may change later
    if t.dim() != rank:
        raise ValueError(f"{name} must have rank {rank}, got shape {tuple(t.shape)}")
    return t


def _shareable(table: Tensor, seqlens: Tensor, lengths: Tensor, page_size: int) -> Tensor:
    """Full pages before the first query of each sequence; 0 for a sequence without queries."""
    batch, width = table.shape
    if len(seqlens) != batch or len(lengths) != batch:
        raise ValueError(
            f"page_table has {batch} sequences, cache_seqlens {len(seqlens)} and cu_seqlens_q"
            f" {len(lengths)}"
        )
    bad = (seqlens < lengths) | (lengths < 0) | (seqlens > width * page_size)
    if bad.any():
        b = int(bad.nonzero()[0])
        raise ValueError(
            f"cache_seqlens[{b}]={seqlens[b]} must hold the {lengths[b]} queries of its sequence"
            f" and fit into {width} pages of {page_size}"
        )
    pages = (seqlens - lengths) // page_size * (lengths > 0)
    if ((table < 0) & (torch.arange(width) < pages[:, None])).any():
        raise ValueError("page_table holds a negative page id inside a sequence")
    return pages


@dataclass
class TrieNode:
    """Sequences [lo, hi) of the sorted order, which share exactly their first `pages` pages."""

    lo: int
    pages: int
    hi: int = 0
    children: list["TrieNode"] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # `pages` of every ancestor, root first
    cost: Tensor = field(default_factory=lambda: torch.empty(0))  # (levels + 1, ancestors)
    taken: Tensor = field(default_factory=lambda: torch.empty(0))  # (levels, ancestors)


def _choose(
    table: Tensor, shareable: Tensor, lengths: Sequence[int], model: PrefixCosts, max_levels: int
) -> list[list[PrefixGroup]]:
    """The groups of each level."""
    order, common = _sorted_prefixes(table, shareable)
    nodes = _trie(common)
    queries = list(accumulate((lengths[b] for b in order), initial=0))
    totals = _price(nodes, queries, model, min(max_levels, _deepest(nodes)))
    levels = torch.arange(len(totals), dtype=torch.float64)
    once = queries[-1] * model.partial * (levels > 0)
    totals = totals + once + levels * model.level
    return _trace(nodes[-1], order, int(totals.argmin()))


def _sorted_prefixes(table: Tensor, shareable: Tensor) -> tuple[list[int], list[int]]:
    """An order in which equal prefixes are neighbours, and the number of pages that each sequence
    shares with its predecessor.
    """
    batch, width = table.shape
    private = torch.arange(batch, dtype=torch.int32)[:, None] - batch  # differs from any page id
    keys = torch.where(torch.arange(width) < shareable[:, None], table, private)
    if not keys.numel():
        return list(range(batch)), [0] * max(batch - 1, 0)
    order = torch.unique(keys, dim=0, return_inverse=True)[1].argsort(stable=True)
    keys = keys[order]
    return order.tolist(), (keys[1:] == keys[:-1]).cumprod(1).sum(1).tolist()


def _trie(common: list[int]) -> list[TrieNode]:
    """The trie of the sorted sequences, children before parents, the root (no page) last: one pass
    over the lengths of common prefixes, with a stack.
    """
    stack, done = [TrieNode(0, 0)], []
    for i, pages in enumerate([*common, 0], start=1):
        lo, orphan = i - 1, None
        while stack[-1].pages > pages:
            orphan = stack.pop()
            orphan.hi, lo = i, orphan.lo
            done.append(orphan)
            if stack[-1].pages >= pages:
                stack[-1].children.append(orphan)
                orphan = None
        if stack[-1].pages < pages:
            stack.append(TrieNode(lo, pages, children=[orphan] if orphan else []))
    stack[0].hi = len(common) + 1
    return [*done, stack[0]]


def _deepest(nodes: list[TrieNode]) -> int:
    """The depth of the trie; also fills in the ancestors of every node."""
    for node in reversed(nodes):
        for child in node.children:
            child.ends = [*node.ends, node.pages]
    return max(len(node.ends) for node in nodes)


def _price(nodes: list[TrieNode], queries: list[int], model: PrefixCosts, levels: int) -> Tensor:
    """Seconds against one plain call, with at most 0, 1, ..., levels levels.

    cost[l, a] of a node is the least cost of its subtree with l levels left, if ancestor a is the
    last one taken. Taking a node reads the pages since a once and pays for its queries, as if it
    were alone in its level. Otherwise its children and its loose sequences read these pages. All
    ancestors are computed at once. (The first read of a page is not counted: every choice has it.)
    """
    for node in nodes[:-1]:
        below = _below(node, model, levels)
        pages = node.pages - torch.tensor(node.ends, dtype=torch.float64)
        rows = queries[node.hi] - queries[node.lo]
        paid = model.of_queries(rows, model.occupancy.segments([rows], pages), pages)
        take, leave = pages * model.page + paid + below[:-1, -1:], below[:, :-1]
        node.taken = take < leave[1:]
        node.cost = torch.cat([leave[:1], torch.where(node.taken, take, leave[1:])])
    return _below(nodes[-1], model, levels)[:, 0]


def _below(node: TrieNode, model: PrefixCosts, levels: int) -> Tensor:
    """(levels + 1, ancestors + 1): the cost below a node, if the last one taken is each of its
    ancestors, or the node itself. A sequence in no child reads the remaining pages by itself.
    """
    ends = torch.tensor([*node.ends, node.pages], dtype=torch.float64)
    loose = node.hi - node.lo - sum(child.hi - child.lo for child in node.children)
    alone = (-loose * model.page * ends).expand(levels + 1, -1)
    return sum((child.cost for child in node.children), alone)


def _trace(root: TrieNode, order: list[int], levels: int) -> list[list[PrefixGroup]]:
    """The groups that `_price` has taken."""
    chosen: list[list[PrefixGroup]] = [[] for _ in range(levels)]
    todo = [(child, levels, 0) for child in root.children]
    while todo:
        node, left, last = todo.pop()
        if left and node.taken[left - 1, last]:
            members = tuple(sorted(order[node.lo : node.hi]))
            chosen[levels - left].append(PrefixGroup(members, node.ends[last], node.pages))
            left, last = left - 1, len(node.ends)
        todo += [(child, left, last) for child in node.children]
    return [sorted(groups) for groups in chosen]


def _covered(levels: list[list[PrefixGroup]], batch: int) -> tuple[int, ...]:
    shared = [0] * batch
    for groups in levels:
        for group in groups:
            for b in group.members:
                shared[b] = group.stop
    return tuple(shared)


def _level(
    table: Tensor,
    cu: list[int],
    groups: list[PrefixGroup],
    page_size: int,
    model: PrefixCosts,
    segments: int | None = None,
) -> CascadeLevel:
    """segments: None for as many as fill the device."""
    runs = [table[g.members[0], g.start : g.stop] for g in groups]
    lengths = [sum(cu[b + 1] - cu[b] for b in g.members) for g in groups]
    if segments is None:
        longest = torch.tensor(max(map(len, runs)))
        segments = int(model.occupancy.segments(lengths, longest))
    page_table, sizes = _cut_runs(runs, segments, model.occupancy.segment_pages)
    rows = _rows(cu, [b for g in groups for b in g.members])
    once_each = sum((len(g.members) - 1) * len(run) for g, run in zip(groups, runs, strict=True))
    paid = sum(model.of_queries(n, segments, len(r)) for n, r in zip(lengths, runs, strict=True))
    return CascadeLevel(
        tuple(groups),
        once_each * model.page - paid - model.level,
        segments,
        page_table,
        sizes * page_size,
        torch.tensor(list(accumulate(lengths * segments, initial=0)), dtype=torch.int32),
        max(lengths),
        rows,
        _index_of_rows(rows, cu[-1]),
    )


def _try_together(plan: CascadePlan, own_pages: int, model: PrefixCosts) -> CascadePlan:
    """The plan with its level concurrent with the own call, if that is possible and is predicted to
    be faster than one after the other.
    """
    if not _may_be_together(plan, model):
        return plan
    (level,) = plan.levels
    (group,) = level.groups
    pages, readers = group.stop - group.start, len(group.members)
    together = model.together(own_pages, level.max_seqlen_q, pages)
    in_turn = model.one_call(own_pages + readers * pages, own_pages + pages) - plan.saved
    if together is None or together.seconds >= in_turn:
        return plan
    gained, cu = in_turn - together.seconds, plan.cu_seqlens_q.tolist()
    cut = _level(plan.tables, cu, [group], plan.page_size, model, together.segments)
    cut = cut._replace(saved=level.saved + gained)
    return plan._replace(levels=(cut,), saved=plan.saved + gained, together=together)


def _may_be_together(plan: CascadePlan, model: PrefixCosts) -> bool:
    """One level of one group with queries that need no copy: so no input of the level is written
    between the two calls. Each sequence has few enough queries for a kernel that splits keys, and
    all of them together have too many for it.
    """
    if [len(level.groups) for level in plan.levels] != [1]:
        return False
    (level,), most = plan.levels, model.occupancy.own_queries
    fits = max(plan.lengths_q) <= most < level.max_seqlen_q
    return fits and isinstance(level.rows, slice)


def _cut_runs(runs: list[Tensor], segments: int, least: int) -> TableLengths:
    """(page_table, pages of its rows): the first segment of every run, the second of every run, and
    so on. The segments of a run are equal, and at least `least` pages long.
    """
    sizes = [max(-(-len(run) // segments), least) for run in runs]
    pieces = [
        run[i * size : (i + 1) * size]
        for i in range(segments)
        for run, size in zip(runs, sizes, strict=True)
    ]
    page_table = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True)
    return page_table, torch.tensor([len(piece) for piece in pieces], dtype=torch.int32)


def _rows(cu: list[int], members: list[int]) -> Tensor | slice:
    """The queries of these sequences, one after another: a slice if they are contiguous already."""
    if all(cu[a + 1] == cu[b] for a, b in pairwise(members)):
        return slice(cu[members[0]], cu[members[-1] + 1])
    return torch.cat([torch.arange(cu[b], cu[b + 1]) for b in members])


def _index_of_rows(rows: Tensor | slice, total_q: int) -> Tensor | None:
    """The index of every query in `rows`, -1 if it is not in them; None if rows are all queries in
    order.
    """
    if isinstance(rows, slice) and rows == slice(0, total_q):
        return None
    row_index = torch.full((total_q,), -1, dtype=torch.int32)
    row_index[rows] = torch.arange(len(row_index[rows]), dtype=torch.int32)
    return row_index
