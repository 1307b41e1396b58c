"""Limits of torch's CPU flash kernel. Each is shown in the kernel itself (test_torch_kernel), then
as onchip handles it (test_onchip).
"""

import math
import platform
import subprocess
import sys

import pytest
import torch

import onchip
from onchip import masks
from onchip.core import machine
from onchip.kernels.cpu import aten
from onchip.masks.visibility import Visibility
from onchip.testing import assert_accurate, make_packed, make_pages, make_qkv, oracle

RAW = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
RAW_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def heads_first(*tensors):
    return [t.transpose(1, 2) for t in tensors]


def attend(q, k, v, **options):
    return onchip.attention(q, k, v, kernel="aten_cpu", **options)


class TestRowsWithoutKeys:
    def test_torch_kernel(self):
        q, k, v = heads_first(*make_qkv(1, 2, 3, num_heads=1))
        mask = torch.full((2, 3), -math.inf)
        assert RAW(q, k, v, attn_mask=mask)[1].eq(0).all()

    @pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (0, 0)}])
    def test_onchip(self, options):
        q, k, v = make_qkv(1, 9, 4, num_heads=2)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out, lse = attend(*leaves, return_lse=True, **options)
        assert out[:, :5].eq(0).all() and lse[:, :, :5].eq(-math.inf).all()
        out.sum().backward()
        assert q.grad[:, :5].eq(0).all() and not any(t.grad.isnan().any() for t in leaves)

    def test_onchip_inside_a_block(self):
        q, k, v = make_qkv(1, 6, 6, num_heads=1)
        visible = torch.eye(6, dtype=torch.bool)
        visible[3] = False
        out, lse = attend(q, k, v, mask=visible, return_lse=True)
        assert out[0, 3].eq(0).all() and lse[0, 0, 3] == -math.inf
        torch.testing.assert_close(out[0, 4], v[0, 4])


class TestZeroLengths:
    @pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere n / 0 is a number")
    @pytest.mark.parametrize("seqlen_q, seqlen_k", [(2, 0), (0, 2)])
    def test_torch_kernel(self, seqlen_q, seqlen_k):
        code = (
            f"import torch; q, k = (torch.zeros(1, 1, n, 8) for n in ({seqlen_q}, {seqlen_k})); "
            "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k)"
        )
        died = subprocess.run([sys.executable, "-c", code], capture_output=True)
        assert died.returncode != 0

    @pytest.mark.parametrize(
        "batch, seqlen_q, seqlen_k", [(1, 2, 0), (1, 0, 2), (0, 2, 2), (1, 0, 0)]
    )
    def test_onchip(self, batch, seqlen_q, seqlen_k):
        x = [t.requires_grad_() for t in make_qkv(batch, seqlen_q, seqlen_k, num_heads=2)]
        out, lse = attend(*x, return_lse=True)
        assert out.eq(0).all() and lse.eq(-math.inf).all()
        out.sum().backward()
        assert all(t.grad.eq(0).all() for t in x)


class TestCausalAlignment:
    def test_torch_kernel(self):
        q, k, v = heads_first(*make_qkv(1, 2, 4, num_heads=1))
        out, _ = RAW(q, k, v, is_causal=True)
        torch.testing.assert_close(
            out[0, 0, 0], v[0, 0, 0]
        )  # top-left: the first query sees one key

    @pytest.mark.parametrize("seqlen_q, seqlen_k", [(2, 4), (63, 300), (300, 63), (257, 257)])
    def test_onchip(self, seqlen_q, seqlen_k):
        q, k, v = make_qkv(1, seqlen_q, seqlen_k, num_heads=2)
        exact = oracle(q, k, v, causal=True).out
        torch.testing.assert_close(attend(q, k, v, causal=True).double(), exact, rtol=0, atol=1e-5)


class TestHeadDimOfV:
    def test_torch_kernel(self):
        q, k, v = heads_first(*make_qkv(1, 4, 4, num_heads=1, head_dim=16, head_dim_v=8))
        with pytest.raises(RuntimeError):
            RAW(q, k, v)

    @pytest.mark.parametrize("dim, dim_v", [(16, 8), (8, 40)])
    def test_onchip(self, dim, dim_v):
        q, k, v = make_qkv(2, 33, 65, num_heads=4, num_kv_heads=2, head_dim=dim, head_dim_v=dim_v)
        assert_accurate(attend, q, k, v, causal=True, grad=True)


class TestRoundedPartials:
    def test_torch_kernel(self):
        q, k, v = heads_first(*make_qkv(1, 64, 64, num_heads=1, dtype=torch.bfloat16))
        assert RAW(q, k, v)[0].dtype == torch.bfloat16

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_onchip(self, dtype):
        """fp32 partials of 16-bit inputs merge to the accuracy of one pass."""
        q, k, v = make_qkv(1, 96, 192, num_heads=8, dtype=dtype)
        halves = [
            attend(q, k[:, a:b], v[:, a:b], return_lse=True, out_dtype=torch.float32)
            for a, b in ((0, 96), (96, 192))
        ]
        out, _ = onchip.merge_states(*zip(*halves, strict=True))
        assert out.dtype == torch.float32
        exact = oracle(q, k, v).out
        assert (out - exact).abs().max() < 1e-5

    def test_sinks_are_folded_before_the_rounding(self):
        q, k, v = make_qkv(1, 128, 128, num_heads=8, dtype=torch.bfloat16)
        assert_accurate(attend, q, k, v, sinks=torch.randn(8), grad=True)


class TestSixteenBitLse:
    SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}

    @staticmethod
    def share(lse, exact):
        """The error relative to the tolerance of the rule: 1e-5 * max(1, max |lse|)."""
        seen = exact.isfinite()
        assert torch.equal(lse.isfinite(), seen)
        return float((lse - exact)[seen].abs().max() / (1e-5 * max(1.0, exact[seen].abs().max())))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_torch_kernel(self, dtype):
        """Exponentials of 16-bit inputs come sixteen at a time, and 5e-5 off."""
        q, k, v = make_qkv(1, 111, 16, num_heads=4, dtype=dtype)
        _, lse = RAW(*heads_first(q, k, v))
        assert self.share(lse, oracle(q, k, v).lse) > 1

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(
        "options", [{}, {"causal": True}, {"window_size": (3, 0)}, {"mask": masks.window(2, 1)}]
    )
    def test_onchip(self, dtype, options):
        q, k, v = make_qkv(2, 111, dtype=dtype, **self.SIZES)
        out, lse = attend(q, k, v, return_lse=True, **options)
        assert out.dtype == dtype
        assert self.share(lse, oracle(q, k, v, **options).lse) < 0.3

    def test_onchip_packed(self):
        packed = make_packed([7, 111, 0, 1], dtype=torch.bfloat16, **self.SIZES)
        _, lse = onchip.varlen_attention(*packed[:3], return_lse=True, **packed.options)
        lengths = {n: packed.options[n] for n in ("cu_seqlens_q", "cu_seqlens_k")}
        assert self.share(lse, oracle(*packed[:3], **lengths).lse) < 0.3

    @pytest.mark.parametrize("seqlen_q", [1, 50])
    def test_onchip_paged(self, seqlen_q):
        q, k, v = make_qkv(2, seqlen_q, 99, dtype=torch.bfloat16, **self.SIZES)
        lengths = torch.tensor([0, 99, 198], dtype=torch.int32)
        pages = make_pages(k.flatten(0, 1), v.flatten(0, 1), lengths, page_size=16)
        _, lse = onchip.paged_attention(q, *pages, return_lse=True)
        assert self.share(lse, oracle(q, k, v, causal=True).lse) < 0.3

    def test_onchip_compiled(self):
        q, k, v = make_qkv(1, 111, dtype=torch.bfloat16, **self.SIZES)
        fn = lambda q, k, v: onchip.attention(q, k, v, return_lse=True)
        _, lse = torch.compile(fn, backend="aot_eager", fullgraph=True)(q, k, v)
        assert self.share(lse, oracle(q, k, v).lse) < 0.3

    @pytest.mark.parametrize("grad", [False, True])
    def test_calls_without_lse_do_not_change(self, grad, monkeypatch):
        """Not even where autograd keeps one: the result is the fast kernel's, bit by bit, on a CPU
        that multiplies 16 bits at speed.
        """
        monkeypatch.setattr(machine, "has_fast_matmul", lambda dtype: True)
        q, k, v = (t.requires_grad_(grad) for t in make_qkv(1, 111, dtype=torch.bfloat16))
        with torch.no_grad():
            raw = RAW(*heads_first(q, k, v))[0].transpose(1, 2)
        assert torch.equal(attend(q, k, v), raw)


class TestSixteenBitGradients:
    def test_torch_kernel(self):
        """dK and dV are summed in 16 bits over the query tiles."""
        q, k, v = make_qkv(1, 1024, 64, num_heads=4, dtype=torch.bfloat16)
        x = heads_first(q, k, v)
        out, lse = RAW(*x)
        dout = torch.randn_like(out)
        raw = RAW_BACKWARD(dout, *x, out, lse, 0.0, False)[2].transpose(1, 2)
        wide = [t.float() for t in (dout, *x, out)]
        fine = RAW_BACKWARD(*wide, lse, 0.0, False)[2].transpose(1, 2)
        leaf = v.double().requires_grad_()
        oracle(q, k, leaf).out.backward(dout.transpose(1, 2).double())
        rmse = lambda t: (t.double() - leaf.grad).square().mean().sqrt()
        assert rmse(raw) > 1.3 * rmse(fine.bfloat16())

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize(
        "options",
        [{}, {"causal": True}, pytest.param({"window_size": (64, 0)}, marks=pytest.mark.slow)],
    )
    def test_onchip(self, dtype, options):
        q, k, v = make_qkv(1, 512, 512, num_heads=4, num_kv_heads=2, dtype=dtype)
        assert_accurate(attend, q, k, v, grad=True, **options)


def test_torch_kernel_needs_float_masks():
    q, k, v = heads_first(*make_qkv(1, 4, 4, num_heads=1))
    with pytest.raises(RuntimeError):
        RAW(q, k, v, attn_mask=torch.ones(4, 4, dtype=torch.bool))


def test_the_gradient_of_lse_is_one_more_column():
    q, k, v = (t.double().requires_grad_() for t in make_qkv(2, 7, 9, num_heads=4, num_kv_heads=2))
    out, lse = attend(q, k, v, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad([out, lse], [q, k, v], [dout, dlse])
    exact = oracle(q, k, v)
    wanted = torch.autograd.grad([exact.out, exact.lse], [q, k, v], [dout, dlse])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


class TestWork:
    """Calls cover every row once and read few keys besides the visible ones."""

    @pytest.mark.parametrize(
        "rule, budget",
        [
            (Visibility(8192, 8192, True, (256, None), None, 0, 0), 3.0),
            (Visibility(1000, 3000, True, (None, None), None, 0, 0), 1.3),
            (Visibility(777, 1111, False, (0, 0), None, 0, 0), 300.0),
        ],
    )
    def test_cells(self, rule, budget):
        calls = aten._calls(rule, 8)
        assert [c.q0 for c in calls[1:]] == [c.q1 for c in calls[:-1]]
        assert calls[0].q0 == 0 and calls[-1].q1 == rule.seqlen_q
        visible = rule.tile(0, rule.seqlen_q, 0, rule.seqlen_k, "cpu").sum().item()
        assert visible <= sum(map(aten._cells, calls)) <= budget * visible
        for call in calls:
            inside = torch.zeros(rule.seqlen_k, dtype=torch.bool)
            for k0, k1 in call.spans:
                inside[k0:k1] = True
            visible = rule.tile(call.q0, call.q1, 0, rule.seqlen_k, "cpu")
            assert visible is None or not (visible & ~inside).any()


class TestScales:
    def test_torch_kernel(self):
        """-inf of the causal mask is multiplied with the scale."""
        q, k, v = heads_first(*make_qkv(1, 4, num_heads=1))
        for scale in (0.0, -0.5):
            assert RAW(q, k, v, is_causal=True, scale=scale)[0].isnan().any()

    @pytest.mark.parametrize("scale", [0.0, -0.5])
    def test_onchip(self, scale):
        q, k, v = make_qkv(1, 40, num_heads=2, head_dim=8)
        assert_accurate(attend, q, k, v, causal=True, grad=True, softmax_scale=scale)


class TestScoresOfMinusInfinity:
    def test_torch_kernel(self):
        q, k, v = heads_first(*make_qkv(1, 2, 3, num_heads=1))
        assert RAW(q * 0 - 1e20, k * 0 + 1e20, v)[1].eq(0).all()

    def test_onchip_next_to_rows_with_lse_zero(self):
        """One key of score 0 and value 0 gives lse = 0 and out = 0 as well, and is seen."""
        q, k, v = make_qkv(1, 4, 1, num_heads=1)
        q[:, :2], k[:], v[:] = 0.0, 1e20, 0.0
        q[:, 2:] = -1e20
        out, lse = attend(q, k, v, return_lse=True)
        assert out.eq(0).all() and lse[0, 0].tolist() == [0.0, 0.0, -math.inf, -math.inf]


class TestPlanesOfAMask:
    """Small planes of a mask are one call, large ones are calls of their own."""

    @pytest.fixture(params=["one call", "a call each"])
    def most_cells(self, request, monkeypatch):
        if request.param == "a call each":
            monkeypatch.setattr(aten, "_SMALL_PLANE", 0)

    @pytest.mark.parametrize("heads", [1, 4])
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"causal": True},
            {"window_size": (9, 2)},
            {"softmax_scale": -0.3},
            {"sinks": torch.linspace(-1, 1, 4)},
        ],
        ids=str,
    )
    def test_onchip(self, most_cells, heads, options):
        """Rows without keys, whole planes without keys, grouped heads, unequal widths."""
        q, k, v = make_qkv(3, 21, 30, num_heads=4, num_kv_heads=2, head_dim=8, head_dim_v=12)
        generator = torch.Generator().manual_seed(heads)
        visible = torch.rand(3, heads, 21, 30, generator=generator) < 0.3
        visible[0, :, :, 25:], visible[1, 0, 4], visible[2, -1] = False, False, False
        mask = masks.build(masks.dense(visible), 3, heads, 21, 30)
        assert_accurate(attend, q, k, v, mask=mask, grad=True, **options)

    def test_small_planes_are_one_call(self, monkeypatch):
        calls, call = [], aten._call_forward
        monkeypatch.setattr(aten, "_call_forward", lambda *args: calls.append(1) or call(*args))
        visible = torch.rand(5, 1, 16, 16) < 0.5
        mask = masks.build(masks.dense(visible), 5, 1, 16, 16)
        attend(*make_qkv(5, 16, num_heads=2), mask=mask)
        assert len(calls) == 1
        monkeypatch.setattr(aten, "_SMALL_PLANE", 16 * 16 * 2 - 1)
        attend(*make_qkv(5, 16, num_heads=2), mask=mask)
        assert len(calls) == 6
