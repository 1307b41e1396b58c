"""What the launches of the Hopper kernels share: TMA descriptors, frames, sections of the L2."""

import math
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from onchip.kernels.configs import HopperBackwardConfig, HopperConfig, HopperGradientConfig
from onchip.kernels.protocol import Result
from onchip.masks.blockmask import BlockLists
from onchip.problem import Problem, Tensors

_GL_DTYPE = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.int8: gl.int8,
}
_FAR = 1 << 30  # as in schedule.Shape.coord
_MOST = 0x7FFF0000  # no coordinate is larger
# What heads that are worked on together may fill. The L2 has 50 MB, but each half of the processors
# its own half of it: with 32 MB causal forwards read 10 to 30 % more from HBM (ncu, H200,
# 2026-11-15), though in the same time. Backwards were timed with 32 MB, and not with less.
L2_FORWARD, L2_BACKWARD = 16 << 20, 32 << 20


def mask_arguments(
    lists: BlockLists | None, tiles: Tensor | None, unused_ptr: Tensor
) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
    """(pointers, strides) of a block mask as kernels take them: its lists and bit tiles, how far
    the lists of the next batch entry and of the next head are, 0 if they are shared. Without a mask
    `unused_ptr` replaces pointers that the kernel does not read.
    """
    if lists is None or tiles is None:
        return (unused_ptr,) * 6, (0, 0)
    return (*lists, tiles), plane_strides(lists.full_offsets)


def plane_strides(t: Tensor) -> tuple[int, int]:
    """From a batch entry and from a head to the next, 0 where they are shared."""
    (b, h), (stride_b, stride_h) = t.shape[:2], t.stride()[:2]
    return stride_b if b > 1 else 0, stride_h if h > 1 else 0


class Frame(NamedTuple):
    """Lengths, window and mask as the kernels of the backward take them: `arguments` stand from
    cu_seqlens to mask_h in their signatures, `constants` go by name.
    """

    arguments: tuple
    constants: dict[str, bool]

    @staticmethod
    def of(
        problem: Problem, x: Tensors, lists: BlockLists | None, counter: Tensor, keys: bool = False
    ) -> "Frame":
        """lists: rows or columns of the mask. keys: queries and keys exchanged, as keys see it. The
        counter also stands for what the compiled variant does not read.
        """
        left, right = problem.reach
        own = problem.seqlen_q, x.q.shape[0], x.cu_seqlens_q
        other = problem.seqlen_k, x.k.shape[0], x.cu_seqlens_k
        if keys:
            left, right, own, other = right, left, other, own
        (length, total, cu), (length_other, total_other, cu_other) = own, other
        offsets = counter if cu is None else cu, counter if cu_other is None else cu_other
        tiles = None if x.mask is None else x.mask.tiles
        pointers, strides = mask_arguments(lists, tiles, counter)
        lengths = length, length_other, total, total_other, problem.num_heads, problem.group_size
        arguments = (*offsets, counter, *pointers, *lengths, left or 0, right or 0, *strides)
        has_window = left is not None, right is not None
        capped = problem.softcap != 0
        return Frame(arguments, _variant(problem.packed, *has_window, problem.has_mask, capped))


@cache
def _variant(packed: bool, left: bool, right: bool, mask: bool, softcap: bool) -> dict[str, bool]:
    """Tiles that see more or less than others are handed out one by one."""
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
    """What every forward is compiled for, out of its row of a tile table. Programs may start and
    open their barriers while the call before ends, for which they then wait.
    """
    return {
        "TILE_N": config.tile_n,
        "CONSUMERS": config.consumers,
        "STAGES": config.num_stages,
        "Q_STAGES": config.q_stages,
        "NUMBERED": config.numbered,
        **team(config),
    }


def team(config: HopperConfig | HopperBackwardConfig | HopperGradientConfig) -> dict:
    """How a producer and its consumers share the registers of a processor. Fusing a multiply and an
    add rounds once less.
    """
    return {
        "CONSUMER_REGS": config.consumer_regs,
        "PRODUCER_REGS": config.producer_regs,
        "num_warps": 4,
        "maxnreg": config.entry_regs,
        "enable_fp_fusion": True,
        "launch_pdl": True,
    }


def scales(problem: Problem) -> tuple[float, float]:
    """(what turns the kernel's scores into base-2 logits, what goes into its tanh); see
    softmax.Scale.
    """
    log2e = math.log2(math.e)
    if not problem.softcap:
        return problem.softmax_scale * log2e, 0.0
    return problem.softcap * log2e, 2.0 * log2e * problem.softmax_scale / problem.softcap


class Descriptor(TensorDescriptor):
    """A TensorDescriptor that is not checked again: alignment and lengths were, at the door."""

    def __post_init__(self):
        pass


@cache
def _layout(dtype: torch.dtype, block: tuple[int, ...]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _GL_DTYPE[dtype])


def descriptor(t: Tensor, rows: int, width: int) -> Descriptor:
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
        shape, strides = [_MOST, _MOST, h, _FAR, d], [2**34 - ss, ss, sh, ss, 1]
    return _tiles(t, shape, strides, (rows, width))


def gradient_tiles(t: Tensor, width: int) -> Descriptor:
    """64 rows of a gradient, of which an fp32 one is stored in halves (pipe.store_halves)."""
    return descriptor(t, 64, width // 2 if t.dtype == torch.float32 else width)


def grouped(t: Tensor, rows: int, group: int, width: int) -> Descriptor:
    """The same with `rows` that are queries x heads of a group (coordinates:
    schedule.Shape.q_coord).
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


def paged(pages: Tensor, rows: int, width: int) -> Descriptor:
    """Pages as one ragged sequence of slots (coordinates: schedule.Pages.at). They may lie apart by
    any number of slots: `span`.
    """
    _, _, h, d = pages.shape
    _, ss, sh, _ = pages.stride()
    shape, strides = [_MOST, _MOST, h, _FAR, d], [2**34 - ss, ss, sh, ss, 1]
    return _tiles(pages, shape, strides, (rows, width))


def span(pages: Tensor) -> int:
    """From one page to the next, in slots."""
    return pages.stride(0) // pages.stride(1)


def _tiles(t: Tensor, shape: list[int], strides: list[int], tile: tuple[int, ...]) -> Descriptor:
    block = (1,) * (len(shape) - len(tile)) + tile
    return Descriptor(t, shape, strides, list(block), _layout(t.dtype, block))


def matrix(t: Tensor, rows: int, width: int) -> Descriptor:
    """A contiguous tensor as rows of `width`, of which a tile has `rows`."""
    layout = _layout(t.dtype, (rows, width))
    return Descriptor(t, [t.numel() // width, width], [width, 1], [rows, width], layout)


def numbers(t: Tensor, block: tuple[int, ...]) -> Descriptor:
    """A contiguous fp32 tensor."""
    layout = _layout(t.dtype, block)
    return Descriptor(t, list(t.shape), list(t.stride()), list(block), layout)


@cache
def num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def section_of(planes: int, plane_bytes: int, l2_bytes: int) -> int:
    """How many heads are worked on together, so that what they stream stays in the L2: a divisor of
    their number.
    """
    return _divisor(planes, max(1, l2_bytes // max(1, plane_bytes)))


@lru_cache(maxsize=1024)
def _divisor(n: int, limit: int) -> int:
    """The largest divisor of n that is at most limit."""
    return next(d for d in range(min(n, limit), 0, -1) if n % d == 0)


def without_keys(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Result:
    lse.copy_(torch.full_like(lse, -math.inf) if sinks is None else sinks[:, None].expand_as(lse))
    return Result(out.zero_(), lse)


def with_rows(table: Tensor) -> Tensor:
    """A page table whose rows lie in one piece."""
    return table if table.stride(1) == 1 else table.contiguous()
