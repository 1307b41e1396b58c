"""8-bit K and V as 16-bit words of two neighbours, which become fp16 in registers. Even and odd
elements of head_dim are multiplied separately. The reasons are in kernels/triton/kv8.py.
"""

from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from onchip.kernels import unpack
from onchip.kernels.hopper.aggregate import aggregate
from onchip.kernels.hopper.gluon_types import gl, gluon
from onchip.kernels.hopper.pipeline import LANES
from onchip.kernels.hopper.softmax import approximate

_E4M3 = gl.constexpr(unpack.E4M3)
_INT8 = gl.constexpr(unpack.INT8)


@aggregate
class QueryHalves:
    """Queries as operands for 8-bit keys: even and odd elements, and the factor by which the rows
    were divided.
    """

    even: gl.tensor
    odd: gl.tensor
    short: gl.tensor


@aggregate
class PageScales:
    """The scales of 8-bit pages for one kv head: pointers and strides for K and V."""

    k: gl.tensor
    v: gl.tensor
    k_page: gl.tensor
    k_slot: gl.tensor
    v_page: gl.tensor
    v_slot: gl.tensor
    ON: gl.constexpr

    @gluon.jit
    def fetch(self, kv_stages, i, x: gl.constexpr, at, PART: gl.constexpr):
        """Start to copy the scales of part x of iteration i, which begins at coordinate `at`."""
        page = at[0].to(gl.int64)
        slots = at[2] + gl.arange(0, PART, LANES)
        kv_stages.fetch_scales(i, x, self.k + page * self.k_page + slots * self.k_slot,
                               self.v + page * self.v_page + slots * self.v_slot)  # fmt: skip


@gluon.jit
def unpack(words, E4M3: gl.constexpr):
    """The even and the odd elements of 16-bit words, in fp16."""
    text: gl.constexpr = _E4M3 if E4M3 else _INT8
    return gl.inline_asm_elementwise(
        text, "=r,=r,r", [words], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )


@gluon.jit
def split_query(q):
    """(even, odd, short) of rows of queries. bf16 becomes fp16, divided by a power of two: elements
    below 2^-14 of the largest of a row lose bits, at most 2^-25 of it.
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
def accumulate_pv(acc, alpha, p, words, scales, f):
    """acc * alpha + p v, even and odd columns separately. p times a scale could underflow in fp16,
    so the largest scale of a warp's keys is multiplied in after the product.
    """
    top = gl.max(scales, 1)
    top = gl.where(top >= 2.0**-126, top, 1.0)[:, None]  # smaller ones have no reciprocal
    p = p * (scales * approximate("rcp", top))[:, None, :]
    p = gl.convert_layout(p.to(gl.float16), f.A)
    zero = gl.zeros_like(acc[0])
    even, odd = unpack(words, f.E4M3)
    alpha, top = alpha[:, :, None], top[:, None, :]
    return (acc[0] * alpha + mma_v2(p, even, zero) * top, acc[1] * alpha + mma_v2(p, odd,
            zero) * top)  # fmt: skip


@gluon.jit
def interleave(even, odd):
    """Even and odd columns in their original order."""
    joined = gl.join(even, odd)
    return joined.reshape([even.shape[0], even.shape[1], 2 * even.shape[2]])
