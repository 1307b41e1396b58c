"""The online softmax of the Hopper kernels, in base 2: what happens between QK and PV."""

from onchip.kernels.hopper.aggregate import aggregate
from onchip.kernels.hopper.gluon_types import gl, gluon

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-3.4e38)  # above the lowest fp32: rounding must not make it infinite
RESCALE_THRESHOLD = gl.constexpr(8.0)  # how far a stale maximum may lag, in powers of two


@aggregate
class SoftmaxScale:
    """scale_log2 turns scores into base-2 logits. With softcap, scores first become tanh(y), y =
    s * softmax_scale / softcap; inner is the factor in tanh(y) = 1 - 2 / (2^(s * inner) + 1).
    """

    scale_log2: gl.tensor
    inner: gl.tensor
    SOFTCAP: gl.constexpr

    @gluon.jit
    def apply_softcap(self, s):
        """s, or tanh(y) with softcap, whose outer factor is inside of scale_log2."""
        if self.SOFTCAP:
            return 1.0 - 2.0 / (gl.exp2(s * self.inner) + 1.0)
        else:
            return s

    @gluon.jit
    def clamp_maxima(self, m):
        """Row maxima, with -inf replaced by the lowest value that is finite even as a logit. A fold
        that starts with it needs no test for -inf at every tile (4 instructions of 430): a score of
        -inf, masked or by value, has weight 0, and l = 0 marks a row without any other score.
        """
        return gl.maximum(m, LOWEST / gl.maximum(self.scale_log2, 1.0))

    @gluon.jit
    def compute_ds(self, s, p, dp, delta):
        """Backward: ds = p (dp - delta), times the derivative 1 - s^2 of the softcap's tanh."""
        ds = p * (dp - delta)
        if self.SOFTCAP:
            capped = gl.maximum(s, -1.0)  # s is -inf at hidden scores
            ds = ds * (1.0 - capped * capped)
        return ds


@gluon.constexpr_function
def _exp2_asm(every):
    """`every` exponentials, the last one by multiply-adds: x = j + f, 2^f by a cubic (relative
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
def exp2(x, EMULATED_EXP2: gl.constexpr):
    """2^x. If EMULATED_EXP2, one of EMULATED_EXP2 neighbours is computed off the exponential unit
    (FlashAttention-4).
    """
    if EMULATED_EXP2 == 0:
        return gl.exp2(x)
    else:
        return gl.inline_asm_elementwise(
            _exp2_asm(EMULATED_EXP2),
            _exp2_constraints(EMULATED_EXP2),
            [x],
            dtype=gl.float32,
            is_pure=True,
            pack=EMULATED_EXP2,
        )


@gluon.jit
def approximate(name: gl.constexpr, x):
    """A function of the special function unit, accurate to 2^-22. Exact ones would be 20 to 30
    instructions, which the compiler puts between the last products of a tile.
    """
    return gl.inline_asm_elementwise(
        name + ".approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def softmax(s, m, params):
    """(p, row maximum, rescale factor of what was folded before), in the units of s; m is finite.
    RESCALE "stale": the maximum is updated only when it lags by more than 2^RESCALE_THRESHOLD
    (FlashAttention-4). p may then be as large as that; where one key has nearly all the weight, p
    is no longer the 1 that 16 bits represent exactly.
    """
    scale_log2 = params.scale.scale_log2
    m_new = gl.maximum(m, gl.max(s, 1))
    if params.cfg.RESCALE == "stale":
        m_new = gl.where((m_new - m) * scale_log2 > RESCALE_THRESHOLD, m_new, m)
    alpha = gl.exp2((m - m_new) * scale_log2)
    p = exp2(s * scale_log2 - (m_new * scale_log2)[:, None], params.cfg.EMULATED_EXP2)
    return p, m_new, alpha


@gluon.constexpr_function
def _rescale_asm(pack):
    """A warp in which all rows have the factor 1 jumps over the multiplications."""
    # A thread has two rows, two elements of each in turn.
    first, second = f"${2 * pack}", f"${2 * pack + 2}"
    vote = f"setp.neu.f32 p, {first}, 0f3F800000; setp.neu.f32 q, {second}, 0f3F800000;"
    vote += " or.pred p, p, q; vote.sync.any.pred p, p, 0xffffffff; @!p bra DONE;"
    multiply = " ".join(f"mul.f32 ${i}, ${i}, ${2 * pack + i};" for i in range(pack))
    return "{ .reg .pred p, q; " + vote + " " + multiply + " DONE: }"


@gluon.constexpr_function
def _rescale_constraints(pack):
    return ",".join(["=f"] * pack + [str(i) for i in range(pack)] + ["f"] * pack)


@gluon.jit
def rescale(acc, alpha, cfg):
    """acc * alpha. Unless RESCALE is "always", warps in which no maximum moved skip it."""
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    if cfg.RESCALE == "always":
        return acc * alpha
    else:
        acc, alpha = gl.broadcast(acc, alpha)
        HALF: gl.constexpr = acc.shape[1] // 4  # half of a thread's elements
        return gl.inline_asm_elementwise(
            _rescale_asm(HALF), _rescale_constraints(HALF), [acc, alpha], dtype=gl.float32,
            is_pure=True, pack=HALF,
        )  # fmt: skip


@gluon.jit
def lane_sums(p):
    """Each lane's share of the row sums, (64, 8). Lanes are reduced once, after the last tile."""
    return gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 8]), 1)


@gluon.jit
def broadcast_to_lane_sums(x, l):
    """x, one value for each row, as a factor of the lane sums."""
    layout: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    return gl.convert_layout(x, layout, assert_trivial=True)[:, None]


@gluon.jit
def reduce_lane_sums(l, layout: gl.constexpr):
    """Row sums from lane sums."""
    return gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, layout), assert_trivial=True)


@gluon.constexpr_function
def _delay_wait_asm(count, each):
    """A thread has two rows, two elements of each in turn: the first `count` of one row, then of
    the other. The load never executes, because exponentials are not negative. ptxas cannot know
    this, and moves no wait across a load that is volatile (docs/notebook.md: `softmax.delay_wait`).
    """
    order = [x for x in range(each) if x % 4 < 2] + [x for x in range(each) if x % 4 >= 2]
    first, *others = [f"${each + x}" for x in order[:count]]
    signs = f"mov.b32 t, {first}; " + " ".join(f"or.b32 t, t, {x};" for x in others)
    moves = " ".join(f"mov.b32 ${x}, ${each + x};" for x in range(each))
    load = " setp.lt.s32 p, t, 0; mov.b32 t, 0; @p ld.volatile.shared.b32 t, [t]; "
    return "{ .reg .b32 t; .reg .pred p; " + signs + load + moves + " }"


@gluon.constexpr_function
def _delay_wait_constraints(each):
    return ",".join(["=f"] * each + ["f"] * each)


@gluon.jit
def delay_wait(p, COUNT: gl.constexpr):
    """p. A wait that follows in the program is issued after COUNT exponentials of each thread.
    Otherwise ptxas moves it up to the product that it waits for, before all of them.
    """
    EACH: gl.constexpr = p.shape[1] // 2
    return gl.inline_asm_elementwise(
        _delay_wait_asm(COUNT, EACH), _delay_wait_constraints(EACH), [p], dtype=gl.float32,
        is_pure=False, pack=EACH,
    )  # fmt: skip
