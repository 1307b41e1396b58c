"""Validation: an invalid call raises one sentence that names the mistake, without side effects."""

import ast
from pathlib import Path

import pytest
import torch

import onchip
from onchip import masks
from tests.core.calls import qkv, refused

PACKAGE = Path(onchip.__file__).parent

q, k, v = qkv()


@pytest.mark.parametrize(
    "match, bad",
    [
        ("q must be a torch.Tensor", ([1.0], k, v)),
        ("q must have rank 4", (q[0], k, v)),
        ("v must have rank 4", (q, k, v[None])),
        (r"k.dtype=torch.int64", (q, k.long(), v)),
        ("share a dtype", (q, k.half(), v)),
        ("share a device", (q, k.to("meta"), v)),
        ("k and v must agree", (q, k, v[:, 1:])),
        ("batch 1", (q[:1], k, v)),
        ("head_dim 8, k has head_dim 16", (q[..., :8], k, v)),
        ("num_heads=3 must be a positive multiple of num_kv_heads=2", (q[:, :, :3], k, v)),
        ("num_heads=0", (q[:, :, :0], k, v)),
        (
            "contiguous in its last dimension",
            (q, k.transpose(-1, -2).contiguous().transpose(-1, -2), v),
        ),
        (
            "head_dim=577 must be between 1 and 576, and head_dim_v=16 between 1 and 512",
            (torch.randn(2, 8, 4, 577), torch.randn(2, 8, 2, 577), v),
        ),
        ("head_dim=16 .* and head_dim_v=513 between", (q, k, torch.randn(2, 8, 2, 513))),
        ("head_dim=0 must be between 1 and 576", (q[..., :0], k[..., :0], v)),
        ("head_dim_v=0 between 1 and 512", (q, k, v[..., :0])),
    ],
)
def test_invalid_tensors_are_refused(match, bad):
    refused(match, *bad)


@pytest.mark.parametrize(
    "match, options",
    [
        ("softmax_scale=nan", {"softmax_scale": float("nan")}),
        ("softmax_scale=inf", {"softmax_scale": float("inf")}),
        ("softmax_scale=", {"softmax_scale": "1"}),
        ("softcap=-1", {"softcap": -1.0}),
        ("softcap=nan", {"softcap": float("nan")}),
        (r"dropout_p=1.0 must be in \[0, 1\)", {"dropout_p": 1.0}),
        ("dropout_p=-0.1", {"dropout_p": -0.1}),
        ("dropout_p=nan", {"dropout_p": float("nan")}),
        ("window_size left=-1", {"window_size": (-1, 0)}),
        ("window_size right=1.5", {"window_size": (0, 1.5)}),
        ("pair", {"window_size": 5}),
        ("out_dtype", {"out_dtype": torch.float16}),
        ("dropout_seed='x'", {"dropout_p": 0.5, "dropout_seed": "x"}),
        (
            "dropout_seed must be one int64",
            {"dropout_p": 0.5, "dropout_seed": torch.zeros(2).long()},
        ),
        ("dropout_seed=", {"dropout_p": 0.5, "dropout_seed": 2**70}),
        (r"alibi_slopes must have shape \(4,\) or \(2, 4\)", {"alibi_slopes": torch.ones(2)}),
        ("alibi_slopes.dtype", {"alibi_slopes": torch.ones(4).int()}),
        ("sinks must have shape", {"sinks": torch.ones(4, 1)}),
        ("sinks is on meta", {"sinks": torch.ones(4, device="meta")}),
        ("bias must be", {"bias": torch.zeros(8, 8)}),
        ("bias must be", {"bias": torch.zeros(1, 1, 8, 1)}),
        ("bias must be", {"bias": torch.zeros(3, 1, 8, 8)}),
        ("mask", {"mask": torch.zeros(8, 7, dtype=torch.bool)}),
        ("mask", {"mask": torch.zeros(8, 8)}),
        ("mask of shape", {"mask": masks.causal().build(1, 1, 8, 9)}),
        ("kernel='fast' is not one of", {"kernel": "fast"}),
    ],
)
def test_invalid_options_are_refused(match, options):
    refused(match, q, k, v, **options)


def test_unknown_options_are_not_ignored():
    with pytest.raises(TypeError, match="scale"):
        onchip.attention(q, k, v, scale=0.5)
    with pytest.raises(TypeError):
        onchip.explain(q, k, v, scale=0.5)


def test_a_named_kernel_never_falls_back():
    refused(
        "'aten_cpu' cannot serve",
        q,
        k,
        v,
        softcap=3.0,
        kernel="aten_cpu",
        error=onchip.UnsupportedError,
    )


def test_gradient_of_slopes_is_refused_not_dropped():
    slopes = torch.ones(4, requires_grad=True)
    refused("detach", q, k, v, alibi_slopes=slopes, error=onchip.UnsupportedError)


PACKED = tuple(t.flatten(0, 1) for t in qkv())
CU = torch.tensor([0, 5, 16], dtype=torch.int32)


@pytest.mark.parametrize(
    "match, cu",
    [
        ("int32", CU.long()),
        ("int32", CU[None]),
        ("int32", [0, 5, 16]),
        ("run from 0 to total_q=16, got 1", torch.tensor([1, 5, 16], dtype=torch.int32)),
        ("got 0 to 15", torch.tensor([0, 5, 15], dtype=torch.int32)),
        ("must not decrease, got 20 then 16", torch.tensor([0, 20, 16], dtype=torch.int32)),
        ("but a sequence has 12 tokens", torch.tensor([0, 4, 16], dtype=torch.int32)),
        ("same length", torch.tensor([0, 16], dtype=torch.int32)),
    ],
)
def test_invalid_cu_seqlens_are_refused(match, cu):
    refused(match, *PACKED, cu, CU, 11, 11, fn=onchip.varlen_attention)


def test_packed_calls_refuse_bias_and_invalid_lengths():
    with pytest.raises(TypeError):
        onchip.varlen_attention(*PACKED, CU, CU, 11, 11, bias=torch.zeros(1, 1, 16, 16))
    refused("max_seqlen_q", *PACKED, CU, CU, 11.0, 11, fn=onchip.varlen_attention)
    refused("max_seqlen_k", *PACKED, CU, CU, 11, -1, fn=onchip.varlen_attention)


def test_weights_check_rows_and_lse():
    lse = onchip.attention(q, k, v, return_lse=True)[1]
    refused(r"row 8 is not in \[0, seqlen_q=8\)", q, k, lse, [8], fn=onchip.attention_weights)
    refused("lse must have shape", q, k, lse[0], [0], fn=onchip.attention_weights)


def test_an_error_has_no_side_effect():
    """A refused call changes neither its inputs nor the random state."""
    before = [t.clone() for t in (q, k, v)]
    state = torch.get_rng_state()
    refused("softcap", q, k, v, softcap=-1.0, dropout_p=0.5)
    refused("bias", q, k, v, bias=torch.zeros(1), dropout_p=0.5)
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v), strict=True))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.slow
def test_the_package_uses_no_assert():
    """assert is removed under -O and has no message. Only testing.py may use it."""
    for path in PACKAGE.rglob("*.py"):
        if path.name == "testing.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Assert), f"{path.relative_to(PACKAGE)}:{node.lineno}"


def test_explain_names_every_kernel():
    text = str(onchip.explain(q, k, v, softcap=2.0))
    assert "served by   tiled" in text and "no softcap" in text and "reference" in text
