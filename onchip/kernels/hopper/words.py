"""8-bit keys and values as words of two neighbours, which become fp16 in registers: even and odd
elements of head_dim are multiplied apart. Why: kernels/triton/eight.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from onchip.kernels import unpack

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
def in_order(even, odd):
    """All columns in their order."""
    joined = gl.join(even, odd)
    return joined.reshape([even.shape[0], even.shape[1], 2 * even.shape[2]])
