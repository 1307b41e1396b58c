"""The torch op: opcheck, compile, export, vmap, autocast, and autograd."""

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import onchip
import onchip.lab  # registers the kernels of the papers
from benchmarks import delta_accuracy
from onchip import masks
from onchip.core import torch_op
from onchip.core.functional import prepare_attention
from onchip.core.problem import Options, Tensors
from onchip.masks.deferred import DeferredRule

FP32 = torch.float32
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (7, 3)},
    "mask": {"mask": masks.causal() & masks.window(5, 0)},
    "softcap": {"softcap": 5.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05])},
    "bias": {"bias": torch.randn(1, 4, 1, 20)},
    "sinks": {"sinks": torch.randn(4)},
    "dropout": {"dropout_p": 0.25, "dropout_seed": 7},
    "stats": {"return_stats": True},
    "wide": {"out_dtype": torch.float32},
}


def qkv(grad=False, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    make = lambda heads: torch.randn(2, 20, heads, 16, generator=g).to(dtype).requires_grad_(grad)
    return make(4), make(2), make(2)


def op_arguments(options, grad=False):
    scalars = Options(**{n: x for n, x in options.items() if n in Options._fields})
    apart = {n: x for n, x in options.items() if n in ("mask", "dropout_seed")}
    tensors = {n: x for n, x in options.items() if n in Tensors._fields and n not in apart}
    (problem, _), x = prepare_attention(Tensors(*qkv(grad), **tensors), scalars, **apart)
    return torch_op._flatten(problem, x, None)


@pytest.mark.parametrize("name", OPTIONS)
def test_opcheck_forward(name):
    torch.library.opcheck(torch.ops.onchip.forward.default, op_arguments(OPTIONS[name]))


@pytest.mark.parametrize("name", OPTIONS)
def test_opcheck_backward(name):
    args = op_arguments(OPTIONS[name])
    out, lse, _ = torch.ops.onchip.forward.default(*args)
    saved = (torch.randn_like(out), torch.randn_like(lse), out, lse)
    torch.library.opcheck(torch.ops.onchip.backward.default, (*saved, *args))


@pytest.mark.parametrize("name", ["causal", "mask", "bias"])
def test_opcheck_attention(name):
    args = op_arguments(OPTIONS[name], grad=True)
    torch.library.opcheck(torch.ops.onchip.attention.default, (*args, False))


@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - {"dropout", "stats"}))
def test_opcheck_tangents(name):
    args = op_arguments(OPTIONS[name])
    inputs = [args[i] for i in torch_op._WITH_TANGENTS]
    tangents = [None if t is None else torch.randn_like(t) for t in inputs]
    torch.library.opcheck(torch.ops.onchip.tangents.default, (*tangents, *args))


def test_opcheck_split():
    out = torch.randn(2, 5, 3, 8)
    torch.library.opcheck(torch.ops.onchip.split.default, (out, torch.bfloat16))
    torch.library.opcheck(torch.ops.onchip.split.default, (out, torch.float32))


def first(result):
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("name", OPTIONS)
def test_compiles_without_a_graph_break(name):
    torch._dynamo.reset()  # each option compiles the same function anew
    options = dict(OPTIONS[name])
    if "mask" in options:  # built outside the compiled region
        options["mask"] = options["mask"].build(2, 4, 20, 20)
    fn = lambda q, k, v: first(onchip.attention(q, k, v, **options))
    compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
    eager, traced = qkv(grad=True), qkv(grad=True)
    expected, got = fn(*eager), compiled(*traced)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    expected.square().sum().backward()
    got.square().sum().backward()
    for a, b in zip(eager, traced, strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=0, atol=0)


def test_compiles_wide_heads():
    torch._dynamo.reset()
    fn = lambda *x: onchip.attention(*x, causal=True, return_lse=True)
    make = lambda heads, dim: torch.randn(2, 20, heads, dim, requires_grad=True)
    x = make(4, 576), make(1, 576), make(1, 512)
    expected, got = fn(*x), torch.compile(fn, backend="aot_eager", fullgraph=True)(*x)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    grads = [torch.autograd.grad(out.square().sum() + lse.sum(), x) for out, lse in (expected, got)]
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_compiles_packed_calls():
    cu = torch.tensor([0, 7, 20], dtype=torch.int32)
    fn = lambda q, k, v: onchip.varlen_attention(q, k, v, cu, cu, 13, 13, causal=True)
    x = tuple(t[0].contiguous() for t in qkv())
    compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*x), fn(*x), rtol=0, atol=0)


def test_compiles_calls_that_take_a_tensor_twice():
    """One cu_seqlens for queries and keys, keys that are the values, with a gradient."""
    cu = torch.tensor([0, 7, 20], dtype=torch.int32)
    fn = lambda q, k, cu: onchip.varlen_attention(q, k, k, cu, cu, 13, 13, causal=True)
    compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
    x = [torch.randn(20, 4, 16, requires_grad=True) for _ in range(2)]
    grads = [torch.autograd.grad(f(*x, cu).square().sum(), x) for f in (fn, compiled)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0)


def test_random_dropout_compiles():
    fn = lambda q, k, v: onchip.attention(q, k, v, dropout_p=0.5)
    out = torch.compile(fn, backend="aot_eager", fullgraph=True)(*qkv())
    assert out.shape == (2, 20, 4, 16)


def test_lengths_are_not_specialised():
    compiles = torch._dynamo.testing.CompileCounter()
    fn = torch.compile(
        lambda q, k, v: onchip.attention(q, k, v, causal=True),
        backend=compiles,
        fullgraph=True,
        dynamic=True,
    )
    for n in (5, 9, 33, 64, 129):
        q, k, v = torch.randn(3, 2, n, 2, 16)
        torch.testing.assert_close(fn(q, k, v), onchip.attention(q, k, v, causal=True))
    assert compiles.frame_count == 1


class Layer(torch.nn.Module):
    def forward(self, q, k, v):
        return onchip.attention(q, k, v, causal=True, window_size=(9, None))


def test_exports_with_a_dynamic_length():
    n = torch.export.Dim("n", min=2, max=512)
    program = torch.export.export(Layer(), qkv(), dynamic_shapes=({1: n}, {1: n}, {1: n}))
    x = [torch.randn(2, 77, heads, 16) for heads in (4, 2, 2)]
    torch.testing.assert_close(program.module()(*x), Layer()(*x))


# option and shape: (the tensor, its mapped dimension)
VMAPPED = {
    "mask of the batch": (lambda: masks.padding(torch.tensor([37, 150])), None),
    "mask of heads": (
        lambda: masks.mod(lambda b, h, q, k: (k + b) % 4 != h).build(2, 4, 150, 150),
        None,
    ),
    "mask of all": (lambda: masks.causal(), None),
    "mask tensor": (lambda: torch.rand(2, 1, 150, 150) > 0.3, None),
    "mask tensors": (lambda: torch.rand(2, 5, 1, 150, 150) > 0.3, 1),
    "mask tensors of rank 2": (lambda: torch.rand(150, 150, 5) > 0.3, 2),
    "mask spans": (lambda: torch.randint(150, (5, 2, 1, 150, 2)), 0),
    "bias of the batch": (lambda: torch.randn(2, 4, 1, 150), None),
    "bias of all": (lambda: torch.randn(1, 4, 1, 150), None),
    "bias mapped": (lambda: torch.randn(5, 1, 1, 150, 150), 0),
    "bias mapped of the batch": (lambda: torch.randn(2, 5, 4, 1, 150), 1),
    "alibi_slopes of the batch": (lambda: torch.rand(2, 4), None),
    "alibi_slopes of heads": (lambda: torch.rand(4), None),
    "alibi_slopes mapped": (lambda: torch.rand(5, 4), 0),
    "alibi_slopes mapped of the batch": (lambda: torch.rand(5, 2, 4), 0),
}


class TestVmap:
    def test_dense_forward(self):
        q, k, v = torch.randn(3, 5, 2, 9, 4, 16)
        fn = lambda q, k, v: onchip.attention(q, k, v, causal=True, return_lse=True)
        out, lse = torch.vmap(fn)(q, k, v)
        for i in range(5):
            expected = fn(q[i], k[i], v[i])
            torch.testing.assert_close((out[i], lse[i]), expected)

    def test_shared_keys_and_stats(self):
        q, (k, v) = torch.randn(2, 5, 9, 4, 16), torch.randn(2, 2, 9, 4, 16)
        fn = lambda q: onchip.attention(q, k, v, return_stats=True)
        out, stats = torch.vmap(fn, in_dims=1, out_dims=1)(q)
        for i in range(5):
            expected, expected_stats = fn(q[:, i])
            torch.testing.assert_close(out[:, i], expected)
            torch.testing.assert_close(stats.entropy[:, i], expected_stats.entropy)

    @pytest.mark.parametrize("name", VMAPPED)
    def test_tensors_with_and_without_a_batch(self, name):
        """Every tensor that may have a batch dimension, mapped and shared."""
        make, in_dims = VMAPPED[name]
        q, k, v = torch.randn(3, 5, 2, 150, 4, 8)
        given = make()

        def fn(q, k, v, given):
            return onchip.attention(q, k, v, **{name.split()[0]: given})

        result = torch.vmap(fn, in_dims=(0, 0, 0, in_dims))(q, k, v, given)
        for i in range(5):
            own = given if in_dims is None else given.select(in_dims, i)
            torch.testing.assert_close(result[i], fn(q[i], k[i], v[i], own))

    def test_gradients_of_each_entry(self):
        q, k, v = torch.randn(3, 5, 2, 20, 4, 16, dtype=torch.float64)
        mask = masks.padding(torch.tensor([7, 20])).build(2, 4, 20, 20)
        loss = lambda q, k: onchip.attention(q, k, v[0], mask=mask).pow(3).sum()
        dq, dk = torch.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None))(q, k[0])
        for i in range(5):
            x = q[i].clone().requires_grad_(), k[0].clone().requires_grad_()
            torch.testing.assert_close((dq[i], dk[i]), torch.autograd.grad(loss(*x), x))

    @pytest.mark.parametrize("name", ["dropout", "sinks", "packed", "paged"])
    def test_other_mapped_arguments_are_refused(self, name):
        q, k, v = torch.randn(3, 5, 2, 20, 4, 16)
        cu = torch.tensor([0, 20], dtype=torch.int32)
        table, seqlens = torch.zeros(2, 1, dtype=torch.int32), torch.full((2,), 9).int()
        calls = {
            "dropout": lambda q, k, v: onchip.attention(q, k, v, dropout_p=0.5, dropout_seed=7),
            "sinks": lambda q, k, v: onchip.attention(q, k, v, sinks=q[0, 0, :, 0]),
            "packed": lambda q, k, v: onchip.varlen_attention(q[0], k[0], v[0], cu, cu, 20, 20),
            "paged": lambda q, k, v: onchip.paged_attention(q, k, v, table, seqlens),
        }
        with pytest.raises(onchip.UnsupportedError, match="vmap serves dense calls"):
            torch.vmap(calls[name])(q, k, v)

    @pytest.mark.parametrize("mapped", [True, False])
    def test_gradients_of_bias(self, mapped):
        """Each entry has its own, whether the bias is mapped or shared."""
        q, k, v = torch.randn(3, 5, 2, 20, 4, 16)
        bias = torch.randn(5, 1, 1, 1, 20) if mapped else torch.randn(1, 1, 1, 20)
        gradient = torch.func.grad(lambda bias, *x: onchip.attention(*x, bias=bias).pow(2).sum())
        got = torch.vmap(gradient, in_dims=(0 if mapped else None, 0, 0, 0))(bias, q, k, v)
        for i in range(5):
            expected = gradient(bias[i] if mapped else bias, q[i], k[i], v[i])
            torch.testing.assert_close(got[i], expected)

    def test_gradients_of_packed_calls(self):
        q, k, v = torch.randn(3, 20, 4, 16)
        cu = torch.tensor([0, 7, 20], dtype=torch.int32)
        attend = lambda q: onchip.varlen_attention(q, k, v, cu, cu, 13, 13)
        douts = torch.randn(3, 20, 4, 16)
        _, vjp = torch.func.vjp(attend, q)
        expected = torch.stack([vjp(dout)[0] for dout in douts])
        torch.testing.assert_close(torch.vmap(vjp)(douts)[0], expected)


class TestTracedGraphs:
    """The graphs of torch.jit.trace and make_fx do not check their inputs."""

    TRACERS = {
        "jit.trace": lambda fn, *x: torch.jit.trace(fn, x, check_trace=False),
        "make_fx": lambda fn, *x: make_fx(fn)(*x),
    }

    @pytest.fixture(params=TRACERS)
    def trace(self, request):
        return self.TRACERS[request.param]

    def calls(self, *lengths):
        return [torch.randn(3, 2, n, 4, 16) for n in lengths]

    @pytest.mark.filterwarnings("ignore")
    def test_other_lengths_are_served(self, trace):
        fn = lambda q, k, v: onchip.attention(q, k, v, causal=True)
        short, long = self.calls(20, 33)
        torch.testing.assert_close(trace(fn, *short)(*long), fn(*long), rtol=0, atol=0)

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("mask", ["rule", "function", "tensor"])
    def test_masks_follow_the_lengths(self, trace, mask):
        rules = {"rule": masks.causal(), "function": lambda b, h, q, k: q >= k}
        short, long = self.calls(20, 33)
        if mask == "tensor":
            fn = lambda q, k, v, m: onchip.attention(q, k, v, mask=m)
            short, long = ((*x, torch.rand(x.shape[2], x.shape[2]) > 0.3) for x in (short, long))
        else:
            fn = lambda q, k, v: onchip.attention(q, k, v, mask=rules[mask])
        torch.testing.assert_close(trace(fn, *short)(*long), fn(*long), rtol=0, atol=0)

    @pytest.mark.filterwarnings("ignore")
    def test_tensors_that_do_not_fit_are_refused(self, trace):
        short, long = self.calls(20, 33)
        built = masks.causal().build(2, 4, 20, 20)
        graph = trace(lambda q, k, v: onchip.attention(q, k, v, mask=built), *short)
        with pytest.raises(Exception, match="does not fit scores"):
            graph(*long)
        graph = trace(lambda q, k, v: onchip.attention(q, k, v), *short)
        with pytest.raises(Exception, match="q has batch 1, k and v have batch 2"):
            graph(short[0][:1], *short[1:])
        with pytest.raises(Exception, match="traced for torch.float32"):
            graph(*(t.bfloat16().double() for t in short))

    def test_the_graph_of_a_forward_is_not_differentiated(self):
        (x,) = self.calls(20)
        graph = make_fx(lambda q, k, v: onchip.attention(q, k, v))(*x)
        with pytest.raises(onchip.UnsupportedError, match="traced without its gradient"):
            graph(x[0].requires_grad_(), *x[1:])

    def test_a_freed_mask_raises_its_name(self):
        mask = masks.causal()
        later = DeferredRule.of(mask, (2, 4, 20, 20), torch.device("cpu"))
        assert later.built() is mask.build(2, 4, 20, 20)
        with pytest.raises(ValueError, match="the mask of this graph was freed"):
            masks.mods.find_numbered(10**9)


class TestAutocast:
    def test_casts_the_inputs_and_not_the_kernel(self):
        q, k, v = qkv()
        with torch.autocast("cpu", torch.bfloat16):
            out = onchip.attention(q, k, v, kernel="tiled")
        lowered = (t.bfloat16() for t in (q, k, v))
        expected = onchip.attention(*lowered, kernel="tiled")
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, expected, rtol=0, atol=0)

    @pytest.mark.parametrize("kernel", ["tiled", "aten_cpu", "reference"])
    def test_backward_inside_autocast(self, kernel):
        inside, outside = qkv(True, torch.float64), qkv(True, torch.float64)
        with torch.autocast("cpu", torch.bfloat16):
            onchip.attention(*inside, kernel=kernel).sum().backward()
        onchip.attention(*outside, kernel=kernel).sum().backward()
        for a, b in zip(inside, outside, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0)


class TestEager:
    """Eager calls do not call the op, and give the same results."""

    @pytest.fixture
    def calls(self, monkeypatch):
        """The names of the ops that run."""
        names = []
        for name in ("_FORWARD", "_BACKWARD"):
            op = getattr(torch_op, name)
            call = lambda *args, name=name, op=op: (names.append(name), op(*args))[1]
            monkeypatch.setattr(torch_op, name, call)
        return names

    @pytest.mark.parametrize("name", OPTIONS)
    def test_eager_gradients_equal_the_gradients_of_the_op(self, name, calls, monkeypatch):
        results = {}
        for way in ("eager", "op"):
            monkeypatch.setattr(torch_op, "is_eager", lambda q, way=way: way == "eager")
            x = qkv(grad=True)
            out = first(onchip.attention(*x, **OPTIONS[name]))
            results[way] = out, *torch.autograd.grad(out.square().sum(), x)
            assert calls == ([] if way == "eager" else ["_FORWARD", "_BACKWARD"])
        torch.testing.assert_close(results["eager"], results["op"], rtol=0, atol=0)

    def test_dispatch_modes_see_the_op(self, calls):
        x = qkv(grad=True)
        with FlopCounterMode(display=False) as counter:
            onchip.attention(*x)
        assert calls == ["_FORWARD"]
        assert counter.get_total_flops() == 4 * 2 * 4 * 20 * 20 * 16

    def test_flop_counter(self):
        """Two products forward, five backward. Packed calls: pairs within sequences."""
        x, forward = qkv(grad=True), 4 * 2 * 4 * 20 * 20 * 16
        cu = torch.tensor([0, 7, 20], dtype=torch.int32)
        outside = onchip.attention(*x)
        with FlopCounterMode(display=False) as counter:
            onchip.attention(*x, causal=True).sum().backward()
            outside.sum().backward()
        assert counter.get_total_flops() == forward + 2 * forward * 5 // 2
        with FlopCounterMode(display=False) as counter, torch.inference_mode():
            onchip.varlen_attention(*(t[0] for t in x), cu, cu, 13, 13)
        assert counter.get_total_flops() == 4 * 4 * (7 * 7 + 13 * 13) * 16

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["plain", "mask", "sinks"])
    def test_the_backward_alone_compiles(self, name, calls):
        x = qkv(grad=True)
        out = onchip.attention(*x, **OPTIONS[name])
        expected = torch.autograd.grad(out.square().sum(), x, retain_graph=True)
        compile_graph = lambda graph: torch.compile(graph, backend="aot_eager")
        with torch._dynamo.compiled_autograd._enable(compile_graph):
            out.square().sum().backward()
        torch.testing.assert_close([t.grad for t in x], list(expected), rtol=0, atol=0)
        assert "_BACKWARD" in calls

    def test_saved_tensor_hooks(self):
        x = qkv(grad=True)
        packed = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
            out = onchip.attention(*x, sinks=torch.randn(4))
        assert len(packed) == 6 and any(t is x[0] for t in packed)  # q, k, v, sinks, out, lse
        out.sum().backward()

    def test_an_in_place_change_of_an_input_raises(self):
        q, k, v = qkv(grad=True)
        scaled = k * 2
        out = onchip.attention(q, scaled, v)
        scaled.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


class TestAutograd:
    def test_only_lse_gets_a_gradient(self):
        x = qkv(grad=True)
        _, lse = onchip.attention(*x, return_lse=True)
        lse.sum().backward()
        assert x[0].grad.abs().sum() > 0 and x[2].grad.abs().sum() == 0

    def test_create_graph_does_not_change_the_gradient(self):
        q, k, v = qkv(grad=True)
        loss = onchip.attention(q, k, v).square().sum()
        (expected,) = torch.autograd.grad(loss, q, retain_graph=True)
        (dq,) = torch.autograd.grad(loss, q, create_graph=True)
        assert dq.requires_grad and torch.equal(dq, expected)

    def test_an_expanded_dout(self):
        q, k, v = qkv(grad=True)
        onchip.attention(q, k, v).sum().backward()  # dout has stride 0
        expected = q.grad.clone()
        q.grad = None
        out = onchip.attention(q, k, v)
        out.backward(torch.ones_like(out))
        torch.testing.assert_close(q.grad, expected, rtol=0, atol=0)

    def test_stats_have_no_gradient(self):
        _, stats = onchip.attention(*qkv(grad=True), return_stats=True)
        assert not stats.entropy.requires_grad

    def test_the_backward_uses_the_drawn_seed(self):
        q, k, v = qkv(grad=True, dtype=torch.float64)
        torch.manual_seed(3)
        out = onchip.attention(q, k, v, dropout_p=0.5)
        out.backward(torch.ones_like(out))
        direction = torch.randn_like(v)
        torch.manual_seed(3)
        moved = onchip.attention(q, k, (v + 1e-3 * direction).detach(), dropout_p=0.5)
        slope = (moved - out).sum() / 1e-3  # linear in v
        torch.testing.assert_close(slope, (v.grad * direction).sum())


class TestOtherTensors:
    def test_meta_tensors_have_shapes(self):
        x = [t.to("meta").requires_grad_() for t in qkv()]
        out, lse = onchip.attention(*x, mask=masks.causal(), return_lse=True)
        out.sum().backward()
        assert out.is_meta and out.shape == (2, 20, 4, 16) and lse.shape == (2, 4, 20)
        assert x[1].grad.shape == (2, 20, 2, 16)

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
    def test_nested_tensors_are_refused(self, layout):
        nested = torch.nested.nested_tensor([torch.randn(n, 4, 16) for n in (5, 9)], layout=layout)
        with pytest.raises(onchip.UnsupportedError, match="q is a nested tensor.*varlen_attention"):
            onchip.attention(nested, nested, nested)

    def test_sparse_tensors_are_refused(self):
        q, k, v = qkv()
        with pytest.raises(onchip.UnsupportedError, match="q has layout torch.sparse_coo"):
            onchip.attention(q.to_sparse(), k, v)


EXPANDED = {
    "batch": lambda n, heads: torch.randn(1, n, heads, 16).expand(2, -1, -1, -1),
    "positions": lambda n, heads: torch.randn(2, 1, heads, 16).expand(-1, n, -1, -1),
    "heads": lambda n, heads: torch.randn(2, n, 1, 16).expand(-1, -1, heads, -1),
    "all": lambda n, heads: torch.randn(1, 1, 1, 16).expand(2, n, heads, -1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["aten_cpu", "tiled", "reference", "paper_v2"])
@pytest.mark.parametrize("name", EXPANDED)
def test_expanded_tensors_equal_their_copies(name, kernel, dtype):
    make, dout = EXPANDED[name], torch.randn(2, 33, 4, 16).to(dtype)
    x = [make(33, heads).to(dtype) for heads in (4, 2, 2)]
    results = []
    for given in (x, [t.contiguous() for t in x]):
        leaves = [t.detach().requires_grad_() for t in given]
        out = onchip.attention(*leaves, causal=True, kernel=kernel)
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", "qkv")
def test_overlapping_tensors_are_refused(name):
    """torch's kernels and conversions read them wrongly."""
    x = dict(zip("qkv", torch.randn(3, 2, 20, 4, 16), strict=True))
    x[name] = torch.randn(2000).as_strided((2, 20, 4, 16), (640, 32, 8, 1))
    with pytest.raises(ValueError, match=f"{name} has elements that share memory"):
        onchip.attention(**x)
    out = onchip.attention(**x | {name: x[name].contiguous()})
    assert out.isfinite().all()


def test_one_tensor_as_several_arguments_compiles():
    """q, k and v alike, and one cu_seqlens for queries and keys, without a graph break."""
    x = torch.randn(33, 2, 16, requires_grad=True)
    cu = torch.tensor([0, 12, 33], dtype=torch.int32)

    def loss(x, cu):
        return onchip.varlen_attention(x, x, x, cu, cu, 21, 21, causal=True).square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    (grad,), (expected,) = (torch.autograd.grad(f(x, cu), x) for f in (compiled, loss))
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-5)


def packed(q, k, v, **options):
    cu = torch.tensor([0, 77, 78, q.shape[1]], dtype=torch.int32)
    out = onchip.varlen_attention(q[0], k[0], v[0], cu, cu, 300, 300, **options)
    return (out[0][None], out[1][None]) if isinstance(out, tuple) else out[None]


PRECISE = {
    "plain": (onchip.attention, {}),
    "causal": (onchip.attention, {"causal": True}),
    "packed": (packed, {"causal": True}),
    "mask": (onchip.attention, {"mask": masks.causal() & masks.window(99, 0)}),
    "options": (onchip.attention, {"softcap": 9.0, "dropout_p": 0.1, "dropout_seed": 3}),
    "sinks": (onchip.attention, {"sinks": torch.zeros(2), "window_size": (50, 9)}),
    "bias": (onchip.attention, {"bias": torch.zeros(1, 2, 1, 199)}),
}


def ties(dtype=torch.bfloat16):
    *x, dout = delta_accuracy.winning_ties((1, 199, 2, 32)).to(dtype)
    return [t.requires_grad_() for t in x], dout


@pytest.mark.parametrize("kernel", [None, "tiled", "reference"])
@pytest.mark.parametrize("name", PRECISE)
def test_precise_delta_is_the_gradient_of_the_unrounded_out(name, kernel):
    """Also with a gradient of lse, and with options that enter delta. At most a tenth of the error
    without precise_delta remains: the rounding of the gradients.
    """
    attend, options = PRECISE[name]
    x, dout = ties()
    extra = [options[n].clone().requires_grad_() for n in ("sinks", "bias") if n in options]
    given = options | dict(zip([n for n in ("sinks", "bias") if n in options], extra, strict=True))

    def gradients(**how):
        out, lse = attend(*x, **given, **how, kernel=kernel, return_lse=True)
        return torch.autograd.grad((out, lse), [*x, *extra], (dout.to(out.dtype), 0.01 * lse))

    plain, precise, wide = gradients(), gradients(precise_delta=True), gradients(out_dtype=FP32)
    for i, exact in enumerate(wide):
        lost, left = ((g[i] - exact).float().norm() for g in (plain, precise))
        assert i == 2 or left <= 0.1 * lost  # dv needs no delta
    assert (precise[0] - wide[0]).norm() < 1e-3 * wide[0].norm()


@pytest.mark.parametrize("name", ["causal", "mask", "sinks"])
def test_precise_delta_compiles(name):
    torch._dynamo.reset()
    options = dict(PRECISE[name][1])
    if "mask" in options:
        options["mask"] = options["mask"].build(1, 2, 199, 199)
    fn = lambda *x: onchip.attention(*x, precise_delta=True, **options)
    compiled = torch.compile(fn, backend="aot_eager", fullgraph=True)
    x, dout = ties()
    outs = fn(*x), compiled(*x)
    torch.testing.assert_close(*outs, rtol=0, atol=0)
    grads = [torch.autograd.grad(out, x, dout) for out in outs]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0)


@pytest.mark.slow
def test_inductor_does_not_cancel_the_rounding():
    """Inlined, Inductor would cancel the round-trip to 16 bits, and the residual would be zero."""
    torch._dynamo.reset()
    x, dout = ties()
    fn = lambda *x: onchip.attention(*x, precise_delta=True)
    compiled = torch.compile(fn, fullgraph=True)
    calls = onchip.attention, fn, compiled
    plain, precise, traced = (torch.autograd.grad(call(*x), x, dout)[0] for call in calls)
    assert (traced - precise).norm() <= 0.01 * (plain - precise).norm()


def test_precise_delta_of_fake_tensors():
    with FakeTensorMode():
        x = [torch.empty(2, 19, 2, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        out, lse = onchip.attention(*x, precise_delta=True, return_lse=True)
        dq, _, _ = torch.autograd.grad(out, x, torch.empty_like(out))
    assert out.dtype == dq.dtype == torch.bfloat16 and lse.dtype == FP32
    assert out.shape == dq.shape == (2, 19, 2, 16)


def saved_bytes(attend):
    """(out, bytes of the distinct tensors that autograd saves)."""
    kept = {}

    def pack(t):
        kept[t.data_ptr()] = t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = attend()
    return out, sum(kept.values())


def test_precise_delta_saves_one_more_out():
    x, _ = ties()
    out, plain = saved_bytes(lambda: onchip.attention(*x))
    _, precise = saved_bytes(lambda: onchip.attention(*x, precise_delta=True))
    assert precise - plain == out.numel() * 2


def test_precise_delta_without_a_gradient_is_the_plain_call():
    x, _ = ties()
    with torch.no_grad():
        plain, precise = onchip.attention(*x), onchip.attention(*x, precise_delta=True)
    torch.testing.assert_close(precise, plain, rtol=0, atol=0)


@pytest.mark.parametrize(
    "dtype, how", [(torch.float32, {}), (torch.bfloat16, {"out_dtype": torch.float32})]
)
def test_precise_delta_saves_nothing_if_out_is_not_rounded(dtype, how):
    x, dout = ties(dtype)
    calls = [lambda p=p: onchip.attention(*x, precise_delta=p, **how) for p in (False, True)]
    (plain, kept), (precise, also_kept) = map(saved_bytes, calls)
    assert kept == also_kept
    grads = [torch.autograd.grad(out, x, dout.to(out.dtype)) for out in (plain, precise)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0)
