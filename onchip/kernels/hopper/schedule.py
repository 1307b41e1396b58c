"""Which tile of queries a program takes next, and which tiles of keys it sees."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from onchip.kernels import strips
from onchip.kernels.hopper.pipe import LANES, Lookups, make_lookups


@aggregate
class Shape:
    """The runtime shape of a call. Windows count from the diagonal; causal is a right side of 0. A
    tile holds GROUP rows of each query, one for each of GROUP neighbouring heads.
    """

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
    GROUP: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k, total_q, total_k,
        num_heads, group_size, left, right, PACKED, HAS_LEFT, HAS_RIGHT, GROUP=1,
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
        self.GROUP = gl.constexpr(GROUP)

    @gluon.jit
    def sequence(self, batch):
        """(first row of q, rows, first key, keys) of one sequence, within the tensors whatever
        cu_seqlens says.
        """
        q0, seqlen_q = self.queries(batch)
        k0, seqlen_k = self.keys(batch)
        return q0, seqlen_q, k0, seqlen_k

    @gluon.jit
    def queries(self, batch):
        """(first row of q, rows) of one sequence."""
        if self.PACKED:
            return _clamped(self.cu_seqlens_q + batch, self.total_q)
        else:
            return 0, self.seqlen_q

    @gluon.jit
    def keys(self, batch):
        """(first key, keys) of one sequence."""
        if self.PACKED:
            return _clamped(self.cu_seqlens_k + batch, self.total_k)
        else:
            return 0, self.seqlen_k

    @gluon.jit
    def planes(self):
        """Of one batch entry: heads, or groups of them that share tiles."""
        if self.GROUP == 1:
            return self.num_heads
        else:
            return self.num_heads // self.GROUP

    @gluon.jit
    def first_head(self, plane):
        if self.GROUP == 1:
            return plane % self.num_heads
        else:
            return plane * self.GROUP % self.num_heads

    @gluon.jit
    def queries_of(self, rows: gl.constexpr, layout: gl.constexpr):
        """Whose rows a tile holds, from its first query on."""
        if self.GROUP == 1:
            return gl.arange(0, rows, gl.SliceLayout(1, layout))
        else:
            return gl.arange(0, rows, gl.SliceLayout(1, layout)) // self.GROUP

    @gluon.jit
    def coord(self, batch, head, first, length, row):
        """Where a tile lies for TMA. Packed descriptors are ragged: see tensors.descriptor."""
        if self.PACKED:
            far: gl.constexpr = 1 << 30
            return [far, first + length, head, far - length + row, 0]
        else:
            return [batch, head, row, 0]

    @gluon.jit
    def q_coord(self, batch, head, first, length, row):
        """The same for rows of q and out: see tensors.grouped."""
        if self.GROUP == 1:
            return self.coord(batch, head, first, length, row)
        elif self.PACKED:
            far: gl.constexpr = 1 << 30
            return [far, first + length, far - length + row, head, 0]
        else:
            return [batch, row, head, 0]


@gluon.jit
def _clamped(offsets, total):
    """(first, how many) between two neighbours of cu_seqlens, whatever they say."""
    start = gl.minimum(gl.maximum(gl.load(offsets), 0), total)
    stop = gl.minimum(gl.maximum(gl.load(offsets + 1), start), total)
    return start, stop - start


@aggregate
class Pages:
    """Where keys lie in pages of SIZE slots (0: nowhere): a row of the table for each sequence, of
    `columns` entries and `stride` apart. A tile is copied in PARTS of BOX slots. Pages begin span_k
    (span_v) rows of the pool apart. `ids`: the pages of tiles to come.
    """

    table: gl.tensor
    seqlens: gl.tensor
    stride: gl.tensor
    columns: gl.tensor
    num_pages: gl.tensor
    span_k: gl.tensor
    span_v: gl.tensor
    ids: Lookups
    SIZE: gl.constexpr
    BOX: gl.constexpr
    PARTS: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, table, seqlens, stride, columns, num_pages, span_k, span_v, ids, SIZE, BOX, PARTS
    ):
        self.table = table
        self.seqlens = seqlens
        self.stride = stride
        self.columns = columns
        self.num_pages = num_pages
        self.span_k = span_k
        self.span_v = span_v
        self.ids = ids
        self.SIZE = gl.constexpr(SIZE)
        self.BOX = gl.constexpr(BOX)
        self.PARTS = gl.constexpr(PARTS)

    @gluon.jit
    def length(self, batch):
        """Keys of one sequence, as many as its row of the table has room for at most."""
        return gl.minimum(gl.maximum(gl.load(self.seqlens + batch), 0), self.columns * self.SIZE)

    @gluon.jit
    def look_up(self, i, batch, key, wanted):
        """Ask for the pages of filling i, the tile of keys from `key` on. Of what lies outside of
        the table nothing is used.
        """
        lanes = gl.arange(0, self.PARTS, LANES)
        column = gl.minimum(gl.maximum(key // self.SIZE + lanes, 0), self.columns - 1)
        self.ids.fetch(i, self.table + batch * self.stride + column, wanted)

    @gluon.jit
    def found(self, i):
        """The page of every part of filling i; bad ids give one that exists."""
        pages = ()
        for x in gl.static_range(self.PARTS):
            page = self.ids.number(i, x)
            pages = pages + (gl.minimum(gl.maximum(page, 0), self.num_pages - 1),)
        return pages

    @gluon.jit
    def at(self, page, part: gl.constexpr, span, key, start, stop, head):
        """Where a part of the tile of keys from `key` on lies for TMA: see tensors.paged. Keys from
        `stop` on arrive as 0, and so does a part before `start`: its page may be gone.
        """
        far: gl.constexpr = 1 << 30
        key += part * self.BOX
        length = gl.minimum(gl.maximum(stop - key, 0), self.BOX)
        length = gl.where(key + self.BOX <= start, 0, length)
        return [far, page * span + key % self.SIZE + length, head, far - length, 0]


@gluon.jit
def make_pages(table, seqlens, stride, columns, num_pages, span_k, span_v, SIZE: gl.constexpr,
               TILE_N: gl.constexpr):  # fmt: skip
    BOX: gl.constexpr = min(SIZE, TILE_N)
    PARTS: gl.constexpr = max(1, TILE_N // SIZE) if SIZE else 1
    ids = make_lookups(PARTS)
    return Pages(table, seqlens, stride, columns, num_pages, span_k, span_v, ids, SIZE, BOX, PARTS)


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
    rows = row + seqlen_k - seqlen_q + shape.queries_of(s.shape[0], layout)
    cols = gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
    last = gl.zeros_like(rows) + (seqlen_k - 1 - col)
    if shape.HAS_RIGHT:
        last = gl.minimum(last, rows + (shape.right - col))
    s = _keep("le", s, cols, last)
    if shape.HAS_LEFT:
        s = _keep("ge", s, cols, rows - (shape.left + col))
    return s


OWN = gl.constexpr(6)  # bits of a column that tell threads apart in scores of matrix products


@gluon.jit
def _keep(compare: gl.constexpr, s, cols, bound):
    """s where `cols compare bound`, else -inf. In assembly, because the compiler would hoist the
    comparisons above the product and park 64 predicates in integer registers (390 instructions
    instead of 160). What a thread's columns have of its own is taken off the bounds of its two
    rows, so that they are constants, not registers.
    """
    cols, bound = gl.broadcast((cols & ~OWN)[None, :], bound[:, None] - (cols & OWN)[None, :])
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp." + compare + ".s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r", [s, cols, bound], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


BLOCK = gl.constexpr(128)  # the unit of a block mask: see onchip/masks/blockmask.py
WORDS = gl.constexpr(4)  # 32-bit words of a row of a bit tile


@aggregate
class Entries:
    """Where the lists of one block row (or block column) begin, and how long they are."""

    full: gl.tensor
    num_full: gl.tensor
    partial: gl.tensor
    num_partial: gl.tensor

    @gluon.constexpr_function
    def __init__(self, full, num_full, partial, num_partial):
        self.full = full
        self.num_full = num_full
        self.partial = partial
        self.num_partial = num_partial


@gluon.jit
def block_tiles(entries, TILE: gl.constexpr):
    """How many tiles the listed blocks are."""
    return (entries.num_full + entries.num_partial) * (BLOCK // TILE)


@aggregate
class Blocks:
    """The lists of a block mask and its bit tiles, in use if ON."""

    full_offsets: gl.tensor
    full_indices: gl.tensor
    partial_offsets: gl.tensor
    partial_indices: gl.tensor
    partial_tiles: gl.tensor
    tiles: gl.tensor
    stride_b: gl.tensor
    stride_h: gl.tensor
    ON: gl.constexpr
    STRIPS: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, full_offsets, full_indices, partial_offsets, partial_indices, partial_tiles, tiles,
        stride_b, stride_h, ON,
    ):  # fmt: skip
        self.full_offsets = full_offsets
        self.full_indices = full_indices
        self.partial_offsets = partial_offsets
        self.partial_indices = partial_indices
        self.partial_tiles = partial_tiles
        self.tiles = tiles
        self.stride_b = stride_b
        self.stride_h = stride_h
        self.ON = gl.constexpr(ON)
        self.STRIPS = gl.constexpr(False)

    @gluon.jit
    def entries(self, batch, head, block):
        """The blocks listed beside one block of queries (or of keys, in the lists of columns)."""
        at = batch * self.stride_b + head * self.stride_h + block
        full = gl.load(self.full_offsets + at)
        partial = gl.load(self.partial_offsets + at)
        num_full = gl.load(self.full_offsets + at + 1) - full
        return Entries(full, num_full, partial, gl.load(self.partial_offsets + at + 1) - partial)

    @gluon.jit
    def tile(self, entries, j, TILE: gl.constexpr):
        """(number of the tile visited j-th, its bit tile or -1): PARTIAL blocks come first."""
        PER: gl.constexpr = BLOCK // TILE
        e = j // PER
        partial = e < entries.num_partial
        full = (e >= entries.num_partial) & (e < entries.num_partial + entries.num_full)
        at = entries.partial + e
        bits = gl.load(self.partial_tiles + at, mask=partial, other=-1)
        block = gl.load(self.partial_indices + at, mask=partial, other=0)
        at = entries.full + e - entries.num_partial
        block += gl.load(self.full_indices + at, mask=full, other=0)
        return block * PER + j % PER, bits


@aggregate
class Strips:
    """A block mask by strips of the queries of three consumers, and its bit tiles: see
    onchip/kernels/strips.py.
    """

    heads: gl.tensor
    entries: gl.tensor
    tiles: gl.tensor
    stride_b: gl.tensor
    stride_h: gl.tensor
    BAND: gl.constexpr
    ON: gl.constexpr
    STRIPS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, heads, entries, tiles, stride_b, stride_h, BAND):
        self.heads = heads
        self.entries = entries
        self.tiles = tiles
        self.stride_b = stride_b
        self.stride_h = stride_h
        self.BAND = gl.constexpr(BAND)
        self.ON = gl.constexpr(True)
        self.STRIPS = gl.constexpr(True)

    @gluon.jit
    def share(self, batch, head, strip, side):
        """What one of the two block rows of a strip sees of it."""
        at = self.heads + batch * self.stride_b + head * self.stride_h + strip * 4
        both = gl.load(at + 1)
        own = gl.load(at + 2 + side)
        others = gl.load(at + 3 - side)
        entries = self.entries + gl.load(at).to(gl.int64) * ENTRY
        count = both + own
        bottom = _entry_of(0, both - side, others)
        top = _entry_of(count - 1, both - side, others)
        return Share(entries, side, others, count, bottom, top, self.BAND)


@gluon.jit
def _entry_of(x, alone, others):
    """Where the x-th block of a side lies: from the alone-th on, so many of the others are before
    it. (The second side's own begin after the first one's: its `alone` is one less.)
    """
    return x + gl.maximum(gl.minimum(x - alone, others), 0)


FAR, CUT = gl.constexpr(strips.FAR), gl.constexpr(strips.CUT)
BIT_TILE, ENTRY = gl.constexpr(strips.BIT_TILE), gl.constexpr(strips.ENTRY)


@aggregate
class Seen:
    """A block of a strip that one of its sides sees, and its part in that side's row. Where there
    is a BAND beside the mask, `block` is its number.
    """

    block: gl.tensor
    part: gl.tensor
    BAND: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, block, part, BAND):
        self.block = block
        self.part = part
        self.BAND = gl.constexpr(BAND)

    @gluon.jit
    def far(self):
        """1 if the entry that comes after it is the other side's alone, else 0."""
        return self.part & FAR

    @gluon.jit
    def hides(self):
        """Whether some of its scores may be hidden."""
        if self.BAND:
            return True
        else:
            return self.part >= CUT

    @gluon.jit
    def tile(self, seqlen_k):
        """(its number, its bit tile or -1). Without a band it only matters whether keys end in it:
        0 stands for all in which they do not.
        """
        bits = self.part // BIT_TILE - 1
        if self.BAND:
            return self.block, bits
        else:
            return gl.where(self.part & CUT != 0, (seqlen_k - 1) // BLOCK, 0), bits


@aggregate
class Share:
    """What one side of a strip sees of its entries: `count` blocks, those that both sides see and
    then its own, by turns with as many of the others as there are. They are visited from the entry
    `top` down to `bottom`.
    """

    entries: gl.tensor
    side: gl.tensor
    others: gl.tensor
    count: gl.tensor
    bottom: gl.tensor
    top: gl.tensor
    BAND: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, entries, side, others, count, bottom, top, BAND):
        self.entries = entries
        self.side = side
        self.others = others
        self.count = count
        self.bottom = bottom
        self.top = top
        self.BAND = gl.constexpr(BAND)

    @gluon.jit
    def total(self):
        """All entries of the strip."""
        return self.count + self.others

    @gluon.jit
    def at(self, e):
        """Where an entry lies."""
        return self.entries + e * ENTRY

    @gluon.jit
    def after(self, at, far):
        """Where the next one that this side visits lies: `far` is that of the one at `at`."""
        return at - (1 + far) * ENTRY

    @gluon.jit
    def seen(self, at):
        """What the entry that lies there is to this side; any numbers after the last it visits."""
        part = gl.load(at + 1 + self.side)
        if self.BAND:
            return Seen(gl.load(at), part, True)
        else:
            return Seen(part, part, False)


@gluon.jit
def bit_words(tiles, bits, row, col, TILE: gl.constexpr, layout: gl.constexpr):
    """The words of 64 rows of a bit tile, a tensor for every 32 columns; ones if bits is -1."""
    rows = row % BLOCK + gl.arange(0, 64, gl.SliceLayout(1, layout))
    words = (gl.full_like(rows, -1),) * (TILE // 32)
    if bits >= 0:
        at = tiles + bits.to(gl.int64) * (BLOCK * WORDS) + col % BLOCK // 32
        words = ()
        for w in gl.static_range(TILE // 32):
            words = words + (gl.load(at + rows * WORDS + w),)
    return words


@gluon.jit
def hide(shape, s, words, row, col, seqlen_q, seqlen_k, layout: gl.constexpr):
    """s with -inf where the bit of its column is 0, past the end, or outside the window: the last
    two clear bits first, so that each score is looked at once.
    """
    rows = row + seqlen_k - seqlen_q + shape.queries_of(s.shape[0], layout)
    cols = gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
    last = gl.zeros_like(rows) + (seqlen_k - 1 - col)
    if shape.HAS_RIGHT:
        last = gl.minimum(last, rows + (shape.right - col))
    word = _within(shape, words[0], 0, rows - col, last)[:, None]
    for w in gl.static_range(1, s.shape[1] // 32):
        cut = _within(shape, words[w], 32 * w, rows - col, last)
        word = gl.where((cols // 32 == w)[None, :], cut[:, None], word)
    own, bit = gl.broadcast((cols & OWN)[None, :], (1 << (cols & ~OWN & 31))[None, :])
    word, own = gl.broadcast(word, own)
    word, bit = gl.broadcast(word >> own, bit)
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; and.b32 t, $2, $3; setp.ne.u32 p, t, 0;"
        " selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r", [s, word, bit], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _within(shape, word, first: gl.constexpr, diagonal, last):
    """The bits of 32 columns from `first` on that lie within the window of their row."""
    word &= _ones(gl.zeros_like(last), gl.maximum(last + (1 - first), 0))
    if shape.HAS_LEFT:
        word &= _ones(gl.maximum(diagonal - (shape.left + first), 0), gl.full_like(last, 32))
    return word


@gluon.jit
def _ones(start, count):
    """So many bits from `start` on."""
    return gl.inline_asm_elementwise(
        "bmsk.clamp.b32 $0, $1, $2;", "=r,r,r", [start, count], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def hide_transposed(blocks, s, bits, row, col, layout: gl.constexpr):
    """s (keys, queries) of 64 keys from `row` on with -inf where the bit of the key in the word of
    the query is 0; nothing is hidden if bits is -1.
    """
    keys = row % BLOCK + gl.arange(0, 64, gl.SliceLayout(1, layout))
    queries = col % BLOCK + gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
    stored = (queries >= 0) & (bits >= 0)
    at = blocks.tiles + bits.to(gl.int64) * (BLOCK * WORDS) + queries * WORDS + row % BLOCK // 32
    low = gl.load(at, mask=stored, other=-1)[None, :]
    high = gl.load(at + 1, mask=stored, other=-1)[None, :]
    word = gl.where((keys // 32 == row % BLOCK // 32)[:, None], low, high)
    word, keys = gl.broadcast(word, (keys % 32)[:, None])
    return _keep_bit(s, word, keys)


@gluon.jit
def padded_tile(shape, total, num_sequences, batch, head, first, length, TILE: gl.constexpr):
    """Number of the first tile of a sequence of queries in buffers where every sequence of every
    head starts a new tile.
    """
    if shape.PACKED:
        return head * (total // TILE + num_sequences) + first // TILE + batch
    else:
        return (batch * shape.num_heads + head) * ((length + TILE - 1) // TILE)


@gluon.jit
def _keep_bit(s, word, bit):
    """s where that bit of the word is 1, else -inf. In assembly for the same reason as _keep."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 t; shr.u32 t, $2, $3; and.b32 t, t, 1; setp.ne.u32 p, t, 0;"
        " selp.f32 $0, $1, 0fFF800000, p; }",
        "=f,f,r,r", [s, word, bit], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@aggregate
class Order:
    """Tiles of queries in the order they are handed out: sections of heads whose K and V fit the
    L2; in a section the longest rows of all its heads first (those of a causal call, and as good a
    guess as any for a mask), or head after head.
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


@gluon.jit
def find_tile(shape, order, batch, number, block, passed, ROWS: gl.constexpr):
    """(ticket, block, passed): where among all tickets the number-th tile of packed queries is that
    exists, of ROWS queries each; the tiles of a sequence come last first, for all its heads one
    after another. A ticket too many if there are not as many.

    `passed` tiles lie before the 32 sequences from `block` on, in which the last one was found:
    numbers rise, so that a producer counts no sequence twice.
    """
    planes = shape.planes()
    tile = number // planes
    stops = _count_tiles(shape, batch, block, ROWS)
    count = gl.max(stops, 0)
    while (passed + count <= tile) & (block < batch):
        passed += count
        block += 32
        stops = _count_tiles(shape, batch, block, ROWS)
        count = gl.max(stops, 0)
    before = passed + stops <= tile
    sequence = block + gl.sum(before.to(gl.int32), 0)
    stop = passed + gl.min(gl.where(before, 1 << 30, stops), 0)
    ticket = (sequence * planes + number % planes) * order.tiles_m + stop - 1 - tile
    exists = (sequence < batch) & (number < order.num_tiles)  # bad lengths have more than were cut
    return gl.where(exists, ticket, order.num_tiles), block, passed


@gluon.jit
def _count_tiles(shape, batch, block, ROWS: gl.constexpr):
    """Tiles of queries up to and with each of 32 sequences from `block` on, in the lanes."""
    b = block + gl.arange(0, 32, LANES)
    _, seqlen_q = shape.queries(gl.minimum(b, batch - 1))
    tiles = gl.where(b < batch, (seqlen_q + ROWS - 1) // ROWS, 0)
    return gl.associative_scan(tiles, 0, plus)


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def next_ticket(counter, ticket, num_tiles, DYNAMIC: gl.constexpr, SPARSE: gl.constexpr = False):
    """The ticket after this one, num_tiles or more if there is none. Each of num_tiles tickets
    leads to one draw, and the last draw leaves the counter as the launch found it, at 0 (SPARSE:
    see end_sparse). With a program for each tile nobody draws: it is not touched, and may be
    anything.
    """
    if DYNAMIC:
        ticket = num_tiles
        if num_tiles > gl.num_programs(0):
            drawn = gl.atomic_add(counter, 1, sem="relaxed")  # a number, and no data behind it
            if not SPARSE:
                gl.store(counter, 0, mask=drawn == num_tiles - 1)
            ticket = drawn + gl.num_programs(0)
        return ticket
    else:
        return ticket + gl.num_programs(0)


@gluon.jit
def end_sparse(counter, num_tiles):
    """Where lengths decide how often programs draw, and may be wrong, the last program to end
    leaves the counter at 0, and so the number of those that have ended, which lies behind it.
    """
    if num_tiles > gl.num_programs(0):
        ended = gl.atomic_add(counter + 1, 1)  # after all of its draws
        is_last = ended == gl.num_programs(0) - 1
        gl.store(counter, 0, mask=is_last)
        gl.store(counter + 1, 0, mask=is_last)
