"""Matrix products of few rows, out = f(x) @ weight.T, in Triton: most of a step of decoding.

    a program owns TILE_N rows of the weight, all of their WIDTH columns

      weight[TILE_N, 0 : TILE_K] -> registers     does not depend on the predecessor
      norm weight, bias          -> registers
    gdc_wait                                      the predecessor is complete
      x (+ y) -> sum, RMSNorm(sum)                by every program; tile 0 stores the sum
      for each TILE_K columns:                    requests the next ones, then multiplies these
      acc (+ bias) -> out, or activation(gate) * up

The time of such a product is that of reading the weight: what counts are the bytes in flight. A
program therefore requests its first tile while its predecessor still runs (PDL), and every tile
before it multiplies the one before. No sum is split over programs, because 8 columns for each are
enough programs for a GPU; so there is no second launch, and the order of every sum is fixed. Inside
a program the columns are dealt to the warps, STEPS parts of SPAN columns, as a batch of
tensor-core products whose results are added.

Values are rounded where the unfused code would store a tensor: the residual sum, the normed row,
gate and up before the activation. The weight, norm weight and bias must not be written by the
launch just before: they are read before it is waited for.

Worked shape: one row, hidden 1,024, 16 query and 8 kv heads of 128, bf16: the 4,096 rows of qkv are
128 programs of 32, 64 kB of weights each in 8 warps; each program reads x, y and the norm weight (6
kB). Not an attention kernel: no teaching version; onchip/models/products.py has the definitions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onchip.core.device import device_info
from onchip.kernels.llm.pointwise import activate_fp32, as_rows
from onchip.kernels.runtime.launcher import CachedLauncher, on_device
from onchip.kernels.tiles import (
    PRODUCT_MOST_BYTES,
    PRODUCT_MOST_ROWS,
    PRODUCT_NORM_ELEMENTS,
    ProductTile,
    product_rows,
    product_tile,
)
from onchip.kernels.triton.decode import machine
from onchip.kernels.triton.launch import dependent_options
from onchip.kernels.triton.tile import dot, round_to


@triton.jit(do_not_specialize=("num_rows",))
def product_kernel(
    x_ptr, y_ptr, norm_ptr, weight_ptr, bias_ptr, sum_ptr, out_ptr,
    stride_x, stride_y, stride_weight, num_rows, num_columns, eps, offset,
    WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, TILE_N: tl.constexpr,
    TILE_K: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """TILE_N columns of ROWS rows of out. With an activation, rows of gate and up alternate in the
    tile, and num_columns is the number of pairs.
    """
    tile, row = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    each, cols = tl.arange(0, TILE_N), tl.arange(0, TILE_K)
    # Rows past the end read the last one: a mask of rows would be one more operand of each load.
    if ACTIVATION is None:
        weight_row = tl.minimum(tile * TILE_N + each, num_columns - 1)
    else:
        pair = tl.minimum(tile * (TILE_N // 2) + each // 2, num_columns - 1)
        weight_row = pair + each % 2 * num_columns
    weight_ptr += weight_row.to(tl.int64)[:, None, None] * stride_weight
    w = _load_weight(weight_ptr, 0, WIDTH, TILE_K, SPAN)
    norm, factor, bias = None, None, 0.0
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + weight_row).to(tl.float32)[None, :]
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + cols, mask=cols < WIDTH, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    inside, at = row < num_rows, row.to(tl.int64)
    stored = row < tl.where(tile == 0, num_rows, 0)  # rows of the sum
    x_ptr += at * stride_x
    if y_ptr is not None:
        y_ptr += at * stride_y
        sum_ptr += at * WIDTH
    x = _load_sum(x_ptr, y_ptr, sum_ptr, cols, inside, WIDTH)
    if norm_ptr is not None:
        squares = _square(x)
        for k in tl.static_range(TILE_K, WIDTH, TILE_K):  # pyright: ignore[reportGeneralTypeIssues]
            # Unrolled, without stores between: all loads are issued at once.
            squares += _square(_load_sum(x_ptr, y_ptr, sum_ptr, k + cols, inside, WIDTH))
        if y_ptr is not None:
            _store_sum(x, sum_ptr, cols, stored, WIDTH)
        factor = tl.rsqrt(tl.sum(squares, 1) / WIDTH + eps)[:, None]
        x = _normalise(x, factor, norm, offset)
    acc = tl.zeros([TILE_K // SPAN, ROWS, TILE_N], tl.float32)
    for k in range(TILE_K, WIDTH, TILE_K):
        w_next = _load_weight(weight_ptr, k, WIDTH, TILE_K, SPAN)
        acc = _multiply(x, w, acc)
        w, x = w_next, _load_sum(x_ptr, y_ptr, sum_ptr, k + cols, inside, WIDTH)
        if norm_ptr is not None:
            if y_ptr is not None:
                _store_sum(x, sum_ptr, k + cols, stored, WIDTH)
            norm = tl.load(norm_ptr + k + cols, mask=k + cols < WIDTH, other=0.0)
            x = _normalise(x, factor, norm, offset)
    out = tl.sum(_multiply(x, w, acc), 0)
    if bias_ptr is not None:
        out += bias
    out = round_to(out, out_ptr.dtype.element_ty)
    column = tile * TILE_N + each
    if ACTIVATION is not None:
        gate, up = tl.split(tl.reshape(out.to(tl.float32), [ROWS, TILE_N // 2, 2]))
        out = round_to(activate_fp32(gate, ACTIVATION) * up, out_ptr.dtype.element_ty)
        column = tile * (TILE_N // 2) + tl.arange(0, TILE_N // 2)
    cells = out_ptr + at * num_columns + column[None, :]
    tl.store(cells, out, mask=inside & (column < num_columns)[None, :])


@triton.jit
def _load_weight(ptr, k, WIDTH: tl.constexpr, TILE_K: tl.constexpr, SPAN: tl.constexpr):
    """(TILE_N, STEPS, SPAN): columns from k on, zeros from WIDTH on."""
    steps, span = tl.arange(0, TILE_K // SPAN), tl.arange(0, SPAN)
    cols = k + steps[None, :, None] * SPAN + span[None, None, :]
    if WIDTH % TILE_K == 0:
        w = tl.load(ptr + cols)
    else:
        w = tl.load(ptr + cols, mask=cols < WIDTH, other=0.0)
    return w


@triton.jit
def _load_sum(x_ptr, y_ptr, sum_ptr, cols, inside, WIDTH: tl.constexpr):
    """x + y, rounded, or x without y; zeros in rows and columns that do not exist."""
    exist = inside & (cols < WIDTH)[None, :]
    x = tl.load(x_ptr + cols[None, :], mask=exist, other=0.0)
    if y_ptr is not None:
        y = tl.load(y_ptr + cols[None, :], mask=exist, other=0.0)
        x = round_to(x.to(tl.float32) + y.to(tl.float32), sum_ptr.dtype.element_ty)
    return x


@triton.jit
def _store_sum(x, sum_ptr, cols, inside, WIDTH: tl.constexpr):
    tl.store(sum_ptr + cols[None, :], x, mask=inside & (cols < WIDTH)[None, :])


@triton.jit
def _square(x):
    x = x.to(tl.float32)
    return x * x


@triton.jit
def _normalise(x, factor, norm, offset):
    weight = offset + norm.to(tl.float32)
    return round_to(x.to(tl.float32) * factor * weight[None, :], x.dtype)


@triton.jit
def _multiply(x, w, acc):
    """acc + x (ROWS, TILE_K) times w (TILE_N, STEPS, SPAN), a product for each step."""
    ROWS: tl.constexpr = x.shape[0]
    x = tl.trans(tl.reshape(x, [ROWS, w.shape[1], w.shape[2]]), (1, 0, 2))
    return dot(x, tl.trans(w, (1, 2, 0)), acc)


_product_kernel = CachedLauncher(product_kernel)


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether these are the few rows, and a weight of the size, that the kernel is for."""
    if x.numel() > PRODUCT_MOST_ROWS * x.shape[-1] or weight.stride(-1) != 1:
        return False
    return weight.numel() * weight.element_size() <= PRODUCT_MOST_BYTES


def fuses_norm(x: Tensor) -> bool:
    """Whether every program should compute the norm of x: it takes less time than a launch."""
    return x.numel() <= PRODUCT_NORM_ELEMENTS


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, (..., columns), rounded once; x (..., width), weight (columns, width),
    whose last dimensions are contiguous.
    """
    return _launch(x, None, None, (0.0, 0.0), weight, bias, None)[1]


def norm_product(
    x: Tensor,
    y: Tensor | None,
    norm: Tensor,
    eps_offset: tuple[float, float],
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(x + y, product(rms_norm(x + y), weight, bias)); without y (x, ...). With an activation, the
    weight has rows of gate, then up, and the second result is activation(gate) * up.
    """
    return _launch(x, y, norm, eps_offset, weight, bias, activation)


def _launch(
    x: Tensor,
    y: Tensor | None,
    norm: Tensor | None,
    eps_offset: tuple[float, float],
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
) -> tuple[Tensor, Tensor]:
    a, b = as_rows(x), None if y is None else as_rows(y)
    num_rows, width = a.shape
    weight_rows = weight.shape[0]
    columns = weight_rows if activation is None else weight_rows // 2
    total = x if y is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty((*x.shape[:-1], columns), dtype=x.dtype, device=x.device)
    if out.numel():
        is_amd = device_info(x.device).type == "hip"
        rows = product_rows(num_rows, x.element_size(), is_amd)
        sizes = rows, weight_rows, width, x.element_size(), machine(x.device).processors
        tile = product_tile(*sizes, has_norm=norm is not None, is_amd=is_amd)
        grid = triton.cdiv(weight_rows, tile.tile_n), triton.cdiv(num_rows, rows)
        with on_device(x):
            _product_kernel[grid](
                a, b, norm, weight, bias, None if y is None else total, out,
                a.stride(0), 0 if b is None else b.stride(0), weight.stride(0), num_rows, columns,
                *map(float, eps_offset), width, activation, rows, tile.tile_n, tile.tile_k,
                tile.span, **_options(tile, x),
            )  # fmt: skip
    return total, out


def _options(tile: ProductTile, x: Tensor) -> dict:
    return dependent_options(tile.config, device_info(x.device).capability)
