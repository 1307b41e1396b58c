"""Scores into weights, in powers of two: what the Hopper kernels do between two products."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-3.4e38)  # not quite the lowest number: rounding must not make it infinite
STALE = gl.constexpr(8.0)  # how far a lazy maximum may lag, in powers of two


@aggregate
class Scale:
    """scale_log2 turns scores into base-2 logits; with softcap, scores are first bent by softcap *
    tanh(x * inner).
    """

    scale_log2: gl.tensor
    inner: gl.tensor
    SOFTCAP: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, scale_log2, inner, SOFTCAP):
        self.scale_log2 = scale_log2
        self.inner = inner
        self.SOFTCAP = gl.constexpr(SOFTCAP)

    @gluon.jit
    def apply_softcap(self, s):
        """s, or tanh(s * inner) if softcap is on (its factor is inside scale_log2)."""
        if self.SOFTCAP:
            return 1.0 - 2.0 / (gl.exp2(s * self.inner) + 1.0)
        else:
            return s

    @gluon.jit
    def finite(self, m):
        """Row maxima; -inf becomes the lowest number that is finite even as a logit. A fold that
        starts with it needs no test for -inf at every tile (4 instructions of 430): a score of
        -inf, masked or by value, then has weight 0, and l = 0 marks a row without any other.
        """
        return gl.maximum(m, LOWEST / gl.maximum(self.scale_log2, 1.0))


@gluon.constexpr_function
def _exp2_asm(every):
    """`every` exponentials, the last of them by multiply-adds: x = j + f, 2^f by a cubic (relative
    error 8.6e-5, least for f in [0, 1) with 2^0 = 1), and j added to its exponent.
    """
    unit = [f"ex2.approx.ftz.f32 ${i}, ${every + i};" for i in range(every - 1)]
    x, y = f"${2 * every - 1}", f"${every - 1}"
    cubic = [
        f"max.f32 x, {x}, 0fC2FC0000;",  # -126: smaller powers would leave the exponent
        "add.rm.f32 j, x, 0f4B400000;",  # 1.5 * 2^23: the sum's low bits are floor(x)
        "sub.f32 f, j, 0f4B400000;",
        "sub.f32 f, x, f;",
        "fma.rn.f32 y, f, 0f3D9DD559, 0f3E691BC2;",
        "fma.rn.f32 y, y, f, 0f3F31F32D;",
        "fma.rn.f32 y, y, f, 0f3F800000;",
        "mov.b32 i, j; shl.b32 i, i, 23; mov.b32 k, y; add.s32 i, i, k;",
        f"mov.b32 {y}, i;",
    ]
    return "{ .reg .f32 x, j, f, y; .reg .b32 i, k; " + " ".join(unit + cubic) + " }"


@gluon.constexpr_function
def _exp2_constraints(every):
    return ",".join(["=f"] * every + ["f"] * every)


@gluon.jit
def exp2(x, POLY: gl.constexpr):
    """2^x; if POLY, one of POLY neighbours off the exponential unit (v4)."""
    if POLY == 0:
        return gl.exp2(x)
    else:
        return gl.inline_asm_elementwise(
            _exp2_asm(POLY), _exp2_constraints(POLY), [x], dtype=gl.float32, is_pure=True, pack=POLY
        )


@gluon.jit
def approximate(name: gl.constexpr, x):
    """A function of the special unit, good to 2^-22: exact ones would be 20 to 30 instructions,
    which the compiler puts between the last products of a tile.
    """
    return gl.inline_asm_elementwise(
        name + ".approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def softmax(s, m, job):
    """(p, row maximum, factor for what was folded before), in the units of s; m is finite. "stale":
    the maximum follows only when it is left behind by more than 2^STALE (v4); p may then be as
    large, and where one key has nearly all the weight, p is no longer the 1 that 16 bits hold
    exactly.
    """
    scale_log2 = job.scale.scale_log2
    m_new = gl.maximum(m, gl.max(s, 1))
    if job.cfg.RESCALE == "stale":
        m_new = gl.where((m_new - m) * scale_log2 > STALE, m_new, m)
    alpha = gl.exp2((m - m_new) * scale_log2)
    p = exp2(s * scale_log2 - (m_new * scale_log2)[:, None], job.cfg.POLY)
    return p, m_new, alpha


@gluon.constexpr_function
def _rescale_asm(pack):
    """A warp whose rows all have the factor 1 jumps over the products."""
    first, second = f"${2 * pack}", f"${2 * pack + 2}"  # a thread holds two rows, in turns of two
    vote = f"setp.neu.f32 p, {first}, 0f3F800000; setp.neu.f32 q, {second}, 0f3F800000;"
    vote += " or.pred p, p, q; vote.sync.any.pred p, p, 0xffffffff; @!p bra DONE;"
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * pack + i};" for i in range(pack))
    return "{ .reg .pred p, q; " + vote + " " + products + " DONE: }"


@gluon.constexpr_function
def _rescale_constraints(pack):
    return ",".join(["=f"] * pack + [str(i) for i in range(pack)] + ["f"] * pack)


@gluon.jit
def rescaled(acc, alpha, cfg):
    """acc * alpha; unless "always", skipped by warps in which no maximum moved."""
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, cfg.O))[:, None]
    if cfg.RESCALE == "always":
        return acc * alpha
    else:
        acc, alpha = gl.broadcast(acc, alpha)
        HALF: gl.constexpr = cfg.WIDTH // 4  # of a thread's numbers
        return gl.inline_asm_elementwise(
            _rescale_asm(HALF), _rescale_constraints(HALF), [acc, alpha], dtype=gl.float32,
            is_pure=True, pack=HALF,
        )  # fmt: skip


@gluon.jit
def lane_sums(p):
    """What each lane has of the sums of rows, (64, 8): lanes meet once for all tiles."""
    return gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 8]), 1)


@gluon.jit
def beside_lane_sums(x, l):
    """x, one for each row, as a factor of their lane sums."""
    layout: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    return gl.convert_layout(x, layout, assert_trivial=True)[:, None]


@gluon.jit
def whole_sums(l, layout: gl.constexpr):
    return gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, layout), assert_trivial=True)


@gluon.constexpr_function
def _hold_asm(count, each):
    """A thread has two rows, in turns of two numbers: the first `count` of one, then of the other.
    A load that no thread does: powers of two have no sign, which ptxas cannot know.
    """
    order = [x for x in range(each) if x % 4 < 2] + [x for x in range(each) if x % 4 >= 2]
    first, *others = [f"${each + x}" for x in order[:count]]
    signs = f"mov.b32 t, {first}; " + " ".join(f"or.b32 t, t, {x};" for x in others)
    moves = " ".join(f"mov.b32 ${x}, ${each + x};" for x in range(each))
    load = " setp.lt.s32 p, t, 0; mov.b32 t, 0; @p ld.volatile.shared.b32 t, [t]; "
    return "{ .reg .b32 t; .reg .pred p; " + signs + load + moves + " }"


@gluon.constexpr_function
def _hold_constraints(each):
    return ",".join(["=f"] * each + ["f"] * each)


@gluon.jit
def hold(p, COUNT: gl.constexpr):
    """p; a wait that comes later in the program comes after so many of each thread's exponentials.
    ptxas would move it up to the product that it waits for, before all of them.
    """
    EACH: gl.constexpr = p.shape[1] // 2
    return gl.inline_asm_elementwise(
        _hold_asm(COUNT, EACH), _hold_constraints(EACH), [p], dtype=gl.float32, is_pure=False,
        pack=EACH,
    )  # fmt: skip
