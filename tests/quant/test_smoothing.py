"""Smoothing: the softmax stays exact, lse is corrected, each sequence has its own mean."""

import pytest
import torch

from onchip.quant.smoothing import lse_shift, smooth_keys, smooth_queries
from onchip.testing import make_packed, make_qkv, max_error, oracle

LENGTHS = [63, 0, 111, 1]


def packed_example():
    """Sequences with very different means of their keys."""
    x = make_packed(LENGTHS, num_heads=4, num_kv_heads=2, head_dim=24)
    bias = 10 * torch.randn(len(LENGTHS), 2, 24, generator=torch.Generator().manual_seed(1))
    k = x.k + bias.repeat_interleave(torch.tensor(LENGTHS), 0)
    return x._replace(q=x.q.double(), k=k.double(), v=x.v.double())


def assert_exact(q, k, v, smooth, shift, **options):
    got, want = oracle(q, smooth, v, **options), oracle(q, k, v, **options)
    assert max_error(got.out, want.out) < 1e-11
    assert max_error(got.lse + shift, want.lse) < 1e-11
    assert max_error(got.lse, want.lse) > 1e-3  # there was something to repair


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softmax_scale": 0.4}])
def test_the_softmax_is_exact_and_lse_is_corrected(options):
    x = make_qkv(3, 63, 97, num_heads=4, num_kv_heads=2, head_dim=24, distribution="biased")
    q, k, v = (t.double() for t in x)
    smooth, mean = smooth_keys(k)
    assert mean.shape == (3, 2, 24)
    assert smooth.mean(1).abs().max() < 1e-14
    scale = options.get("softmax_scale", 24**-0.5)
    assert_exact(q, k, v, smooth, lse_shift(q, mean, scale), **options)


def test_each_packed_sequence_has_its_mean():
    q, k, v, cu_q, cu_k = packed_example()
    smooth, mean = smooth_keys(k, cu_k)
    alone = [part.mean(0) if len(part) else torch.zeros(2, 24) for part in k.split(LENGTHS)]
    assert torch.allclose(mean, torch.stack(alone).double(), atol=1e-13)
    assert (smooth[-1] == 0).all()  # a key alone is its mean
    shift = lse_shift(q, mean, 24**-0.5, cu_q)
    assert shift.shape == (4, sum(LENGTHS))
    assert_exact(q, k, v, smooth, shift, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def test_the_mean_of_many_keys_is_accurate():
    """fp32 sums of a million keys of one sign would be off by 1e-3 and more."""
    k = torch.full((1, 1_000_001, 1, 1), 0.1)
    smooth, mean = smooth_keys(k)
    assert mean.item() == pytest.approx(0.1, rel=1e-7)
    assert smooth.abs().max() < 1e-8


def test_16_bits_are_widened():
    k = make_qkv(2, 63, dtype=torch.bfloat16, distribution="biased")[1]
    smooth, mean = smooth_keys(k)
    assert smooth.dtype == mean.dtype == torch.float32
    assert torch.allclose(smooth + mean[:, None], k.float(), atol=1e-5)


@pytest.mark.parametrize("lengths", [[300], [100, 0, 129, 1]], ids=["one", "four"])
def test_queries_lose_the_mean_of_their_tile(lengths):
    """Tiles begin with the sequence; the last one may be shorter."""
    packed = make_packed(lengths, num_heads=3, head_dim=16)
    rest, mean = smooth_queries(packed.q, 64, packed.cu_seqlens_q)
    assert rest.shape == mean.shape == packed.q.shape
    want = [
        tile.double().mean(0, keepdim=True).expand_as(tile)
        for part in packed.q.split(lengths)
        for tile in part.split(64)
    ]
    torch.testing.assert_close(mean.double(), torch.cat(want), atol=1e-6, rtol=0)
    assert torch.equal(rest, packed.q - mean)
    dense, dense_mean = smooth_queries(packed.q[: lengths[0]][None], 64)
    assert torch.equal(dense[0], rest[: lengths[0]])
    assert torch.equal(dense_mean[0], mean[: lengths[0]])
