"""Choose the strategy of a call, and run it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from onchip.core.problem import Tensors
from onchip.parallel import allgather, ring, rounds
from onchip.parallel.comm import Comm, GroupComm, as_comm
from onchip.parallel.mesh2d import Mesh2D, best_inner_size, inner_sizes, make_mesh2d
from onchip.parallel.rank_attention import RankAttention, RankAttentionFunction
from onchip.parallel.rounds import GlobalMask, RoundOptions
from onchip.parallel.sharding import Layout
from onchip.parallel.ulysses import UlyssesFunction, UlyssesPlan

GroupLike = ProcessGroup | DeviceMesh | Comm | Mesh2D | None
ONE_DIMENSIONAL = {
    "ring": (ring, rounds.plan_rounds),
    "allgather": (allgather, allgather.plan_rounds),
}
STRATEGIES = ("auto", "ring", "ulysses", "hybrid", "allgather")


def as_ranks(group: GroupLike) -> Comm | Mesh2D:
    """The ranks of a call. Of a two-dimensional mesh the first dimension is the ring, the second
    exchanges heads.
    """
    if isinstance(group, DeviceMesh) and group.ndim == 2:
        return Mesh2D(*(GroupComm(group.get_group(dim)) for dim in range(2)))
    return group if isinstance(group, Mesh2D) else as_comm(group)


class StrategyChoice(NamedTuple):
    """A strategy, and how many neighbours exchange heads: 1 in a ring, all ranks in Ulysses."""

    strategy: str
    inner_size: int = 1

    @property
    def plan_rounds(self) -> Callable[..., rounds.RingSchedule]:
        """Plans the rounds. Groups that exchange heads form a ring, too."""
        return ONE_DIMENSIONAL.get(self.strategy, ONE_DIMENSIONAL["ring"])[1]


def choose_strategy(
    strategy: str, ranks: Comm | Mesh2D, num_heads: int, num_kv_heads: int, hops: int | None = None
) -> StrategyChoice:
    """The strategy to run.

    auto: the one of ring, Ulysses and hybrid that sends the fewest bytes (see mesh2d.sent_bytes),
    with groups among which key heads divide evenly. hybrid, on ranks of one dimension: the largest
    such groups. hops: of the ring, if windows or documents end it early.
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
    options: RoundOptions,
    x: Tensors,
    out_dtype: torch.dtype,
    before_backward: Callable[[], None],
) -> tuple[Tensor, Tensor]:
    """(out, lse) of this rank, with gradients for q, k, v and sinks of x."""
    inputs = x.q, x.k, x.v, x.sinks
    if choice.strategy in ONE_DIMENSIONAL:
        module, _ = ONE_DIMENSIONAL[choice.strategy]
        plan = choice.plan_rounds(layout, global_mask, ranks.rank, x.q.device)
        rank_attention = RankAttention(ranks, module, plan, options, out_dtype, before_backward)
        return RankAttentionFunction.apply(rank_attention, *inputs)
    mesh = ranks if isinstance(ranks, Mesh2D) else make_mesh2d(ranks, choice.inner_size)
    plan = UlyssesPlan.of(mesh, layout, global_mask, options, x, out_dtype, before_backward)
    return UlyssesFunction.of(plan, *inputs)
