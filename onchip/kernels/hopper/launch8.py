"""From a call to launches of the forward with operands of 8 bits: quantisation, then attention."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from onchip.kernels.configs import hopper_quantised_config, hopper_width
from onchip.kernels.counters import counter
from onchip.kernels.handles import CachedLauncher
from onchip.kernels.hopper.forward8 import forward8_kernel
from onchip.kernels.hopper.tensors import (
    L2_FORWARD,
    descriptor,
    matrix,
    num_sms,
    scales,
    section_of,
    tile_constants,
    without_keys,
)
from onchip.kernels.protocol import Result, empty_result
from onchip.problem import Problem, Tensors

PART = 128  # columns of values that are summed at once

_forward8_kernel = CachedLauncher(forward8_kernel)


def forward(problem: Problem, x: Tensors) -> Result:
    out, lse = empty_result(problem, x)
    if not out.numel() or not problem.batch:
        return Result(out, lse)
    if not x.k.numel() or not problem.seqlen_k:
        return without_keys(out, lse, x.sinks)
    attend(problem, x, prepare(problem, x, lse), out, lse)
    return Result(out, lse)


def prepare(problem: Problem, x: Tensors, shift: Tensor) -> Any:
    """Its Operands, and what their lse is short of; by name, as dispatch loads kernels, because
    they are portable kernels in a room of their own.
    """
    return import_module("onchip.kernels.triton.quantise").prepare(problem, x, shift)


def attend(problem: Problem, x: Tensors, operands: Any, out: Tensor, lse: Tensor) -> None:
    """Fill out and lse, where what `operands` are short of lies already."""
    q, k, v, pairs = operands
    left, right = problem.reach
    width, width_v = hopper_width(problem.head_dim), hopper_width(problem.head_dim_v)
    part = min(width_v, PART)
    config = hopper_quantised_config(problem.precision, max(width, width_v))
    planes = problem.batch * problem.num_heads
    tiles_m = -(-problem.seqlen_q // (64 * config.consumers))
    num_tiles = tiles_m * planes
    programs = min(num_tiles, num_sms(x.q.device))
    uneven = left is not None or right is not None or problem.packed
    dynamic = (uneven or config.dynamic) and num_tiles > programs
    staged = problem.out_dtype.itemsize == 2
    _forward8_kernel[(programs,)](
        matrix(q.values, 64, width),
        matrix(k.values, config.tile_n, width),
        descriptor(x.v, config.tile_n, width_v)
        if v is None
        else matrix(v.values, width_v, config.tile_n),
        descriptor(out, 64, part) if staged else out,
        lse,
        lse if x.sinks is None else x.sinks,
        q.scales,
        pairs,
        k.scales,
        lse if x.cu_seqlens_q is None else x.cu_seqlens_q,
        lse if x.cu_seqlens_k is None else x.cu_seqlens_k,
        counter(lse.device) if dynamic else lse.view(torch.int32),
        problem.seqlen_q,
        problem.seqlen_k,
        x.q.shape[0],
        x.k.shape[0],
        problem.num_heads,
        problem.group_size,
        left or 0,
        right or 0,
        problem.head_dim_v,
        problem.seqlen_q,
        tiles_m,
        _section(problem, planes),
        num_tiles,
        q.count,
        k.count,
        problem.batch,
        scales(problem)[0],
        WIDTH=part,
        PACKED=problem.packed,
        HAS_LEFT=left is not None,
        HAS_RIGHT=right is not None,
        HAS_SINKS=x.sinks is not None,
        STAGED=staged,
        PINGPONG=config.pingpong,
        DYNAMIC=uneven or config.dynamic,
        **tile_constants(config),
    )


def _section(problem: Problem, planes: int) -> int:
    per_head = problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    return section_of(planes, per_head // problem.group_size, L2_FORWARD)
