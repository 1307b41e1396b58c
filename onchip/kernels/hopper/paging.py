"""Keys and values in pages: page ids fetched ahead, and TMA coordinates of the parts of a tile."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onchip.kernels.hopper.aggregate import aggregate
from onchip.kernels.hopper.pipeline import LANES, IndexPrefetch, make_index_prefetch


@aggregate
class PagedKV:
    """Where keys lie in pages of SIZE slots (0: nowhere): a row of the table for each sequence, of
    `columns` entries and `stride` apart. A tile is copied in PARTS of BOX slots. Pages begin span_k
    (span_v) rows of the pool apart. `ids`: the pages of tiles to come.
    """

    table: gl.tensor
    seqlens: gl.tensor
    stride: gl.tensor
    max_pages: gl.tensor
    num_pages: gl.tensor
    page_stride_k: gl.tensor
    page_stride_v: gl.tensor
    ids: IndexPrefetch
    SIZE: gl.constexpr
    BOX: gl.constexpr
    PARTS: gl.constexpr

    @gluon.jit
    def seqlen_k(self, batch):
        """Keys of one sequence, as many as its row of the table has room for at most."""
        return gl.minimum(gl.maximum(gl.load(self.seqlens + batch), 0), self.max_pages * self.SIZE)

    @gluon.jit
    def prefetch_ids(self, i, batch, key, wanted):
        """Ask for the pages of filling i, the tile of keys from `key` on. Of what lies outside of
        the table nothing is used.
        """
        lanes = gl.arange(0, self.PARTS, LANES)
        column = gl.minimum(gl.maximum(key // self.SIZE + lanes, 0), self.max_pages - 1)
        self.ids.fetch(i, self.table + batch * self.stride + column, wanted)

    @gluon.jit
    def page_ids(self, i):
        """The page of every part of filling i; bad ids give one that exists."""
        pages = ()
        for x in gl.static_range(self.PARTS):
            page = self.ids.get(i, x)
            pages = pages + (gl.minimum(gl.maximum(page, 0), self.num_pages - 1),)
        return pages

    @gluon.jit
    def coord(self, page, part: gl.constexpr, page_stride, key, start, stop, head):
        """Where a part of the tile of keys from `key` on lies for TMA: see tensors.paged. Keys from
        `stop` on arrive as 0, and so does a part before `start`: its page may be gone.
        """
        far: gl.constexpr = 1 << 30
        key += part * self.BOX
        length = gl.minimum(gl.maximum(stop - key, 0), self.BOX)
        length = gl.where(key + self.BOX <= start, 0, length)
        return [far, page * page_stride + key % self.SIZE + length, head, far - length, 0]


@gluon.jit
def make_paged_kv(table, seqlens, stride, max_pages, num_pages, page_stride_k, page_stride_v,
                  SIZE: gl.constexpr, TILE_N: gl.constexpr):  # fmt: skip
    BOX: gl.constexpr = min(SIZE, TILE_N)
    PARTS: gl.constexpr = max(1, TILE_N // SIZE) if SIZE else 1
    ids = make_index_prefetch(PARTS)
    return PagedKV(table, seqlens, stride, max_pages, num_pages, page_stride_k, page_stride_v, ids,
                   SIZE, BOX, PARTS)  # fmt: skip
