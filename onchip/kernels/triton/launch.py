"""From a call to the arguments of a launch, with as little Python as there can be: this runs on
every call.
"""

from typing import NamedTuple

from torch import Tensor

from onchip.kernels.configs import TritonConfig, triton_config
from onchip.problem import DeviceInfo, Problem, Tensors, device_info

# Arguments that change with the lengths of a call: Triton must not compile a variant for those that
# happen to be 1 or a multiple of 16.
LENGTHS = (
    "total_q", "total_k", "num_tiles", "left", "right", "keep_below", "stride_slopes",
    "stride_bias_b", "stride_bias_h", "stride_bias_q", "stride_mask_b", "stride_mask_h",
    "stride_stats",
)  # fmt: skip

LOG2E = 1.4426950408889634
FAR = 1 << 30  # a window side beyond this sees everything, and i + FAR still fits 32 bits
WIDE = 1 << 24  # from this row stride on, the offsets inside a tile could pass 2^31


class Call(NamedTuple):
    """What all kernels take, in the order of their signatures."""

    tensors: tuple  # q, k, v, cu_seqlens_q, cu_seqlens_k, alibi_slopes, bias, dropout_seed
    rows: tuple  # the block lists of the mask's rows and its tiles, or None
    cols: tuple  # the same of its columns
    strides: tuple
    row_strides: tuple  # of the planes of the row lists
    col_strides: tuple
    scalars: tuple
    dims: tuple  # HEAD_DIM, HEAD_DIM_V, LINEAR, PAD_DIM, PAD_DIM_V
    device: DeviceInfo
    itemsize: int

    @classmethod
    def of(cls, problem: Problem, x: Tensors) -> "Call":
        q, k, v = _narrow(x.q), _narrow(x.k), _narrow(x.v)
        bias, slopes = x.bias, x.alibi_slopes
        strides = (*_strides(q), *_strides(k), *_strides(v), *_slopes(slopes), *_bias(bias))
        rows, cols, row_strides, col_strides = _mask(x)
        return cls(
            (q, k, v, x.cu_seqlens_q, x.cu_seqlens_k, slopes, bias, x.dropout_seed),
            rows,
            cols,
            strides,
            row_strides,
            col_strides,
            _scalars(problem, q, k),
            _dims(problem),
            device_info(q.device),
            q.dtype.itemsize,
        )

    def config(self, kernel: str) -> TritonConfig:
        return triton_config(kernel, self.itemsize, max(self.dims[3:]), self.device)


def launch_options(config: TritonConfig) -> dict:
    """Fusing a multiply and an add rounds once less: always on, whatever Triton's default."""
    return {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": True,
    }


def _narrow(t: Tensor) -> Tensor:
    return t if t.stride(-3) < WIDE else t.contiguous()


def _strides(t: Tensor) -> tuple[int, int, int]:
    """(batch, seqlen, heads); a packed tensor has one batch entry."""
    return t.stride()[:3] if t.dim() == 4 else (0, *t.stride()[:2])


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
    keep_scale.
    """
    left, right = problem.window_size
    keep = 1.0 - problem.dropout_p
    return (
        problem.num_heads,
        problem.num_heads // problem.num_kv_heads,
        q.shape[-3],
        k.shape[-3],
        None if left is None else min(left, FAR),
        0 if problem.causal else None if right is None else min(right, FAR),
        problem.softmax_scale * LOG2E,
        problem.softcap or None,
        round(keep * 2**32),
        1.0 / keep,
    )


def _dims(problem: Problem) -> tuple[int, int, bool, int, int]:
    straight = not (problem.softcap or problem.has_alibi or problem.has_bias)
    linear = straight and problem.softmax_scale > 1e-30
    d, d_v = problem.head_dim, problem.head_dim_v
    return d, d_v, linear, padded(d), padded(d_v)


def padded(dim: int) -> int:
    """Tiles are powers of two, and a tensor core takes at least 16."""
    return max(16, 1 << (dim - 1).bit_length())
