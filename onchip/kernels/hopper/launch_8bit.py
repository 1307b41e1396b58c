"""From a call to the launches of the 8-bit forward: quantisation, then attention."""

from typing import Any

import torch
from torch import Tensor

from onchip.core.backend import Result, empty_result
from onchip.core.problem import Problem, Tensors
from onchip.kernels.hopper.forward_8bit import forward_8bit_kernel
from onchip.kernels.hopper.tensors import (
    descriptor,
    fill_without_keys,
    matrix_descriptor,
    num_sms,
    softmax_scales,
    tile_constants,
)
from onchip.kernels.hopper.tile_plan import L2_FORWARD, l2_group_size
from onchip.kernels.runtime.counters import counter
from onchip.kernels.runtime.launcher import CachedLauncher
from onchip.kernels.tiles import hopper_quantised_config, hopper_width

PV_COLUMNS = 128  # columns of PV in one accumulator

_forward_8bit_kernel = CachedLauncher(forward_8bit_kernel)


def forward(problem: Problem, x: Tensors) -> Result:
    out, lse = empty_result(problem, x)
    if not out.numel() or not problem.batch:
        return Result(out, lse)
    if not x.k.numel() or not problem.seqlen_k:
        return fill_without_keys(out, lse, x.sinks)
    launch_attention(problem, x, prepare(problem, x, lse), out, lse)
    return Result(out, lse)


def prepare(problem: Problem, x: Tensors, shift: Tensor) -> Any:
    """Quantised operands, and what quantisation subtracted from the lse: by the portable
    kernels.
    """
    from onchip.kernels.triton import quantise

    return quantise.prepare(problem, x, shift)


def launch_attention(problem: Problem, x: Tensors, operands: Any, out: Tensor, lse: Tensor) -> None:
    """Fill out and lse. lse already has what quantisation subtracted."""
    q, k, v, pairs = operands
    left, right = problem.window
    width, width_v = hopper_width(problem.head_dim), hopper_width(problem.head_dim_v)
    part = min(width_v, PV_COLUMNS)
    config = hopper_quantised_config(problem.precision, max(width, width_v))
    num_head_tiles = problem.batch * problem.num_heads
    tiles_m = -(-problem.seqlen_q // (64 * config.consumers))
    num_tiles = tiles_m * num_head_tiles
    programs = min(num_tiles, num_sms(x.q.device))
    paged = problem.page_size > 0
    uneven = left is not None or right is not None or problem.packed or paged
    dynamic = (uneven or config.dynamic) and num_tiles > programs
    staged = problem.out_dtype.itemsize == 2
    _forward_8bit_kernel[(programs,)](
        matrix_descriptor(q.values, 64, width),
        matrix_descriptor(k.values, config.tile_n, width),
        descriptor(x.v, config.tile_n, width_v) if v is None
        else matrix_descriptor(v.values, width_v, config.tile_n),
        descriptor(out, 64, part) if staged else out, lse,
        lse if x.sinks is None else x.sinks, q.scales, pairs, k.scales,
        lse if x.cu_seqlens_q is None else x.cu_seqlens_q,
        lse if x.cu_seqlens_k is None else x.cu_seqlens_k,
        lse if x.cache_seqlens is None else x.cache_seqlens.contiguous(),
        counter(lse.device) if dynamic else lse.view(torch.int32),
        problem.seqlen_q, problem.seqlen_k, x.q.shape[0], x.k.shape[0],
        problem.num_heads, problem.group_size, left or 0, right or 0,
        problem.head_dim_v, problem.seqlen_q, tiles_m, _l2_group(problem, num_head_tiles),
        num_tiles, q.count, k.count, problem.batch, softmax_scales(problem)[0],
        WIDTH=part, PACKED=problem.packed, PAGED=paged, HAS_LEFT=left is not None,
        HAS_RIGHT=right is not None, HAS_SINKS=x.sinks is not None, STAGED=staged,
        PINGPONG=config.pingpong, DYNAMIC=uneven or config.dynamic, **tile_constants(config),
    )  # fmt: skip


def _l2_group(problem: Problem, num_head_tiles: int) -> int:
    """Heads computed together: see l2_group_size."""
    per_head = problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    return l2_group_size(num_head_tiles, per_head // problem.group_size, L2_FORWARD)
