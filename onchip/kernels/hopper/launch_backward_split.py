"""From a call's tensors to a launch of the kernel for one gradient. `counter` is 0 at the start;
programs draw work indices from it.
"""

from functools import cache
from typing import NamedTuple

from torch import Tensor

from onchip.core.backend import grad_dtype
from onchip.core.problem import Problem, Tensors
from onchip.kernels.hopper.backward_split import backward_split_kernel
from onchip.kernels.hopper.tensors import (
    CAN_KEEP_IN_REGISTERS,
    BackwardArguments,
    Descriptor,
    descriptor,
    grad_descriptor,
    num_sms,
    softmax_scales,
    vector_descriptor,
    warp_constants,
)
from onchip.kernels.hopper.tile_plan import L2_BACKWARD, l2_group_size
from onchip.kernels.runtime.launcher import CachedLauncher
from onchip.kernels.tiles import (
    HopperSplitConfig,
    hopper_backward_widths,
    hopper_split_config,
    split_columns,
)

_backward_split_kernel = CachedLauncher(backward_split_kernel)


def compute_dq(problem: Problem, x: Tensors, dout: Tensor, rows: Tensor, counter: Tensor) -> Tensor:
    config = hopper_split_config(max(hopper_backward_widths(problem)))
    return _launch(
        problem, x, _SplitOperands(x.q, dout, x.k, x.v, x.q, False, False, config), rows, counter
    )


def compute_dk(problem: Problem, x: Tensors, dout: Tensor, rows: Tensor, counter: Tensor) -> Tensor:
    config = hopper_split_config(max(hopper_backward_widths(problem)))
    return _launch(
        problem, x, _SplitOperands(x.k, x.v, x.q, dout, x.k, True, False, config), rows, counter
    )


def compute_dv(problem: Problem, x: Tensors, dout: Tensor, rows: Tensor, counter: Tensor) -> Tensor:
    config = hopper_split_config(max(hopper_backward_widths(problem)))
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
    width, width_v = hopper_backward_widths(problem)
    columns = split_columns(width), split_columns(width_v)
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
        *_operands(side, columns[0][0], columns[1][0]), vector_descriptor(rows, (2 * tile,)), rows,
        grad_descriptor(out, columns[side.values][0]),
        *_operands(side, columns[0][1], columns[1][1]),
        grad_descriptor(out, columns[side.values][1]) if columns[side.values][1] else None,
        *arguments.positional, tiles_m,
        l2_group_size(
            heads, other * _bytes_per_row(problem, width + width_v, side.keys), L2_BACKWARD
        ),
        num_tiles, problem.batch, scale, inner, 1.0 if side.values else problem.softmax_scale,
        WIDTH=columns[side.values][0], KEYS=side.keys, VALUES=side.values,
        **arguments.constants, **_constants(side.config),
    )  # fmt: skip
    return out


def _operands(side: _SplitOperands, width: int, width_v: int) -> tuple[Descriptor | None, ...]:
    """a0, a1, b0 and b1, or their tails: None without columns."""
    tile = side.config.tile
    operands = (side.a0, 64, width), (side.a1, 64, width_v), (side.b0, tile, width), (
        side.b1, tile, width_v,
    )  # fmt: skip
    return tuple(descriptor(t, rows, n) if n else None for t, rows, n in operands)


def _bytes_per_row(problem: Problem, columns: int, keys: bool) -> int:
    """Bytes that stream for one row of an own head; columns: of q and dout, or of k and v."""
    group = problem.group_size
    both = columns * problem.dtype.itemsize
    return both * group if keys else max(1, both // group)


@cache
def _constants(config: HopperSplitConfig) -> dict:
    return {
        "TILE": config.tile,
        "B0_STAGES": config.b0_stages,
        "B1_STAGES": config.b1_stages,
        "OWN_IN_REGISTERS": config.own_in_registers and CAN_KEEP_IN_REGISTERS,
        **warp_constants(config),
    }
