"""The next token of every row of a batch of logits, in Triton: one pass over the logits, then one
span of each row again. The twin of onchip/engine/sampler.py.

A row is cut into spans. The pass leaves the largest logit of each span and the sum of its weights
exp((s - m) / temperature); spans and sums are the same whatever else is in the batch. Where the
running sum of a row passes the fraction `uniform` of the whole, a token is drawn: first the span,
then the token in it. Rows of temperature 0 take the first of their largest logits. Rows that draw
from a part of their tokens know its least logit beforehand: a search for the largest number that
leaves enough tokens (top_k) or enough mass (top_p) at or above it, four bits of it in a pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.kernels.runtime.launcher import Handle, on_device
from onchip.kernels.tiles import TRITON_CUT, TRITON_PICK, TRITON_SCAN
from onchip.kernels.triton.launch import launch_options
from onchip.kernels.triton.tile import LN2, LOG2E

WAYS = tl.constexpr(16)  # a pass of the search finds one of 16 digits: four bits of a logit
FIRST = tl.constexpr(1 << 28)  # what the first of them is worth
LOWEST = tl.constexpr(-(2**31))
LEAST = tl.constexpr(1e-30)  # a temperature below is this one: the largest logit wins all the same
NONE = tl.constexpr(-2139095041)  # the key of -inf
_PASSES = {torch.bfloat16: 4, torch.float16: 5, torch.float32: 8}  # the bits after are all alike
_PARTS = 4  # numbers of a span: m and l of the logits as they are, m and l to draw from


@triton.jit
def scan_kernel(
    logits_ptr, raw_ptr, temperature_ptr, floor_ptr, parts_ptr, stride_logits, stride_raw, vocab,
    num_spans, SPAN: tl.constexpr,
):  # fmt: skip
    """One span of one row."""
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
    return tl.where(m == float("-inf"), 0.0, m)  # nothing there: -inf - -inf would be NaN


@triton.jit
def _slope(temperature_ptr):
    return LOG2E / tl.maximum(tl.load(temperature_ptr), LEAST)


@triton.jit
def pick_kernel(
    logits_ptr, raw_ptr, parts_ptr, temperature_ptr, uniform_ptr, floor_ptr, token_ptr, logprob_ptr,
    lse_ptr, stride_logits, stride_raw, vocab, num_spans,
    SPAN: tl.constexpr, PAD_SPANS: tl.constexpr,
):  # fmt: skip
    """The token of one row, and its log probability in the logits as they are. A row that is not
    finite gives some token, and a log probability that is not finite either.
    """
    row = tl.program_id(0).to(tl.int64)
    spans = tl.arange(0, PAD_SPANS)
    there = spans < num_spans
    parts = parts_ptr + (row * num_spans + spans) * 4
    lse = _lse(parts, there)
    m = tl.load(parts + 2, mask=there, other=float("-inf"))
    l = tl.load(parts + 3, mask=there, other=0.0)
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
def _lse(parts, there):
    """The logarithm of the sum of the weights of all spans."""
    m = tl.load(parts, mask=there, other=float("-inf"))
    l = tl.load(parts + 1, mask=there, other=0.0)
    pivot = _pivot(tl.max(m, 0))
    return pivot + tl.log2(tl.sum(l * tl.exp2((m - pivot) * LOG2E), 0)) * LN2


@triton.jit
def _choose(mass, target, largest, greedy, SIZE: tl.constexpr):
    """The first place whose running sum passes the target, no place without mass; greedy: the first
    of the largest.
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
    """The least logit of one row that may be drawn: by min_p, then top_k, then top_p of the mass
    that these leave. Logits that are equal stay or go together.
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
    """The largest number such that the logits at or above it, and not below floor, are `wanted` in
    number (COUNT), or have that share of the mass.
    """
    digits, cols = tl.arange(0, WAYS), tl.arange(0, TILE)
    found, step = tl.full([], LOWEST, tl.int32), tl.full([], FIRST, tl.int32)
    goal = wanted
    for i in range(PASSES):
        bounds = (found + digits * step)[:, None]
        held = tl.zeros([WAYS, TILE], tl.float32)
        for at in range(0, vocab, 2 * TILE):  # both loads are under way before one is needed
            s = _load(logits_ptr, at + cols, vocab)
            other = _load(logits_ptr, at + TILE + cols, vocab)
            held += _held(s, bounds, floor, m, slope, COUNT)
            held += _held(other, bounds, floor, m, slope, COUNT)
        sums = tl.sum(held, 1)
        if not COUNT:
            goal = tl.where(i == 0, wanted * tl.max(sums, 0), goal)
        found += tl.max(tl.where(sums >= goal, digits, 0), 0) * step
        step //= WAYS
    return tl.where(found <= NONE, float("-inf"), _number(found))


@triton.jit
def _load(logits_ptr, at, vocab):
    """NaN past the end: not at or above anything."""
    return tl.load(logits_ptr + at, mask=at < vocab, other=float("nan")).to(tl.float32)


@triton.jit
def _held(s, bounds, floor, m, slope, COUNT: tl.constexpr):
    """(WAYS, TILE): what each logit adds to the sums of the bounds that it reaches."""
    weight = tl.where(s >= floor, 1.0, 0.0)
    if not COUNT:
        weight = tl.where(s >= floor, tl.exp2((s - _pivot(m)) * slope), 0.0)
    return tl.where(_key(s)[None, :] >= bounds, weight[None, :], 0.0)


@triton.jit
def _key(s):
    """An integer in the order of s."""
    bits = (s + 0.0).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(key):
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


_cut_kernel = Handle(cut_kernel)
_pick_kernel = Handle(pick_kernel)
_scan_kernel = Handle(scan_kernel)


def draw(
    logits: Tensor,
    raw: Tensor | None,
    temperature: Tensor,
    uniform: Tensor,
    min_p: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(token, its logprob, lse), int64, fp32 and fp32 (rows,), of logits (rows, vocab), last
    dimension contiguous; lse: the logarithm of the sum of exp(logits).

    raw: the logits of logprob and lse, if others. temperature: fp32 (rows,), 0
    takes the largest; uniform: fp64 (rows,) in [0, 1). min_p fp32, top_k int64, top_p fp64 (rows,):
    0, 0 and 1 keep all.
    """
    rows, vocab = logits.shape
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    # Not two rows of one tensor: Triton compiles anew for addresses that are aligned otherwise.
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
