"""Paged K and V: page ids copied ahead of their use, and TMA coordinates of the parts of a tile.

Example: a tile of 128 keys over pages of 16 slots is 8 parts of 16 rows. 300 keys are 19 pages; the
parts past key 300 are loaded with length 0, so TMA fills them with zeros.
"""

from onchip.kernels.hopper.aggregate import aggregate
from onchip.kernels.hopper.gluon_types import gl, gluon
from onchip.kernels.hopper.pipeline import LANES, IndexPrefetch, make_index_prefetch


@aggregate
class PagedKV:
    """K and V in pages of SIZE slots (0: not paged). Row b of the table, `stride` entries after the
    last, has at most max_pages page ids. A tile is loaded in PARTS boxes of BOX slots. Pages begin
    page_stride_k (page_stride_v) rows of the pool apart. `ids`: page ids of the tiles to come.
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
        """Keys of one sequence, at most as many as its row of the table can address."""
        return gl.minimum(gl.maximum(gl.load(self.seqlens + batch), 0), self.max_pages * self.SIZE)

    @gluon.jit
    def prefetch_ids(self, i, batch, key, wanted):
        """Start to copy the page ids of iteration i, the tile of keys from `key` on. Ids outside of
        the table are clamped and not used.
        """
        lanes = gl.arange(0, self.PARTS, LANES)
        column = gl.minimum(gl.maximum(key // self.SIZE + lanes, 0), self.max_pages - 1)
        self.ids.fetch(i, self.table + batch * self.stride + column, wanted)

    @gluon.jit
    def page_ids(self, i):
        """The page of each part of iteration i. Bad ids are clamped to existing pages."""
        pages = ()
        for x in gl.static_range(self.PARTS):
            page = self.ids.get(i, x)
            pages = pages + (gl.minimum(gl.maximum(page, 0), self.num_pages - 1),)
        return pages

    @gluon.jit
    def coord(self, page, part: gl.constexpr, page_stride, key, start, stop, head):
        """TMA coordinates of one part of the tile from `key` on: see tensors.paged_descriptor. Keys
        from `stop` on arrive as 0. A part wholly before `start` arrives as 0 too, because its page
        may have been freed.
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
