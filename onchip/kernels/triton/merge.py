"""The merge of states at rest, (out, lse), in Triton: the twin of onchip/state.py."""

import triton
import triton.language as tl

from onchip.kernels.triton.tile import LOG2E, load_tile, store_tile


@triton.jit(do_not_specialize=("total_q", "num_rows", "num_splits"))
def merge_kernel(
    outs_ptr, lses_ptr, sinks_ptr, out_ptr, lse_ptr,
    num_heads, total_q, num_rows, num_splits,
    HEAD_DIM_V: tl.constexpr,
    PAD_DIM_V: tl.constexpr, TILE_M: tl.constexpr,
):  # fmt: skip
    """(out, lse) over all splits, and the sink, which counts once. outs is (num_splits, rows in the
    order of out, HEAD_DIM_V), lses (num_splits, rows in the order of lse).
    """
    row = tl.program_id(0).to(tl.int64) * TILE_M
    rows = row + tl.arange(0, TILE_M)
    inside = rows < num_rows
    token, h = rows // num_heads, rows % num_heads
    place = (token // total_q * num_heads + h) * total_q + token % total_q
    m = tl.full([TILE_M], float("-inf"), tl.float32)
    if sinks_ptr is not None:
        m = tl.load(sinks_ptr + h, mask=inside, other=0.0).to(tl.float32)
    l = tl.where(m > float("-inf"), 1.0, 0.0)
    acc = tl.zeros([TILE_M, PAD_DIM_V], tl.float32)
    for split in range(num_splits):
        offset = tl.cast(split, tl.int64) * num_rows
        lse = tl.load(lses_ptr + offset + place, mask=inside, other=float("-inf"))
        out = load_tile(
            outs_ptr + offset * HEAD_DIM_V, row, num_rows, HEAD_DIM_V, HEAD_DIM_V, TILE_M,
            PAD_DIM_V, True,
        )  # fmt: skip
        m_new = tl.maximum(m, lse)
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)  # both sides empty
        alpha, beta = tl.exp2((m - pivot) * LOG2E), tl.exp2((lse - pivot) * LOG2E)
        acc = acc * alpha[:, None] + out * beta[:, None]
        l = l * alpha + beta
        m = m_new
    tl.store(lse_ptr + place, m + tl.log(l), mask=inside)
    out = acc / tl.where(l == 0, 1.0, l)[:, None]
    store_tile(out_ptr, out, row, num_rows, HEAD_DIM_V, HEAD_DIM_V, TILE_M, PAD_DIM_V)
