"""Which sequences of a step read their shared pages together: the cascade of a step.

    prefix tree of the cache      groups of this batch       slots of R queries
    [1 2]---[3 4]--- a, b    ->   {a, b}: 4 pages       ->   a b . .
        \\---[5]----- c            or {a, b, c}: 2 pages      (padded for a CUDA graph)

One level: a sequence is in one group, and reads the rest of its pages by itself. Groups are chosen
by the cost model of onchip/cost/prefixes.py. They change when a sequence enters or leaves the batch
or loses pages; until then a step uses the numbers of the one before, and compares two lists.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.cost.prefixes import PrefixCosts, costs
from onchip.kvcache import KVCache
from onchip.kvcache.prefix_tree import PrefixNode
from onchip.kvcache.shared_prefixes import SharedShape, SharedSlot, pack_slots
from onchip.models import Model

MODES = ("auto", "off", "always")
# A sequence with more new tokens is a prompt: its products take longer than reading its pages.
MOST_ROWS = 16
# Steps with more tokens leave shared pages alone: the unrounded outputs would need memory, and such
# a step computes longer than it reads.
MOST_TOKENS = 2048
EAGER_SLOTS = 32  # most of a step without a graph
_SEVERAL_SLOTS = 4  # least number of a graph for several groups


class CascadeStep(NamedTuple):
    """The cascade of a step. numbers: of `pack_slots`, int32 on the host. unread_tokens: keys that
    the step does not read again, in each layer that reads shared pages once.
    """

    shape: SharedShape
    numbers: Tensor
    unread_tokens: int


class BatchRows(NamedTuple):
    """The sequences of a step and their new tokens. padded: (sequences, tokens) of the batch on the
    device, which may be larger.
    """

    sequences: list[Any]
    counts: list[int]
    padded: tuple[int, int]


@dataclass(frozen=True)
class SharedGroup:
    """Sequences of a batch, by index, that read their first pages together. saved_s: predicted
    seconds of a layer, without what all groups cost together.
    """

    members: list[int]
    pages: int
    saved_s: float


class FilledSlots(NamedTuple):
    """The slots of some groups in a shape. A group for which too few were left has fewer members
    here, or is left out.
    """

    shape: SharedShape
    slots: list[SharedSlot]
    groups: list[SharedGroup]

    @property
    def num_members(self) -> int:
        return sum([len(group.members) for group in self.groups])


class CascadePlanner:
    """Finds the cascade of each step of a model. mode: "auto" where the cost model predicts that it
    saves time, "always" wherever two sequences share a page.
    """

    def __init__(self, model: Model, cache: KVCache, mode: str = "auto"):
        self._cache, self._always = cache, mode == "always"
        self._costs = _find_costs(model, cache)
        self._last: tuple[BatchRows, int, Sequence[SharedShape]] | None = None
        self._step: CascadeStep | None = None

    def graph_shapes(self, num_rows: int) -> list[SharedShape]:
        """The shapes that graphs of num_rows queries have: for one group, and for several."""
        rows = min(num_rows, self._costs.occupancy.tile_queries)
        slots = -(-num_rows // rows)
        several = max(2 * slots, _SEVERAL_SLOTS)
        return [self._shape(slots, rows), self._shape(several, rows)]

    def plan(self, batch: BatchRows, shapes: Sequence[SharedShape] = ()) -> CascadeStep | None:
        """The cascade of a step, None for none. shapes: the shapes with a graph, smallest first;
        without any, the smallest that holds the groups is used.
        """
        tree = self._cache.prefix_tree
        if self._last == (batch, tree.version, shapes):
            return self._step
        few = [s for s, count in zip(batch.sequences, batch.counts, strict=True) if _is_few(count)]
        self._cache.track_prefixes(few)
        self._step = self._plan(batch, shapes) if tree.has_shared else None
        self._last = batch, tree.version, shapes
        return self._step

    def _plan(self, batch: BatchRows, shapes: Sequence[SharedShape]) -> CascadeStep | None:
        below = _members_by_node(self._cache.prefix_tree, batch)
        groups = self._choose_groups(below, batch.counts)
        saved_s = sum([group.saved_s for group in groups])
        if not groups or saved_s <= self._overhead_s(batch.padded[1]):
            return None
        shapes = shapes or [self._eager_shape(groups, batch.counts)]
        filled = _fill_first(groups, batch.counts, shapes)
        if filled.num_members < sum([len(group.members) for group in groups]):
            # Many small groups, too few slots: their common prefixes may save more.
            wide = self._groups_of(_topmost(below), below, batch.counts)
            filled = max(filled, _fill_first(wide, batch.counts, shapes), key=_sum_saved_s)
        return self._pack(filled, batch)

    def _pack(self, filled: FilledSlots, batch: BatchRows) -> CascadeStep | None:
        """None if the groups do not pay for their call."""
        num_seqs, num_tokens = batch.padded
        shape, slots, groups = filled
        if not groups or _sum_saved_s(filled) <= self._overhead_s(num_tokens, shape):
            return None
        own_from = [0] * num_seqs
        for group in groups:
            for member in group.members:
                own_from[member] = group.pages
        numbers = array("i", pack_slots(slots, own_from, shape, num_tokens))
        unread = sum((len(group.members) - 1) * group.pages for group in groups)
        size = self._cache.spec.page_size
        return CascadeStep(shape, torch.frombuffer(numbers, dtype=torch.int32), unread * size)

    def _overhead_s(self, num_tokens: int, shape: SharedShape | None = None) -> float:
        """Seconds of a layer that all groups cost together: the call, the partial results of all
        tokens, and its queries in a shape, with padding.
        """
        if self._always:
            return 0.0
        price = self._costs
        if shape is None:
            return price.level + num_tokens * price.partial
        moved = shape.slots * shape.rows * (price.query + (shape.segments - 1) * price.segment)
        return self._overhead_s(num_tokens) + moved

    def _saved_s(self, num_members: int, num_rows: int, pages: int) -> float:
        """Saved by reading these pages once, without the costs in `_overhead_s`."""
        price = self._costs
        if self._always:
            return float((num_members - 1) * pages)
        exposed = price.occupancy.tiles(num_rows) * price.products - price.first
        return pages * ((num_members - 1) * price.page - max(0.0, exposed))

    def _choose_groups(
        self, below: dict[PrefixNode, list[int]], counts: Sequence[int]
    ) -> list[SharedGroup]:
        """The groups that save most. below: the members of each node."""
        nodes = sorted(below, key=lambda node: node.stop)  # ancestors first
        groups = {node: self._group(node, below[node], counts) for node in nodes}
        best = dict.fromkeys(nodes, 0.0)  # saved by the node, or by nodes below it
        taken: set[PrefixNode] = set()
        for node in reversed(nodes):
            if groups[node].saved_s > best[node]:
                best[node] = groups[node].saved_s
                taken.add(node)
            if node.parent in best:
                best[node.parent] += best[node]
        chosen: set[PrefixNode] = set()
        for node in nodes:
            if node in taken and chosen.isdisjoint(node.ancestors()):
                chosen.add(node)
        return self._groups_of(chosen, below, counts)

    def _groups_of(
        self,
        nodes: Iterable[PrefixNode],
        below: dict[PrefixNode, list[int]],
        counts: Sequence[int],
    ) -> list[SharedGroup]:
        """The groups of these nodes that save time, most first."""
        groups = [self._group(node, below[node], counts) for node in nodes]
        groups = [group for group in groups if group.saved_s > 0]
        return sorted(groups, key=lambda group: (-group.saved_s, group.members))

    def _group(self, node: PrefixNode, members: list[int], counts: Sequence[int]) -> SharedGroup:
        num_rows = sum([counts[i] for i in members])
        return SharedGroup(members, node.stop, self._saved_s(len(members), num_rows, node.stop))

    def _eager_shape(self, groups: Sequence[SharedGroup], counts: Sequence[int]) -> SharedShape:
        """The smallest shape for these groups, at most EAGER_SLOTS slots."""
        sizes = [sum([counts[i] for i in group.members]) for group in groups]
        rows = min(max(sizes), self._costs.occupancy.tile_queries)
        slots = sum([-(-size // rows) for size in sizes])
        return self._shape(min(slots, EAGER_SLOTS), rows)

    def _shape(self, slots: int, rows: int) -> SharedShape:
        """As many segments as there are programs for, if the slots fill tiles. Otherwise kernels
        split the keys by themselves.
        """
        occupancy = self._costs.occupancy
        programs = slots * occupancy.num_kv_heads
        is_full = 4 * rows >= 3 * occupancy.tile_queries
        segments = max(1, occupancy.num_programs // programs) if is_full else 1
        return SharedShape(slots, rows, segments, occupancy.segment_pages if segments > 1 else 1)


def make_planner(model: Model, cache: KVCache, mode: str) -> CascadePlanner | None:
    """None if no step of this model can have a cascade: switched off, or every layer has a
    window.
    """
    if mode not in MODES:
        raise ValueError(f"cascade={mode!r:.60} must be one of {', '.join(map(repr, MODES))}")
    is_windowed = None not in model.windows
    return None if mode == "off" or is_windowed else CascadePlanner(model, cache, mode)


def _find_costs(model: Model, cache: KVCache) -> PrefixCosts:
    heads = model.config.num_heads, cache.spec.head_dim
    return costs(torch.empty(1, *heads, dtype=model.dtype, device=cache.device), *cache.layer(0))


def _is_few(count: int) -> bool:
    """Whether a sequence with so many new tokens may be in a group."""
    return count <= MOST_ROWS


def _members_by_node(tree: Any, batch: BatchRows) -> dict[PrefixNode, list[int]]:
    """The sequences of the batch at or below each node that has two of them."""
    below: dict[PrefixNode, list[int]] = {}
    for i, (sequence, count) in enumerate(zip(batch.sequences, batch.counts, strict=True)):
        node = tree.find(sequence) if _is_few(count) else None
        for each in () if node is None else node.ancestors():
            below.setdefault(each, []).append(i)
    return {node: members for node, members in below.items() if len(members) > 1}


def _topmost(below: dict[PrefixNode, list[int]]) -> list[PrefixNode]:
    return [node for node in below if node.parent not in below]


def _fill_first(
    groups: Sequence[SharedGroup], counts: Sequence[int], shapes: Sequence[SharedShape]
) -> FilledSlots:
    """The slots of the groups in the first shape that holds all members, or in the last."""
    fillings = (_fill_slots(groups, counts, shape) for shape in shapes)
    filled, num_members = next(fillings), sum([len(group.members) for group in groups])
    while filled.num_members < num_members and (larger := next(fillings, None)) is not None:
        filled = larger
    return filled


def _sum_saved_s(filled: FilledSlots) -> float:
    return sum([group.saved_s for group in filled.groups])


def _fill_slots(
    groups: Iterable[SharedGroup], counts: Sequence[int], shape: SharedShape
) -> FilledSlots:
    """Give slots to the groups, in order."""
    starts = list(accumulate(counts, initial=0))
    filled = FilledSlots(shape, [], [])
    for group in groups:
        free_rows = (shape.slots - len(filled.slots)) * shape.rows
        members, tokens = [], []
        for i in group.members:
            if len(tokens) + counts[i] <= free_rows:
                members.append(i)
                tokens += range(starts[i], starts[i + 1])
        if len(members) < 2:
            continue
        share = (len(members) - 1) / (len(group.members) - 1)
        filled.groups.append(SharedGroup(members, group.pages, share * group.saved_s))
        for at in range(0, len(tokens), shape.rows):
            queries = tokens[at : at + shape.rows]
            filled.slots.append(SharedSlot(members[0], group.pages, queries))
    return filled
