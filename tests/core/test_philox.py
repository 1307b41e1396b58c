"""Philox: known answers, and tiles that equal their part of the whole."""

import pytest
import torch

from onchip.core.philox import Corner, draw, draw_tile

VECTORS = [  # Random123's known answers for philox4x32-10: counter, key, u32s
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize("counter, key, u32s", VECTORS)
def test_known_answers(counter, key, u32s):
    ints = lambda text: [int(w, 16) for w in text.split()]
    low, high = ints(key)
    seed = (high << 32 | low) - (1 << 64 if high >> 31 else 0)
    got = draw(torch.tensor(seed), *(torch.tensor(c) for c in ints(counter)))
    assert [int(w) for w in got] == ints(u32s)


@pytest.mark.parametrize("corner", [Corner(0, 0, 0, 0), Corner(1, 2, 3, 5), Corner(0, 1, 7, 2)])
def test_a_tile_equals_its_part_of_the_whole(corner):
    seed = torch.tensor(987654321)
    whole = draw_tile(seed, (2, 4, 16, 24), Corner(0, 0, 0, 0))
    tile = draw_tile(seed, (1, 2, 5, 9), corner)
    b, h, q, k = corner
    assert torch.equal(tile, whole[b : b + 1, h : h + 2, q : q + 5, k : k + 9])


def test_the_counter_of_an_element():
    """(column // 4, row, head, batch), lane column % 4."""
    seed, at = torch.tensor(5), (1, 2, 3, 6)
    whole = draw_tile(seed, (2, 3, 4, 8), Corner(0, 0, 0, 0))
    batch, head, row, column = map(torch.tensor, at)
    assert whole[at] == draw(seed, column // 4, row, head, batch)[6 % 4]
