"""From a call's tensors to a launch of the Hopper kernels: descriptors, grid, tile table."""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.kernels.configs import (
    HOPPER_FORWARD_SHORT,
    HOPPER_FORWARD_SPARSE,
    HOPPER_STRIPS,
    HopperConfig,
    hopper_forward_of,
    hopper_stages_out,
    hopper_width,
)
from onchip.kernels.counters import counter
from onchip.kernels.handles import CachedLauncher
from onchip.kernels.hopper.forward import forward_kernel
from onchip.kernels.hopper.tensors import (
    L2_FORWARD,
    Descriptor,
    descriptor,
    grouped,
    mask_arguments,
    num_sms,
    paged,
    plane_strides,
    scales,
    section_of,
    span,
    tile_constants,
    with_rows,
    without_keys,
)
from onchip.kernels.protocol import Result, empty_result
from onchip.masks.blockmask import BlockMask
from onchip.masks.strips import Strips, strips_of
from onchip.problem import Problem, Tensors

_forward_kernel = CachedLauncher(forward_kernel)


def forward(problem: Problem, x: Tensors) -> Result:
    out, lse = empty_result(problem, x)
    if not out.numel() or not problem.batch:
        return Result(out, lse)
    if not x.k.numel() or (problem.page_size and not problem.seqlen_k):
        return without_keys(out, lse, x.sinks)
    _launch(problem, x, out, lse, problem.seqlen_q)
    return Result(out, lse)


def forward_into(problem: Problem, x: Tensors, out: Tensor, lse: Tensor) -> None:
    """Merge the result into a state that the same queries have over other keys: fp32 (batch,
    seqlen, heads, head_dim_v) and fp64 (batch, heads, seqlen), both some tokens of a whole state.
    """
    if out.numel() and x.k.numel():
        _launch(problem, x, out, lse, room=lse.stride(1))


def _launch(problem: Problem, x: Tensors, out: Tensor, lse: Tensor, room: int) -> None:
    config, strips = _walk(problem, x.mask)
    cut = _cut(problem, config)
    staged, second = hopper_stages_out(problem), is_second(problem)
    programs = cut.num_tiles if second else min(cut.num_tiles, num_sms(x.q.device))
    unused_ptr = lse  # stands for pointers that the compiled variant does not read
    lists, list_strides = _mask_arguments(x.mask, strips, unused_ptr)
    _forward_kernel[(programs,)](
        *_descriptors(problem, x, cut),
        grouped(out, 64, cut.group, hopper_width(problem.head_dim_v)) if staged else out,
        lse,
        unused_ptr if x.sinks is None else x.sinks,
        unused_ptr if x.cu_seqlens_q is None else x.cu_seqlens_q,
        unused_ptr if x.cu_seqlens_k is None else x.cu_seqlens_k,
        counter(lse.device) if cut.dynamic and cut.num_tiles > programs else lse.view(torch.int32),
        *lists,
        problem.seqlen_q,
        problem.seqlen_k,
        x.q.shape[0],
        x.k.shape[0],
        problem.num_heads,
        problem.group_size,
        cut.left or 0,
        cut.right or 0,
        *list_strides,
        problem.head_dim_v,
        room,
        cut.tiles_m,
        cut.section,
        cut.num_tiles,
        *scales(problem),
        *_page_arguments(x, unused_ptr),
        problem.batch,
        **_variant(problem, cut),
        HAS_SINKS=x.sinks is not None,
        STAGED=staged,
        MERGE=lse.dtype == torch.float64,
        SECOND=second,
        **_constants(cut.config, second or out.dtype != torch.float32),
    )


def _walk(problem: Problem, mask: BlockMask | None) -> tuple[HopperConfig, Strips | None]:
    """How a call is computed, and the strips of its mask if three consumers walk them."""
    config = hopper_forward_of(problem)
    if mask is None or config.consumers == 2:
        return config, None
    strips = strips_of(mask)
    if strips.shared < HOPPER_STRIPS:
        return HOPPER_FORWARD_SPARSE[hopper_width(problem.head_dim)], None
    return config, strips


def _mask_arguments(mask: BlockMask | None, strips: Strips | None, unused_ptr: Tensor) -> tuple:
    """(pointers, strides) of a mask: its lists of block rows, or those of its strips."""
    if mask is None or strips is None:
        rows, tiles = (None, None) if mask is None else (mask.rows, mask.tiles)
        lists, strides = mask_arguments(rows, tiles, unused_ptr)
        return (*lists, unused_ptr, unused_ptr), strides
    pointers = (*[unused_ptr] * 5, mask.tiles, strips.heads, strips.entries)
    return pointers, plane_strides(strips.heads)


def is_second(problem: Problem) -> bool:
    """Whether the call runs beside its predecessor (problem.Beside), with a program for every tile:
    the predecessor may still use the counter from which they would be drawn otherwise.
    """
    beside = problem.beside
    if beside is None or not beside.second:
        return False
    return _cut(problem, hopper_forward_of(problem)).num_tiles <= beside.programs


class _Cut(NamedTuple):
    """How a call is cut into tiles: `group` heads share each, and programs get them one by one if
    `dynamic`. left and right: how far queries see, causal ones 0 to the right.
    """

    config: HopperConfig
    left: int | None
    right: int | None
    group: int
    tiles_m: int
    section: int
    num_tiles: int
    dynamic: bool


def _cut(problem: Problem, config: HopperConfig) -> _Cut:
    left, right = problem.reach
    group = _rows_of_a_query(problem, config, right is not None)
    tiles_m = -(-problem.seqlen_q * group // (64 * config.consumers))
    planes = problem.batch * problem.num_heads // group
    uneven = right is not None or left is not None or problem.packed or problem.has_mask
    dynamic = uneven or config.dynamic or problem.page_size > 0
    section = _section(problem, planes, group)
    return _Cut(config, left, right, group, tiles_m, section, tiles_m * planes, dynamic)


def _descriptors(problem: Problem, x: Tensors, cut: _Cut) -> tuple:
    """q, k and v as the kernel takes them."""
    width, width_v, tile_n = (
        hopper_width(problem.head_dim),
        hopper_width(problem.head_dim_v),
        cut.config.tile_n,
    )
    return (
        grouped(x.q, 64, cut.group, width),
        _keys(problem, x.k, tile_n, width),
        _keys(problem, x.v, tile_n, width_v),
    )


def _variant(problem: Problem, cut: _Cut) -> dict:
    """What the kernel is compiled for, beside its row of the tile table."""
    return {
        "WIDTH": hopper_width(problem.head_dim_v),
        "PACKED": problem.packed,
        "HAS_LEFT": cut.left is not None,
        "HAS_RIGHT": cut.right is not None,
        "HAS_MASK": problem.has_mask,
        "SOFTCAP": problem.softcap != 0,
        "DYNAMIC": cut.dynamic,
        "PAGE_SIZE": problem.page_size,
        "GROUP": cut.group,
    }


def _rows_of_a_query(problem: Problem, config: HopperConfig, cut: bool) -> int:
    """How many heads share a tile, and with it the keys they read: all of a group, over pages and
    where a tile has room for all of its queries.
    """
    group = problem.group_size
    if problem.has_mask or 64 % group:
        return 1
    dim = max(hopper_width(problem.head_dim), hopper_width(problem.head_dim_v))
    varied = cut and dim in HOPPER_FORWARD_SHORT  # a third variant would be one too many
    few = problem.seqlen_q * group <= 64 * config.consumers and not varied
    return group if few or problem.page_size else 1


def _keys(problem: Problem, t: Tensor, tile_n: int, width: int) -> Descriptor:
    if problem.page_size:
        return paged(t, min(problem.page_size, tile_n), width)
    return descriptor(t, tile_n, width)


def _page_arguments(x: Tensors, unused_ptr: Tensor) -> tuple:
    """The page table as the kernel takes it."""
    table, seqlens = x.page_table, x.cache_seqlens
    if table is None or seqlens is None:
        return unused_ptr, unused_ptr, 0, 0, 0, 0, 0
    table = with_rows(table)
    sizes = table.stride(0), table.shape[1], x.k.shape[0], span(x.k), span(x.v)
    return table, seqlens.contiguous(), *sizes


@cache
def _constants(config: HopperConfig, early: bool) -> dict:
    """early: programs start beside the end of the call before. Not those of a ring's rounds, whose
    results are not rounded: they would wait on processors that a round of another stream could use.
    """
    return tile_constants(config) | {
        "launch_pdl": early,
        "PINGPONG": config.pingpong,
        "OUT_IN_Q": config.out_in_q,
        "RESCALE": config.rescale,
        "POLY": config.poly,
        "UNDER": config.under,
        "HOLD": config.hold,
    }


def _section(problem: Problem, planes: int, group: int) -> int:
    per_head = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    return section_of(planes, per_head * group // problem.group_size, L2_FORWARD)
