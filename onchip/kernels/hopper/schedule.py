"""Which tile of queries a program takes next, and which tiles of keys it sees."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate


@aggregate
class Shape:
    """The runtime shape of a call. Windows count from the diagonal; causal is a right side of 0."""

    cu_seqlens_q: gl.tensor
    cu_seqlens_k: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    total_q: gl.tensor
    total_k: gl.tensor
    num_heads: gl.tensor
    group_size: gl.tensor
    left: gl.tensor
    right: gl.tensor
    PACKED: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k, total_q, total_k,
        num_heads, group_size, left, right, PACKED, HAS_LEFT, HAS_RIGHT,
    ):  # fmt: skip
        self.cu_seqlens_q = cu_seqlens_q
        self.cu_seqlens_k = cu_seqlens_k
        self.seqlen_q = seqlen_q
        self.seqlen_k = seqlen_k
        self.total_q = total_q
        self.total_k = total_k
        self.num_heads = num_heads
        self.group_size = group_size
        self.left = left
        self.right = right
        self.PACKED = gl.constexpr(PACKED)
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)

    @gluon.jit
    def sequence(self, batch):
        """(first row of q, rows, first key, keys) of one sequence, within the tensors whatever
        cu_seqlens says.
        """
        if self.PACKED:
            q0 = gl.minimum(gl.maximum(gl.load(self.cu_seqlens_q + batch), 0), self.total_q)
            q1 = gl.minimum(gl.maximum(gl.load(self.cu_seqlens_q + batch + 1), q0), self.total_q)
            k0 = gl.minimum(gl.maximum(gl.load(self.cu_seqlens_k + batch), 0), self.total_k)
            k1 = gl.minimum(gl.maximum(gl.load(self.cu_seqlens_k + batch + 1), k0), self.total_k)
            return q0, q1 - q0, k0, k1 - k0
        else:
            return 0, self.seqlen_q, 0, self.seqlen_k

    @gluon.jit
    def coord(self, batch, head, first, length, row):
        """Where a tile lies for TMA. Packed descriptors are ragged: see forward._descriptor."""
        if self.PACKED:
            far: gl.constexpr = 1 << 30
            return [far, first + length, head, far - length + row, 0]
        else:
            return [batch, head, row, 0]


@aggregate
class Keys:
    """Tiles of keys for one tile of queries: masked from `hi` down to `full_hi`, whole down to
    `full_lo`, masked down to `lo`.
    """

    lo: gl.tensor
    full_lo: gl.tensor
    full_hi: gl.tensor
    hi: gl.tensor

    @gluon.constexpr_function
    def __init__(self, lo, full_lo, full_hi, hi):
        self.lo = lo
        self.full_lo = full_lo
        self.full_hi = full_hi
        self.hi = hi


@gluon.jit
def keys_of(shape, row, rows, seqlen_q, seqlen_k, TILE_N: gl.constexpr):
    """The tiles of keys that `rows` queries from `row` on see."""
    first = row + seqlen_k - seqlen_q  # the key on the diagonal of the first query
    last = first + rows - 1
    end = seqlen_k
    whole_end = seqlen_k
    if shape.HAS_RIGHT:
        end = gl.minimum(seqlen_k, last + shape.right + 1)
        whole_end = gl.minimum(seqlen_k, first + shape.right + 1)
    start = seqlen_k * 0
    whole_start = start
    if shape.HAS_LEFT:
        start = gl.maximum(0, first - shape.left)
        whole_start = gl.maximum(0, last - shape.left)
    lo = start // TILE_N
    hi = gl.maximum((gl.maximum(end, 0) + TILE_N - 1) // TILE_N, lo)
    full_hi = gl.minimum(gl.maximum(gl.maximum(whole_end, 0) // TILE_N, lo), hi)
    full_lo = gl.minimum((whole_start + TILE_N - 1) // TILE_N, full_hi)
    return Keys(lo, gl.maximum(full_lo, lo), full_hi, hi)


@gluon.jit
def visible(shape, s, row, col, seqlen_q, seqlen_k, layout: gl.constexpr):
    """s with -inf at keys past the end or outside the window; row, col: position of its corner."""
    rows = row + seqlen_k - seqlen_q + gl.arange(0, s.shape[0], gl.SliceLayout(1, layout))
    cols = gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
    last = gl.zeros_like(rows) + (seqlen_k - 1 - col)
    if shape.HAS_RIGHT:
        last = gl.minimum(last, rows + (shape.right - col))
    s = _keep("le", s, cols, last)
    if shape.HAS_LEFT:
        s = _keep("ge", s, cols, rows - (shape.left + col))
    return s


@gluon.jit
def _keep(compare: gl.constexpr, s, cols, bound):
    """s where `cols compare bound`, else -inf. In assembly, because the compiler would hoist the
    comparisons above the product and park 64 predicates in integer registers (390 instructions
    instead of 160).
    """
    cols, bound = gl.broadcast(cols[None, :], bound[:, None])
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp." + compare + ".s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r", [s, cols, bound], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@aggregate
class Order:
    """Tiles of queries in the order they are handed out: sections of heads whose K and V fit the
    L2; in a section the longest rows of all its heads first (causal), or head after head.
    """

    tiles_m: gl.tensor
    section: gl.tensor
    num_tiles: gl.tensor
    LONGEST_FIRST: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles_m, section, num_tiles, LONGEST_FIRST):
        self.tiles_m = tiles_m
        self.section = section
        self.num_tiles = num_tiles
        self.LONGEST_FIRST = gl.constexpr(LONGEST_FIRST)

    @gluon.jit
    def tile(self, ticket):
        """(tile of queries, batch * num_heads + head) of a ticket."""
        if self.LONGEST_FIRST:
            per_section = self.tiles_m * self.section
            section = ticket // per_section
            rest = ticket - section * per_section
            return (
                self.tiles_m - 1 - rest // self.section,
                section * self.section + rest % self.section,
            )
        else:
            return ticket % self.tiles_m, ticket // self.tiles_m
