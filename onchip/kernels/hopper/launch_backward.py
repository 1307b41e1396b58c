"""From a call's tensors to the launches of the Hopper backward: prepare, gradients, finish.

  prepare_kernel ---> backward_kernel ------> finish_kernel        dq: fp32 accumulator, any order
  prepare_kernel ---> backward_kernel (dk, dv), backward_split_kernel (dq)  deterministic, few keys
  prepare_kernel ---> backward_split_kernel (dk), (dv), (dq)                wide heads

One kernel (backward.py) computes all gradients where dq may be summed in the order in which tiles
finish, and where that is faster (tiles.hopper_splits_dq). Otherwise dq has a kernel of its own
(backward_split.py), and where dk and dv together do not fit the registers, they have one each.

Two buffers connect the kernels. In both, every sequence of every head starts a new tile of queries
(index: backward.BackwardParams.padded_tile). `rows` has tile_m times lse in base 2 for each tile,
then tile_m times delta. The fp32 accumulator of dq has the two parts of each tile
(tiles.dq_part_columns) in the order of backward_products.to_fragment_order. Example: 300 tokens and
tile_m = 64 are 5 tiles for each head; the last one has 44 rows, and 20 with lse = +inf.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onchip.core.backend import Grads, grad_dtype, row_delta, sink_gradient
from onchip.core.problem import Problem, Tensors
from onchip.kernels.hopper.backward import backward_kernel
from onchip.kernels.hopper.launch_backward_split import compute_dk, compute_dq, compute_dv
from onchip.kernels.hopper.tensors import (
    BackwardArguments,
    Descriptor,
    descriptor,
    grad_descriptor,
    num_sms,
    softmax_scales,
    vector_descriptor,
    warp_constants,
)
from onchip.kernels.hopper.tile_plan import L2_BACKWARD, divide_group, l2_group_size
from onchip.kernels.runtime.counters import counter
from onchip.kernels.runtime.launcher import CachedLauncher, on_device
from onchip.kernels.tiles import (
    HOPPER_SPLIT_ALL,
    HopperBackwardConfig,
    dq_part_columns,
    hopper_backward_config,
    hopper_backward_widths,
    hopper_split_config,
    hopper_splits_dq,
    hopper_width,
    split_columns,
)

LOG2E = tl.constexpr(1.4426950408889634)
ROWS = tl.constexpr(64)  # of one consumer's part of dq
SUMS = tl.constexpr(1024)  # elements of dk or dv that a program adds at a time
_ADDING_PROGRAMS = 8  # of add_shares_kernel on each processor
Pair = tuple[Tensor, Tensor]
_LENGTHS = (
    "num_heads", "seqlen_q", "total_q", "num_sequences", "num_tiles", "rows_per_batch", "num_dk",
    "num_dv", "dk_per_batch", "dv_per_batch", "dk_stride", "dv_stride", "parts",
)  # fmt: skip


def backward(
    problem: Problem, x: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    if not (x.q.numel() and x.k.numel()):
        return _without_scores(problem, x, out, lse, dout, dlse)
    buffers = BackwardBuffers.of(problem, x, hopper_splits_dq(problem))
    delta = None if x.sinks is None else torch.empty_like(lse)
    dout = _prepare(problem, buffers, x, (out, lse, dout, dlse), delta)
    shares = UNDIVIDED if buffers.dq is None else Shares.of(problem, x)
    if buffers.width >= HOPPER_SPLIT_ALL:
        dk = compute_dk(problem, x, dout, buffers.rows, buffers.counters[0])
        dv = compute_dv(problem, x, dout, buffers.rows, buffers.counters[1])
    else:
        dk, dv = _empty(problem, x.k), _empty(problem, x.v)
        _launch_backward(problem, buffers, x, dout, shares.pair or (dk, dv), shares.parts)
    if buffers.dq is None:
        dq = compute_dq(problem, x, dout, buffers.rows, buffers.counters[2])
    else:
        dq = _empty(problem, x.q)
        _finish(problem.softmax_scale, buffers, x.cu_seqlens_q, dq, (dk, dv), shares)
    dsinks = None if delta is None else sink_gradient(x.sinks, lse, delta)
    return Grads(dq, dk, dv, dsinks=dsinks)


def _empty(problem: Problem, like: Tensor) -> Tensor:
    """An uninitialised gradient of `like`."""
    return like.new_empty(like.shape, dtype=grad_dtype(problem))


def _without_scores(
    problem: Problem, x: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    """Without queries or keys, only the sinks have a gradient."""
    dq, dk, dv = (t.new_zeros(t.shape, dtype=grad_dtype(problem)) for t in x[:3])
    if x.sinks is None:
        return Grads(dq, dk, dv)
    return Grads(dq, dk, dv, dsinks=sink_gradient(x.sinks, lse, row_delta(out, dout, dlse)))


class BackwardBuffers(NamedTuple):
    """Tile shape, lengths and buffers of one call. `width`: of the wider operands; `padded`: as a
    power of two. `lengths`: num_heads, seqlen_q, total_q, num_sequences, and the number of tiles of
    the longest sequence. Without an accumulator a separate kernel computes dq. `counters`: one for
    each kernel with dynamic scheduling, 16 bytes apart.
    """

    tile_m: int
    width: int
    padded: int
    lengths: tuple[int, int, int, int, int]
    rows: Tensor
    dq: Tensor | None
    counters: Tensor

    @staticmethod
    def of(problem: Problem, x: Tensors, splits_dq: bool = False) -> "BackwardBuffers":
        width = max(hopper_backward_widths(problem))
        tile_m = hopper_split_config(width).tile
        tiles = -(-problem.seqlen_q // tile_m)
        total_q = x.q.shape[0]
        num_tiles = total_q // tile_m + problem.batch if problem.packed else tiles * problem.batch
        num_rows = num_tiles * problem.num_heads * tile_m
        rows = x.q.new_empty(2 * num_rows, dtype=torch.float32)
        dq = None if splits_dq else x.q.new_empty(num_rows * width, dtype=torch.float32)
        lengths = (problem.num_heads, problem.seqlen_q, total_q, problem.batch, tiles)
        counters = x.q.new_empty(4, 4, dtype=torch.int32)
        padded = hopper_width(problem.widest)
        return BackwardBuffers(tile_m, width, padded, lengths, rows, dq, counters)

    @property
    def num_programs(self) -> int:
        """Query tiles of all heads and sequences."""
        num_heads, _, _, num_sequences, tiles = self.lengths
        return num_heads * num_sequences * tiles

    @property
    def dq_columns(self) -> tuple[int, int]:
        """The columns of the two parts of a tile of dq."""
        return dq_part_columns(self.tile_m, *split_columns(self.width))

    @property
    def dq_constants(self) -> dict[str, int]:
        """The accumulator of dq, as prepare_kernel and finish_kernel take it."""
        columns, tail = split_columns(self.width)
        return {"COLUMNS": columns, "TAIL": tail, "TILE_M": self.tile_m}


class Shares(NamedTuple):
    """How many parts a group of heads is divided into, each a work item, and the fp32 shares of
    several parts in dk and dv.
    """

    parts: int
    pair: Pair | None

    @staticmethod
    def of(problem: Problem, x: Tensors) -> "Shares":
        parts = divide_group(problem, num_sms(x.q.device))
        if parts == 1:
            return UNDIVIDED
        shapes = ((*t.shape[:-2], t.shape[-2] * parts, t.shape[-1]) for t in (x.k, x.v))
        dk, dv = (x.k.new_empty(shape, dtype=torch.float32) for shape in shapes)
        return Shares(parts, (dk, dv))


UNDIVIDED = Shares(1, None)


class GradAccumulation(NamedTuple):
    """The gradients of queries over several calls with different keys, as in ring attention. lse
    and delta are prepared once, and dq is finished once.
    """

    buffers: BackwardBuffers
    dout: Tensor
    softmax_scale: float

    @staticmethod
    def of(
        problem: Problem, x: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> "GradAccumulation":
        """Prepare lse and delta."""
        buffers = BackwardBuffers.of(problem, x)
        dout = _prepare(problem, buffers, x, (out, lse, dout, dlse), None)
        return GradAccumulation(buffers, dout, problem.softmax_scale)

    def add(self, problem: Problem, x: Tensors, sums: Pair | None) -> Pair | None:
        """Add the contribution of the keys of x. sums: dk and dv to add to, fp32 slices of longer
        tensors. Without them, dk and dv are returned.
        """
        add = sums is not None
        grads = sums or (_empty(problem, x.k), _empty(problem, x.v))
        with on_device(x.q):
            buffers = self.buffers._replace(counters=counter(x.q.device))
            shares = Shares.of(problem, x)
            if shares.pair is None:
                _launch_backward(problem, buffers, x, self.dout, grads, add=add)
            else:
                _launch_backward(problem, buffers, x, self.dout, shares.pair, shares.parts)
                _add_shares(shares, grads, add)
        return None if add else grads

    def finish(self, dq: Tensor) -> None:
        """Add dq to its sum, a dense fp32 slice of a longer tensor."""
        with on_device(dq):
            _finish(self.softmax_scale, self.buffers, None, dq, add=True)


@triton.jit
def _locate(cu_seqlens_q, num_heads, seqlen_q, total_q, num_sequences, num_tiles, rows_per_batch,
            program, TILE_M: tl.constexpr):  # fmt: skip
    """(head, its first row in out, its first element in lse, rows of the sequence, tile in it, tile
    in the padded buffers) of one program. rows_per_batch: rows from one batch entry to the next.
    """
    tile = program % num_tiles
    batch_head = program // num_tiles
    b, h = batch_head // num_heads, batch_head % num_heads
    if cu_seqlens_q is not None:
        q0 = tl.minimum(tl.maximum(tl.load(cu_seqlens_q + b), 0), total_q)
        q1 = tl.minimum(tl.maximum(tl.load(cu_seqlens_q + b + 1), q0), total_q)
        padded = h * (total_q // TILE_M + num_sequences) + q0 // TILE_M + b + tile
        return h, q0.to(tl.int64), h.to(tl.int64) * total_q + q0, q1 - q0, tile, padded
    else:
        first = b.to(tl.int64) * rows_per_batch
        return h, first, batch_head.to(tl.int64) * seqlen_q, seqlen_q, tile, program


@triton.jit(do_not_specialize=_LENGTHS)
def prepare_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, delta_ptr, rows_ptr, dq_ptr, counters_ptr, cu_seqlens_q,
    num_heads, seqlen_q, total_q, num_sequences, num_tiles,
    HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TAIL: tl.constexpr,
    TILE_M: tl.constexpr,
):  # fmt: skip
    """Fill `rows`, and clear the counters and the accumulator of dq, if there is one, of COLUMNS
    and TAIL. WIDTH: columns of out as a power of two. delta = rowsum(out * dout) - dlse. Rows that
    see no key and rows past the end get lse = +inf, so that p = exp2(s - lse) = 0. delta is also
    stored like lse if delta_ptr is given.

    The last tile comes first: what is cleared last is still in the L2 when it is added to first.
    The accumulator is cleared while out and dout are loaded.
    """
    gdc_wait()
    gdc_launch_dependents()
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    if program == 0:
        tl.store(counters_ptr + tl.arange(0, 16), tl.zeros([16], tl.int32))
    h, first, first_lse, length, tile, padded = _locate(
        cu_seqlens_q, num_heads, seqlen_q, total_q, num_sequences, num_tiles, seqlen_q, program,
        TILE_M,
    )  # fmt: skip
    if tile * TILE_M >= length:
        return
    lane = tl.arange(0, TILE_M)
    row = tile * TILE_M + lane
    inside = row < length
    cols = tl.arange(0, WIDTH)
    offsets = ((first + row) * num_heads + h)[:, None] * HEAD_DIM_V + cols[None, :]
    mask = inside[:, None] & (cols < HEAD_DIM_V)[None, :]
    out = tl.load(out_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if dq_ptr is not None:
        first_number = dq_ptr + padded.to(tl.int64) * (TILE_M * (COLUMNS + TAIL))
        pointers = first_number + tl.arange(0, TILE_M * COLUMNS)
        tl.store(pointers, tl.zeros([TILE_M * COLUMNS], tl.float32))
        if TAIL > 0:
            pointers = first_number + TILE_M * COLUMNS + tl.arange(0, TILE_M * TAIL)
            tl.store(pointers, tl.zeros([TILE_M * TAIL], tl.float32))
    delta = tl.sum(out * dout, 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + first_lse + row, mask=inside, other=0.0)
    if delta_ptr is not None:
        tl.store(delta_ptr + first_lse + row, delta, mask=inside)
    lse = tl.load(lse_ptr + first_lse + row, mask=inside, other=float("-inf"))
    sees = lse > float("-inf")
    pointers = rows_ptr + padded.to(tl.int64) * (2 * TILE_M) + lane
    tl.store(pointers, tl.where(sees, lse * LOG2E, float("inf")))
    tl.store(pointers + TILE_M, tl.where(sees, delta, 0.0))


@triton.jit
def _sum_shares(shares_ptr, out_ptr, count, per_batch, stride, parts, DIM: tl.constexpr,
                ADD: tl.constexpr):  # fmt: skip
    """The sum over the parts of a group, in their order: the same bits every time. `count`
    elements of out, dense, or `per_batch` of them, and `stride` from one batch entry to the next.
    """
    first_sum, step = tl.program_id(0).to(tl.int64) * SUMS, tl.num_programs(0).to(tl.int64) * SUMS
    for start in range(first_sum, count, step):
        at = start + tl.arange(0, SUMS)
        first = shares_ptr + at // DIM * (parts * DIM) + at % DIM
        total = tl.load(first, mask=at < count, other=0.0)
        for part in range(1, parts):
            total += tl.load(first + part * DIM, mask=at < count, other=0.0)
        pointers = out_ptr + at
        if per_batch is not None:
            pointers = out_ptr + at // per_batch * stride + at % per_batch
        if ADD:
            total += tl.load(pointers, mask=at < count, other=0.0)
        tl.store(pointers, total.to(out_ptr.dtype.element_ty), mask=at < count)


@triton.jit(do_not_specialize=_LENGTHS)
def add_shares_kernel(
    dk_shares_ptr, dk_ptr, dv_shares_ptr, dv_ptr, num_dk, num_dv, dk_per_batch, dv_per_batch,
    dk_stride, dv_stride, parts, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """dk and dv from the shares of the parts of groups. ADD: add to dk and dv."""
    gdc_wait()
    gdc_launch_dependents()
    _sum_shares(dk_shares_ptr, dk_ptr, num_dk, dk_per_batch, dk_stride, parts, HEAD_DIM, ADD)
    _sum_shares(dv_shares_ptr, dv_ptr, num_dv, dv_per_batch, dv_stride, parts, HEAD_DIM_V, ADD)


@triton.jit
def _finish_part(
    acc_ptr, dq_ptr, first_number, first, h, num_heads, row, length, first_col, softmax_scale,
    N: tl.constexpr, HEAD_DIM: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """dq of 64 queries and N columns, which begin at first_number in the accumulator."""
    numbers = first_number + tl.arange(0, ROWS * N)
    fragments = tl.load(acc_ptr + numbers).reshape([4, N // 8, 8, 4, 2, 2])
    dq = fragments.permute([0, 4, 2, 1, 3, 5]).reshape([ROWS, N]) * softmax_scale
    rows = row + tl.arange(0, ROWS)
    cols = first_col + tl.arange(0, N)
    offsets = ((first + rows) * num_heads + h)[:, None] * HEAD_DIM + cols[None, :]
    mask = (rows < length)[:, None] & (cols < HEAD_DIM)[None, :]
    if ADD:
        dq += tl.load(dq_ptr + offsets, mask=mask, other=0.0)
    tl.store(dq_ptr + offsets, dq.to(dq_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_LENGTHS)
def finish_kernel(
    acc_ptr, dq_ptr, dk_shares_ptr, dk_ptr, dv_shares_ptr, dv_ptr, cu_seqlens_q, num_heads,
    seqlen_q, total_q, num_sequences, num_tiles, softmax_scale, rows_per_batch, num_dk, num_dv,
    parts, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, COLUMNS: tl.constexpr,
    TAIL: tl.constexpr, TILE_M: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """dq = softmax_scale * accumulator in the dtype of dq, one of the two parts of a tile for each
    program. ADD: add to dq. If groups of heads are divided, also dk and dv from the shares of the
    parts. The last tile comes first: its sums are still in the L2.
    """
    N: tl.constexpr = COLUMNS if TAIL > 0 or TILE_M > ROWS else COLUMNS // 2  # of the first part
    ACROSS: tl.constexpr = COLUMNS // N
    gdc_wait()
    gdc_launch_dependents()
    if dk_shares_ptr is not None:
        _sum_shares(dk_shares_ptr, dk_ptr, num_dk, None, None, parts, HEAD_DIM, False)
        _sum_shares(dv_shares_ptr, dv_ptr, num_dv, None, None, parts, HEAD_DIM_V, False)
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    part = program % 2
    h, first, _, length, tile, padded = _locate(
        cu_seqlens_q, num_heads, seqlen_q, total_q, num_sequences, num_tiles,
        rows_per_batch if ADD else seqlen_q, program // 2, TILE_M,
    )  # fmt: skip
    if TAIL > 0:
        row = tile * TILE_M
        if row >= length:
            return
        first_number = padded.to(tl.int64) * (TILE_M * (COLUMNS + TAIL))
        if part == 0:
            _finish_part(acc_ptr, dq_ptr, first_number, first, h, num_heads, row, length, 0,
                         softmax_scale, COLUMNS, HEAD_DIM, ADD)  # fmt: skip
        else:
            _finish_part(acc_ptr, dq_ptr, first_number + TILE_M * COLUMNS, first, h, num_heads, row,
                         length, COLUMNS, softmax_scale, TAIL, HEAD_DIM, ADD)  # fmt: skip
    else:
        row = tile * TILE_M + part // ACROSS * ROWS
        if row >= length:
            return
        first_number = (padded.to(tl.int64) * 2 + part) * (ROWS * N)
        _finish_part(acc_ptr, dq_ptr, first_number, first, h, num_heads, row, length,
                     part % ACROSS * N, softmax_scale, N, HEAD_DIM, ADD)  # fmt: skip


_prepare_kernel = CachedLauncher(prepare_kernel)
_backward_kernel = CachedLauncher(backward_kernel)
_add_shares_kernel = CachedLauncher(add_shares_kernel)
_finish_kernel = CachedLauncher(finish_kernel)


def _prepare(
    problem: Problem, buffers: BackwardBuffers, x: Tensors, saved: tuple, delta: Tensor | None
) -> Tensor:
    """dout in the dtype of the products. saved: (out, lse, dout, dlse or None)."""
    out, lse, dout, dlse = saved
    dout = dout if dout.data_ptr() % 16 == 0 else dout.clone()
    _prepare_kernel[(buffers.num_programs,)](
        out, dout, lse, None if dlse is None else dlse.contiguous(), delta,
        buffers.rows, buffers.dq, buffers.counters, x.cu_seqlens_q, *buffers.lengths,
        HEAD_DIM_V=out.shape[-1], WIDTH=buffers.padded, **buffers.dq_constants,
        enable_fp_fusion=True, launch_pdl=True,
    )  # fmt: skip
    return dout.to(problem.dtype)  # out may have a wider dtype


def _finish(
    softmax_scale: float,
    buffers: BackwardBuffers,
    cu_seqlens_q: Tensor | None,
    dq: Tensor,
    keys: Pair | None = None,
    shares: Shares = UNDIVIDED,
    add: bool = False,
) -> None:
    programs = 2 * buffers.num_programs
    dk, dv = keys or (dq, dq)  # placeholders, not written
    dk_shares, dv_shares = shares.pair or (None, None)
    _finish_kernel[(programs,)](
        buffers.dq, dq, dk_shares, dk, dv_shares, dv, cu_seqlens_q, *buffers.lengths,
        softmax_scale, dq.stride(0) // dq.stride(1), dk.numel(), dv.numel(), shares.parts,
        HEAD_DIM=dq.shape[-1], HEAD_DIM_V=dv.shape[-1], **buffers.dq_constants,
        ADD=add, enable_fp_fusion=True, launch_pdl=True,
    )  # fmt: skip


def _add_shares(shares: Shares, grads: Pair, add: bool) -> None:
    """grads: dense but for the step from one batch entry to the next."""
    dk, dv = grads
    programs = -(-max(dk.numel(), dv.numel()) // SUMS.value)
    _add_shares_kernel[(min(programs, _ADDING_PROGRAMS * num_sms(dk.device)),)](
        shares.pair[0], dk, shares.pair[1], dv, dk.numel(), dv.numel(),
        dk[0].numel(), dv[0].numel(), dk.stride(0), dv.stride(0), shares.parts,
        HEAD_DIM=dk.shape[-1], HEAD_DIM_V=dv.shape[-1], ADD=add,
        enable_fp_fusion=True, launch_pdl=True,
    )  # fmt: skip


def _launch_backward(
    problem: Problem,
    buffers: BackwardBuffers,
    x: Tensors,
    dout: Tensor,
    grads: Pair,
    parts: int = 1,
    add: bool = False,
) -> None:
    config, width = hopper_backward_config(buffers.width), buffers.width
    columns, tail = split_columns(width)
    tiles_n = -(-problem.seqlen_k // config.tile_n)
    heads = problem.batch * problem.num_kv_heads * parts
    num_tiles = tiles_n * heads
    scale, inner = softmax_scales(problem)
    accumulator = buffers.rows if buffers.dq is None else buffers.dq  # a placeholder, not written
    arguments = BackwardArguments.of(
        problem, x, None if x.mask is None else x.mask.cols, buffers.counters
    )
    _backward_kernel[(min(num_tiles, num_sms(x.q.device)),)](
        descriptor(x.q, config.tile_m, columns), descriptor(x.k, config.tile_n, columns),
        descriptor(x.v, config.tile_n, columns), descriptor(dout, config.tile_m, columns),
        vector_descriptor(buffers.rows, (2 * config.tile_m,)),
        _part_descriptor(accumulator, buffers.dq_columns[0]),
        *(grad_descriptor(t, columns) for t in grads),
        *(_tail_descriptors(x, dout, accumulator, grads, config, tail) if tail else (None,) * 7),
        *arguments.positional,
        tiles_n, _l2_group(problem, heads, width, parts), num_tiles, problem.batch, parts,
        scale, inner, problem.softmax_scale,
        WIDTH=columns, DQ=buffers.dq is not None, ADD=add,
        **arguments.constants, **_constants(config),
    )  # fmt: skip


def _part_descriptor(accumulator: Tensor, columns: int) -> Descriptor:
    """One consumer's part of dq: 64 queries in the order of to_fragment_order."""
    return vector_descriptor(accumulator.view(-1, 32), (2 * columns, 32))


def _tail_descriptors(
    x: Tensors,
    dout: Tensor,
    accumulator: Tensor,
    grads: Pair,
    config: HopperBackwardConfig,
    tail: int,
) -> tuple[Descriptor, ...]:
    """Of the last columns of q, k, v, dout, dq, dk and dv."""
    keys = (descriptor(t, config.tile_n, tail) for t in (x.k, x.v))
    grad_tails = (grad_descriptor(t, tail) for t in grads)
    q, dout_tail = (descriptor(t, config.tile_m, tail) for t in (x.q, dout))
    return q, *keys, dout_tail, _part_descriptor(accumulator, tail), *grad_tails


@cache
def _constants(config: HopperBackwardConfig) -> dict:
    return {
        "TILE_M": config.tile_m,
        "TILE_N": config.tile_n,
        "Q_STAGES": config.q_stages,
        "DOUT_STAGES": config.dout_stages,
        **warp_constants(config),
    }


def _l2_group(problem: Problem, heads: int, width: int, parts: int) -> int:
    """Work items computed together; q, dout and dq stream."""
    per_row = problem.group_size // parts * width * (2 * problem.dtype.itemsize + 4)
    return l2_group_size(heads, problem.seqlen_q * per_row, L2_BACKWARD)
