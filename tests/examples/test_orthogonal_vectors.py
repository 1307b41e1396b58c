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
