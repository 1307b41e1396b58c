"""From a call to the arguments of a launch, with as little Python as there can be: this runs on
every call.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from onchip.kernels.configs import TritonConfig, TritonUse, triton_config
from onchip.problem import Problem, Tensors, device_info

# Arguments that change with the lengths of a call: Triton must not compile a variant for those that
# happen to be 1 or a multiple of 16.
LENGTHS = (
    "stride_qb", "stride_qs", "stride_qh", "stride_kb", "stride_ks", "stride_kh", "stride_vb",
    "stride_vs", "stride_vh", "stride_slopes", "stride_bias_b", "stride_bias_h", "stride_bias_q",
    "stride_mask_b", "stride_mask_h", "stride_stats", "total_q", "total_k", "num_tiles", "left",
    "right", "keep_below", "first_head",
)  # fmt: skip

LOG2E = 1.4426950408889634
FAR = 1 << 30  # a window side beyond this sees everything, and i + FAR still fits 32 bits
ALIGN = 8  # elements: 16 bytes of 16-bit numbers, the widest load
MIN_E4M3 = (8, 9)  # the compute capability from which on there is such a type
WIDE = 1 << 24  # from this row stride on, the offsets inside a tile could pass 2^31


class Call(NamedTuple):
    """What all kernels take, in the order of their signatures."""

    tensors: tuple  # q, k, v, cu_seqlens, alibi_slopes, bias, dropout_seed, places
    rows: tuple  # the block lists of the mask's rows and its tiles, or None
    cols: tuple  # the same of its columns
    strides: tuple
    row_strides: tuple  # of the planes of the row lists
    col_strides: tuple
    scalars: tuple
    dims: tuple  # HEAD_DIM, HEAD_DIM_V, LINEAR, ALIGN, PAD_DIM, PAD_DIM_V
    use: TritonUse

    @classmethod
    def of(cls, problem: Problem, x: Tensors) -> "Call":
        q, k, v = _with_short_rows(x.q), _with_short_rows(x.k), _with_short_rows(x.v)
        if problem.page_dtype is not None:
            k, v = (_as_kv8(t, device_info(q.device).capability) for t in (k, v))
        cu_q, cu_k, slopes = (packed(t) for t in (x.cu_seqlens_q, x.cu_seqlens_k, x.alibi_slopes))
        bias = x.bias if x.bias is None or x.bias.stride(3) == 1 else x.bias.contiguous()
        align, strides = _aligned((*_strides(q), *_strides(k), *_strides(v)), k.element_size())
        rows, cols, row_strides, col_strides = _mask(x)
        dims = _dims(problem, align)
        return cls(
            (q, k, v, cu_q, cu_k, slopes, bias, x.dropout_seed, x.places_q, x.places_k),
            rows,
            cols,
            (*strides, *_slopes(slopes), *_bias(bias)),
            row_strides,
            col_strides,
            _scalars(problem, q, k),
            dims,
            _use(problem, dims, device_info(q.device).capability),
        )

    def config(self, kernel: str) -> TritonConfig:
        return triton_config(kernel, self.use)


def launch_options(config: TritonConfig) -> dict:
    """Fusing a multiply and an add rounds once less: always on, whatever Triton's default."""
    options = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": True,
    }
    return options | {"maxnreg": config.max_registers} if config.max_registers else options


def dependent_options(config: TritonConfig, capability: tuple[int, int] | None) -> dict:
    """Since Hopper a kernel may be launched while its predecessor ends, for which it then waits."""
    if capability is None or capability < (9, 0):
        return launch_options(config) | {"PDL": False}
    return launch_options(config) | {"PDL": True, "launch_pdl": True}


def packed(t: Tensor | None) -> Tensor | None:
    return t if t is None or t.is_contiguous() else t.contiguous()


def _with_short_rows(t: Tensor) -> Tensor:
    return t if t.stride(-3) < WIDE else t.contiguous()


def _as_kv8(t: Tensor, capability: tuple[int, int] | None) -> Tensor:
    """8-bit pages, a row of which is a row of 16-bit words: the kernel takes them for such. Only
    where Triton has no e4m3 they are a view, which keeps a call from being replayed.
    """
    even = not any(s % 2 for s in t.stride()[:-1]) and not t.storage_offset() % 2
    t = t if even else t.contiguous()
    return t if capability is not None and capability >= MIN_E4M3 else t.view(torch.int8)


def _strides(t: Tensor) -> tuple[int, int, int]:
    """(batch, seqlen, heads); a packed tensor has one batch entry."""
    return t.stride()[:3] if t.dim() == 4 else (0, *t.stride()[:2])


def _aligned(strides: tuple[int, ...], itemsize: int) -> tuple[int, tuple[int, ...]]:
    """(align, strides in units of align). Strides of 8-bit keys and values count words of two."""
    if itemsize == 1:
        strides = (*strides[:3], *(s // 2 for s in strides[3:]))
    if any(s % ALIGN for s in strides):
        return 1, strides
    return ALIGN, tuple(s // ALIGN for s in strides)


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
    return rows, cols, _planes(rows[0]), _planes(cols[0])


def _planes(offsets: Tensor) -> tuple[int, int]:
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
        _room(problem, k),
        *(None if side is None else min(side, FAR) for side in problem.reach),
        problem.softmax_scale * LOG2E,
        problem.softcap or None,
        round(keep * 2**32),
        1.0 / keep,
        problem.first_head,
    )


def _room(problem: Problem, k: Tensor) -> int:
    """The most keys of a sequence: the rows of k, or what its page table reaches."""
    if problem.page_size:
        return problem.seqlen_k if k.shape[0] else 0
    return k.shape[-3]


def _dims(problem: Problem, align: int) -> tuple[int, int, bool, int, int, int]:
    straight = not (problem.softcap or problem.has_alibi or problem.has_bias)
    linear = straight and problem.softmax_scale > 1e-30
    d, d_v = problem.head_dim, problem.head_dim_v
    if problem.page_dtype is None:
        return d, d_v, linear, align, padded(d), padded(d_v)
    return d, d_v, linear, align, 2 * padded(-(-d // 2)), 2 * padded(-(-d_v // 2))


def _use(problem: Problem, dims: tuple, capability: tuple[int, int] | None) -> TritonUse:
    _, _, linear, _, pad_dim, pad_dim_v = dims
    modified = not linear or problem.dropout_p > 0 or problem.return_stats
    itemsize = problem.dtype.itemsize
    if problem.page_dtype is not None and itemsize == 2:
        itemsize = problem.page_dtype.itemsize
    return TritonUse(max(pad_dim, pad_dim_v), itemsize, capability, problem.has_mask, modified)


def padded(dim: int) -> int:
    """Tiles are powers of two, and a tensor core takes at least 16."""
    return max(16, 1 << (dim - 1).bit_length())
