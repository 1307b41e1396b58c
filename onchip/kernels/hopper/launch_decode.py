"""From a call's tensors to the launch of the Hopper decode kernel."""

import secrets
from functools import cache

import torch
from torch import Tensor

from onchip.core.backend import Result, empty_result, scale_strides
from onchip.core.problem import Problem, Tensors
from onchip.kernels.hopper.decode import ALIGN, TILE_N, decode_kernel
from onchip.kernels.hopper.tensors import (
    descriptor,
    fill_without_keys,
    num_sms,
    softmax_scales,
    with_contiguous_rows,
)
from onchip.kernels.runtime.launcher import CachedLauncher
from onchip.kernels.tiles import (
    HOPPER_DECODE_KEYS,
    HOPPER_DECODE_KV8_REGISTERS,
    HOPPER_DECODE_KV8_STAGES,
    HOPPER_DECODE_STAGES,
    HOPPER_DECODE_STAGES_DENSE,
    batch_bucket,
    hopper_decode_programs,
    hopper_width,
)

_decode_kernel = CachedLauncher(decode_kernel)
# A flag has this value where a partial state is complete. Uninitialised memory does not contain it:
# flags are left cleared, and the value is random. It has more than 32 bits; otherwise Triton would
# give the argument another type.
_NONCE = 1 << 62 | secrets.randbits(62)


def decode(problem: Problem, x: Tensors) -> Result:
    out, lse = empty_result(problem, x)
    if not out.numel():
        return Result(out, lse)
    if not x.k.numel():
        return fill_without_keys(out, lse, x.sinks)
    width = hopper_width(problem.head_dim)
    left, right = problem.window
    right = None if problem.seqlen_q == 1 else right  # a single query sees all keys
    is_first = problem.sm_partition is not None and not problem.sm_partition.second
    all_programs = hopper_decode_programs(problem) * num_sms(out.device)
    programs = problem.sm_partition.programs if is_first else all_programs
    most = max(1, programs // problem.num_kv_heads)
    num_slots = (most + problem.batch) * problem.num_kv_heads
    unused_ptr = lse  # for pointers that the compiled variant does not read
    part = min(TILE_N.value, problem.page_size or TILE_N.value)
    scale, inner = softmax_scales(problem)
    _decode_kernel[(most * problem.num_kv_heads,)](
        x.q, descriptor(x.k, part, width), descriptor(x.v, part, width),
        unused_ptr if x.page_table is None else with_contiguous_rows(x.page_table),
        unused_ptr if x.cache_seqlens is None else x.cache_seqlens.contiguous(),
        unused_ptr if x.sinks is None else x.sinks,
        unused_ptr if x.k_scales is None else x.k_scales,
        unused_ptr if x.v_scales is None else x.v_scales,
        out, lse, _scratch(problem, num_slots, width, lse),
        *(stride // ALIGN.value for stride in x.q.stride()[:3]),
        0 if x.page_table is None else x.page_table.stride(0),
        *scale_strides(x.k_scales), *scale_strides(x.v_scales),
        problem.seqlen_q, problem.seqlen_k, problem.batch, x.k.shape[0],
        problem.num_heads, problem.head_dim // ALIGN.value, left or 0, right or 0,
        most, HOPPER_DECODE_KEYS // TILE_N.value, num_slots, _NONCE, scale, inner,
        GROUP=problem.group_size, PAGE_SIZE=problem.page_size,
        HAS_LEFT=left is not None, HAS_RIGHT=right is not None, HAS_SINKS=x.sinks is not None,
        FIRST=is_first, SOFTCAP=problem.softcap != 0,
        BATCH=batch_bucket(problem.batch if problem.page_size else 1),
        MOST=max(128, 1 << (most - 1).bit_length()),
        **_constants(width, x.page_table is not None, problem.page_dtype is not None),
    )  # fmt: skip
    return Result(out, lse)


def _scratch(problem: Problem, num_slots: int, width: int, like: Tensor) -> Tensor:
    """For every slot: a fp32 state of each row, a flag of 8 bytes, an lse of each row."""
    rows = problem.seqlen_q * problem.group_size
    return like.new_empty(num_slots + num_slots * rows * (width + 1) // 2 + 1, dtype=torch.int64)


@cache
def _constants(width: int, is_paged: bool, is_8bit: bool) -> dict:
    stages = (HOPPER_DECODE_STAGES if is_paged else HOPPER_DECODE_STAGES_DENSE)[width]
    constants = {
        "D": width,
        "STAGES": HOPPER_DECODE_KV8_STAGES if is_8bit else stages,
        "PRODUCER_REGS": 40,
        "num_warps": 4,
        "launch_pdl": True,
        "enable_fp_fusion": True,
    }
    return constants | ({"maxnreg": HOPPER_DECODE_KV8_REGISTERS} if is_8bit else {})
