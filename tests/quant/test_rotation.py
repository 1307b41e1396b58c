"""The rotation is orthonormal, does not change scores, and spreads large channels."""

import pytest
import torch

from onchip.quant.rotation import blocks, matrix, rotate, signs, unrotate
from onchip.testing import make_qkv

DIMS = pytest.mark.parametrize("head_dim", [1, 24, 64, 80, 96, 128, 192, 256])


@DIMS
def test_orthonormal(head_dim):
    m = rotate(torch.eye(head_dim, dtype=torch.float64), seed=3)
    assert torch.allclose(m @ m.T, torch.eye(head_dim, dtype=torch.float64), atol=1e-14)
    assert torch.allclose(matrix(head_dim, 3).double(), m, atol=1e-6)


@DIMS
def test_entries_are_signs_over_the_root_of_their_block(head_dim):
    """Sylvester's matrix by its definition: entry (i, j) has the parity of i & j."""
    at = 0
    m = rotate(torch.eye(head_dim, dtype=torch.float64))
    for width in blocks(head_dim):
        inside = slice(at, at + width)
        sylvester = [[(-1.0) ** (i & j).bit_count() for j in range(width)] for i in range(width)]
        want = torch.tensor(sylvester, dtype=torch.float64) * width**-0.5
        assert torch.allclose(m[inside, inside], signs(head_dim)[inside, None] * want)
        at += width
    assert at == head_dim
    assert int((m != 0).sum()) == sum(width**2 for width in blocks(head_dim))


@DIMS
def test_unrotate_is_the_inverse(head_dim):
    x = make_qkv(1, 63, head_dim=head_dim, dtype=torch.float64)[0]
    assert torch.allclose(unrotate(rotate(x, 5), 5), x, atol=1e-13)
    assert torch.allclose(rotate(unrotate(x, 5), 5), x, atol=1e-13)


@DIMS
def test_scores_do_not_change(head_dim):
    q, k, _ = make_qkv(1, 63, head_dim=head_dim, dtype=torch.float64, distribution="outlier")
    score = lambda q, k: torch.einsum("bqhd,bkhd->bhqk", q, k)
    assert torch.allclose(score(rotate(q, 2), rotate(k, 2)), score(q, k), atol=1e-10)


def test_one_large_channel_becomes_many_small():
    x = torch.zeros(128)
    x[17] = 100
    assert torch.allclose(rotate(x).abs(), torch.full((128,), 100 / 128**0.5))


def test_a_constant_row_is_spread_too():
    """The reason for the signs: an unsigned Hadamard matrix would put it all into one channel."""
    assert rotate(torch.ones(128)).abs().max() < 5


def test_seeds_give_different_and_reproducible_signs():
    assert set(signs(256).tolist()) == {-1.0, 1.0}
    assert torch.equal(signs(128, 4), signs(128, 4))
    assert not torch.equal(signs(128, 4), signs(128, 5))
    assert signs(128)[:8].tolist() == [-1, 1, 1, -1, 1, 1, 1, 1]  # on every machine


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_are_not_rounded_again(dtype):
    x = make_qkv(1, 63, dtype=dtype)[0]
    assert rotate(x).dtype == torch.float32
    assert torch.allclose(rotate(x).double(), rotate(x.double()), atol=1e-5)
