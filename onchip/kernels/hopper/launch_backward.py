"""From a call's tensors to the launches of the Hopper backward: prepare, the gradients, finish.

All gradients come from one kernel (backward.py) where dq may be summed in the order tiles happen to
finish; else dq comes from a kernel of its own (gradient.py), and at head_dim 256 dk and dv, too.

Between them travel two buffers in which every sequence of every head starts a new tile of queries
(numbered as backward.Job.padded_tile does): `rows`, per tile tile_m times lse in base 2, then
tile_m times delta; and the fp32 accumulator of dq, per tile its parts of 64 x 64 in the order of
backward.fragments.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from onchip.kernels.configs import (
    HopperBackwardConfig,
    hopper_backward_config,
    hopper_gradient_config,
    hopper_width,
)
from onchip.kernels.counters import counter
from onchip.kernels.handles import CachedLauncher, on_device
from onchip.kernels.hopper.backward import backward_kernel
from onchip.kernels.hopper.launch_gradient import key_gradient, query_gradient, value_gradient
from onchip.kernels.hopper.tensors import (
    L2_BACKWARD,
    Frame,
    descriptor,
    gradient_tiles,
    num_sms,
    numbers,
    scales,
    section_of,
    team,
)
from onchip.kernels.protocol import Grads, grad_dtype, row_delta, sink_gradient
from onchip.problem import Problem, Tensors

LOG2E = tl.constexpr(1.4426950408889634)
PART = tl.constexpr(64 * 64)  # of dq, one consumer's share of a tile
Pair = tuple[Tensor, Tensor]
_LENGTHS = ("num_heads", "seqlen_q", "total_q", "num_sequences", "num_tiles", "room")


def backward(
    problem: Problem, x: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    if not (x.q.numel() and x.k.numel()):
        return _without_scores(problem, x, out, lse, dout, dlse)
    call = Call.of(problem, x)
    delta = None if x.sinks is None else torch.empty_like(lse)
    dout = _prepare(problem, call, x, (out, lse, dout, dlse), delta)
    if call.width == 256:
        dk = key_gradient(problem, x, dout, call.rows, call.counters[0])
        dv = value_gradient(problem, x, dout, call.rows, call.counters[1])
    else:
        dk, dv = _empty(problem, x.k), _empty(problem, x.v)
        _gradients(problem, call, x, dout, dk, dv)
    if call.dq is None:
        dq = query_gradient(problem, x, dout, call.rows, call.counters[2])
    else:
        dq = _empty(problem, x.q)
        _finish(problem.softmax_scale, call, x.cu_seqlens_q, dq)
    dsinks = None if delta is None else sink_gradient(x.sinks, lse, delta)
    return Grads(dq, dk, dv, dsinks=dsinks)


def _empty(problem: Problem, like: Tensor) -> Tensor:
    return like.new_empty(like.shape, dtype=grad_dtype(problem))


def _without_scores(
    problem: Problem, x: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    """No query or no key: only the sinks have a gradient."""
    dq, dk, dv = (t.new_zeros(t.shape, dtype=grad_dtype(problem)) for t in x[:3])
    if x.sinks is None:
        return Grads(dq, dk, dv)
    return Grads(dq, dk, dv, dsinks=sink_gradient(x.sinks, lse, row_delta(out, dout, dlse)))


class Call(NamedTuple):
    """One call's tile shape, lengths and buffers. `lengths` are num_heads, seqlen_q, total_q,
    num_sequences and the number of tiles of the longest sequence. Without an accumulator, dq is
    computed by a kernel of its own. `counters` has one for each kernel that hands out tickets, on
    16 bytes.
    """

    tile_m: int
    width: int
    lengths: tuple[int, int, int, int, int]
    rows: Tensor
    dq: Tensor | None
    counters: Tensor

    @staticmethod
    def of(problem: Problem, x: Tensors) -> "Call":
        width = hopper_width(max(problem.head_dim, problem.head_dim_v))
        tile_m = hopper_gradient_config(width).tile
        tiles = -(-problem.seqlen_q // tile_m)
        total_q = x.q.shape[0]
        num_tiles = total_q // tile_m + problem.batch if problem.packed else tiles * problem.batch
        num_rows = num_tiles * problem.num_heads * tile_m
        rows = x.q.new_empty(2 * num_rows, dtype=torch.float32)
        apart = problem.deterministic or width == 256
        dq = None if apart else x.q.new_empty(num_rows * width, dtype=torch.float32)
        lengths = (problem.num_heads, problem.seqlen_q, total_q, problem.batch, tiles)
        counters = x.q.new_empty(4, 4, dtype=torch.int32)
        return Call(tile_m, width, lengths, rows, dq, counters)

    @property
    def num_programs(self) -> int:
        num_heads, _, _, num_sequences, tiles = self.lengths
        return num_heads * num_sequences * tiles


class Queries(NamedTuple):
    """Queries whose gradients come from several calls, each over other keys: what all of them need,
    lse and delta, is prepared once, and dq finished once.
    """

    call: Call
    dout: Tensor
    softmax_scale: float

    @staticmethod
    def of(
        problem: Problem, x: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> "Queries":
        call = Call.of(problem, x)
        dout = _prepare(problem, call, x, (out, lse, dout, dlse), None)
        return Queries(call, dout, problem.softmax_scale)

    def add(self, problem: Problem, x: Tensors, sums: Pair | None) -> Pair | None:
        """What the keys of x contribute. sums are dk and dv to add to, fp32 and some tokens of
        whole ones; without them, dk and dv are returned.
        """
        dk, dv = found = sums or (_empty(problem, x.k), _empty(problem, x.v))
        with on_device(x.q):
            call = self.call._replace(counters=counter(x.q.device))
            _gradients(problem, call, x, self.dout, dk, dv, add=sums is not None)
        return None if sums is not None else found

    def finish(self, dq: Tensor) -> None:
        """Add dq to its sum, fp32 and some tokens of a whole one, in which they lie densely."""
        with on_device(dq):
            _finish(self.softmax_scale, self.call, None, dq, add=True)


@triton.jit
def _place(cu_seqlens_q, num_heads, seqlen_q, total_q, num_sequences, num_tiles, room, program,
           TILE_M: tl.constexpr):  # fmt: skip
    """(head, its first row in out, its first number in lse, rows of the sequence, tile in it, tile
    in the padded buffers) of one program. room: from one entry of a batch to the next, in rows.
    """
    tile = program % num_tiles
    plane = program // num_tiles
    b, h = plane // num_heads, plane % num_heads
    if cu_seqlens_q is not None:
        q0 = tl.minimum(tl.maximum(tl.load(cu_seqlens_q + b), 0), total_q)
        q1 = tl.minimum(tl.maximum(tl.load(cu_seqlens_q + b + 1), q0), total_q)
        padded = h * (total_q // TILE_M + num_sequences) + q0 // TILE_M + b + tile
        return h, q0.to(tl.int64), h.to(tl.int64) * total_q + q0, q1 - q0, tile, padded
    else:
        first = b.to(tl.int64) * room
        return h, first, plane.to(tl.int64) * seqlen_q, seqlen_q, tile, program


@triton.jit(do_not_specialize=_LENGTHS)
def prepare_kernel(
    out_ptr, dout_ptr, lse_ptr, dlse_ptr, delta_ptr, rows_ptr, dq_ptr, counters_ptr, cu_seqlens_q,
    num_heads, seqlen_q, total_q, num_sequences, num_tiles,
    HEAD_DIM_V: tl.constexpr, WIDTH: tl.constexpr, TILE_M: tl.constexpr,
):  # fmt: skip
    """rows, and zeros in the counters and in the accumulator of dq, if there is one. delta =
    rowsum(out * dout) - dlse; rows that see no key and rows past the end have lse = +inf, so that p
    = exp2(s - lse) = 0. delta is also stored beside lse if delta_ptr is given.
    """
    gdc_wait()
    gdc_launch_dependents()
    program = tl.program_id(0)
    if program == 0:
        tl.store(counters_ptr + tl.arange(0, 16), tl.zeros([16], tl.int32))
    h, first, first_lse, length, tile, padded = _place(
        cu_seqlens_q, num_heads, seqlen_q, total_q, num_sequences, num_tiles, seqlen_q, program,
        TILE_M,
    )  # fmt: skip
    if tile * TILE_M >= length:
        return
    lane = tl.arange(0, TILE_M)
    row = tile * TILE_M + lane
    inside = row < length
    cols = tl.arange(0, WIDTH)
    places = ((first + row) * num_heads + h)[:, None] * HEAD_DIM_V + cols[None, :]
    mask = inside[:, None] & (cols < HEAD_DIM_V)[None, :]
    out = tl.load(out_ptr + places, mask=mask, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + places, mask=mask, other=0.0).to(tl.float32)
    delta = tl.sum(out * dout, 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + first_lse + row, mask=inside, other=0.0)
    if delta_ptr is not None:
        tl.store(delta_ptr + first_lse + row, delta, mask=inside)
    lse = tl.load(lse_ptr + first_lse + row, mask=inside, other=float("-inf"))
    sees = lse > float("-inf")
    numbers = rows_ptr + padded.to(tl.int64) * (2 * TILE_M) + lane
    tl.store(numbers, tl.where(sees, lse * LOG2E, float("inf")))
    tl.store(numbers + TILE_M, tl.where(sees, delta, 0.0))
    if dq_ptr is not None:
        numbers = dq_ptr + padded.to(tl.int64) * (TILE_M * WIDTH) + tl.arange(0, TILE_M * WIDTH)
        tl.store(numbers, tl.zeros([TILE_M * WIDTH], tl.float32))


@triton.jit(do_not_specialize=_LENGTHS)
def finish_kernel(
    acc_ptr, dq_ptr, cu_seqlens_q, num_heads, seqlen_q, total_q, num_sequences, num_tiles,
    softmax_scale, room,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, TILE_M: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """dq = softmax_scale * accumulator, one part of 64 x 64 a program, in the dtype of dq. ADD: it
    is added to what is there.
    """
    PARTS: tl.constexpr = TILE_M * WIDTH // PART
    ACROSS: tl.constexpr = WIDTH // 64
    gdc_wait()
    gdc_launch_dependents()
    part = tl.program_id(0) % PARTS
    h, first, _, length, tile, padded = _place(
        cu_seqlens_q, num_heads, seqlen_q, total_q, num_sequences, num_tiles,
        room if ADD else seqlen_q, tl.program_id(0) // PARTS, TILE_M,
    )  # fmt: skip
    row = tile * TILE_M + part // ACROSS * 64
    if row >= length:
        return
    numbers = (padded.to(tl.int64) * PARTS + part) * PART + tl.arange(0, PART)
    fragments = tl.load(acc_ptr + numbers).reshape([4, 8, 8, 4, 2, 2])
    dq = fragments.permute([0, 4, 2, 1, 3, 5]).reshape([64, 64]) * softmax_scale
    rows = row + tl.arange(0, 64)
    cols = part % ACROSS * 64 + tl.arange(0, 64)
    places = ((first + rows) * num_heads + h)[:, None] * HEAD_DIM + cols[None, :]
    mask = (rows < length)[:, None] & (cols < HEAD_DIM)[None, :]
    if ADD:
        dq += tl.load(dq_ptr + places, mask=mask, other=0.0)
    tl.store(dq_ptr + places, dq.to(dq_ptr.dtype.element_ty), mask=mask)


_prepare_kernel = CachedLauncher(prepare_kernel)
_backward_kernel = CachedLauncher(backward_kernel)
_finish_kernel = CachedLauncher(finish_kernel)


def _prepare(
    problem: Problem, call: Call, x: Tensors, saved: tuple, delta: Tensor | None
) -> Tensor:
    """dout as the products take it; saved is (out, lse, dout, dlse or None)."""
    out, lse, dout, dlse = saved
    dout = dout if dout.data_ptr() % 16 == 0 else dout.clone()
    _prepare_kernel[(call.num_programs,)](
        out,
        dout,
        lse,
        None if dlse is None else dlse.contiguous(),
        delta,
        call.rows,
        call.dq,
        call.counters,
        x.cu_seqlens_q,
        *call.lengths,
        HEAD_DIM_V=out.shape[-1],
        WIDTH=call.width,
        TILE_M=call.tile_m,
        enable_fp_fusion=True,
        launch_pdl=True,
    )
    return dout.to(problem.dtype)  # that of out may be wider


def _finish(
    softmax_scale: float, call: Call, cu_seqlens_q: Tensor | None, dq: Tensor, add: bool = False
) -> None:
    parts = call.tile_m * call.width // PART.value
    _finish_kernel[(call.num_programs * parts,)](
        call.dq,
        dq,
        cu_seqlens_q,
        *call.lengths,
        softmax_scale,
        dq.stride(0) // dq.stride(1),
        HEAD_DIM=dq.shape[-1],
        WIDTH=call.width,
        TILE_M=call.tile_m,
        ADD=add,
        enable_fp_fusion=True,
        launch_pdl=True,
    )


def _gradients(
    problem: Problem,
    call: Call,
    x: Tensors,
    dout: Tensor,
    dk: Tensor,
    dv: Tensor,
    add: bool = False,
) -> None:
    config, width = hopper_backward_config(call.width), call.width
    tiles_n = -(-problem.seqlen_k // config.tile_n)
    heads = problem.batch * problem.num_kv_heads
    num_tiles = tiles_n * heads
    scale, inner = scales(problem)
    accumulator = call.rows if call.dq is None else call.dq  # in its place, not written
    frame = Frame.of(problem, x, None if x.mask is None else x.mask.cols, call.counters)
    _backward_kernel[(min(num_tiles, num_sms(x.q.device)),)](
        descriptor(x.q, config.tile_m, width),
        descriptor(x.k, config.tile_n, width),
        descriptor(x.v, config.tile_n, width),
        descriptor(dout, config.tile_m, width),
        numbers(call.rows, (2 * config.tile_m,)),
        numbers(accumulator.view(-1, 32), (128, 32)),
        gradient_tiles(dk, width),
        gradient_tiles(dv, width),
        *frame.arguments,
        tiles_n,
        _section(problem, heads, width),
        num_tiles,
        problem.batch,
        scale,
        inner,
        problem.softmax_scale,
        WIDTH=width,
        DQ=call.dq is not None,
        ADD=add,
        **frame.constants,
        **_constants(config),
    )


@cache
def _constants(config: HopperBackwardConfig) -> dict:
    return {
        "TILE_M": config.tile_m,
        "TILE_N": config.tile_n,
        "Q_STAGES": config.q_stages,
        "DOUT_STAGES": config.dout_stages,
        **team(config),
    }


def _section(problem: Problem, heads: int, width: int) -> int:
    """q, dout and dq stream by."""
    per_row = problem.group_size * width * (2 * problem.dtype.itemsize + 4)
    return section_of(heads, problem.seqlen_q * per_row, L2_BACKWARD)
