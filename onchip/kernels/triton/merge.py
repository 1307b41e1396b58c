"""The merge of states at rest, (out, lse), in Triton: the twin of onchip/state.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onchip.kernels.configs import TRITON_STREAMED
from onchip.kernels.handles import Handle
from onchip.kernels.triton.launch import launch_options, padded
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


@triton.jit(do_not_specialize=("total_q", "num_rows"))
def pair_kernel(
    a_ptr, a_lse_ptr, b_ptr, b_lse_ptr, out_ptr, lse_ptr, num_heads, total_q, num_rows,
    HEAD_DIM_V: tl.constexpr, PAD_DIM_V: tl.constexpr, TILE_M: tl.constexpr,
):  # fmt: skip
    """(out, lse) of two packed states: outs (total_q, num_heads, HEAD_DIM_V), lses (num_heads,
    total_q).
    """
    rows = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    dims = tl.arange(0, PAD_DIM_V)
    inside = rows < num_rows
    place = rows % num_heads * total_q + rows // num_heads
    a_lse = tl.load(a_lse_ptr + place, mask=inside, other=float("-inf")) * LOG2E
    b_lse = tl.load(b_lse_ptr + place, mask=inside, other=float("-inf")) * LOG2E
    cells = rows[:, None] * HEAD_DIM_V + dims[None, :]
    stored = inside[:, None] & (dims < HEAD_DIM_V)[None, :]
    a = tl.load(a_ptr + cells, mask=stored, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + cells, mask=stored, other=0.0).to(tl.float32)
    m = tl.maximum(a_lse, b_lse)
    pivot = tl.where(m == float("-inf"), 0.0, m)  # neither saw a key
    alpha, beta = tl.exp2(a_lse - pivot), tl.exp2(b_lse - pivot)
    l = alpha + beta
    tl.store(lse_ptr + place, (m + tl.log2(l)) * LN2, mask=inside)
    out = (a * alpha[:, None] + b * beta[:, None]) / tl.where(l == 0, 1.0, l)[:, None]
    tl.store(out_ptr + cells, rounded(out, out_ptr.dtype.element_ty), mask=stored)


_pair_kernel = Handle(pair_kernel)


def merge(outs: list[Tensor], lses: list[Tensor], out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The packed states merged two by two, in order; only the last result is rounded."""
    out, lse = outs[0], lses[0]
    for i in range(1, len(outs)):
        dtype = out_dtype if i == len(outs) - 1 else torch.float32
        out, lse = _pair((out, lse), (outs[i], lses[i]), dtype)
    return out.to(out_dtype), lse


def _pair(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype):
    tensors = [t.contiguous() for t in (*a, *b)]
    out, lse = torch.empty_like(tensors[0], dtype=dtype), torch.empty_like(tensors[1])
    total_q, num_heads, head_dim_v = out.shape
    num_rows, tile_m = total_q * num_heads, TRITON_STREAMED.tile_m
    if num_rows:
        _pair_kernel[(triton.cdiv(num_rows, tile_m),)](
            *tensors, out, lse, num_heads, total_q, num_rows,
            HEAD_DIM_V=head_dim_v, PAD_DIM_V=padded(head_dim_v), TILE_M=tile_m,
            **launch_options(TRITON_STREAMED),
        )  # fmt: skip
    return out, lse
