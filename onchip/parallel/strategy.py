"""Which strategy serves a call on which ranks."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from onchip.parallel import allgather, ring, rounds
from onchip.parallel.comm import Comm, GroupComm, as_comm
from onchip.parallel.mesh2d import Mesh2D, best_inner_size, inner_sizes, make_mesh2d
from onchip.parallel.rank_attention import RankAttention, RankAttentionFunction
from onchip.parallel.rounds import GlobalMask, RoundOptions
from onchip.parallel.sharding import Layout
from onchip.parallel.ulysses import UlyssesFunction, UlyssesPlan
from onchip.problem import Tensors

GroupLike = ProcessGroup | DeviceMesh | Comm | Mesh2D | None
ONE_DIMENSIONAL = {
    "ring": (ring, rounds.plan_rounds),
    "allgather": (allgather, allgather.plan_rounds),
}
STRATEGIES = ("auto", "ring", "ulysses", "hybrid", "allgather")


def as_ranks(group: GroupLike) -> Comm | Mesh2D:
    """Who takes part: in a mesh of two dimensions the first is a ring of what the second are."""
    if isinstance(group, DeviceMesh) and group.ndim == 2:
        return Mesh2D(*(GroupComm(group.get_group(dim)) for dim in range(2)))
    return group if isinstance(group, Mesh2D) else as_comm(group)


class StrategyChoice(NamedTuple):
    """A strategy, and how many neighbours deal heads among them: 1 in a ring, all in UlyssesFunction."""

    strategy: str
    inner_size: int = 1

    @property
    def plan_rounds(self) -> Callable[..., rounds.RingSchedule]:
        """How rounds are planned: groups that deal heads among them are a ring, too."""
        return ONE_DIMENSIONAL.get(self.strategy, ONE_DIMENSIONAL["ring"])[1]


def choose_strategy(
    strategy: str,
    ranks: Comm | Mesh2D,
    num_heads: int,
    num_kv_heads: int,
    hops: int | None = None,
) -> StrategyChoice:
    """The strategy that is meant. auto: that of ring, UlyssesFunction and hybrid that sends the fewest
    bytes among those whose key heads divide (see mesh2d.sent_bytes). hybrid, on ranks that have one
    dimension: the largest groups whose key heads divide. hops: of a ring, if it ends early.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"{strategy=} is not one of {', '.join(STRATEGIES)}")
    if isinstance(ranks, Mesh2D):
        if strategy not in ("auto", "hybrid"):
            raise ValueError(f"{strategy=} takes ranks of one dimension, only 'hybrid' takes two")
        return StrategyChoice("hybrid", ranks.inner.size)
    if strategy == "ulysses":
        return StrategyChoice(strategy, ranks.size)
    if strategy == "hybrid":
        return StrategyChoice(strategy, inner_sizes(ranks.size, num_kv_heads)[-1])
    if strategy != "auto":
        return StrategyChoice(strategy)
    inner_size = best_inner_size(ranks.size, num_heads, num_kv_heads, hops)
    names = {1: "ring", ranks.size: "ulysses"}
    return StrategyChoice(
        "ring" if ranks.size == 1 else names.get(inner_size, "hybrid"), inner_size
    )


def run_strategy(
    choice: StrategyChoice,
    ranks: Comm | Mesh2D,
    layout: Layout,
    global_mask: GlobalMask,
    call: RoundOptions,
    x: Tensors,
    out_dtype: torch.dtype,
    before_backward: Callable[[], None],
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank, with gradients for q, k, v and sinks of x."""
    inputs = x.q, x.k, x.v, x.sinks
    if choice.strategy in ONE_DIMENSIONAL:
        module, _ = ONE_DIMENSIONAL[choice.strategy]
        plan = choice.plan_rounds(layout, global_mask, ranks.rank, x.q.device)
        rank_attention = RankAttention(ranks, module, plan, call, out_dtype, before_backward)
        return RankAttentionFunction.apply(rank_attention, *inputs)
    mesh = ranks if isinstance(ranks, Mesh2D) else make_mesh2d(ranks, choice.inner_size)
    plan = UlyssesPlan.of(mesh, layout, global_mask, call, x, out_dtype, before_backward)
    return UlyssesFunction.of(plan, *inputs)
