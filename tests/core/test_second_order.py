"""Second derivatives of attention on the CPU: in every composition of modes equal to those of the
textbook formula, with O(N) memory. Third derivatives and all other calls raise a sentence.
"""

import itertools

import pytest
import torch
import torch.autograd.functional as functional
from torch import func
from torch.autograd import forward_ad, grad, gradgradcheck
from torch.utils.flop_counter import FlopCounterMode

import onchip
import onchip.testing as ot
from onchip import masks
from onchip.core.backend import Tangents
from onchip.core.device import DeviceInfo
from onchip.core.dispatch import find_second_order, get_backend
from onchip.core.problem import Problem, Tensors, UnsupportedError
from onchip.kernels.cpu import tile_loop
from onchip.kernels.tiles import TileConfig
from tests.largest_tensor import LargestTensor

F64 = torch.float64
HOLES = masks.mod(lambda b, h, q, k: (q + k + h + b) % 3 != 0)
BLOCKS = masks.build(HOLES, 2, 4, 4, 5, "cpu")
NO_KEYS = torch.ones(4, 5, dtype=torch.bool).index_fill_(0, torch.tensor([1, 3]), False)
ALL = {"causal": True, "window_size": (3, None), "softcap": 0.8}
# Options of a call with batch 2, 4 queries, 5 keys and 4 heads. Shapes stand for random tensors.
DENSE = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "softmax_scale": {"softmax_scale": -0.7},
    "softcap": {"softcap": 0.8},
    "alibi": {"alibi_slopes": (2, 4)},
    "bias": {"bias": (2, 4, 4, 5)},
    "bias of keys": {"bias": (1, 1, 1, 5)},
    "bias of batch": {"bias": (2, 1, 1, 5)},
    "sinks": {"sinks": (4,)},
    "rule": {"mask": HOLES},
    "block mask": {"mask": BLOCKS},
    "bool mask": {"mask": torch.rand(2, 1, 4, 5, generator=torch.Generator().manual_seed(0)) < 0.6},
    "rows without keys": {"mask": NO_KEYS},
    "rows of a sink alone": {"mask": NO_KEYS, "sinks": (4,)},
    "all": {**ALL, "mask": HOLES, "alibi_slopes": (2, 4), "bias": (2, 1, 4, 5), "sinks": (4,)},
}
PACKED = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "all": {**ALL, "alibi_slopes": (3, 4), "sinks": (4,)},
}
LENGTHS = [3, 0, 2], [2, 3, 3]
GROUPS = {"heads": (4, 4), "grouped": (4, 2), "one key head": (4, 1)}
WIDTHS = {"equal": (4, 4), "narrow values": (4, 3), "wide values": (2, 5)}
NAMES = ("q", "k", "v", "bias", "sinks")


def draw(shape, dtype=F64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


class Case:
    """A call as a function of its differentiable inputs, and as the textbook formula. loss and
    plain_loss are sums of cubes: their second derivatives have terms of first and second order.
    """

    def __init__(self, options, groups="grouped", widths="narrow values", packed=False):
        (heads, kv_heads), (dim, dim_v) = GROUPS[groups], WIDTHS[widths]
        sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "dtype": F64}
        if packed:
            tensors = ot.make_packed(*LENGTHS, **sizes, head_dim_v=dim_v)
            named, self.fixed = dict(zip("qkv", tensors[:3], strict=True)), dict(tensors.options)
        else:
            tensors = ot.make_qkv(2, 4, 5, **sizes, head_dim_v=dim_v)
            named, self.fixed = dict(zip("qkv", tensors, strict=True)), {}
        self.packed = packed
        for i, (name, value) in enumerate(options.items()):
            is_shape = name in ("alibi_slopes", "bias", "sinks")
            target = named if name in NAMES else self.fixed
            target[name] = draw(value, seed=i) if is_shape else value
        self.names, self.inputs = tuple(named), tuple(named.values())
        self.directions = tuple(draw(x.shape, seed=7 + i) for i, x in enumerate(self.inputs))

    def __call__(self, *inputs):
        call = dict(zip(self.names, inputs, strict=True)) | self.fixed
        attend = onchip.varlen_attention if self.packed else onchip.attention
        q, k, v = (call.pop(name) for name in "qkv")
        out, lse = attend(q, k, v, **call, return_lse=True)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)  # -inf has no difference

    def formula(self, *inputs):
        fixed = {name: x for name, x in self.fixed.items() if name not in ot.CARRIED}
        out, lse, *_ = ot.oracle(**dict(zip(self.names, inputs, strict=True)), **fixed)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    def loss(self, *inputs):
        return cubes(self(*inputs))

    def plain_loss(self, *inputs):
        return cubes(self.formula(*inputs))

    @property
    def leaves(self):
        return tuple(x.clone().requires_grad_() for x in self.inputs)


def cubes(results):
    return sum((y**3).sum() for y in results)


def assert_near(got, expected, tolerance=1e-10):
    got, expected = ([*x] if isinstance(x, (tuple, list)) else [x] for x in (got, expected))
    for a, b in zip(got, expected, strict=True):
        if isinstance(a, tuple):
            assert_near(a, b, tolerance)
        else:
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def double_backward(f, inputs, directions):
    leaves = tuple(x.clone().requires_grad_() for x in inputs)
    grads = grad(f(*leaves), leaves, create_graph=True)
    penalty = sum((g**3).sum() for g in grads) + sum(
        (g * u).sum() for g, u in zip(grads, directions, strict=True)
    )
    return grad(penalty, leaves)


def every(inputs):
    return tuple(range(len(inputs)))


def dual_gradient(f, inputs, directions):
    """Forward over reverse, by dual tensors and torch.autograd."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    with forward_ad.dual_level():
        duals = [*map(forward_ad.make_dual, leaves, directions)]
        grads = grad(f(*duals), duals)
        return tuple(forward_ad.unpack_dual(g).tangent for g in grads)


# Each way to second derivatives, as a function of (loss, inputs, directions).
WAYS = {
    "double backward": double_backward,
    "jvp of grad": lambda f, x, u: func.jvp(func.grad(f, every(x)), x, u)[1],
    "vjp of grad": lambda f, x, u: func.vjp(func.grad(f, every(x)), *x)[1](u),
    "grad of jvp": lambda f, x, u: func.grad(lambda *y: func.jvp(f, y, u)[1] ** 2, every(x))(*x),
    "grad of the tangent": lambda f, x, u: func.grad(
        lambda *w: func.jvp(f, x, w)[1] ** 2, every(x)
    )(*u),
    "dual tensors": dual_gradient,
    "functional.hvp": lambda f, x, u: functional.hvp(f, x, u)[1],
    "functional.vhp": lambda f, x, u: functional.vhp(f, x, u)[1],
}


def assert_right(case, ways=WAYS):
    for way in ways:
        results = [WAYS[way](f, case.inputs, case.directions) for f in (case.loss, case.plain_loss)]
        assert_near(*results)


@pytest.mark.parametrize("name", DENSE)
def test_dense_calls(name):
    assert_right(Case(DENSE[name]))


@pytest.mark.parametrize("name", PACKED)
def test_packed_calls(name):
    assert_right(Case(PACKED[name], packed=True))


@pytest.mark.parametrize("groups, widths", [*itertools.product(GROUPS, WIDTHS)])
def test_heads_and_head_dims(groups, widths):
    assert_right(Case(DENSE["all"], groups, widths), ("double backward", "jvp of grad"))


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_pairs_of_options(packed):
    table = PACKED if packed else DENSE
    for a, b in itertools.combinations(table, 2):
        case = Case({**table[a], **table[b]}, packed=packed)
        assert_right(case, ("double backward", "grad of jvp"))


@pytest.mark.parametrize("name", ["softcap", "sinks", "rows without keys", "all"])
def test_finite_differences(name):
    case = Case(DENSE[name])
    assert gradgradcheck(case, case.leaves, fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_finite_differences_of_every_option(packed):
    for name, options in (PACKED if packed else DENSE).items():
        case = Case(options, packed=packed)
        assert gradgradcheck(case, case.leaves, fast_mode=True), name
        for i in (0, 1):
            one = lambda *x, i=i, case=case: case(*x)[i]
            assert gradgradcheck(one, case.leaves, fast_mode=True), name


@pytest.mark.parametrize("packed", [False, True])
def test_hessian(packed):
    learned = {} if packed else {"bias": (2, 1, 4, 5)}
    case = Case({**ALL, "sinks": (4,), **learned}, packed=packed)
    losses = case.loss, case.plain_loss
    hessians = [func.hessian(f, every(case.inputs))(*case.inputs) for f in losses]
    assert_near(*hessians)
    for i, row in enumerate(hessians[0]):
        for j, block in enumerate(row):
            n, m = case.inputs[i].numel(), case.inputs[j].numel()
            assert_near(block.reshape(n, m), hessians[0][j][i].reshape(m, n).T)


def test_functional_hessian():
    case = Case(DENSE["plain"])
    assert_near(*(functional.hessian(f, case.inputs) for f in (case.loss, case.plain_loss)))
    with pytest.raises(UnsupportedError, match="cannot be mapped over gradients"):
        functional.hessian(case.loss, case.inputs, vectorize=True)


@pytest.mark.parametrize("output", [0, 1])
def test_out_and_lse_alone(output):
    case = Case(DENSE["all"])
    # Every input has a second derivative, though lse does not depend on v.
    losses = [lambda *x, f=f: cubes([f(*x)[output], *x]) for f in (case, case.formula)]
    for apply in WAYS.values():
        assert_near(*(apply(f, case.inputs, case.directions) for f in losses))


def test_each_input_alone():
    """The other inputs are constants."""
    case = Case(DENSE["all"])
    for i in every(case.inputs):
        before, after = case.inputs[:i], case.inputs[i + 1 :]
        losses = [
            lambda x, f=f, before=before, after=after: f(*before, x, *after)
            for f in (case.loss, case.plain_loss)
        ]
        one, direction = case.inputs[i : i + 1], case.directions[i : i + 1]
        for apply in WAYS.values():
            assert_near(*(apply(f, one, direction) for f in losses))


def test_a_tangent_of_slopes():
    """The gradient of a tangent of slopes with respect to the other inputs. The slopes themselves
    have no gradient, nor has their tangent.
    """
    case = Case(DENSE["all"])
    slopes = case.fixed.pop("alibi_slopes")

    def tangent(f):
        def run(direction, *x):
            case.fixed.pop("alibi_slopes", None)
            call = lambda s: cubes(f(*x, s))
            return func.jvp(call, (slopes,), (direction,))[1]

        return run

    def attend(*x):
        case.fixed["alibi_slopes"] = x[-1]
        return case(*x[:-1])

    def plain(*x):
        case.fixed["alibi_slopes"] = x[-1]
        return case.formula(*x[:-1])

    at = tuple(i + 1 for i in every(case.inputs))
    grads = [func.grad(tangent(f), at)(slopes / 2, *case.inputs) for f in (attend, plain)]
    assert_near(*grads)
    with pytest.raises(UnsupportedError, match="alibi_slopes and their tangents have no gradient"):
        func.grad(tangent(attend))(slopes / 2, *case.inputs)
    mixed = lambda f: func.jvp(
        lambda s: func.grad(lambda q: cubes(f(q, *case.inputs[1:], s)))(case.inputs[0]),
        (slopes,),
        (slopes / 2,),
    )[1]
    assert_near(mixed(attend), mixed(plain))


def test_a_gradient_penalty():
    """w.grad has terms through q alone: they would be lost if dq were a constant."""
    q, k, v = ot.make_qkv(1, 6, 7, num_heads=2, head_dim=4, dtype=F64)
    c = draw(q.shape)
    grads = []
    for attend in (onchip.attention, lambda q, k, v: ot.oracle(q, k, v)[0]):
        w, x = torch.eye(4, dtype=F64).requires_grad_(), q.clone().requires_grad_()
        (g,) = torch.autograd.grad((attend(x @ w, k, v) * c).sum(), x, create_graph=True)
        g.pow(2).sum().backward()
        grads.append(w.grad)
    assert_near(*grads)
    assert grads[0].abs().sum() > 0


def test_the_first_gradients_do_not_change():
    case = Case(DENSE["all"])
    for leaves in (case.leaves, tuple(x.float().requires_grad_() for x in case.inputs)):
        case.fixed["alibi_slopes"] = case.fixed["alibi_slopes"].to(leaves[0].dtype)
        loss = case.loss(*leaves)
        plain = grad(loss, leaves, retain_graph=True)
        assert all(map(torch.equal, grad(loss, leaves, create_graph=True), plain))


def test_dout_that_requires_a_gradient():
    """dout.grad is the tangent of out, and lse need not be used."""
    q, k, v = (x.requires_grad_() for x in ot.make_qkv(1, 3, 4, head_dim=4, dtype=F64))
    out = onchip.attention(q, k, v)
    dout = draw(out.shape).requires_grad_()
    (dq,) = grad(out, q, dout, create_graph=True)
    u = draw(q.shape, seed=1)
    (got,) = grad(dq, dout, u)
    assert_near(got, func.jvp(lambda q: onchip.attention(q, k, v), (q,), (u,))[1])


def test_a_tangent_of_dout():
    """A call from outside of the dual level, and its backward inside."""
    tangents = []
    for f in (attend, plain):
        q = Q.clone().requires_grad_()
        out = f(q)
        with forward_ad.dual_level():
            dout = forward_ad.make_dual(draw(out.shape), draw(out.shape, seed=1))
            (dq,) = grad(out, q, dout)
            tangents.append(forward_ad.unpack_dual(dq).tangent)
    assert_near(*tangents)
    assert tangents[0].any()


@pytest.mark.parametrize("tile", [TileConfig(32, 48), TileConfig(7, 33)])
def test_tiles_do_not_change_the_result(monkeypatch, tile):
    """Over rows of several tiles, each with its own maximum."""
    inputs = ot.make_qkv(1, 83, 150, num_heads=2, num_kv_heads=1, head_dim=8, dtype=F64)
    directions = tuple(draw(x.shape, seed=i) for i, x in enumerate(inputs))
    options = {"causal": True, "window_size": (90, None), "mask": HOLES, "softcap": 30.0}
    f = lambda q, k, v: cubes(onchip.attention(10 * q, k, v, **options, return_lse=True))
    whole = double_backward(f, inputs, directions)
    monkeypatch.setattr(tile_loop, "tiled_config", lambda planes: tile)
    for a, b in zip(double_backward(f, inputs, directions), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_accuracy(dtype):
    """A Hessian-vector product: in fp32 at most 1.25 times the RMSE of the textbook formula in
    fp32, in 16 bits at most the RMSE of the formula in the same dtype.
    """
    inputs = ot.make_qkv(1, 60, 299, num_heads=2, dtype=dtype)
    directions = tuple(draw(x.shape, dtype, i) for i, x in enumerate(inputs))
    dout = draw(inputs[0].shape, dtype, 5)

    def textbook(q, k, v):
        s = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)

    def hvp(attend, cast=lambda x: x):
        f = lambda *x: (attend(*x) * cast(dout)).sum()
        x, u = (tuple(map(cast, t)) for t in (inputs, directions))
        return WAYS["vjp of grad"](f, x, u)

    exact = hvp(textbook, torch.Tensor.double)
    factor = 1.25 if dtype == torch.float32 else 1.0
    for a, b, c in zip(hvp(onchip.attention), hvp(textbook), exact, strict=True):
        assert a.dtype == dtype
        assert ot.rmse(a, c) <= factor * ot.rmse(b, c)


def test_16_bits_are_rounded_once():
    """The kernel computes in fp32: the result is that of fp32 inputs, rounded."""
    x = Tensors(*ot.make_qkv(1, 20, 33, num_heads=2, dtype=torch.bfloat16))
    dx, dout = Tangents(*(t.flip(1) for t in x[:3])), draw(x.q.shape, torch.bfloat16)
    backend, results = get_backend("tiled"), []
    for cast in (lambda t: t, torch.Tensor.float):
        y, dy = Tensors(*map(cast, x[:3])), Tangents(*map(cast, dx[:3]))
        sizes = (1, 20, 33, 2, 2, 64, 64, y.q.dtype, y.q.dtype, 0.125)
        assert y.q.shape[-1] == 64
        results.append(backend.tangent_gradients(Problem(*sizes), y, dy, cast(dout), None))
    for a, b in zip(results[0][:3], results[1][:3], strict=True):
        assert torch.equal(a, b.bfloat16())


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("batch", [0, 2])
def test_empty_calls(batch, lengths):
    inputs = ot.make_qkv(batch, *lengths, head_dim=4, dtype=F64)
    f = lambda *x: (onchip.attention(*x) ** 3).sum()
    for apply in WAYS.values():
        for x, g in zip(inputs, apply(f, inputs, inputs), strict=True):
            assert g.shape == x.shape and not g.any()


def test_hidden_keys_do_not_count():
    """NaN in the direction of a hidden key reaches no result."""
    q, k, v = ot.make_qkv(1, 4, 6, head_dim=4, dtype=F64)
    hidden = torch.ones(4, 6, dtype=torch.bool).index_fill_(1, torch.tensor(2), False)
    f = lambda k: (onchip.attention(q, k, v, mask=hidden) ** 3).sum()
    poison = draw(k.shape).index_fill(1, torch.tensor(2), torch.nan)
    got, expected = (func.jvp(func.grad(f), (k,), (u,))[1] for u in (poison, poison.nan_to_num()))
    visible = torch.tensor([0, 1, 3, 4, 5])
    assert_near(got[:, visible], expected[:, visible])


def test_memory_is_linear():
    """4,096 x 4,096 scores: no temporary has more than a tile of them, as in the forward."""
    backend, device = get_backend("tiled"), DeviceInfo("cpu")
    problem = Problem(1, 4096, 4096, 1, 1, 8, 8, torch.float32, torch.float32, 0.1, causal=True)
    assert find_second_order(problem, device) is backend
    x = Tensors(*ot.make_qkv(1, 4096, num_heads=1, head_dim=8))
    run = lambda: backend.tangent_gradients(problem, x, Tangents(*x[:3]), x.q, None)
    largest = []
    for call in (lambda: backend.forward(problem, x), run):
        with LargestTensor() as mode:
            call()
        largest.append(mode.elements)
    assert largest[1] == largest[0] <= 4096 * 4096 // 16


def test_the_largest_tensor_of_a_hessian_vector_product():
    """Through autograd, with all that it saves."""
    inputs = ot.make_qkv(1, 2048, num_heads=1, head_dim=8)
    with LargestTensor() as mode:
        double_backward(lambda *x: (onchip.attention(*x) ** 3).sum(), inputs, inputs)
    assert mode.elements <= 2048 * 2048 // 4


def test_flops():
    q, k, v = ot.make_qkv(1, 20, 30, num_heads=2, head_dim=8)
    direction = torch.ones_like(q)
    f = lambda q: func.jvp(lambda q: onchip.attention(q, k, v), (q,), (direction,))[1].sum()
    with FlopCounterMode(display=False) as counter:
        func.grad(f)(q)
    pairs = 2 * 2 * 20 * 30
    forward, tangents, gradients = pairs * 16, pairs * 8 * 4, pairs * 8 * (5 + 2 + 4)
    assert counter.get_total_flops() == forward + tangents + gradients


Q, K, V = ot.make_qkv(1, 3, 5, head_dim=4, dtype=F64)
THREE = torch.stack([Q, Q.flip(1), Q / 2])


def attend(q):
    return onchip.attention(q, K, V)


def plain(q):
    return ot.oracle(q, K, V)[0]


def loss_of(f):
    return lambda q: (f(q) ** 3).sum()


MAPPED = {
    "jvp of grad": lambda f: lambda q, u: func.jvp(func.grad(loss_of(f)), (q,), (u,))[1],
    "vjp of grad": lambda f: lambda q, u: func.vjp(func.grad(loss_of(f)), q)[1](u)[0],
    "grad of jvp": lambda f: (
        lambda q, u: func.grad(lambda q: func.jvp(f, (q,), (u,))[1].pow(2).sum())(q)
    ),
}


@pytest.mark.parametrize("name", MAPPED)
@pytest.mark.parametrize("dims", [(0, 0), (None, 0), (0, None)])
def test_vmap(name, dims):
    args = [THREE.flip(0) if dim == 0 else Q for dim in dims]
    args[0] = args[0] * 0.7
    results = [torch.vmap(MAPPED[name](f), in_dims=dims)(*args) for f in (attend, plain)]
    assert_near(*results)


@pytest.mark.parametrize("name", ["sinks", "bias of batch"])
def test_vmap_of_learned_inputs(name):
    case = Case(DENSE[name])
    mapped = tuple(torch.stack([u, u.flip(0), u / 2]) for u in case.directions)
    results = [
        torch.vmap(lambda *u, f=f: WAYS["jvp of grad"](f, case.inputs, u))(*mapped)
        for f in (case.loss, case.plain_loss)
    ]
    assert_near(*results)


def derive(modes):
    """Derivatives in the given modes, the first one innermost, of a function of q."""

    def run(f):
        for mode in modes:
            if mode == "grad":
                f = lambda q, f=f: func.grad(lambda q: f(q).pow(2).sum())(q)
            else:
                f = lambda q, f=f: func.jvp(f, (q,), (THREE[1],))[1]
        return f

    return run


@pytest.mark.parametrize("modes", [*itertools.product(["grad", "jvp"], repeat=2)], ids=str)
def test_two_derivatives(modes):
    if modes == ("jvp", "jvp"):
        with pytest.raises(UnsupportedError, match="nor a jvp of a jvp"):
            derive(modes)(attend)(Q)
    else:
        assert_near(derive(modes)(attend)(Q), derive(modes)(plain)(Q))


@pytest.mark.parametrize("modes", [*itertools.product(["grad", "jvp"], repeat=3)], ids=str)
def test_three_derivatives_raise(modes):
    with pytest.raises(UnsupportedError, match="third derivatives of attention are not served"):
        derive(modes)(attend)(Q)


def test_three_derivatives_in_reverse_mode_raise():
    q = Q.clone().requires_grad_()
    (first,) = grad(attend(q).pow(3).sum(), q, create_graph=True)
    (second,) = grad(first.pow(2).sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="third derivatives"):
        second.sum().backward()
    with pytest.raises(UnsupportedError, match="nor a jvp of a jvp"):
        func.jacfwd(func.jacfwd(attend))(Q)


def test_a_gradient_of_a_second_derivative_in_its_direction():
    """It is linear in its direction, so this is no third derivative of attention."""
    square = lambda f: lambda u: WAYS["jvp of grad"](loss_of(f), (Q,), (u,))[0].pow(2).sum()
    assert_near(*(func.grad(square(f))(THREE[1]) for f in (attend, plain)))
    assert_near(*(func.jacrev(lambda u, f=f: square(f)(u))(THREE[1]) for f in (attend, plain)))


SERVED = "attention and varlen_attention have them on the CPU"
REFUSED = {
    "dropout": ({"dropout_p": 0.5}, "no dropout_p.*" + SERVED),
    "statistics": ({"return_stats": True}, "no return_stats.*" + SERVED),
    "precision": ({"precision": "int8"}, "precision='int8'.*" + SERVED),
    "precise_delta": ({"precise_delta": True}, SERVED + ".*precise_delta"),
    "aten_cpu": ({"kernel": "aten_cpu"}, "aten_cpu has no forward mode"),
    "reference": ({"kernel": "reference"}, "reference has no forward mode"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    """The first gradients are right; differentiating them raises."""
    options, sentence = REFUSED[name]
    dtype = torch.bfloat16 if name == "precise_delta" else torch.float32
    q, k, v = ot.make_qkv(1, 3, 5, head_dim=8, dtype=dtype)
    q.requires_grad_()
    seed = {"dropout_seed": 7} if name == "dropout" else {}
    out = onchip.attention(q, k, v, **options, **seed)
    out = out[0] if isinstance(out, tuple) else out
    (expected,) = grad(out.sum(), q, retain_graph=True)
    (dq,) = grad(out.sum(), q, create_graph=True)
    assert torch.equal(dq, expected)
    with pytest.raises(UnsupportedError, match="second derivatives.*" + sentence):
        dq.sum().backward()


def test_a_dual_input_of_a_call_with_precise_delta_is_refused():
    """The tangent kernel has an unrounded out, so it must not get the residual's share of delta."""
    q, k, v = ot.make_qkv(1, 16, num_heads=2, head_dim=8, dtype=torch.bfloat16)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q.clone().requires_grad_(), torch.ones_like(q))
        out = onchip.attention(dual, k, v, precise_delta=True)
        with pytest.raises(UnsupportedError, match="second derivatives.*precise_delta"):
            grad(out.sum(), dual)


def test_a_mapped_dimension_without_entries():
    none = torch.zeros(0, 1, 4, 2, 8)
    f = lambda q: onchip.attention(q, q, q, causal=True)
    assert func.vmap(f)(none).shape == none.shape
    assert func.vmap(func.grad(lambda q: f(q).sum()))(none).shape == none.shape
    twice = lambda q: func.jvp(func.grad(lambda q: f(q).pow(2).sum()), (q,), (q,))[1]
    assert func.vmap(twice)(none).shape == none.shape


def test_pages_have_no_derivative():
    pages = torch.tensor([[0]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="paged_attention has no"):
        func.hessian(lambda q: onchip.paged_attention(q, K, V, *pages).sum())(Q)


def test_a_gpu_refuses():
    problem = Problem(1, 512, 512, 8, 8, 128, 128, torch.bfloat16, torch.bfloat16, 0.1)
    for device in (DeviceInfo("cuda", "H200", (9, 0)), DeviceInfo("mps")):
        for kernel in (None, "tiled"):
            with pytest.raises(UnsupportedError, match=f"on the CPU only, not on {device.type}"):
                find_second_order(problem, device, kernel)
    for kernel in ("hopper", "triton"):
        with pytest.raises(UnsupportedError, match=f"{kernel} has no forward mode"):
            find_second_order(problem, DeviceInfo("cuda", "H200", (9, 0)), kernel)


def test_a_backend_with_tangents_alone_refuses():
    class TangentsAlone(type(get_backend("tiled"))):
        tangent_gradients = onchip.Backend.tangent_gradients

    onchip.register_backend("tangents_alone", TangentsAlone())
    try:
        q = Q.clone().requires_grad_()
        out = onchip.attention(q, K, V, kernel="tangents_alone")
        (dq,) = grad(out.sum(), q, create_graph=True)
        with pytest.raises(UnsupportedError, match="tangents_alone has no second derivatives"):
            dq.sum().backward()
    finally:
        onchip.unregister_backend("tangents_alone")


@pytest.mark.slow
@pytest.mark.parametrize("name", MAPPED)
def test_compiled_whole(name):
    """A transform inside of a compiled function."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, u: MAPPED[name](attend)(q, u), backend="aot_eager")
    assert_near(compiled(Q, THREE[1]), MAPPED[name](plain)(Q, THREE[1]))
