"""Dropout depends only on positions."""

import pytest
import torch

from onchip.kernels.cpu.philox import Corner, keep


@pytest.mark.parametrize("corner", [Corner(0, 0, 0, 0), Corner(1, 2, 3, 5), Corner(0, 1, 7, 2)])
def test_a_tile_equals_its_part_of_the_whole_mask(corner):
    seed = torch.tensor(1234567890123)
    whole = keep(seed, (2, 4, 16, 24), Corner(0, 0, 0, 0), 0.3)
    tile = keep(seed, (1, 2, 5, 9), corner, 0.3)
    b, h, q, k = corner
    assert torch.equal(tile, whole[b : b + 1, h : h + 2, q : q + 5, k : k + 9])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_kept_share_is_one_minus_p(p):
    kept = keep(torch.tensor(7), (2, 4, 128, 128), Corner(0, 0, 0, 0), p).double().mean()
    assert abs(kept - (1 - p)) < 4 * (p * (1 - p) / 2**17) ** 0.5
