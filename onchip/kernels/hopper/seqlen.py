"""Sequence lengths and offsets of a call, dense or packed, and the TMA coordinates of its rows."""

from onchip.kernels.hopper.aggregate import aggregate
from onchip.kernels.hopper.gluon_types import gl, gluon


@aggregate
class SeqlenInfo:
    """Lengths, offsets and window of a call. Windows count from the diagonal; causal means right =
    0. PACKED: cu_seqlens has the offsets (varlen). GROUP > 1: a tile has GROUP rows for each query,
    one for each of GROUP neighbouring query heads (FlashAttention's pack_gqa).
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
        """(first row of q, seqlen_q, first key, seqlen_k) of one sequence. All lie inside of the
        tensors, even if cu_seqlens is wrong.
        """
        q0, seqlen_q = self.q_range(batch)
        k0, seqlen_k = self.k_range(batch)
        return q0, seqlen_q, k0, seqlen_k

    @gluon.jit
    def q_range(self, batch):
        """(first row of q, seqlen_q) of one sequence."""
        if self.PACKED:
            return _load_range(self.cu_seqlens_q + batch, self.total_q)
        else:
            return 0, self.seqlen_q

    @gluon.jit
    def k_range(self, batch):
        """(first key, seqlen_k) of one sequence."""
        if self.PACKED:
            return _load_range(self.cu_seqlens_k + batch, self.total_k)
        else:
            return 0, self.seqlen_k

    @gluon.jit
    def num_head_tiles(self):
        """Heads of one batch entry, or groups of heads that share tiles."""
        if self.GROUP == 1:
            return self.num_heads
        else:
            return self.num_heads // self.GROUP

    @gluon.jit
    def first_head(self, batch_head):
        """The first head of a tile."""
        if self.GROUP == 1:
            return batch_head % self.num_heads
        else:
            return batch_head * self.GROUP % self.num_heads

    @gluon.jit
    def query_rows(self, rows: gl.constexpr, layout: gl.constexpr):
        """The query of each row of a tile, counted from the first query of the tile."""
        if self.GROUP == 1:
            return gl.arange(0, rows, gl.SliceLayout(1, layout))
        else:
            return gl.arange(0, rows, gl.SliceLayout(1, layout)) // self.GROUP

    @gluon.jit
    def coord(self, batch, head, first, length, row):
        """The TMA coordinates of rows of one head. Packed descriptors are ragged: see
        tensors.descriptor.
        """
        if self.PACKED:
            far: gl.constexpr = 1 << 30
            return [far, first + length, head, far - length + row, 0]
        else:
            return [batch, head, row, 0]

    @gluon.jit
    def q_coord(self, batch, head, first, length, row):
        """The TMA coordinates of rows of q and out: see tensors.gqa_descriptor."""
        if self.GROUP == 1:
            return self.coord(batch, head, first, length, row)
        elif self.PACKED:
            far: gl.constexpr = 1 << 30
            return [far, first + length, far - length + row, head, 0]
        else:
            return [batch, row, head, 0]


@gluon.jit
def _load_range(offsets, total):
    """(first, count) between two neighbours of cu_seqlens, clamped to the tensor."""
    start = gl.minimum(gl.maximum(gl.load(offsets), 0), total)
    stop = gl.minimum(gl.maximum(gl.load(offsets + 1), start), total)
    return start, stop - start


@gluon.jit
def padded_tile(seqlen, total, num_sequences, batch, head, first, length, TILE: gl.constexpr):
    """Index of the first tile of a sequence of queries, in buffers where every sequence of every
    head starts a new tile.
    """
    if seqlen.PACKED:
        return head * (total // TILE + num_sequences) + first // TILE + batch
    else:
        return (batch * seqlen.num_heads + head) * ((length + TILE - 1) // TILE)
