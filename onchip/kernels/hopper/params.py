"""What the producer and the consumers of the Hopper forward agree on: the call, how it is computed,
and which queries are next.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onchip.kernels.hopper.aggregate import aggregate
from onchip.kernels.hopper.block_sparse import BLOCK, Blocks, Strips, block_tiles
from onchip.kernels.hopper.mask import keys_of
from onchip.kernels.hopper.paging import Pages
from onchip.kernels.hopper.pipeline import Baton, Ring, Tickets
from onchip.kernels.hopper.seqlen import Shape
from onchip.kernels.hopper.softmax import Scale
from onchip.kernels.hopper.tile_scheduler import Order, find_tile


@aggregate
class Pipes:
    """What producer and consumers share. Releasing key tile i says that value tile i - 1 is free
    too.
    """

    q: Ring
    k: Ring
    v: Ring
    tickets: Tickets
    baton: Baton

    @gluon.jit
    def close(self):
        self.q.close()
        self.k.close()
        self.v.close()
        self.tickets.close()
        self.baton.close()


@aggregate
class Config:
    """How it is computed. S is the layout of scores (64, TILE_N), O that of the output (64, WIDTH),
    P that of probabilities on the left of their product. Of these each has BITS, of the operands of
    scores S_BITS.
    """

    TILE_N: gl.constexpr
    WIDTH: gl.constexpr
    CONSUMERS: gl.constexpr
    PINGPONG: gl.constexpr
    DYNAMIC: gl.constexpr
    OUT_IN_Q: gl.constexpr
    RESCALE: gl.constexpr
    POLY: gl.constexpr
    UNDER: gl.constexpr
    HOLD: gl.constexpr
    S: gl.constexpr
    O: gl.constexpr
    P: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, TILE_N, WIDTH, CONSUMERS, PINGPONG, DYNAMIC, OUT_IN_Q, RESCALE, POLY, UNDER, HOLD,
        BITS=16, S_BITS=16,
    ):  # fmt: skip
        wide = lambda n, bits: gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 256 // bits])
        self.TILE_N = gl.constexpr(TILE_N)
        self.WIDTH = gl.constexpr(WIDTH)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.PINGPONG = gl.constexpr(PINGPONG)
        self.DYNAMIC = gl.constexpr(DYNAMIC)
        self.OUT_IN_Q = gl.constexpr(OUT_IN_Q)
        self.RESCALE = gl.constexpr(RESCALE)
        self.POLY = gl.constexpr(POLY)
        self.UNDER = gl.constexpr(UNDER)
        self.HOLD = gl.constexpr(HOLD)
        self.S = gl.constexpr(wide(TILE_N, S_BITS))
        self.O = gl.constexpr(wide(WIDTH, BITS))
        self.P = gl.constexpr(gl.DotOperandLayout(0, wide(WIDTH, BITS), 32 // BITS))


@aggregate
class Job:
    shape: Shape
    blocks: Blocks | Strips
    pages: Pages
    order: Order
    scale: Scale
    cfg: Config
    batch: gl.tensor
    STRIPS: gl.constexpr
    SPARSE: gl.constexpr
    WORDS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, shape, blocks, pages, order, scale, cfg, batch):
        self.shape = shape
        self.blocks = blocks
        self.pages = pages
        self.order = order
        self.scale = scale
        self.cfg = cfg
        self.batch = batch
        self.STRIPS = gl.constexpr(blocks.STRIPS)
        self.SPARSE = gl.constexpr(shape.PACKED.value and pages.SIZE.value > 0)
        self.WORDS = gl.constexpr(6 if shape.PACKED.value or pages.SIZE.value else 3)

    @gluon.jit
    def find(self, number, block, passed):
        """SPARSE: most tickets may be of no queries, so the producer counts those that are of some:
        see tile_scheduler.find_tile.
        """
        ROWS: gl.constexpr = 64 // self.shape.GROUP * self.cfg.CONSUMERS
        return find_tile(self.shape, self.order, self.batch, number, block, passed, ROWS)

    @gluon.jit
    def place(self, ticket):
        """The tile of queries of a ticket; its row is -1 if there is no such ticket."""
        shape, num_tiles = self.shape, self.order.num_tiles
        some = gl.minimum(ticket, num_tiles - 1)  # no length is looked up that does not exist
        tile, plane = self.order.tile(some)
        batch = plane // shape.planes()
        q0, seqlen_q = shape.queries(batch)
        if self.pages.SIZE:
            k0, seqlen_k = 0, self.pages.length(batch)
        else:
            k0, seqlen_k = shape.keys(batch)
        ROWS: gl.constexpr = 64 // shape.GROUP * self.cfg.CONSUMERS
        row = gl.where(ticket < num_tiles, tile * ROWS, -1)
        return Place(batch, shape.first_head(plane), row, q0, seqlen_q, k0, seqlen_k)

    @gluon.jit
    def words(self, place):
        """What consumers must know of a place: see told."""
        words = (place.row, place.batch, place.head)
        if self.WORDS == 6:
            words = words + (place.q0, place.seqlen_q, place.seqlen_k)
        return words

    @gluon.jit
    def told(self, words):
        """The place from its words; where its keys begin, only the producer knows."""
        row, batch, head = words[0], words[1], words[2]
        nowhere = 0
        if self.WORDS == 3:
            q0, seqlen_q, seqlen_k = 0, self.shape.seqlen_q, self.shape.seqlen_k
        else:
            q0, seqlen_q, seqlen_k = words[3], words[4], words[5]
        return Place(batch, head, row, q0, seqlen_q, nowhere, seqlen_k)

    @gluon.jit
    def part(self, place, C: gl.constexpr):
        """The queries of consumer C."""
        row = place.row + 64 // self.shape.GROUP * C
        return Place(place.batch, place.head, row, place.q0, place.seqlen_q, place.k0,
                     place.seqlen_k)  # fmt: skip

    @gluon.jit
    def rows_at(self, place):
        """Where the queries of a place begin, as descriptors of rows count."""
        q0, seqlen_q = place.q0, place.seqlen_q
        return self.shape.q_coord(place.batch, place.head, q0, seqlen_q, place.row)

    @gluon.jit
    def keys(self, place, CONSUMERS: gl.constexpr):
        """The key tiles that the queries of so many consumers see, from a place on."""
        TILE_N: gl.constexpr = self.cfg.TILE_N
        ROWS: gl.constexpr = 64 // self.shape.GROUP * CONSUMERS
        return keys_of(self.shape, place.row, ROWS, place.seqlen_q, place.seqlen_k, TILE_N)

    @gluon.jit
    def heads(self, place, layout: gl.constexpr):
        """The head of each of a consumer's 64 rows."""
        if self.shape.GROUP == 1:
            return place.head
        else:
            return place.head + gl.arange(0, 64, gl.SliceLayout(1, layout)) % self.shape.GROUP

    @gluon.jit
    def listed(self, place):
        """The same where a mask lists them (of no place: those of some row)."""
        if self.STRIPS:
            share = self.share(place, place)
            return share, share.total()
        else:
            block = gl.maximum(place.row, 0) // BLOCK
            entries = self.blocks.entries(place.batch, place.head, block)
            return entries, block_tiles(entries, self.cfg.TILE_N)

    @gluon.jit
    def share(self, first, place):
        """What the queries of a place see of the strip that begins at the place `first`."""
        row = gl.maximum(first.row, 0)
        side = gl.maximum(place.row, 0) // BLOCK - row // BLOCK
        strip = row // (64 * self.cfg.CONSUMERS)
        return self.blocks.share(place.batch, place.head, strip, side)


@aggregate
class Place:
    """Queries from `row` of their sequence on, of one head, or of the group that begins there."""

    batch: gl.tensor
    head: gl.tensor
    row: gl.tensor
    q0: gl.tensor
    seqlen_q: gl.tensor
    k0: gl.tensor
    seqlen_k: gl.tensor
