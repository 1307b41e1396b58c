"""Masking: the range of key tiles that a tile of queries sees, and -inf at hidden scores.

Example: causal, 300 queries and keys, tiles of 128. The queries 128..255 see the key tiles 1 and 0.
Tile 1 is cut by the diagonal, tile 0 is full: lo = 0, full_lo = 0, full_hi = 1, hi = 2.
"""

from onchip.kernels.hopper.aggregate import aggregate
from onchip.kernels.hopper.block_sparse import BLOCK, WORDS_PER_ROW
from onchip.kernels.hopper.gluon_types import gl, gluon


@aggregate
class BlockRange:
    """The key tiles of one tile of queries, visited from hi - 1 down to lo: masked down to full_hi,
    full down to full_lo, masked down to lo.
    """

    lo: gl.tensor
    full_lo: gl.tensor
    full_hi: gl.tensor
    hi: gl.tensor


@gluon.jit
def get_block_range(seqlen, row, rows, seqlen_q, seqlen_k, TILE_N: gl.constexpr):
    """The key tiles that `rows` queries from `row` on see."""
    first = row + seqlen_k - seqlen_q  # the key on the diagonal of the first query
    last = first + rows - 1
    end = seqlen_k
    whole_end = seqlen_k
    if seqlen.HAS_RIGHT:
        end = gl.minimum(seqlen_k, last + seqlen.right + 1)
        whole_end = gl.minimum(seqlen_k, first + seqlen.right + 1)
    start = seqlen_k * 0
    whole_start = start
    if seqlen.HAS_LEFT:
        start = gl.maximum(0, first - seqlen.left)
        whole_start = gl.maximum(0, last - seqlen.left)
    lo = start // TILE_N
    hi = gl.maximum((gl.maximum(end, 0) + TILE_N - 1) // TILE_N, lo)
    full_hi = gl.minimum(gl.maximum(gl.maximum(whole_end, 0) // TILE_N, lo), hi)
    full_lo = gl.minimum((whole_start + TILE_N - 1) // TILE_N, full_hi)
    return BlockRange(lo, gl.maximum(full_lo, lo), full_hi, hi)


@gluon.jit
def apply_window(seqlen, s, row, col, seqlen_q, seqlen_k, layout: gl.constexpr):
    """s with -inf at keys past the end or outside of the window. (row, col): position of its
    corner.
    """
    rows = row + seqlen_k - seqlen_q + seqlen.query_rows(s.shape[0], layout)
    cols = gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
    last = gl.zeros_like(rows) + (seqlen_k - 1 - col)
    if seqlen.HAS_RIGHT:
        last = gl.minimum(last, rows + (seqlen.right - col))
    s = _select_where("le", s, cols, last)
    if seqlen.HAS_LEFT:
        s = _select_where("ge", s, cols, rows - (seqlen.left + col))
    return s


LANE_BITS = gl.constexpr(6)  # bits of a column index of wgmma's accumulator that depend on the lane


@gluon.jit
def _select_where(compare: gl.constexpr, s, cols, bound):
    """s where `cols compare bound`, else -inf. In assembly: otherwise the compiler hoists the
    comparisons above the product and keeps 64 predicates in integer registers (390 instructions
    instead of 160). The part of a column that depends on the lane is subtracted from the bounds, so
    that the columns are constants, not registers.
    """
    cols, bound = gl.broadcast(
        (cols & ~LANE_BITS)[None, :], bound[:, None] - (cols & LANE_BITS)[None, :]
    )
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp." + compare + ".s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r", [s, cols, bound], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def load_mask_words(tiles, bits, row, col, TILE: gl.constexpr, layout: gl.constexpr):
    """The mask words of 64 rows of a bit tile, one tensor for every 32 columns; all ones if bits is
    -1.
    """
    rows = row % BLOCK + gl.arange(0, 64, gl.SliceLayout(1, layout))
    words = (gl.full_like(rows, -1),) * (TILE // 32)
    if bits >= 0:
        at = tiles + bits.to(gl.int64) * (BLOCK * WORDS_PER_ROW) + col % BLOCK // 32
        words = ()
        for w in gl.static_range(TILE // 32):
            words = words + (gl.load(at + rows * WORDS_PER_ROW + w),)
    return words


@gluon.jit
def apply_block_mask(seqlen, s, words, row, col, seqlen_q, seqlen_k, layout: gl.constexpr):
    """s with -inf where the bit of its column is 0, past the end, or outside of the window. The end
    and the window clear bits of the words first, so that each score is tested once.
    """
    rows = row + seqlen_k - seqlen_q + seqlen.query_rows(s.shape[0], layout)
    cols = gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
    last = gl.zeros_like(rows) + (seqlen_k - 1 - col)
    if seqlen.HAS_RIGHT:
        last = gl.minimum(last, rows + (seqlen.right - col))
    word = _clip_to_window(seqlen, words[0], 0, rows - col, last)[:, None]
    for w in gl.static_range(1, s.shape[1] // 32):
        cut = _clip_to_window(seqlen, words[w], 32 * w, rows - col, last)
        word = gl.where((cols // 32 == w)[None, :], cut[:, None], word)
    own, bit = gl.broadcast((cols & LANE_BITS)[None, :], (1 << (cols & ~LANE_BITS & 31))[None, :])
    word, own = gl.broadcast(word, own)
    word, bit = gl.broadcast(word >> own, bit)
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; and.b32 t, $2, $3; setp.ne.u32 p, t, 0;"
        " selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r", [s, word, bit], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _clip_to_window(seqlen, word, first: gl.constexpr, diagonal, last):
    """The word of 32 columns from `first` on, with zeros outside of the window of its row."""
    word &= _bit_range(gl.zeros_like(last), gl.maximum(last + (1 - first), 0))
    if seqlen.HAS_LEFT:
        word &= _bit_range(gl.maximum(diagonal - (seqlen.left + first), 0), gl.full_like(last, 32))
    return word


@gluon.jit
def _bit_range(start, count):
    """A word with `count` ones from bit `start` on."""
    return gl.inline_asm_elementwise(
        "bmsk.clamp.b32 $0, $1, $2;", "=r,r,r", [start, count], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def apply_block_mask_transposed(blocks, s, bits, row, col, layout: gl.constexpr):
    """s (keys, queries) of 64 keys from `row` on, with -inf where the bit of the key in the word of
    the query is 0. bits = -1 hides nothing.
    """
    keys = row % BLOCK + gl.arange(0, 64, gl.SliceLayout(1, layout))
    queries = col % BLOCK + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
    stored = (queries >= 0) & (bits >= 0)
    at = (
        blocks.tiles
        + bits.to(gl.int64) * (BLOCK * WORDS_PER_ROW)
        + queries * WORDS_PER_ROW
        + row % BLOCK // 32
    )
    low = gl.load(at, mask=stored, other=-1)[None, :]
    high = gl.load(at + 1, mask=stored, other=-1)[None, :]
    word = gl.where((keys // 32 == row % BLOCK // 32)[:, None], low, high)
    word, keys = gl.broadcast(word, (keys % 32)[:, None])
    return _select_bit(s, word, keys)


@gluon.jit
def _select_bit(s, word, bit):
    """s where that bit of the word is 1, else -inf. In assembly for the same reason as
    _select_where.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; shr.u32 t, $2, $3; and.b32 t, t, 1; setp.ne.u32 p, t, 0;"
        " selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r", [s, word, bit], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
