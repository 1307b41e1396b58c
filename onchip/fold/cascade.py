"""Shared prefixes attended once: sequences whose page tables begin alike form a trie of page runs;
each run is read once for all queries below it, and the partial results are merged.

`plan` looks at host tables, once per change of the batch; `run` is called by every layer of every
step with the plan's tensors, synchronises nothing and makes one call per level plus one. A plan
stays valid while sequences grow behind their shared pages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.problem import UnsupportedError
from onchip.state import merge_at_rest

Pair = tuple[Tensor, Tensor]  # (out, lse), or the two page pools, or a table and its lengths


class Traffic(NamedTuple):
    """What moves between memory and chip, in bytes of one layer."""

    page_bytes: int  # keys and values of one page
    query_bytes: int  # what one query token adds in one level
    partial_bytes: int  # what one query token's own part costs more once results are partial
    level_bytes: int  # what the device could have read while a level's launches start and drain


# A level adds an attend call (a main and a merging launch) and its share of the last merge. CUDA:
# 8 sequences that share 2,048 of 2,112 keys took 39 us with a level and 17 us without (H200,
# 2026-11-15); a level saves 13 us of reading there, so it costs some 35 us, in which 4.4 TB/s read
# 150 MB. CPU: 0.4 ms of a paged call over 16 keys, at 5 GB/s.
LEVEL_BYTES = {"cuda": 150 << 20, "cpu": 2 << 20}
MAX_LEVELS = 4  # each level is one more call; tries of prompts are rarely deeper


def traffic(q: Tensor, k_pages: Tensor, v_pages: Tensor) -> Traffic:
    """The model's constants for tensors like these; only shapes, dtype and device type are read."""
    if q.dim() < 3 or k_pages.dim() != 4 or v_pages.dim() != 4:
        shapes = [tuple(t.shape) for t in (q, k_pages, v_pages)]
        raise ValueError(f"q must end in (heads, head_dim) and pages have rank 4, got {shapes}")
    num_heads, head_dim = q.shape[-2:]
    page_size, num_kv_heads = k_pages.shape[1:3]
    head_dim_v, item = v_pages.shape[-1], k_pages.element_size()
    partial = 2 * num_heads * 4 * (head_dim_v + 1)  # fp32 out and lse, written and read back
    query = 3 * num_heads * head_dim * q.element_size()  # gathered (read, written), read again
    return Traffic(
        page_bytes=page_size * num_kv_heads * (head_dim + head_dim_v) * item,
        query_bytes=query + partial,
        partial_bytes=partial,
        level_bytes=LEVEL_BYTES.get(q.device.type, LEVEL_BYTES["cuda"]),
    )


class Group(NamedTuple):
    """Sequences that share pages [start, stop) of their tables."""

    members: tuple[int, ...]
    start: int
    stop: int


class Level(NamedTuple):
    """One paged call: each group is a sequence whose keys are the shared run and whose queries are
    all queries of its members. No sequence is in two groups of a level.
    """

    groups: tuple[Group, ...]
    saved_bytes: int  # against reading the runs once per sequence, net of what the level costs
    page_table: Tensor  # (groups, longest run) int32
    seqlens: Tensor  # (groups,) int32
    cu_seqlens_q: Tensor  # (groups + 1,) int32
    max_seqlen_q: int
    rows: Tensor | slice  # of the packed queries, in the order of the groups; a slice needs no copy


class Plan(NamedTuple):
    """What `plan` found, as tensors that `run` uses unchanged; `to` moves them to a device."""

    levels: tuple[Level, ...]
    saved_bytes: int  # against one paged call, as the model has it, in one layer
    page_size: int
    shared: tuple[int, ...]  # pages of each sequence that the levels cover
    lengths_q: tuple[int, ...]
    tables: Tensor  # the page table planned for; stays on the host
    cu_seqlens_q: Tensor  # (batch + 1,) int32
    shared_pages: Tensor  # (batch,) int64
    shared_tokens: Tensor  # (batch,) int32

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
    model: Traffic,
    *,
    seqlen_q: int = 1,
    cu_seqlens_q: Tensor | Sequence[int] | None = None,
    max_levels: int = MAX_LEVELS,
) -> Plan:
    """The levels of shared pages that save most bytes; none, if the plain call is cheapest.

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
    groups, saved = _choose(table, shareable, lengths, model, max_levels)
    levels = tuple(_level(table, cu.tolist(), chosen, page_size, model) for chosen in groups)
    shared = _covered(groups, len(table))
    pages = torch.tensor(shared, dtype=torch.int64)
    tokens = (pages * page_size).int()
    return Plan(levels, saved, page_size, shared, lengths, table, cu, pages, tokens)


def run(
    plan: Plan,
    attend: Callable[..., Pair],
    q: Tensor,
    pages: Pair,
    own: Pair,
    *,
    merge: Callable[[list[Tensor], list[Tensor], torch.dtype], Pair] | None = None,
    out_dtype: torch.dtype | None = None,
    **options: object,
) -> Pair:
    """(out, lse) of paged attention over the tables that `plan.own` was given, in one call of
    attend per level and one for what is not shared.

    attend is called like onchip.paged_attention. q: (batch, seqlen_q, heads, head_dim), or packed.
    A causal rule and sinks go to the own part alone: shared keys lie before every query, and a sink
    counts once. merge(outs, lses, out_dtype) is the n-way merge of packed partials:
    state.merge_at_rest unless a device has a kernel for it.
    """
    for_all, for_own = _split_options(options)
    rows = _packed(plan, q, pages)
    if not plan.levels:
        return _attend_own(plan, attend, q, pages, own, {**options, "out_dtype": out_dtype})
    for_all["out_dtype"] = torch.promote_types(q.dtype, torch.float32)  # partials are not rounded
    parts = [_attend_own(plan, attend, q, pages, own, {**for_all, **for_own})]
    parts = [(out.reshape(-1, *out.shape[-2:]), _packed_lse(lse)) for out, lse in parts]
    parts += [_attend_level(level, attend, rows, pages, for_all) for level in plan.levels]
    outs, lses = [out for out, _ in parts], [lse for _, lse in parts]
    out, lse = (merge or _merge)(outs, lses, out_dtype or q.dtype)
    if q.dim() == 3:
        return out, lse
    return out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()


FOR_ALL = {"softmax_scale", "softcap", "kernel", "deterministic"}
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


def _attend_own(
    plan: Plan, attend: Callable[..., Pair], q: Tensor, pages: Pair, own: Pair, options: dict
) -> Pair:
    packing: dict[str, object] = {}
    if q.dim() == 3:
        packing = {
            "cu_seqlens_q": plan.cu_seqlens_q,
            "max_seqlen_q": max(plan.lengths_q, default=0),
        }
    return attend(q, *pages, *own, **packing, **options, return_lse=True)


def _attend_level(
    level: Level, attend: Callable[..., Pair], rows: Tensor, pages: Pair, options: dict
) -> Pair:
    """The level's part for all rows: those that it does not cover have seen no key."""
    out, lse = attend(
        rows[level.rows],
        *pages,
        level.page_table,
        level.seqlens,
        cu_seqlens_q=level.cu_seqlens_q,
        max_seqlen_q=level.max_seqlen_q,
        causal=False,
        return_lse=True,
        **options,
    )
    if isinstance(level.rows, slice) and len(out) == len(rows):
        return out, lse
    everywhere = out.new_zeros(len(rows), *out.shape[1:])
    everywhere[level.rows] = out
    seen = lse.new_full((len(lse), len(rows)), -torch.inf)
    seen[:, level.rows] = lse
    return everywhere, seen


def _packed_lse(lse: Tensor) -> Tensor:
    """(batch, heads, seqlen_q) or packed already -> (heads, total_q)."""
    return lse.transpose(0, 1).flatten(1) if lse.dim() == 3 else lse


def _merge(outs: list[Tensor], lses: list[Tensor], out_dtype: torch.dtype) -> Pair:
    out, lse = merge_at_rest([out.transpose(0, 1) for out in outs], lses)
    return out.transpose(0, 1).to(out_dtype), lse


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
    table: Tensor, shareable: Tensor, lengths: Sequence[int], model: Traffic, max_levels: int
) -> tuple[list[list[Group]], int]:
    """The groups of each level, and the bytes they save."""
    order, common = _sorted_prefixes(table, shareable)
    nodes = _trie(common)
    queries = list(accumulate((lengths[b] for b in order), initial=0))
    totals = _price(nodes, queries, model, min(max_levels, _deepest(nodes)))
    levels = torch.arange(len(totals))
    once = queries[-1] * model.partial_bytes * (levels > 0)
    totals = totals + once + levels * model.level_bytes
    best = int(totals.argmin())
    return _trace(nodes[-1], order, best), -int(totals[best])


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


def _price(nodes: list[Node], queries: list[int], model: Traffic, levels: int) -> Tensor:
    """Bytes against one plain call, with at most 0, 1, ..., levels levels.

    cost[l, a] of a node is the least its subtree needs with l levels left when ancestor a is the
    last one taken. Taking a node reads the pages since a once and moves its queries' partials;
    leaving it lets its children and its loose sequences read them. All ancestors at once.
    """
    for node in nodes[:-1]:
        below = _below(node, model, levels)
        reads = (node.pages - torch.tensor(node.ends)) * model.page_bytes
        partials = (queries[node.hi] - queries[node.lo]) * model.query_bytes
        take, leave = reads + partials + below[:-1, -1:], below[:, :-1]
        node.taken = take < leave[1:]
        node.cost = torch.cat([leave[:1], torch.where(node.taken, take, leave[1:])])
    return _below(nodes[-1], model, levels)[:, 0]


def _below(node: Node, model: Traffic, levels: int) -> Tensor:
    """(levels + 1, ancestors + 1): what is below a node costs, if the last one taken is each of its
    ancestors, or the node itself. A sequence that has no part in a child reads what is left.
    """
    ends = torch.tensor([*node.ends, node.pages])
    loose = node.hi - node.lo - sum(child.hi - child.lo for child in node.children)
    alone = (-loose * model.page_bytes * ends).expand(levels + 1, -1)
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
    table: Tensor, cu: list[int], groups: list[Group], page_size: int, model: Traffic
) -> Level:
    runs = [g.stop - g.start for g in groups]
    page_table = torch.zeros(len(groups), max(runs), dtype=torch.int32)
    for i, g in enumerate(groups):
        page_table[i, : runs[i]] = table[g.members[0], g.start : g.stop]
    lengths = [sum(cu[b + 1] - cu[b] for b in g.members) for g in groups]
    once_each = sum((len(g.members) - 1) * run for g, run in zip(groups, runs, strict=True))
    saved = once_each * model.page_bytes - sum(lengths) * model.query_bytes - model.level_bytes
    return Level(
        tuple(groups),
        saved,
        page_table,
        torch.tensor(runs, dtype=torch.int32) * page_size,
        torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32),
        max(lengths),
        _rows(cu, [b for g in groups for b in g.members]),
    )


def _rows(cu: list[int], members: list[int]) -> Tensor | slice:
    """The queries of these sequences, one after another: a slice where they lie so already."""
    if all(cu[a + 1] == cu[b] for a, b in pairwise(members)):
        return slice(cu[members[0]], cu[members[-1] + 1])
    return torch.cat([torch.arange(cu[b], cu[b + 1]) for b in members])
