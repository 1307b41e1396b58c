"""Device functions of the portable kernels: the tile of a program, the range of tiles it loops
over, the score, and the online softmax of one tile. All of them are inlined into the kernels.

    keys ->  0       128      256   300         The loop of one program (causal, queries 128 to 255
    q   0    +--------+--------+-----+          of 300 queries and 300 keys, TILE_M = TILE_N = 128):
        |    | masked |        |     |
       128   +--------+--------+-----+            walk_tiles  -> 1 unmasked tile, 1 masked tile
        |    |  full  | masked |     |  <--       unmasked: keys 0 to 127, no comparison at all
       256   +--------+--------+-----+            masked:   keys 128 to 255, is_visible per element
       300   |  full  |  full  |mask.|            keys 256 to 299 are never loaded
             +--------+--------+-----+

A block mask replaces the range of tiles by its lists of FULL (unmasked) and PARTIAL (masked)
blocks.

i and j are query and key indices of one tile: (TILE_M, 1) and (1, TILE_N), or (1, TILE_M) and
(TILE_N, 1) if a kernel works on the transposed tile. Scores are in log2 units, so that exp2 is
their exponential. A missing option is None and generates no code.

The teaching version of the same functions, without options, is examples/versions/v2.py.
"""

import os
from typing import NamedTuple

import triton
import triton.language as tl

from onchip.masks.bits import BLOCK as _BLOCK
from onchip.masks.bits import WORDS as _WORDS

BLOCK = tl.constexpr(_BLOCK)
WORDS = tl.constexpr(_WORDS)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4e38)  # finite, and sums with it stay finite
FULL = tl.constexpr(-1)  # instead of the index of a bit tile: the whole block is visible
EMPTY = tl.constexpr(-2)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


class SequenceInfo(NamedTuple):
    """One sequence of a call. Packed tensors: its first query and key have the rows start_q and
    start_k, and `entry` is 0. Dense tensors: the starts are 0, and `entry` is the batch index.
    """

    entry: tl.tensor
    start_q: tl.tensor
    seqlen_q: tl.tensor
    start_k: tl.tensor
    seqlen_k: tl.tensor


class Band(NamedTuple):
    """The window: query i has position p = i + seqlen_k - seqlen_q and sees keys p - left to p +
    right. None is unbounded; causal is right = 0.
    """

    left: tl.tensor
    right: tl.tensor


class MaskLists(NamedTuple):
    """The block lists of a mask's rows or of its columns; all None without a mask. `plane` is the
    index of the first offset of this batch entry and head.
    """

    full_offsets: tl.tensor
    full_indices: tl.tensor
    partial_offsets: tl.tensor
    partial_indices: tl.tensor
    partial_tiles: tl.tensor
    tiles: tl.tensor
    plane: tl.tensor


class TokenPositions(NamedTuple):
    """The positions of queries and keys if the call is a part of a larger one (Tensors.positions_q
    and positions_k), else None. The sequence of each query follows total_q elements after its
    position.
    """

    q: tl.tensor
    k: tl.tensor
    total_q: tl.tensor


class ScoreMods(NamedTuple):
    """The score options: scale, softcap, ALiBi slope, bias. The bias of this batch entry and head
    begins at bias + plane.
    """

    scale_log2: tl.tensor
    softcap: tl.tensor
    slope: tl.tensor
    bias: tl.tensor
    plane: tl.tensor
    stride_bias: tl.tensor
    positions: TokenPositions


class CapturedElements(NamedTuple):
    """What score_mod gets beside scores and their positions: the batch entry (packed: the sequence)
    and head, the elements of its tensors, and the sizes of these tensors. See score_mod.py.
    """

    b: tl.tensor
    h: tl.tensor
    floats: tl.tensor
    integers: tl.tensor
    sizes: tl.tensor


class Dropout(NamedTuple):
    """A probability is kept if its u32 of Philox is below `threshold`; seed is None without
    dropout.
    """

    seed: tl.tensor
    threshold: tl.tensor
    b: tl.tensor
    h: tl.tensor
    positions: TokenPositions


class TileWalk(NamedTuple):
    """The tiles that one program visits, as ranges of entries. An entry is a tile of the other
    side (keys for the forward, queries for dk and dv), or with a mask a FULL block in its list.
    Entries first : edge are unmasked: every row of the program's tile sees all of them. Entries lo
    : first, entries from `edge` on, and PARTIAL blocks are masked. num_unmasked and num_masked
    count tiles.
    """

    lo: tl.tensor
    first: tl.tensor
    edge: tl.tensor
    partial: tl.tensor
    num_partial: tl.tensor
    num_unmasked: tl.tensor
    num_masked: tl.tensor


class SoftmaxState(NamedTuple):
    """m, l, acc of the online softmax, and w, the sum of p (s - m), for the entropy."""

    m: tl.tensor
    l: tl.tensor
    acc: tl.tensor
    w: tl.tensor


@triton.jit
def empty_state(TILE_M: tl.constexpr, PAD_DIM_V: tl.constexpr):
    """m starts at LOWEST, not at -inf: a row may see no key, or only scores of -inf, and -inf -
    -inf would be NaN. Such a row ends with l = 0.
    """
    zeros = tl.zeros([TILE_M], tl.float32)
    return SoftmaxState(zeros + LOWEST, zeros, tl.zeros([TILE_M, PAD_DIM_V], tl.float32), zeros)


@triton.jit
def max_logit(state):
    """The largest score in natural units; -inf for a row without keys."""
    return tl.where(state.l > 0, state.m * LN2, float("-inf"))


@triton.jit
def locate_program(num_tiles, num_heads, LONGEST_FIRST: tl.constexpr):
    """(tile, head, batch). The tiles of a head run at the same time: they share its keys in L2."""
    pid = tl.program_id(0)
    tile = pid % num_tiles
    if LONGEST_FIRST:
        tile = num_tiles - 1 - tile
    return tile, pid // num_tiles % num_heads, pid // num_tiles // num_heads


@triton.jit
def split_digits(x, a, b, c):
    """x in the mixed radix (a, b, c), lowest digit first, and the quotient."""
    return x % a, x // a % b, x // a // b % c, x // a // b // c


@triton.jit
def load_sequence(cu_q_ptr, cu_k_ptr, total_q, total_k, b):
    """Sequence b. Offsets are clamped to the tensors: bad offsets give wrong rows, but no access
    out of bounds.
    """
    if cu_q_ptr is None:
        return SequenceInfo(b, 0, total_q, 0, total_k)
    else:
        start_q, seqlen_q = load_clamped(cu_q_ptr + b, total_q)
        start_k, seqlen_k = load_clamped(cu_k_ptr + b, total_k)
        return SequenceInfo(0, start_q, seqlen_q, start_k, seqlen_k)


@triton.jit
def load_clamped(cu_ptr, total):
    """(start, length) of a sequence, or of a block of them, inside a tensor of `total` rows."""
    start = tl.minimum(tl.maximum(tl.load(cu_ptr), 0), total)
    stop = tl.minimum(tl.maximum(tl.load(cu_ptr + 1), start), total)
    return start, stop - start


@triton.jit
def head_offset(entry, head, stride_b, stride_h):
    """The offset of one batch entry and head; 64-bit, because tensors may exceed 2^31 elements."""
    return tl.cast(entry, tl.int64) * stride_b + tl.cast(head, tl.int64) * stride_h


@triton.jit
def head_ptr(ptr, entry, start, head, stride_b, stride_s, stride_h, ALIGN: tl.constexpr):
    """Pointer to the first element of one sequence and head of q, k or v. Strides are in units of
    ALIGN elements: Triton vectorises a load only if it knows a divisor of the addresses.
    """
    offset = head_offset(entry, head, stride_b, stride_h) + tl.cast(start, tl.int64) * stride_s
    return ptr + offset * ALIGN


@triton.jit
def result_ptr(ptr, entry, start, head, total, num_heads, DIM: tl.constexpr):
    """The same for a contiguous (entries, total, num_heads, DIM) tensor, as all results are."""
    row = tl.cast(entry, tl.int64) * total + start
    return ptr + (row * num_heads + head) * DIM


@triton.jit
def row_offset(at, h, num_heads, total_q):
    """The offset of a sequence and head in lse, delta or a statistic."""
    return (tl.cast(at.entry, tl.int64) * num_heads + h) * total_q + at.start_q


@triton.jit
def load_tile(
    ptr, row, num_rows, stride, DIM: tl.constexpr, TILE: tl.constexpr, PAD: tl.constexpr,
    RAGGED: tl.constexpr,
):  # fmt: skip
    """Rows row : row + TILE of a (num_rows, DIM) matrix as (TILE, PAD), zeros out of bounds. Only a
    RAGGED tile may extend past the last row.
    """
    rows, dims = tl.arange(0, TILE), tl.arange(0, PAD)
    at = ptr + tl.cast(row, tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    if RAGGED and DIM != PAD:
        inside = (row + rows < num_rows)[:, None] & (dims < DIM)[None, :]
        return tl.load(at, mask=inside, other=0.0)
    elif RAGGED:
        return tl.load(at, mask=(row + rows < num_rows)[:, None], other=0.0)
    elif DIM != PAD:
        return tl.load(at, mask=(dims < DIM)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def load_rows(ptr, row, num_rows, TILE: tl.constexpr, RAGGED: tl.constexpr):
    """The same for one number per row."""
    rows = row + tl.arange(0, TILE)
    if RAGGED:
        return tl.load(ptr + rows, mask=rows < num_rows, other=0.0)
    else:
        return tl.load(ptr + rows)


@triton.jit
def dot(a, b, acc):
    """a @ b + acc in fp32; fp32 operands are multiplied in IEEE fp32, never in TF32."""
    # The interpreter would multiply the bit patterns of bf16; in fp32 the products are the same.
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """x in dtype, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:  # the interpreter would truncate
        bits = x.to(tl.int32, bitcast=True)
        x = (bits + 0x7FFF + (bits >> 16 & 1) & -0x10000).to(tl.float32, bitcast=True)
    if INTERPRETED and dtype == tl.float8e4nv:  # it would lose a carry into the exponent
        bits = x.to(tl.int32, bitcast=True)
        normal = (bits + 0x7FFFF + (bits >> 20 & 1) & -0x100000).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < 2.0**-6, (x + 24576.0) - 24576.0, normal)  # steps of 2^-9 below
    if dtype == tl.int8:
        x = (x + 12582912.0) - 12582912.0  # adding 3 * 2^22 rounds the fraction away
    return x.to(dtype)


@triton.jit
def store_tile(
    ptr, x, row, num_rows, stride, DIM: tl.constexpr, TILE: tl.constexpr, PAD: tl.constexpr
):
    """The inverse of load_tile, in the dtype of ptr."""
    rows, dims = tl.arange(0, TILE), tl.arange(0, PAD)
    at = ptr + tl.cast(row, tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    inside = (row + rows < num_rows)[:, None] & (dims < DIM)[None, :]
    tl.store(at, round_to(x, ptr.dtype.element_ty), mask=inside)


@triton.jit
def walk_tiles(band, lists, start, stop, seqlen, seqlen_other, OTHER: tl.constexpr):
    """The TileWalk of the queries start : stop over the keys, in tiles of OTHER keys.

    For a tile of keys that loops over queries (dk and dv), exchange left and right of the band and
    pass the lists of the mask's columns.
    """
    diagonal = start + seqlen_other - seqlen
    last = tl.minimum(stop, seqlen) - 1 + seqlen_other - seqlen
    lo, first = diagonal * 0, diagonal * 0
    hi, edge = seqlen_other + diagonal * 0, seqlen_other + diagonal * 0
    if band.left is not None:
        lo = tl.maximum(diagonal - band.left, 0)
        first = tl.maximum(last - band.left, 0)
    if band.right is not None:
        hi = tl.minimum(hi, last + band.right + 1)
        edge = tl.minimum(edge, tl.maximum(diagonal + band.right + 1, 0))
    if lists.tiles is None:
        return _walk_range(lo, first, edge, hi, OTHER)
    else:
        return _walk_lists(band, lists, start // BLOCK, lo, first, edge, hi, OTHER)


@triton.jit
def _walk_range(lo, first, edge, hi, OTHER: tl.constexpr):
    lo, first, edge = lo // OTHER, tl.cdiv(first, OTHER), edge // OTHER
    hi = tl.maximum(tl.cdiv(hi, OTHER), lo)
    none = edge <= first  # a narrow band: every tile is masked
    first, edge = tl.where(none, lo, first), tl.where(none, lo, edge)
    return TileWalk(lo, first, edge, lo, 0, edge - first, first - lo + hi - edge)


@triton.jit
def _walk_lists(band, lists, row, lo, first, edge, hi, OTHER: tl.constexpr):
    f0, f1, p0, p1 = _row_entries(lists, row)
    f_edge = _entries_below(lists.full_indices, f0, f1, edge // BLOCK)
    f_first, f_lo, f_hi, p_lo, p_hi = f0, f0, f1, p0, p1
    if band.left is not None:
        f_first = _entries_below(lists.full_indices, f0, f1, tl.cdiv(first, BLOCK))
        f_lo = _entries_below(lists.full_indices, f0, f1, lo // BLOCK)
        p_lo = _entries_below(lists.partial_indices, p0, p1, lo // BLOCK)
    if band.right is not None:
        f_hi = _entries_below(lists.full_indices, f0, f1, tl.cdiv(hi, BLOCK))
        p_hi = _entries_below(lists.partial_indices, p0, p1, tl.cdiv(hi, BLOCK))
    f_hi, p_hi = tl.maximum(f_hi, f_lo), tl.maximum(p_hi, p_lo)
    none = f_edge <= f_first
    f_first, f_edge = tl.where(none, f_lo, f_first), tl.where(none, f_lo, f_edge)
    masked = p_hi - p_lo + f_first - f_lo + f_hi - f_edge
    per_block: tl.constexpr = BLOCK // OTHER
    unmasked = (f_edge - f_first) * per_block
    return TileWalk(f_lo, f_first, f_edge, p_lo, p_hi - p_lo, unmasked, masked * per_block)


@triton.jit
def _row_entries(lists, row):
    """(begin, end) of the FULL blocks of one block row in their list, then of the PARTIAL ones."""
    full = lists.full_offsets + lists.plane + row
    partial = lists.partial_offsets + lists.plane + row
    return tl.load(full), tl.load(full + 1), tl.load(partial), tl.load(partial + 1)


@triton.jit
def find_block_bits(lists, row, block):
    """The index of the bit tile of one block, or FULL, or EMPTY."""
    if lists.tiles is None:
        return FULL
    else:
        f0, f1, p0, p1 = _row_entries(lists, row)
        f = _entries_below(lists.full_indices, f0, f1, block)
        p = _entries_below(lists.partial_indices, p0, p1, block)
        is_full = tl.load(lists.full_indices + f, mask=f < f1, other=-1) == block
        is_partial = tl.load(lists.partial_indices + p, mask=p < p1, other=-1) == block
        bits = tl.load(lists.partial_tiles + p, mask=is_partial, other=EMPTY)
        return tl.where(is_full, FULL, bits)


@triton.jit
def crosses_band(at, band, m0, n0, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Whether the band crosses the tile at (m0, n0)."""
    diagonal = m0 + at.seqlen_k - at.seqlen_q
    crosses = n0 < at.seqlen_k
    if band.right is not None:
        crosses = crosses & (n0 <= diagonal + TILE_M - 1 + band.right)
    if band.left is not None:
        crosses = crosses & (n0 + TILE_N - 1 >= diagonal - band.left)
    return crosses


@triton.jit
def _entries_below(indices_ptr, begin, end, block):
    """begin + the number of the ascending entries begin : end that are below `block`."""
    count = begin
    for e in range(begin, end, BLOCK):
        at = e + tl.arange(0, BLOCK)
        index = tl.load(indices_ptr + at, mask=at < end, other=2147483647)
        count += tl.sum((index < block).to(tl.int32), 0)
    return count


@triton.jit
def get_unmasked_tile(walk, lists, t, OTHER: tl.constexpr):
    """The first row of the t-th unmasked tile."""
    if lists.tiles is None:
        return (walk.first + t) * OTHER
    else:
        per_block: tl.constexpr = BLOCK // OTHER
        e = t // per_block
        block = tl.load(lists.full_indices + walk.first + e)
        return block * BLOCK + (t - e * per_block) * OTHER


@triton.jit
def get_masked_tile(walk, lists, t, OTHER: tl.constexpr):
    """The first row of the t-th masked tile, and the index of its bit tile or FULL."""
    if lists.tiles is None:
        return _skip_unmasked(walk, t) * OTHER, FULL
    else:
        per_block: tl.constexpr = BLOCK // OTHER
        e = t // per_block
        partial = e < walk.num_partial
        block = tl.load(lists.partial_indices + walk.partial + e, mask=partial, other=0)
        bits = tl.load(lists.partial_tiles + walk.partial + e, mask=partial, other=FULL)
        full = lists.full_indices + _skip_unmasked(walk, e - walk.num_partial)
        block += tl.load(full, mask=partial == 0, other=0)
        return block * BLOCK + (t - e * per_block) * OTHER, bits


@triton.jit
def _skip_unmasked(walk, e):
    return tl.where(e < walk.first - walk.lo, walk.lo + e, walk.edge + e - (walk.first - walk.lo))


@triton.jit
def is_visible(at, band, lists, bits, i, j, n, inside, TILE_N: tl.constexpr):
    """bool: whether query i sees key j; the first key of the tile is n. `inside` is False past the
    end of the side that is looped over. Rows of the program's own tile past the end need no mask:
    they are not stored.
    """
    p = i + (at.seqlen_k - at.seqlen_q)
    seen = inside
    if band.right is not None:
        seen = seen & (j <= p + band.right)
    if band.left is not None:
        seen = seen & (j >= p - band.left)
    if lists.tiles is not None:
        seen = seen & ((_load_mask_words(lists, bits, i, j, n, TILE_N) >> j % 32 & 1) != 0)
    return seen


@triton.jit
def _load_mask_words(lists, bits, i, j, n, TILE_N: tl.constexpr):
    """The 32-bit word of the bit tile that holds the bit of each (i, j). Each word of a row is
    loaded once, not once per element.
    """
    at = tl.cast(bits, tl.int64) * (BLOCK * WORDS) + i % BLOCK * WORDS + n % BLOCK // 32
    stored = i < tl.where(bits >= 0, 1 << 30, 0)
    mask_words = tl.load(lists.tiles + at, mask=stored, other=-1)
    for w in tl.static_range(1, TILE_N // 32):
        more = tl.load(lists.tiles + at + w, mask=stored, other=-1)
        mask_words = tl.where(j // 32 % (TILE_N // 32) == w, more, mask_words)
    return mask_words


@triton.jit
def apply_score_mods(score, x, at, i, j, LINEAR: tl.constexpr):
    """The score of x = q.k in log2 units, and d score / d(softmax_scale x), which is 1 without
    softcap.

    LINEAR: the score is scale_log2 * x with scale_log2 > 0. x is then returned unscaled: the
    maximum commutes with the scaling, and one multiply-add later scales and subtracts the maximum.
    """
    if LINEAR:
        return x, 1.0
    else:
        s, softcap_grad = _apply_softcap(score, x)
        if score.slope is not None:
            distance = _alibi_distance(score.positions, at, i, j).to(tl.float32)
            s -= distance * (score.slope.to(tl.float32) * LOG2E)
        if score.bias is not None:
            cell = score.bias + score.plane + tl.cast(i, tl.int64) * score.stride_bias + j
            bias = tl.load(cell, mask=(i < at.seqlen_q) & (j < at.seqlen_k), other=0.0)
            s += bias.to(tl.float32) * LOG2E
        return s, softcap_grad


@triton.jit
def _alibi_distance(positions, at, i, j):
    if positions.q is None:
        return tl.abs(i + (at.seqlen_k - at.seqlen_q) - j)
    else:
        p = tl.load(positions.q + i, mask=i < at.seqlen_q, other=0)
        return tl.abs(p - tl.load(positions.k + j, mask=j < at.seqlen_k, other=0))


@triton.jit
def _apply_softcap(score, x):
    if score.softcap is None:
        return x * score.scale_log2, 1.0
    else:
        t = tanh(x * (score.scale_log2 * LN2 / score.softcap))
        return t * (score.softcap * LOG2E), 1.0 - t * t


@triton.jit
def modify_scores(captured, s, i, j, SCORE_MOD: tl.constexpr):
    """score_mod of scores in log2 units, and its derivative, which is 1 without score_mod."""
    if SCORE_MOD is None:
        return s, 1.0
    else:
        floats, integers, sizes = captured.floats, captured.integers, captured.sizes
        score = s * LN2
        score, by_score = SCORE_MOD(score, captured.b, captured.h, i, j, floats, integers, sizes)
        return score * LOG2E, by_score


@triton.jit
def times_derivative(ds, derivative, SCORE_MOD: tl.constexpr):
    """ds times a derivative of score_mod. A hidden cell has no share, even if it is infinite."""
    if SCORE_MOD is None:
        return ds
    else:
        return tl.where(ds == 0, 0.0, ds * derivative)


@triton.jit
def tanh(x):
    """To one or two ulp: an odd series near 0, where the exponentials would cancel."""
    y = x * x
    near = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = (1 - e) / (1 + e)
    return tl.where(tl.abs(x) < 0.3, near, tl.where(x < 0, -far, far))


@triton.jit
def draw_keep_mask(
    dropout, at, rows, n, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """bool (TILE_M, TILE_N), or its transpose if TRANSPOSED: which probabilities of `rows` and the
    keys from n on dropout keeps. Same numbers as kernels/cpu/philox.py. One draw serves four keys,
    unless keys have explicit positions.
    """
    if dropout.positions.q is None:
        quads, b = n // 4 + tl.arange(0, TILE_N // 4), tl.cast(dropout.b, tl.uint32)
        c0, c1, c2, c3 = _philox(dropout, quads, rows, b, [TILE_M, TILE_N // 4])
        u32s = tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [TILE_M, TILE_N])
    else:
        u32s = _draw_at_positions(dropout, at, rows, n + tl.arange(0, TILE_N), TILE_M, TILE_N)
    return (tl.trans(u32s) if TRANSPOSED else u32s).to(tl.int64) < dropout.threshold


@triton.jit
def _draw_at_positions(dropout, at, rows, keys, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """u32 (TILE_M, TILE_N) of queries and keys with explicit positions."""
    positions, inside = dropout.positions, rows < at.seqlen_q
    q = tl.load(positions.q + rows, mask=inside, other=0)
    b = tl.load(positions.q + positions.total_q + rows, mask=inside, other=0) + dropout.b
    k = tl.load(positions.k + keys, mask=keys < at.seqlen_k, other=0)
    b = tl.broadcast_to(b.to(tl.uint32)[:, None], [TILE_M, TILE_N])
    c0, c1, c2, c3 = _philox(dropout, k // 4, q, b, [TILE_M, TILE_N])
    lane = (k % 4)[None, :]
    return tl.where(lane < 2, tl.where(lane == 0, c0, c1), tl.where(lane == 2, c2, c3))


@triton.jit
def _philox(dropout, quads, rows, b, shape: tl.constexpr):
    """Four u32 for every row and group of four keys."""
    c0 = tl.broadcast_to(quads.to(tl.uint32)[None, :], shape)
    c1 = tl.broadcast_to(rows.to(tl.uint32)[:, None], shape)
    c2 = tl.full(shape, 0, tl.uint32) + tl.cast(dropout.h, tl.uint32)
    c3 = tl.full(shape, 0, tl.uint32) + b
    k0 = (dropout.seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = (dropout.seed >> 32 & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        hi0, lo0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        hi1, lo1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def fold_tile(state, s, v, keep, unit, STATS: tl.constexpr):
    """The state after one more tile of keys. s (TILE_M, TILE_N), -inf where masked, times `unit` is
    the score; v is (TILE_N, dim).
    """
    state, p, alpha = update_softmax(state, s, unit, STATS)
    m, l, acc, w = state
    if keep is not None:
        p = tl.where(keep, p, 0.0)
    acc = dot(round_to(p, v.dtype), v, acc * alpha[:, None])
    return SoftmaxState(m, l, acc, w)


@triton.jit
def update_softmax(state, s, unit, STATS: tl.constexpr):
    """The part of fold_tile before v: the state with acc still unscaled, p, and the factor alpha by
    which acc must be multiplied.
    """
    m, l, acc, w = state
    m_new = tl.maximum(m, tl.max(s, 1) * unit)
    alpha = tl.exp2(m - m_new)
    p = tl.exp2(s * unit - m_new[:, None])
    if STATS:
        shift = tl.where(l > 0, m - m_new, 0.0)
        below = tl.where(p > 0, p * (s * unit - m_new[:, None]), 0.0)
        w = (w + l * shift) * alpha + tl.sum(below, 1)
    l = l * alpha + tl.sum(p, 1)
    return SoftmaxState(m_new, l, acc, w), p, alpha


@triton.jit
def add_sink(state, sink):
    """Add one logit without a value, in log2 units."""
    m, l, acc, w = state
    m_new = tl.maximum(m, sink)
    alpha, p = tl.exp2(m - m_new), tl.exp2(sink - m_new)
    shift = tl.where(l > 0, m - m_new, 0.0)
    below = tl.where(p > 0, p * (sink - m_new), 0.0)
    return SoftmaxState(m_new, l * alpha + p, acc * alpha[:, None], (w + l * shift) * alpha + below)


@triton.jit
def score_gradient(s, dp, lse, delta, keep, unit, keep_scale):
    """p after dropout, without the factor keep_scale, and d loss / d score = p (dp - delta)."""
    p = tl.exp2(s * unit - lse)
    if keep is None:
        return p, p * (dp - delta)
    else:
        return tl.where(keep, p, 0.0), p * (tl.where(keep, dp * keep_scale, 0.0) - delta)
