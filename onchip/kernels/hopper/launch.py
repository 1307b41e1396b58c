"""From a call's tensors to a launch of the Hopper kernels: descriptors, grid, tile table."""

import math
from functools import cache, lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from onchip.kernels.configs import HopperConfig, hopper_forward_config
from onchip.kernels.hopper.forward import forward_kernel
from onchip.kernels.protocol import Result, empty_result
from onchip.problem import Problem, Tensors

_GL_DTYPE = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_FAR = 1 << 30  # as in schedule.Shape.coord


def forward(problem: Problem, x: Tensors) -> Result:
    out, lse = empty_result(problem, x)
    if not out.numel():
        return Result(out, lse)
    if not x.k.numel():
        return _without_keys(out, lse, x.sinks)
    left, right = problem.window_size
    right = 0 if problem.causal else right
    width = max(problem.head_dim, problem.head_dim_v)
    config = hopper_forward_config(width, right is not None, problem.seqlen_k)
    width, width_v = _padded(problem.head_dim), _padded(problem.head_dim_v)
    if width != width_v:
        config = config._replace(out_in_q=False)  # the tiles differ, and there is room
    tiles_m = -(-problem.seqlen_q // (64 * config.consumers))
    planes = problem.batch * problem.num_heads
    num_tiles = tiles_m * planes
    dynamic = right is not None or left is not None or problem.packed
    scale, inner = _scales(problem)
    anything = lse  # stands for pointers that the compiled variant does not read
    forward_kernel[(min(num_tiles, _num_sms(x.q.device)),)](
        _descriptor(x.q, 64, width),
        _descriptor(x.k, config.tile_n, width),
        _descriptor(x.v, config.tile_n, width_v),
        _descriptor(out, 64, width_v),
        lse,
        anything if x.sinks is None else x.sinks,
        anything if x.cu_seqlens_q is None else x.cu_seqlens_q,
        anything if x.cu_seqlens_k is None else x.cu_seqlens_k,
        torch.zeros(1, dtype=torch.int32, device=lse.device) if dynamic else lse,
        problem.seqlen_q,
        problem.seqlen_k,
        x.q.shape[0],
        x.k.shape[0],
        problem.num_heads,
        problem.group_size,
        left or 0,
        right or 0,
        tiles_m,
        _section(problem, planes),
        num_tiles,
        scale,
        inner,
        HEAD_DIM_V=width_v,
        PACKED=problem.packed,
        HAS_LEFT=left is not None,
        HAS_RIGHT=right is not None,
        HAS_SINKS=x.sinks is not None,
        SOFTCAP=problem.softcap != 0,
        DYNAMIC=dynamic,
        **_constants(config),
    )
    return Result(out, lse)


def _without_keys(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Result:
    lse.copy_(torch.full_like(lse, -math.inf) if sinks is None else sinks[:, None].expand_as(lse))
    return Result(out.zero_(), lse)


@cache
def _constants(config: HopperConfig) -> dict:
    return {
        "TILE_N": config.tile_n,
        "CONSUMERS": config.consumers,
        "STAGES": config.num_stages,
        "PINGPONG": config.pingpong,
        "OUT_IN_Q": config.out_in_q,
        "CONSUMER_REGS": config.consumer_regs,
        "PRODUCER_REGS": config.producer_regs,
        "num_warps": 4,
        "maxnreg": config.entry_regs,
    }


def _scales(problem: Problem) -> tuple[float, float]:
    """(what turns the kernel's scores into base-2 logits, what goes into its tanh); see
    forward.Scale.
    """
    log2e = math.log2(math.e)
    if not problem.softcap:
        return problem.softmax_scale * log2e, 0.0
    return problem.softcap * log2e, 2.0 * log2e * problem.softmax_scale / problem.softcap


def _padded(head_dim: int) -> int:
    return max(64, 1 << (head_dim - 1).bit_length())


@cache
def _layout(dtype: torch.dtype, block: tuple[int, ...]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _GL_DTYPE[dtype])


def _descriptor(t: Tensor, rows: int, width: int) -> TensorDescriptor:
    """t as (batch, heads, seqlen, dim). A packed t is ragged: two leading dimensions whose strides
    cancel modulo 2^64 let the hardware bound a sequence at its own end (coordinates:
    schedule.Shape.coord).
    """
    if t.dim() == 4:
        b, s, h, d = t.shape
        sb, ss, sh, _ = t.stride()
        shape, strides = [b, h, s, d], [sb, sh, ss, 1]
    else:
        _, h, d = t.shape
        ss, sh, _ = t.stride()
        most = 0x7FFF0000
        shape, strides = [most, most, h, _FAR, d], [2**34 - ss, ss, sh, ss, 1]
    block = [1] * (len(shape) - 2) + [rows, width]
    return TensorDescriptor(t, shape, strides, block, _layout(t.dtype, tuple(block)))


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _section(problem: Problem, planes: int) -> int:
    """How many heads are worked on together, so that 32 MB of K and V stay in the L2."""
    per_head = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    return _divisor(planes, max(1, (32 << 20) * problem.group_size // max(1, per_head)))


@lru_cache(maxsize=1024)
def _divisor(n: int, limit: int) -> int:
    """The largest divisor of n that is at most limit."""
    return next(d for d in range(min(n, limit), 0, -1) if n % d == 0)
