"""Tracing: everything that is not served raises a sentence that names it."""

import math
import re

import numpy as np
import pytest
import torch

import onchip
from onchip import UnsupportedError
from onchip.score_mods import ScoreMod, trace

TABLE = torch.arange(12.0).view(3, 4)
REFUSED = {
    "if": (lambda s, b, h, q, k: s if q > k else -s, "branches on a value"),
    "and": (lambda s, b, h, q, k: torch.where(q > k and q > 2, s, -s), "branches on a value"),
    "max": (lambda s, b, h, q, k: max(s, q), "branches on a value"),
    "float": (lambda s, b, h, q, k: float(s), "into a Python number"),
    "int": (lambda s, b, h, q, k: int(q), "into a Python number"),
    "math": (lambda s, b, h, q, k: math.tanh(s), "into a Python number"),
    "range": (lambda s, b, h, q, k: sum(range(q)), "into a Python number"),
    "item": (lambda s, b, h, q, k: s.item(), "into a Python number"),
    "function": (lambda s, b, h, q, k: torch.softmax(s, 0), "softmax"),
    "gamma": (lambda s, b, h, q, k: torch.lgamma(s), "lgamma"),
    "method": (lambda s, b, h, q, k: s.cumsum(0), r"\.cumsum"),
    "dot": (lambda s, b, h, q, k: s + torch.dot(TABLE[h], TABLE[q]), "dot"),
    "row": (lambda s, b, h, q, k: s + TABLE[h], "index all of them"),
    "row method": (lambda s, b, h, q, k: s + TABLE[h].sum(), r"\.sum"),
    "vector": (lambda s, b, h, q, k: s + TABLE, r"shape \(3, 4\)"),
    "slice": (lambda s, b, h, q, k: s + TABLE[h, 1:], "slice"),
    "float index": (lambda s, b, h, q, k: s + TABLE[h, s], "not an integer"),
    "bool index": (lambda s, b, h, q, k: s + TABLE[h, q > k], "not an integer"),
    "narrow": (lambda s, b, h, q, k: s.to(torch.bfloat16), "bfloat16"),
    "half": (lambda s, b, h, q, k: s.half(), r"\.half"),
    "shift": (lambda s, b, h, q, k: s << 1, "shl"),
    "logic": (lambda s, b, h, q, k: s & 1, "floats"),
    "bools": (lambda s, b, h, q, k: (q > k) - (k > q), "bools"),
    "complex": (lambda s, b, h, q, k: s * 1j, "complex"),
    "text": (lambda s, b, h, q, k: s + "1", "str"),
    "list": (lambda s, b, h, q, k: torch.stack([s, s]), "stack"),
    "nothing": (lambda s, b, h, q, k: None, "NoneType"),
    "rounding": (lambda s, b, h, q, k: torch.round(s, decimals=2), "round"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_named(name):
    function, match = REFUSED[name]
    with pytest.raises(UnsupportedError, match=match):
        trace(function)


def test_too_many_indices():
    with pytest.raises(IndexError, match="by 3 indices"):
        trace(lambda s, b, h, q, k: s + TABLE[h, q, k])


def test_no_function():
    for bad in (3.0, "alibi", torch.ones(2)):
        with pytest.raises(ValueError, match="score_mod must be a function"):
            trace(bad)


def test_a_symbol_of_another_trace():
    kept = []
    trace(lambda s, b, h, q, k: kept.append(s) or s)
    with pytest.raises(ValueError, match="another trace"):
        trace(lambda s, b, h, q, k: s + kept[0])


def test_a_long_loop():
    def loop(s, b, h, q, k):
        for i in range(2000):
            s = s * (1.0 + i)
        return s

    with pytest.raises(UnsupportedError, match="more than 1000 operations"):
        trace(loop)


def test_numbers_of_other_kinds():
    """numpy's numbers, constants made inside, and tensors of one element."""
    mod = trace(
        lambda s, b, h, q, k: (
            s * np.float64(0.5)
            + np.int64(2)
            + torch.tensor(0.25)
            + torch.full((), 1.5, device=s.device, dtype=s.dtype)
        )
    )
    assert mod.tensors == ()
    assert re.findall(r"const f ([\d.]+)", mod.text) == ["0.5", "2.0", "0.25", "1.5"]
    captured = torch.tensor(3.0)
    assert trace(lambda s, b, h, q, k: s * captured).tensors == (captured,)


def test_promotion_is_that_of_torch():
    """Kinds of results: integers stay integers, / gives floats."""
    kinds = {
        "q + k": lambda s, q, k: q + k,
        "q / k": lambda s, q, k: q / (k + 1),
        "q // k": lambda s, q, k: q // (k + 1),
        "q ** 2": lambda s, q, k: q**2,
        "q ** 2.0": lambda s, q, k: q**2.0,
        "q * 0.5": lambda s, q, k: q * 0.5,
        "q > k": lambda s, q, k: q > k,
        "trunc": lambda s, q, k: torch.div(q - k, 2, rounding_mode="trunc"),
        "floor": lambda s, q, k: torch.div(s, 0.5, rounding_mode="floor"),
        "remainder": lambda s, q, k: (q - k) % 3,
        "negative remainder": lambda s, q, k: s % -0.7,
        "mean of bools": lambda s, q, k: (q > k) * 0.5 + (q > k) * 2,
    }
    q, k, v = onchip.testing.make_qkv(1, 5, 6, num_heads=1, head_dim=4, dtype=torch.float64)
    i, j = torch.arange(5)[:, None], torch.arange(6)
    s = (q @ k.mT if q.dim() == 2 else torch.einsum("bqhd,bkhd->bhqk", q, k)) / 2
    for name, function in kinds.items():
        mod = lambda score, b, h, q, k, function=function: score + function(score, q, k) * 1.5
        out = onchip.attention(q, k, v, score_mod=mod)
        p = (s + function(s, i, j) * 1.5).softmax(-1)
        wanted = torch.einsum("bhqk,bkhd->bqhd", p, v)
        torch.testing.assert_close(out, wanted, msg=lambda m, name=name: f"{name}: {m}")


class TestKeptTrace:
    """A function that is traced once, for many calls."""

    def test_it_reads_the_values_of_each_call(self):
        q, k, v = onchip.testing.make_qkv(1, 5, num_heads=2, head_dim=8)
        bias = torch.zeros(2, 5, 5)
        mod = trace(lambda s, b, h, q, k: s + bias[h, q, k])
        assert isinstance(mod, ScoreMod) and trace(mod) is mod
        before = onchip.attention(q, k, v, score_mod=mod)
        bias.normal_()
        after = onchip.attention(q, k, v, score_mod=mod)
        assert torch.equal(after, onchip.attention(q, k, v, bias=bias[None]))
        assert not torch.equal(before, after)

    def test_a_computed_tensor_is_refused(self):
        """Later calls would see its value at the time of the trace."""
        slopes = torch.ones(2)
        function = lambda s, b, h, q, k: s - torch.exp(slopes)[h] * (q - k).abs()
        with pytest.raises(ValueError, match="compute it before"):
            trace(function)
        q, k, v = onchip.testing.make_qkv(1, 5, num_heads=2, head_dim=8)
        outs = []
        for value in (0.0, 1.0):
            slopes.fill_(value)
            outs.append(onchip.attention(q, k, v, score_mod=function))
        assert not torch.equal(*outs)

    def test_views_and_constants_are_not_computed(self):
        table = torch.zeros(3, 2)
        trace(lambda s, b, h, q, k: s + table[1][h] + table.T[h, 0] + torch.tensor(2.0))
