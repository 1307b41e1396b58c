"""From a call's tensors to a launch of the kernel that computes one gradient. Programs draw tickets
from `counter`, which is 0.
"""

from functools import cache
from typing import NamedTuple

import triton
from torch import Tensor

from onchip.kernels.configs import (
    HopperGradientConfig,
    hopper_gradient_config,
    hopper_width,
)
from onchip.kernels.handles import CachedLauncher
from onchip.kernels.hopper.gradient import gradient_kernel
from onchip.kernels.hopper.tensors import (
    L2_BACKWARD,
    Frame,
    descriptor,
    gradient_tiles,
    num_sms,
    numbers,
    scales,
    section_of,
    team,
)
from onchip.kernels.protocol import grad_dtype
from onchip.problem import Problem, Tensors

_gradient_kernel = CachedLauncher(gradient_kernel)
# With the own rows in registers ptxas of Triton 3.9 makes every product wait for the last: the
# compile tests see it. That of 3.6 does not; those in between are not known.
_CAN_HOLD = triton.__version__.startswith("3.6")


def query_gradient(
    problem: Problem, x: Tensors, dout: Tensor, rows: Tensor, counter: Tensor
) -> Tensor:
    """dq."""
    config = hopper_gradient_config(max(problem.head_dim, problem.head_dim_v))
    return _launch(problem, x, _Side(x.q, dout, x.k, x.v, x.q, False, False, config), rows, counter)


def key_gradient(
    problem: Problem, x: Tensors, dout: Tensor, rows: Tensor, counter: Tensor
) -> Tensor:
    """dk."""
    config = hopper_gradient_config(max(problem.head_dim, problem.head_dim_v))
    return _launch(problem, x, _Side(x.k, x.v, x.q, dout, x.k, True, False, config), rows, counter)


def value_gradient(
    problem: Problem, x: Tensors, dout: Tensor, rows: Tensor, counter: Tensor
) -> Tensor:
    """dv."""
    config = hopper_gradient_config(max(problem.head_dim, problem.head_dim_v))
    config = config._replace(held=False, b1_stages=2)  # a1 is not there, and leaves room
    return _launch(problem, x, _Side(x.k, x.v, x.q, dout, x.v, True, True, config), rows, counter)


class _Side(NamedTuple):
    """Operands as gradient.py names them, and the tensor whose gradient it is."""

    a0: Tensor
    a1: Tensor
    b0: Tensor
    b1: Tensor
    of: Tensor
    keys: bool
    values: bool
    config: HopperGradientConfig


def _launch(problem: Problem, x: Tensors, side: _Side, rows: Tensor, counter: Tensor) -> Tensor:
    out = side.of.new_empty(side.of.shape, dtype=grad_dtype(problem))
    width = hopper_width(max(problem.head_dim, problem.head_dim_v))
    tile = side.config.tile
    own, other, num_heads = problem.seqlen_q, problem.seqlen_k, problem.num_heads
    lists = None if x.mask is None else x.mask.rows
    if side.keys:
        own, other, num_heads = other, own, problem.num_kv_heads
        lists = None if x.mask is None else x.mask.cols
    tiles_m, heads = -(-own // 128), problem.batch * num_heads
    num_tiles = tiles_m * heads
    scale, inner = scales(problem)
    frame = Frame.of(problem, x, lists, counter, side.keys)
    _gradient_kernel[(min(num_tiles, num_sms(x.q.device)),)](
        descriptor(side.a0, 64, width),
        descriptor(side.a1, 64, width),
        descriptor(side.b0, tile, width),
        descriptor(side.b1, tile, width),
        numbers(rows, (2 * tile,)),
        rows,
        gradient_tiles(out, width),
        *frame.arguments,
        tiles_m,
        section_of(heads, other * _bytes_per_row(problem, width, side.keys), L2_BACKWARD),
        num_tiles,
        problem.batch,
        scale,
        inner,
        1.0 if side.values else problem.softmax_scale,
        WIDTH=width,
        KEYS=side.keys,
        VALUES=side.values,
        **frame.constants,
        **_constants(side.config),
    )
    return out


def _bytes_per_row(problem: Problem, width: int, keys: bool) -> int:
    """Of what streams by, for one own head."""
    group = problem.group_size
    both = 2 * width * problem.dtype.itemsize
    return both * group if keys else max(1, both // group)


@cache
def _constants(config: HopperGradientConfig) -> dict:
    return {
        "TILE": config.tile,
        "B0_STAGES": config.b0_stages,
        "B1_STAGES": config.b1_stages,
        "HELD": config.held and _CAN_HOLD,
        **team(config),
    }
