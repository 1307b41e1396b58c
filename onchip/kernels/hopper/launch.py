"""From a call's tensors to a launch of the Hopper forward: descriptors, grid, tile table.

Worked shape: batch 1, 8 heads, 300 tokens, head_dim 128, causal: three query tiles of 128 rows for
each head, so num_tiles = 24 and 24 programs. With 4,096 tokens there are 256 tiles for 132 SMs: 132
programs, which draw their next tile from a counter.
"""

from functools import cache

import torch
from torch import Tensor

from onchip.core.backend import Result, empty_result
from onchip.core.problem import Problem, Tensors
from onchip.kernels.hopper.forward import forward_kernel
from onchip.kernels.hopper.tensors import (
    CAN_KEEP_IN_REGISTERS,
    Descriptor,
    batch_head_strides,
    descriptor,
    fill_without_keys,
    gqa_descriptor,
    mask_arguments,
    num_sms,
    page_stride,
    paged_descriptor,
    softmax_scales,
    tile_constants,
    with_contiguous_rows,
)
from onchip.kernels.hopper.tile_plan import TilePlan, plan_tiles
from onchip.kernels.runtime.counters import counter
from onchip.kernels.runtime.launcher import CachedLauncher
from onchip.kernels.strips import MaskStrips, strips_of
from onchip.kernels.tiles import (
    HOPPER_STRIPS,
    HopperConfig,
    hopper_forward_of,
    hopper_forward_sparse,
    hopper_forward_widths,
    hopper_stages_out,
    split_columns,
)
from onchip.masks.blockmask import BlockMask

_forward_kernel = CachedLauncher(forward_kernel)


def forward(problem: Problem, x: Tensors) -> Result:
    out, lse = empty_result(problem, x)
    if not out.numel() or not problem.batch:
        return Result(out, lse)
    if not x.k.numel() or (problem.page_size and not problem.seqlen_k):
        return fill_without_keys(out, lse, x.sinks)
    _launch(problem, x, out, lse, problem.seqlen_q)
    return Result(out, lse)


def forward_into(problem: Problem, x: Tensors, out: Tensor, lse: Tensor) -> None:
    """Merge the result into a state of the same queries over other keys: out in fp32 (batch,
    seqlen, heads, head_dim_v) and lse in fp64 (batch, heads, seqlen), both slices of longer
    tensors.
    """
    if out.numel() and x.k.numel():
        _launch(problem, x, out, lse, rows_per_batch=lse.stride(1))


def _launch(problem: Problem, x: Tensors, out: Tensor, lse: Tensor, rows_per_batch: int) -> None:
    """Launch the kernel. rows_per_batch: rows of out and lse from one batch entry to the next.
    Arguments are in the order and the groups of forward_kernel's signature.
    """
    config, strips = _choose_config(problem, x.mask)
    plan = plan_tiles(problem, config)
    staged, second = hopper_stages_out(problem), is_second(problem)
    programs = plan.num_tiles if second else min(plan.num_tiles, num_sms(x.q.device))
    draws = plan.dynamic and plan.num_tiles > programs
    unused_ptr = lse  # for pointers that the compiled variant does not read
    lists, list_strides = _mask_arguments(x.mask, strips, unused_ptr)
    _forward_kernel[(programs,)](
        *_descriptors(problem, x, out, plan, staged), lse,
        unused_ptr if x.sinks is None else x.sinks,
        unused_ptr if x.cu_seqlens_q is None else x.cu_seqlens_q,
        unused_ptr if x.cu_seqlens_k is None else x.cu_seqlens_k,
        counter(lse.device) if draws else unused_ptr.view(torch.int32), *lists,
        problem.seqlen_q, problem.seqlen_k, x.q.shape[0], x.k.shape[0],
        problem.num_heads, problem.group_size, plan.left or 0, plan.right or 0, *list_strides,
        problem.head_dim_v, rows_per_batch, plan.tiles_m, plan.l2_group, plan.num_tiles,
        *softmax_scales(problem), *_page_arguments(x, unused_ptr), problem.batch,
        **_variant(problem, plan), HAS_SINKS=x.sinks is not None, STAGED=staged,
        MERGE=lse.dtype == torch.float64, SECOND=second,
        **_constants(plan.config, second or out.dtype != torch.float32),
    )  # fmt: skip


def _choose_config(
    problem: Problem, mask: BlockMask | None
) -> tuple[HopperConfig, MaskStrips | None]:
    """The tile config of a call, and the strips of its mask if three consumers use them."""
    config = hopper_forward_of(problem)
    if mask is None or config.consumers == 2:
        return config, None
    strips = strips_of(mask)
    if strips.shared < HOPPER_STRIPS:
        return hopper_forward_sparse(problem), None
    return config, strips


def _mask_arguments(mask: BlockMask | None, strips: MaskStrips | None, unused_ptr: Tensor) -> tuple:
    """(pointers, strides) of a mask: its lists of block rows, or its strips."""
    if mask is None or strips is None:
        rows, tiles = (None, None) if mask is None else (mask.rows, mask.tiles)
        lists, strides = mask_arguments(rows, tiles, unused_ptr)
        return (*lists, unused_ptr, unused_ptr), strides
    pointers = (*[unused_ptr] * 5, mask.tiles, strips.heads, strips.entries)
    return pointers, batch_head_strides(strips.heads)


def is_second(problem: Problem) -> bool:
    """Whether the call shares the SMs with its predecessor (problem.SMPartition), with a program
    for every tile: the predecessor may still use the counter from which tiles would be drawn.
    """
    partition = problem.sm_partition
    if partition is None or not partition.second:
        return False
    return plan_tiles(problem, hopper_forward_of(problem)).num_tiles <= partition.programs


def _descriptors(
    problem: Problem, x: Tensors, out: Tensor, plan: TilePlan, staged: bool
) -> list[Descriptor | Tensor | None]:
    """q, k, v and out, then their tails, each None if its tensor has none. An output that is not
    staged is a pointer.
    """
    widths, widths_v = (split_columns(n) for n in hopper_forward_widths(problem))
    tile_n = plan.config.tile_n
    made: list[Descriptor | Tensor | None] = []
    for width, width_v in zip(widths, widths_v, strict=True):
        made += [
            gqa_descriptor(x.q, 64, plan.group, width) if width else None,
            _keys(problem, x.k, tile_n, width) if width else None,
            _keys(problem, x.v, tile_n, width_v) if width_v else None,
            gqa_descriptor(out, 64, plan.group, width_v) if width_v and staged else None,
        ]
    return made if staged else [*made[:3], out, *made[4:]]


def _variant(problem: Problem, plan: TilePlan) -> dict:
    """The compiled variant, apart from the row of the tile table."""
    return {
        "WIDTH": split_columns(hopper_forward_widths(problem)[1])[0],
        "PACKED": problem.packed,
        "HAS_LEFT": plan.left is not None,
        "HAS_RIGHT": plan.right is not None,
        "HAS_MASK": problem.has_mask,
        "SOFTCAP": problem.softcap != 0,
        "DYNAMIC": plan.dynamic,
        "PAGE_SIZE": problem.page_size,
        "GROUP": plan.group,
    }


def _keys(problem: Problem, t: Tensor, tile_n: int, width: int) -> Descriptor:
    if problem.page_size:
        return paged_descriptor(t, min(problem.page_size, tile_n), width)
    return descriptor(t, tile_n, width)


def _page_arguments(x: Tensors, unused_ptr: Tensor) -> tuple:
    """The page table as the kernel takes it."""
    table, seqlens = x.page_table, x.cache_seqlens
    if table is None or seqlens is None:
        return unused_ptr, unused_ptr, 0, 0, 0, 0, 0
    table = with_contiguous_rows(table)
    sizes = table.stride(0), table.shape[1], x.k.shape[0], page_stride(x.k), page_stride(x.v)
    return table, seqlens.contiguous(), *sizes


@cache
def _constants(config: HopperConfig, early: bool) -> dict:
    """The row of the tile table as constants. early: with PDL (tensors.warp_constants). Not in the
    rounds of ring attention (fp32 output): their programs would occupy SMs that a kernel of another
    stream could use.
    """
    return tile_constants(config) | {
        "launch_pdl": early,
        "PINGPONG": config.pingpong,
        "OUT_IN_Q": config.out_in_q,
        "RESCALE": config.rescale,
        "EMULATED_EXP2": config.emulated_exp2,
        "RESCALE_UNDER_QK": config.rescale_under_qk,
        "DELAY_PV_WAIT": config.delay_pv_wait,
        "OVERLAP": config.overlap,
        "Q_IN_REGISTERS": config.q_in_registers and CAN_KEEP_IN_REGISTERS,
    }
