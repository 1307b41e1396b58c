"""The memory checker of the interpreted tests reports accesses out of bounds."""

import pytest
import torch

from tests.interpreted import interpreted

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def move(source, target, first, count, N: tl.constexpr, ADD: tl.constexpr):
    lanes = tl.arange(0, N)
    x = tl.load(source + first + lanes, mask=lanes < count, other=0.0)
    if ADD:
        tl.atomic_add(target + lanes, x, mask=lanes < count)
    else:
        tl.store(target + lanes, x, mask=lanes < count)


def run(source, target, first, count, add):
    move[(1,)](source, target, first, count, 64, add)


@interpreted
@pytest.mark.parametrize("add", [False, True])
def test_masked_lanes_may_point_anywhere(add):
    source, target = torch.arange(50.0), torch.zeros(50)
    run(source, target, 0, 50, add)
    assert torch.equal(source, target)


@interpreted
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    "lengths, first, what", [((49, 50), 0, "read"), ((50, 50), -1, "read"), ((50, 49), 0, None)]
)
def test_one_lane_out_of_bounds_is_reported_even_inside_an_allocation(lengths, first, what, add):
    source, target = (torch.zeros(64)[7 : 7 + n] for n in lengths)
    what = what or ("update" if add else "write")
    with pytest.raises(Exception, match=f"1 of 50 lanes {what} outside"):
        run(source, target, first, 50, add)


@interpreted
def test_gaps_of_a_view_may_be_read_but_not_memory_after_it():
    """Columns of a matrix: the kernel may read up to the last of them."""
    source, target = torch.zeros(9, 8), torch.zeros(64)
    run(source[:, 2], target, 0, 64, False)
    with pytest.raises(Exception, match="2 of 63 lanes read outside"):
        run(source[:, 2], target, 4, 63, False)


@interpreted
def test_without_tensors_nothing_may_be_read():
    with pytest.raises(Exception, match="64 of 64 lanes read outside"):
        run(torch.zeros(0), torch.zeros(64), 0, 64, False)
