"""From a call's tensors to a launch of the kernel for one gradient. `counter` is 0 at the start;
programs draw work indices from it.
"""

from functools import cache
from typing import NamedTuple

import triton
from torch import Tensor

from onchip.core.backend import grad_dtype
from onchip.core.problem import Problem, Tensors
from onchip.kernels.hopper.backward_split import backward_split_kernel
from onchip.kernels.hopper.tensors import (
    BackwardArguments,
    descriptor,
    grad_descriptor,
    num_sms,
    softmax_scales,
    vector_descriptor,
    warp_constants,
)
from onchip.kernels.hopper.tile_plan import L2_BACKWARD, l2_group_size
from onchip.kernels.runtime.launcher import CachedLauncher
from onchip.kernels.tiles import HopperSplitConfig, hopper_split_config, hopper_width

_backward_split_kernel = CachedLauncher(backward_split_kernel)
# With own rows in registers, ptxas of Triton 3.9 makes every product wait for the last (the compile
# tests show it). That of Triton 3.6 does not. Versions in between were not tried.
_CAN_KEEP_OWN_IN_REGISTERS = triton.__version__.startswith("3.6")


def compute_dq(problem: Problem, x: Tensors, dout: Tensor, rows: Tensor, counter: Tensor) -> Tensor:
    config = hopper_split_config(max(problem.head_dim, problem.head_dim_v))
    return _launch(
        problem, x, _SplitOperands(x.q, dout, x.k, x.v, x.q, False, False, config), rows, counter
    )


def compute_dk(problem: Problem, x: Tensors, dout: Tensor, rows: Tensor, counter: Tensor) -> Tensor:
    config = hopper_split_config(max(problem.head_dim, problem.head_dim_v))
    return _launch(
        problem, x, _SplitOperands(x.k, x.v, x.q, dout, x.k, True, False, config), rows, counter
    )


def compute_dv(problem: Problem, x: Tensors, dout: Tensor, rows: Tensor, counter: Tensor) -> Tensor:
    config = hopper_split_config(max(problem.head_dim, problem.head_dim_v))
    # Without a1, shared memory has space for two stages of b1.
    config = config._replace(own_in_registers=False, b1_stages=2)
    return _launch(
        problem, x, _SplitOperands(x.k, x.v, x.q, dout, x.v, True, True, config), rows, counter
    )


class _SplitOperands(NamedTuple):
    """Operands as backward_split.py names them. `of`: the tensor for which the gradient is
    computed.
    """

    a0: Tensor
    a1: Tensor
    b0: Tensor
    b1: Tensor
    of: Tensor
    keys: bool
    values: bool
    config: HopperSplitConfig


def _launch(
    problem: Problem, x: Tensors, side: _SplitOperands, rows: Tensor, counter: Tensor
) -> Tensor:
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
    scale, inner = softmax_scales(problem)
    arguments = BackwardArguments.of(problem, x, lists, counter, side.keys)
    _backward_split_kernel[(min(num_tiles, num_sms(x.q.device)),)](
        descriptor(side.a0, 64, width), descriptor(side.a1, 64, width),
        descriptor(side.b0, tile, width), descriptor(side.b1, tile, width),
        vector_descriptor(rows, (2 * tile,)), rows,
        grad_descriptor(out, width), *arguments.positional,
        tiles_m,
        l2_group_size(heads, other * _bytes_per_row(problem, width, side.keys), L2_BACKWARD),
        num_tiles, problem.batch, scale, inner, 1.0 if side.values else problem.softmax_scale,
        WIDTH=width, KEYS=side.keys, VALUES=side.values,
        **arguments.constants, **_constants(side.config),
    )  # fmt: skip
    return out


def _bytes_per_row(problem: Problem, width: int, keys: bool) -> int:
    """Bytes that stream for one row of an own head."""
    group = problem.group_size
    both = 2 * width * problem.dtype.itemsize
    return both * group if keys else max(1, both // group)


@cache
def _constants(config: HopperSplitConfig) -> dict:
    return {
        "TILE": config.tile,
        "B0_STAGES": config.b0_stages,
        "B1_STAGES": config.b1_stages,
        "OWN_IN_REGISTERS": config.own_in_registers and _CAN_KEEP_OWN_IN_REGISTERS,
        **warp_constants(config),
    }
