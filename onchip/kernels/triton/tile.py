"""What the portable kernels share: where a program stands, which tiles it walks, the score, and the
fold of one tile. Leaf functions only; they are inlined into the kernels.

i and j are query and key positions as columns and rows of one tile: (TILE_M, 1) and (1, TILE_N), or
(1, TILE_M) and (TILE_N, 1) where a kernel works on the transposed tile. Scores are in units of
log2, so that exp2 is their exponential. An option that is absent is None, and costs nothing.
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
LOWEST = tl.constexpr(-3.4e38)  # finite, and any sum with it is, too
FULL = tl.constexpr(-1)  # in the place of a bit tile: the whole block is visible
EMPTY = tl.constexpr(-2)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


class Sequence(NamedTuple):
    """One sequence of a call. In packed tensors its first query and key lie at start_q and start_k
    and `entry` is 0; in dense ones the starts are 0 and `entry` is the batch index.
    """

    entry: tl.tensor
    start_q: tl.tensor
    seqlen_q: tl.tensor
    start_k: tl.tensor
    seqlen_k: tl.tensor


class Band(NamedTuple):
    """Query i stands at p = i + seqlen_k - seqlen_q and sees keys p - left to p + right. None is
    unbounded; causal is right = 0.
    """

    left: tl.tensor
    right: tl.tensor


class Lists(NamedTuple):
    """The block lists of a mask's rows, or of its columns; all None without a mask. The offsets of
    this batch entry and head begin at `plane`.
    """

    full_offsets: tl.tensor
    full_indices: tl.tensor
    partial_offsets: tl.tensor
    partial_indices: tl.tensor
    partial_tiles: tl.tensor
    tiles: tl.tensor
    plane: tl.tensor


class Places(NamedTuple):
    """Tensors.positions_q and positions_k of a call that is a part of a larger one, else None:
    where queries and keys stand, and total_q further on the sequence of each query.
    """

    q: tl.tensor
    k: tl.tensor
    total_q: tl.tensor


class Score(NamedTuple):
    """What turns q.k into a score. The bias of this batch entry and head begins at bias + plane."""

    scale_log2: tl.tensor
    softcap: tl.tensor
    slope: tl.tensor
    bias: tl.tensor
    plane: tl.tensor
    stride_bias: tl.tensor
    places: Places


class Dropout(NamedTuple):
    """A word of Philox below `threshold` keeps its probability; seed is None without dropout."""

    seed: tl.tensor
    threshold: tl.tensor
    b: tl.tensor
    h: tl.tensor
    places: Places


class Walk(NamedTuple):
    """The tiles that one program visits, as ranges of entries. An entry is a tile of the other
    side, or with a mask a FULL block in its list. From `first` to `edge` every row of the program's
    tile sees everything; masked are lo : first, what follows `edge`, and the PARTIAL blocks.
    num_unmasked and num_masked count tiles.
    """

    lo: tl.tensor
    first: tl.tensor
    edge: tl.tensor
    partial: tl.tensor
    num_partial: tl.tensor
    num_unmasked: tl.tensor
    num_masked: tl.tensor


class State(NamedTuple):
    """m, l, acc of the online softmax, and w = sum of p (s - m) for the entropy."""

    m: tl.tensor
    l: tl.tensor
    acc: tl.tensor
    w: tl.tensor


@triton.jit
def empty_state(TILE_M: tl.constexpr, PAD_DIM_V: tl.constexpr):
    """m starts at LOWEST, not at -inf: a row may go on without any key, or with scores that are all
    -inf by value, and -inf - -inf would be NaN. l = 0 marks such a row to the end.
    """
    zeros = tl.zeros([TILE_M], tl.float32)
    return State(zeros + LOWEST, zeros, tl.zeros([TILE_M, PAD_DIM_V], tl.float32), zeros)


@triton.jit
def max_logit(state):
    """In natural units; -inf of a row without keys."""
    return tl.where(state.l > 0, state.m * LN2, float("-inf"))


@triton.jit
def program_place(num_tiles, num_heads, LONGEST_FIRST: tl.constexpr):
    """(tile, head, batch). The tiles of a head run side by side: they share its keys in L2."""
    pid = tl.program_id(0)
    tile = pid % num_tiles
    if LONGEST_FIRST:
        tile = num_tiles - 1 - tile
    return tile, pid // num_tiles % num_heads, pid // num_tiles // num_heads


@triton.jit
def sequence_of(cu_q_ptr, cu_k_ptr, total_q, total_k, b):
    """Sequence b. Offsets are clamped to the tensors, so that bad ones give wrong rows and no
    access outside.
    """
    if cu_q_ptr is None:
        return Sequence(b, 0, total_q, 0, total_k)
    else:
        start_q, seqlen_q = clamped(cu_q_ptr + b, total_q)
        start_k, seqlen_k = clamped(cu_k_ptr + b, total_k)
        return Sequence(0, start_q, seqlen_q, start_k, seqlen_k)


@triton.jit
def clamped(cu_ptr, total):
    """(start, length) of a sequence, or of a block of them, inside a tensor of `total` rows."""
    start = tl.minimum(tl.maximum(tl.load(cu_ptr), 0), total)
    stop = tl.minimum(tl.maximum(tl.load(cu_ptr + 1), start), total)
    return start, stop - start


@triton.jit
def plane_of(entry, head, stride_b, stride_h):
    """Where one batch entry and head begin; 64-bit, tensors may pass 2^31 elements."""
    return tl.cast(entry, tl.int64) * stride_b + tl.cast(head, tl.int64) * stride_h


@triton.jit
def matrix(ptr, entry, start, head, stride_b, stride_s, stride_h, ALIGN: tl.constexpr):
    """The first element of one sequence and head of q, k or v. Their strides are in units of ALIGN
    elements: Triton vectorises a load only where it knows what the addresses are multiples of.
    """
    offset = plane_of(entry, head, stride_b, stride_h) + tl.cast(start, tl.int64) * stride_s
    return ptr + offset * ALIGN


@triton.jit
def result_matrix(ptr, entry, start, head, total, num_heads, DIM: tl.constexpr):
    """The same of a contiguous (entries, total, num_heads, DIM) tensor, as all results are."""
    row = tl.cast(entry, tl.int64) * total + start
    return ptr + (row * num_heads + head) * DIM


@triton.jit
def row_offset(at, h, num_heads, total_q):
    """Of a sequence and head in lse, delta or a statistic."""
    return (tl.cast(at.entry, tl.int64) * num_heads + h) * total_q + at.start_q


@triton.jit
def load_tile(
    ptr, row, num_rows, stride, DIM: tl.constexpr, TILE: tl.constexpr, PAD: tl.constexpr,
    RAGGED: tl.constexpr,
):  # fmt: skip
    """Rows row : row + TILE of a (num_rows, DIM) matrix as (TILE, PAD), zeros outside it. Only a
    RAGGED tile may reach past the last row.
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
    """The same of one number per row."""
    rows = row + tl.arange(0, TILE)
    if RAGGED:
        return tl.load(ptr + rows, mask=rows < num_rows, other=0.0)
    else:
        return tl.load(ptr + rows)


@triton.jit
def dot(a, b, acc):
    """a @ b + acc in fp32; fp32 operands are multiplied as such, never as TF32."""
    if INTERPRETED:  # it would multiply the bit patterns of bf16; in fp32 the products are the same
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x in dtype, rounded to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:  # where it would cut the low bits off
        bits = x.to(tl.int32, bitcast=True)
        x = (bits + 0x7FFF + (bits >> 16 & 1) & -0x10000).to(tl.float32, bitcast=True)
    if INTERPRETED and dtype == tl.float8e4nv:  # where it would lose a carry into the exponent
        bits = x.to(tl.int32, bitcast=True)
        normal = (bits + 0x7FFFF + (bits >> 20 & 1) & -0x100000).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < 2.0**-6, (x + 24576.0) - 24576.0, normal)  # steps of 2^-9 below
    if dtype == tl.int8:
        x = (x + 12582912.0) - 12582912.0  # 3 * 2^22: no fraction is left beside it
    return x.to(dtype)


@triton.jit
def store_tile(
    ptr, x, row, num_rows, stride, DIM: tl.constexpr, TILE: tl.constexpr, PAD: tl.constexpr
):
    """The inverse of load_tile, in the dtype of ptr."""
    rows, dims = tl.arange(0, TILE), tl.arange(0, PAD)
    at = ptr + tl.cast(row, tl.int64) * stride + (rows[:, None] * stride + dims[None, :])
    inside = (row + rows < num_rows)[:, None] & (dims < DIM)[None, :]
    tl.store(at, rounded(x, ptr.dtype.element_ty), mask=inside)


@triton.jit
def walk_tiles(band, lists, start, stop, seqlen, seqlen_other, OTHER: tl.constexpr):
    """The Walk of the queries start : stop over the keys, in tiles of OTHER.

    Seen from the keys the band is its mirror image: a tile of keys walks the queries with left and
    right exchanged, and the lists of the columns.
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
    none = edge <= first  # a narrow band: every tile is cut
    first, edge = tl.where(none, lo, first), tl.where(none, lo, edge)
    return Walk(lo, first, edge, lo, 0, edge - first, first - lo + hi - edge)


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
    return Walk(f_lo, f_first, f_edge, p_lo, p_hi - p_lo, unmasked, masked * per_block)


@triton.jit
def _row_entries(lists, row):
    """Where the FULL blocks of one block row begin and end, and where its PARTIAL ones do."""
    full = lists.full_offsets + lists.plane + row
    partial = lists.partial_offsets + lists.plane + row
    return tl.load(full), tl.load(full + 1), tl.load(partial), tl.load(partial + 1)


@triton.jit
def bits_of(lists, row, block):
    """The bit tile of one block, or FULL, or EMPTY."""
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
def reaches(at, band, m0, n0, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
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
    """begin + how many of the ascending entries begin : end are below `block`."""
    found = begin
    for e in range(begin, end, BLOCK):
        at = e + tl.arange(0, BLOCK)
        index = tl.load(indices_ptr + at, mask=at < end, other=2147483647)
        found += tl.sum((index < block).to(tl.int32), 0)
    return found


@triton.jit
def unmasked_tile(walk, lists, t, OTHER: tl.constexpr):
    """Where the t-th unmasked tile begins."""
    if lists.tiles is None:
        return (walk.first + t) * OTHER
    else:
        per_block: tl.constexpr = BLOCK // OTHER
        e = t // per_block
        block = tl.load(lists.full_indices + walk.first + e)
        return block * BLOCK + (t - e * per_block) * OTHER


@triton.jit
def masked_tile(walk, lists, t, OTHER: tl.constexpr):
    """Where the t-th masked tile begins, and its bit tile or FULL."""
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
def visible(at, band, lists, bits, i, j, n, inside, TILE_N: tl.constexpr):
    """bool: which queries i see which keys j, the first of which is n. `inside` says which of the
    side that is walked exist; what the program's own tile holds past the end is not stored.
    """
    p = i + (at.seqlen_k - at.seqlen_q)
    seen = inside
    if band.right is not None:
        seen = seen & (j <= p + band.right)
    if band.left is not None:
        seen = seen & (j >= p - band.left)
    if lists.tiles is not None:
        seen = seen & ((_words(lists, bits, i, j, n, TILE_N) >> j % 32 & 1) != 0)
    return seen


@triton.jit
def _words(lists, bits, i, j, n, TILE_N: tl.constexpr):
    """The word of its bit tile that each cell finds itself in. A row is loaded once, not once for
    each of its cells.
    """
    at = tl.cast(bits, tl.int64) * (BLOCK * WORDS) + i % BLOCK * WORDS + n % BLOCK // 32
    stored = i < tl.where(bits >= 0, 1 << 30, 0)
    words = tl.load(lists.tiles + at, mask=stored, other=-1)
    for w in tl.static_range(1, TILE_N // 32):
        more = tl.load(lists.tiles + at + w, mask=stored, other=-1)
        words = tl.where(j // 32 % (TILE_N // 32) == w, more, words)
    return words


@triton.jit
def scores(score, x, at, i, j, LINEAR: tl.constexpr):
    """The score of x = q.k in log2 units, and d score / d(softmax_scale x): 1 but for softcap.

    LINEAR: the score is scale_log2 x with scale_log2 > 0. It then stays x, in units of scale_log2:
    the maximum commutes with the scaling, and one multiply-add does both scaling and subtraction.
    """
    if LINEAR:
        return x, 1.0
    else:
        s, bend = _bent(score, x)
        if score.slope is not None:
            distance = _distance(score.places, at, i, j).to(tl.float32)
            s -= distance * (score.slope.to(tl.float32) * LOG2E)
        if score.bias is not None:
            cell = score.bias + score.plane + tl.cast(i, tl.int64) * score.stride_bias + j
            bias = tl.load(cell, mask=(i < at.seqlen_q) & (j < at.seqlen_k), other=0.0)
            s += bias.to(tl.float32) * LOG2E
        return s, bend


@triton.jit
def _distance(places, at, i, j):
    if places.q is None:
        return tl.abs(i + (at.seqlen_k - at.seqlen_q) - j)
    else:
        p = tl.load(places.q + i, mask=i < at.seqlen_q, other=0)
        return tl.abs(p - tl.load(places.k + j, mask=j < at.seqlen_k, other=0))


@triton.jit
def _bent(score, x):
    if score.softcap is None:
        return x * score.scale_log2, 1.0
    else:
        t = tanh(x * (score.scale_log2 * LN2 / score.softcap))
        return t * (score.softcap * LOG2E), 1.0 - t * t


@triton.jit
def tanh(x):
    """To one or two ulp: odd series near 0, where the exponentials would cancel."""
    y = x * x
    near = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = (1 - e) / (1 + e)
    return tl.where(tl.abs(x) < 0.3, near, tl.where(x < 0, -far, far))


@triton.jit
def kept(
    dropout, at, rows, n, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """bool (TILE_M, TILE_N), or TRANSPOSED: what dropout leaves of the tile of `rows` and the keys
    from n on; the twin of kernels/cpu/philox.py. One draw serves four keys, unless they may stand
    anywhere.
    """
    if dropout.places.q is None:
        quads, b = n // 4 + tl.arange(0, TILE_N // 4), tl.cast(dropout.b, tl.uint32)
        c0, c1, c2, c3 = _philox(dropout, quads, rows, b, [TILE_M, TILE_N // 4])
        words = tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [TILE_M, TILE_N])
    else:
        words = _words_at(dropout, at, rows, n + tl.arange(0, TILE_N), TILE_M, TILE_N)
    return (tl.trans(words) if TRANSPOSED else words).to(tl.int64) < dropout.threshold


@triton.jit
def _words_at(dropout, at, rows, keys, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """u32 (TILE_M, TILE_N) of queries and keys that stand where `places` says."""
    places, inside = dropout.places, rows < at.seqlen_q
    q = tl.load(places.q + rows, mask=inside, other=0)
    b = tl.load(places.q + places.total_q + rows, mask=inside, other=0) + dropout.b
    k = tl.load(places.k + keys, mask=keys < at.seqlen_k, other=0)
    b = tl.broadcast_to(b.to(tl.uint32)[:, None], [TILE_M, TILE_N])
    c0, c1, c2, c3 = _philox(dropout, k // 4, q, b, [TILE_M, TILE_N])
    lane = (k % 4)[None, :]
    return tl.where(lane < 2, tl.where(lane == 0, c0, c1), tl.where(lane == 2, c2, c3))


@triton.jit
def _philox(dropout, quads, rows, b, shape: tl.constexpr):
    """Four words of u32 for every row and group of four keys."""
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
    """The state after one more tile of keys: s (TILE_M, TILE_N), -inf where masked, times `unit` is
    the score; v (TILE_N, dim).
    """
    state, p, alpha = weigh(state, s, unit, STATS)
    m, l, acc, w = state
    if keep is not None:
        p = tl.where(keep, p, 0.0)
    acc = dot(rounded(p, v.dtype), v, acc * alpha[:, None])
    return State(m, l, acc, w)


@triton.jit
def weigh(state, s, unit, STATS: tl.constexpr):
    """What fold_tile does before it meets v: the state but for acc, p, and the factor alpha that
    acc is to be multiplied with.
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
    return State(m_new, l, acc, w), p, alpha


@triton.jit
def add_sink(state, sink):
    """One more logit that has no value, in log2 units."""
    m, l, acc, w = state
    m_new = tl.maximum(m, sink)
    alpha, p = tl.exp2(m - m_new), tl.exp2(sink - m_new)
    shift = tl.where(l > 0, m - m_new, 0.0)
    below = tl.where(p > 0, p * (sink - m_new), 0.0)
    return State(m_new, l * alpha + p, acc * alpha[:, None], (w + l * shift) * alpha + below)


@triton.jit
def score_gradient(s, dp, lse, delta, keep, unit, keep_scale):
    """p as it met v, without the factor keep_scale, and d loss / d score = p (dp - delta)."""
    p = tl.exp2(s * unit - lse)
    if keep is None:
        return p, p * (dp - delta)
    else:
        return tl.where(keep, p, 0.0), p * (tl.where(keep, dp * keep_scale, 0.0) - delta)
