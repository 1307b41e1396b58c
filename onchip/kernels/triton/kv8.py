"""Tiles of 8-bit keys and values (fp8 e4m3 or int8, one fp32 scale per token and head).

    page row:   e0 e1 | e2 e3 | e4 e5 ...       bytes
                 int16   int16   int16          loaded as packed pairs
                  |       |       |
      even fp16: e0      e2      e4   -+  unpack_pairs: one PTX sequence (kernels/unpack.py)
      odd  fp16: e1      e3      e5   -+

    s   = q_even k_even^T + q_odd k_odd^T, times row_scale of q and scale of k
    acc = (p * v_scale / top) v_even, and the same for v_odd; interleave_acc joins both at the end

Two neighbouring elements of a row travel as one 16-bit pair: the hardware can transpose 16-bit
elements on their way to the tensor cores, but not bytes. In registers a pair becomes two fp16
numbers, which hold int8 and e4m3 exactly. The order of the products over head_dim does not matter,
so even and odd elements are multiplied separately, and the output has two halves until it is
stored.

Always fp16, whatever the dtype of the queries: Hopper unpacks e4m3 to fp16 with three instructions
for four elements (to bf16: ten), and p, at most 1, has three more bits than in bf16.

Worked shape: batch 1, 300 tokens, tile 128, head_dim 128: a tile of keys is 128 x 64 int16 pairs,
16 kB instead of 32 kB, and 128 scales. The loop is that of decode.py; the teaching version of the
loop is examples/versions/v2.py.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from onchip.kernels import unpack
from onchip.kernels.triton.tile import INTERPRETED, SoftmaxState, dot, round_to, update_softmax

_E4M3, _INT8 = tl.constexpr(unpack.E4M3), tl.constexpr(unpack.INT8)


class PageScales(NamedTuple):
    """Pointer to the scales of one kv head, and their strides."""

    ptr: tl.tensor
    stride_page: tl.tensor
    stride_slot: tl.tensor


class EvenOddQueries(NamedTuple):
    """Queries in fp16, split into even and odd elements. The true row is row_scale times these."""

    even: tl.tensor
    odd: tl.tensor
    row_scale: tl.tensor


@triton.jit
def as_packed_pairs(ptr):
    return ptr.to(tl.pointer_type(tl.int16), bitcast=True)


@triton.jit
def unpack_pairs(packed_pairs, E4M3: tl.constexpr, PTX: tl.constexpr):
    """The even and the odd elements of packed pairs, in fp16. E4M3: fp8, otherwise int8. PTX: the
    device has the instructions of kernels/unpack.py.
    """
    if not PTX:
        return _byte_to_fp16(packed_pairs << 8, E4M3), _byte_to_fp16(packed_pairs & -256, E4M3)
    elif E4M3:
        return _unpack_by_ptx(packed_pairs, _E4M3)
    else:
        return _unpack_by_ptx(packed_pairs, _INT8)


@triton.jit
def _unpack_by_ptx(packed_pairs, TEXT: tl.constexpr):
    return tl.inline_asm_elementwise(
        TEXT, "=r,=r,r", [packed_pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
    )


@triton.jit
def _byte_to_fp16(x, E4M3: tl.constexpr):
    """The number in the upper byte of int16 x."""
    if E4M3:  # its sign, exponent and fraction bits, read as fp16, give 2^-8 x; NaN becomes 480
        bits = (x & -32768) | ((x & 0x7F00) >> 1)
        return bits.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    else:
        return (x >> 8).to(tl.float16)


@triton.jit
def load_queries_kv8(ptr, offsets, exist, DIM: tl.constexpr, PAD: tl.constexpr):
    """Load rows of queries. bf16 becomes fp16 after division by a power of two: elements below
    2^-14 of the largest in their row lose bits, at most 2^-25 of it.
    """
    dims = 2 * tl.arange(0, PAD // 2)
    cells = ptr + offsets[:, None] + dims[None, :]
    inside = exist[:, None] & (dims < DIM)[None, :]
    even = tl.load(cells, mask=inside, other=0.0)
    odd = tl.load(cells + 1, mask=inside, other=0.0)
    row_scale = tl.full((offsets.shape[0],), 1.0, tl.float32)
    if even.dtype == tl.bfloat16:
        even, odd = even.to(tl.float32), odd.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(even), 1), tl.max(tl.abs(odd), 1))
        exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
        row_scale = tl.where(exponent == 0, row_scale, exponent.to(tl.float32, bitcast=True))
        even = (even / row_scale[:, None]).to(tl.float16)
        odd = (odd / row_scale[:, None]).to(tl.float16)
    return EvenOddQueries(even, odd, row_scale)


@triton.jit
def load_scales(scales, page, slot, inside):
    """The scales of the keys of a tile, zeros out of bounds."""
    at = scales.ptr + page * scales.stride_page + slot * scales.stride_slot
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def scores_kv8(q, packed_pairs, scale, E4M3: tl.constexpr, PTX: tl.constexpr):
    """q.k of a tile of packed keys."""
    even, odd = unpack_pairs(packed_pairs, E4M3, PTX)
    even, odd = even.to(q.even.dtype), odd.to(q.even.dtype)
    s = dot(q.odd, tl.trans(odd), dot(q.even, tl.trans(even), None))
    return s * (q.row_scale[:, None] * scale[None, :])


@triton.jit
def fold_tile_kv8(
    state, acc_odd, s, packed_pairs, scale, unit, DTYPE: tl.constexpr, STATS: tl.constexpr,
    E4M3: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """tile.fold_tile for a tile of 8-bit values. Returns the state, whose acc has the even
    elements, and acc of the odd ones. p * scale could underflow in fp16: so p is multiplied by
    scale / (largest scale of the tile), and the largest scale is applied to the product.
    """
    state, p, alpha = update_softmax(state, s, unit, STATS)
    m, l, acc, w = state
    top = tl.max(scale, 0)
    top = tl.where(top > 0, top, 1.0)
    p = round_to(p * (scale / top)[None, :], DTYPE)
    even, odd = unpack_pairs(packed_pairs, E4M3, PTX)
    acc = acc * alpha[:, None] + dot(p, even.to(DTYPE), None) * top
    acc_odd = acc_odd * alpha[:, None] + dot(p, odd.to(DTYPE), None) * top
    return SoftmaxState(m, l, acc, w), acc_odd


@triton.jit
def interleave_acc(state, acc_odd):
    """The state with even and odd elements of acc in their order."""
    m, l, acc, w = state
    rows: tl.constexpr = acc.shape[0]
    dim: tl.constexpr = acc.shape[1]
    return SoftmaxState(m, l, tl.reshape(tl.join(acc, acc_odd), (rows, 2 * dim)), w)


@triton.jit
def compute_scale(largest, nothing, DTYPE: tl.constexpr):
    """The scale of tokens with these largest magnitudes, as in onchip.quant.kv8. `nothing` is 0 for
    a token, or NaN for a token that is not finite.
    """
    limit: tl.constexpr = 127.0 if tl.int8 == DTYPE else 448.0
    return tl.maximum(tl.div_rn(largest, limit), 2.0**-126) + nothing


@triton.jit
def quantise(x, scale, DTYPE: tl.constexpr):
    """x / scale, rounded to nearest even; scale is one number or one per row (rows, 1). A product
    with the reciprocal and a correction by its remainder give the quotient of a division in 3
    instructions instead of 12.
    """
    if INTERPRETED:  # the interpreter's multiply-add rounds twice
        return round_to(x / scale, DTYPE)
    else:
        inverse = tl.div_rn(1.0, scale)
        near = x * inverse
        left = tl.fma(-near, scale, x)
        return round_to(tl.fma(left, inverse, near), DTYPE)
