"""Attention decides orthogonal vectors as trying all pairs does, in any precision."""

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "orthogonal_vectors.py"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [1, 9, 24, 255])
def test_rows_are_those_of_all_pairs(dtype, dim):
    generator = torch.Generator().manual_seed(dim)
    a, b = (torch.rand(2, 799, dim, generator=generator) < 0.4).float()
    b[dim::7] = 1.0  # rows that nobody but zero is orthogonal to
    want = (a @ b.T == 0).any(1)
    assert torch.equal(EXAMPLE["rows_with_orthogonal"](a, b, dtype), want)
    assert dim != 24 or 0 < want.sum() < 799


def test_a_hidden_pair_is_found_and_none_is_not():
    a, b = torch.ones(500, 40), torch.ones(500, 40)
    assert EXAMPLE["orthogonal_pair"](a, b) is None
    a[321, :20], b[77, 20:] = 0.0, 0.0
    assert EXAMPLE["orthogonal_pair"](a, b) == (321, 77)


@pytest.fixture(params=[2, 63, 799])
def hard(request):
    """Two sets with rows that are orthogonal to some other row, and rows that are not."""
    n = request.param
    a, b = (torch.rand(2, n, 24) < 0.4).float()
    a[0], b[:, 3] = 0.0, 1.0
    a[1:, 3] = (torch.rand(n - 1) < 0.5).float()
    a[1, 3] = 1.0
    want = (a @ b.T == 0).any(1)
    assert want[0] and not want[1]
    return a, b, want


def test_an_error_of_a_quarter_decides(hard):
    a, b, want = hard
    out = EXAMPLE["outputs"](a, b, torch.float64)
    error = torch.where(want, 0.25, -0.25)
    assert torch.equal(EXAMPLE["decide_by_additive"](out + error), want)
    assert torch.equal(EXAMPLE["decide_by_additive"](out - error), want)


def test_a_relative_error_of_nearly_all_decides(hard):
    a, b, want = hard
    n = len(b)
    out, mu = EXAMPLE["outputs"](a, b, torch.float64), 1 - 1 / n
    worst = out * torch.where(want, 1 + mu, 1 - mu)
    assert torch.equal(EXAMPLE["decide_by_relative"](worst, n), want)
    drawn = out * (1 + mu * (2 * torch.rand(n, dtype=torch.float64) - 1))
    assert torch.equal(EXAMPLE["decide_by_relative"](drawn, n), want)
