"""Formats are grids: compared with torch's own casts, number by number, and with written lists."""

import math

import pytest
import torch

from onchip.quant.formats import E4M3, E5M2, FORMATS, FP4, INT8, cast, store

FP8 = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
ALL = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


def grid(fmt):
    """Every finite number of a format, ascending: from torch's bytes where it has the format."""
    if fmt is FP4:
        half = torch.tensor([0.5, 1, 1.5, 2, 3, 4, 6])
        return torch.cat([-half.flip(0), torch.zeros(1), half])
    if fmt is INT8:
        return torch.arange(-127.0, 128.0)
    numbers = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(fmt.dtype).float()
    return numbers[numbers.isfinite()].unique()


def around(fmt):
    """The grid, its midpoints, and the fp32 neighbours of both: every case of rounding."""
    points = grid(fmt)
    points = torch.cat([points, (points[1:] + points[:-1]) / 2])
    up, down = (torch.nextafter(points, torch.tensor(x)) for x in (math.inf, -math.inf))
    x = torch.cat([points, up, down])
    return x[x.abs() <= fmt.max]


@ALL
def test_numbers_on_the_grid_stay(fmt):
    points = grid(fmt)
    assert points.abs().max() == fmt.max
    assert torch.equal(cast(points, fmt), points)
    assert torch.equal(cast(points, fmt, torch.Generator().manual_seed(0)), points)


@FP8
def test_rounds_as_torch_does(fmt):
    """Ties, subnormals and the smallest numbers included."""
    random = torch.randn(20_000, generator=torch.Generator().manual_seed(1))
    small = random * 2.0**fmt.min_exponent
    for x in (around(fmt), random * 10, small, small / 8, torch.tensor([0.0, 1e-45, -1e-45])):
        assert torch.equal(cast(x, fmt), x.to(fmt.dtype).float())


@FP8
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_all_16_bit_numbers_round_as_torch_does(fmt, dtype):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = x[x.float().abs() <= fmt.max]
    assert torch.equal(cast(x, fmt), x.to(fmt.dtype).float())


def test_integers_round_half_to_even():
    x = torch.cat([around(INT8), torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5])])
    assert torch.equal(cast(x, INT8), x.round())
    assert torch.equal(store(cast(x, INT8), INT8).float(), x.round())


@ALL
def test_nearest_in_double_precision(fmt):
    """fp64 is rounded once: no number of the grid is nearer, not even by 2^-40."""
    points = grid(fmt).double()
    middle = (points[1:] + points[:-1]) / 2
    for nudge, want in ((1 + 2.0**-40, points), (1 - 2.0**-40, points)):
        x = middle * nudge
        nearest = want[(x[:, None] - want).abs().argmin(1)]
        assert torch.equal(cast(x, fmt).double(), nearest)


@ALL
def test_out_of_range_becomes_the_largest_and_nan_stays(fmt):
    beyond = torch.tensor([fmt.max * 1.001, fmt.max * 4, 3e38, math.inf])
    assert (cast(beyond, fmt) == fmt.max).all()
    assert (cast(-beyond, fmt) == -fmt.max).all()
    assert cast(torch.tensor([math.nan]), fmt).isnan().all()


@ALL
def test_storing_loses_nothing(fmt):
    points = grid(fmt)
    stored = store(points, fmt)
    assert stored.dtype == fmt.dtype
    assert torch.equal(stored.float(), points)
    stored_nan = store(torch.tensor([math.nan]), fmt).float()
    assert stored_nan.item() == 0 if fmt is INT8 else stored_nan.isnan()


@ALL
def test_random_rounding_gives_a_neighbour(fmt):
    points, x = grid(fmt), around(fmt)
    got = cast(x, fmt, torch.Generator().manual_seed(3))
    below = points[(torch.searchsorted(points, x, right=True) - 1).clamp(0)]
    above = points[torch.searchsorted(points, x).clamp(max=len(points) - 1)]
    assert ((got == below) | (got == above)).all()


@ALL
@pytest.mark.parametrize("share", [0.03, 0.5, 0.8])
def test_random_rounding_is_unbiased(fmt, share):
    """The mean of n draws is within 5 standard deviations of x: a bias of 1 % of a step would
    not pass, in a normal or in a subnormal binade.
    """
    n, points = 100_000, grid(fmt)
    for i in (len(points) // 2, len(points) - 2):
        low, high = points[i].item(), points[i + 1].item()
        x = low + share * (high - low)
        draws = cast(torch.full((n,), x), fmt, torch.Generator().manual_seed(7)).double()
        deviation = (high - low) * math.sqrt(share * (1 - share) / n)
        assert abs(draws.mean().item() - x) < 5 * deviation
        assert 5 * deviation < 0.01 * (high - low)


def test_rounding_to_nearest_is_biased():
    """The reason for random rounding, and a check that the test above can fail."""
    x = torch.full((1000,), 1.03)
    assert cast(x, E4M3).mean().item() == pytest.approx(1.0)


@ALL
def test_random_rounding_is_reproducible(fmt):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    draw = lambda seed: cast(x, fmt, torch.Generator().manual_seed(seed))
    assert torch.equal(draw(11), draw(11))
    assert not torch.equal(draw(11), draw(12))


@ALL
def test_dice_decide_which_neighbour(fmt):
    """Up iff the dice are below the share of the step; -0 stays."""
    low, high = grid(fmt)[-2:].tolist()
    x = torch.full((4,), low + 0.25 * (high - low))
    dice = torch.tensor([0.0, 0.2499, 0.25, 0.9999], dtype=torch.float64)
    assert cast(x, fmt, dice=dice).tolist() == [high, high, low, low]
    assert cast(-x, fmt, dice=1 - dice).tolist() == [-high, -high, -high, -low]
    assert cast(torch.tensor([-0.0]), fmt, dice=torch.zeros(1)).signbit().all()


@pytest.mark.gpu
@ALL
def test_the_same_numbers_on_a_gpu(fmt):
    x = torch.cat([around(fmt), torch.tensor([math.inf, -math.inf, 0.0])])
    assert torch.equal(cast(x.cuda(), fmt).cpu(), cast(x, fmt))
    draw = lambda t: cast(t, fmt, torch.Generator().manual_seed(5))
    assert torch.equal(draw(x.cuda()).cpu(), draw(x))
