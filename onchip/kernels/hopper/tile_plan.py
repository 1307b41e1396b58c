"""How a call is split into tiles on Hopper: numbers alone, which `explain` prints on any machine.

Worked shape: batch 2, 16 heads, 4,096 tokens, head_dim 128, causal: 32 tiles of 128 queries for
each head, so num_tiles = 1,024. K and V of a head are 2 MB, so 8 heads are computed together.
"""

from functools import lru_cache
from typing import NamedTuple

from onchip.core.problem import Problem
from onchip.kernels.tiles import (
    HOPPER_FORWARD_SHORT,
    HopperConfig,
    describe_hopper_row,
    hopper_backward_config,
    hopper_backward_widths,
    hopper_forward_of,
    hopper_forward_widths,
    split_columns,
)

# Bytes of the L2 for heads that are computed together. The L2 has 50 MB, but each half of the SMs
# has its own half. With 32 MB causal forwards read 10 to 30 % more from HBM (ncu, H200,
# 2026-11-15), in the same time. Backwards were timed with 32 MB, and not with less.
L2_FORWARD, L2_BACKWARD = 16 << 20, 32 << 20


class TilePlan(NamedTuple):
    """How a call is split into tiles: `group` heads share each tile; `dynamic`: programs draw tiles
    one by one. left and right: the window, right = 0 if causal.
    """

    config: HopperConfig
    left: int | None
    right: int | None
    group: int
    tiles_m: int
    l2_group: int
    num_tiles: int
    dynamic: bool


def plan_tiles(problem: Problem, config: HopperConfig) -> TilePlan:
    left, right = problem.window
    group = _heads_per_tile(problem, config, right is not None)
    tiles_m = -(-problem.seqlen_q * group // (64 * config.consumers))
    num_head_tiles = problem.batch * problem.num_heads // group
    uneven = right is not None or left is not None or problem.packed or problem.has_mask
    dynamic = uneven or config.dynamic or problem.page_size > 0
    l2_group = _l2_group(problem, num_head_tiles, group)
    return TilePlan(
        config, left, right, group, tiles_m, l2_group, tiles_m * num_head_tiles, dynamic
    )


def describe_tiles(problem: Problem, processors: int) -> str:
    """The launch of a forward without a mask, for `explain`."""
    config = hopper_forward_of(problem)
    plan = plan_tiles(problem, config)
    heads = f" of {plan.group} heads" if plan.group > 1 else ""
    return (
        f"{min(plan.num_tiles, processors)} programs for {plan.num_tiles} tiles:"
        f" {config.consumers} x 64 queries{heads}, {config.tile_n} keys at a time in"
        f" {config.num_stages} stages{_describe_columns(problem)}; registers:"
        f" {config.consumer_regs} of a consumer, {config.producer_regs} of the producer;"
        f" {describe_hopper_row(problem)}"
    )


def _describe_columns(problem: Problem) -> str:
    """The columns of tiles with a tail."""
    widths = dict(zip(("q and k", "v"), hopper_forward_widths(problem), strict=True))
    split = {name: split_columns(width) for name, width in widths.items()}
    tails = [f"{n} + {tail} of {name}" for name, (n, tail) in split.items() if tail]
    return f"; columns: {', '.join(tails)}" if tails else ""


# What a work item of the backward costs beside its steps (a tile of queries against a tile of
# keys), in steps: keys and values are loaded, dk and dv are stored; shares of parts are stored in
# fp32, and added later.
STEPS_OF_ITEM, STEPS_OF_SHARE = 4, 4


def divide_group(problem: Problem, processors: int) -> int:
    """Into how many parts the backward divides a group of query heads, each a work item, so that
    few key/value heads occupy all processors.
    """
    if problem.group_size == 1:
        return 1
    config = hopper_backward_config(max(hopper_backward_widths(problem)))
    left, right = problem.window
    even = left is None and right is None and not problem.packed and not problem.has_mask
    tiles_m = -(-problem.seqlen_q // config.tile_m)
    if left is not None and right is not None:  # at most so many query tiles see a tile of keys
        tiles_m = min(tiles_m, (left + right + config.tile_n) // config.tile_m + 1)
    tiles_n = -(-problem.seqlen_k // config.tile_n) * problem.batch * problem.num_kv_heads
    return _divide(problem.group_size, tiles_m, tiles_n, even, processors)


@lru_cache(maxsize=1024)
def _divide(group: int, steps: int, items: int, even: bool, processors: int) -> int:
    """The first divisor of `group` that takes at most 2 % longer than the best: fewer parts need
    less memory. `items` of group * steps steps each, if even: all programs compute equally many.
    Otherwise `steps` is the most of an item, half of it the mean; items are drawn one by one, and
    the last ones end half of a longest item apart.
    """

    def time(parts: int) -> float:
        longest = group // parts * steps
        beside = STEPS_OF_ITEM + (STEPS_OF_SHARE if parts > 1 else 0)
        if even:
            return -(-items * parts // processors) * (longest + beside)
        mean = longest / 2 + beside
        return max(longest, items * parts * mean / processors + longest / 2)

    divisors = [d for d in range(1, group + 1) if group % d == 0]
    best = min(map(time, divisors))
    return next(d for d in divisors if time(d) <= 1.02 * best)


def _heads_per_tile(problem: Problem, config: HopperConfig, is_cut: bool) -> int:
    """How many heads share a tile, and with it the keys they read: all heads of a group, over pages
    and where one tile holds all their queries.
    """
    group = problem.group_size
    if problem.has_mask or 64 % group:
        return 1
    dim = max(hopper_forward_widths(problem))
    varied = is_cut and dim in HOPPER_FORWARD_SHORT  # one variant less to compile
    few = problem.seqlen_q * group <= 64 * config.consumers and not varied
    return group if few or problem.page_size else 1


def _l2_group(problem: Problem, num_head_tiles: int, group: int) -> int:
    """Heads computed together: see l2_group_size."""
    per_head = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    return l2_group_size(num_head_tiles, per_head * group // problem.group_size, L2_FORWARD)


def l2_group_size(num_head_tiles: int, head_bytes: int, l2_bytes: int) -> int:
    """The number of heads computed together, so that what they stream stays in the L2: a divisor of
    num_head_tiles.
    """
    return _divisor(num_head_tiles, max(1, l2_bytes // max(1, head_bytes)))


@lru_cache(maxsize=1024)
def _divisor(n: int, limit: int) -> int:
    """The largest divisor of n that is at most limit."""
    return next(d for d in range(min(n, limit), 0, -1) if n % d == 0)
