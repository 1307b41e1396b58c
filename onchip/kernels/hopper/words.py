"""8-bit keys and values as words of two neighbours, which become fp16 in registers: even and odd
elements of head_dim are multiplied apart. Why: kernels/triton/kv8.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.core import _aggregate as aggregate

from onchip.kernels import unpack
from onchip.kernels.hopper.pipe import LANES
from onchip.kernels.hopper.softmax import approximate

_E4M3 = gl.constexpr(unpack.E4M3)
_INT8 = gl.constexpr(unpack.INT8)


@aggregate
class Halves:
    """Queries as they meet 8-bit keys, and a factor that their rows are short of."""

    even: gl.tensor
    odd: gl.tensor
    short: gl.tensor

    @gluon.constexpr_function
    def __init__(self, even, odd, short):
        self.even = even
        self.odd = odd
        self.short = short


@aggregate
class Scales:
    """Of 8-bit pages, of one kv head: where those of keys and of values are."""

    k: gl.tensor
    v: gl.tensor
    k_page: gl.tensor
    k_slot: gl.tensor
    v_page: gl.tensor
    v_slot: gl.tensor
    ON: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, k, v, k_page, k_slot, v_page, v_slot, ON):
        self.k = k
        self.v = v
        self.k_page = k_page
        self.k_slot = k_slot
        self.v_page = v_page
        self.v_slot = v_slot
        self.ON = gl.constexpr(ON)

    @gluon.jit
    def fetch(self, boxes, i, x: gl.constexpr, at, PART: gl.constexpr):
        """Start to copy those of part x of filling i, which begins at a place in a page."""
        page = at[0].to(gl.int64)
        slots = at[2] + gl.arange(0, PART, LANES)
        boxes.fetch_scales(i, x, self.k + page * self.k_page + slots * self.k_slot,
                           self.v + page * self.v_page + slots * self.v_slot)  # fmt: skip


@gluon.jit
def numbers(words, E4M3: gl.constexpr):
    """The even and the odd elements of words, in fp16."""
    text: gl.constexpr = _E4M3 if E4M3 else _INT8
    return gl.inline_asm_elementwise(
        text, "=r,=r,r", [words], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )


@gluon.jit
def halves(q):
    """(even, odd, short) of rows of queries, of which a thread has neighbours. bf16 becomes fp16,
    divided by a power of two: elements below 2^-14 of the largest of a row lose bits, 2^-25 of it
    at most.
    """
    short = gl.full([q.shape[0]], 1.0, gl.float32, gl.SliceLayout(1, q.type.layout))
    if q.dtype == gl.bfloat16:
        q = q.to(gl.float32)
        exponent = gl.max(gl.abs(q), 1).to(gl.int32, bitcast=True) & 0x7F800000
        short = gl.where(exponent == 0, short, exponent.to(gl.float32, bitcast=True))
        q = (q / short[:, None]).to(gl.float16)
    even, odd = gl.split(q.reshape([q.shape[0], q.shape[1] // 2, 2]))
    return even, odd, short


@gluon.jit
def add_words(acc, alpha, p, words, scales, f):
    """acc * alpha + p v, even and odd columns apart. p times a scale could be too small for fp16,
    so that the largest of a warp's keys waits outside of the product.
    """
    top = gl.max(scales, 1)
    top = gl.where(top >= 2.0**-126, top, 1.0)[:, None]  # of smaller ones there is no reciprocal
    p = p * (scales * approximate("rcp", top))[:, None, :]
    p = gl.convert_layout(p.to(gl.float16), f.A)
    zero = gl.zeros_like(acc[0])
    even, odd = numbers(words, f.E4M3)
    alpha, top = alpha[:, :, None], top[:, None, :]
    return (acc[0] * alpha + mma_v2(p, even, zero) * top,
            acc[1] * alpha + mma_v2(p, odd, zero) * top)  # fmt: skip


@gluon.jit
def in_order(even, odd):
    """All columns in their order."""
    joined = gl.join(even, odd)
    return joined.reshape([even.shape[0], even.shape[1], 2 * even.shape[2]])
