"""Shared prefixes attended once: sequences whose page tables begin alike form a trie of page runs;
each run is read once for all queries below it, and the partial results are merged. A run is cut
into segments where its queries alone would leave most of a device idle.

`plan` looks at host tables, once per change of the batch; `run` is called by every layer of every
step with the plan's tensors, synchronises nothing and makes one call per level plus one. A plan
stays valid while sequences grow behind their shared pages.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.iomodel.prefixes import OverlapPlan, PrefixCosts
from onchip.problem import Beside, UnsupportedError
from onchip.state import merge_at_rest

Pair = tuple[Tensor, Tensor]  # (out, lse), or the two page pools, or a table and its lengths


MAX_LEVELS = 4  # each level is one more call; tries of prompts are rarely deeper


class Group(NamedTuple):
    """Sequences that share pages [start, stop) of their tables."""

    members: tuple[int, ...]
    start: int
    stop: int


class Level(NamedTuple):
    """One paged call: each segment of each group is a sequence whose keys are its share of the
    group's run and whose queries are all queries of the group's members; the first segments of all
    groups come first. No sequence is in two groups of a level.
    """

    groups: tuple[Group, ...]
    saved: float  # seconds against reading the runs once per sequence, net of the level's costs
    segments: int
    page_table: Tensor  # (segments * groups, longest segment) int32
    seqlens: Tensor  # (segments * groups,) int32, 0 where a short run has no such segment
    cu_seqlens_q: Tensor  # (segments * groups + 1,) int32
    max_seqlen_q: int
    rows: Tensor | slice  # of the packed queries, in the order of the groups; a slice needs no copy
    place: Tensor | None  # (total_q,) int32: where in `rows` each query is, -1 if it is not


class Part(NamedTuple):
    """What a level gives to the merge: states over disjoint keys, of the queries in its `rows`."""

    out: Tensor  # (segments, rows, heads, head_dim_v), contiguous
    lse: Tensor  # (segments, heads, rows), contiguous in the last dimension
    place: Tensor | None  # of each query among the rows, -1: it has no part; None: in order


class Plan(NamedTuple):
    """What `plan` found, as tensors that `run` uses unchanged; `to` moves them to a device."""

    levels: tuple[Level, ...]
    saved: float  # seconds of one layer against one paged call, as predicted
    page_size: int
    shared: tuple[int, ...]  # pages of each sequence that the levels cover
    lengths_q: tuple[int, ...]
    tables: Tensor  # the page table planned for; stays on the host
    cu_seqlens_q: Tensor  # (batch + 1,) int32
    shared_pages: Tensor  # (batch,) int64
    shared_tokens: Tensor  # (batch,) int32
    together: OverlapPlan | None = (
        None  # the one level runs beside the own parts, where kernels can
    )

    def to(self, device: torch.device | str) -> "Plan":
        """The same plan with its tensors on a device (one copy each, when the batch changes)."""
        move = lambda x: x.to(device) if isinstance(x, Tensor) else x
        levels = tuple(Level(*map(move, level)) for level in self.levels)
        names = ("cu_seqlens_q", "shared_pages", "shared_tokens")
        return self._replace(levels=levels, **{name: move(getattr(self, name)) for name in names})

    def own(self, page_table: Tensor, cache_seqlens: Tensor) -> Pair:
        """(page_table, cache_seqlens) of what each sequence does not share, from the tables as they
        are now: once per step, on their device, without synchronising.
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
        """A plan for other tables would give wrong rows without a sign."""
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
) -> Plan:
    """The levels of shared pages that save most time, as `iomodel.prefixes.costs` of the tensors
    (`model`) predicts it; none, if the plain call is fastest.

    page_table (batch, max_pages), cache_seqlens (batch,) and cu_seqlens_q (batch + 1,) are lists or
    CPU tensors: the host's copy, because reading a device's would synchronise. Each sequence has
    seqlen_q queries, or those of cu_seqlens_q; only full pages before its first query are shared.
    Takes O(pages x log batch), all of it vectorised over pages.
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
    found = Plan(levels, saved, page_size, shared, lengths, table, cu, pages, tokens)
    own_pages = int((-(-seqlens // page_size) - pages).sum())
    return found if cu_seqlens_q is not None else _together(found, own_pages, model)


class Call(NamedTuple):
    """A call of attend, not yet made."""

    args: tuple[Tensor, ...]  # q, k_pages, v_pages, page_table, cache_seqlens
    options: dict

    def beside(self, programs: int, second: bool) -> "Call":
        return Call(self.args, {**self.options, "beside": Beside(programs, second)})


def run(
    plan: Plan,
    attend: Callable[..., Pair],
    q: Tensor,
    pages: Pair,
    own: Pair,
    *,
    merge: Callable[[Pair, list[Part], torch.dtype], Pair] | None = None,
    at_once: Callable[[Call, Call], list[Pair] | None] | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = True,
    **options: object,
) -> Pair | Tensor:
    """(out, lse), or out alone, of paged attention over the tables that `plan.own` was given, in
    one call of attend per level and one for what is not shared.

    attend is called like onchip.paged_attention. q: (batch, seqlen_q, heads, head_dim), or packed.
    A causal rule and sinks go to the own part alone: shared keys lie before every query, and a sink
    counts once. merge(own, parts, out_dtype) is the n-way merge of the own part, packed, and those
    of the levels: state.merge_at_rest unless a device has a kernel for it. at_once(own, level) is
    given both calls, each with a `beside` among its options, makes them so that they run at the
    same time, and returns what attend would have; or None. Then, and without it, they come in turn.
    """
    for_all, for_own = _split_options(options)
    rows = _packed(plan, q, pages)
    if not plan.levels:
        asked = {**options, "out_dtype": out_dtype, "return_lse": return_lse}
        call = _own_call(plan, q, pages, own, asked)
        return attend(*call.args, **call.options)
    for_all["out_dtype"] = torch.promote_types(q.dtype, torch.float32)  # partials are not rounded
    for_all["return_lse"] = True
    calls = [_own_call(plan, q, pages, own, {**for_all, **for_own})]
    calls += [_level_call(level, rows, pages, for_all) for level in plan.levels]
    found = _side_by_side(plan, calls, at_once)
    if found is None:
        found = [attend(*call.args, **call.options) for call in calls]
    (out, lse), *found = found
    parts = [_part(level, *pair) for level, pair in zip(plan.levels, found, strict=True)]
    state = out.reshape(-1, *out.shape[-2:]), _packed_lse(lse)
    out, lse = (merge or _merge)(state, parts, out_dtype or q.dtype)
    if q.dim() == 4:
        out = out.unflatten(0, q.shape[:2])
        lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()
    return (out, lse) if return_lse else out


def _side_by_side(
    plan: Plan, calls: list[Call], at_once: Callable[[Call, Call], list[Pair] | None] | None
) -> list[Pair] | None:
    """What the own call and that of the level give, each on its programs, if they may run so."""
    if plan.together is None or at_once is None:
        return None
    own, level = calls
    own_programs, level_programs, *_ = plan.together
    return at_once(own.beside(own_programs, False), level.beside(level_programs, True))


FOR_ALL = {"softmax_scale", "softcap", "kernel", "deterministic", "k_scales", "v_scales"}
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


def _packed(plan: Plan, q: Tensor, pages: Pair) -> Tensor:
    """q as (total_q, heads, head_dim), if queries and pages are those that were planned."""
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


def _own_call(plan: Plan, q: Tensor, pages: Pair, own: Pair, options: dict) -> Call:
    packing: dict[str, object] = {}
    if q.dim() == 3:
        packing = {
            "cu_seqlens_q": plan.cu_seqlens_q,
            "max_seqlen_q": max(plan.lengths_q, default=0),
        }
    return Call((q, *pages, *own), {**packing, **options})


def _level_call(level: Level, rows: Tensor, pages: Pair, options: dict) -> Call:
    """One group's segments are sequences of equal length: such a call need not be packed, and all
    of them read the same queries.
    """
    q, packing = rows[level.rows], {}
    if len(level.groups) == 1:
        q = q.expand(level.segments, *q.shape)
    else:
        q = q.repeat(level.segments, 1, 1)
        packing = {"cu_seqlens_q": level.cu_seqlens_q, "max_seqlen_q": level.max_seqlen_q}
    tables = level.page_table, level.seqlens
    return Call((q, *pages, *tables), {"causal": False, **packing, **options})


def _part(level: Level, out: Tensor, lse: Tensor) -> Part:
    """What the call of a level has found."""
    if len(level.groups) == 1:
        return Part(out, lse, level.place)
    stacked = (level.segments, -1)
    return Part(out.unflatten(0, stacked), lse.unflatten(1, stacked).transpose(0, 1), level.place)


def _packed_lse(lse: Tensor) -> Tensor:
    """(batch, heads, seqlen_q) or packed already -> (heads, total_q)."""
    return lse.transpose(0, 1).flatten(1) if lse.dim() == 3 else lse


def _merge(own: Pair, parts: list[Part], out_dtype: torch.dtype) -> Pair:
    states = [own, *(state for part in parts for state in _states(part))]
    outs, lses = [out.transpose(0, 1) for out, _ in states], [lse for _, lse in states]
    out, lse = merge_at_rest(outs, lses)
    return out.transpose(0, 1).to(out_dtype), lse


def _states(part: Part) -> Iterator[Pair]:
    """The states of a part in the order of all queries; those without a part have seen no key."""
    out, lse, place = part
    if place is not None:
        at, absent = place.clamp(min=0), place < 0
        out = out[:, at].masked_fill(absent[:, None, None], 0.0)
        lse = lse[:, :, at].masked_fill(absent, -torch.inf)
    return zip(out.unbind(0), lse.unbind(0), strict=True)


def _host(name: str, x: object, rank: int) -> Tensor:
    if isinstance(x, Tensor) and x.device.type != "cpu":
        raise ValueError(
            f"{name} is on {x.device}: plan from the host's copy, reading the device's would"
            " synchronise with it"
        )
    t = torch.as_tensor(x, dtype=torch.int32).clone()  # the caller's may change while we hold it
    if t.dim() != rank:
        raise ValueError(f"{name} must have rank {rank}, got shape {tuple(t.shape)}")
    return t


def _shareable(table: Tensor, seqlens: Tensor, lengths: Tensor, page_size: int) -> Tensor:
    """Full pages before the first query of each sequence; none for one without queries."""
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
class Node:
    """Sequences [lo, hi) of the sorted order, which share exactly their first `pages` pages."""

    lo: int
    pages: int
    hi: int = 0
    children: list["Node"] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # `pages` of every ancestor, root first
    cost: Tensor = field(default_factory=lambda: torch.empty(0))  # (levels + 1, ancestors)
    taken: Tensor = field(default_factory=lambda: torch.empty(0))  # (levels, ancestors)


def _choose(
    table: Tensor, shareable: Tensor, lengths: Sequence[int], model: PrefixCosts, max_levels: int
) -> list[list[Group]]:
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
    """An order in which equal prefixes are neighbours, and how many pages each sequence shares with
    the one before it.
    """
    batch, width = table.shape
    private = torch.arange(batch, dtype=torch.int32)[:, None] - batch  # unlike any page id
    keys = torch.where(torch.arange(width) < shareable[:, None], table, private)
    if not keys.numel():
        return list(range(batch)), [0] * max(batch - 1, 0)
    order = torch.unique(keys, dim=0, return_inverse=True)[1].argsort(stable=True)
    keys = keys[order]
    return order.tolist(), (keys[1:] == keys[:-1]).cumprod(1).sum(1).tolist()


def _trie(common: list[int]) -> list[Node]:
    """The trie of the sorted sequences, children before parents, the root (no page) last: one pass
    with a stack over the lengths of common prefixes.
    """
    stack, done = [Node(0, 0)], []
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
            stack.append(Node(lo, pages, children=[orphan] if orphan else []))
    stack[0].hi = len(common) + 1
    return [*done, stack[0]]


def _deepest(nodes: list[Node]) -> int:
    """Levels of the trie; also tells every node its ancestors."""
    for node in reversed(nodes):
        for child in node.children:
            child.ends = [*node.ends, node.pages]
    return max(len(node.ends) for node in nodes)


def _price(nodes: list[Node], queries: list[int], model: PrefixCosts, levels: int) -> Tensor:
    """Seconds against one plain call, with at most 0, 1, ..., levels levels.

    cost[l, a] of a node is the least its subtree needs with l levels left when ancestor a is the
    last one taken. Taking a node reads the pages since a once and pays for its queries, as if it
    were alone in its level; leaving it lets its children and its loose sequences read them. All
    ancestors at once. (The first reading of a page is not counted: it comes with every choice.)
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


def _below(node: Node, model: PrefixCosts, levels: int) -> Tensor:
    """(levels + 1, ancestors + 1): what is below a node costs, if the last one taken is each of its
    ancestors, or the node itself. A sequence that has no part in a child reads what is left.
    """
    ends = torch.tensor([*node.ends, node.pages], dtype=torch.float64)
    loose = node.hi - node.lo - sum(child.hi - child.lo for child in node.children)
    alone = (-loose * model.page * ends).expand(levels + 1, -1)
    return sum((child.cost for child in node.children), alone)


def _trace(root: Node, order: list[int], levels: int) -> list[list[Group]]:
    """The groups that _price took."""
    found: list[list[Group]] = [[] for _ in range(levels)]
    todo = [(child, levels, 0) for child in root.children]
    while todo:
        node, left, last = todo.pop()
        if left and node.taken[left - 1, last]:
            members = tuple(sorted(order[node.lo : node.hi]))
            found[levels - left].append(Group(members, node.ends[last], node.pages))
            left, last = left - 1, len(node.ends)
        todo += [(child, left, last) for child in node.children]
    return [sorted(groups) for groups in found]


def _covered(levels: list[list[Group]], batch: int) -> tuple[int, ...]:
    shared = [0] * batch
    for groups in levels:
        for group in groups:
            for b in group.members:
                shared[b] = group.stop
    return tuple(shared)


def _level(
    table: Tensor,
    cu: list[int],
    groups: list[Group],
    page_size: int,
    model: PrefixCosts,
    segments: int | None = None,
) -> Level:
    """segments: None for as many as fill the device."""
    runs = [table[g.members[0], g.start : g.stop] for g in groups]
    lengths = [sum(cu[b + 1] - cu[b] for b in g.members) for g in groups]
    if segments is None:
        longest = torch.tensor(max(map(len, runs)))
        segments = int(model.occupancy.segments(lengths, longest))
    page_table, sizes = _cut(runs, segments, model.occupancy.segment_pages)
    rows = _rows(cu, [b for g in groups for b in g.members])
    once_each = sum((len(g.members) - 1) * len(run) for g, run in zip(groups, runs, strict=True))
    paid = sum(model.of_queries(n, segments, len(r)) for n, r in zip(lengths, runs, strict=True))
    return Level(
        tuple(groups),
        once_each * model.page - paid - model.level,
        segments,
        page_table,
        sizes * page_size,
        torch.tensor(list(accumulate(lengths * segments, initial=0)), dtype=torch.int32),
        max(lengths),
        rows,
        _place(rows, cu[-1]),
    )


def _together(plan: Plan, own_pages: int, model: PrefixCosts) -> Plan:
    """The plan with its level beside the own parts, where that may be and is predicted to take less
    than one after the other.
    """
    if not _may_be_together(plan, model):
        return plan
    (level,) = plan.levels
    (group,) = level.groups
    pages, readers = group.stop - group.start, len(group.members)
    found = model.together(own_pages, level.max_seqlen_q, pages)
    in_turn = model.one_call(own_pages + readers * pages, own_pages + pages) - plan.saved
    if found is None or found.seconds >= in_turn:
        return plan
    gained, cu = in_turn - found.seconds, plan.cu_seqlens_q.tolist()
    cut = _level(plan.tables, cu, [group], plan.page_size, model, found.segments)
    cut = cut._replace(saved=level.saved + gained)
    return plan._replace(levels=(cut,), saved=plan.saved + gained, together=found)


def _may_be_together(plan: Plan, model: PrefixCosts) -> bool:
    """One level of one group, whose queries need not be copied: nothing that the level reads is
    then made between the two calls. Each sequence has queries few enough for a kernel that splits
    keys, all of them together have too many for it.
    """
    if [len(level.groups) for level in plan.levels] != [1]:
        return False
    (level,), most = plan.levels, model.occupancy.own_queries
    fits = max(plan.lengths_q) <= most < level.max_seqlen_q
    return fits and isinstance(level.rows, slice)


def _cut(runs: list[Tensor], segments: int, least: int) -> Pair:
    """(page_table, pages of its rows): the first segment of every run, the second of every run, and
    so on; of a run the segments are equal, and as few as make them `least` pages long.
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
    """The queries of these sequences, one after another: a slice where they lie so already."""
    if all(cu[a + 1] == cu[b] for a, b in pairwise(members)):
        return slice(cu[members[0]], cu[members[-1] + 1])
    return torch.cat([torch.arange(cu[b], cu[b + 1]) for b in members])


def _place(rows: Tensor | slice, total_q: int) -> Tensor | None:
    """Where each of all queries is among `rows`: the inverse of rows, or None if that is in
    order.
    """
    if isinstance(rows, slice) and rows == slice(0, total_q):
        return None
    place = torch.full((total_q,), -1, dtype=torch.int32)
    place[rows] = torch.arange(len(place[rows]), dtype=torch.int32)
    return place
