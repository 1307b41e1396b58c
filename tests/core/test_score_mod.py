"""score_mod of the public functions on the CPU: equal to the formula and to the built-in options,
differentiable in everything that it indexes, in every transform; what is not served raises.
"""

import itertools

import pytest
import torch
from torch import func
from torch.autograd import grad, gradcheck, gradgradcheck

import onchip
import onchip.testing as ot
from onchip import UnsupportedError, masks
from onchip.kernels.cpu.score_mod import ModifiedTile
from onchip.score_mods import trace
from tests.largest_tensor import LargestTensor
from tests.score_mods.functions import CASES, make_bias, make_gate, make_relative, make_softcap

F64 = torch.float64
KERNELS = "tiled", "reference"


def draw(*shape, dtype=F64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype)


def make_call(name, dtype, seqlen_q=17, seqlen_k=23):
    q, k, v = ot.make_qkv(
        2, seqlen_q, seqlen_k, num_heads=4, num_kv_heads=2, head_dim=16, head_dim_v=8, dtype=dtype
    )
    make, tensors = CASES[name]
    captured = tensors(4, seqlen_q, seqlen_k, draw)
    return q, k, v, make, captured


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_by_the_rule(name, kernel):
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, make, captured = make_call(name, dtype)
        options = {"score_mod": make(*captured), "causal": name != "documents", "kernel": kernel}
        ot.assert_accurate(onchip.attention, q, k, v, grad=True, return_lse=True, **options)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_captured_tensors(name, kernel):
    q, k, v, make, captured = make_call(name, F64)
    learned = [t.requires_grad_() for t in captured if t.is_floating_point()]
    options = {"score_mod": make(*captured), "softcap": 9.0, "mask": masks.causal()}
    dout = draw(*q.shape[:3], 8)
    got, want = (
        grad((f(q, k, v, **options) * dout).sum(), learned) if learned else ()
        for f in (
            lambda *x, **o: onchip.attention(*x, **o, kernel=kernel),
            lambda *x, **o: ot.oracle(*x, **o).out,
        )
    )
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_packed_sequences_count_from_their_first_token():
    """b is the number of the sequence."""
    x = ot.make_packed([5, 0, 9], [7, 2, 9], num_heads=2, head_dim=8, dtype=F64)
    table = draw(3, 2, 9, 9)
    mod = lambda s, b, h, q, k: s + table[b, h, q, k]
    for kernel in KERNELS:
        ot.assert_accurate(
            onchip.varlen_attention, *x[:3], **x.options, score_mod=mod, kernel=kernel, grad=True
        )


BUILT_IN = {
    "softcap": (lambda t: make_softcap(), {"softcap": 2.0}),
    "alibi": (
        lambda t: lambda s, b, h, q, k: s - t["alibi_slopes"][h] * (q + 6 - k).abs(),
        {"alibi_slopes": (4,)},
    ),
    "alibi of batch": (
        lambda t: lambda s, b, h, q, k: s - t["alibi_slopes"][b, h] * (q + 6 - k).abs(),
        {"alibi_slopes": (2, 4)},
    ),
    "bias": (lambda t: make_bias(t["bias"][0]), {"bias": (1, 4, 17, 23)}),
    "bias of keys": (
        lambda t: lambda s, b, h, q, k: s + t["bias"][b, 0, 0][k],
        {"bias": (2, 1, 1, 23)},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, F64])
@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_options_have_the_same_bits(name, dtype):
    make, options = BUILT_IN[name]
    options = {n: draw(*x, dtype=dtype) if isinstance(x, tuple) else x for n, x in options.items()}
    q, k, v = make_call("softcap", dtype)[:3]
    for kernel in KERNELS:
        results = [
            onchip.attention(q, k, v, return_lse=True, kernel=kernel, causal=True, **o)
            for o in (options, {"score_mod": make(options)})
        ]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_all_options_at_once():
    q, k, v = make_call("softcap", F64)[:3]
    gate = draw(23)
    options = {
        "score_mod": make_gate(gate), "causal": True, "window_size": (9, None), "softcap": 3.0,
        "mask": masks.mod(lambda b, h, q, k: (q + k + h) % 3 != 0), "bias": draw(2, 4, 17, 23),
        "alibi_slopes": draw(4).abs(), "sinks": draw(4), "softmax_scale": 0.3, "return_stats": True,
        "dropout_p": 0.2, "dropout_seed": 7,
    }  # fmt: skip
    for kernel in KERNELS:
        ot.assert_accurate(onchip.attention, q, k, v, grad=True, kernel=kernel, **options)


def attend(q, k, v, table, gate):
    """Two captured tensors, one of them indexed by an expression."""
    relative, gated = make_relative(table), make_gate(gate)
    mod = lambda s, b, h, q, k: gated(relative(s, b, h, q, k), b, h, q, k)
    return onchip.attention(q, k, v, score_mod=mod, causal=True, return_lse=True)


def formula(q, k, v, table, gate):
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    h, i, j = (
        torch.arange(n).view(-1, *[1] * m) for n, m in zip(s.shape[1:], (2, 1, 0), strict=True)
    )
    s = make_gate(gate)(make_relative(table)(s, 0, h, i, j), 0, h, i, j)
    s = s.masked_fill(j > i + s.shape[3] - s.shape[2], -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v), s.logsumexp(-1)


INPUTS = draw(2, 5, 4, 6), draw(2, 7, 2, 6), draw(2, 7, 2, 3), draw(17, 4), draw(7)
DIRECTIONS = tuple(draw(*x.shape, seed=5) for x in INPUTS)
EVERY = tuple(range(5))


def loss(f):
    return lambda *x: sum((y**3).sum() for y in f(*x))


TRANSFORMS = {
    "jvp": lambda f: func.jvp(f, INPUTS, DIRECTIONS)[1],
    "jacfwd": lambda f: func.jacfwd(f, 3)(*INPUTS),
    "jacrev": lambda f: func.jacrev(f, 4)(*INPUTS),
    "vjp": lambda f: func.vjp(loss(f), *INPUTS)[1](torch.tensor(1.0, dtype=F64)),
    "jvp of grad": lambda f: func.jvp(func.grad(loss(f), EVERY), INPUTS, DIRECTIONS)[1],
    "grad of jvp": lambda f: func.grad(
        lambda *x: func.jvp(loss(f), x, DIRECTIONS)[1] ** 2, EVERY
    )(*INPUTS),
    "hessian": lambda f: func.hessian(loss(f), 3)(*INPUTS),
    "vmap of captured": lambda f: func.vmap(f, (None, None, None, 0, None))(
        *INPUTS[:3], draw(3, 17, 4), INPUTS[4]
    ),
    "vmap of q": lambda f: func.vmap(f, (0, *[None] * 4))(draw(3, 2, 5, 4, 6), *INPUTS[1:]),
    "vmap of grad": lambda f: func.vmap(func.grad(loss(f), 3), (None, None, None, 0, None))(
        *INPUTS[:3], draw(3, 17, 4), INPUTS[4]
    ),
    "vmap of jvp": lambda f: func.vmap(
        lambda u: func.jvp(lambda t: f(*INPUTS[:3], t, INPUTS[4]), INPUTS[3:4], (u,))[1]
    )(draw(2, 17, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name):
    check_transform(TRANSFORMS[name])


of_q = lambda f, *rest: lambda q: loss(f)(q, *(rest or INPUTS[1:]))

# Derivatives in which score_mod's tensors are constants.
CONSTANT = {
    "backward": lambda f: grad(of_q(f)(leaf := INPUTS[0].clone().requires_grad_()), leaf),
    "grad": lambda f: func.grad(of_q(f))(INPUTS[0]),
    "vmap of grad": lambda f: func.vmap(func.grad(of_q(f)))(draw(2, 2, 5, 4, 6)),
    "hessian": lambda f: func.hessian(of_q(f))(INPUTS[0]),
    "jvp of grad": lambda f: func.jvp(func.grad(of_q(f)), INPUTS[:1], DIRECTIONS[:1])[1],
    "grad of grad": lambda f: func.grad(lambda q: func.grad(of_q(f))(q).square().sum())(INPUTS[0]),
    "grad of jvp": lambda f: func.grad(
        lambda q: func.jvp(of_q(f), (q,), DIRECTIONS[:1])[1] ** 2
    )(INPUTS[0]),
    "grad of jvp in tensors": lambda f: func.grad(
        lambda q: func.jvp(lambda t: of_q(f, *INPUTS[1:3], t, INPUTS[4])(q), INPUTS[3:4],
                           DIRECTIONS[3:4])[1] ** 2
    )(INPUTS[0]),
    "create_graph": lambda f: grad(
        grad(of_q(f)(leaf := INPUTS[0].clone().requires_grad_()), leaf, create_graph=True)[0]
        .square().sum(), leaf
    ),
}  # fmt: skip

# The same at one level of several, of which another needs their gradients.
CONSTANT_INSIDE = {
    "grad in tensors of grad": lambda f: func.grad(
        lambda t: func.grad(of_q(f, *INPUTS[1:3], t, INPUTS[4]))(INPUTS[0]).square().sum()
    )(INPUTS[3]),
    "jvp in tensors of grad": lambda f: func.jvp(
        lambda t: func.grad(of_q(f, *INPUTS[1:3], t, INPUTS[4]))(INPUTS[0]),
        INPUTS[3:4], DIRECTIONS[3:4],
    )[1],
    "grad in tensors of jvp": lambda f: func.grad(
        lambda t: func.jvp(of_q(f, *INPUTS[1:3], t, INPUTS[4]), INPUTS[:1], DIRECTIONS[:1])[1]
    )(INPUTS[3]),
    "hessian in both": lambda f: func.jacfwd(
        func.grad(lambda t: of_q(f, *INPUTS[1:3], t, INPUTS[4])(INPUTS[0]))
    )(INPUTS[3]),
}  # fmt: skip


def check_transform(transform):
    flat = lambda x: [x] if isinstance(x, torch.Tensor) else [t for y in x for t in flat(y)]
    got, want = (flat(transform(f)) for f in (attend, formula))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CONSTANT)
def test_constant_tensors_have_no_gradient_computed(name, monkeypatch):
    def refuse(*args):
        raise AssertionError("a gradient that is not needed")

    monkeypatch.setattr(ModifiedTile, "_add_at", refuse)
    check_transform(CONSTANT[name])


@pytest.mark.parametrize("name", CONSTANT_INSIDE)
def test_tensors_that_are_constant_at_one_level(name):
    check_transform(CONSTANT_INSIDE[name])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_computes_no_gradient_of_constant_tensors(kernel, monkeypatch):
    """Neither in its forward, with gradients of q alone. In the second call the same tensor has
    one: the two calls share no plan.
    """
    added = []
    add_at = ModifiedTile._add_at
    monkeypatch.setattr(ModifiedTile, "_add_at", lambda *a: (added.append(1), add_at(*a)))
    q, k, v, make, (bias,) = make_call("bias", F64)
    q.requires_grad_()
    f = lambda: onchip.attention(q, k, v, score_mod=make(bias), kernel=kernel).square().sum()
    (first,) = grad(f(), q)
    assert not added
    bias.requires_grad_()
    second, dbias = grad(f(), (q, bias))
    assert added and torch.equal(first, second) and dbias.abs().sum() > 0
    bias.requires_grad_(False)
    added.clear()
    assert torch.equal(grad(f(), q)[0], first) and not added


def test_finite_differences():
    leaves = [x.clone().requires_grad_() for x in INPUTS]
    # away from the kinks of clamp: indices are integers, and have no derivative
    assert gradcheck(attend, leaves, fast_mode=True, check_forward_ad=True)
    assert gradgradcheck(attend, leaves, fast_mode=True)


def test_vmap_gives_each_entry_its_own_batch_index():
    """Folded into the batch, entries would get others."""
    table = draw(2, 7)
    mod = lambda s, b, h, q, k: s * table[b, k]
    f = lambda q: onchip.attention(q, *INPUTS[1:3], score_mod=mod)
    q = draw(3, 2, 5, 4, 6)
    assert torch.equal(func.vmap(f)(q), torch.stack([f(x) for x in q]))
    with pytest.raises(UnsupportedError, match="without dropout"):
        func.vmap(
            lambda q: onchip.attention(
                q, *INPUTS[1:3], score_mod=mod, dropout_p=0.5, dropout_seed=1
            )
        )(q)


class TestCompile:
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_a_kept_trace_is_one_graph(self, backend):
        """With gradients to the tensor that it indexes, which are read when the graph runs."""
        q, k, v = (x.float() for x in INPUTS[:3])
        table = draw(17, 4, dtype=torch.float32).requires_grad_()
        mod = trace(make_relative(table))
        f = lambda q: onchip.attention(q, k, v, score_mod=mod, causal=True).square().sum()
        compiled = torch.compile(f, backend=backend, fullgraph=True)
        for _ in range(2):
            assert torch.equal(compiled(q), f(q))
            a, b = (grad(g(q), table)[0] for g in (compiled, f))
            torch.testing.assert_close(a, b)
            with torch.no_grad():
                table.mul_(1.5)

    def test_a_graph_computes_no_gradient_of_constant_tensors(self, monkeypatch):
        monkeypatch.setattr(ModifiedTile, "_add_at", None)
        mod = trace(make_relative(draw(17, 4)))
        f = lambda q: onchip.attention(q, *INPUTS[1:3], score_mod=mod).square().sum()
        q = INPUTS[0].clone().requires_grad_()
        compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(grad(compiled(q), q), grad(f(q), q))

    def test_a_function_needs_a_kept_trace_in_one_graph(self):
        """With graph breaks the call is eager."""
        q, k, v = INPUTS[:3]
        f = lambda q: onchip.attention(q, k, v, score_mod=make_softcap())
        assert torch.equal(torch.compile(f, backend="eager")(q), f(q))
        torch._dynamo.reset()  # otherwise this frame is skipped from now on
        with pytest.raises(Exception, match=r"onchip.score_mods.trace\(score_mod\)"):
            torch.compile(f, backend="eager", fullgraph=True)(q)


def test_an_index_out_of_range_raises_where_it_is_visible():
    q, k, v = (torch.randn(1, 6, 2, 8) for _ in range(3))
    table = torch.randn(6)
    mod = lambda s, b, h, q, k: s + table[q - k]
    onchip.attention(q, k, v, score_mod=mod)  # from -5 on, negative indices count from the end
    far = lambda s, b, h, q, k: s + table[q + 3 - k]
    with pytest.raises(IndexError, match=r"shape \(6,\) by \d in dimension 0"):
        onchip.attention(q, k, v, score_mod=far)
    visible = onchip.attention(q, k, v, score_mod=far, mask=lambda b, h, q, k: q - k < 3)
    assert torch.isfinite(visible).all()


def test_no_temporary_is_larger_than_a_tile():
    q, k, v = (torch.randn(1, 4096, 1, 8, requires_grad=True) for _ in range(3))
    table = torch.randn(8191, requires_grad=True)
    mod = lambda s, b, h, q, k: s + table[q - k + 4095]
    with LargestTensor() as largest:
        onchip.attention(q, k, v, score_mod=mod).sum().backward()
    assert largest.elements <= 4096 * 4096 // 16


def test_other_kernels_and_functions_refuse_it():
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    with pytest.raises(UnsupportedError, match="'aten_cpu' cannot .* has no score_mod"):
        onchip.attention(q, k, v, score_mod=make_softcap(), kernel="aten_cpu")
    with pytest.raises(TypeError, match=r"did you mean .*score_mod of attention\(\)"):
        onchip.paged_attention(q, k, v, None, None, score_mod=make_softcap())
    with pytest.raises(TypeError, match="parallel"):
        onchip.parallel.context_parallel_attention(q, k, v, score_mod=make_softcap())


def test_weights_of_rows():
    q, k, v = (x[:, :, :2] for x in INPUTS[:3])
    mod = make_gate(INPUTS[4])
    _, lse = onchip.attention(q, k, v, score_mod=mod, return_lse=True)
    weights = onchip.attention_weights(q, k, lse, [0, 3], score_mod=mod)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 2, dtype=F64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, F64])
def test_dtypes_of_captured_tensors(dtype):
    """Two tensors of floats of different types, and integers of different types."""
    q, k, v = (x.float() for x in INPUTS[:3])
    slopes, bias = draw(4, dtype=dtype).requires_grad_(), draw(7, dtype=torch.float32)
    small, flags = torch.arange(7, dtype=torch.int8) % 3, torch.arange(7) % 2 == 0
    mod = lambda s, b, h, i, j: torch.where(flags[j], s * slopes[h] + bias[j], s + small[i])
    out = onchip.attention(q, k, v, score_mod=mod)
    wide = slopes.detach().double().requires_grad_()
    h, i, j = torch.arange(4).view(-1, 1, 1), torch.arange(5)[:, None], torch.arange(7)
    s = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)).double() * 6**-0.5
    s = torch.where(flags[j], s * wide[h] + bias[j], s + small[i])
    want = torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v.repeat_interleave(2, 2).double())
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
    a, b = grad(out.sum(), slopes)[0], grad(want.sum(), wide)[0]
    assert a.dtype == dtype
    torch.testing.assert_close(a.double(), b, rtol=2e-2 if dtype.itemsize == 2 else 1e-4, atol=1e-4)


def test_explain_names_the_kernel():
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    text = str(onchip.explain(q, k, v, score_mod=make_softcap()))
    assert "served by   tiled" in text and "aten_cpu" in text and "has no score_mod" in text
    assert "score_mod of 5 operations" in text


def test_kernels_agree_on_random_options():
    q, k, v = make_call("gate", F64)[:3]
    gate = draw(23).requires_grad_()
    for causal, window, sinks in itertools.product((False, True), (None, 4), (None, draw(4))):
        options = {"causal": causal, "window_size": (window, None), "sinks": sinks}
        grads = []
        for kernel in KERNELS:
            out = onchip.attention(q, k, v, score_mod=make_gate(gate), kernel=kernel, **options)
            grads.append(grad(out.square().sum(), gate)[0])
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)
