"""Dice depend on the position of an element alone: on no layout, tile or neighbour."""

import pytest
import torch

from onchip.core.philox import Corner
from onchip.quant.rounding import OPERANDS, draw_tokens, draw_weights

WHOLE = Corner(0, 0, 0, 0)


@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_packed_and_dense_tokens_have_the_same_dice(operand):
    lengths = [5, 0, 11, 1]
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = draw_tokens(torch.zeros(17, 3, 10), operand, 7, cu)
    dense = draw_tokens(torch.zeros(4, 11, 3, 10), operand, 7)
    parts = packed.split(lengths)
    assert all(torch.equal(part, dense[i, : len(part)]) for i, part in enumerate(parts))


def test_strides_and_further_channels_do_not_matter():
    x = torch.zeros(2, 5, 3, 10)
    dice = draw_tokens(x, "q", 0)
    assert torch.equal(draw_tokens(x.transpose(1, 2).contiguous().transpose(1, 2), "q", 0), dice)
    assert torch.equal(draw_tokens(torch.zeros(2, 5, 3, 16), "q", 0)[..., :10], dice)


@pytest.mark.parametrize("corner", [WHOLE, Corner(1, 2, 3, 5), Corner(0, 1, 7, 2)])
def test_a_tile_of_weights_equals_its_part_of_the_whole(corner):
    device = torch.device("cpu")
    whole = draw_weights((2, 4, 16, 24), WHOLE, 3, device)
    tile = draw_weights((1, 2, 5, 9), corner, 3, device)
    b, h, q, k = corner
    assert torch.equal(tile, whole[b : b + 1, h : h + 2, q : q + 5, k : k + 9])


def test_operands_and_seeds_differ():
    x = torch.zeros(1, 64, 2, 64)
    drawn = [draw_tokens(x, operand, seed) for operand in OPERANDS for seed in (0, 1)]
    for i, a in enumerate(drawn):
        assert a.min() >= 0 and a.max() < 1 and a.mean().item() == pytest.approx(0.5, abs=0.02)
        for b in drawn[:i]:
            assert abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]) < 0.05
