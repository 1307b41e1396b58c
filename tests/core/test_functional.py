"""The public functions beyond the contract grid: weights, memory, cost of a call, inputs without
copies.
"""

import subprocess
import sys
import time

import pytest
import torch

import onchip
from onchip import fold, masks
from onchip.cost.prefixes import costs
from onchip.testing import make_qkv, oracle


class TestWeights:
    OPTIONS = [
        {},
        {"causal": True, "softcap": 3.0},
        {"window_size": (4, 2), "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])},
        {"mask": masks.causal() & masks.window(6, 0), "softmax_scale": 0.3},
        {"bias": torch.randn(2, 4, 11, 13)},
    ]

    @pytest.mark.parametrize("options", OPTIONS)
    def test_rows_of_p(self, options):
        q, k, v = make_qkv(2, 11, 13, num_heads=4, num_kv_heads=2, head_dim=8)
        out, lse = onchip.attention(q, k, v, return_lse=True, **options)
        rows = [0, 5, 10]
        p = onchip.attention_weights(q, k, lse, rows, **options)
        assert p.shape == (2, 4, 3, 13)
        again = torch.einsum("bhrk,bkhd->brhd", p, v.repeat_interleave(2, 2))
        torch.testing.assert_close(again, out[:, rows])

    def test_weights_with_a_sink_sum_to_less_than_one(self):
        q, k, v = make_qkv(1, 5, 7, num_heads=2)
        sinks = torch.tensor([0.0, 2.0])
        _, lse = onchip.attention(q, k, v, sinks=sinks, return_lse=True)
        missing = 1 - onchip.attention_weights(q, k, lse, torch.arange(5)).sum(-1)
        torch.testing.assert_close(missing, torch.exp(sinks[:, None] - lse), rtol=1e-4, atol=1e-6)

    def test_a_row_without_keys_is_zero(self):
        q, k, v = make_qkv(1, 4, 2, num_heads=1)
        _, lse = onchip.attention(q, k, v, causal=True, return_lse=True)
        assert onchip.attention_weights(q, k, lse, [0], causal=True).eq(0).all()


def test_merged_parts_equal_the_whole():
    """Split the keys anywhere, attend to each part, merge: the same result."""
    q, k, v = make_qkv(2, 33, 100, num_heads=4)
    parts = [
        onchip.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 37), (37, 100))
    ]
    merged = onchip.merge_states(*zip(*parts, strict=True))
    whole = onchip.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(merged, whole)


def test_a_mask_is_rebuilt_only_when_the_shape_changes():
    mask = masks.causal() & masks.document(torch.tensor([0, 100, 300], dtype=torch.int32))
    first = mask.build(1, 2, 300, 300)
    assert mask.build(1, 2, 300, 300) is first


class TestFolds:
    """The public functions of `onchip.fold`; more tests are in tests/fold."""

    def test_cascade_is_planned_from_tables(self):
        """Without a plan, sequences that share many pages become a cascade; with few pages they do
        not.
        """
        k_pages, v_pages = torch.randn(2, 12, 4096, 1, 32, dtype=torch.float64)
        table = torch.tensor([[3, 7, 1], [3, 7, 2], [3, 7, 4]], dtype=torch.int32)
        seqlens = torch.tensor([8193, 9001, 12288], dtype=torch.int32)
        q = torch.randn(3, 1, 2, 32, dtype=torch.float64)
        plan = fold.cascade.plan(table, seqlens, 4096, costs(q, k_pages, v_pages))
        assert plan.shared == (2, 2, 2)
        want = onchip.paged_attention(q, k_pages, v_pages, table, seqlens, return_lse=True)
        for given in ({}, {"plan": plan}):
            args = (q, k_pages, v_pages, table, seqlens)
            got = onchip.cascade_attention(*args, return_lse=True, **given)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        packed = onchip.cascade_attention(q[:, 0], *args[1:], cu_seqlens_q=torch.arange(4).int())
        torch.testing.assert_close(packed[:, None], want[0])
        with pytest.raises(ValueError, match="give plan or cu_seqlens_q"):
            onchip.cascade_attention(*args, plan=plan, cu_seqlens_q=torch.arange(4).int())

    def test_offload(self):
        q, k, v = make_qkv(2, 7, 41, dtype=torch.float64)
        options = {"causal": True, "window_size": (20, None), "return_lse": True}
        want = onchip.attention(q, k, v, **options)
        for source in ((k, v), fold.Offloaded(k, v)):
            got = onchip.offload_attention(q, source, segment_bytes=50_000, **options)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


PEAK = """
import resource, torch, onchip
torch.set_num_threads(2)
warm = [torch.randn(1, 256, 1, 64, requires_grad=True) for _ in range(3)]
onchip.attention(*warm, kernel={kernel!r}, **{options!r}).sum().backward()
q, k, v = (torch.randn(1, {n}, 1, 64, requires_grad={grad}) for _ in range(3))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before = peak()
out = onchip.attention(q, k, v, kernel={kernel!r}, **{options!r})
if {grad}:
    out.backward(torch.ones_like(out))
print(peak() - before)
"""


def peak_megabytes(n, grad, kernel=None, **options):
    code = PEAK.format(n=n, grad=grad, kernel=kernel, options=options)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout)


class TestMemory:
    """Never an N x N temporary: at N = 16,384 one fp32 score matrix is 1,074 MB; the outputs are 4
    to 17 MB.
    """

    @pytest.mark.parametrize(
        "options",
        [
            pytest.param({}, marks=pytest.mark.slow),
            pytest.param({"causal": True}, marks=pytest.mark.slow),
            {"window_size": (255, 0)},
        ],
    )
    def test_forward(self, options):
        assert peak_megabytes(16384, False, **options) < 48

    @pytest.mark.slow
    @pytest.mark.parametrize("kernel", ["aten_cpu", "tiled"])
    def test_backward(self, kernel):
        assert peak_megabytes(16384, True, kernel, window_size=(255, 0)) < 96

    @pytest.mark.slow
    def test_backward_of_all_pairs(self):
        assert peak_megabytes(16384, True) < 96

    @pytest.mark.slow
    @pytest.mark.parametrize("n, grad, limit", [(65536, False, 64), (32768, True, 96)])
    def test_long_sequences(self, n, grad, limit):
        """S alone would be 17 and 4 GB. Causal: half the time; all pairs are tested above."""
        assert peak_megabytes(n, grad, causal=True) < limit


def test_host_cost_of_a_call():
    """A limit in CPU time; on a busy or slow machine, relative to a call of torch's at the same
    time. `onchip bench cpu` measures it.
    """
    q, k, v = make_qkv(1, 16, num_heads=8)
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]
    plain = lambda: torch.nn.functional.scaled_dot_product_attention(*heads_first)
    torch.set_num_threads(1)
    with torch.no_grad():
        ours = lambda: _cpu_seconds(lambda: onchip.attention(q, k, v), 50)
        pairs = [(ours(), _cpu_seconds(plain, 50)) for _ in range(40)]
    fastest, ratio = min(s for s, _ in pairs), min(s / other for s, other in pairs)
    assert fastest < 250e-6 or ratio < 4, (fastest, ratio)


def _cpu_seconds(fn, repeats):
    start = time.thread_time()
    for _ in range(repeats):
        fn()
    return (time.thread_time() - start) / repeats


class TestInputs:
    def test_strided_views_are_not_copied(self, monkeypatch):
        """(batch, heads, seqlen, dim) as a transposed view, and a fused qkv as slices."""
        qkv = torch.randn(2, 65, 3, 4, 16)
        q, k, v = qkv.unbind(2)
        expected = oracle(q, k, v, causal=True).out
        monkeypatch.setattr(torch.Tensor, "contiguous", _refuse_copies(torch.Tensor.contiguous, q))
        out = onchip.attention(q, k, v, causal=True)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)

    def test_heads_first_views(self):
        q, k, v = (torch.randn(2, 4, 65, 16).transpose(1, 2) for _ in range(3))
        out = onchip.attention(q, k, v)
        torch.testing.assert_close(out.double(), oracle(q, k, v).out, rtol=0, atol=1e-5)

    def test_inputs_are_not_written(self):
        x = make_qkv(1, 40, num_heads=2)
        before = [t.clone() for t in x]
        onchip.attention(*x, causal=True, sinks=torch.zeros(2))
        assert all(torch.equal(a, b) for a, b in zip(x, before, strict=True))

    def test_a_dropout_seed_may_be_a_tensor(self):
        x = make_qkv(1, 40, num_heads=2)
        a = onchip.attention(*x, dropout_p=0.5, dropout_seed=11)
        b = onchip.attention(*x, dropout_p=0.5, dropout_seed=torch.tensor(11))
        c = onchip.attention(*x, dropout_p=0.5, dropout_seed=12)
        assert torch.equal(a, b) and not torch.equal(a, c)


def _refuse_copies(contiguous, q):
    def checked(self, *args, **kwargs):
        copied = contiguous(self, *args, **kwargs)
        assert copied is self or self.untyped_storage().data_ptr() != q.untyped_storage().data_ptr()
        return copied

    return checked
