"""From a call to the arguments of a launch. This code runs on every call: it does as little Python
work as possible.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip.core.device import DeviceInfo, device_info
from onchip.core.problem import Problem, Tensors
from onchip.kernels.tiles import TRITON_COLUMNS, TritonConfig, TritonUse, triton_config
from onchip.kernels.triton.indices import MAX_SIZES
from onchip.kernels.triton.score_mod import score_function
from onchip.score_mods.expression import from_text

# Arguments that change with the lengths of a call. Triton must not compile a variant for a value of
# 1 or a multiple of 16.
LENGTHS = (
    "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh", "stride_vb",
    "stride_vs", "stride_vh", "stride_slopes", "stride_bias_b", "stride_bias_h", "stride_bias_q",
    "stride_mask_b", "stride_mask_h", "stride_stats", "total_q", "total_k", "num_tiles", "left",
    "right", "keep_below", "first_head", *(f"size_{i}" for i in range(MAX_SIZES)),
)  # fmt: skip

LOG2E = 1.4426950408889634
FAR = 1 << 30  # a larger window side sees everything, and i + FAR still fits into 32 bits
ALIGN = 8  # elements: 16 bytes of 16-bit numbers, the widest load
MIN_E4M3 = (8, 9)  # the first compute capability with this type
WIDE = 1 << 24  # from this row stride on, offsets inside a tile could exceed 2^31
_NO_CAPTURED = (None,) * (2 + MAX_SIZES)


class LaunchArgs(NamedTuple):
    """The arguments that all kernels have in common, in the order of their signatures."""

    tensors: tuple[Any, ...]  # q, k, v, cu_seqlens, alibi_slopes, bias, dropout_seed, places
    rows: tuple[Any, ...]  # the block lists of the mask's rows and its tiles, or None
    cols: tuple[Any, ...]  # the same of its columns
    strides: tuple[Any, ...]
    row_strides: tuple[Any, ...]  # (batch, head) strides of the row lists
    col_strides: tuple[Any, ...]
    scalars: tuple[Any, ...]
    captured: tuple[Any, ...]  # floats and integers of score_mod, and the sizes of its tensors
    score_mod: Any  # a device function, or None
    dims: tuple[Any, ...]  # HEAD_DIM, HEAD_DIM_V, LINEAR, ALIGN, PAD_DIM, PAD_DIM_V
    use: TritonUse

    @classmethod
    def of(cls, problem: Problem, x: Tensors) -> "LaunchArgs":
        q, k, v = _limit_row_stride(x.q), _limit_row_stride(x.k), _limit_row_stride(x.v)
        device = device_info(q.device)
        if problem.page_dtype is not None:
            k, v = (_as_kv8(t, device.capability) for t in (k, v))
        cu_q, cu_k, slopes = (
            make_contiguous(t) for t in (x.cu_seqlens_q, x.cu_seqlens_k, x.alibi_slopes)
        )
        bias = x.bias if x.bias is None or x.bias.stride(3) == 1 else x.bias.contiguous()
        align, strides = _aligned(
            (*head_strides(q), *head_strides(k), *head_strides(v)), k.element_size()
        )
        rows, cols, row_strides, col_strides = _mask(x)
        dims = _dims(problem, align)
        return cls(
            (q, k, v, cu_q, cu_k, slopes, bias, x.dropout_seed, x.positions_q, x.positions_k),
            rows,
            cols,
            (*strides, *score_strides(slopes, bias)),
            row_strides,
            col_strides,
            _scalars(problem, q, k),
            _captured(problem, x),
            None if problem.score_mod is None else score_function(problem.score_mod),
            dims,
            _tile_use(problem, dims, device),
        )

    def config(self, kernel: str) -> TritonConfig:
        return triton_config(kernel, self.use)


def launch_options(config: TritonConfig) -> dict[str, Any]:
    """num_warps, num_stages and registers. enable_fp_fusion is always on, whatever Triton's
    default: a fused multiply-add rounds once less.
    """
    options = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": True,
    }
    return options | {"maxnreg": config.max_registers} if config.max_registers else options


def dependent_options(config: TritonConfig, capability: tuple[int, int] | None) -> dict[str, Any]:
    """launch_options with programmatic dependent launch, since Hopper: the kernel may start while
    its predecessor ends, and waits for it before its first memory access.
    """
    if capability is None or capability < (9, 0):
        return launch_options(config) | {"PDL": False}
    return launch_options(config) | {"PDL": True, "launch_pdl": True}


def make_contiguous(t: Tensor | None) -> Tensor | None:
    return t if t is None or t.is_contiguous() else t.contiguous()


def _limit_row_stride(t: Tensor) -> Tensor:
    return t if t.stride(-3) < WIDE else t.contiguous()


def _as_kv8(t: Tensor, capability: tuple[int, int] | None) -> Tensor:
    """8-bit pages with rows that can be read as 16-bit pairs. If Triton has no e4m3 on this device,
    a view as int8, which prevents the call from being replayed.
    """
    even = not any(s % 2 for s in t.stride()[:-1]) and not t.storage_offset() % 2
    t = t if even else t.contiguous()
    return t if capability is not None and capability >= MIN_E4M3 else t.view(torch.int8)


def head_strides(t: Tensor) -> tuple[int, int, int]:
    """(batch, seqlen, heads); a packed tensor has one batch entry."""
    return t.stride()[:3] if t.dim() == 4 else (0, *t.stride()[:2])


def _aligned(strides: tuple[int, ...], itemsize: int) -> tuple[int, tuple[int, ...]]:
    """(align, strides in units of align). Strides of 8-bit keys and values count pairs."""
    if itemsize == 1:
        strides = (*strides[:3], *(s // 2 for s in strides[3:]))
    if any(s % ALIGN for s in strides):
        return 1, strides
    return ALIGN, tuple(s // ALIGN for s in strides)


def score_strides(slopes: Tensor | None, bias: Tensor | None) -> tuple[int, int, int, int]:
    """(batch) of slopes and (batch, heads, seqlen_q) of bias, 0 where they broadcast."""
    return (*_slopes(slopes), *_bias(bias))


def _slopes(slopes: Tensor | None) -> tuple[int]:
    return (slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,)


def _bias(bias: Tensor | None) -> tuple[int, int, int]:
    """(batch, heads, seqlen_q), 0 where bias broadcasts."""
    if bias is None:
        return (0, 0, 0)
    return tuple(0 if n == 1 else s for n, s in zip(bias.shape[:3], bias.stride(), strict=False))


def _mask(x: Tensors) -> tuple[tuple, tuple, tuple[int, int], tuple[int, int]]:
    mask = x.mask
    if mask is None:
        return (None,) * 6, (None,) * 6, (0, 0), (0, 0)
    rows, cols = (*mask.rows, mask.tiles), (*mask.cols, mask.tiles)
    return rows, cols, _plane_strides(rows[0]), _plane_strides(cols[0])


def _plane_strides(offsets: Tensor) -> tuple[int, int]:
    b, h = offsets.shape[:2]
    return offsets.stride(0) if b > 1 else 0, offsets.stride(1) if h > 1 else 0


def _scalars(problem: Problem, q: Tensor, k: Tensor) -> tuple:
    """num_heads, group_size, total_q, total_k, left, right, scale_log2, softcap, keep_below,
    keep_scale, first_head.
    """
    keep = 1.0 - problem.dropout_p
    return (
        problem.num_heads,
        problem.num_heads // problem.num_kv_heads,
        q.shape[-3],
        _max_keys(problem, k),
        *(None if side is None else min(side, FAR) for side in problem.window),
        problem.softmax_scale * LOG2E,
        problem.softcap or None,
        round(keep * 2**32),
        1.0 / keep,
        problem.first_head,
    )


def _captured(problem: Problem, x: Tensors) -> tuple:
    if problem.score_mod is None:
        return _NO_CAPTURED
    sizes = [n for captured in from_text(problem.score_mod).captured for n in captured.sizes]
    missing = (None,) * (MAX_SIZES - len(sizes))
    return make_contiguous(x.captured), make_contiguous(x.captured_ints), *sizes, *missing


def _max_keys(problem: Problem, k: Tensor) -> int:
    """The most keys that a sequence can have: the rows of k, or the capacity of its page table."""
    if problem.page_size:
        return problem.seqlen_k if k.shape[0] else 0
    return k.shape[-3]


def _dims(problem: Problem, align: int) -> tuple[int, int, bool, int, int, int]:
    unmodified = not (problem.softcap or problem.has_alibi or problem.has_bias)
    unmodified = unmodified and problem.score_mod is None
    linear = unmodified and problem.softmax_scale > 1e-30
    d, d_v = problem.head_dim, problem.head_dim_v
    if problem.page_dtype is None:
        first = min(d, TRITON_COLUMNS[problem.dtype.itemsize])  # decode.py has tiles for the rest
        return d, d_v, linear, align, padded(first), padded(d_v)
    return d, d_v, linear, align, 2 * padded(-(-d // 2)), 2 * padded(-(-d_v // 2))


def _tile_use(problem: Problem, dims: tuple, device: DeviceInfo) -> TritonUse:
    _, _, linear, _, pad_dim, pad_dim_v = dims
    modified = not linear or problem.dropout_p > 0 or problem.return_stats
    itemsize = problem.dtype.itemsize
    if problem.page_dtype is not None and itemsize == 2:
        itemsize = problem.page_dtype.itemsize
    dim, capability = max(pad_dim, pad_dim_v), device.capability
    return TritonUse(dim, itemsize, capability, problem.has_mask, modified, device.name)


def forward_use(problem: Problem, device: DeviceInfo) -> TritonUse:
    """The inputs of the choice of a forward's tile, if it does not split its keys."""
    return _tile_use(problem, _dims(problem, ALIGN), device)


def padded(dim: int) -> int:
    """head_dim as tiles pad it: a power of two, at least the 16 of a tensor core."""
    return max(16, 1 << (dim - 1).bit_length())
