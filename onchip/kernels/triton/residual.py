"""The two extra steps of precise_delta, one launch each.

    forward:   out (fp32)  -> split_kernel ->  out (bf16), residual = out - bf16(out) (bf16)
    backward:  residual, dout, dlse -> share_kernel -> dlse - rowsum(residual * dout)

The backward kernels compute delta = rowsum(out * dout) - dlse from the rounded out. With the new
dlse that is the delta of the unrounded out. core/backend.py has both steps in torch.

Worked shape: batch 1, 300 tokens, one head: 300 rows in tiles of TRITON_STREAMED.tile_m = 16, so 19
programs; each row is read once. The kernels only stream memory; examples/versions/v2.py teaches
where delta is used.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.kernels.runtime.launcher import CachedLauncher
from onchip.kernels.tiles import TRITON_STREAMED
from onchip.kernels.triton.launch import launch_options, make_contiguous, padded
from onchip.kernels.triton.tile import load_tile, round_to, store_tile


@triton.jit(do_not_specialize=("num_rows",))
def split_kernel(
    out_ptr, rounded_ptr, residual_ptr, num_rows,
    HEAD_DIM_V: tl.constexpr, PAD_DIM_V: tl.constexpr, TILE_M: tl.constexpr,
):  # fmt: skip
    """Round TILE_M rows of out and store the rounding error. Rows are in the order of out."""
    row = tl.program_id(0).to(tl.int64) * TILE_M
    out = load_tile(out_ptr, row, num_rows, HEAD_DIM_V, HEAD_DIM_V, TILE_M, PAD_DIM_V, True)
    high = round_to(out, rounded_ptr.dtype.element_ty).to(tl.float32)
    store_tile(rounded_ptr, high, row, num_rows, HEAD_DIM_V, HEAD_DIM_V, TILE_M, PAD_DIM_V)
    store_tile(residual_ptr, out - high, row, num_rows, HEAD_DIM_V, HEAD_DIM_V, TILE_M, PAD_DIM_V)


@triton.jit(do_not_specialize=("num_rows", "total_q"))
def share_kernel(
    residual_ptr, dout_ptr, dlse_ptr, new_ptr, num_heads, total_q, num_rows,
    HEAD_DIM_V: tl.constexpr, PAD_DIM_V: tl.constexpr, TILE_M: tl.constexpr,
):  # fmt: skip
    """new = dlse - rowsum(residual * dout); rows of residual and dout are in the order of out."""
    row = tl.program_id(0).to(tl.int64) * TILE_M
    residual = load_tile(
        residual_ptr, row, num_rows, HEAD_DIM_V, HEAD_DIM_V, TILE_M, PAD_DIM_V, True
    )
    dout = load_tile(dout_ptr, row, num_rows, HEAD_DIM_V, HEAD_DIM_V, TILE_M, PAD_DIM_V, True)
    share = tl.sum(residual.to(tl.float32) * dout.to(tl.float32), 1)
    rows = row + tl.arange(0, TILE_M)
    token, h = rows // num_heads, rows % num_heads
    place = (token // total_q * num_heads + h) * total_q + token % total_q
    inside = rows < num_rows
    if dlse_ptr is not None:
        share -= tl.load(dlse_ptr + place, mask=inside, other=0.0)
    tl.store(new_ptr + place, -share, mask=inside)


_split_kernel = CachedLauncher(split_kernel)
_share_kernel = CachedLauncher(share_kernel)


def split(out: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    high, low = (torch.empty_like(out, dtype=dtype) for _ in range(2))
    num_rows, config = out[..., 0].numel(), TRITON_STREAMED
    if out.numel():
        _split_kernel[(triton.cdiv(num_rows, config.tile_m),)](
            out, high, low, num_rows,
            HEAD_DIM_V=out.shape[-1], PAD_DIM_V=padded(out.shape[-1]), TILE_M=config.tile_m,
            **launch_options(config),
        )  # fmt: skip
    return high, low


def with_residual(dlse: Tensor | None, residual: Tensor, dout: Tensor) -> Tensor:
    *entries, total_q, num_heads, head_dim_v = residual.shape
    new = residual.new_empty(*entries, num_heads, total_q, dtype=torch.float32)
    config = TRITON_STREAMED
    if new.numel():
        _share_kernel[(triton.cdiv(new.numel(), config.tile_m),)](
            make_contiguous(residual), make_contiguous(dout), make_contiguous(dlse), new,
            num_heads, total_q, new.numel(),
            HEAD_DIM_V=head_dim_v, PAD_DIM_V=padded(head_dim_v), TILE_M=config.tile_m,
            **launch_options(config),
        )  # fmt: skip
    return new
