"""Forward mode on the CPU: tangents equal central differences and the jvp of the textbook formula,
over every option, and all other calls are refused by name.
"""

import itertools
import math

import pytest
import torch
from torch import func
from torch.autograd import forward_ad

import onchip
import onchip.testing as ot
from onchip import masks
from onchip.core import torch_op
from onchip.core.backend import Tangents
from onchip.core.device import DeviceInfo
from onchip.core.dispatch import find_tangents, get_backend
from onchip.core.functional import prepare_attention
from onchip.core.problem import Options, Problem, Tensors, UnsupportedError
from onchip.kernels.cpu import reference, tangent, tile_loop
from onchip.kernels.cpu.head_slice import head_slices
from onchip.kernels.tiles import TileConfig
from tests.largest_tensor import LargestTensor

F64 = torch.float64
NAMES = ("q", "k", "v", "alibi_slopes", "bias", "sinks")  # the inputs that may have a tangent
HOLES = masks.mod(lambda b, h, q, k: (q + k + h + b) % 3 != 0)
BLOCKS = masks.build(HOLES, 2, 4, 5, 7, "cpu")
NO_KEYS = torch.ones(5, 7, dtype=torch.bool).index_fill_(0, torch.tensor([1, 3]), False)
ALL = {"causal": True, "window_size": (4, None), "softcap": 0.8, "mask": HOLES}
# Options of a call with batch 2, 5 queries, 7 keys and 4 heads. Shapes stand for random tensors.
DENSE = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "softmax_scale": {"softmax_scale": -0.7},
    "softcap": {"softcap": 0.8},
    "alibi": {"alibi_slopes": (4,)},
    "alibi of batch": {"alibi_slopes": (2, 4)},
    "bias": {"bias": (2, 4, 5, 7)},
    "bias of keys": {"bias": (1, 1, 1, 7)},
    "bias of heads": {"bias": (1, 4, 5, 7)},
    "bias of batch": {"bias": (2, 1, 1, 7)},
    "sinks": {"sinks": (4,)},
    "rule": {"mask": HOLES},
    "preset": {"mask": masks.causal() & masks.window(2, 0)},
    "block mask": {"mask": BLOCKS},
    "bool mask": {"mask": torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(0)) < 0.6},
    "rows without keys": {"mask": NO_KEYS},
    "rows of a sink alone": {"mask": NO_KEYS, "sinks": (4,)},
    "deterministic": {"deterministic": True},
    "all": {**ALL, "alibi_slopes": (2, 4), "bias": (2, 1, 5, 7), "sinks": (4,)},
}
PACKED = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "softcap": {"softcap": 0.8},
    "alibi": {"alibi_slopes": (4,)},
    "alibi of batch": {"alibi_slopes": (4, 4)},
    "sinks": {"sinks": (4,)},
    "all": {**ALL, "mask": None, "alibi_slopes": (4, 4), "sinks": (4,)},
}
LENGTHS = [5, 0, 3, 4], [7, 2, 0, 2]  # a sequence without queries, one without keys, rows above
GROUPS = {"heads": (4, 4), "grouped": (4, 2), "one key head": (4, 1)}
WIDTHS = {"equal": (6, 6), "narrow values": (6, 3), "wide values": (2, 9)}


def draw(shape, dtype=F64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


class Case:
    """A call as a function of its differentiable inputs, `names`, and as the textbook formula."""

    def __init__(self, options, sizes, packed=False, dtype=F64):
        self.packed, options = packed, dict(options)
        if packed:
            tensors = ot.make_packed(*LENGTHS, **sizes, dtype=dtype)
            named = dict(zip("qkv", tensors[:3], strict=True))
            self.fixed = tensors.options
        else:
            named = dict(zip("qkv", ot.make_qkv(2, 5, 7, **sizes, dtype=dtype), strict=True))
            self.fixed = {}
        for i, name in enumerate(NAMES[3:]):
            if name in options:
                named[name] = draw(options.pop(name), dtype, seed=i)
        self.fixed |= {name: x for name, x in options.items() if x is not None}
        self.names, self.inputs = tuple(named), tuple(named.values())
        self.tangents = tuple(draw(x.shape, dtype, 7 + i) for i, x in enumerate(self.inputs))

    def __call__(self, *inputs):
        call = dict(zip(self.names, inputs, strict=True)) | self.fixed
        attend = onchip.varlen_attention if self.packed else onchip.attention
        return attend(call.pop("q"), call.pop("k"), call.pop("v"), **call, return_lse=True)

    def formula(self, *inputs):
        """Standard attention, and lse with 0 in place of -inf: -inf has no difference."""
        fixed = {name: x for name, x in self.fixed.items() if name not in ot.CARRIED}
        out, lse, *_ = ot.oracle(**dict(zip(self.names, inputs, strict=True)), **fixed)
        return out, lse

    def by_differences(self, h=1e-5):
        """Central differences of onchip's own results. The error of a difference is about h^2."""
        ahead, behind = (
            self(*(x + sign * h * dx for x, dx in zip(self.inputs, self.tangents, strict=True)))
            for sign in (1, -1)
        )
        difference = lambda a, b: torch.where(a == b, 0.0, a - b) / (2 * h)
        return tuple(difference(a, b) for a, b in zip(ahead, behind, strict=True))


def sizes_of(groups, widths):
    heads, dims = GROUPS[groups], WIDTHS[widths]
    return dict(zip(("num_heads", "num_kv_heads"), heads, strict=True)) | {
        "head_dim": dims[0],
        "head_dim_v": dims[1],
    }


def assert_right(case):
    result, got = func.jvp(case, case.inputs, case.tangents)
    for a, b in zip(result, case(*case.inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    _, exact = func.jvp(case.formula, case.inputs, case.tangents)
    for a, b, c in zip(got, exact, case.by_differences(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(a, c, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", DENSE)
def test_dense_tangents(name):
    assert_right(Case(DENSE[name], sizes_of("grouped", "narrow values")))


@pytest.mark.parametrize("name", PACKED)
def test_packed_tangents(name):
    assert_right(Case(PACKED[name], sizes_of("grouped", "narrow values"), packed=True))


@pytest.mark.slow
@pytest.mark.parametrize("groups, widths", [*itertools.product(GROUPS, WIDTHS)])
def test_tangents_over_pairs_of_options(groups, widths):
    sizes = sizes_of(groups, widths)
    for packed, table in ((False, DENSE), (True, PACKED)):
        for a, b in itertools.combinations(table, 2):
            assert_right(Case({**table[a], **table[b]}, sizes, packed))


def test_the_cases_have_every_option_that_forward_mode_serves():
    fields = {"mask": "has_mask", "bias": "has_bias", "sinks": "has_sinks"}
    fields["alibi_slopes"] = "has_alibi"
    used = {fields.get(name, name) for case in DENSE.values() for name in case}
    used |= {"packed", "score_mod"}  # score_mod: tests/core/test_score_mod.py
    assert used & Problem._field_defaults.keys() == tangent.OPTIONS
    assert get_backend("tiled").options > tangent.OPTIONS


@pytest.mark.parametrize("name", DENSE)
def test_the_reference_differentiated_by_torch(name):
    """The kernel `reference` is torch operations on whole score matrices: its jvp is torch's."""
    case = Case(DENSE[name], sizes_of("grouped", "narrow values"))

    def attend(*inputs):
        call = dict(zip(case.names, inputs, strict=True)) | case.fixed
        options = Options(**{n: x for n, x in call.items() if n in Options._fields})
        tensors = Tensors(**{n: x for n, x in call.items() if n in NAMES})
        (problem, _), x = prepare_attention(tensors, options, mask=call.get("mask"))
        x = torch_op._build_mask(x)
        parts = [reference._attend(problem, x, at)[:2] for at in head_slices(problem, x)]
        heads = case.inputs[0].shape[2] // parts[0][0].shape[1]
        out, lse = (torch.cat(xs).unflatten(0, (-1, heads)) for xs in zip(*parts, strict=True))
        return out.flatten(1, 2).transpose(1, 2), lse.flatten(1, 2)

    exact = func.jvp(attend, case.inputs, case.tangents)[1]
    for a, b in zip(func.jvp(case, case.inputs, case.tangents)[1], exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("packed", [False, True])
def test_each_input_alone(packed):
    """Inputs without a tangent count as constants, and the tangents of all inputs add up."""
    case = Case((PACKED if packed else DENSE)["all"], sizes_of("grouped", "equal"), packed)
    total = [torch.zeros_like(x) for x in case(*case.inputs)]
    for i, name in enumerate(case.names):
        one = lambda x, i=i: case(*case.inputs[:i], x, *case.inputs[i + 1 :])
        plain = lambda x, i=i: case.formula(*case.inputs[:i], x, *case.inputs[i + 1 :])
        got = func.jvp(one, (case.inputs[i],), (case.tangents[i],))[1]
        exact = func.jvp(plain, (case.inputs[i],), (case.tangents[i],))[1]
        for a, b in zip(got, exact, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=lambda m, n=name: n + m)
        total = [a + b for a, b in zip(total, got, strict=True)]
    for a, b in zip(total, func.jvp(case, case.inputs, case.tangents)[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["all", "rows without keys"])
def test_jacfwd_equals_the_jacobian_in_reverse(name):
    case = Case(DENSE[name], sizes_of("grouped", "narrow values"))
    slopes = case.names.index("alibi_slopes") if "alibi_slopes" in case.names else None
    at = [i for i in range(len(case.names)) if i != slopes]  # reverse mode refuses slopes
    whole = lambda *x: case(*x)[0]
    reverse = lambda *x: whole(*(x[at.index(i)] if i in at else case.inputs[i] for i in all_of))
    all_of = range(len(case.names))
    leaves = tuple(case.inputs[i] for i in at)
    backward = torch.autograd.functional.jacobian(reverse, leaves)
    forward = func.jacfwd(reverse, tuple(range(len(leaves))))(*leaves)
    for a, b in zip(forward, backward, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_jacfwd_equals_jacrev():
    case = Case(DENSE["causal"], sizes_of("grouped", "equal"))
    for output in (0, 1):
        f = lambda *x, output=output: case(*x)[output]
        forward, backward = func.jacfwd(f, (0, 1, 2)), func.jacrev(f, (0, 1, 2))
        for a, b in zip(forward(*case.inputs), backward(*case.inputs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_vmap_in_chunks():
    case = Case(DENSE["sinks"], sizes_of("grouped", "equal"))
    f = lambda sinks: case(*case.inputs[:3], sinks)[0]
    jvp = lambda dsinks: func.jvp(f, case.inputs[3:], (dsinks,))[1]
    whole, in_chunks = torch.vmap(jvp), torch.vmap(jvp, chunk_size=3)
    assert torch.equal(whole(torch.eye(4, dtype=F64)), in_chunks(torch.eye(4, dtype=F64)))


@pytest.mark.parametrize("name", ["all", "bool mask", "block mask"])
@pytest.mark.parametrize("mapped", ["tangents", "both"])
def test_vmap_of_jvp(name, mapped):
    """Every entry of the mapped dimension has its own tangents, or its own inputs as well."""
    case = Case(DENSE[name], sizes_of("grouped", "narrow values"))
    stack = lambda xs: tuple(torch.stack([x, x.flip(0) / 2, x.roll(1, 0)], 1) for x in xs)
    tangents = stack(case.tangents)
    # sinks are shared by all entries of a mapped forward
    own = [mapped == "both" and name != "sinks" for name in case.names]
    inputs = [stack([x])[0] if is_own else x for x, is_own in zip(case.inputs, own, strict=True)]
    dims = [1 if is_own else None for is_own in own]
    entry = lambda i: func.jvp(
        case,
        tuple(x[:, i] if is_own else x for x, is_own in zip(inputs, own, strict=True)),
        tuple(dx[:, i] for dx in tangents),
    )
    jvp = lambda *xs: func.jvp(case, xs[: len(inputs)], xs[len(inputs) :])
    result = torch.vmap(jvp, in_dims=(*dims, *(1 for _ in tangents)))(*inputs, *tangents)
    for i in range(3):
        for got, expected in zip(result, entry(i), strict=True):
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a[i], b, rtol=1e-11, atol=1e-11)


def test_vmap_over_no_tangents():
    case = Case(DENSE["bool mask"], sizes_of("grouped", "narrow values"))
    none = tuple(x.new_zeros(0, *x.shape) for x in case.tangents)
    dout, dlse = torch.vmap(lambda *dx: func.jvp(case, case.inputs, dx)[1])(*none)
    assert dout.shape == (0, 2, 5, 4, 3) and dlse.shape == (0, 2, 4, 5)


def test_vmap_over_masks():
    """A bool mask that differs by entry, with tangents that do not."""
    case = Case({}, sizes_of("heads", "equal"))
    visible = torch.rand(3, 5, 7, generator=torch.Generator().manual_seed(1)) < 0.6
    f = lambda mask: lambda q, k, v: onchip.attention(q, k, v, mask=mask)
    jvp = lambda mask: func.jvp(f(mask), case.inputs, case.tangents)[1]
    torch.testing.assert_close(torch.vmap(jvp)(visible), torch.stack([*map(jvp, visible)]))


@pytest.mark.parametrize("name", DENSE)
def test_dual_tensors(name):
    case = Case(DENSE[name], sizes_of("grouped", "narrow values"))
    expected = func.jvp(case, case.inputs, case.tangents)[1]
    with forward_ad.dual_level():
        duals = map(forward_ad.make_dual, case.inputs, case.tangents)
        got = [forward_ad.unpack_dual(x).tangent for x in case(*duals)]
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_results_that_depend_on_no_tangent_have_none():
    case = Case({}, sizes_of("grouped", "equal"))
    with forward_ad.dual_level():
        out, lse = case(*case.inputs)
        assert forward_ad.unpack_dual(out).tangent is None
        assert forward_ad.unpack_dual(lse).tangent is None
        dual_v = forward_ad.make_dual(case.inputs[2], case.tangents[2])
        assert not forward_ad.unpack_dual(case(*case.inputs[:2], dual_v)[1]).tangent.any()


@pytest.mark.parametrize("tile", [TileConfig(32, 48), TileConfig(7, 33)])
def test_tiles_do_not_change_the_tangents(monkeypatch, tile):
    """Over rows of several tiles, each with its own maximum."""
    inputs = ot.make_qkv(1, 83, 150, num_heads=2, num_kv_heads=1, head_dim=8, dtype=F64)
    tangents = tuple(draw(x.shape, seed=i) for i, x in enumerate(inputs))
    options = {"causal": True, "window_size": (90, None), "mask": HOLES, "return_lse": True}
    f = lambda q, k, v: onchip.attention(10 * q, k, v, softcap=30.0, **options)
    whole = func.jvp(f, inputs, tangents)[1]
    monkeypatch.setattr(tile_loop, "tiled_config", lambda planes: tile)
    for a, b in zip(func.jvp(f, inputs, tangents)[1], whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def textbook(q, k, v, causal):
    """Standard attention in the dtype of q, every result rounded to it."""
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if causal:
        visible = torch.ones(s.shape[-2:], dtype=torch.bool).tril(s.shape[-1] - s.shape[-2])
        s = s.masked_fill(~visible, -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v), s.logsumexp(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("distribution", ot.DISTRIBUTIONS)
def test_accuracy(dtype, causal, distribution):
    """The accuracy rule, with the tangents of the textbook formula in the same dtype as the
    yardstick: in 16 bits the errors are at most its errors, a single one plus 1 ulp. In fp32 the
    RMSE is at most 1.25 times its RMSE, and a single error 1e-5 of the largest tangent.
    """
    inputs = ot.make_qkv(1, 160, 1299, num_heads=2, dtype=dtype, distribution=distribution)
    tangents = tuple(draw(x.shape, dtype, i) for i, x in enumerate(inputs))
    double = lambda xs: tuple(x.double() for x in xs)
    f = lambda q, k, v: onchip.attention(q, k, v, causal=causal, return_lse=True)
    plain = lambda q, k, v: textbook(q, k, v, causal)
    got = func.jvp(f, inputs, tangents)[1]
    expected = func.jvp(plain, double(inputs), double(tangents))[1]
    unfused = func.jvp(plain, inputs, tangents)[1]
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    for a, exact, b in zip(got, expected, unfused, strict=True):
        size = exact.abs().max().item()
        if dtype == torch.float32:
            assert ot.rmse(a, exact) <= 1.25 * ot.rmse(b, exact)
            assert ot.max_error(a, exact) <= 1e-5 * size
        else:
            assert ot.rmse(a, exact) <= ot.rmse(b, exact)
            assert ot.max_error(a, exact) <= ot.max_error(b, exact) + ot.ulp(dtype, size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tangents_of_16_bits_are_rounded_once(dtype):
    """The unrounded tangent of out_dtype=fp32 is that of fp32 inputs, and rounds to the other."""
    inputs = ot.make_qkv(1, 20, 33, num_heads=2, dtype=dtype)
    tangents = tuple(draw(x.shape, dtype, i) for i, x in enumerate(inputs))
    wide = lambda xs: tuple(x.float() for x in xs)
    f = lambda *x: onchip.attention(*x, causal=True)
    unrounded = lambda *x: onchip.attention(*x, causal=True, out_dtype=torch.float32)
    got, exact = (func.jvp(g, inputs, tangents)[1] for g in (f, unrounded))
    assert exact.dtype == torch.float32 and torch.equal(got, exact.to(dtype))
    assert torch.equal(exact, func.jvp(f, wide(inputs), wide(tangents))[1])


def test_autocast_and_precise_delta():
    q, k, v = ot.make_qkv(1, 9, 11, dtype=torch.bfloat16)
    expected = func.jvp(lambda q: onchip.attention(q, k, v), (q,), (q,))[1]
    with torch.autocast("cpu", torch.bfloat16):
        lowered = func.jvp(lambda q: onchip.attention(q, k, v), (q.float(),), (q.float(),))[1]
    assert torch.equal(lowered, expected)
    with forward_ad.dual_level():
        out = onchip.attention(forward_ad.make_dual(q, q), k, v, precise_delta=True)
        assert torch.equal(forward_ad.unpack_dual(out).tangent, expected)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("batch", [0, 2])
def test_empty_calls(batch, lengths):
    inputs = ot.make_qkv(batch, *lengths, dtype=F64)
    f = lambda q, k, v: onchip.attention(q, k, v, return_lse=True)
    result, tangents = func.jvp(f, inputs, inputs)
    for x, dx in zip(result, tangents, strict=True):
        assert dx.shape == x.shape and not dx.any()


def test_layouts_of_tangents():
    """A tangent need not have the strides of its input."""
    case = Case(DENSE["all"], sizes_of("grouped", "equal"))
    expected = func.jvp(case, case.inputs, case.tangents)[1]
    turned = tuple(x.flip(-1).contiguous().flip(-1).mT.contiguous().mT for x in case.tangents[:3])
    got = func.jvp(case, case.inputs, (*turned, *case.tangents[3:]))[1]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    expanded = case.tangents[0][:, :, :1].expand_as(case.inputs[0])
    one = lambda dq: func.jvp(lambda q: case(q, *case.inputs[1:]), case.inputs[:1], (dq,))[1]
    for a, b in zip(one(expanded), one(expanded.contiguous()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_inputs_are_not_written():
    case = Case(DENSE["all"], sizes_of("grouped", "equal"))
    before = [x.clone() for x in (*case.inputs, *case.tangents)]
    func.jvp(case, case.inputs, case.tangents)
    assert all(map(torch.equal, before, (*case.inputs, *case.tangents)))


def test_tangents_of_hidden_keys_do_not_count():
    """NaN in the key of a hidden cell, and in its tangent, reaches no result."""
    q, k, v = ot.make_qkv(1, 4, 6, dtype=F64)
    hidden = torch.ones(4, 6, dtype=torch.bool).index_fill_(1, torch.tensor(2), False)
    f = lambda k: onchip.attention(q, k, v, mask=hidden, return_lse=True)
    expected = func.jvp(f, (k,), (draw(k.shape),))[1]
    poison = lambda x: x.index_fill(1, torch.tensor(2), math.nan)
    for a, b in zip(func.jvp(f, (poison(k),), (poison(draw(k.shape)),))[1], expected, strict=True):
        assert torch.equal(a, b)


def test_memory_is_linear():
    """4,096 x 4,096 scores: no temporary has more than a tile of them, as in the forward."""
    backend, device = get_backend("tiled"), DeviceInfo("cpu")
    problem = Problem(1, 4096, 4096, 1, 1, 8, 8, torch.float32, torch.float32, 0.1, causal=True)
    assert find_tangents(problem, device) is backend
    x = Tensors(*ot.make_qkv(1, 4096, num_heads=1, head_dim=8))
    largest = []
    for run in (backend.forward, lambda *call: backend.tangents(*call, Tangents(*x[:3]))):
        with LargestTensor() as mode:
            run(problem, x)
        largest.append(mode.elements)
    assert largest[1] == largest[0] <= 4096 * 4096 // 16


Q, K, V = ot.make_qkv(1, 3, 5, head_dim=4)
PAGES = torch.tensor([[0]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
SERVED = "attention and varlen_attention have them on the CPU"
REFUSED = {
    "dropout": (lambda q: onchip.attention(q, K, V, dropout_p=0.5), "no dropout_p.*" + SERVED),
    "statistics": (lambda q: onchip.attention(q, K, V, return_stats=True), "no return_stats"),
    "precision": (lambda q: onchip.attention(q, K, V, precision="int8"), "precision='int8'"),
    "aten_cpu": (lambda q: onchip.attention(q, K, V, kernel="aten_cpu"), "has no forward mode"),
    "reference": (lambda q: onchip.attention(q, K, V, kernel="reference"), "has no forward mode"),
    "precise_delta": (
        lambda q: onchip.attention(q.bfloat16(), K.bfloat16(), V.bfloat16(), precise_delta=True),
        "precise_delta is not served under transforms",
    ),
    "pages": (lambda q: onchip.paged_attention(q, K, V, *PAGES), "paged_attention has no deriv"),
    "cascade": (lambda q: onchip.cascade_attention(q, K, V, *PAGES), "has no derivative"),
    "latent pages": (
        lambda q: onchip.paged_attention(q, K, None, *PAGES, latent=2),
        "paged_attention has no derivative",
    ),
    "offload": (lambda q: onchip.offload_attention(q, (K, V)), "not served for offload"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    attend, sentence = REFUSED[name]
    with pytest.raises(UnsupportedError, match=sentence):
        func.jvp(attend, (Q,), (Q,))


def test_a_gpu_refuses():
    problem = Problem(1, 512, 512, 8, 8, 128, 128, torch.bfloat16, torch.bfloat16, 0.1)
    for device in (DeviceInfo("cuda", "H200", (9, 0)), DeviceInfo("mps")):
        for kernel in (None, "tiled"):
            with pytest.raises(UnsupportedError, match=f"on the CPU only, not on {device.type}"):
                find_tangents(problem, device, kernel)
    with pytest.raises(UnsupportedError, match="hopper has no forward mode"):
        find_tangents(problem, DeviceInfo("cuda", "H200", (9, 0)), "hopper")


def attend(q):
    return onchip.attention(q, K, V)


def jvp(q):
    return func.jvp(attend, (q,), (torch.ones_like(q),))[1]


TWICE_FORWARD = {
    "jvp of jvp": lambda: func.jvp(jvp, (Q,), (Q,)),
    "jacfwd of jacfwd": lambda: func.jacfwd(func.jacfwd(attend))(Q),
}


@pytest.mark.parametrize("name", TWICE_FORWARD)
def test_forward_mode_twice_is_refused(name):
    """tests/core/test_second_order.py has the second derivatives that are served."""
    with pytest.raises(UnsupportedError, match="nor a jvp of a jvp"):
        TWICE_FORWARD[name]()


def test_backward_of_a_dual_result():
    """After the dual level a backward is the plain gradient. Inside, it has a tangent itself: the
    gradient of the tangent, which has a third derivative as its tangent, and is refused there.
    """
    q = Q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(attend(q).sum(), q)
    with forward_ad.dual_level():
        out = attend(forward_ad.make_dual(q, Q))
        primal, dual = forward_ad.unpack_dual(out)
        (gradient,) = torch.autograd.grad(primal.sum(), q, retain_graph=True)
        product = forward_ad.unpack_dual(gradient).tangent
        with pytest.raises(UnsupportedError, match="third derivatives"):
            torch.autograd.grad(dual.sum(), q, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(dual.sum(), q, retain_graph=True)[0], product)
    assert product.any()
    torch.testing.assert_close(torch.autograd.grad(out.sum(), q)[0], expected)
