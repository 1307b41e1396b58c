"""Matrix products whose bits do not depend on the number of rows: out = x @ weight.T + bias.

    a program owns TILE_M rows of x and TILE_N rows of the weight, all of their columns

      acc = 0
      for k in 0, TILE_K, 2 TILE_K, ...      in this order, whatever the tile
        acc += x[TILE_M, k : k + TILE_K] @ weight[TILE_N, k : k + TILE_K].T
      out = acc (+ bias), rounded once

No sum is split over programs. An element of out is a chain of tensor-core products over 16 columns
each, from column 0 on (fp32: of multiply-adds). The tile decides how many elements an instruction
computes, not the order of this chain; on a device where an instruction of another shape sums in
another order, models/order_check.py finds other bits. TILE_M is 64 at least, because fewer rows
would be another instruction on Hopper: missing rows are zeros that are not read from memory.

Worked shape: one row, width 1,024, weight of 4,096 rows, bf16, 132 processors: 128 programs of 64 x
32, of which one row exists; 8 iterations of 128 columns. Not an attention kernel: no teaching
version; onchip/models/reproducible.py has the definition in torch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onchip.core.device import device_info
from onchip.kernels.llm.pointwise import as_rows
from onchip.kernels.runtime.launcher import CachedLauncher, on_device
from onchip.kernels.tiles import (
    FIXED_ORDER_GROUP,
    FixedOrderTile,
    choose_fixed_order_tile,
    fixed_order_tiles,
)
from onchip.kernels.triton.decode import machine
from onchip.kernels.triton.launch import dependent_options
from onchip.kernels.triton.tile import dot, round_to


@triton.jit(do_not_specialize=("num_rows",))
def fixed_order_product_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, stride_x, stride_weight, num_rows, num_columns, width,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, RAGGED: tl.constexpr,
    GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """TILE_M rows and TILE_N columns of out. RAGGED: TILE_K does not divide width."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    m0, n0 = locate_tile(num_rows, num_columns, TILE_M, TILE_N, GROUP)
    row, column = m0 + tl.arange(0, TILE_M), n0 + tl.arange(0, TILE_N)
    cols = tl.arange(0, TILE_K)
    inside = (row < num_rows)[:, None]
    # Weight rows past the end read the last one: a mask would be one more operand of each load.
    weight_row = tl.minimum(column, num_columns - 1).to(tl.int64)
    x_ptr += row.to(tl.int64)[:, None] * stride_x + cols[None, :]
    weight_ptr += weight_row[:, None] * stride_weight + cols[None, :]
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    for k in range(0, width, TILE_K):
        if RAGGED:
            exist = (k + cols < width)[None, :]
            x = tl.load(x_ptr, mask=inside & exist, other=0.0)
            w = tl.load(weight_ptr, mask=exist, other=0.0)
        else:
            x = tl.load(x_ptr, mask=inside, other=0.0)
            w = tl.load(weight_ptr)
        acc = dot(x, tl.trans(w), acc)
        x_ptr += TILE_K
        weight_ptr += TILE_K
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + weight_row).to(tl.float32)[None, :]
    cells = out_ptr + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    out = round_to(acc, out_ptr.dtype.element_ty)
    tl.store(cells, out, mask=inside & (column < num_columns)[None, :])


@triton.jit
def locate_tile(
    num_rows, num_columns, TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP: tl.constexpr
):
    """(first row, first column) of a program's tile: GROUP tiles of rows, then the next column."""
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(num_rows, TILE_M), tl.cdiv(num_columns, TILE_N)
    first = pid // (GROUP * tiles_n) * GROUP
    group = tl.minimum(tiles_m - first, GROUP)
    inner = pid % (GROUP * tiles_n)
    return (first + inner % group) * TILE_M, inner // group * TILE_N


_product_kernel = CachedLauncher(fixed_order_product_kernel)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, (..., columns), rounded once; x (..., width), weight (columns, width),
    bias (columns,).
    """
    return multiply_by(choose_tile(x, weight), x, weight, bias)


def multiply_by(
    tile: FixedOrderTile, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`multiply` by a given tile."""
    if x.shape[-1] != weight.shape[1]:  # otherwise the kernel would read outside of the rows
        raise ValueError(f"x {tuple(x.shape)} does not fit a weight {tuple(weight.shape)}")
    a, w = as_rows(x), as_rows(weight)
    (num_rows, width), num_columns = a.shape, w.shape[0]
    out = torch.empty((*x.shape[:-1], num_columns), dtype=x.dtype, device=x.device)
    if out.numel():
        tiles = triton.cdiv(num_rows, tile.tile_m) * triton.cdiv(num_columns, tile.tile_n)
        options = dependent_options(tile.config, device_info(x.device).capability)
        with on_device(x):
            _product_kernel[(tiles,)](
                a, w, bias, out, a.stride(0), w.stride(0), num_rows, num_columns,
                width, tile.tile_m, tile.tile_n, tile.tile_k, width % tile.tile_k != 0,
                FIXED_ORDER_GROUP, **options,
            )  # fmt: skip
    return out


def choose_tile(x: Tensor, weight: Tensor) -> FixedOrderTile:
    tiles, rows = find_tiles(x), x.shape[:-1].numel()
    return choose_fixed_order_tile(tiles, rows, weight.shape[0], machine(x.device).processors)


def find_tiles(x: Tensor) -> tuple[FixedOrderTile, ...]:
    """All tiles that `multiply` may choose for rows like x. Interpreted: one, because a library's
    product of another shape has other bits.
    """
    device = device_info(x.device)
    tiles = fixed_order_tiles(x.element_size(), device.shared_bytes)
    return tiles[-1:] if device.type == "cpu" else tiles
