"""torch's own CPU flash kernel, called once per group of query blocks, over only the keys that the
group sees; or once for all planes of a mask, over all keys, where the planes are small.

The kernel is fast, but has these limits. Each is handled here and tested in
tests/kernels/cpu/test_aten.py:

- A row that sees no key, or only scores of -inf, returns lse = 0.
- A row with a score of +inf returns NaN, but lse = +inf with some instruction sets: NaN here.
- seqlen 0 crashes the process.
- is_causal is top-left aligned, and its -inf is multiplied by the scale: scales are made positive.
- Masks must be float.
- head_dim_v must equal head_dim.
- 16-bit results are rounded. So fp32 partials and sinks are computed in fp32.
- The lse of 16-bit calls is up to 6.3e-5 off. So calls that return lse are computed in fp32.
- The 16-bit backward sums dK and dV in 16 bits. So gradients are computed in fp32.
- CPUs without 16-bit instructions run 16-bit products in scalar loops: they are computed in fp32.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.core import machine
from onchip.core.backend import (
    Backend,
    Grads,
    Result,
    accumulator_dtype,
    empty_result,
    grad_dtype,
    make_backend,
    row_delta,
    sink_gradient,
)
from onchip.core.device import DeviceInfo
from onchip.core.problem import Problem, Tensors
from onchip.core.state import add_sink, finalize, resume
from onchip.kernels.cpu.head_slice import HeadSlice, head_slices, plane_rule
from onchip.kernels.cpu.scores import grouped_matmul
from onchip.masks.blockmask import BLOCK
from onchip.masks.visibility import Visibility

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_MASKED_CELLS = 1 << 22  # a float mask of at most 16 MB
_LOWEST = -1e30  # below all logits of a row with lse = 0
_CALL_COST = 1 << 16  # a call costs 100 us besides its cells: as much as so many cells of one head
# Cells of the heads of a plane up to which all planes are one call, over all keys: as many as take
# the time in which the calls of one plane are found, 0.5 ms.
_SMALL_PLANE = 1 << 18


class FlashCall(NamedTuple):
    """One call of the kernel: rows [q0, q1) over the keys of `spans`."""

    q0: int
    q1: int
    spans: tuple[tuple[int, int], ...]
    is_causal: bool

    @property
    def rows(self) -> int:
        return self.q1 - self.q0

    @property
    def keys(self) -> int:
        return sum(k1 - k0 for k0, k1 in self.spans)


OPTIONS = {
    *("causal", "window_size", "packed", "has_mask", "deterministic", "has_sinks", "wide_grads"),
    *("has_positions", "first_head"),  # they change ALiBi and dropout alone, which it lacks
}


def supports(problem: Problem, device: DeviceInfo) -> str | None:
    if device.type != "cpu":
        return f"runs on the CPU only, not on {device.type}"
    return None


def forward(problem: Problem, x: Tensors) -> Result:
    if _is_direct(problem) and _is_whole(problem, x):
        q, k, v = x.q.transpose(1, 2), x.k.transpose(1, 2), x.v.transpose(1, 2)
        out, lse = _call_forward(problem, (q, k, v), problem.causal, None)
        return Result(out.transpose(1, 2), lse.contiguous())
    compute = _compute_dtype(problem)
    width = problem.widest
    q, k, v = (_operand(t, compute, width) for t in x[:3])
    q = q if problem.softmax_scale > 0 else q * _sign(problem)
    if _is_whole(problem, x):
        out, lse = _call_forward(problem, _heads_first(q, k, v), problem.causal, None)
        out, lse = _cut_columns(out.transpose(1, 2), problem.head_dim_v), lse.contiguous()
    elif _has_small_planes(problem, x):
        rule = plane_rule(problem, x, 0, 0)
        mask, without_keys = _mask_of_planes(rule, accumulator_dtype(compute))
        out, lse = _call_forward(problem, _heads_first(q, k, v), False, mask)
        lse = lse if without_keys is None else lse.masked_fill(without_keys, -torch.inf)
        out = _cut_columns(out.transpose(1, 2), problem.head_dim_v)
    else:
        out, lse = empty_result(problem._replace(out_dtype=compute), x)
        for head_slice in head_slices(problem, x):
            _forward_head_slice(problem, head_slice, (q, k, v), out, lse)
    if x.sinks is not None:
        out, lse = _with_sinks(out, lse, x.sinks)
    return Result(out.to(problem.out_dtype).contiguous(), lse)


def _forward_head_slice(
    problem: Problem, head_slice: HeadSlice, qkv: tuple[Tensor, ...], out: Tensor, lse: Tensor
) -> None:
    q, k, v = _heads_first(head_slice.take_queries(qkv[0]), *map(head_slice.take_keys, qkv[1:]))
    out, lse = head_slice.take_queries(out), head_slice.take_rows(lse)
    calls = _calls(head_slice.visibility, max(1, q.shape[0] * q.shape[1]))
    gather_k, gather_v = _Gather(k, calls), _Gather(v, calls)
    for call in calls:
        rows = slice(call.q0, call.q1)
        if not call.spans:
            out[:, rows], lse[:, :, rows] = 0.0, -torch.inf
            continue
        mask, without_keys = _float_mask(head_slice.visibility, call, accumulator_dtype(q.dtype))
        tile = q[:, :, rows], gather_k(call), gather_v(call)
        o, row_lse = _call_forward(problem, tile, call.is_causal, mask)
        out[:, rows] = _cut_columns(o.transpose(1, 2), problem.head_dim_v)
        lse[:, :, rows] = (
            row_lse if without_keys is None else row_lse.masked_fill(without_keys, -torch.inf)
        )


def _call_forward(
    problem: Problem, qkv: Sequence[Tensor], is_causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out and lse. A row with only scores of -inf has lse = -inf, one with +inf has NaN."""
    (q, k, v), scale = qkv, _positive_scale(problem)
    out, lse = _FORWARD(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
    if not bool(lse.all()):
        lse = _mark_empty_rows(lse, q, k, scale, is_causal, mask)
    return out, lse.masked_fill(lse == torch.inf, torch.nan)


def _mark_empty_rows(
    lse: Tensor, q: Tensor, k: Tensor, scale: float, is_causal: bool, mask: Tensor | None
) -> Tensor:
    """lse with -inf instead of 0 for rows with only scores of -inf. The scores of all rows with lse
    = 0 are computed again, because a single score of 0 gives 0, too; few rows have it.
    """
    rows = (lse == 0).any(0).any(0).nonzero().flatten()
    wide = accumulator_dtype(q.dtype)
    s = grouped_matmul(q[:, :, rows].to(wide), k.to(wide).transpose(-1, -2)) * scale
    if is_causal:
        s = s.masked_fill(torch.arange(k.shape[2]) > rows[:, None], -torch.inf)
    elif mask is not None:
        s = s + mask[..., rows, :]
    empty = (lse[:, :, rows] == 0) & (s.amax(-1) < _LOWEST)
    return lse.index_copy(2, rows, lse[:, :, rows].masked_fill(empty, -torch.inf))


def _sign(problem: Problem) -> float:
    """The exact factor of q that makes the kernel's scale positive."""
    return float(problem.softmax_scale > 0) - float(problem.softmax_scale < 0)


def _positive_scale(problem: Problem) -> float:
    return abs(problem.softmax_scale) or 1.0


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    state = resume(out.transpose(-2, -3), lse)
    out, lse = finalize(add_sink(state, sinks.to(lse.dtype)[:, None]))
    return out.transpose(-2, -3), lse


def backward(
    problem: Problem, x: Tensors, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Grads:
    wide = accumulator_dtype(problem.dtype)
    width = problem.widest + (dlse is not None)
    operands = [_operand(t, wide, width) for t in (*x[:3], out, dout)]
    sign = _sign(problem)
    if sign != 1.0:
        operands[0] = operands[0] * sign
    if dlse is not None:
        # The kernel subtracts rowsum(out * dout) from dP. One more column (out: -dlse, dout: 1)
        # turns that into rowsum - dlse.
        operands[3][..., -1] = -dlse.transpose(-1, -2)
        operands[4][..., -1] = 1.0
    safe_lse = lse.masked_fill(lse == -torch.inf, 0.0)  # rows without a visible key: p = 0
    if _is_whole(problem, x):
        grads = _call_backward(problem, _heads_first(*operands), safe_lse, problem.causal, None)
        grads = _heads_first(*grads)
    elif _has_small_planes(problem, x):
        mask, _ = _mask_of_planes(plane_rule(problem, x, 0, 0), wide)
        grads = _call_backward(problem, _heads_first(*operands), safe_lse, False, mask)
        grads = _heads_first(*grads)
    else:
        grads = [torch.zeros(*t.shape[:-1], width, dtype=wide) for t in x[:3]]
        for head_slice in head_slices(problem, x):
            _backward_head_slice(problem, head_slice, operands, safe_lse, grads)
    if sign != 1.0:
        grads[0] = grads[0] * sign
    dims = (problem.head_dim, problem.head_dim, problem.head_dim_v)
    dq, dk, dv = (
        _cut_columns(g, d).to(grad_dtype(problem)).contiguous()
        for g, d in zip(grads, dims, strict=True)
    )
    dsinks = None
    if x.sinks is not None:
        dsinks = sink_gradient(x.sinks, lse, row_delta(out, dout, dlse))
    return Grads(dq, dk, dv, None, dsinks)


def _backward_head_slice(
    problem: Problem,
    head_slice: HeadSlice,
    operands: list[Tensor],
    lse: Tensor,
    grads: list[Tensor],
) -> None:
    q, out, dout, dq = _heads_first(
        *map(head_slice.take_queries, (operands[0], *operands[3:], grads[0]))
    )
    k, v, dk, dv = _heads_first(*map(head_slice.take_keys, (*operands[1:3], *grads[1:])))
    lse = head_slice.take_rows(lse)
    calls = _calls(head_slice.visibility, max(1, q.shape[0] * q.shape[1]))
    gather_k, gather_v = _Gather(k, calls), _Gather(v, calls)
    for call in calls:
        if not call.spans:
            continue
        rows = slice(call.q0, call.q1)
        tile = [q[:, :, rows], gather_k(call), gather_v(call)]
        tile += [out[:, :, rows], dout[:, :, rows]]
        mask, _ = _float_mask(head_slice.visibility, call, lse.dtype)
        gq, gk, gv = _call_backward(problem, tile, lse[:, :, rows], call.is_causal, mask)
        dq[:, :, rows] = gq
        _scatter_add(dk, gk, call.spans)
        _scatter_add(dv, gv, call.spans)


def _call_backward(
    problem: Problem, operands: list[Tensor], lse: Tensor, is_causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, dout = operands
    return _BACKWARD(
        dout, q, k, v, out, lse, 0.0, is_causal, attn_mask=mask, scale=_positive_scale(problem)
    )


def _is_direct(problem: Problem) -> bool:
    """True if the kernel takes q, k, v unchanged and returns the requested result: a fast path for
    short calls, which feel the cost of the detailed checks.
    """
    return (
        problem.head_dim == problem.head_dim_v
        and _compute_dtype(problem) == problem.dtype
        and not problem.has_sinks
        and problem.softmax_scale > 0
    )


def _compute_dtype(problem: Problem) -> torch.dtype:
    """The dtype of the kernel's operands. A sink is added afterwards, before the one rounding."""
    slow = not machine.has_fast_matmul(problem.dtype)
    if problem.has_sinks or problem.return_lse or slow:
        return accumulator_dtype(problem.dtype)
    return torch.promote_types(problem.dtype, problem.out_dtype)


def _is_whole(problem: Problem, x: Tensors) -> bool:
    """True if one call without a mask computes everything: torch's causal mask equals the
    contract's if both lengths are equal.
    """
    unbounded = problem.window_size == (None, None) and x.mask is None and not problem.packed
    square = not problem.causal or problem.seqlen_q == problem.seqlen_k
    return unbounded and square and min(problem.batch, problem.seqlen_q, problem.seqlen_k) > 0


def _has_small_planes(problem: Problem, x: Tensors) -> bool:
    """True if the planes of a mask are faster as one call, which reads all keys."""
    if x.mask is None or problem.packed:
        return False
    batch, heads = x.mask.shape[:2]
    cells = problem.seqlen_q * problem.seqlen_k
    together = (problem.batch if batch == 1 else 1) * (problem.num_heads if heads == 1 else 1)
    is_small = 0 < cells * together <= _SMALL_PLANE and batch * heads * cells <= _MASKED_CELLS
    return batch * heads > 1 and is_small and problem.batch > 0


@lru_cache(maxsize=4)  # at most 16 MB each; the backward and other layers have the same mask
def _mask_of_planes(rule: Visibility, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """(0 / -inf mask of all planes of the rule's mask, rows that see no key)"""
    visible = rule.mask.to_dense().cpu()
    band = rule._replace(mask=None).tile(0, rule.seqlen_q, 0, rule.seqlen_k)
    return _as_float(visible if band is None else visible & band, dtype)


@lru_cache(maxsize=16)  # the backward needs the same calls as the forward
def _calls(rule: Visibility, heads: int) -> tuple[FlashCall, ...]:
    """Cover the rows with calls. Adjacent blocks share one call if that is cheaper than one call
    each.
    """
    if rule.seqlen_q == 0:
        return ()
    native = rule.mask is None and rule.window_size == (None, None) and rule.seqlen_k > 0
    if native and (not rule.causal or rule.seqlen_q == rule.seqlen_k):
        return (FlashCall(0, rule.seqlen_q, ((0, rule.seqlen_k),), rule.causal),)
    calls: list[FlashCall] = []
    for q0 in range(0, rule.seqlen_q, BLOCK):
        block = _spanning(rule, q0, min(q0 + BLOCK, rule.seqlen_q))
        joined = _join(rule, calls[-1], block, heads) if calls else None
        if joined is None:
            calls.append(block)
        else:
            calls[-1] = joined
    return tuple(calls)


def _join(rule: Visibility, above: FlashCall, below: FlashCall, heads: int) -> FlashCall | None:
    """One call for both, if it is cheaper and no row would read a block that is EMPTY for it."""
    if rule.mask is not None and above.spans != below.spans:
        return None
    joined = _spanning(rule, above.q0, below.q1)
    cheaper = _cost(joined, heads) <= _cost(above, heads) + _cost(below, heads)
    return joined if cheaper and _cells(joined) <= _MASKED_CELLS else None


def _spanning(rule: Visibility, q0: int, q1: int) -> FlashCall:
    spans = rule.spans(q0, q1)
    if rule.mask is not None:
        spans = [_trim(rule, q0, q1, k0, k1) for k0, k1 in spans]
    return FlashCall(q0, q1, tuple(spans), False)


def _trim(rule: Visibility, q0: int, q1: int, k0: int, k1: int) -> tuple[int, int]:
    """A span without the keys at its ends that no row sees. The rest of a document that begins and
    ends inside blocks then needs no mask.
    """
    head = rule.tile(q0, q1, k0, min(k0 + BLOCK, k1), "cpu")
    if head is not None and bool((seen := head.any(0)).any()):
        k0 += int(seen.int().argmax())
    last = max(k0, (k1 - 1) // BLOCK * BLOCK)
    tail = rule.tile(q0, q1, last, k1, "cpu")
    if tail is not None and bool((seen := tail.any(0)).any()):
        k1 -= int(seen.flip(0).int().argmax())
    return k0, k1


def _cells(call: FlashCall) -> int:
    return call.rows * call.keys


def _cost(call: FlashCall, heads: int) -> float:
    """Time, in units of cells. The kernel splits its queries by 32 below 192 rows, by 64 below 768,
    by 256 from there on; it was measured 1.5x and 1.2x slower per cell with the smaller splits.
    """
    if not call.spans:
        return 0.0
    slowness = 1.5 if call.rows < 192 else 1.2 if call.rows < 768 else 1.0
    return _cells(call) * slowness + _CALL_COST / heads


def _float_mask(
    rule: Visibility, call: FlashCall, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """(0 / -inf mask of the call's tile, rows that see no key); None if there is none."""
    if call.is_causal:
        return None, None
    if rule.mask is None:  # the tiles of a band are equal except at its ends
        ((k0, k1),) = call.spans
        diagonal = call.q0 + rule.seqlen_k - rule.seqlen_q - k0
        like = Visibility(call.rows, diagonal + call.rows, rule.causal, rule.window_size)
        return _band_mask(like, k1 - k0, dtype)
    tiles = [rule.tile(call.q0, call.q1, k0, k1, "cpu") for k0, k1 in call.spans]
    if all(t is None for t in tiles):
        return None, None
    tiles = [
        torch.ones(call.rows, k1 - k0, dtype=torch.bool) if t is None else t
        for t, (k0, k1) in zip(tiles, call.spans, strict=True)
    ]
    visible = torch.cat(tiles, 1)
    return (None, None) if bool(visible.all()) else _as_float(visible, dtype)


@lru_cache(maxsize=4)  # at most 16 MB each
def _band_mask(
    rule: Visibility, keys: int, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """The mask of the first `keys` keys, for all rows of the rule."""
    visible = rule.tile(0, rule.seqlen_q, 0, keys, "cpu")
    return (None, None) if visible is None else _as_float(visible, dtype)


def _as_float(visible: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    without_keys = ~visible.any(-1)
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)
    return mask, without_keys if bool(without_keys.any()) else None


def _operand(t: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    """t in the compute dtype, padded with zero columns to the width that q, k and v must share."""
    t = t if t.dtype == dtype else t.to(dtype)
    return t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1]))


def _cut_columns(t: Tensor, width: int) -> Tensor:
    return t if t.shape[-1] == width else t[..., :width]


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """(batch, seqlen, heads, dim) <-> (batch, heads, seqlen, dim), as views."""
    return [t.transpose(1, 2) for t in tensors]


class _Gather:
    """k or v of a head slice, gathered for one call. One span is a view. Several spans are copied
    next to each other, whole blocks at once, always into the same memory: freshly mapped memory
    pages would cost a third of the copy.
    """

    def __init__(self, t: Tensor, calls: tuple[FlashCall, ...]):
        self.t = t
        self.blocks = t[:, :, : t.shape[2] // BLOCK * BLOCK].unflatten(2, (-1, BLOCK))
        keys = max((call.keys for call in calls if len(call.spans) > 1), default=0)
        self.scratch = t.new_empty(t.shape[0] * t.shape[1] * keys * t.shape[3])

    def __call__(self, call: FlashCall) -> Tensor:
        """The keys of the call's spans, valid until the next call."""
        if len(call.spans) == 1:
            ((k0, k1),) = call.spans
            return self.t[:, :, k0:k1]
        batch, heads, _, dim = self.t.shape
        out = self.scratch[: batch * heads * call.keys * dim].view(batch, heads, call.keys, dim)
        if all(k0 % BLOCK == 0 and k1 % BLOCK == 0 for k0, k1 in call.spans):
            blocks = out.unflatten(2, (-1, BLOCK))
            torch.index_select(self.blocks, 2, _block_numbers(call.spans), out=blocks)
            return out
        return torch.cat([self.t[:, :, k0:k1] for k0, k1 in call.spans], 2, out=out)


@lru_cache(maxsize=1024)
def _block_numbers(spans: tuple[tuple[int, int], ...]) -> Tensor:
    return torch.tensor([i for k0, k1 in spans for i in range(k0 // BLOCK, k1 // BLOCK)])


def _scatter_add(total: Tensor, part: Tensor, spans: tuple[tuple[int, int], ...]) -> None:
    at = 0
    for k0, k1 in spans:
        total[:, :, k0:k1] += part[:, :, at : at + k1 - k0]
        at += k1 - k0


backend: Backend = make_backend(supports, forward, backward, options=OPTIONS)
