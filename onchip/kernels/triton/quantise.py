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

Keys and values may be in pages, also in 8-bit ones: rows are then read through the page table, and
a stored value counts times the scale of its token. Their blocks are laid out like those of a dense
call with as many keys as a row of the table has slots; only blocks that exist are written.

Worked shape: batch 1, one head, 300 tokens: 3 blocks each of q, k and v; 1 part of the key sums.
The kernel that reads them is hopper/forward_8bit.py; its loop is taught in examples/versions/v3.py.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.core.backend import scale_strides
from onchip.core.problem import Problem, Tensors
from onchip.kernels.runtime.launcher import CachedLauncher
from onchip.kernels.tiles import TRITON_ROTATE, TRITON_SUMS, TRITON_TRANSPOSE
from onchip.kernels.triton.decode import PageTableRow, page_of
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
_LENGTHS = (
    *("seqlen", "total", "tiles", "strip", "blocks", "span", "spans", "group_size"),
    *("stride_table", "num_pages"),
)


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


class TokenRows(NamedTuple):
    """The rows of one sequence and head: token t is at ptr + t * stride, or with a table in slot t
    % PAGE_SIZE of its page, and its scale likewise. Without a table and scales their pointers are
    not used: Triton 3.6 returns no tuple that holds None.
    """

    ptr: tl.tensor
    stride: tl.tensor
    stride_page: tl.tensor
    table: tl.tensor
    num_pages: tl.tensor
    scales: tl.tensor
    stride_scales_page: tl.tensor
    stride_scales: tl.tensor


@triton.jit
def _sequence(cu_ptr, seqlens_ptr, b, seqlen, total):
    """(batch entry, first token, tokens) of sequence b. In pages it has at most seqlen tokens."""
    if seqlens_ptr is not None:
        return 0, 0, tl.minimum(tl.maximum(tl.load(seqlens_ptr + b), 0), seqlen)
    elif cu_ptr is None:
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
def _make_rows(
    ptr, entry, first, head, stride_b, stride_s, stride_h, table_ptr, scales_ptr, b, stride_table,
    num_pages, stride_xp, stride_xs, stride_xh,
):  # fmt: skip
    """The rows of sequence b and one head. Without a table the sequence begins at token `first` of
    a batch entry; with one, stride_b and stride_s are those of pages and slots.
    """
    ptr += tl.cast(head, tl.int64) * stride_h
    table, scales = ptr, ptr
    if table_ptr is None:
        ptr += tl.cast(entry, tl.int64) * stride_b + tl.cast(first, tl.int64) * stride_s
    else:
        table = table_ptr + tl.cast(b, tl.int64) * stride_table
    if scales_ptr is not None:
        scales = scales_ptr + tl.cast(head, tl.int64) * stride_xh
    return TokenRows(ptr, stride_s, stride_b, table, num_pages, scales, stride_xp, stride_xs)


@triton.jit
def _load(
    rows, token, stop, SCALED: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """(values, scales) of tokens before `stop`, zeros from there on. Not SCALED: a scale of 1."""
    dims, exist, scale = tl.arange(0, PAD), token < stop, 1.0
    inside = exist[:, None] & (dims < DIM)[None, :]
    if PAGE_SIZE == 0:
        at = token.to(tl.int64) * rows.stride
    else:
        page = page_of(PageTableRow(rows.table, rows.num_pages), token, stop, PAGE_SIZE)
        slot = token % PAGE_SIZE
        at = page * rows.stride_page + slot.to(tl.int64) * rows.stride
        if SCALED:
            place = page * rows.stride_scales_page + slot * rows.stride_scales
            scale = tl.load(rows.scales + place, mask=exist, other=0.0)[:, None]
    return tl.load(rows.ptr + at[:, None] + dims[None, :], mask=inside, other=0.0), scale


@triton.jit(do_not_specialize=_LENGTHS)
def sums_kernel(
    k_ptr, sums_ptr, cu_ptr, table_ptr, seqlens_ptr, page_scales_ptr, stride_b, stride_s, stride_h,
    stride_table, num_pages, stride_xp, stride_xs, stride_xh, seqlen, total, num_heads, span, spans,
    DIM: tl.constexpr, PAD: tl.constexpr, TILE: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """The sum of `span` keys of one head."""
    part, plane = tl.program_id(0) % spans, tl.program_id(0) // spans
    b, head = plane // num_heads, plane % num_heads
    entry, first, length = _sequence(cu_ptr, seqlens_ptr, b, seqlen, total)
    start, stop = part * span, tl.minimum(part * span + span, length)
    tokens = tl.arange(0, TILE)
    rows = _make_rows(
        k_ptr, entry, first, head, stride_b, stride_s, stride_h, table_ptr, page_scales_ptr, b,
        stride_table, num_pages, stride_xp, stride_xs, stride_xh,
    )  # fmt: skip
    acc = tl.zeros([TILE, PAD], tl.float32)
    for t in tl.range(start, stop, TILE, num_stages=4):  # otherwise loads would not be pipelined
        x, scale = _load(rows, t + tokens, stop, page_scales_ptr is not None, DIM, PAD, PAGE_SIZE)
        acc += x.to(tl.float32) * scale
    at = (plane.to(tl.int64) * spans + part) * PAD
    tl.store(sums_ptr + at + tl.arange(0, PAD), tl.sum(acc, 0))


@triton.jit(do_not_specialize=_LENGTHS)
def means_kernel(
    sums_ptr, means_ptr, cu_ptr, seqlens_ptr, matrix_ptr, norms_ptr, seqlen, total, num_heads, span,
    spans, PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The mean of all keys of one sequence and head, rotated."""
    plane = tl.program_id(0)
    _, _, length = _sequence(cu_ptr, seqlens_ptr, plane // num_heads, seqlen, total)
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
def strip_of(tiles, strip):
    """(plane, first block) of this program: `strip` blocks of one head."""
    strips = tl.cdiv(tiles, strip)
    return tl.program_id(0) // strips, tl.program_id(0) % strips * strip


@triton.jit(do_not_specialize=_LENGTHS)
def rotate_kernel(
    x_ptr, values_ptr, scales_ptr, means_ptr, shift_ptr, cu_ptr, table_ptr, seqlens_ptr,
    page_scales_ptr, matrix_ptr, norms_ptr, stride_b, stride_s, stride_h, stride_table, num_pages,
    stride_xp, stride_xs, stride_xh, seqlen, total, num_heads, group_size, tiles, strip, blocks,
    softmax_scale, KEYS: tl.constexpr, PER_TOKEN: tl.constexpr, DIM: tl.constexpr,
    PAD: tl.constexpr, APART: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Blocks of 128 tokens of one head of k (KEYS) or of q. q also gives shift, laid out like lse:
    softmax_scale * q.mean in log2 units, the change of lse by subtracting the mean from the keys.
    """
    plane, start = strip_of(tiles, strip)
    b, head = plane // num_heads, plane % num_heads
    entry, first, length = _sequence(cu_ptr, seqlens_ptr, b, seqlen, total)
    dims = tl.arange(0, PAD)
    m = tl.load(matrix_ptr + dims[:, None] * PAD + dims[None, :])
    means_ptr += (plane // group_size).to(tl.int64) * PAD
    shift_ptr += (tl.cast(entry, tl.int64) * num_heads + head) * total + first
    at = _first_block(cu_ptr, plane, b, head, first, blocks)
    rows = _make_rows(
        x_ptr, entry, first, head, stride_b, stride_s, stride_h, table_ptr, page_scales_ptr, b,
        stride_table, num_pages, stride_xp, stride_xs, stride_xh,
    )  # fmt: skip
    for block in range(start, tl.minimum(start + strip, tl.cdiv(length, _BLOCK))):
        tokens = block * _BLOCK + tl.arange(0, _BLOCK)
        x, token_scale = _load(
            rows, tokens, length, page_scales_ptr is not None, DIM, PAD, PAGE_SIZE
        )
        if page_scales_ptr is not None:
            x = x.to(tl.float32).to(m.dtype)  # exact for 8-bit numbers
        x = dot(x, m, None) * token_scale
        quantise_block(
            x, values_ptr, scales_ptr, means_ptr, shift_ptr, norms_ptr, tokens, length, at + block,
            softmax_scale, KEYS, PER_TOKEN, APART,
        )  # fmt: skip


@triton.jit
def quantise_block(
    x, values_ptr, scales_ptr, mean_ptr, shift_ptr, norms_ptr, tokens, length, at, softmax_scale,
    KEYS: tl.constexpr, PER_TOKEN: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Store 128 tokens of one head as block `at`. x: products with the signs of the matrix."""
    kind: tl.constexpr = values_ptr.dtype.element_ty
    dims, exist = tl.arange(0, x.shape[1]), tokens < length
    x *= tl.load(norms_ptr + dims)[None, :]  # reloaded per block: it would not fit registers
    mean = tl.load(mean_ptr + dims)
    if KEYS:
        x = tl.where(exist[:, None], x - mean[None, :], 0.0)
    else:
        shift = tl.sum(x * mean[None, :], 1) * softmax_scale * LOG2E
        tl.store(shift_ptr + tokens, shift, mask=exist)
    if PER_TOKEN:
        scale = compute_scale(tl.max(tl.abs(x), 1), tl.sum(x * 0.0, 1), kind)
        tl.store(scales_ptr + at * _BLOCK + tl.arange(0, _BLOCK), scale)
        _store_values(values_ptr, quantise(x, scale[:, None], kind), at)
    else:
        scale = _scale(x, scales_ptr + at * APART, kind, 0.0)
        _store_values(values_ptr, quantise(x, scale, kind), at)


@triton.jit
def key_of(place):
    """The key at a column of v. In an accumulator of scores a thread holds, of every 16 columns,
    two and then two more 8 columns later; in an 8-bit operand it holds four adjacent ones.
    """
    return (place & -16) | (place & 1) | ((place & 2) << 2) | ((place & 12) >> 1)


@triton.jit(do_not_specialize=_LENGTHS)
def values_kernel(
    v_ptr, values_ptr, scales_ptr, cu_ptr, table_ptr, seqlens_ptr, page_scales_ptr, stride_b,
    stride_s, stride_h, stride_table, num_pages, stride_xp, stride_xs, stride_xh, seqlen, total,
    num_heads, tiles, blocks,
    DIM: tl.constexpr, PAD: tl.constexpr, APART: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """128 tokens of one head of v, transposed."""
    block, plane = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, head = plane // num_heads, plane % num_heads
    entry, first, length = _sequence(cu_ptr, seqlens_ptr, b, seqlen, total)
    if block * _BLOCK >= length:
        return
    tokens = block * _BLOCK + key_of(tl.arange(0, _BLOCK))
    rows = _make_rows(
        v_ptr, entry, first, head, stride_b, stride_s, stride_h, table_ptr, page_scales_ptr, b,
        stride_table, num_pages, stride_xp, stride_xs, stride_xh,
    )  # fmt: skip
    x, token_scale = _load(rows, tokens, length, page_scales_ptr is not None, DIM, PAD, PAGE_SIZE)
    if page_scales_ptr is not None:
        x = x.to(tl.float32) * token_scale
    at = _first_block(cu_ptr, plane, b, head, first, blocks) + block
    kind: tl.constexpr = values_ptr.dtype.element_ty
    scale = _scale(x, scales_ptr + at * APART, kind, LEAST)
    _store_values(values_ptr, tl.trans(quantise(x.to(tl.float32), scale, kind)), at)


_sums_kernel = CachedLauncher(sums_kernel)
_means_kernel = CachedLauncher(means_kernel)
_rotate_kernel = CachedLauncher(rotate_kernel)
_values_kernel = CachedLauncher(values_kernel)


class OperandPages(NamedTuple):
    """Where the keys of each sequence are: table (batch, columns) and lengths (batch,), int32."""

    table: Tensor
    seqlens: Tensor
    num_pages: int
    page_size: int


class OperandSizes(NamedTuple):
    """Sizes of the queries or the keys of a call, and their cu_seqlens, or their pages. In pages,
    seqlen is the capacity of a row of the table.
    """

    seqlen: int
    total: int
    heads: int
    cu_seqlens: Tensor | None
    batch: int
    pages: OperandPages | None = None

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
    def page_size(self) -> int:
        return 0 if self.pages is None else self.pages.page_size

    def page_pointers(self, scales: Tensor | None) -> tuple:
        """The page table, its lengths and the scales of 8-bit pages as kernels take them."""
        return (None, None, None) if self.pages is None else (*self.pages[:2], scales)

    def page_strides(self, scales: Tensor | None) -> tuple[int, ...]:
        pages = self.pages
        table = (0, 0) if pages is None else (pages.table.stride(0), pages.num_pages)
        return *table, *scale_strides(scales)

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
    rotation = get_rotation(problem.head_dim, x.q.dtype, x.q.device)
    mean, k, v, pairs = prepare_keys(problem, x, rotation)
    q = queries.allocate(x.q, len(rotation.norms), recipe.q)
    rotate_operand(
        x.q, queries, q, mean, shift, rotation, problem.softmax_scale, problem.group_size
    )
    return QuantisedOperands(q, k, v, pairs)


class QuantisedKeys(NamedTuple):
    """Keys and values of a call, quantised; mean: of the keys, rotated; pairs: as in
    QuantisedOperands.
    """

    mean: Tensor
    k: QuantisedBlocks
    v: QuantisedBlocks | None
    pairs: Tensor


def prepare_keys(problem: Problem, x: Tensors, rotation: RotationMatrix) -> QuantisedKeys:
    """k and v as the recipe of problem.precision has them."""
    recipe = RECIPES[problem.precision]
    keys = _keys(problem, x)
    mean = compute_key_means(x.k, keys, rotation, x.k_scales)
    pairs = x.k.new_empty(keys.all_blocks, 2, dtype=torch.float32)
    k = keys.allocate(x.k, len(rotation.norms), recipe.k, pairs[:, 0])
    rotate_operand(x.k, keys, k, mean, None, rotation, page_scales=x.k_scales)
    v = None
    if recipe.v is not None:
        v = transpose_values(x.v, keys, recipe.v, pairs[:, 1], x.v_scales)
    return QuantisedKeys(mean, k, v, pairs)


def _keys(problem: Problem, x: Tensors) -> OperandSizes:
    if x.page_table is None or x.cache_seqlens is None:
        return _side(problem.seqlen_k, problem.batch, x.k, x.cu_seqlens_k)
    table = x.page_table if x.page_table.stride(1) == 1 else x.page_table.contiguous()
    pages = OperandPages(table, x.cache_seqlens.contiguous(), x.k.shape[0], problem.page_size)
    length, heads = problem.seqlen_k, problem.num_kv_heads
    return OperandSizes(length, length, heads, None, problem.batch, pages)


def _side(seqlen: int, batch: int, t: Tensor, cu_seqlens: Tensor | None) -> OperandSizes:
    total = seqlen if cu_seqlens is None else t.shape[0]
    return OperandSizes(seqlen, total, t.shape[-2], cu_seqlens, batch)


def compute_key_means(
    k: Tensor, side: OperandSizes, rotation: RotationMatrix, page_scales: Tensor | None = None
) -> Tensor:
    """The means of the keys, rotated, fp32 (batch * heads, pad)."""
    pad = len(rotation.norms)
    span = max(SHORTEST, triton.next_power_of_2(triton.cdiv(side.seqlen, SPANS)))
    spans = triton.cdiv(side.seqlen, span)
    sums = k.new_empty(side.planes * spans * pad, dtype=torch.float32)
    means = k.new_empty(side.planes * pad, dtype=torch.float32)
    lengths = side.seqlen, side.total, side.heads, span, spans
    dims = {"PAD": pad, "TILE": TRITON_SUMS.tile_n} | launch_options(TRITON_SUMS)
    pointers = side.page_pointers(page_scales)
    _sums_kernel[(spans * side.planes,)](
        k, sums, side.cu_seqlens, *pointers, *head_strides(k), *side.page_strides(page_scales),
        *lengths, DIM=k.shape[-1], PAGE_SIZE=side.page_size, **dims,
    )  # fmt: skip
    _means_kernel[(side.planes,)](
        sums, means, side.cu_seqlens, pointers[1], *rotation, *lengths, **dims
    )
    return means


def rotate_operand(
    t: Tensor, side: OperandSizes, blocks: QuantisedBlocks, mean: Tensor, shift: Tensor | None,
    rotation: RotationMatrix,
    softmax_scale: float = 0.0, group_size: int = 1, page_scales: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill blocks with q and `shift`, or without a shift with k."""
    _rotate_kernel[(side.programs,)](
        t, blocks.values, blocks.scales, mean, mean if shift is None else shift, side.cu_seqlens,
        *side.page_pointers(page_scales), *rotation, *head_strides(t),
        *side.page_strides(page_scales), side.seqlen, side.total, side.heads, group_size,
        side.tiles, side.strip, blocks.count, softmax_scale,
        KEYS=shift is None, PER_TOKEN=blocks.values.dtype == torch.int8, DIM=t.shape[-1],
        PAD=len(rotation.norms), APART=blocks.scales.stride(0), PAGE_SIZE=side.page_size,
        **launch_options(TRITON_ROTATE[len(rotation.norms)]),
    )  # fmt: skip


def transpose_values(
    v: Tensor, side: OperandSizes, scheme: Scheme, scales: Tensor, page_scales: Tensor | None = None
) -> QuantisedBlocks:
    pad = padded_width(v.shape[-1])
    blocks = side.allocate(v, pad, scheme, scales)
    _values_kernel[(side.tiles * side.planes,)](
        v, blocks.values, blocks.scales, side.cu_seqlens, *side.page_pointers(page_scales),
        *head_strides(v), *side.page_strides(page_scales), side.seqlen, side.total, side.heads,
        side.tiles, blocks.count,
        DIM=v.shape[-1], PAD=pad, APART=scales.stride(0), PAGE_SIZE=side.page_size,
        **launch_options(TRITON_TRANSPOSE[pad]),
    )  # fmt: skip
    return blocks
