"""Layers of experts in Triton: tokens sorted by expert, two grouped products, one sum a token.

    group_kernel    experts of tokens -> rows sorted by expert, tiles     a program an expert
    up_kernel       x[token of row] @ gate.T, @ up.T (+ bias)             a program TILE_M rows of
                      -> activation(gate) * up                            an expert, TILE_N columns
    down_kernel     that @ down.T (+ bias) -> row of (token, choice)      the same
    combine_kernel  weight[0] row[0] + weight[1] row[1] + ... (+ shared)  a program TILE of a token

    rows sorted   e0 e0 e0 e0 e0 | e2 e2 | e3        TILE_M = 4: expert 0 has two tiles, expert 1
    tiles         [0: 0..4] [0: 4..5] [2: 5..7] [3: 7..8] [-1] none; a program of the entry -1 ends

Nothing waits for the host. How many rows each expert has stays on the device, and the grid has as
many tiles as the rows can need at most, so a CUDA graph can hold the layer. A tile has rows of one
expert: its weights are read once for all of them. The first product gathers the rows of x by
token, and gate and up stay in registers. No sum is split over programs, and there are no atomics:
results do not depend on the order of programs.

Sums are in fp32. Values are rounded where torch's products would store a tensor: gate and up before
the activation, a row of the second product before its weight. A bias is added before this
rounding, which torch's grouped product does in bf16 only afterwards, with a rounding of its own.

Worked shape: 3 tokens of 48, 5 experts, 2 each, bf16: 6 rows, TILE_M = 16, at most 5 tiles. Not an
attention kernel: no teaching version; onchip/models/experts.py has the definitions in torch.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onchip.core.device import device_info
from onchip.kernels.llm.pointwise import activate_fp32, as_rows, clamped_swiglu_fp32
from onchip.kernels.runtime.launcher import CachedLauncher, on_device
from onchip.kernels.tiles import (
    EXPERT_GROUP,
    TRITON_COMBINE,
    TRITON_GROUP_ROWS,
    ExpertTile,
    TritonConfig,
    expert_tile,
    expert_tile_rows,
)
from onchip.kernels.triton.decode import machine
from onchip.kernels.triton.launch import dependent_options
from onchip.kernels.triton.tile import dot, round_to


class RowTiles(NamedTuple):
    """The rows of tokens sorted by expert, in tiles of at most tile_m rows of one expert. choices:
    of each row, token * per_token + i if it is for the i-th expert of that token, int32 (rows,);
    rows of an expert are in the order of their tokens. tiles: the expert of each tile, its first
    row, and the row after its last; the expert -1: no tile. int32 (3, most tiles).
    """

    choices: Tensor
    tiles: Tensor
    per_token: int
    num_experts: int
    tile_m: int

    @property
    def num_tiles(self) -> int:
        """The most tiles that so many rows can have."""
        return self.tiles.shape[1]


@triton.jit(do_not_specialize=("num_rows", "num_tiles"))
def group_kernel(
    experts_ptr, choices_ptr, tiles_ptr, stride, num_rows, num_tiles,
    PER_TOKEN: tl.constexpr, NUM_EXPERTS: tl.constexpr, PAD: tl.constexpr, TILE_M: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The rows and tiles of one expert. Every program counts the rows of all experts, so that none
    waits for another.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert, numbers, lanes = tl.program_id(0), tl.arange(0, PAD), tl.arange(0, CHUNK)
    counts = tl.zeros([PAD], tl.int32)
    for row in range(0, num_rows, CHUNK):
        chunk = _load_experts(experts_ptr, stride, row + lanes, num_rows, PER_TOKEN, NUM_EXPERTS)
        counts += tl.histogram(chunk, PAD)
    first = tl.sum(tl.where(numbers < expert, counts, 0), 0)
    stop = tl.sum(tl.where(numbers <= expert, counts, 0), 0)
    counts = tl.cdiv(counts, TILE_M)  # tiles
    tile = tl.sum(tl.where(numbers < expert, counts, 0), 0)
    tile_stop = tl.sum(tl.where(numbers <= expert, counts, 0), 0)
    is_last = expert == NUM_EXPERTS - 1
    entry_stop = tl.where(is_last, num_tiles, tile_stop)  # the last one fills the list
    for t in range(tile, entry_stop, CHUNK):
        entry = t + lanes
        inside, begin = entry < entry_stop, first + (entry - tile) * TILE_M
        tl.store(tiles_ptr + entry, tl.where(entry < tile_stop, expert, -1), mask=inside)
        tl.store(tiles_ptr + num_tiles + entry, begin, mask=inside)
        tl.store(tiles_ptr + 2 * num_tiles + entry, tl.minimum(begin + TILE_M, stop), mask=inside)
    for row in range(0, num_rows, CHUNK):
        chunk = _load_experts(experts_ptr, stride, row + lanes, num_rows, PER_TOKEN, NUM_EXPERTS)
        is_own = (chunk == expert).to(tl.int32)
        at = first + tl.cumsum(is_own, 0) - is_own
        tl.store(choices_ptr + at, row + lanes, mask=is_own > 0)
        first += tl.sum(is_own, 0)


@triton.jit
def _load_experts(ptr, stride, rows, num_rows, PER_TOKEN: tl.constexpr, NUM_EXPERTS: tl.constexpr):
    """int32; NUM_EXPERTS, which is none, past the last row."""
    at = ptr + (rows // PER_TOKEN).to(tl.int64) * stride + rows % PER_TOKEN
    return tl.load(at, mask=rows < num_rows, other=NUM_EXPERTS).to(tl.int32)


@triton.jit(do_not_specialize=("num_tiles",))
def up_kernel(
    x_ptr, weight_ptr, bias_ptr, choices_ptr, tiles_ptr, out_ptr, num_tiles, limit, alpha,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, PER_TOKEN: tl.constexpr, ACTIVATION: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """activation(gate) * up, (rows, COLUMNS): a tile of rows, TILE_N columns. limit, alpha: of
    clamped_swiglu.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tile, column = _locate(num_tiles, tl.cdiv(COLUMNS, TILE_N), GROUP)
    expert = tl.load(tiles_ptr + tile)
    if expert < 0:
        return
    first, stop = tl.load(tiles_ptr + num_tiles + tile), tl.load(tiles_ptr + 2 * num_tiles + tile)
    row, cols = first + tl.arange(0, TILE_M), tl.arange(0, TILE_K)
    # Rows and columns past the end read the last one, and are not stored.
    token = tl.load(choices_ptr + tl.minimum(row, stop - 1)) // PER_TOKEN
    x_ptr += token.to(tl.int64)[:, None] * WIDTH
    column = column * TILE_N + tl.arange(0, TILE_N)
    gate_row = expert.to(tl.int64) * (2 * COLUMNS) + tl.minimum(column, COLUMNS - 1)
    gate_ptr = weight_ptr + gate_row[:, None] * WIDTH
    up_ptr = gate_ptr + COLUMNS * WIDTH
    gate = tl.zeros([TILE_M, TILE_N], tl.float32)
    up = tl.zeros([TILE_M, TILE_N], tl.float32)
    for k in range(0, WIDTH, TILE_K):
        x = _load_columns(x_ptr, k + cols, WIDTH, TILE_K)
        gate = dot(x, tl.trans(_load_columns(gate_ptr, k + cols, WIDTH, TILE_K)), gate)
        up = dot(x, tl.trans(_load_columns(up_ptr, k + cols, WIDTH, TILE_K)), up)
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + gate_row).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + gate_row + COLUMNS).to(tl.float32)[None, :]
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    gate, up = round_to(gate, DTYPE).to(tl.float32), round_to(up, DTYPE).to(tl.float32)
    if ACTIVATION == "clamped_swiglu":
        out = clamped_swiglu_fp32(gate, up, limit, alpha)
    else:
        out = activate_fp32(gate, ACTIVATION) * up
    cells = out_ptr + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(cells, round_to(out, DTYPE), mask=(row < stop)[:, None] & (column < COLUMNS)[None, :])


@triton.jit(do_not_specialize=("num_tiles",))
def down_kernel(
    x_ptr, weight_ptr, bias_ptr, choices_ptr, tiles_ptr, out_ptr, num_tiles,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    TILE_K: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x @ weight.T + bias of a tile of sorted rows, TILE_N columns; stored in the order of
    choices.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tile, column = _locate(num_tiles, tl.cdiv(COLUMNS, TILE_N), GROUP)
    expert = tl.load(tiles_ptr + tile)
    if expert < 0:
        return
    first, stop = tl.load(tiles_ptr + num_tiles + tile), tl.load(tiles_ptr + 2 * num_tiles + tile)
    row, cols = first + tl.arange(0, TILE_M), tl.arange(0, TILE_K)
    inside, last = row < stop, tl.minimum(row, stop - 1)
    choice = tl.load(choices_ptr + last)
    x_ptr += last.to(tl.int64)[:, None] * WIDTH
    column = column * TILE_N + tl.arange(0, TILE_N)
    weight_row = expert.to(tl.int64) * COLUMNS + tl.minimum(column, COLUMNS - 1)
    weight_ptr += weight_row[:, None] * WIDTH
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    for k in range(0, WIDTH, TILE_K):
        x = _load_columns(x_ptr, k + cols, WIDTH, TILE_K)
        acc = dot(x, tl.trans(_load_columns(weight_ptr, k + cols, WIDTH, TILE_K)), acc)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + weight_row).to(tl.float32)[None, :]
    cells = out_ptr + choice.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    out = round_to(acc, out_ptr.dtype.element_ty)
    tl.store(cells, out, mask=inside[:, None] & (column < COLUMNS)[None, :])


@triton.jit
def _locate(num_tiles, column_tiles, GROUP: tl.constexpr):
    """(tile of rows, tile of columns) of a program. Programs of GROUP tiles of rows that read the
    same weights are neighbours, and share them in L2.
    """
    pid, per_group = tl.program_id(0), GROUP * column_tiles
    first = pid // per_group * GROUP
    height = tl.minimum(num_tiles - first, GROUP)
    return first + pid % per_group % height, pid % per_group // height


@triton.jit
def _load_columns(ptr, cols, WIDTH: tl.constexpr, TILE_K: tl.constexpr):
    """Zeros from WIDTH on."""
    if WIDTH % TILE_K == 0:
        x = tl.load(ptr + cols[None, :])
    else:
        x = tl.load(ptr + cols[None, :], mask=(cols < WIDTH)[None, :], other=0.0)
    return x


@triton.jit
def combine_kernel(
    rows_ptr, weights_ptr, shared_ptr, out_ptr,
    WIDTH: tl.constexpr, PER_TOKEN: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """TILE elements of a token: the weighted sum of its rows from its best expert to its last, in
    fp32 and rounded once; then shared is added.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = cols < WIDTH
    rows_ptr += token * (PER_TOKEN * WIDTH) + cols
    acc = tl.zeros([TILE], tl.float32)
    for i in tl.static_range(PER_TOKEN):  # pyright: ignore[reportGeneralTypeIssues]
        row = tl.load(rows_ptr + i * WIDTH, mask=inside, other=0.0).to(tl.float32)
        acc += tl.load(weights_ptr + token * PER_TOKEN + i) * row
    out = round_to(acc, out_ptr.dtype.element_ty)
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + token * WIDTH + cols, mask=inside, other=0.0)
        out = round_to(out.to(tl.float32) + shared.to(tl.float32), out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * WIDTH + cols, out, mask=inside)


_group_kernel = CachedLauncher(group_kernel)
_up_kernel = CachedLauncher(up_kernel)
_down_kernel = CachedLauncher(down_kernel)
_combine_kernel = CachedLauncher(combine_kernel)


def group_rows(experts: Tensor, num_experts: int, itemsize: int) -> RowTiles:
    """The rows of these experts, integers (tokens, per_token), in tiles for elements of so many
    bytes.
    """
    experts = as_rows(experts)
    rows, per_token = experts.numel(), experts.shape[1]
    tile_m = expert_tile_rows(rows, num_experts, itemsize)
    used = min(rows, num_experts)  # experts with rows, if each has as few as possible
    num_tiles = used + (rows - used) // tile_m
    choices = torch.empty(rows, dtype=torch.int32, device=experts.device)
    tiles = torch.empty((3, num_tiles), dtype=torch.int32, device=experts.device)
    if rows:
        pad = triton.next_power_of_2(num_experts + 1)
        with on_device(experts):
            _group_kernel[(num_experts,)](
                experts, choices, tiles, experts.stride(0), rows, num_tiles,
                per_token, num_experts, pad, tile_m, TRITON_GROUP_ROWS.tile_n,
                **_options(TRITON_GROUP_ROWS, experts),
            )  # fmt: skip
    return RowTiles(choices, tiles, per_token, num_experts, tile_m)


def up(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tiles: RowTiles,
    activation: str,
    swiglu: tuple[float, float] | None = None,
) -> Tensor:
    """activation(gate) * up of the sorted rows of x (tokens, width), (rows, inner). weight
    (num_experts * 2 inner, width) and bias hold gate, then up, of each expert. swiglu: (limit,
    alpha) of a clamped SwiGLU in place of the activation. weight and bias are contiguous.
    """
    x = x.contiguous()
    width, columns = x.shape[1], weight.shape[0] // (2 * tiles.num_experts)
    out = torch.empty((len(tiles.choices), columns), dtype=x.dtype, device=x.device)
    if out.numel():
        name = activation if swiglu is None else "clamped_swiglu"
        limits = (0.0, 0.0) if swiglu is None else tuple(map(float, swiglu))
        tile = _tile("up", tiles, columns, x)
        with on_device(x):
            _up_kernel[(tiles.num_tiles * triton.cdiv(columns, tile.tile_n),)](
                x, weight, bias, tiles.choices, tiles.tiles, out, tiles.num_tiles, *limits,
                width, columns, tiles.per_token, name, *_sizes(tiles, tile),
                **_options(tile.config, x),
            )  # fmt: skip
    return out


def down(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tiles: RowTiles,
    weights: Tensor,
    shared: Tensor | None = None,
) -> Tensor:
    """(tokens, width): the rows @ weight.T + bias of each token, weighted and added, plus shared.
    rows (rows, inner) of `up`, weight (num_experts * width, inner), weights fp32 (tokens,
    per_token). weight and bias are contiguous.
    """
    rows, weights = rows.contiguous(), weights.contiguous()
    shared = None if shared is None else shared.contiguous()
    inner, width = rows.shape[1], weight.shape[0] // tiles.num_experts
    each = torch.empty((len(rows), width), dtype=rows.dtype, device=rows.device)
    out = torch.empty((len(weights), width), dtype=rows.dtype, device=rows.device)
    if out.numel():
        tile, block = _tile("down", tiles, width, rows), TRITON_COMBINE.tile_n
        with on_device(rows):
            _down_kernel[(tiles.num_tiles * triton.cdiv(width, tile.tile_n),)](
                rows, weight, bias, tiles.choices, tiles.tiles, each, tiles.num_tiles,
                inner, width, *_sizes(tiles, tile), **_options(tile.config, rows),
            )  # fmt: skip
            _combine_kernel[(len(out), triton.cdiv(width, block))](
                each, weights, shared, out, width, tiles.per_token, block,
                **_options(TRITON_COMBINE, rows),
            )  # fmt: skip
    return out


def _tile(kernel: str, tiles: RowTiles, columns: int, x: Tensor) -> ExpertTile:
    capability, processors = device_info(x.device).capability, machine(x.device).processors
    sizes = tiles.tile_m, tiles.num_tiles, columns, x.shape[1]
    return expert_tile(kernel, *sizes, x.element_size(), capability, processors)


def _sizes(tiles: RowTiles, tile: ExpertTile) -> tuple[int, ...]:
    return tiles.tile_m, tile.tile_n, tile.tile_k, EXPERT_GROUP


def _options(config: TritonConfig, x: Tensor) -> dict:
    return dependent_options(config, device_info(x.device).capability)
