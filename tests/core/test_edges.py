"""The contract at numeric limits: scales of 0 and below, scores that overflow, sinks and biases of
-inf. Every CPU kernel; the GPU kernels are in tests/kernels/test_gpu_edges.py.
"""

import math

import pytest
import torch

import onchip
import onchip.lab  # registers the kernels of the papers
import onchip.testing as ot
from onchip import masks

KERNELS = ("aten_cpu", "tiled", "reference", "paper_v0", "paper_v1", "paper_v2", "paper_v4")
EVERY_OPTION = ("tiled", "reference")
INF = math.inf
HOLES = masks.mod(lambda b, h, q, k: (q + k) % 3 != 0)
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "mask": {"mask": HOLES},
    "rows without keys": {"mask": masks.mod(lambda b, h, q, k: (q > 2) & (k >= 0))},
}
SINKS = {"sinks": torch.tensor([0.5, -INF])}
MORE = {
    "sinks": SINKS,
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([0.1, 0.2]), "causal": True},
    "bias": {"bias": torch.linspace(-1, 1, 12).view(1, 1, 1, 12), "causal": True},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 5},
}
SERVED = [(k, n, o) for k in KERNELS for n, o in OPTIONS.items()]
SERVED += [(k, n, o) for k in EVERY_OPTION for n, o in MORE.items()]
SERVED += [("aten_cpu", "sinks", SINKS)]
each_call = pytest.mark.parametrize(
    ("kernel", "options"), [pytest.param(k, o, id=f"{k}-{n}") for k, n, o in SERVED]
)


def call(kernel):
    return lambda *qkv, **o: onchip.attention(*qkv, kernel=kernel, return_lse=True, **o)


class TestScales:
    @pytest.mark.parametrize("scale", [0.0, -0.5])
    @pytest.mark.parametrize("seqlen_q", [9, 12])
    @each_call
    def test_dense(self, kernel, options, seqlen_q, scale):
        q, k, v = ot.make_qkv(2, seqlen_q, 12, head_dim=8, num_kv_heads=1)
        options = {**options, "softmax_scale": scale}
        ot.assert_accurate(call(kernel), q, k, v, grad=True, **options)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_other_types(self, dtype):
        q, k, v = ot.make_qkv(1, 9, head_dim=8, dtype=dtype)
        for scale in (0.0, -0.5):
            options = {"softmax_scale": scale, "causal": True}
            ot.assert_accurate(onchip.attention, q, k, v, grad=True, **options)

    def test_scale_zero_gives_the_mean_of_the_visible_values(self):
        q, k, v = ot.make_qkv(1, 7, head_dim=4)
        out, lse = onchip.attention(q, k, v, softmax_scale=0.0, causal=True, return_lse=True)
        seen = torch.arange(1, 8)
        torch.testing.assert_close(out, v.cumsum(1) / seen.view(1, 7, 1, 1))
        torch.testing.assert_close(lse, seen.log().expand(1, 2, 7))

    @pytest.mark.parametrize("scale", [0.0, -0.5])
    @pytest.mark.parametrize("kernel", [*KERNELS, None])
    def test_packed_and_paged(self, kernel, scale):
        packed = ot.make_packed([2, 2, 2], [5, 2, 40], head_dim=8)
        exact = {"softmax_scale": scale, "causal": True}
        known = {**packed.options, **exact}
        options = {"kernel": kernel, "return_lse": True}
        attend = lambda *qkv, **o: onchip.varlen_attention(*qkv, **o, **options)
        ot.assert_accurate(attend, *packed[:3], grad=True, **known)
        pages = ot.make_pages(packed.k, packed.v, packed.cu_seqlens_k, 4)
        q = packed.q.unflatten(0, (3, 2))
        out, lse = onchip.paged_attention(q, *pages, **exact, **options)
        results = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
        ot.assert_accurate(results, *packed[:3], **known)


def overflowing(seqlen_q=150, seqlen_k=150, sign=-1.0):
    """Finite q, k, v with products that overflow in three rows: to -inf for all keys, or
    to +inf for one key, the 71st.
    """
    q, k, v = ot.make_qkv(1, seqlen_q, seqlen_k, head_dim=8)
    rows = sorted({1, seqlen_q // 2, seqlen_q - 1})
    if sign < 0:
        k = k.abs()
        q[:, rows], q[..., 0], k[..., 0] = 0.0, 0.0, 1e20
        q[:, rows, :, 0] = -1e20
    else:
        q[..., 0], k[..., 0] = 0.0, 0.0
        q[:, rows, :, 0], k[:, 70, :, 0] = 1e20, 1e20
    return [t.requires_grad_() for t in (q, k, v)], rows


class TestOverflow:
    """A score below the range of fp32 is -inf and counts as masked; one above it is NaN."""

    @each_call
    def test_rows_of_minus_infinity_are_empty(self, kernel, options):
        if options.keys() & {"bias", "softcap"}:
            pytest.skip("softcap makes such scores finite, and this bias is for fewer keys")
        (q, k, v), rows = overflowing()
        out, lse = call(kernel)(q, k, v, **options)
        sink = options.get("sinks", torch.full((2,), -INF))
        assert out[:, rows].eq(0).all()
        assert torch.equal(lse[:, :, rows], sink.view(1, 2, 1).expand(1, 2, len(rows)))
        grads = torch.autograd.grad([out, lse], (q, k, v), list(map(torch.ones_like, (out, lse))))
        assert all(g.isfinite().all() for g in grads) and grads[0][:, rows].eq(0).all()
        others = [i for i in range(q.shape[1]) if i not in rows]
        q = q.detach().index_fill(1, torch.tensor(rows), 0.0)
        want = call(kernel)(q, k, v, **options)[0]
        torch.testing.assert_close(out[:, others], want[:, others])

    @pytest.mark.parametrize("kernel", [*KERNELS, None])
    def test_packed_and_paged(self, kernel):
        (q, k, v), _ = overflowing(4, 40)
        cu_q, cu_k = torch.tensor([0, 2, 4]).int(), torch.tensor([0, 10, 40]).int()
        packed = [t.detach()[0] for t in (q, k, v)]
        options = {"causal": True, "kernel": kernel, "return_lse": True}
        out, lse = onchip.varlen_attention(*packed, cu_q, cu_k, 2, 30, **options)
        assert out[[1, 2, 3]].eq(0).all() and lse[:, [1, 2, 3]].eq(-INF).all()
        assert lse[:, 0].isfinite().all()
        pages = ot.make_pages(*packed[1:], cu_k, 16)
        q = packed[0].unflatten(0, (2, 2))
        out, lse = onchip.paged_attention(q, *pages, kernel=kernel, return_lse=True)
        assert out[0, 1].eq(0).all() and out[1].eq(0).all()
        assert lse[0, :, 1].eq(-INF).all() and lse[1].eq(-INF).all()

    def test_merging_such_rows(self):
        """An lse of 0 would give them the weight of a key with score 0."""
        (q, k, v), rows = overflowing()
        near = torch.zeros_like(k)
        parts = [onchip.attention(q, x, v, return_lse=True) for x in (k, near)]
        out, _ = onchip.merge_states(*zip(*parts, strict=True))
        torch.testing.assert_close(out[:, rows], v.mean(1, keepdim=True).expand_as(out[:, rows]))

    @pytest.mark.parametrize("kernel", KERNELS)
    @pytest.mark.parametrize("causal", [False, True])
    def test_plus_infinity_is_nan_as_in_sdpa(self, kernel, causal):
        (q, k, v), rows = overflowing(sign=1.0)
        with torch.no_grad():
            out, lse = call(kernel)(q, k, v, causal=causal)
            heads_first = (t.transpose(1, 2) for t in (q, k, v))
            sdpa = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal)
        sees = [row for row in rows if not causal or row >= 70]
        bad = torch.zeros(150, dtype=torch.bool)
        bad[sees] = True
        assert torch.equal(out.isnan().all((0, 2, 3)), bad) and lse.isnan().any(1)[0].equal(bad)
        assert torch.equal(sdpa.isnan().all((0, 1, 3)), bad)

    @pytest.mark.parametrize("kernel", EVERY_OPTION)
    def test_bias_and_sinks_of_minus_infinity(self, kernel):
        q, k, v = ot.make_qkv(1, 6, 40, head_dim=8)
        bias = torch.zeros(1, 2, 6, 40)
        bias[:, :, 2], bias[:, 0, 3, 5:] = -INF, -INF
        options = {"bias": bias.requires_grad_(), "sinks": SINKS["sinks"].clone().requires_grad_()}
        attend = lambda *a, **o: call(kernel)(*a, return_stats=True, **o)
        ot.assert_accurate(attend, q, k, v, grad=True, **options)
