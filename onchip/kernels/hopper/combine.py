"""Results of decoding, and the merge of partial states (FlashAttention's combine kernel). It is not
a launch of its own: the program that finds all partial states of a sequence complete merges them.
"""

from onchip.kernels.hopper.aggregate import aggregate
from onchip.kernels.hopper.gluon_types import gl, gluon
from onchip.kernels.hopper.pipeline import sync_partition
from onchip.kernels.hopper.softmax import LN2, LOG2E

WARPS = gl.constexpr(4)  # of a consumer
MERGE_BATCH = gl.constexpr(16)  # states loaded together: one by one, each would cost a latency


@aggregate
class DecodeOutput:
    """Results, and scratch memory for partial states. Slot range + b of each kv head is the state
    that a range has of sequence b. flags: `nonce` where a state is complete.
    """

    out: gl.tensor
    lse: gl.tensor
    sinks: gl.tensor
    partials: gl.tensor
    partial_lses: gl.tensor
    flags: gl.tensor
    nonce: gl.tensor
    num_heads: gl.tensor
    dim: gl.tensor
    GROUP: gl.constexpr  # query heads of a kv head
    HAS_SINKS: gl.constexpr
    MOST: gl.constexpr  # upper bound of the number of ranges

    @gluon.jit
    def store(self, b, kv_head, seqlen_q, r0, m, l, acc, layout: gl.constexpr):
        """Store the result of the rows from r0 on: m and l of rows, acc (rows, head_dim) in
        `layout`.
        """
        r = r0 + gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
        d = gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
        inside = r < seqlen_q * self.GROUP
        head = kv_head * self.GROUP + r % self.GROUP
        query = r // self.GROUP
        if self.HAS_SINKS:
            sink = gl.load(self.sinks + head, mask=inside, other=0.0).to(gl.float32) * LOG2E
            top = gl.maximum(m, sink)
            pivot = gl.where(top == float("-inf"), 0.0, top)
            l = l * gl.exp2(m - pivot) + gl.exp2(sink - pivot)
            acc = acc * gl.exp2(m - pivot)[:, None]
            m = top
        work_tile = (b.to(gl.int64) * self.num_heads + head) * seqlen_q + query
        gl.store(self.lse + work_tile, (m + gl.log2(l)) * LN2, mask=inside)
        acc = acc * (1.0 / gl.where(l == 0.0, 1.0, l))[:, None]  # l = 0: the row saw no key
        row = (b.to(gl.int64) * seqlen_q + query) * self.num_heads + head
        cells = self.out + row[:, None] * self.dim + d[None, :]
        mask = inside[:, None] & (d < self.dim)[None, :]
        gl.store(cells, acc.to(self.out.dtype.element_ty), mask=mask)

    @gluon.jit
    def store_partial(self, slot, rows, m, l, acc, layout: gl.constexpr):
        """Store a normalised partial state, with lse in base 2."""
        r = gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
        d = gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
        at = slot.to(gl.int64) * rows + r
        gl.store(self.partial_lses + at, m + gl.log2(l), mask=r < rows)
        acc = acc * (1.0 / gl.where(l == 0.0, 1.0, l))[:, None]
        cells = self.partials + at[:, None] * acc.shape[1] + d[None, :]
        gl.store(cells, acc, mask=(r < rows)[:, None])

    @gluon.jit
    def complete(self, slot, first, stride, count):
        """Set the flag of `slot`, and return whether all `count` states from slot `first` on are
        complete. Several programs may find so, and store the same result. Flags are read by atomic
        adds, so that of two programs at least one sees the other's. They are cleared for the next
        call that uses this memory.
        """
        k = gl.arange(0, self.MOST, gl.BlockedLayout([self.MOST // 128], [32], [4], [0]))
        flags = self.flags + first + k * stride
        sync_partition()
        gl.atomic_xchg(self.flags + slot, self.nonce, sem="acq_rel", scope="gpu")
        sync_partition()
        flags_seen = gl.atomic_add(
            flags, gl.zeros_like(k).to(gl.int64), k < count, "acq_rel", "gpu"
        )
        num_present = gl.sum(((flags_seen == self.nonce) & (k < count)).to(gl.int32), 0)
        if num_present == count:
            gl.store(flags, gl.zeros_like(k).to(gl.int64), mask=k < count)
        return num_present == count

    @gluon.jit
    def merge(self, b, kv_head, seqlen_q, first, stride, count, D: gl.constexpr):
        """Merge `count` states, from slot `first` on, into the result."""
        S: gl.constexpr = gl.BlockedLayout(
            [MERGE_BATCH, 1, D // 32], [1, 1, 32], [1, 4, 1], [2, 1, 0]
        )
        L: gl.constexpr = gl.SliceLayout(0, S)
        ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, S))
        rows = seqlen_q * self.GROUP
        k = gl.arange(0, MERGE_BATCH, gl.SliceLayout(1, gl.SliceLayout(2, S)))
        d = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, S)))
        for r0 in range(0, rows, WARPS):
            r = r0 + gl.arange(0, WARPS, ROW)
            m = gl.full([WARPS], float("-inf"), gl.float32, gl.SliceLayout(1, L))
            l = gl.zeros([WARPS], gl.float32, gl.SliceLayout(1, L))
            acc = gl.zeros([WARPS, D], gl.float32, L)
            for k0 in range(0, count, MERGE_BATCH):
                inside = (k0 + k < count)[:, None] & (r < rows)[None, :]
                at = (first + (k0 + k) * stride).to(gl.int64)[:, None] * rows + r[None, :]
                lse = gl.load(self.partial_lses + at, mask=inside, other=float("-inf"))
                cells = self.partials + at[:, :, None] * D + d[None, None, :]
                part = gl.load(cells, mask=inside[:, :, None], other=0.0)
                m_new = gl.maximum(m, gl.convert_layout(gl.max(lse, 0), m.type.layout))
                pivot = gl.where(m_new == float("-inf"), 0.0, m_new)
                alpha = gl.exp2(m - pivot)
                beta = gl.exp2(lse - gl.convert_layout(pivot, ROW)[None, :])
                l = l * alpha + gl.convert_layout(gl.sum(beta, 0), l.type.layout)
                acc = acc * alpha[:, None] + gl.sum(part * beta[:, :, None], 0)
                m = m_new
            self.store(b, kv_head, seqlen_q, r0, m, l, acc, L)
