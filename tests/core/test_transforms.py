"""Every transform of torch over every public function, eager and compiled: equal to
the formula in plain torch, or refused with a sentence. A silent zero tangent is a failure: it looks
like a result.
"""

import re
import warnings

import pytest
import torch
import torch.autograd.functional as functional
from torch import func
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import onchip
from onchip.parallel import context_parallel_attention, run_ranks, tree_attention

F64 = torch.float64
GENERATOR = torch.Generator().manual_seed(0)


def draw(*shape):
    return torch.randn(*shape, dtype=F64, generator=GENERATOR)


Q, K, V, TANGENT = draw(1, 3, 2, 4), draw(1, 5, 2, 4), draw(1, 5, 2, 4), draw(1, 3, 2, 4)
OUTS, LSES = [draw(1, 3, 2, 4) for _ in range(2)], [draw(1, 2, 3) for _ in range(2)]
CU_Q, CU_K = (torch.tensor([0, n], dtype=torch.int32) for n in (3, 5))
PAGES = torch.tensor([[2, 0, 1]], dtype=torch.int32)
CACHE_SEQLENS = torch.tensor([5], dtype=torch.int32)
LSE = torch.einsum("bqhd,bkhd->bhqk", Q, K).mul(0.5).logsumexp(-1)


def in_pages(x):
    pages = x.new_zeros(3, 2, 2, 4)
    pages[PAGES[0].long()] = torch.cat([x[0], x.new_zeros(1, 2, 4)]).unflatten(0, (3, 2))
    return pages


K_PAGES, V_PAGES = in_pages(K), in_pages(V)


def scores(q):
    return torch.einsum("bqhd,bkhd->bhqk", q, K) * 0.5


def formula(q, seen=None):
    s = scores(q)
    s = s if seen is None else s.masked_fill(~seen, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), V)


def causal_formula(q):
    return formula(q, torch.ones(3, 5).tril(2).bool())


def merge_formula(q):
    lses = torch.stack([LSES[0], LSES[1] + q.sum(-1).transpose(1, 2)])
    weights = lses.softmax(0).transpose(-1, -2)[..., None]
    return (weights * torch.stack([OUTS[0] * q, OUTS[1]])).sum(0)


def of_one_rank(call):
    return lambda q: run_ranks(1, lambda comm: call(q, comm))[0]


def ranks(strategy):
    keys, values = K[:, :3], V[:, :3]
    attend = of_one_rank(
        lambda q, comm: context_parallel_attention(q, keys, values, comm, strategy=strategy)
    )

    def plain(q):
        s = torch.einsum("bqhd,bkhd->bhqk", q, keys) * 0.5
        return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), values)

    return attend, plain, "gradient"


def paged(call):
    def attend(q):
        return call(q, K_PAGES, V_PAGES, PAGES, CACHE_SEQLENS, causal=False)

    return attend, formula, "value"


# (function of q, formula, which derivatives it has: "all", the "second", only the "gradient", or
# only its "value")
FUNCTIONS = {
    "attention": (
        lambda q: onchip.attention(q, K, V, causal=True),
        causal_formula,
        "second",
    ),
    "lse": (
        lambda q: onchip.attention(q, K, V, return_lse=True)[1],
        lambda q: scores(q).logsumexp(-1),
        "second",
    ),
    "varlen_attention": (
        lambda q: onchip.varlen_attention(q[0], K[0], V[0], CU_Q, CU_K, 3, 5)[None],
        formula,
        "second",
    ),
    "paged_attention": paged(onchip.paged_attention),
    "cascade_attention": paged(onchip.cascade_attention),
    "offload_attention": (lambda q: onchip.offload_attention(q, (K, V)), formula, "value"),
    "merge_states": (
        lambda q: onchip.merge_states(
            [OUTS[0] * q, OUTS[1]], [LSES[0], LSES[1] + q.sum(-1).transpose(1, 2)]
        )[0],
        merge_formula,
        "all",
    ),
    "attention_weights": (
        lambda q: onchip.attention_weights(q, K, LSE, [0, 2]),
        lambda q: (scores(q) - LSE[..., None]).exp()[:, :, [0, 2]],
        "all",
    ),
    "ring": ranks("ring"),
    "ulysses": ranks("ulysses"),
    "allgather": ranks("allgather"),
    "tree_attention": (
        of_one_rank(lambda q, comm: tree_attention(q, K, V, comm, causal=False)),
        formula,
        "value",
    ),
}


def cubed(f):
    return lambda q: (f(q) ** 3).sum()


def dual(f):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(Q, TANGENT))).tangent


def double_backward(f, dout_requires_grad):
    """The example of a gradient penalty: w.grad has terms through q alone."""
    w = torch.eye(4, dtype=F64, requires_grad=True)
    x = Q.clone().requires_grad_()
    y = f(x @ w)
    dout = torch.ones_like(y).requires_grad_(dout_requires_grad)
    (g,) = torch.autograd.grad(y, x, dout, create_graph=True)
    return torch.autograd.grad(g.pow(2).sum(), w, allow_unused=True, materialize_grads=True)[0]


def checkpointed(f, reentrant):
    x = Q.clone().requires_grad_()
    cubed(lambda x: checkpoint(f, x, use_reentrant=reentrant))(x).backward()
    return x.grad


class Module(torch.nn.Module):
    def __init__(self, f, w=None):
        super().__init__()
        self.f, self.w = f, w

    def forward(self, q):
        return self.f(q if self.w is None else q @ self.w)


def by_functional_call(f):
    module = Module(f, torch.nn.Parameter(torch.eye(4, dtype=F64)))
    loss = lambda w: func.functional_call(module, {"w": w}, (Q,)).pow(2).sum()
    return func.grad(loss)(torch.eye(4, dtype=F64))


def jit_traced(f):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(f, (Q,), check_trace=False)(TANGENT)


TWO = torch.stack([Q, TANGENT])
# name: (which derivative, its value for f, is it a transform of torch.func, which compile whole)
TRANSFORMS = {
    "vmap": ("value", lambda f: torch.vmap(f)(TWO), True),
    "jit.trace": ("value", jit_traced, False),
    "make_fx": ("value", lambda f: make_fx(lambda q: f(q))(Q)(TANGENT), False),
    "export": ("value", lambda f: torch.export.export(Module(f), (Q,)).module()(TANGENT), False),
    "grad": ("gradient", lambda f: func.grad(cubed(f))(Q), True),
    "vjp": ("gradient", lambda f: func.vjp(f, Q)[1](torch.ones_like(f(Q)))[0], True),
    "jacrev": ("gradient", lambda f: func.jacrev(f)(Q), True),
    "vmap(grad)": ("gradient", lambda f: torch.vmap(func.grad(cubed(f)))(TWO), True),
    "grad(vmap)": (
        "gradient",
        lambda f: func.grad(lambda x: torch.vmap(cubed(f))(x).sum())(TWO),
        True,
    ),
    "functional_call": ("gradient", by_functional_call, True),
    "checkpoint": ("gradient", lambda f: checkpointed(f, False), False),
    "checkpoint(reentrant)": ("gradient", lambda f: checkpointed(f, True), False),
    "functional.vjp": ("gradient", lambda f: functional.vjp(cubed(f), Q)[1], False),
    "functional.jacobian": ("gradient", lambda f: functional.jacobian(f, Q), False),
    "functional.jacobian(vectorize)": (
        "mapped",
        lambda f: functional.jacobian(f, Q, vectorize=True),
        False,
    ),
    "jvp": ("forward", lambda f: func.jvp(f, (Q,), (TANGENT,))[1], True),
    "jacfwd": ("forward", lambda f: func.jacfwd(f)(Q), True),
    "linearize": ("forward", lambda f: func.linearize(f, Q)[1](TANGENT), True),
    "vmap(jvp)": (
        "forward",
        lambda f: torch.vmap(lambda t: func.jvp(f, (Q,), (t,))[1])(TWO),
        True,
    ),
    "jvp(vmap)": ("forward", lambda f: func.jvp(torch.vmap(f), (TWO,), (TWO.flip(0),))[1], True),
    "dual tensors": ("forward", dual, False),
    "functional.jacobian(forward-mode)": (
        "mapped",
        lambda f: functional.jacobian(f, Q, strategy="forward-mode", vectorize=True),
        False,
    ),
    "double backward": ("second", lambda f: double_backward(f, False), False),
    "double backward(dout)": ("second", lambda f: double_backward(f, True), False),
    "functional.jvp": ("second", lambda f: functional.jvp(f, Q, TANGENT)[1], False),
    "functional.hvp": ("second", lambda f: functional.hvp(cubed(f), Q, TANGENT)[1], False),
    "functional.vhp": ("second", lambda f: functional.vhp(cubed(f), Q, TANGENT)[1], False),
    "functional.hessian": ("second", lambda f: functional.hessian(cubed(f), Q), False),
    "hessian": ("second", lambda f: func.hessian(cubed(f))(Q), True),
    "grad(grad)": (
        "second",
        lambda f: func.grad(lambda q: func.grad(cubed(f))(q).pow(2).sum())(Q),
        True,
    ),
}
SENTENCES = re.compile(
    r"not served|has no (gradient|derivative)|cannot be mapped|vmap serves dense calls"
)
# what torch itself says: of values that the host reads, and of transforms around compiled functions
OF_TORCH = re.compile(
    r"data-dependent|does not currently support double backward"
    r"|trace a dynamo-optimized|vmap: aten::copy_|Batching rule not implemented"
)


def all_of(*kinds):
    return {name for name, (kind, *_) in TRANSFORMS.items() if kind in kinds}


MAPS = {"vmap", "jacrev", "vmap(grad)", "grad(vmap)"}
OF_AUTOGRAD = {"checkpoint", "checkpoint(reentrant)", "functional.vjp", "functional.jacobian"}
# what must be right; the rest is right or refused
SERVED = {
    "attention": all_of("value", "gradient", "forward", "second"),
    "lse": all_of("value", "gradient", "forward", "second"),
    "varlen_attention": all_of("value", "gradient", "forward", "second") - MAPS - {"jvp(vmap)"},
    "paged_attention": {"jit.trace", "make_fx", "export"},
    "merge_states": set(TRANSFORMS),
    "attention_weights": all_of("gradient", "forward", "second")
    - MAPS
    - {"vmap(jvp)", "jvp(vmap)", "jacfwd"},
    "ring": OF_AUTOGRAD,
    "ulysses": OF_AUTOGRAD,
    "allgather": OF_AUTOGRAD,
}


def judge(function, transform, compiled=False):
    """ "right", or the sentence of the refusal. A failure says why it is neither."""
    attend, plain, _ = FUNCTIONS[function]
    _, apply, is_whole = TRANSFORMS[transform]
    where = f"{transform} of {function}{', compiled' * compiled}"
    expected = apply(plain)
    try:
        result = run_compiled(apply, attend, is_whole) if compiled else apply(attend)
    except Exception as error:
        text = "\n".join(str(e) for e in chain(error))
        assert SENTENCES.search(text) or OF_TORCH.search(text), f"{where}: {error!r}"
        return text
    name = lambda message: f"{where}: {message}"
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9, msg=name)
    return "right"


def run_compiled(apply, attend, is_whole):
    torch._dynamo.reset()
    if is_whole:
        return torch.compile(lambda: apply(attend), backend="aot_eager")()
    return apply(torch.compile(lambda q: attend(q), backend="aot_eager"))


def chain(error):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def test_the_table_covers_every_function():
    """Every public function: 360 eager cells, and 41 compiled."""
    public = {name for name in onchip.__all__ if name.endswith(("attention", "states", "weights"))}
    assert public <= set(FUNCTIONS)
    assert len(TRANSFORMS) * len(FUNCTIONS) == 360
    assert len(COMPILED) == 41


@pytest.mark.parametrize("function", FUNCTIONS)
def test_right_or_refused(function):
    results = {transform: judge(function, transform) for transform in TRANSFORMS}
    right = {transform for transform, verdict in results.items() if verdict == "right"}
    refused = {name: results[name] for name in SERVED.get(function, set()) - right}
    assert not refused


LOST = ("offload_attention", "tree_attention", "paged_attention", "cascade_attention", "ring")


@pytest.mark.parametrize("function", LOST)
def test_functions_that_would_lose_tangents_refuse_forward_mode(function):
    """On one rank and in host memory a tangent would be right by accident: messages between ranks
    and copies of segments carry none.
    """
    for transform in all_of("forward"):
        assert judge(function, transform) != "right", transform


def test_a_graph_without_tangents_has_no_node_that_looks_for_them():
    graph = make_fx(lambda q: onchip.attention(q, K, V))(Q).graph
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    assert called[0] == torch.ops.onchip.forward.default
    assert torch.ops.aten.alias.default not in called


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("function", ["attention", "varlen_attention"])
def test_tangents_that_begin_and_end_in_a_compiled_function(function, backend):
    """Its graph enters the dual level in C++, which torch's Python code does not notice."""
    attend, plain, _ = FUNCTIONS[function]
    for transform in ("jvp", "dual tensors"):
        torch._dynamo.reset()
        apply = TRANSFORMS[transform][1]
        result = torch.compile(lambda apply=apply: apply(attend), backend=backend)()
        torch.testing.assert_close(result, apply(plain), rtol=1e-9, atol=1e-9)


# Compiling takes seconds a cell: one of each kind for every function, all of torch.func for one.
COMPILED = {(function, name) for function in FUNCTIONS for name in ("grad", "jvp")}
# varlen_attention of q[0] has no cell: test_torch_drops_second_derivatives_of_views says why.
COMPILED |= {(function, "double backward") for function in ("lse", "ring")}
COMPILED |= {("attention", name) for name, (*_, is_whole) in TRANSFORMS.items() if is_whole}
COMPILED |= {("attention", name) for name in ("dual tensors", "double backward", "checkpoint")}


def test_torch_drops_second_derivatives_of_views():
    """torch.compile refuses a double backward only if a saved tensor requires a gradient. A graph
    that saves results of its own alone, here softmax of views, loses the terms for any function.
    If this fails, torch has fixed it, and varlen_attention gets its compiled cell.
    """
    f = lambda q, k, v: torch.softmax(q[0] @ k[0].T, -1) @ v[0]
    q, k, v = (torch.randn(1, 4, 8, requires_grad=True) for _ in range(3))
    out = torch.compile(f, backend="aot_eager")(q, k, v)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    assert torch.autograd.grad(dq.pow(2).sum(), (q, k, v), allow_unused=True) == (None,) * 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function, transform", sorted(COMPILED))
def test_right_or_refused_compiled(function, transform):
    verdict = judge(function, transform, compiled=True)
    is_whole = TRANSFORMS[transform][2]
    assert verdict == "right" or not is_whole or transform not in SERVED.get(function, set())
