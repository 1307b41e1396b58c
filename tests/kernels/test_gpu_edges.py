"""GPU kernels where numbers end: the twin of tests/core/test_edges.py."""

import math

import pytest
import torch

import onchip
import onchip.testing as ot
from onchip import masks
from tests.kernels.gpu import each_kernel, inputs

INF = math.inf
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (300, 20)},
    "mask": {"mask": masks.mod(lambda b, h, q, k: (q + k) % 3 != 0)},
    "sinks": {"sinks": True},
}
each_options = pytest.mark.parametrize("name", OPTIONS)


def overflowing(seqlen_q, seqlen_k, dim, dtype=torch.bfloat16, sign=-1.0):
    """Finite q, k, v; products of some rows are below the range of fp32 for every key, or above it
    for one.
    """
    q, k, v = inputs(seqlen_q, seqlen_k, dim, dtype)
    rows = sorted({0, seqlen_q // 2, seqlen_q - 1})
    q[..., 0], k[..., 0] = 0.0, 0.0
    q[:, rows], q[:, rows, :, 0] = 0.0, sign * 1e20
    if sign < 0:
        k[..., 0] = 1e20
    else:
        k[:, 0, :, 0] = 1e20
    return [t.requires_grad_() for t in (q, k, v)], rows


@each_kernel
@each_options
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen", [100, 1000])
def test_rows_of_minus_infinity_see_nothing(kernel, name, dim, seqlen):
    options = dict(OPTIONS[name])
    sinks = torch.full((8,), -INF, device="cuda")
    if "sinks" in options:
        sinks[::2] = 0.5
        options["sinks"] = sinks
    (q, k, v), rows = overflowing(seqlen, seqlen, dim)
    out, lse = onchip.attention(q, k, v, kernel=kernel, return_lse=True, **options)
    assert out[:, rows].eq(0).all()
    want = sinks.view(1, 8, 1).expand(2, 8, len(rows))
    torch.testing.assert_close(lse[:, :, rows], want)
    others = torch.ones(seqlen, dtype=torch.bool, device="cuda")
    others[rows] = False
    assert lse[:, :, others].isfinite().all()
    cotangents = list(map(torch.ones_like, (out, lse)))
    grads = torch.autograd.grad([out, lse], (q, k, v), cotangents)
    assert all(g.isfinite().all() for g in grads) and grads[0][:, rows].eq(0).all()


@each_kernel
@pytest.mark.parametrize("seqlen_k", [200, 5000])
@pytest.mark.parametrize("name", ["plain", "window", "sinks"])
def test_few_queries_over_pages(kernel, seqlen_k, name):
    options = {k: v for k, v in OPTIONS[name].items() if k != "sinks"}
    if name == "sinks":
        options["sinks"] = torch.full((8,), -INF, device="cuda")
    (q, k, v), _ = overflowing(1, seqlen_k, 128)
    cu = torch.tensor([0, seqlen_k, 2 * seqlen_k], dtype=torch.int32)
    pages = ot.make_pages(*(t.detach().flatten(0, 1) for t in (k, v)), cu.cuda(), 64)
    options |= {"kernel": kernel, "return_lse": True}
    out, lse = onchip.paged_attention(q.detach(), *pages, **options)
    assert out.eq(0).all() and lse.eq(-INF).all()


@each_kernel
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_plus_infinity_is_nan(kernel, causal, dim):
    (q, k, v), rows = overflowing(700, 700, dim, sign=1.0)
    with torch.no_grad():
        out, lse = onchip.attention(q, k, v, kernel=kernel, return_lse=True, causal=causal)
    bad = torch.zeros(700, dtype=torch.bool, device="cuda")
    bad[rows] = True
    assert out.isnan().all(-1).all(-1).equal(bad.expand(2, -1))
    assert lse.isnan().all(1).equal(bad.expand(2, -1))


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.0, -0.3])
@pytest.mark.parametrize("name", OPTIONS)
def test_scales_of_zero_and_below(scale, name):
    options = dict(OPTIONS[name]) | {"softmax_scale": scale}
    if "sinks" in options:
        options["sinks"] = torch.linspace(-1, 1, 8, device="cuda").requires_grad_()
    q, k, v = inputs(300, dim=64)
    attend = lambda *a, **o: onchip.attention(*a, return_lse=True, **o)
    ot.assert_accurate(attend, q, k, v, grad=True, **options)
