"""Which strategy serves a call on which ranks."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from onchip.parallel import allgather, ring, rounds
from onchip.parallel.comm import Comm, GroupComm, as_comm
from onchip.parallel.mesh2d import Nest, best_inner_size, inner_sizes, nested
from onchip.parallel.rank_attention import Attention, Job
from onchip.parallel.rounds import Call, Rule
from onchip.parallel.sharding import Layout
from onchip.parallel.ulysses import Plan, Ulysses
from onchip.problem import Tensors

Group = ProcessGroup | DeviceMesh | Comm | Nest | None
OF_ONE_DIMENSION = {
    "ring": (ring, rounds.schedule),
    "allgather": (allgather, allgather.schedule),
}
STRATEGIES = ("auto", "ring", "ulysses", "hybrid", "allgather")


def ranks_of(group: Group) -> Comm | Nest:
    """Who takes part: in a mesh of two dimensions the first is a ring of what the second are."""
    if isinstance(group, DeviceMesh) and group.ndim == 2:
        return Nest(*(GroupComm(group.get_group(dim)) for dim in range(2)))
    return group if isinstance(group, Nest) else as_comm(group)


class Chosen(NamedTuple):
    """A strategy, and how many neighbours deal heads among them: 1 in a ring, all in Ulysses."""

    strategy: str
    inner_size: int = 1

    @property
    def schedule(self) -> Callable[..., rounds.Schedule]:
        """How rounds are planned: groups that deal heads among them are a ring, too."""
        return OF_ONE_DIMENSION.get(self.strategy, OF_ONE_DIMENSION["ring"])[1]


def choose(
    strategy: str,
    ranks: Comm | Nest,
    num_heads: int,
    num_kv_heads: int,
    hops: int | None = None,
) -> Chosen:
    """The strategy that is meant. auto: that of ring, Ulysses and hybrid that sends the fewest
    bytes among those whose key heads divide (see mesh2d.sent_bytes). hybrid, on ranks that have one
    dimension: the largest groups whose key heads divide. hops: of a ring, if it ends early.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"{strategy=} is not one of {', '.join(STRATEGIES)}")
    if isinstance(ranks, Nest):
        if strategy not in ("auto", "hybrid"):
            raise ValueError(f"{strategy=} takes ranks of one dimension, only 'hybrid' takes two")
        return Chosen("hybrid", ranks.inner.size)
    if strategy == "ulysses":
        return Chosen(strategy, ranks.size)
    if strategy == "hybrid":
        return Chosen(strategy, inner_sizes(ranks.size, num_kv_heads)[-1])
    if strategy != "auto":
        return Chosen(strategy)
    inner_size = best_inner_size(ranks.size, num_heads, num_kv_heads, hops)
    names = {1: "ring", ranks.size: "ulysses"}
    return Chosen("ring" if ranks.size == 1 else names.get(inner_size, "hybrid"), inner_size)


def attend(
    chosen: Chosen,
    ranks: Comm | Nest,
    layout: Layout,
    rule: Rule,
    call: Call,
    x: Tensors,
    out_dtype: torch.dtype,
    before_backward: Callable[[], None],
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank, with gradients for q, k, v and sinks of x."""
    inputs = x.q, x.k, x.v, x.sinks
    if chosen.strategy in OF_ONE_DIMENSION:
        module, _ = OF_ONE_DIMENSION[chosen.strategy]
        plan = chosen.schedule(layout, rule, ranks.rank, x.q.device)
        job = Job(ranks, module, plan, call, out_dtype, before_backward)
        return Attention.apply(job, *inputs)
    nest = ranks if isinstance(ranks, Nest) else nested(ranks, chosen.inner_size)
    plan = Plan.of(nest, layout, rule, call, x, out_dtype, before_backward)
    return Ulysses.of(plan, *inputs)
