"""The block lists of a mask: by block rows, or by strips of the 192 queries of three consumers."""

from onchip.kernels import strips
from onchip.kernels.hopper.aggregate import aggregate
from onchip.kernels.hopper.gluon_types import gl, gluon

BLOCK = gl.constexpr(128)  # the unit of a block mask: see onchip/masks/blockmask.py
WORDS_PER_ROW = gl.constexpr(4)  # 32-bit words of a row of a bit tile
FAR, CUT = gl.constexpr(strips.FAR), gl.constexpr(strips.CUT)
BIT_TILE, ENTRY = gl.constexpr(strips.BIT_TILE), gl.constexpr(strips.ENTRY)


@aggregate
class BlockEntries:
    """The lists of one block row (or block column): where they begin, and their lengths."""

    full: gl.tensor
    num_full: gl.tensor
    partial: gl.tensor
    num_partial: gl.tensor


@gluon.jit
def num_listed_tiles(entries, TILE: gl.constexpr):
    """The number of tiles in the listed blocks."""
    return (entries.num_full + entries.num_partial) * (BLOCK // TILE)


@aggregate
class BlockMaskLists:
    """The lists of a block mask and its bit tiles. ON: there is a mask."""

    full_offsets: gl.tensor
    full_indices: gl.tensor
    partial_offsets: gl.tensor
    partial_indices: gl.tensor
    partial_tiles: gl.tensor
    tiles: gl.tensor
    stride_b: gl.tensor
    stride_h: gl.tensor
    ON: gl.constexpr
    STRIPS: gl.constexpr = False

    @gluon.jit
    def entries(self, batch, head, block):
        """The lists of one block of queries (of keys, in the lists of columns)."""
        at = batch * self.stride_b + head * self.stride_h + block
        full = gl.load(self.full_offsets + at)
        partial = gl.load(self.partial_offsets + at)
        num_full = gl.load(self.full_offsets + at + 1) - full
        return BlockEntries(
            full, num_full, partial, gl.load(self.partial_offsets + at + 1) - partial
        )

    @gluon.jit
    def tile(self, entries, j, TILE: gl.constexpr):
        """(index of the j-th tile, its bit tile or -1). PARTIAL blocks come first."""
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
class StripMaskLists:
    """A block mask by strips of 192 queries, for three consumers, and its bit tiles: see
    onchip/kernels/strips.py.
    """

    heads: gl.tensor
    entries: gl.tensor
    tiles: gl.tensor
    stride_b: gl.tensor
    stride_h: gl.tensor
    BAND: gl.constexpr
    ON: gl.constexpr = True
    STRIPS: gl.constexpr = True

    @gluon.jit
    def strip_view(self, batch, head, strip, side):
        """The entries of a strip that one of its two block rows sees."""
        at = self.heads + batch * self.stride_b + head * self.stride_h + strip * 4
        both = gl.load(at + 1)
        own = gl.load(at + 2 + side)
        others = gl.load(at + 3 - side)
        entries = self.entries + gl.load(at).to(gl.int64) * ENTRY
        count = both + own
        bottom = _strip_index(0, both - side, others)
        top = _strip_index(count - 1, both - side, others)
        return StripView(entries, side, others, count, bottom, top, self.BAND)


@gluon.jit
def _strip_index(x, alone, others):
    """Index of the x-th block of a side within the strip. From block `alone` on, up to `others`
    entries of the other side lie between. (Entries of the second side come after the entries of the
    first: its `alone` is one less.)
    """
    return x + gl.maximum(gl.minimum(x - alone, others), 0)


@aggregate
class StripEntry:
    """A block of a strip that one side sees, and the side's word for it. With a window (BAND),
    `block` is its number.
    """

    block: gl.tensor
    part: gl.tensor
    BAND: gl.constexpr

    @gluon.jit
    def far(self):
        """1 if the next entry belongs to the other side alone, else 0."""
        return self.part & FAR

    @gluon.jit
    def is_masked(self):
        """Whether some scores of the block may be hidden."""
        if self.BAND:
            return True
        else:
            return self.part >= CUT

    @gluon.jit
    def tile(self, seqlen_k):
        """(its number, its bit tile or -1). Without a window the number matters only for the block
        in which the keys end; all others are 0.
        """
        bits = self.part // BIT_TILE - 1
        if self.BAND:
            return self.block, bits
        else:
            return gl.where(self.part & CUT != 0, (seqlen_k - 1) // BLOCK, 0), bits


@aggregate
class StripView:
    """The entries of a strip that one side sees: `count` blocks, first the blocks that both see,
    then its own, alternating with the other side's. They are visited from entry `top` down
    to `bottom`.
    """

    entries: gl.tensor
    side: gl.tensor
    others: gl.tensor
    count: gl.tensor
    bottom: gl.tensor
    top: gl.tensor
    BAND: gl.constexpr

    @gluon.jit
    def total(self):
        """All entries of the strip."""
        return self.count + self.others

    @gluon.jit
    def at(self, e):
        """Address of an entry."""
        return self.entries + e * ENTRY

    @gluon.jit
    def after(self, at, far):
        """Address of the next entry that this side visits; `far` is that of the entry at `at`."""
        return at - (1 + far) * ENTRY

    @gluon.jit
    def entry(self, at):
        """The entry at this address, for this side. After the last entry the values
        are arbitrary.
        """
        part = gl.load(at + 1 + self.side)
        if self.BAND:
            return StripEntry(gl.load(at), part, True)
        else:
            return StripEntry(part, part, False)
