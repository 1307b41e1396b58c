"""The block lists of a mask, by block rows or by strips of the queries of three consumers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onchip.kernels.hopper.aggregate import aggregate
from onchip.masks import strips

BLOCK = gl.constexpr(128)  # the unit of a block mask: see onchip/masks/blockmask.py
WORDS_PER_ROW = gl.constexpr(4)  # 32-bit words of a row of a bit tile
FAR, CUT = gl.constexpr(strips.FAR), gl.constexpr(strips.CUT)
BIT_TILE, ENTRY = gl.constexpr(strips.BIT_TILE), gl.constexpr(strips.ENTRY)


@aggregate
class BlockEntries:
    """Where the lists of one block row (or block column) begin, and how long they are."""

    full: gl.tensor
    num_full: gl.tensor
    partial: gl.tensor
    num_partial: gl.tensor


@gluon.jit
def num_listed_tiles(entries, TILE: gl.constexpr):
    """How many tiles the listed blocks are."""
    return (entries.num_full + entries.num_partial) * (BLOCK // TILE)


@aggregate
class BlockMaskLists:
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
    STRIPS: gl.constexpr = False

    @gluon.jit
    def entries(self, batch, head, block):
        """The blocks listed beside one block of queries (or of keys, in the lists of columns)."""
        at = batch * self.stride_b + head * self.stride_h + block
        full = gl.load(self.full_offsets + at)
        partial = gl.load(self.partial_offsets + at)
        num_full = gl.load(self.full_offsets + at + 1) - full
        return BlockEntries(
            full, num_full, partial, gl.load(self.partial_offsets + at + 1) - partial
        )

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
class StripMaskLists:
    """A block mask by strips of the queries of three consumers, and its bit tiles: see
    onchip/masks/strips.py.
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
        """What one of the two block rows of a strip sees of it."""
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
    """Where the x-th block of a side lies: from the alone-th on, so many of the others are before
    it. (The second side's own begin after the first one's: its `alone` is one less.)
    """
    return x + gl.maximum(gl.minimum(x - alone, others), 0)


@aggregate
class StripEntry:
    """A block of a strip that one of its sides sees, and its part in that side's row. Where there
    is a BAND beside the mask, `block` is its number.
    """

    block: gl.tensor
    part: gl.tensor
    BAND: gl.constexpr

    @gluon.jit
    def far(self):
        """1 if the entry that comes after it is the other side's alone, else 0."""
        return self.part & FAR

    @gluon.jit
    def is_masked(self):
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
class StripView:
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
    def entry(self, at):
        """What the entry that lies there is to this side; any numbers after the last it visits."""
        part = gl.load(at + 1 + self.side)
        if self.BAND:
            return StripEntry(gl.load(at), part, True)
        else:
            return StripEntry(part, part, False)
