"""Tangents of the Triton backend, executed on the CPU by Triton's interpreter: equal to those of
`tiled` in fp64 and to central differences, over every option.
"""

import math

import pytest
import torch
from torch import func

import onchip
import onchip.testing as ot
from onchip.core.backend import Tangents
from onchip.core.device import DeviceInfo
from onchip.core.dispatch import find_tangents, get_backend
from onchip.core.problem import Problem, UnsupportedError
from onchip.kernels.cpu import tangent as cpu_tangent
from onchip.kernels.tiles import TritonConfig
from onchip.kernels.triton.entry import TANGENT_OPTIONS
from tests.interpreted import INTERPRETED, interpreted, interpreted_or_gpu, mark_slow_except
from tests.kernels.triton.directions import CASES, GQA, MOD, Call, assert_near, draw, tiled

pytest.importorskip("triton")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TRITON = get_backend("triton")
FP32_ERROR = 1e-5  # of the largest number, as tests/kernels/cpu/test_tangent.py allows


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Much smaller tiles than on a GPU, so that short sequences have several."""
    if INTERPRETED:
        from onchip.kernels.triton import launch

        config = lambda kernel, use: TritonConfig(32, 64 if use.has_mask else 32, 4, 1)
        monkeypatch.setattr(launch, "triton_config", config)


@interpreted_or_gpu
@pytest.mark.parametrize("name", mark_slow_except((1, 2, 5, 8, 11, 13, 14), CASES))
def test_tangents_equal_those_in_fp64(name):
    call = Call.of(name)
    assert_near(call.tangents(TRITON), call.in_fp64.tangents(tiled()), FP32_ERROR)


@interpreted_or_gpu
@pytest.mark.parametrize("dtype", mark_slow_except((0,), (BF16, FP16)))
def test_tangents_of_16_bits(dtype):
    """t_lse is not rounded; of t_out, p and p ds are, once each."""
    call = Call.of("all", dtype)
    (t_out, t_lse), (exact, exact_lse) = (
        call.tangents(TRITON),
        call.in_fp64.tangents(tiled()),
    )
    assert t_out.dtype == dtype and t_lse.dtype == FP32
    assert_near([t_lse], [exact_lse], FP32_ERROR)
    assert_near([t_out], [exact], 2 * torch.finfo(dtype).eps)


def textbook(q, k, v):
    """Standard attention in the dtype of q, every result rounded to it."""
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v), s.logsumexp(-1)


ACCURACY = [(BF16, 0.0), (FP16, 0.0), (FP32, 0.0), (BF16, 30.0), (FP32, 30.0)]


@interpreted
@pytest.mark.parametrize("case", mark_slow_except((3, 4), ACCURACY))
def test_accuracy(case):
    """As tests/kernels/cpu/test_tangent.py: in 16 bits the errors are at most those of the textbook
    formula in the same dtype, a single one plus 1 ulp. In fp32 the RMSE is at most 1.25 times its
    RMSE. With an offset, all keys have a tangent in common, which moves lse and not out.
    """
    dtype, offset = case
    inputs = ot.make_qkv(1, 60, 290, num_heads=1, head_dim=32, dtype=dtype)
    tangents = [draw(x.shape, i).to(dtype) for i, x in enumerate(inputs)]
    tangents[1] = tangents[1] + offset
    double = lambda xs: tuple(x.double() for x in xs)
    f = lambda *qkv: onchip.attention(*qkv, return_lse=True, kernel="triton")
    got = func.jvp(f, inputs, tuple(tangents))[1]
    expected = func.jvp(textbook, double(inputs), double(tangents))[1]
    unfused = func.jvp(textbook, inputs, tuple(tangents))[1]
    for a, exact, b in zip(got, expected, unfused, strict=True):
        size = exact.abs().max().item()
        if dtype == FP32:
            assert ot.rmse(a, exact) <= 1.25 * ot.rmse(b, exact)
            assert ot.max_error(a, exact) <= 1e-5 * size
        else:
            assert ot.rmse(a, exact) <= ot.rmse(b, exact)
            assert ot.max_error(a, exact) <= ot.max_error(b, exact) + ot.ulp(dtype, size)


@interpreted
def test_tangents_equal_central_differences():
    """Through the public function. The differences are of fp64 results, their error is about
    1e-9.
    """
    q, k, v = ot.make_qkv(1, 33, 50, num_heads=2, num_kv_heads=1, head_dim=16)
    sinks = torch.tensor([0.3, -0.4])
    f = lambda q, k, v, sinks, **more: onchip.attention(
        *(q, k, v), causal=True, softcap=0.8, sinks=sinks, return_lse=True, **more
    )
    inputs = (q, k, v, sinks)
    tangents = tuple(draw(x.shape, i).float() for i, x in enumerate(inputs))
    result, got = func.jvp(lambda *x: f(*x, kernel="triton"), inputs, tangents)
    for a, b in zip(result, f(*inputs, kernel="triton"), strict=True):
        assert torch.equal(a, b)
    moved = [
        f(*(x.double() + h * dx for x, dx in zip(inputs, tangents, strict=True)))
        for h in (1e-5, -1e-5)
    ]
    assert_near(got, [(a - b) / 2e-5 for a, b in zip(*moved, strict=True)], FP32_ERROR)


@interpreted
@pytest.mark.parametrize(
    "names",
    mark_slow_except((1, 4), [("q",), ("k",), ("v",), ("alibi_slopes",), ("bias",), ("sinks",)]),
)
def test_inputs_without_a_tangent_are_constants(names):
    call = Call.of("all")
    call = call._replace(dx=Tangents(**{name: getattr(call.dx, name) for name in names}))
    assert_near(call.tangents(TRITON), call.in_fp64.tangents(tiled()), FP32_ERROR)


@interpreted
@pytest.mark.parametrize("tile", mark_slow_except((1,), [(16, 64), (64, 32), (128, 128)]))
def test_tiles_do_not_change_the_tangents(monkeypatch, tile):
    from onchip.kernels.triton import launch

    monkeypatch.setattr(launch, "triton_config", lambda *_: TritonConfig(*tile, 4, 1))
    call = Call.of("all")
    assert_near(call.tangents(TRITON), call.in_fp64.tangents(tiled()), FP32_ERROR)


@interpreted
def test_layouts_of_tangents():
    """A tangent need not have the strides of its input."""
    call = Call.of("bias")
    expected = call.tangents(TRITON)
    turned = [t if t is None else t.mT.contiguous().mT for t in call.dx[:3]]
    bias = call.dx.bias.transpose(2, 3).contiguous().transpose(2, 3)
    got = call._replace(dx=Tangents(*turned, bias=bias)).tangents(TRITON)
    assert all(map(torch.equal, got, expected))


@interpreted
def test_nan_in_a_neighbouring_sequence():
    """In a key, in a value and in their tangents."""
    call = Call.make(([33, 20, 47], [40, 21, 47]), GQA, {"causal": True}, dtype=FP32)
    clean = call.tangents(TRITON)
    for t in (call.x.k, call.x.v, call.dx.k, call.dx.v):
        t[40:61] = math.nan
    rows = [*range(33), *range(53, 100)]
    for a, b, at in zip(clean, call.tangents(TRITON), (0, 1), strict=True):
        assert torch.equal(a.select(at, 0), b.select(at, 0))
        index = torch.tensor(rows)
        assert torch.equal(a.index_select(at, index), b.index_select(at, index))


@interpreted
def test_nan_in_the_tangent_of_a_hidden_key():
    call = Call.of("rows without keys")
    call.x.k[:, 3] = math.nan  # hidden from all rows
    call.dx.k[:, 3] = math.nan
    clean = Call.of("rows without keys")
    assert all(map(torch.equal, call.tangents(TRITON), clean.tangents(TRITON)))


@interpreted
@pytest.mark.parametrize("options", mark_slow_except((1,), [{}, {"causal": True}]))
def test_rows_with_only_scores_of_minus_infinity(options):
    """In unmasked as well as in masked tiles: q.k of finite numbers overflows fp32."""
    q, k, v = ot.make_qkv(1, 70, head_dim=8)
    q[..., 0], k[..., 0] = 0.0, 1e20
    q[:, ::7], q[:, ::7, :, 0] = 0.0, -1e20
    f = lambda *x: onchip.attention(*x, **options, return_lse=True, kernel="triton")
    t_out, t_lse = func.jvp(f, (q, k, v), tuple(draw(q.shape, i).float() for i in range(3)))[1]
    assert t_out[:, ::7].eq(0).all() and t_lse[:, :, ::7].eq(0).all()
    assert t_out.isfinite().all() and t_lse[:, :, 1].ne(0).all()


@interpreted
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)])
def test_empty_calls(lengths):
    inputs = ot.make_qkv(1, *lengths, head_dim=16)
    f = lambda *x: onchip.attention(*x, return_lse=True, kernel="triton")
    result, tangents = func.jvp(f, inputs, inputs)
    for x, dx in zip(result, tangents, strict=True):
        assert dx.shape == x.shape and not dx.any()


@interpreted
def test_vmap_of_jvp():
    """jacfwd maps over tangents: one pass for each of them."""
    q, k, v = ot.make_qkv(1, 5, 7, num_heads=1, head_dim=2)
    f = lambda q, **more: onchip.attention(q, k.to(q.dtype), v.to(q.dtype), **more)
    got = func.jacfwd(lambda q: f(q, kernel="triton"))(q[:, :2])
    assert_near([got], [func.jacfwd(f)(q[:, :2].double())], FP32_ERROR)


def test_the_options_are_those_of_the_cpu():
    assert cpu_tangent.OPTIONS - {"score_mod"} == TANGENT_OPTIONS  # which the CPU serves alone
    assert TRITON.options > TANGENT_OPTIONS


def test_the_cases_have_every_option():
    names = {"mask": "has_mask", "alibi_slopes": "has_alibi", "bias": "has_bias"}
    names |= {"sinks": "has_sinks"}
    used = {names.get(name, name) for case in CASES.values() for name in case[2]}
    assert (used | {"packed"}) - {"softmax_scale"} == TANGENT_OPTIONS
    assert MOD is CASES["all"][2]["mask"]


def test_calls_on_a_gpu_are_served_or_refused_by_name():
    problem = Problem(1, 512, 512, 8, 8, 128, 128, BF16, BF16, 0.1)
    device = DeviceInfo("cuda", "H200", (9, 0), has_triton=True)
    assert find_tangents(problem, device) is TRITON
    assert find_tangents(problem, DeviceInfo("hip", "gfx942", has_triton=True)) is TRITON
    refused = {
        "no dropout_p": {"dropout_p": 0.1, "dropout_seed": True},
        "no return_stats": {"return_stats": True},
        "precision='int8'": {"precision": "int8"},
        "no pages": {"page_size": 16, "packed": True},
    }
    refused["no dropout_p"].pop("dropout_seed")
    for sentence, options in refused.items():
        with pytest.raises(UnsupportedError, match=f"triton .*{sentence}"):
            find_tangents(problem._replace(**options), device)
    wide = problem._replace(head_dim=320, head_dim_v=320)
    assert find_tangents(wide, device) is TRITON
    with pytest.raises(UnsupportedError, match="no tangents of head dims 320 and 320 with 99 kB"):
        find_tangents(wide, DeviceInfo("cuda", "L4", (8, 9)))
    with pytest.raises(UnsupportedError, match="triton float64 is served on the CPU"):
        find_tangents(problem._replace(dtype=torch.float64, out_dtype=torch.float64), device)
