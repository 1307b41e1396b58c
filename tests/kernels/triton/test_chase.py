"""The ring of pointer chasing: every line once, and the line after so many hops."""

import pytest
import torch

from tests.interpreted import interpreted

pytest.importorskip("triton")


def test_a_ring_visits_every_line_once():
    from onchip.kernels.triton.chase import LINE, make_ring

    order = torch.randperm(63, dtype=torch.int32)
    ring, place, seen = make_ring(order), 0, []
    for _ in range(63):
        place = int(ring[place * LINE])
        seen.append(place)
    assert sorted(seen) == list(range(63))


@interpreted
def test_interpreted_hops_follow_the_ring():
    from onchip.kernels.triton.chase import LINE, chase, make_ring

    ring, place = make_ring(torch.randperm(31, dtype=torch.int32)), 0
    for hops in range(7):
        place = int(ring[place * LINE])
        assert chase(ring, hops).item() == place
