"""Shared by the launches of the Hopper kernels: TMA descriptors, arguments of the backward, groups
of heads that share the L2.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from onchip.core.backend import Result
from onchip.core.problem import Problem, Tensors
from onchip.kernels.hopper.gluon_types import gl
from onchip.kernels.tiles import HopperBackwardConfig, HopperConfig, HopperSplitConfig
from onchip.masks.blockmask import BlockLists

_GL_DTYPE = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.int8: gl.int8,
}
# Whether left operands of products that stay the same over a loop (own rows of the backward, q of
# the forward) may be kept in registers. Triton 3.9 copies a left operand before each product: ptxas
# then makes every product of the backward wait for the last, and spills 45 of 473 instructions of
# the forward at head_dim 192 (the compile tests show it). That of Triton 3.6 does neither. Versions
# in between were not tried.
CAN_KEEP_IN_REGISTERS = triton.__version__.startswith("3.6")
_FAR = 1 << 30  # as in seqlen.SeqlenInfo.coord
_MOST = 0x7FFF0000  # above every coordinate


def mask_arguments(
    lists: BlockLists | None, tiles: Tensor | None, unused_ptr: Tensor
) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    """(pointers, strides) of a block mask as kernels take them: lists and bit tiles, and the
    distance of the lists of the next batch entry and the next head (0 if shared). Without a mask
    all pointers are unused_ptr.
    """
    if lists is None or tiles is None:
        return (unused_ptr,) * 6, (0, 0)
    return (*lists, tiles), batch_head_strides(lists.full_offsets)


def batch_head_strides(t: Tensor) -> tuple[int, int]:
    """Strides of the batch and of the heads, 0 where they are shared."""
    (b, h), (stride_b, stride_h) = t.shape[:2], t.stride()[:2]
    return stride_b if b > 1 else 0, stride_h if h > 1 else 0


class BackwardArguments(NamedTuple):
    """Lengths, window and mask as both backward kernels take them: `positional` from cu_seqlens to
    mask_h in their signatures, `constants` by name.
    """

    positional: tuple
    constants: dict[str, bool]

    @staticmethod
    def of(
        problem: Problem, x: Tensors, lists: BlockLists | None, counter: Tensor, keys: bool = False
    ) -> "BackwardArguments":
        """lists: rows or columns of the mask. keys: exchange queries and keys. The counter also
        fills pointers that the compiled variant does not read.
        """
        left, right = problem.window
        own = problem.seqlen_q, x.q.shape[0], x.cu_seqlens_q
        other = problem.seqlen_k, x.k.shape[0], x.cu_seqlens_k
        if keys:
            left, right, own, other = right, left, other, own
        (length, total, cu), (length_other, total_other, cu_other) = own, other
        offsets = counter if cu is None else cu, counter if cu_other is None else cu_other
        tiles = None if x.mask is None else x.mask.tiles
        pointers, strides = mask_arguments(lists, tiles, counter)
        seqlens = length, length_other, total, total_other, problem.num_heads, problem.group_size
        positional = (*offsets, counter, *pointers, *seqlens, left or 0, right or 0, *strides)
        has_window = left is not None, right is not None
        capped = problem.softcap != 0
        return BackwardArguments(
            positional, _variant(problem.packed, *has_window, problem.has_mask, capped)
        )


@cache
def _variant(packed: bool, left: bool, right: bool, mask: bool, softcap: bool) -> dict[str, bool]:
    """The compiled variant. DYNAMIC: tiles of different lengths are drawn one by one."""
    return {
        "PACKED": packed,
        "HAS_LEFT": left,
        "HAS_RIGHT": right,
        "HAS_MASK": mask,
        "SOFTCAP": softcap,
        "DYNAMIC": packed or left or right or mask,
    }


@cache
def tile_constants(config: HopperConfig) -> dict:
    """Constants of every forward, from its row of a tile table."""
    return {
        "TILE_N": config.tile_n,
        "CONSUMERS": config.consumers,
        "STAGES": config.num_stages,
        "Q_STAGES": config.q_stages,
        "NAMED_BARRIERS": config.named_barriers,
        **warp_constants(config),
    }


def warp_constants(config: HopperConfig | HopperBackwardConfig | HopperSplitConfig) -> dict:
    """How producer and consumers share the registers of an SM. enable_fp_fusion: a fused
    multiply-add rounds once less. launch_pdl: programs may start and initialise their barriers
    while the previous kernel ends, and then wait for it.
    """
    return {
        "CONSUMER_REGS": config.consumer_regs,
        "PRODUCER_REGS": config.producer_regs,
        "num_warps": 4,
        "maxnreg": config.entry_regs,
        "enable_fp_fusion": True,
        "launch_pdl": True,
    }


def softmax_scales(problem: Problem) -> tuple[float, float]:
    """(scale_log2, inner) of softmax.SoftmaxScale."""
    log2e = math.log2(math.e)
    if not problem.softcap:
        return problem.softmax_scale * log2e, 0.0
    return problem.softcap * log2e, 2.0 * log2e * problem.softmax_scale / problem.softcap


class Descriptor(TensorDescriptor):
    """A TensorDescriptor without checks: validation has checked alignment and lengths already."""

    def __post_init__(self):
        pass


@cache
def _layout(dtype: torch.dtype, block: tuple[int, ...]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _GL_DTYPE[dtype])


def descriptor(t: Tensor, rows: int, width: int) -> Descriptor:
    """t as (batch, heads, seqlen, dim). A packed t is ragged: the strides of two leading dimensions
    cancel modulo 2^64, so that the hardware bounds a sequence at its own end (coordinates:
    seqlen.SeqlenInfo.coord).
    """
    if t.dim() == 4:
        b, s, h, d = t.shape
        sb, ss, sh, _ = t.stride()
        shape, strides = [b, h, s, d], [sb, sh, ss, 1]
    else:
        _, h, d = t.shape
        ss, sh, _ = t.stride()
        shape, strides = [_MOST, _MOST, h, _FAR, d], [2**34 - ss, ss, sh, ss, 1]
    return _tiles(t, shape, strides, (rows, width))


def grad_descriptor(t: Tensor, width: int) -> Descriptor:
    """64 rows of a gradient. An fp32 gradient is stored in halves (pipeline.store_halves)."""
    return descriptor(t, 64, width // 2 if t.dtype == torch.float32 else width)


def gqa_descriptor(t: Tensor, rows: int, group: int, width: int) -> Descriptor:
    """t with `rows` rows that are queries x heads of a group (coordinates:
    seqlen.SeqlenInfo.q_coord).
    """
    if group == 1:
        return descriptor(t, rows, width)
    if t.dim() == 4:
        shape, strides = list(t.shape), [*t.stride()[:3], 1]
    else:
        _, h, d = t.shape
        ss, sh, _ = t.stride()
        shape, strides = [_MOST, _MOST, _FAR, h, d], [2**34 - ss, ss, ss, sh, 1]
    return _tiles(t, shape, strides, (rows // group, group, width))


def paged_descriptor(pages: Tensor, rows: int, width: int) -> Descriptor:
    """Pages as one ragged sequence of slots (coordinates: paging.PagedKV.coord). Pages may be any
    number of slots apart: page_stride.
    """
    _, _, h, d = pages.shape
    _, ss, sh, _ = pages.stride()
    shape, strides = [_MOST, _MOST, h, _FAR, d], [2**34 - ss, ss, sh, ss, 1]
    return _tiles(pages, shape, strides, (rows, width))


def page_stride(pages: Tensor) -> int:
    """The distance of neighbouring pages, in slots."""
    return pages.stride(0) // pages.stride(1)


def _tiles(t: Tensor, shape: list[int], strides: list[int], tile: tuple[int, ...]) -> Descriptor:
    block = (1,) * (len(shape) - len(tile)) + tile
    return Descriptor(t, shape, strides, list(block), _layout(t.dtype, block))


def matrix_descriptor(t: Tensor, rows: int, width: int) -> Descriptor:
    """A contiguous tensor as rows of `width` elements, in tiles of `rows` rows."""
    layout = _layout(t.dtype, (rows, width))
    return Descriptor(t, [t.numel() // width, width], [width, 1], [rows, width], layout)


def vector_descriptor(t: Tensor, block: tuple[int, ...]) -> Descriptor:
    """A contiguous fp32 tensor."""
    layout = _layout(t.dtype, block)
    return Descriptor(t, list(t.shape), list(t.stride()), list(block), layout)


@cache
def num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def fill_without_keys(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Result:
    """The result of a call without keys: zeros, and lse of the sinks alone."""
    lse.copy_(torch.full_like(lse, -math.inf) if sinks is None else sinks[:, None].expand_as(lse))
    return Result(out.zero_(), lse)


def with_contiguous_rows(table: Tensor) -> Tensor:
    return table if table.stride(1) == 1 else table.contiguous()
