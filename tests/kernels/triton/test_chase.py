"""The ring that one thread walks: every line once, and where it stands after so many hops."""

import pytest
import torch

from tests.interpreted import interpreted

pytest.importorskip("triton")


def test_a_ring_goes_through_every_line_once():
    from onchip.kernels.triton.chase import LINE, lines

    order = torch.randperm(63, dtype=torch.int32)
    ring, place, seen = lines(order), 0, []
    for _ in range(63):
        place = int(ring[place * LINE])
        seen.append(place)
    assert sorted(seen) == list(range(63))


@interpreted
def test_interpreted_hops_are_those_of_the_ring():
    from onchip.kernels.triton.chase import LINE, chase, lines

    ring, place = lines(torch.randperm(31, dtype=torch.int32)), 0
    for hops in range(7):
        place = int(ring[place * LINE])
        assert chase(ring, hops).item() == place
