"""Dropout depends only on positions."""

import pytest
import torch

from onchip.kernels.cpu.philox import Corner, draw, keep

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
