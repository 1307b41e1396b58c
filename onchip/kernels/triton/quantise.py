"""Quantise q, k and v to 8 bits for the Hopper forward, as onchip/quant/recipes.py defines it.

    k -> sums_kernel -> means_kernel -> mean of the keys, rotated
    q -> rotate_kernel -> q M, quantised; shift = softmax_scale * q.mean     blocks of 128 tokens
    k -> rotate_kernel -> k M - mean, quantised
    v -> values_kernel -> transposed, quantised

    sequence of 300 tokens:   | block 0: 128 | block 1: 128 | block 2: 44 + 84 zeros |

Outputs are laid out for TMA, in blocks of 128 tokens of one head and one sequence. Blocks are whole
tiles, zeros past the end: no tile ever reads a neighbour's numbers. Blocks of a head are
contiguous. In packed calls a sequence begins at block first // 128 + its index, which leaves enough
blocks for each sequence and needs no sum over lengths.

- q, k (128, PAD): rotated, keys minus the mean of their sequence; e4m3 with one scale per block, or
  int8 with one per token.
- v (PAD, 128): e4m3 with one scale per block; every 16 keys are permuted (`key_of`).

Worked shape: batch 1, one head, 300 tokens: 3 blocks each of q, k and v; 1 part of the key sums.
The kernel that reads them is hopper/forward_8bit.py; its loop is taught in examples/versions/v3.py.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.core.problem import Problem, Tensors
from onchip.kernels.runtime.launcher import CachedLauncher
from onchip.kernels.tiles import TRITON_ROTATE, TRITON_SUMS, TRITON_TRANSPOSE
from onchip.kernels.triton.kv8 import compute_scale, quantise
from onchip.kernels.triton.launch import head_strides, launch_options, padded
from onchip.kernels.triton.tile import LOG2E, dot, load_clamped
from onchip.quant import rotation
from onchip.quant.recipes import RECIPES
from onchip.quant.schemes import Scheme

BLOCK = 128  # tokens that share a scale
SPANS = 64  # at most so many parts of the sum over keys
SHORTEST = 1024  # at least so many keys per part
# One program processes several blocks of q or k in a row, loading the next while it computes, as
# long as there are PROGRAMS programs: four for each processor of an H200.
PROGRAMS, LONGEST_STRIP = 528, 8
# The accumulator is in units of v's scale, and moves from block to block by the ratio of their
# scales, which must stay in fp32's range. Blocks with values below this, 2^-61, lose some bits.
LEAST = tl.constexpr(448 * 2.0**-70)

_BLOCK, _SPANS = tl.constexpr(BLOCK), tl.constexpr(SPANS)
_LENGTHS = ("seqlen", "total", "tiles", "strip", "blocks", "span", "spans", "group_size")


class QuantisedBlocks(NamedTuple):
    """Values (heads * blocks * 128, pad), for v (heads * blocks * pad, 128), and their scales, one
    per block or per token. count: blocks of a head, over all sequences of a packed call.
    """

    values: Tensor
    scales: Tensor
    count: int


class QuantisedOperands(NamedTuple):
    """pairs (blocks, 2): the scales of each block of k and of v, if scales are per block."""

    q: QuantisedBlocks
    k: QuantisedBlocks
    v: QuantisedBlocks | None
    pairs: Tensor


@triton.jit
def _sequence(cu_ptr, b, seqlen, total):
    """(batch entry, first token, tokens) of sequence b."""
    if cu_ptr is None:
        return b, 0, seqlen
    else:
        first, length = load_clamped(cu_ptr + b, total)
        return 0, first, length


@triton.jit
def _first_block(cu_ptr, plane, b, head, first, blocks):
    """The first block of a sequence and head; a head has `blocks` of them."""
    if cu_ptr is None:
        return plane * blocks
    else:
        return head * blocks + first // _BLOCK + b


@triton.jit
def _rows(ptr, entry, token, head, stride_b, stride_s, stride_h):
    """Pointers to rows of one head."""
    place = tl.cast(entry, tl.int64) * stride_b + tl.cast(head, tl.int64) * stride_h
    return ptr + place + token.to(tl.int64) * stride_s


@triton.jit
def _load(rows, exist, DIM: tl.constexpr, PAD: tl.constexpr):
    dims = tl.arange(0, PAD)
    inside = exist[:, None] & (dims < DIM)[None, :]
    return tl.load(rows[:, None] + dims[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=_LENGTHS)
def sums_kernel(
    k_ptr, sums_ptr, cu_ptr, stride_b, stride_s, stride_h, seqlen, total, num_heads, span, spans,
    DIM: tl.constexpr, PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The sum of `span` keys of one head."""
    part, plane = tl.program_id(0) % spans, tl.program_id(0) // spans
    b, head = plane // num_heads, plane % num_heads
    entry, first, length = _sequence(cu_ptr, b, seqlen, total)
    start, stop = part * span, tl.minimum(part * span + span, length)
    tokens = tl.arange(0, TILE)
    acc = tl.zeros([TILE, PAD], tl.float32)
    for t in tl.range(start, stop, TILE, num_stages=4):  # otherwise loads would not be pipelined
        rows = _rows(k_ptr, entry, first + t + tokens, head, stride_b, stride_s, stride_h)
        acc += _load(rows, t + tokens < stop, DIM, PAD).to(tl.float32)
    at = (plane.to(tl.int64) * spans + part) * PAD
    tl.store(sums_ptr + at + tl.arange(0, PAD), tl.sum(acc, 0))


@triton.jit(do_not_specialize=_LENGTHS)
def means_kernel(
    sums_ptr, means_ptr, cu_ptr, matrix_ptr, norms_ptr, seqlen, total, num_heads, span, spans,
    PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The mean of all keys of one sequence and head, rotated."""
    plane = tl.program_id(0)
    _, _, length = _sequence(cu_ptr, plane // num_heads, seqlen, total)
    dims, acc = tl.arange(0, PAD), tl.zeros([PAD], tl.float32)
    sums_ptr += plane.to(tl.int64) * spans * PAD
    part = tl.arange(0, _SPANS)
    exist = part < tl.cdiv(length, span)
    for d in range(0, PAD, TILE):
        chunk = d + tl.arange(0, TILE)
        sums = tl.load(
            sums_ptr + part[:, None] * PAD + chunk[None, :], mask=exist[:, None], other=0.0
        )
        m = tl.load(matrix_ptr + chunk[:, None] * PAD + dims[None, :]).to(tl.float32)
        acc += tl.sum(tl.sum(sums, 0)[:, None] * m, 0)
    mean = acc * tl.load(norms_ptr + dims) / tl.maximum(length, 1).to(tl.float32)
    tl.store(means_ptr + plane.to(tl.int64) * PAD + dims, mean)


@triton.jit
def _scale(x, scale_ptr, DTYPE: tl.constexpr, LEAST_MAX: tl.constexpr):
    """The scale of a block, also stored. The largest element counts for at least LEAST_MAX.
    Magnitudes have the same order as integers, and inf and NaN are the largest of them.
    """
    bits: tl.constexpr = tl.int32 if x.dtype == tl.float32 else tl.int16
    top = tl.max(tl.abs(x).to(bits, bitcast=True)).to(bits)
    largest = top.to(x.dtype, bitcast=True).to(tl.float32)
    scale = compute_scale(tl.maximum(largest, LEAST_MAX), largest * 0.0, DTYPE)
    tl.store(scale_ptr, scale)
    return scale


@triton.jit
def _store_values(values_ptr, x, at):
    rows: tl.constexpr = x.shape[0]
    cols: tl.constexpr = x.shape[1]
    places = tl.arange(0, rows)[:, None] * cols + tl.arange(0, cols)[None, :]
    tl.store(values_ptr + tl.cast(at, tl.int64) * (rows * cols) + places, x)


@triton.jit
def _strip_of(tiles, strip):
    """(plane, first block) of this program: `strip` blocks of one head."""
    strips = tl.cdiv(tiles, strip)
    return tl.program_id(0) // strips, tl.program_id(0) % strips * strip


@triton.jit(do_not_specialize=_LENGTHS)
def rotate_kernel(
    x_ptr, values_ptr, scales_ptr, means_ptr, shift_ptr, cu_ptr, matrix_ptr, norms_ptr,
    stride_b, stride_s, stride_h, seqlen, total, num_heads, group_size, tiles, strip, blocks,
    softmax_scale, KEYS: tl.constexpr, PER_TOKEN: tl.constexpr, DIM: tl.constexpr,
    PAD: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Blocks of 128 tokens of one head of k (KEYS) or of q. q also gives shift, laid out like lse:
    softmax_scale * q.mean in log2 units, the change of lse by subtracting the mean from the keys.
    """
    plane, start = _strip_of(tiles, strip)
    b, head = plane // num_heads, plane % num_heads
    entry, first, length = _sequence(cu_ptr, b, seqlen, total)
    dims = tl.arange(0, PAD)
    kind: tl.constexpr = values_ptr.dtype.element_ty
    m = tl.load(matrix_ptr + dims[:, None] * PAD + dims[None, :])
    means_ptr += (plane // group_size).to(tl.int64) * PAD
    at = _first_block(cu_ptr, plane, b, head, first, blocks)
    for block in range(start, tl.minimum(start + strip, tl.cdiv(length, _BLOCK))):
        tokens = block * _BLOCK + tl.arange(0, _BLOCK)
        exist = tokens < length
        rows = _rows(x_ptr, entry, first + tokens, head, stride_b, stride_s, stride_h)
        x = dot(_load(rows, exist, DIM, PAD), m, None)
        x *= tl.load(norms_ptr + dims)[None, :]  # reloaded per block: it would not fit registers
        mean = tl.load(means_ptr + dims)
        if KEYS:
            x = tl.where(exist[:, None], x - mean[None, :], 0.0)
        else:
            shift = tl.sum(x * mean[None, :], 1) * softmax_scale * LOG2E
            place = tl.cast(entry, tl.int64) * num_heads + head
            tl.store(shift_ptr + place * total + first + tokens, shift, mask=exist)
        if PER_TOKEN:
            scale = compute_scale(tl.max(tl.abs(x), 1), tl.sum(x * 0.0, 1), kind)
            tl.store(scales_ptr + (at + block) * _BLOCK + tl.arange(0, _BLOCK), scale)
            _store_values(values_ptr, quantise(x, scale[:, None], kind), at + block)
        else:
            scale = _scale(x, scales_ptr + (at + block) * APART, kind, 0.0)
            _store_values(values_ptr, quantise(x, scale, kind), at + block)


@triton.jit
def key_of(place):
    """The key at a column of v. In an accumulator of scores a thread holds, of every 16 columns,
    two and then two more 8 columns later; in an 8-bit operand it holds four adjacent ones.
    """
    return (place & -16) | (place & 1) | ((place & 2) << 2) | ((place & 12) >> 1)


@triton.jit(do_not_specialize=_LENGTHS)
def values_kernel(
    v_ptr, values_ptr, scales_ptr, cu_ptr, stride_b, stride_s, stride_h, seqlen, total, num_heads,
    tiles, blocks, DIM: tl.constexpr, PAD: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """128 tokens of one head of v, transposed."""
    block, plane = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, head = plane // num_heads, plane % num_heads
    entry, first, length = _sequence(cu_ptr, b, seqlen, total)
    if block * _BLOCK >= length:
        return
    tokens = block * _BLOCK + key_of(tl.arange(0, _BLOCK))
    rows = _rows(v_ptr, entry, first + tokens, head, stride_b, stride_s, stride_h)
    x = _load(rows, tokens < length, DIM, PAD)
    at = _first_block(cu_ptr, plane, b, head, first, blocks) + block
    kind: tl.constexpr = values_ptr.dtype.element_ty
    scale = _scale(x, scales_ptr + at * APART, kind, LEAST)
    _store_values(values_ptr, tl.trans(quantise(x.to(tl.float32), scale, kind)), at)


_sums_kernel = CachedLauncher(sums_kernel)
_means_kernel = CachedLauncher(means_kernel)
_rotate_kernel = CachedLauncher(rotate_kernel)
_values_kernel = CachedLauncher(values_kernel)


class OperandSizes(NamedTuple):
    """Sizes of the queries or the keys of a call, and their cu_seqlens."""

    seqlen: int
    total: int
    heads: int
    cu_seqlens: Tensor | None
    batch: int

    @property
    def blocks(self) -> int:
        """Blocks of a head: of one sequence of a dense call, of all sequences of a packed one."""
        if self.cu_seqlens is None:
            return triton.cdiv(self.seqlen, BLOCK)
        return self.total // BLOCK + self.batch

    @property
    def tiles(self) -> int:
        """Blocks of a head in the longest sequence."""
        return triton.cdiv(self.seqlen, BLOCK)

    @property
    def planes(self) -> int:
        return self.batch * self.heads

    @property
    def strip(self) -> int:
        """Blocks per program."""
        return min(max(1, self.tiles * self.planes // PROGRAMS), self.tiles, LONGEST_STRIP)

    @property
    def programs(self) -> int:
        return triton.cdiv(self.tiles, self.strip) * self.planes

    @property
    def all_blocks(self) -> int:
        """Blocks of all heads and sequences."""
        return self.heads * self.blocks * (self.batch if self.cu_seqlens is None else 1)

    def allocate(
        self, t: Tensor, pad: int, scheme: Scheme, scales: Tensor | None = None
    ) -> QuantisedBlocks:
        """Uninitialised blocks for t. Scales per block may already have memory (`scales`)."""
        values = t.new_empty(self.all_blocks * BLOCK * pad, dtype=scheme.format.dtype)
        if scales is None or scheme.per == "token":
            each = 1 if scheme.per == "token" else scheme.block
            scales = t.new_empty(self.all_blocks * BLOCK // each, dtype=torch.float32)
        return QuantisedBlocks(values, scales, self.blocks)


class RotationMatrix(NamedTuple):
    """matrix (pad, pad) of 1, -1 and 0, exact in 16 bits, and the factor of each of its columns:
    together `onchip.quant.rotation.matrix`.
    """

    matrix: Tensor
    norms: Tensor


@lru_cache(maxsize=64)
def get_rotation(head_dim: int, dtype: torch.dtype, device: torch.device) -> RotationMatrix:
    pad = padded_width(head_dim)
    whole = torch.zeros(pad, pad)
    whole[:head_dim, :head_dim] = rotation.matrix(head_dim)
    norms = whole.abs().amax(0)
    return RotationMatrix(whole.sign().to(device, dtype), norms.to(device))


def padded_width(head_dim: int) -> int:
    return max(64, padded(head_dim))


def prepare(problem: Problem, x: Tensors, shift: Tensor) -> QuantisedOperands:
    """q, k and v as the recipe of problem.precision has them. shift, fp32 and laid out like lse,
    receives the difference between the true lse and that of these operands, in log2 units.
    """
    recipe = RECIPES[problem.precision]
    queries = _side(problem.seqlen_q, problem.batch, x.q, x.cu_seqlens_q)
    keys = _side(problem.seqlen_k, problem.batch, x.k, x.cu_seqlens_k)
    rotation = get_rotation(problem.head_dim, x.q.dtype, x.q.device)
    mean = compute_key_means(x.k, keys, rotation)
    pairs = x.k.new_empty(keys.all_blocks, 2, dtype=torch.float32)
    q = queries.allocate(x.q, len(rotation.norms), recipe.q)
    k = keys.allocate(x.k, len(rotation.norms), recipe.k, pairs[:, 0])
    rotate_operand(
        x.q, queries, q, mean, shift, rotation, problem.softmax_scale, problem.group_size
    )
    rotate_operand(x.k, keys, k, mean, None, rotation)
    v = None if recipe.v is None else transpose_values(x.v, keys, recipe.v, pairs[:, 1])
    return QuantisedOperands(q, k, v, pairs)


def _side(seqlen: int, batch: int, t: Tensor, cu_seqlens: Tensor | None) -> OperandSizes:
    total = seqlen if cu_seqlens is None else t.shape[0]
    return OperandSizes(seqlen, total, t.shape[-2], cu_seqlens, batch)


def compute_key_means(k: Tensor, side: OperandSizes, rotation: RotationMatrix) -> Tensor:
    """The means of the keys, rotated, fp32 (batch * heads, pad)."""
    pad = len(rotation.norms)
    span = max(SHORTEST, triton.next_power_of_2(triton.cdiv(side.seqlen, SPANS)))
    spans = triton.cdiv(side.seqlen, span)
    sums = k.new_empty(side.planes * spans * pad, dtype=torch.float32)
    means = k.new_empty(side.planes * pad, dtype=torch.float32)
    lengths = side.seqlen, side.total, side.heads, span, spans
    dims = {"PAD": pad, "TILE": TRITON_SUMS.tile_n} | launch_options(TRITON_SUMS)
    _sums_kernel[(spans * side.planes,)](
        k, sums, side.cu_seqlens, *head_strides(k), *lengths, DIM=k.shape[-1], **dims
    )
    _means_kernel[(side.planes,)](sums, means, side.cu_seqlens, *rotation, *lengths, **dims)
    return means


def rotate_operand(
    t: Tensor, side: OperandSizes, blocks: QuantisedBlocks, mean: Tensor, shift: Tensor | None,
    rotation: RotationMatrix,
    softmax_scale: float = 0.0, group_size: int = 1,
) -> None:  # fmt: skip
    """Fill blocks with q and `shift`, or without a shift with k."""
    _rotate_kernel[(side.programs,)](
        t, blocks.values, blocks.scales, mean, mean if shift is None else shift, side.cu_seqlens,
        *rotation, *head_strides(t), side.seqlen, side.total, side.heads, group_size, side.tiles,
        side.strip, blocks.count,
        softmax_scale,
        KEYS=shift is None, PER_TOKEN=blocks.values.dtype == torch.int8, DIM=t.shape[-1],
        PAD=len(rotation.norms), APART=blocks.scales.stride(0),
        **launch_options(TRITON_ROTATE[len(rotation.norms)]),
    )  # fmt: skip


def transpose_values(
    v: Tensor, side: OperandSizes, scheme: Scheme, scales: Tensor
) -> QuantisedBlocks:
    pad = padded_width(v.shape[-1])
    blocks = side.allocate(v, pad, scheme, scales)
    _values_kernel[(side.tiles * side.planes,)](
        v, blocks.values, blocks.scales, side.cu_seqlens, *head_strides(v), side.seqlen, side.total,
        side.heads, side.tiles, blocks.count,
        DIM=v.shape[-1], PAD=pad, APART=scales.stride(0), **launch_options(TRITON_TRANSPOSE[pad]),
    )  # fmt: skip
    return blocks
