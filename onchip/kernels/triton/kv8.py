"""Tiles of 8-bit keys and values, for the kernels that write and read pages.

Two neighbours of a row travel as one 16-bit word: there is no way to transpose bytes on their way
to the tensor cores, and there is one for words. In registers a word becomes two numbers of fp16,
which holds int8 and e4m3 exactly. The order of the products over head_dim does not matter, so that
even and odd elements are multiplied apart, and the output has two halves until it is stored.

fp16 whatever the queries are: Hopper unpacks e4m3 to it at three instructions for four elements (to
bf16: ten), and p, at most 1, keeps three bits more than in bf16.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from onchip.kernels import unpack
from onchip.kernels.triton.tile import INTERPRETED, State, dot, rounded, weigh

_E4M3, _INT8 = tl.constexpr(unpack.E4M3), tl.constexpr(unpack.INT8)


class Scales(NamedTuple):
    """The scales of one head of pages."""

    ptr: tl.tensor
    stride_page: tl.tensor
    stride_slot: tl.tensor


class Halves(NamedTuple):
    """Queries as they meet 8-bit keys, and a factor that their rows are short of."""

    even: tl.tensor
    odd: tl.tensor
    short: tl.tensor


@triton.jit
def as_words(ptr):
    return ptr.to(tl.pointer_type(tl.int16), bitcast=True)


@triton.jit
def numbers(words, E4M3: tl.constexpr, PTX: tl.constexpr):
    """The even and the odd elements of int16 words, in fp16. E4M3: not int8. PTX: the device has
    the instructions of kernels/unpack.py.
    """
    if not PTX:
        return _number(words << 8, E4M3), _number(words & -256, E4M3)
    elif E4M3:
        return _unpacked(words, _E4M3)
    else:
        return _unpacked(words, _INT8)


@triton.jit
def _unpacked(words, TEXT: tl.constexpr):
    return tl.inline_asm_elementwise(
        TEXT, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
    )


@triton.jit
def _number(x, E4M3: tl.constexpr):
    """The number whose byte is the upper one of int16 x."""
    if E4M3:  # the same sign, exponent and fraction in fp16 are 2^-8 of it; NaN becomes 480
        bits = (x & -32768) | ((x & 0x7F00) >> 1)
        return bits.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    else:
        return (x >> 8).to(tl.float16)


@triton.jit
def load_halves(ptr, offsets, exist, DIM: tl.constexpr, PAD: tl.constexpr):
    """Rows of queries. bf16 becomes fp16, divided by a power of two: elements below 2^-14 of the
    largest of a row lose bits, 2^-25 of it at most.
    """
    dims = 2 * tl.arange(0, PAD // 2)
    cells = ptr + offsets[:, None] + dims[None, :]
    inside = exist[:, None] & (dims < DIM)[None, :]
    even = tl.load(cells, mask=inside, other=0.0)
    odd = tl.load(cells + 1, mask=inside, other=0.0)
    short = tl.full((offsets.shape[0],), 1.0, tl.float32)
    if even.dtype == tl.bfloat16:
        even, odd = even.to(tl.float32), odd.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(even), 1), tl.max(tl.abs(odd), 1))
        exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
        short = tl.where(exponent == 0, short, exponent.to(tl.float32, bitcast=True))
        even = (even / short[:, None]).to(tl.float16)
        odd = (odd / short[:, None]).to(tl.float16)
    return Halves(even, odd, short)


@triton.jit
def load_scales(scales, page, slot, inside):
    """Those of the keys of a tile, zeros outside."""
    at = scales.ptr + page * scales.stride_page + slot * scales.stride_slot
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def products(q, words, scale, E4M3: tl.constexpr, PTX: tl.constexpr):
    """q.k of Halves and a tile of keys."""
    even, odd = numbers(words, E4M3, PTX)
    even, odd = even.to(q.even.dtype), odd.to(q.even.dtype)
    s = dot(q.odd, tl.trans(odd), dot(q.even, tl.trans(even), None))
    return s * (q.short[:, None] * scale[None, :])


@triton.jit
def fold_words(
    state, acc_odd, s, words, scale, unit, DTYPE: tl.constexpr, STATS: tl.constexpr,
    E4M3: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """tile.fold_tile for a tile of 8-bit values: the state, whose acc has the even elements, and
    the odd ones. p times a scale could be too small for fp16, so that the largest scale of the tile
    waits outside of the product.
    """
    state, p, alpha = weigh(state, s, unit, STATS)
    m, l, acc, w = state
    top = tl.max(scale, 0)
    top = tl.where(top > 0, top, 1.0)
    p = rounded(p * (scale / top)[None, :], DTYPE)
    even, odd = numbers(words, E4M3, PTX)
    acc = acc * alpha[:, None] + dot(p, even.to(DTYPE), None) * top
    acc_odd = acc_odd * alpha[:, None] + dot(p, odd.to(DTYPE), None) * top
    return State(m, l, acc, w), acc_odd


@triton.jit
def whole(state, acc_odd):
    """The state with all elements of acc in their order."""
    m, l, acc, w = state
    rows: tl.constexpr = acc.shape[0]
    dim: tl.constexpr = acc.shape[1]
    return State(m, l, tl.reshape(tl.join(acc, acc_odd), (rows, 2 * dim)), w)


@triton.jit
def scale_of(largest, nothing, DTYPE: tl.constexpr):
    """The scale of tokens whose largest magnitudes these are, as onchip.eightbit has it; nothing: 0
    for each, NaN for one that is not finite.
    """
    limit: tl.constexpr = 127.0 if tl.int8 == DTYPE else 448.0
    return tl.maximum(tl.div_rn(largest, limit), 2.0**-126) + nothing


@triton.jit
def quantised(x, scale, DTYPE: tl.constexpr):
    """x over its scale, one for all or for each row (rows, 1), rounded to nearest even. A product
    with the reciprocal and what it leaves over make the quotient of a division, in 3 instructions
    instead of 12.
    """
    if INTERPRETED:  # where a fused multiply-add rounds twice
        return rounded(x / scale, DTYPE)
    else:
        inverse = tl.div_rn(1.0, scale)
        near = x * inverse
        left = tl.fma(-near, scale, x)
        return rounded(tl.fma(left, inverse, near), DTYPE)
