"""Backends declare the options that they compute; dispatch refuses calls with any other one."""

import re
from collections import namedtuple

import pytest
import torch

import onchip
import onchip.lab  # registers the kernels of the papers
import onchip.testing as ot
from onchip.core import dispatch
from onchip.core.backend import Backend, Grads, Result, Tangents
from onchip.core.device import DeviceInfo
from onchip.core.dispatch import backend_names, find_refusal, get_backend, plan
from onchip.core.problem import DIFFERENTIABLE, LEARNED, UNDECLARED, Options, Problem, Tensors

H200 = DeviceInfo("cuda", "H200", (9, 0))
CPU = DeviceInfo("cpu")
BACKENDS = (*dispatch.BUILT_IN, "paper_v0", "paper_v1", "paper_v2", "paper_v4")
# A value of each option that is not its default.
VALUES = {
    "causal": True,
    "window_size": (15, 0),
    "softcap": 5.0,
    "score_mod": "|score",
    "dropout_p": 0.1,
    "return_stats": True,
    "deterministic": True,
    "packed": True,
    "has_mask": True,
    "has_alibi": True,
    "has_bias": True,
    "has_sinks": True,
    "has_tree_mask": True,
    "has_positions": True,
    "page_size": 16,
    "page_dtype": torch.int8,
    "first_head": 4,
    "wide_grads": True,
}
# The field of Problem that each tensor sets.
FIELDS_OF_TENSORS = {
    "cu_seqlens_q": "packed",
    "cu_seqlens_k": "packed",
    "alibi_slopes": "has_alibi",
    "bias": "has_bias",
    "sinks": "has_sinks",
    "captured": "score_mod",
    "captured_ints": "score_mod",
    "dropout_seed": "dropout_p",
    "page_table": "page_size",
    "cache_seqlens": "page_size",
    "tree_mask": "has_tree_mask",
    "positions_q": "has_positions",
    "positions_k": "has_positions",
    "k_scales": "page_dtype",
    "v_scales": "page_dtype",
    "mask": "has_mask",
}
# Options that a backend receives in the form of others, if it does not read pages.
GATHERED = {"page_size", "page_dtype", "has_tree_mask"}


def home(name):
    return H200 if name in ("hopper", "triton") else CPU


def plain(name, **fields):
    """The simplest call that the backend serves: one query over pages for pages_cpu."""
    problem = Problem(1, 512, 512, 8, 8, 128, 128, torch.bfloat16, torch.bfloat16, 0.1)
    if name == "pages_cpu" or GATHERED & fields.keys():
        problem = problem._replace(seqlen_q=1, seqlen_k=4096, page_size=16)
    return problem._replace(**fields)


def test_every_field_with_a_default_is_an_option_or_listed_as_undeclared():
    assert VALUES.keys() == Problem._field_defaults.keys() - UNDECLARED
    assert Problem._field_defaults.keys() >= UNDECLARED
    assert set(Tensors._fields[3:]) == FIELDS_OF_TENSORS.keys()
    assert set(FIELDS_OF_TENSORS.values()) <= VALUES.keys()
    apart = {"out_dtype", "softmax_scale"}  # resolved: no call is without them
    assert set(Options._fields) <= VALUES.keys() | UNDECLARED | apart


def test_every_tensor_with_a_gradient_has_a_field_of_grads():
    assert Grads._fields == tuple(f"d{name}" for name in DIFFERENTIABLE)
    assert set(DIFFERENTIABLE) <= set(Tensors._fields)
    assert Grads._field_defaults.keys() == {f"d{name}" for name in LEARNED}


def test_every_tensor_with_a_gradient_has_a_tangent():
    """Of the other floating-point tensors alibi_slopes has one; scales belong to pages."""
    assert set(Tangents._fields) == {*DIFFERENTIABLE, "alibi_slopes"}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_forward_mode_refuses_a_new_option(name, home):
    """Whatever `forward` of the backend declares."""
    wider = with_new_option()
    call = wider(*plain("tiled"), new_option=True)
    backend, device = get_backend(name), CPU if home == "cpu" else H200
    assert backend.supports_tangents(call, device) is not None
    served = backend.supports_tangents(wider(*plain("tiled")), device) is None
    assert served == (name == "tiled" and home == "cpu")


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_serves_what_it_declares_and_nothing_else(name):
    backend = get_backend(name)
    served = {
        option
        for option, value in VALUES.items()
        if find_refusal(backend, plain(name, **{option: value}), home(name)) is None
    }
    assert served - GATHERED == set(backend.options) - GATHERED
    expected = GATHERED & backend.options if backend.reads_pages else GATHERED
    assert served & GATHERED == expected


def with_new_option():
    """Problem with one more field, as a later version may have."""
    fields, defaults = (*Problem._fields, "new_option"), Problem._field_defaults.values()
    record = namedtuple("Wider", fields, defaults=(*defaults, False))
    own = {name: x for name, x in vars(Problem).items() if isinstance(x, property)}
    return type("WiderProblem", (record,), own)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_refuses_a_new_option(name, backward, monkeypatch):
    wider = with_new_option()
    monkeypatch.setattr(dispatch, "Problem", wider)
    assert set(BACKENDS) <= set(backend_names())
    usual = wider(*plain(name))
    backward &= get_backend(name).has_backward
    assert plan(usual, home(name), name, backward).kernel == name
    call = usual._replace(new_option=True)
    refusal = rf"kernel '{name}' cannot serve this call: has no new_option"
    with pytest.raises(onchip.UnsupportedError, match=refusal):
        plan(call, home(name), name, backward)
    with pytest.raises(onchip.UnsupportedError, match=f"no kernel .*{name}: has no new_option"):
        plan(call, home(name), None, backward)


@pytest.mark.parametrize("precision", ["fp8", "int8", "int8_pv16"])
@pytest.mark.parametrize("name", ["hopper", "reference"])
def test_low_precisions_refuse_a_new_option(name, precision, monkeypatch):
    """An option that the backend declares for 16 bits is not declared for 8."""
    backend = get_backend(name)
    monkeypatch.setattr(type(backend), "options", backend.options | {"new_option"})
    call = with_new_option()(*plain(name, precision=precision))
    assert find_refusal(backend, call, home(name)) is None
    refusal = find_refusal(backend, call._replace(new_option=True), home(name))
    assert refusal == f"in precision={precision!r} has no new_option"


class Careless(Backend):
    """Supports everything that it declares, and returns ones."""

    def __init__(self, *options):
        self.options = frozenset(options)

    def supports(self, problem, device):
        return None

    def forward(self, problem, x):
        out = torch.ones_like(x.q)
        return Result(out, x.q.new_zeros(x.q.shape[:-1]).transpose(-1, -2))


@pytest.fixture
def register():
    """Register a Careless backend as kernel="careless"."""
    yield lambda *options: onchip.register_backend("careless", Careless(*options), priority=1000)
    onchip.unregister_backend("careless")


Q, K, V = ot.make_qkv(1, 8, num_heads=2)
CALLS = {
    "causal": {"causal": True},
    "window_size": {"window_size": (3, 0)},
    "softcap": {"softcap": 2.0},
    "score_mod": {"score_mod": lambda score, b, h, q, k: score * 0.5},
    "dropout_p": {"dropout_p": 0.5},
    "return_stats": {"return_stats": True},
    "deterministic mode": {"deterministic": True},
    "mask": {"mask": lambda b, h, q, k: q >= k},
    "alibi_slopes": {"alibi_slopes": torch.ones(2)},
    "bias": {"bias": torch.zeros(1, 1, 8, 8)},
    "sinks": {"sinks": torch.zeros(2)},
}


@pytest.mark.parametrize("option", CALLS)
def test_a_registered_backend_that_declares_nothing_gets_plain_calls_alone(option, register):
    register()
    assert onchip.attention(Q, K, V).eq(1).all()
    assert not onchip.attention(Q, K, V, **CALLS[option])[0].eq(1).all()
    explanation = onchip.explain(Q, K, V, **CALLS[option])
    assert explanation.plan.reasons["careless"] == f"has no {option}"
    refused_by = f"careless.*: has no {option}$"
    assert re.search(refused_by, str(explanation), re.MULTILINE)
    with pytest.raises(onchip.UnsupportedError, match=f"'careless' cannot .* has no {option}"):
        onchip.attention(Q, K, V, **CALLS[option], kernel="careless")


def test_all_options_that_are_missing_are_named(register):
    register("causal")
    options = {"causal": True, "softcap": 1.0, "alibi_slopes": torch.ones(2)}
    with pytest.raises(onchip.UnsupportedError, match="has no softcap and no alibi_slopes"):
        onchip.attention(Q, K, V, **options, kernel="careless")


@pytest.mark.parametrize(
    ("declared", "tree", "refusal"),
    [
        ((), False, "has no causal and no packed sequences"),
        (("causal", "packed"), False, None),
        (("causal", "packed"), True, "has no mask"),
        (("causal", "packed", "has_mask"), True, None),
        (("causal", "page_size"), False, None),
        (("causal", "page_size"), True, "has no tree_mask"),
    ],
)
def test_paged_calls_need_packed_sequences_or_pages(declared, tree, refusal, register):
    register(*declared)
    call = plain("careless", page_size=16, causal=True, has_tree_mask=tree)
    assert find_refusal(get_backend("careless"), call, CPU) == refusal


def test_a_packed_call_needs_packed_sequences(register):
    register()
    x = ot.make_packed([3, 5], head_dim=8)
    with pytest.raises(onchip.UnsupportedError, match="'careless' .* has no packed sequences"):
        onchip.varlen_attention(*x[:3], **x.options, kernel="careless")


@pytest.mark.parametrize("name", ["casual", "precision", "aligned", "seqlen_q"])
def test_a_declared_name_is_an_option(name, register):
    register("causal", name)
    with pytest.raises(ValueError, match=f"'careless' declares '{name}', no option of Problem"):
        get_backend("careless")
