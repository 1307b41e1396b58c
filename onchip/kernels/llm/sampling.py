"""Sampling: the next token of every row of logits, in Triton. Same definition as engine/sampler.py.

    logits (rows, vocab)   | span 0 | span 1 | span 2 | ...  4,096 logits each
                               |        |        |
      scan_kernel          (m, l)   (m, l)   (m, l)           one program per span
                               +--------+--------+
      pick_kernel          running sum of l: choose the span where it exceeds uniform * total,
                           load that span again, choose the token in the same way
      cut_kernel           only with min_p, top_k, top_p: the smallest logit that may be sampled

m is the largest logit of a span, l the sum of exp((s - m) / temperature). Spans and their sums do
not depend on the other rows of the batch. Temperature 0 takes the first of the largest logits.

cut_kernel searches the largest number such that enough logits (top_k) or enough mass (top_p) are at
or above it: four bits of the number per pass over the row.

Worked shape: one row of 300 logits: one span, of which 300 of 4,096 elements are in use; one
program each. Not an attention kernel; the running (m, l) is the softmax of examples/versions/v1.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.kernels.runtime.launcher import CachedLauncher, on_device
from onchip.kernels.tiles import TRITON_CUT, TRITON_PICK, TRITON_SCAN
from onchip.kernels.triton.launch import launch_options
from onchip.kernels.triton.tile import LN2, LOG2E

WAYS = tl.constexpr(16)  # each pass of the search finds one of 16 digits: four bits of a logit
FIRST = tl.constexpr(1 << 28)  # the value of the first digit
LOWEST = tl.constexpr(-(2**31))
LEAST = tl.constexpr(1e-30)  # smaller temperatures are raised to it: the largest logit still wins
NONE = tl.constexpr(-2139095041)  # _key(-inf)
_PASSES = {torch.bfloat16: 4, torch.float16: 5, torch.float32: 8}  # the other bits are constant
_PARTS = 4  # per span: m and l of the raw logits, m and l of the distribution to sample from


@triton.jit
def scan_kernel(
    logits_ptr, raw_ptr, temperature_ptr, floor_ptr, parts_ptr, stride_logits, stride_raw, vocab,
    num_spans, SPAN: tl.constexpr,
):  # fmt: skip
    """m and l of one span of one row."""
    row, span = (tl.program_id(0) // num_spans).to(tl.int64), tl.program_id(0) % num_spans
    at = span * SPAN + tl.arange(0, SPAN)
    inside = at < vocab
    s = tl.load(logits_ptr + row * stride_logits + at, mask=inside, other=float("-inf"))
    s = s.to(tl.float32)
    raw = s
    if raw_ptr is not None:
        raw = tl.load(raw_ptr + row * stride_raw + at, mask=inside, other=float("-inf"))
        raw = raw.to(tl.float32)
    if floor_ptr is not None:
        s = tl.where(s >= tl.load(floor_ptr + row), s, float("-inf"))
    parts_ptr += (row * num_spans + span) * 4
    m, l = _sum(raw, LOG2E)
    tl.store(parts_ptr, m)
    tl.store(parts_ptr + 1, l)
    m, l = _sum(s, _slope(temperature_ptr + row))
    tl.store(parts_ptr + 2, m)
    tl.store(parts_ptr + 3, l)


@triton.jit
def _sum(s, slope):
    """(max s, the sum of exp2(slope (s - max s)))."""
    m = tl.max(s, 0)
    return m, tl.sum(tl.exp2((s - _pivot(m)) * slope), 0)


@triton.jit
def _pivot(m):
    return tl.where(m == float("-inf"), 0.0, m)  # otherwise -inf - -inf would be NaN


@triton.jit
def _slope(temperature_ptr):
    return LOG2E / tl.maximum(tl.load(temperature_ptr), LEAST)


@triton.jit
def pick_kernel(
    logits_ptr, raw_ptr, parts_ptr, temperature_ptr, uniform_ptr, floor_ptr, token_ptr, logprob_ptr,
    lse_ptr, stride_logits, stride_raw, vocab, num_spans,
    SPAN: tl.constexpr, PAD_SPANS: tl.constexpr,
):  # fmt: skip
    """The token of one row, and its log probability in the raw logits. A row that is not finite
    gives some valid token and a log probability that is not finite.
    """
    row = tl.program_id(0).to(tl.int64)
    spans = tl.arange(0, PAD_SPANS)
    exist = spans < num_spans
    parts = parts_ptr + (row * num_spans + spans) * 4
    lse = _lse(parts, exist)
    m = tl.load(parts + 2, mask=exist, other=float("-inf"))
    l = tl.load(parts + 3, mask=exist, other=0.0)
    best, slope = tl.max(m, 0), _slope(temperature_ptr + row)
    greedy = tl.load(temperature_ptr + row) <= 0
    scale = tl.exp2((m - _pivot(best)) * slope)
    mass = (l * scale).to(tl.float64)
    target = tl.load(uniform_ptr + row) * tl.sum(mass, 0)
    span = _choose(mass, target, m == best, greedy, PAD_SPANS)
    span = tl.minimum(span, num_spans - 1)
    here = spans == span
    target -= tl.sum(tl.where(spans < span, mass, 0.0), 0)
    target /= tl.sum(tl.where(here, scale, 0.0), 0).to(tl.float64)
    m = tl.max(tl.where(here, m, float("-inf")), 0)

    at = span * SPAN + tl.arange(0, SPAN)
    s = tl.load(logits_ptr + row * stride_logits + at, mask=at < vocab, other=float("-inf"))
    s = s.to(tl.float32)
    if floor_ptr is not None:
        s = tl.where(s >= tl.load(floor_ptr + row), s, float("-inf"))
    mass = tl.exp2((s - _pivot(m)) * slope).to(tl.float64)
    token = tl.minimum(span * SPAN + _choose(mass, target, s == m, greedy, SPAN), vocab - 1)
    logits_ptr += row * stride_logits
    if raw_ptr is not None:
        logits_ptr = raw_ptr + row * stride_raw
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(lse_ptr + row, lse)
    tl.store(logprob_ptr + row, tl.load(logits_ptr + token).to(tl.float32) - lse)


@triton.jit
def _lse(parts, exist):
    """The log-sum-exp over all spans."""
    m = tl.load(parts, mask=exist, other=float("-inf"))
    l = tl.load(parts + 1, mask=exist, other=0.0)
    pivot = _pivot(tl.max(m, 0))
    return pivot + tl.log2(tl.sum(l * tl.exp2((m - pivot) * LOG2E), 0)) * LN2


@triton.jit
def _choose(mass, target, largest, greedy, SIZE: tl.constexpr):
    """The first index at which the running sum exceeds the target, never an index without mass.
    greedy: the first index of the largest.
    """
    places = tl.arange(0, SIZE)
    drawn = tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32), 0)
    drawn = tl.minimum(drawn, tl.max(tl.where(mass > 0, places, 0), 0))
    return tl.where(greedy, tl.min(tl.where(largest, places, SIZE - 1), 0), drawn)


@triton.jit
def cut_kernel(
    logits_ptr, temperature_ptr, min_p_ptr, top_k_ptr, top_p_ptr, floor_ptr, stride_logits, vocab,
    PASSES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The smallest logit of one row that may be sampled: by min_p, then top_k, then top_p of the
    mass that is left. Equal logits are kept or dropped together.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits
    temperature = tl.load(temperature_ptr + row)
    floor = float("-inf")
    if temperature > 0:
        slope, m = _slope(temperature_ptr + row), _largest(logits_ptr, vocab, TILE)
        if min_p_ptr is not None:
            min_p = tl.load(min_p_ptr + row)
            floor = tl.where(min_p > 0, _pivot(m) + tl.log2(min_p) / slope, floor)
        if top_k_ptr is not None:
            top_k = tl.load(top_k_ptr + row)
            if (top_k > 0) & (top_k < vocab):
                wanted = top_k.to(tl.float32)
                least = _search(
                    logits_ptr, vocab, wanted, float("-inf"), m, slope, True, PASSES, TILE
                )
                floor = tl.maximum(floor, least)
        if top_p_ptr is not None:
            top_p = tl.load(top_p_ptr + row).to(tl.float32)
            if top_p < 1:
                least = _search(logits_ptr, vocab, top_p, floor, m, slope, False, PASSES, TILE)
                floor = tl.maximum(floor, least)
    tl.store(floor_ptr + row, floor)


@triton.jit
def _largest(logits_ptr, vocab, TILE: tl.constexpr):
    cols = tl.arange(0, TILE)
    m = tl.full([TILE], float("-inf"), tl.float32)
    for at in range(0, vocab, TILE):
        s = tl.load(logits_ptr + at + cols, mask=at + cols < vocab, other=float("-inf"))
        m = tl.maximum(m, s.to(tl.float32))
    return tl.max(m, 0)


@triton.jit
def _search(
    logits_ptr, vocab, wanted, floor, m, slope, COUNT: tl.constexpr, PASSES: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The largest number such that the logits at or above it, and not below floor, are at least
    `wanted` in number (COUNT) or have at least that share of the mass.
    """
    digits, cols = tl.arange(0, WAYS), tl.arange(0, TILE)
    bound_key, step = tl.full([], LOWEST, tl.int32), tl.full([], FIRST, tl.int32)
    goal = wanted
    for i in range(PASSES):
        bounds = (bound_key + digits * step)[:, None]
        mass_at_bounds = tl.zeros([WAYS, TILE], tl.float32)
        for at in range(0, vocab, 2 * TILE):  # both loads are issued before the first is used
            s = _load(logits_ptr, at + cols, vocab)
            other = _load(logits_ptr, at + TILE + cols, vocab)
            mass_at_bounds += _add_to_bounds(s, bounds, floor, m, slope, COUNT)
            mass_at_bounds += _add_to_bounds(other, bounds, floor, m, slope, COUNT)
        sums = tl.sum(mass_at_bounds, 1)
        if not COUNT:
            goal = tl.where(i == 0, wanted * tl.max(sums, 0), goal)
        bound_key += tl.max(tl.where(sums >= goal, digits, 0), 0) * step
        step //= WAYS
    return tl.where(bound_key <= NONE, float("-inf"), _number(bound_key))


@triton.jit
def _load(logits_ptr, at, vocab):
    """NaN past the end: it compares as neither at nor above any bound."""
    return tl.load(logits_ptr + at, mask=at < vocab, other=float("nan")).to(tl.float32)


@triton.jit
def _add_to_bounds(s, bounds, floor, m, slope, COUNT: tl.constexpr):
    """(WAYS, TILE): the contribution of each logit to the sum of every bound that it reaches."""
    weight = tl.where(s >= floor, 1.0, 0.0)
    if not COUNT:
        weight = tl.where(s >= floor, tl.exp2((s - _pivot(m)) * slope), 0.0)
    return tl.where(_key(s)[None, :] >= bounds, weight[None, :], 0.0)


@triton.jit
def _key(s):
    """An integer with the same order as s."""
    bits = (s + 0.0).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(key):
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


_cut_kernel = CachedLauncher(cut_kernel)
_pick_kernel = CachedLauncher(pick_kernel)
_scan_kernel = CachedLauncher(scan_kernel)


def draw(
    logits: Tensor,
    raw: Tensor | None,
    temperature: Tensor,
    uniform: Tensor,
    min_p: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(token, its logprob, lse), int64, fp32 and fp32 (rows,), of logits (rows, vocab) with
    contiguous last dimension. lse is the log-sum-exp of the raw logits.

    raw: the logits for logprob and lse, if they differ from `logits`. temperature: fp32 (rows,), 0
    takes the largest. uniform: fp64 (rows,) in [0, 1). min_p fp32, top_k int64, top_p fp64 (rows,):
    0, 0 and 1 keep all tokens.
    """
    rows, vocab = logits.shape
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    # Not two rows of one tensor: Triton would compile a variant for the other alignment.
    logprob, lse = (torch.empty_like(temperature) for _ in range(2))
    if not rows:
        return token, logprob, lse
    floor = None
    if any(t is not None for t in (min_p, top_k, top_p)):
        floor = _floor(logits, temperature, min_p, top_k, top_p)
    span = TRITON_SCAN.tile_n
    num_spans, stride_raw = triton.cdiv(vocab, span), 0 if raw is None else raw.stride(0)
    parts = torch.empty(rows * num_spans * _PARTS, dtype=torch.float32, device=logits.device)
    strides = logits.stride(0), stride_raw, vocab, num_spans
    with on_device(logits):
        _scan_kernel[(rows * num_spans,)](
            logits, raw, temperature, floor, parts, *strides, span, **launch_options(TRITON_SCAN)
        )
        _pick_kernel[(rows,)](
            logits, raw, parts, temperature, uniform, floor, token, logprob, lse,
            *strides, span, triton.next_power_of_2(num_spans), **launch_options(TRITON_PICK),
        )  # fmt: skip
    return token, logprob, lse


def _floor(logits: Tensor, temperature: Tensor, *least: Tensor | None) -> Tensor:
    floor = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    with on_device(logits):
        _cut_kernel[(logits.shape[0],)](
            logits, temperature, *least, floor, logits.stride(0), logits.shape[1],
            _PASSES[logits.dtype], TRITON_CUT.tile_n, **launch_options(TRITON_CUT),
        )  # fmt: skip
    return floor
