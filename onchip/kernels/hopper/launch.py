"""From a call's tensors to a launch of the Hopper kernels: descriptors, grid, tile table."""

import math
from functools import cache

import torch
from torch import Tensor

from onchip.kernels.configs import HopperConfig, hopper_forward_config
from onchip.kernels.handles import Handle
from onchip.kernels.hopper.forward import forward_kernel
from onchip.kernels.hopper.tensors import (
    counter,
    descriptor,
    mask_arguments,
    num_sms,
    padded,
    scales,
    section_of,
)
from onchip.kernels.protocol import Result, empty_result
from onchip.problem import Problem, Tensors

_forward_kernel = Handle(forward_kernel)


def forward(problem: Problem, x: Tensors) -> Result:
    out, lse = empty_result(problem, x)
    if not out.numel():
        return Result(out, lse)
    if not x.k.numel():
        return _without_keys(out, lse, x.sinks)
    left, right = problem.window_size
    right = 0 if problem.causal else right
    width, width_v = padded(problem.head_dim), padded(problem.head_dim_v)
    config = _config(problem, width, width_v, right is not None)
    tiles_m = -(-problem.seqlen_q // (64 * config.consumers))
    heads = problem.batch * problem.num_heads
    num_tiles = tiles_m * heads
    uneven = right is not None or left is not None or problem.packed or problem.has_mask
    dynamic = uneven or config.dynamic
    scale, inner = scales(problem)
    anything = lse  # stands for pointers that the compiled variant does not read
    rows, tiles = (None, None) if x.mask is None else (x.mask.rows, x.mask.tiles)
    lists, list_strides = mask_arguments(rows, tiles, anything)
    wide = out.dtype == torch.float32
    programs = min(num_tiles, num_sms(x.q.device))
    _forward_kernel[(programs,)](
        descriptor(x.q, 64, width),
        descriptor(x.k, config.tile_n, width),
        descriptor(x.v, config.tile_n, width_v),
        out if wide else descriptor(out, 64, width_v),
        lse,
        anything if x.sinks is None else x.sinks,
        anything if x.cu_seqlens_q is None else x.cu_seqlens_q,
        anything if x.cu_seqlens_k is None else x.cu_seqlens_k,
        counter(lse) if dynamic and num_tiles > programs else lse.view(torch.int32),
        *lists,
        problem.seqlen_q,
        problem.seqlen_k,
        x.q.shape[0],
        x.k.shape[0],
        problem.num_heads,
        problem.group_size,
        left or 0,
        right or 0,
        *list_strides,
        problem.head_dim_v,
        tiles_m,
        _section(problem, heads),
        num_tiles,
        scale,
        inner,
        WIDTH=width_v,
        PACKED=problem.packed,
        HAS_LEFT=left is not None,
        HAS_RIGHT=right is not None,
        HAS_MASK=problem.has_mask,
        HAS_SINKS=x.sinks is not None,
        SOFTCAP=problem.softcap != 0,
        WIDE=wide,
        DYNAMIC=dynamic,
        **_constants(config),
    )
    return Result(out, lse)


def _config(problem: Problem, width: int, width_v: int, cut: bool) -> HopperConfig:
    config = hopper_forward_config(max(width, width_v), cut, problem.has_mask, problem.seqlen_k)
    if width != width_v:
        return config._replace(out_in_q=False)  # the tiles differ, and there is room
    return config


def _without_keys(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Result:
    lse.copy_(torch.full_like(lse, -math.inf) if sinks is None else sinks[:, None].expand_as(lse))
    return Result(out.zero_(), lse)


@cache
def _constants(config: HopperConfig) -> dict:
    return {
        "TILE_N": config.tile_n,
        "CONSUMERS": config.consumers,
        "STAGES": config.num_stages,
        "Q_STAGES": config.q_stages,
        "PINGPONG": config.pingpong,
        "OUT_IN_Q": config.out_in_q,
        "RESCALE": config.rescale,
        "POLY": config.poly,
        "UNDER": config.under,
        "CONSUMER_REGS": config.consumer_regs,
        "PRODUCER_REGS": config.producer_regs,
        "num_warps": 4,
        "maxnreg": config.entry_regs,
        "enable_fp_fusion": True,
    }


def _section(problem: Problem, planes: int) -> int:
    per_head = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    return section_of(planes, per_head // problem.group_size)
