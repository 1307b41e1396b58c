"""What the producer and the consumers of the Hopper forward share: parameters of the call, tile
constants, pipelines, and the next tile of queries.
"""

from onchip.kernels.hopper.aggregate import aggregate
from onchip.kernels.hopper.block_sparse import (
    BLOCK,
    BlockMaskLists,
    StripMaskLists,
    num_listed_tiles,
)
from onchip.kernels.hopper.gluon_types import gl, gluon
from onchip.kernels.hopper.mask import get_block_range
from onchip.kernels.hopper.paging import PagedKV
from onchip.kernels.hopper.pipeline import LinkedStages, PingPong, Pipeline, WorkQueue
from onchip.kernels.hopper.seqlen import SeqlenInfo
from onchip.kernels.hopper.softmax import SoftmaxScale
from onchip.kernels.hopper.tile_scheduler import TileOrder, find_tile


@aggregate
class ForwardPipelines:
    """Pipelines between producer and consumers. Releasing K of iteration i also releases V of
    iteration i - 1, so the `empty` barriers of v are not used. Tails are full and empty together
    with the columns before them (column_tails.py).
    """

    q: Pipeline
    k: Pipeline
    v: Pipeline
    work_queue: WorkQueue
    pingpong: PingPong
    q_tail: LinkedStages
    k_tail: LinkedStages
    v_tail: LinkedStages

    @gluon.jit
    def close(self):
        """Invalidate all barriers."""
        self.q.close()
        self.k.close()
        self.v.close()
        self.work_queue.close()
        self.pingpong.close()


@aggregate
class ForwardConfig:
    """Compile-time choices of the forward. Layouts: S of scores (64, TILE_N), O of the output (64,
    WIDTH), Q of q and P of p as left operands. Operands of PV have BITS, operands of QK S_BITS.
    QK_TAIL, TAIL: columns of the tails of q and k, and of v and the output, 0 without a tail.
    O_TAIL and P_TAIL: the layouts of PV's tail. OVERLAP, Q_IN_REGISTERS: see tiles.HopperConfig.
    OPAQUE_Q: scores of 128 keys and an output of more than 128 columns leave no registers for the
    addresses of Q (column_tails.start_qk).
    """

    TILE_N: gl.constexpr
    WIDTH: gl.constexpr
    CONSUMERS: gl.constexpr
    PINGPONG: gl.constexpr
    DYNAMIC: gl.constexpr
    OUT_IN_Q: gl.constexpr
    RESCALE: gl.constexpr
    EMULATED_EXP2: gl.constexpr
    RESCALE_UNDER_QK: gl.constexpr
    DELAY_PV_WAIT: gl.constexpr
    OVERLAP: gl.constexpr
    Q_IN_REGISTERS: gl.constexpr
    S: gl.constexpr
    Q: gl.constexpr
    O: gl.constexpr
    P: gl.constexpr
    QK_TAIL: gl.constexpr
    TAIL: gl.constexpr
    O_TAIL: gl.constexpr
    P_TAIL: gl.constexpr
    OPAQUE_Q: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, TILE_N, WIDTH, CONSUMERS, PINGPONG, DYNAMIC, OUT_IN_Q, RESCALE, EMULATED_EXP2,
        RESCALE_UNDER_QK, DELAY_PV_WAIT, BITS=16, S_BITS=16, QK_TAIL=0, TAIL=0,
        OVERLAP=True, Q_IN_REGISTERS=False,
    ):  # fmt: skip
        wide = lambda n, bits: gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 256 // bits])
        self.TILE_N = gl.constexpr(TILE_N)
        self.WIDTH = gl.constexpr(WIDTH)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.PINGPONG = gl.constexpr(PINGPONG)
        self.DYNAMIC = gl.constexpr(DYNAMIC)
        self.OUT_IN_Q = gl.constexpr(OUT_IN_Q)
        self.RESCALE = gl.constexpr(RESCALE)
        self.EMULATED_EXP2 = gl.constexpr(EMULATED_EXP2)
        self.RESCALE_UNDER_QK = gl.constexpr(RESCALE_UNDER_QK)
        self.DELAY_PV_WAIT = gl.constexpr(DELAY_PV_WAIT)
        self.OVERLAP = gl.constexpr(OVERLAP)
        self.Q_IN_REGISTERS = gl.constexpr(Q_IN_REGISTERS)
        self.S = gl.constexpr(wide(TILE_N, S_BITS))
        self.Q = gl.constexpr(gl.DotOperandLayout(0, wide(TILE_N, S_BITS), 32 // S_BITS))
        self.O = gl.constexpr(wide(WIDTH, BITS))
        self.P = gl.constexpr(gl.DotOperandLayout(0, wide(WIDTH, BITS), 32 // BITS))
        self.QK_TAIL = gl.constexpr(QK_TAIL)
        self.TAIL = gl.constexpr(TAIL)
        self.O_TAIL = gl.constexpr(wide(TAIL or WIDTH, BITS))
        opaque = TILE_N >= 128 and TAIL > 0 and WIDTH + TAIL > 128 and not Q_IN_REGISTERS
        self.OPAQUE_Q = gl.constexpr(opaque)
        self.P_TAIL = gl.constexpr(gl.DotOperandLayout(0, wide(TAIL or WIDTH, BITS), 32 // BITS))


@aggregate
class ForwardParams:
    """The call. SPARSE: packed queries over pages, where most work indices may have no queries.
    FIELDS: integers of a work item.
    """

    seqlen: SeqlenInfo
    blocks: BlockMaskLists | StripMaskLists
    pages: PagedKV
    order: TileOrder
    scale: SoftmaxScale
    cfg: ForwardConfig
    batch: gl.tensor
    STRIPS: gl.constexpr
    SPARSE: gl.constexpr
    FIELDS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, seqlen, blocks, pages, order, scale, cfg, batch):
        self.seqlen = seqlen
        self.blocks = blocks
        self.pages = pages
        self.order = order
        self.scale = scale
        self.cfg = cfg
        self.batch = batch
        self.STRIPS = gl.constexpr(blocks.STRIPS)
        self.SPARSE = gl.constexpr(seqlen.PACKED.value and pages.SIZE.value > 0)
        self.FIELDS = gl.constexpr(6 if seqlen.PACKED.value or pages.SIZE.value else 3)

    @gluon.jit
    def find_tile(self, number, block, passed):
        """SPARSE: the producer counts existing tiles only: see tile_scheduler.find_tile."""
        ROWS: gl.constexpr = 64 // self.seqlen.GROUP * self.cfg.CONSUMERS
        return find_tile(self.seqlen, self.order, self.batch, number, block, passed, ROWS)

    @gluon.jit
    def work_tile(self, work_index):
        """The tile of queries of a work index. Its row is -1 if there is no such index."""
        seqlen, num_tiles = self.seqlen, self.order.num_tiles
        # No length is loaded past the end of cu_seqlens.
        clamped_index = gl.minimum(work_index, num_tiles - 1)
        tile, batch_head = self.order.locate(clamped_index)
        batch = batch_head // seqlen.num_head_tiles()
        q0, seqlen_q = seqlen.q_range(batch)
        if self.pages.SIZE:
            k0, seqlen_k = 0, self.pages.seqlen_k(batch)
        else:
            k0, seqlen_k = seqlen.k_range(batch)
        ROWS: gl.constexpr = 64 // seqlen.GROUP * self.cfg.CONSUMERS
        row = gl.where(work_index < num_tiles, tile * ROWS, -1)
        return WorkTile(batch, seqlen.first_head(batch_head), row, q0, seqlen_q, k0, seqlen_k)

    @gluon.jit
    def pack_tile(self, work_tile):
        """The fields of a work item: see unpack_tile."""
        fields = (work_tile.row, work_tile.batch, work_tile.head)
        if self.FIELDS == 6:
            fields = fields + (work_tile.q0, work_tile.seqlen_q, work_tile.seqlen_k)
        return fields

    @gluon.jit
    def unpack_tile(self, fields):
        """The tile from the fields of a work item. k0 is not among them: only the
        producer uses it.
        """
        row, batch, head = fields[0], fields[1], fields[2]
        unused = 0
        if self.FIELDS == 3:
            q0, seqlen_q, seqlen_k = 0, self.seqlen.seqlen_q, self.seqlen.seqlen_k
        else:
            q0, seqlen_q, seqlen_k = fields[3], fields[4], fields[5]
        return WorkTile(batch, head, row, q0, seqlen_q, unused, seqlen_k)

    @gluon.jit
    def consumer_tile(self, work_tile, C: gl.constexpr):
        """The 64 rows of consumer C."""
        row = work_tile.row + 64 // self.seqlen.GROUP * C
        return WorkTile(work_tile.batch, work_tile.head, row, work_tile.q0, work_tile.seqlen_q,
                        work_tile.k0, work_tile.seqlen_k)  # fmt: skip

    @gluon.jit
    def tile_coord(self, work_tile):
        """TMA coordinates of the queries of a tile."""
        q0, seqlen_q = work_tile.q0, work_tile.seqlen_q
        return self.seqlen.q_coord(work_tile.batch, work_tile.head, q0, seqlen_q, work_tile.row)

    @gluon.jit
    def block_range(self, work_tile, CONSUMERS: gl.constexpr):
        """The key tiles that the queries of CONSUMERS consumers see, from a tile on."""
        TILE_N: gl.constexpr = self.cfg.TILE_N
        ROWS: gl.constexpr = 64 // self.seqlen.GROUP * CONSUMERS
        return get_block_range(
            self.seqlen, work_tile.row, ROWS, work_tile.seqlen_q, work_tile.seqlen_k, TILE_N
        )

    @gluon.jit
    def row_heads(self, work_tile, layout: gl.constexpr):
        """The head of each of a consumer's 64 rows."""
        if self.seqlen.GROUP == 1:
            return work_tile.head
        else:
            return work_tile.head + gl.arange(0, 64, gl.SliceLayout(1, layout)) % self.seqlen.GROUP

    @gluon.jit
    def list_blocks(self, work_tile):
        """(the listed blocks of a tile, their number), where a mask lists them. A tile with row -1
        gives the lists of row 0.
        """
        if self.STRIPS:
            strip_view = self.strip_view(work_tile, work_tile)
            return strip_view, strip_view.total()
        else:
            block = gl.maximum(work_tile.row, 0) // BLOCK
            entries = self.blocks.entries(work_tile.batch, work_tile.head, block)
            return entries, num_listed_tiles(entries, self.cfg.TILE_N)

    @gluon.jit
    def strip_view(self, first, work_tile):
        """The entries that a tile sees of the strip that begins at the tile `first`."""
        row = gl.maximum(first.row, 0)
        side = gl.maximum(work_tile.row, 0) // BLOCK - row // BLOCK
        strip = row // (64 * self.cfg.CONSUMERS)
        return self.blocks.strip_view(work_tile.batch, work_tile.head, strip, side)


@aggregate
class WorkTile:
    """Queries from `row` of their sequence on, of one head, or of the GROUP heads
    from `head` on.
    """

    batch: gl.tensor
    head: gl.tensor
    row: gl.tensor
    q0: gl.tensor
    seqlen_q: gl.tensor
    k0: gl.tensor
    seqlen_k: gl.tensor
