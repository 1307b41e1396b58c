"""Second derivatives of the Triton backend, executed on the CPU by Triton's interpreter: equal to
those of `tiled` in fp64, over every option.
"""

import math

import pytest
import torch
from torch import func

import onchip
import onchip.testing as ot
from onchip.core.backend import Tangents
from onchip.core.device import DeviceInfo
from onchip.core.dispatch import find_second_order, get_backend
from onchip.core.problem import Problem
from onchip.kernels.tiles import TritonConfig
from tests.interpreted import INTERPRETED, interpreted, interpreted_or_gpu, mark_slow_except
from tests.kernels.triton.directions import CASES, GQA, Call, assert_near, draw, tiled

pytest.importorskip("triton")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TRITON = get_backend("triton")
FP32_ERROR = 2e-5  # of the largest number: sums of products of two differences


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Much smaller tiles than on a GPU, so that short sequences have several."""
    if INTERPRETED:
        from onchip.kernels.triton import launch

        config = lambda kernel, use: TritonConfig(32, 64 if use.has_mask else 32, 4, 1)
        monkeypatch.setattr(launch, "triton_config", config)


@interpreted_or_gpu
@pytest.mark.parametrize("name", mark_slow_except((2, 8, 11, 14), CASES))
def test_gradients_of_tangents_equal_those_in_fp64(name):
    call = Call.of(name)
    assert_near(call.gradients(TRITON), call.in_fp64.gradients(tiled()), FP32_ERROR)


@interpreted_or_gpu
@pytest.mark.parametrize("dtype", mark_slow_except((0,), (BF16, FP16)))
def test_gradients_of_16_bits(dtype):
    """Every product has a factor that is rounded once."""
    call = Call.of("softcap", dtype)
    got, exact = call.gradients(TRITON), call.in_fp64.gradients(tiled())
    assert all(g.dtype == dtype for g in got)
    assert_near(got, exact, 4 * torch.finfo(dtype).eps)


@interpreted
@pytest.mark.parametrize(
    "names",
    mark_slow_except((1, 4), [("q",), ("k",), ("v",), ("alibi_slopes",), ("bias",), ("sinks",)]),
)
def test_inputs_without_a_tangent_are_constants(names):
    call = Call.of("bias of keys" if names != ("alibi_slopes",) else "alibi")
    if names == ("sinks",):
        call = Call.of("sinks")
    dx = Tangents(**{name: getattr(call.dx, name) for name in names})
    call = call._replace(dx=dx, dlse=None)
    assert_near(call.gradients(TRITON), call.in_fp64.gradients(tiled()), FP32_ERROR)


@interpreted
def test_a_hessian_vector_product():
    """Through the public function: a jvp of a gradient, which is also a gradient of a jvp."""
    q, k, v = ot.make_qkv(1, 33, 40, num_heads=2, num_kv_heads=1, head_dim=16)
    u = draw(q.shape, 1)
    loss = lambda q, k, v, **more: onchip.attention(q, k, v, causal=True, **more).pow(3).sum()
    product = lambda u, q, *kv, **more: func.jvp(
        func.grad(lambda q: loss(q, *kv, **more)), (q,), (u,)
    )[1]
    got = product(u.float(), q, k, v, kernel="triton")
    assert_near([got], [product(u, q.double(), k.double(), v.double())], FP32_ERROR)


@interpreted
@pytest.mark.slow
def test_nan_in_a_neighbouring_sequence():
    """In a key, in a value and in their tangents."""
    call = Call.make(([33, 20, 47], [40, 21, 47]), GQA, {"causal": True}, dtype=FP32)
    clean = call.gradients(TRITON)
    for t in (call.x.k, call.x.v, call.dx.k, call.dx.v):
        t[40:61] = math.nan
    queries, keys = [*range(33), *range(53, 100)], [*range(40), *range(61, 108)]
    for a, b, at in zip(clean, call.gradients(TRITON), (queries, keys, keys), strict=True):
        assert torch.equal(a[at], b[at])


@interpreted
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)])
def test_empty_calls(lengths):
    """A call without queries or without keys has gradients of zero."""
    call = Call.make(lengths, GQA, {"bias": (1, 1, *lengths), "sinks": (2,)}, dtype=FP32)
    grads = call.gradients(TRITON)
    names = ("q", "k", "v", "bias", "sinks")
    for name, g in zip(names, grads, strict=True):
        assert g.shape == getattr(call.x, name).shape and not g.any()


def test_calls_on_a_gpu_are_served():
    problem = Problem(1, 512, 512, 8, 8, 128, 128, BF16, BF16, 0.1)
    assert find_second_order(problem, DeviceInfo("cuda", "H200", (9, 0))) is TRITON


def test_the_cases_have_every_bias():
    """A bias of heads and queries, of batch, and one that both broadcast."""
    shapes = [case[2]["bias"] for case in CASES.values() if "bias" in case[2]]
    assert {tuple(n > 1 for n in shape[:3]) for shape in shapes} >= {
        (False, True, True),
        (True, False, False),
        (False, False, True),
    }
