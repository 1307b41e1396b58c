"""Sequence lengths and offsets of a call, dense or packed, and TMA coordinates of its rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from onchip.kernels.hopper.aggregate import aggregate


@aggregate
class SeqlenInfo:
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
    GROUP: gl.constexpr = 1

    @gluon.jit
    def sequence(self, batch):
        """(first row of q, rows, first key, keys) of one sequence, within the tensors whatever
        cu_seqlens says.
        """
        q0, seqlen_q = self.q_range(batch)
        k0, seqlen_k = self.k_range(batch)
        return q0, seqlen_q, k0, seqlen_k

    @gluon.jit
    def q_range(self, batch):
        """(first row of q, rows) of one sequence."""
        if self.PACKED:
            return _load_range(self.cu_seqlens_q + batch, self.total_q)
        else:
            return 0, self.seqlen_q

    @gluon.jit
    def k_range(self, batch):
        """(first key, keys) of one sequence."""
        if self.PACKED:
            return _load_range(self.cu_seqlens_k + batch, self.total_k)
        else:
            return 0, self.seqlen_k

    @gluon.jit
    def num_head_tiles(self):
        """Of one batch entry: heads, or groups of them that share tiles."""
        if self.GROUP == 1:
            return self.num_heads
        else:
            return self.num_heads // self.GROUP

    @gluon.jit
    def first_head(self, batch_head):
        if self.GROUP == 1:
            return batch_head % self.num_heads
        else:
            return batch_head * self.GROUP % self.num_heads

    @gluon.jit
    def query_rows(self, rows: gl.constexpr, layout: gl.constexpr):
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
def _load_range(offsets, total):
    """(first, how many) between two neighbours of cu_seqlens, whatever they say."""
    start = gl.minimum(gl.maximum(gl.load(offsets), 0), total)
    stop = gl.minimum(gl.maximum(gl.load(offsets + 1), start), total)
    return start, stop - start


@gluon.jit
def padded_tile(seqlen, total, num_sequences, batch, head, first, length, TILE: gl.constexpr):
    """Number of the first tile of a sequence of queries in buffers where every sequence of every
    head starts a new tile.
    """
    if seqlen.PACKED:
        return head * (total // TILE + num_sequences) + first // TILE + batch
    else:
        return (batch * seqlen.num_heads + head) * ((length + TILE - 1) // TILE)
