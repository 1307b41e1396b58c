"""The merge of states at rest, (out, lse), in Triton: the twin of onchip/state.py."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onchip.kernels.triton.splits import RECORD
from onchip.kernels.triton.tile import LN2, LOG2E, rounded


@triton.jit(do_not_specialize=("total_q", "part_rows"))
def merge_kernel(
    parts_ptr, part_lses_ptr, records_ptr, sinks_ptr, out_ptr, lse_ptr,
    num_heads, group_size, total_q, part_rows,
    HEAD_DIM_V: tl.constexpr, PAD_DIM_V: tl.constexpr, TILE_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """(out, lse) of one row over all splits, TILE_S of them at a time, and the sink, which counts
    once. splits.py says what a record holds. What a split that saw no key has left of a row is not
    a number, and is dropped; it is loaded all the same, because to know it, its lse would have to
    arrive first. Nothing here is long, so that latencies add up: what can be loaded together is.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    num_kv_heads = num_heads // group_size
    pid = tl.program_id(0)
    r, kv, g = pid % part_rows, pid // part_rows % num_kv_heads, pid // part_rows // num_kv_heads
    record = records_ptr + (g + 1) * RECORD
    num_records, token, r0 = tl.load(records_ptr), tl.load(record), tl.load(record + 1)
    num_rows, slot, count = tl.load(record + 2), tl.load(record + 3), tl.load(record + 4)
    if (g >= num_records) | (r >= num_rows):
        return
    h = kv * group_size + (r0 + r) % group_size
    token += (r0 + r) // group_size
    splits, dims = tl.arange(0, TILE_S), tl.arange(0, PAD_DIM_V)
    m = float("-inf")
    if sinks_ptr is not None:
        m = tl.load(sinks_ptr + h).to(tl.float32) * LOG2E
    l = tl.where(m > float("-inf"), 1.0, 0.0)
    acc = tl.zeros([PAD_DIM_V], tl.float32)
    for s0 in range(0, count, TILE_S):
        at = ((slot + s0 + splits) * num_kv_heads + kv).to(tl.int64) * part_rows + r
        inside = s0 + splits < count
        lse = tl.load(part_lses_ptr + at, mask=inside, other=float("-inf"))
        cells = parts_ptr + at[:, None] * HEAD_DIM_V + dims[None, :]
        part = tl.load(cells, mask=inside[:, None] & (dims < HEAD_DIM_V)[None, :], other=0.0)
        part = tl.where((lse > float("-inf"))[:, None], part, 0.0)
        m_new = tl.maximum(m, tl.max(lse, 0))
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing seen so far
        alpha, beta = tl.exp2(m - pivot), tl.exp2(lse - pivot)
        acc = acc * alpha + tl.sum(part * beta[:, None], 0)
        l = l * alpha + tl.sum(beta, 0)
        m = m_new
    place = (token // total_q * num_heads + h).to(tl.int64) * total_q + token % total_q
    tl.store(lse_ptr + place, (m + tl.log2(l)) * LN2)
    out = acc / tl.where(l == 0, 1.0, l)
    cells = out_ptr + (token.to(tl.int64) * num_heads + h) * HEAD_DIM_V + dims
    tl.store(cells, rounded(out, out_ptr.dtype.element_ty), mask=dims < HEAD_DIM_V)
