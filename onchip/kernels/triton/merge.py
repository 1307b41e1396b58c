"""Merging states at rest, (out, lse), in Triton: the device version of onchip/core/state.py.

    merge_kernel   splits of one call    slot 0, 1, 2 ... -> out, lse      one program per row
    stack_kernel   cascade levels        own + (states, rows, heads, dim)  TILE_M rows per program
    fold_kernel    rounds of a ring      own (fp32, lse in fp64) += up to 4 states, in place

    m_new = max(m, lse);  acc = acc * exp2(m - m_new) + part * exp2(lse - m_new);  l likewise
    out = acc / l;        lse = m + log2(l)

Worked shape: batch 1, 300 tokens, tile 128, one query, keys in 3 splits: merge_kernel runs one
program per query head; it loads 3 lse and 3 partial outs (of a tile of TRITON_MERGE.tile_n splits)
in one step.

Loads that do not depend on each other are issued together: these kernels are short, and latencies
would add up. The merge is derived in docs/fold.md; examples/versions/v2.py has it inside the loop.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onchip.core.device import device_info
from onchip.kernels.runtime.launcher import CachedLauncher
from onchip.kernels.tiles import FOLD_ROWS_WIDE, TRITON_STREAMED
from onchip.kernels.triton.launch import dependent_options, launch_options, padded
from onchip.kernels.triton.splits import RECORD
from onchip.kernels.triton.tile import LN2, LOG2E, round_to


@triton.jit(do_not_specialize=("total_q", "part_rows"))
def merge_kernel(
    parts_ptr, part_lses_ptr, records_ptr, sinks_ptr, out_ptr, lse_ptr,
    num_heads, group_size, total_q, part_rows,
    HEAD_DIM_V: tl.constexpr, PAD_DIM_V: tl.constexpr, TILE_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """(out, lse) of one row over all splits, TILE_S of them at a time, and the sink, which counts
    once. splits.py defines the records. The partial out of a split that saw no key is uninitialised
    and is replaced by 0; it is loaded anyway, because a conditional load would have to wait for its
    lse.
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
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key so far
        alpha, beta = tl.exp2(m - pivot), tl.exp2(lse - pivot)
        acc = acc * alpha + tl.sum(part * beta[:, None], 0)
        l = l * alpha + tl.sum(beta, 0)
        m = m_new
    place = (token // total_q * num_heads + h).to(tl.int64) * total_q + token % total_q
    tl.store(lse_ptr + place, (m + tl.log2(l)) * LN2)
    out = acc / tl.where(l == 0, 1.0, l)
    cells = out_ptr + (token.to(tl.int64) * num_heads + h) * HEAD_DIM_V + dims
    tl.store(cells, round_to(out, out_ptr.dtype.element_ty), mask=dims < HEAD_DIM_V)


_LENGTHS = (
    "num_rows", "own_head", "own_token", "num_parts", "part_rows", "part_step", "part_head",
)  # fmt: skip


@triton.jit(do_not_specialize=_LENGTHS)
def stack_kernel(
    own_ptr, own_lse_ptr, parts_ptr, part_lses_ptr, place_ptr, out_ptr, lse_ptr,
    num_heads, num_rows, own_head, own_token, num_parts, part_rows, part_step, part_head,
    HEAD_DIM_V: tl.constexpr, PAD_DIM_V: tl.constexpr, TILE_M: tl.constexpr, TILE_S: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """(out, lse) of TILE_M rows, token by token and head by head: one state of all tokens, and
    num_parts states of the tokens that have a row in the stack (place >= 0, or all without
    place_ptr). TILE_S states are loaded at a time, because one after the other each would cost a
    latency. A token without a row in the stack reads nothing from it.
    """
    rows = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    dims, states = tl.arange(0, PAD_DIM_V), tl.arange(0, TILE_S)
    inside, stored = rows < num_rows, dims < HEAD_DIM_V
    h, token = (rows % num_heads).to(tl.int64), (rows // num_heads).to(tl.int64)
    own = h * own_head + token * own_token
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    at = token
    if place_ptr is not None:
        at = tl.load(place_ptr + token, mask=inside, other=-1).to(tl.int64)
    cells = rows.to(tl.int64)[:, None] * HEAD_DIM_V + dims[None, :]
    m = tl.load(own_lse_ptr + own, mask=inside, other=float("-inf")) * LOG2E
    acc = tl.load(own_ptr + cells, mask=inside[:, None] & stored[None, :], other=0.0).to(tl.float32)
    l = tl.where(m > float("-inf"), 1.0, 0.0)
    for s0 in range(0, num_parts, TILE_S):
        s = (s0 + states).to(tl.int64)[None, :]
        exist = (inside & (at >= 0))[:, None] & (s < num_parts)
        lses = part_lses_ptr + s * part_step + (h * part_head + at)[:, None]
        lse = tl.load(lses, mask=exist, other=float("-inf")) * LOG2E
        first = ((s * part_rows + at[:, None]) * num_heads + h[:, None]) * HEAD_DIM_V
        cell = exist[:, :, None] & stored[None, None, :]
        part = tl.load(parts_ptr + first[:, :, None] + dims[None, None, :], mask=cell, other=0.0)
        m_new = tl.maximum(m, tl.max(lse, 1))
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key so far
        alpha, beta = tl.exp2(m - pivot), tl.exp2(lse - pivot[:, None])
        acc = acc * alpha[:, None] + tl.sum(part * beta[:, :, None], 1)
        l = l * alpha + tl.sum(beta, 1)
        m = m_new
    tl.store(lse_ptr + own, (m + tl.log2(l)) * LN2, mask=inside)
    out = acc / tl.where(l == 0, 1.0, l)[:, None]
    exist = inside[:, None] & stored[None, :]
    tl.store(out_ptr + cells, round_to(out, out_ptr.dtype.element_ty), mask=exist)


_stack_kernel = CachedLauncher(stack_kernel)
State = tuple[Tensor, Tensor]
Part = tuple[Tensor, Tensor, Tensor | None]


def merge(own: State, parts: Sequence[Part], out_dtype: torch.dtype) -> State:
    """Merge a packed state with stacks of states, one launch per stack. Only the last result is
    rounded.
    """
    state = own
    for i, part in enumerate(parts, 1):
        state = _add_stack(state, part, out_dtype if i == len(parts) else torch.float32)
    out, lse = state
    return out.to(out_dtype), lse


def _add_stack(own: State, part: Part, dtype: torch.dtype) -> State:
    """Merge one stack. lse keeps the layout of own's: heads or tokens first."""
    own_out, own_lse = own[0].contiguous(), own[1]
    stack, lses, place = part[0].contiguous(), *part[1:]
    out, lse = torch.empty_like(own_out, dtype=dtype), torch.empty_like(own_lse)
    if lse.stride() != own_lse.stride():  # own's lse overlaps or has gaps
        own_lse = own_lse.contiguous()
        lse = torch.empty_like(own_lse)
    total_q, num_heads, head_dim_v = out.shape
    tile_s = min(triton.next_power_of_2(len(stack)), TRITON_STREAMED.tile_m)
    tile_m = TRITON_STREAMED.tile_m // tile_s
    if out.numel():
        _stack_kernel[(triton.cdiv(total_q * num_heads, tile_m),)](
            own_out, own_lse, stack, lses, place, out, lse,
            num_heads, total_q * num_heads, *own_lse.stride(),
            len(stack), stack.shape[1], *lses.stride()[:2],
            HEAD_DIM_V=head_dim_v, PAD_DIM_V=padded(head_dim_v), TILE_M=tile_m, TILE_S=tile_s,
            **dependent_options(TRITON_STREAMED, device_info(out.device).capability),
        )  # fmt: skip
    return out, lse


class MergeRows(NamedTuple):
    """The rows of a tile: whether each exists, and its batch entry, token and head."""

    inside: tl.tensor
    b: tl.tensor
    token: tl.tensor
    h: tl.tensor


@triton.jit
def _locate_rows(rows, start, length, num_heads, HEAD_DIM_V: tl.constexpr, PAD_DIM_V: tl.constexpr):
    """The rows in a state of `length` tokens from `start` on: whether the state has them, their
    offsets in its lse, the offsets of their elements in its out, and which of these exist.
    """
    at, dims = rows.token - start, tl.arange(0, PAD_DIM_V)
    seen = rows.inside & (at >= 0) & (at < length)
    lses = (rows.b * num_heads + rows.h) * length + at
    cells = ((rows.b * length + at) * num_heads + rows.h)[:, None] * HEAD_DIM_V + dims[None, :]
    return seen, lses, cells, seen[:, None] & (dims < HEAD_DIM_V)[None, :]


@triton.jit
def _fold_state(
    m, l, acc, out_ptr, lse_ptr, rows, start, length, num_heads,
    HEAD_DIM_V: tl.constexpr, PAD_DIM_V: tl.constexpr,
):  # fmt: skip
    """Fold one more state, if out_ptr is not None: `merge` of onchip/core/state.py with l = 1 on
    one side.
    """
    if out_ptr is not None:
        seen, lses, cells, exist = _locate_rows(
            rows, start, length, num_heads, HEAD_DIM_V, PAD_DIM_V
        )
        lse = tl.load(lse_ptr + lses, mask=seen, other=float("-inf")).to(tl.float64)
        part = tl.load(out_ptr + cells, mask=exist, other=0.0)
        m_new = tl.maximum(m, lse)
        pivot = tl.where(m_new == float("-inf"), 0.0, m_new)  # no key so far
        alpha, beta = _weight(m - pivot), _weight(lse - pivot)
        m, l, acc = m_new, l * alpha + beta, acc * alpha[:, None] + part * beta[:, None]
    return m, l, acc


@triton.jit
def _weight(x):
    """exp(x) in fp32 of a difference that was computed in fp64."""
    return tl.exp2(x.to(tl.float32) * LOG2E)


_TOKENS = ("num_rows", "seqlen", "s0", "s1", "s2", "s3", "n0", "n1", "n2", "n3")


@triton.jit(do_not_specialize=_TOKENS)
def fold_kernel(
    own_ptr, own_lse_ptr, ptr0, ptr1, ptr2, ptr3, lse_ptr0, lse_ptr1, lse_ptr2, lse_ptr3,
    num_heads, num_rows, seqlen, s0, s1, s2, s3, n0, n1, n2, n3,
    HEAD_DIM_V: tl.constexpr, PAD_DIM_V: tl.constexpr, TILE_M: tl.constexpr, FRESH: tl.constexpr,
):  # fmt: skip
    """Fold up to four states into TILE_M rows of one state, in place. Rows are ordered token by
    token and head by head. State i covers n_i tokens of every batch entry, from token s_i on.
    """
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    token = (row // num_heads).to(tl.int64)
    rows = MergeRows(row < num_rows, token // seqlen, token % seqlen, row % num_heads)
    seen, lses, cells, exist = _locate_rows(rows, 0, seqlen, num_heads, HEAD_DIM_V, PAD_DIM_V)
    if FRESH:
        m = tl.full([TILE_M], float("-inf"), tl.float64)
        acc = tl.zeros([TILE_M, PAD_DIM_V], tl.float32)
    else:
        m = tl.load(own_lse_ptr + lses, mask=seen, other=float("-inf"))
        acc = tl.load(own_ptr + cells, mask=exist, other=0.0)
    l = tl.where(m > float("-inf"), 1.0, 0.0)
    m, l, acc = _fold_state(
        m, l, acc, ptr0, lse_ptr0, rows, s0, n0, num_heads, HEAD_DIM_V, PAD_DIM_V
    )  # fmt: skip
    m, l, acc = _fold_state(
        m, l, acc, ptr1, lse_ptr1, rows, s1, n1, num_heads, HEAD_DIM_V, PAD_DIM_V
    )  # fmt: skip
    m, l, acc = _fold_state(
        m, l, acc, ptr2, lse_ptr2, rows, s2, n2, num_heads, HEAD_DIM_V, PAD_DIM_V
    )  # fmt: skip
    m, l, acc = _fold_state(
        m, l, acc, ptr3, lse_ptr3, rows, s3, n3, num_heads, HEAD_DIM_V, PAD_DIM_V
    )  # fmt: skip
    tl.store(own_lse_ptr + lses, m + (tl.log2(l) * LN2).to(tl.float64), mask=seen)
    tl.store(own_ptr + cells, acc / tl.where(l == 0, 1.0, l)[:, None], mask=exist)


_fold_kernel = CachedLauncher(fold_kernel)
MOST_FOLDED = 4


def fold(own: State, parts: Sequence[tuple[int, Tensor, Tensor]], fresh: bool = False) -> None:
    """Fold states that cover some tokens into one that covers all, in place; see entry.py."""
    (out, lse), absent = own, MOST_FOLDED - len(parts)
    batch, seqlen, num_heads, head_dim_v = out.shape
    starts, outs, lses = zip(*parts, strict=True) if parts else ((), (), ())
    num_rows, pad = batch * seqlen * num_heads, padded(head_dim_v)
    if not num_rows:
        return
    tile_m = TRITON_STREAMED.tile_m if pad < 512 else FOLD_ROWS_WIDE
    states = [[t.contiguous() for t in each] + [None] * absent for each in (outs, lses)]
    lengths = [[*each] + [0] * absent for each in (starts, (t.shape[1] for t in outs))]
    _fold_kernel[(triton.cdiv(num_rows, tile_m),)](
        out, lse, *states[0], *states[1], num_heads, num_rows, seqlen, *lengths[0], *lengths[1],
        HEAD_DIM_V=head_dim_v, PAD_DIM_V=pad, TILE_M=tile_m, FRESH=fresh,
        **launch_options(TRITON_STREAMED),
    )  # fmt: skip
