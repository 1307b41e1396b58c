"""Score functions as users of FlexAttention write them: equal to torch's evaluation of them,
with all gradients, or refused with a sentence.
"""

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.utils.checkpoint import checkpoint

import onchip
from onchip import UnsupportedError, score_mods
from onchip import testing as ot

BATCH, HEADS, ROWS, KEYS = 2, 4, 21, 27
_GENERATOR = torch.Generator().manual_seed(0)


def random(*sizes, dtype=torch.float64):
    return torch.randn(sizes, dtype=dtype, generator=_GENERATOR)


TABLE = random(HEADS, ROWS, KEYS).requires_grad_()
PER_HEAD = random(HEADS).abs().add(0.5).requires_grad_()
SCALAR = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
HALVES = random(HEADS, ROWS, KEYS).bfloat16().requires_grad_()
BYTES = torch.randint(-128, 128, (ROWS, KEYS), dtype=torch.int8, generator=_GENERATOR)
BITS = random(ROWS, KEYS) > 0.4
SPANS = torch.tensor([[0, 9], [3, 12], [5, 27], [0, 1]])
LEARNED = (TABLE, PER_HEAD, SCALAR, HALVES)


class Gate:
    def __call__(self, s, b, h, q, k):
        return s * PER_HEAD[h]

    def scale(self, s, b, h, q, k):
        return s + TABLE[h, q, k]


class Module(nn.Module):
    def forward(self, s, b, h, q, k):
        return self.training * s + PER_HEAD[h] * TABLE[h, q, 0]


def add_in_place(s, b, h, q, k):
    s += q - k
    s *= 0.1
    return s


def see_a_span(s, b, h, q, k):
    first, end = SPANS[h]
    return torch.where((k >= first) & (k < end), s, -float("inf"))


SERVED = {
    "bf16": lambda s, b, h, q, k: s + HALVES[h, q, k],
    "int8": lambda s, b, h, q, k: s + 0.01 * BYTES[q, k] + BYTES[q, k].int() * BYTES[q, 0] * 1e-4,
    "int8 with int64": lambda s, b, h, q, k: s + (BYTES[q, k] + q) * 0.01,
    "int8 in its range": lambda s, b, h, q, k: s + torch.maximum(BYTES[q, k], BYTES[0, k]) * 0.01,
    "bool": lambda s, b, h, q, k: torch.where(~BITS[q, k], s * BITS[0, k], s + BITS[q, 0]),
    "a fixed index": lambda s, b, h, q, k: s + TABLE[0][q, k] + TABLE[-1, q, k],
    "negative indices": lambda s, b, h, q, k: s + TABLE[h, q - ROWS, -1 - k],
    "a bool as index": lambda s, b, h, q, k: s + PER_HEAD[(q > k).int()],
    "a float as index": lambda s, b, h, q, k: s + PER_HEAD[s.long().clamp(0, HEADS - 1)],
    "a scalar": lambda s, b, h, q, k: s * SCALAR + SCALAR.exp(),
    "a view": lambda s, b, h, q, k: s + TABLE.reshape(-1)[h * ROWS * KEYS + k],
    "a row, iterated": lambda s, b, h, q, k: s + sum(SPANS[h]) * 0.1,
    "a row, unpacked": see_a_span,
    "where of numbers": lambda s, b, h, q, k: (
        s + torch.where(q > k, 1, 0.5) * torch.where(h < 2, 1, 2)
    ),
    "-inf": lambda s, b, h, q, k: torch.where(q > k, s, float("-inf")),
    "in place": add_in_place,
    "bools": lambda s, b, h, q, k: torch.where((q > 3) & (k < 9) | (k == 2) ^ (q < 1), s, 0.0),
    "abs, sum": lambda s, b, h, q, k: sum([abs(s), q * 0.1, k * 0.1]),
    "numbers of numpy": lambda s, b, h, q, k: (
        np.float64(0.5) * s + np.int64(2) * q + np.float32(1) - s * np.bool_(True)
    ),
    "a default": lambda s, b, h, q, k, c=3: s * c,
    "any arguments": lambda *a: a[0] * 2,
    "partial": functools.partial(lambda c, s, b, h, q, k, t: s * c + t[h], 3.0, t=PER_HEAD),
    "object": Gate(),
    "method": Gate().scale,
    "module": Module(),
    "activations": lambda s, b, h, q, k: (
        F.gelu(s) + F.silu(s) + F.leaky_relu(s - 0.1) + F.gelu(TABLE[h, q, k], approximate="tanh")
    ),
    "like": lambda s, b, h, q, k: torch.where(
        q > k, s, torch.full_like(s, -3) + torch.zeros_like(s)
    ),
    "isinf": lambda s, b, h, q, k: torch.where(torch.isinf(s / (k - 3)) | torch.isnan(s), 0.0, s),
    "to": lambda s, b, h, q, k: s + q.to(s.dtype) * k.type_as(s) * 0.1,
}


QKV = ot.make_qkv(BATCH, ROWS, KEYS, num_heads=HEADS, dtype=torch.float64)


def inputs():
    return [t.clone().requires_grad_() for t in QKV]


def results(fn, score_mod):
    """out and the gradients of q, k, v and of all captured tensors."""
    x = inputs()
    out = fn(*x, score_mod=score_mod)
    dout = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out, *torch.autograd.grad(out, [*x, *LEARNED], dout, allow_unused=True)]


@pytest.mark.parametrize("name", SERVED)
def test_a_function_equals_torchs_evaluation_of_it(name):
    got = results(onchip.attention, SERVED[name])
    want = results(lambda *x, **o: ot.oracle(*x, **o).out, SERVED[name])
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            tolerance = 1e-2 if a.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("value", [0.5, 1, True, SCALAR])
def test_a_constant_makes_all_scores_equal(value):
    q, k, v = inputs()
    out = onchip.attention(q, k, v, score_mod=lambda *_: value)
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand(out.shape))


class Straight(torch.autograd.Function):
    """round, with a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        return torch.round(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


def without_gradient(s, b, h, q, k):
    with torch.no_grad():
        return s * 2


REFUSED = {
    "if": (lambda s, b, h, q, k: s if q > k else s * 2, "branches on a value"),
    "and": (lambda s, b, h, q, k: torch.where(q > 3 and q < 9, s, 0.0), "branches on a value"),
    "chained": (lambda s, b, h, q, k: torch.where(3 < q < 9, s, 0.0), "branches on a value"),
    "max": (lambda s, b, h, q, k: max(s, 0.0), "torch.maximum"),
    "in": (lambda s, b, h, q, k: s if h in (0, 1) else -s, "branches on a value"),
    "float": (lambda s, b, h, q, k: s + float(q), "Python number"),
    "round": (lambda s, b, h, q, k: s + round(s), "Python number"),
    "a list": (lambda s, b, h, q, k: s * [1.0, 2.0][h], "Python number"),
    "a function in place": (lambda s, b, h, q, k: (torch.abs_(s), s)[1], "abs_, which is not"),
    "a method in place": (lambda s, b, h, q, k: (s.add_(1), s)[1], "add_ of a value"),
    "inplace=True": (lambda s, b, h, q, k: (F.relu(s, inplace=True), s)[1], "inplace=True"),
    "no_grad": (without_gradient, "mul under no_grad"),
    "an own gradient": (lambda s, b, h, q, k: Straight.apply(s), "autograd.Function"),
    "detach": (lambda s, b, h, q, k: s.detach(), "detach"),
    "int8 that wraps": (lambda s, b, h, q, k: s + BYTES[q, k] * BYTES[q, 0], "torch.int8.*int()"),
    "int8 of where": (
        lambda s, b, h, q, k: s + -torch.where(q > k, BYTES[q, k], 0),
        "neg of elements of torch.int8",
    ),
    "a reduction of numpy": (lambda s, b, h, q, k: np.add.reduce(s), "add.reduce"),
    "matmul": (lambda s, b, h, q, k: s + TABLE[h, q] @ TABLE[h, q], "matmul"),
    "dot": (lambda s, b, h, q, k: s + torch.dot(TABLE[h, q], TABLE[h, q]), "dot"),
    "a sum of a row": (lambda s, b, h, q, k: s + TABLE[h, q].sum(), "indexes 2 dimensions"),
    "an index of a value": (lambda s, b, h, q, k: s[0], "one number"),
    "iteration of a value": (lambda s, b, h, q, k: [*s][0], "one number"),
    "a slice": (lambda s, b, h, q, k: s + TABLE[:, q, k][h], "one a dimension"),
    "a float as index": (lambda s, b, h, q, k: s + PER_HEAD[q / 9], "not an integer"),
    "16 bits": (lambda s, b, h, q, k: s.to(torch.bfloat16), "torch.bfloat16"),
    "None": (lambda s, b, h, q, k: None, "NoneType"),
    "complex": (lambda s, b, h, q, k: s + 1j, "complex"),
    "complex elements": (
        lambda s, b, h, q, k: s + TABLE.to(torch.complex64)[h, q, k],
        "torch.complex64",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_named(name):
    score_mod, sentence = REFUSED[name]
    with pytest.raises(UnsupportedError, match=f"score_mod .*{sentence}"):
        onchip.attention(*inputs(), score_mod=score_mod)


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda s, b, h, q: s,
        lambda s, b, h, q, k, z: s,
        lambda s, b, h, q, k, *, z: s,
    ],
)
def test_a_function_of_other_arguments_is_a_type_error(score_mod):
    with pytest.raises(TypeError, match=r"called with \(score, b, h, q, k\)"):
        score_mods.trace(score_mod)


def test_a_type_error_inside_of_a_function_is_its_own():
    with pytest.raises(TypeError, match="^must be real"):
        score_mods.trace(lambda s, b, h, q, k: s * len("a") + functools.reduce(_fail, [1, 2]))


def _fail(*_):
    raise TypeError("must be real")


@pytest.mark.parametrize(
    "score_mod",
    [
        lambda s, b, h, q, k: s + TABLE.exp()[h, q, k],
        lambda s, b, h, q, k: s + torch.cat([PER_HEAD, PER_HEAD])[h],
        lambda s, b, h, q, k: s + (TABLE * 2).view(-1)[k],
        lambda s, b, h, q, k: s + (TABLE * 2)[0][q, k],
        lambda s, b, h, q, k: s + PER_HEAD.sort()[0][h],
        lambda s, b, h, q, k: s * PER_HEAD.mean(),
        lambda s, b, h, q, k: s * torch.rand(()),
        lambda s, b, h, q, k: s * PER_HEAD[0].item(),
        lambda s, b, h, q, k: s * (2.0 if PER_HEAD[0] > 0 else 1.0),
    ],
)
def test_a_kept_trace_computes_nothing_from_values_of_now(score_mod):
    """A call may: it traces the function again."""
    with pytest.raises(ValueError, match="traces it in every call"):
        score_mods.trace(score_mod)
    with torch.no_grad():
        onchip.attention(*inputs(), score_mod=score_mod)


@pytest.mark.parametrize(
    "take",
    [torch.Tensor.contiguous, torch.Tensor.double, lambda t: t.view(-1)[:KEYS], lambda t: t[0, 1]],
)
def test_a_kept_trace_sees_changes_through_views(take):
    table = TABLE.detach().clone()

    def score_mod(s, b, h, q, k):
        row = take(table)
        return s + (row[k] if row.dim() == 1 else row[h, q, k])

    kept, x = score_mods.trace(score_mod), inputs()
    before = onchip.attention(*x, score_mod=kept)
    table.mul_(2)
    after = onchip.attention(*x, score_mod=kept)
    assert torch.equal(after, onchip.attention(*x, score_mod=score_mod))
    assert not torch.equal(after, before)


def test_a_closure_may_change_between_calls():
    factor, x = [1.0], inputs()
    score_mod = lambda s, b, h, q, k: s * factor[0]
    outs = []
    for factor[0] in (1.0, 3.0):
        outs.append(onchip.attention(*x, score_mod=score_mod))
        want = onchip.attention(*x, softmax_scale=factor[0] * 64**-0.5)
        torch.testing.assert_close(outs[-1], want, rtol=0, atol=1e-12)
    assert not torch.equal(*outs)


def relative(table):
    """A learned bias by distance, of which the function computes a part."""
    return lambda s, b, h, q, k: torch.tanh(s) * table[h, q - k + KEYS] + table.exp()[h, 0]


def loss(table):
    return onchip.attention(*QKV, score_mod=relative(table)).square().sum()


def test_transforms_of_captured_tensors():
    table = random(HEADS, ROWS + KEYS)
    leaf = table.clone().requires_grad_()
    exact = ot.oracle(*QKV, score_mod=relative(leaf)).out.square().sum()
    want = torch.autograd.grad(exact, leaf)[0]
    kept = checkpoint(loss, leaf, use_reentrant=False)
    tables = torch.stack([table, table * 2])
    for got in (
        torch.func.grad(loss)(table),
        torch.vmap(torch.func.grad(loss))(tables)[0],
        torch.func.jacfwd(loss)(table),
        torch.autograd.grad(kept, leaf)[0],
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    each = torch.stack([loss(t) for t in tables])
    torch.testing.assert_close(torch.vmap(loss)(tables), each, rtol=0, atol=1e-10)


class Attention(nn.Module):
    """A module that traces its score function once."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(random(HEADS, ROWS + KEYS))
        self.kept = score_mods.trace(self.modify)

    def modify(self, s, b, h, q, k):
        return torch.tanh(s) * self.table[h, q - k + KEYS]

    def forward(self, q, k, v):
        return onchip.attention(q, k, v, score_mod=self.kept)


@pytest.mark.slow
def test_compiled_modules_have_the_gradient_of_a_kept_trace_for_any_length():
    module = Attention()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (ROWS, 13):
        q, k, v = inputs()
        x = q[:, :rows], k, v
        grads = []
        for fn in (compiled, lambda *x: ot.oracle(*x, score_mod=module.modify).out):
            grads += torch.autograd.grad(fn(*x).square().sum(), [q, k, v, module.table])
        for a, b in zip(grads[:4], grads[4:], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_export_has_one_op():
    module, x = Attention(), QKV
    program = torch.export.export(module, x)
    torch.testing.assert_close(program.module()(*x), module(*x), rtol=0, atol=1e-12)
    assert any("onchip.attention" in str(node.target) for node in program.graph.nodes)


def test_a_function_in_a_compiled_graph_is_refused():
    attend = lambda *x: onchip.attention(*x, score_mod=lambda s, b, h, q, k: s * 2)
    with pytest.raises(Unsupported, match=r"onchip\.score_mods\.trace"):
        torch.compile(attend, fullgraph=True, backend="eager")(*QKV)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_inputs_and_autocast(dtype):
    table = random(HEADS, ROWS + KEYS).to(dtype)
    x = [t.to(dtype) for t in QKV]
    exact = ot.oracle(*(t.double() for t in x), score_mod=relative(table.double())).out
    out = onchip.attention(*x, score_mod=relative(table))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-2)
    with torch.autocast("cpu", dtype):
        cast = onchip.attention(*(t.float() for t in x), score_mod=relative(table))
    assert cast.dtype == dtype
    torch.testing.assert_close(cast.double(), exact, rtol=0, atol=2e-2)


def test_inference_mode_traces_as_well():
    x = inputs()
    want = onchip.attention(*x, score_mod=relative(TABLE[:, 0].repeat(1, 2)))
    with torch.inference_mode():
        got = onchip.attention(*x, score_mod=relative(TABLE[:, 0].repeat(1, 2)))
    assert torch.equal(got, want)
    assert not got.requires_grad
