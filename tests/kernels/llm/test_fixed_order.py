"""Products whose bits do not depend on the number of rows."""

import pytest
import torch
import torch.nn.functional as F

from onchip.kernels import tiles
from tests.interpreted import DEVICE, INTERPRETED, interpreted_or_gpu

fixed_order = pytest.importorskip("onchip.kernels.llm.fixed_order")

SIZES = [(300, 50)] if INTERPRETED else [(8, 16), (333, 77), (1024, 1030), (4096, 6144)]
DTYPES = [torch.bfloat16] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float32]


def make(rows, inner, outer, dtype):
    generator = torch.Generator().manual_seed(1)
    shapes = (rows, inner), (outer, inner), (outer,)
    return [torch.randn(*s, generator=generator).to(DEVICE, dtype) for s in shapes]


@interpreted_or_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner, outer", SIZES)
def test_bits_of_a_product_do_not_depend_on_its_rows(inner, outer, dtype):
    x, weight, bias = make(70 if INTERPRETED else 3000, inner, outer, dtype)
    whole = fixed_order.multiply(x, weight, bias)
    for rows in (slice(0, 1), slice(3, 20), slice(1, 66), slice(7, None, 2), slice(0, 700)):
        assert torch.equal(fixed_order.multiply(x[rows], weight, bias), whole[rows])
    assert fixed_order.multiply(x[:0], weight, bias).shape == (0, outer)
    columns = fixed_order.multiply(x.T.contiguous().T[None], weight)  # another layout of x
    assert torch.equal(columns[0], fixed_order.multiply(x, weight))
    expected = F.linear(x.double(), weight.double(), bias.double())
    # The result is rounded once; the partial sums, of inner / 2 in the mean square, in each step.
    rounded = 0.51 * torch.finfo(dtype).eps * expected.abs().max()
    summed = 6 * 2**-24 * inner * 0.5**0.5
    assert (whole - expected).abs().max() < rounded + summed


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner, outer", [(1000, 4096), (4096, 1024)])
def test_all_tiles_have_the_same_bits(inner, outer, dtype):
    x, weight, bias = make(200, inner, outer, dtype)
    results = [fixed_order.multiply_by(tile, x, weight, bias) for tile in fixed_order.find_tiles(x)]
    for result in results[1:]:
        assert torch.equal(result, results[0])
    assert len(results) == (1 if dtype == torch.float32 else len(tiles.FIXED_ORDER_TILES))


def test_a_wrong_width_is_refused():
    weight = torch.zeros(8, 16)
    for wrong in (torch.zeros(3, 8), torch.zeros(3, 32)):
        with pytest.raises(ValueError, match=r"does not fit a weight \(8, 16\)"):
            fixed_order.multiply_by(tiles.FIXED_ORDER_TILES[-1], wrong, weight)


def test_the_tile_of_a_product():
    """As large as leaves a program for nine of ten processors."""
    table = tiles.fixed_order_tiles(2, 227 * 1024)
    choose = lambda *sizes: tiles.choose_fixed_order_tile(table, *sizes, 132)[:2]
    assert choose(8192, 4096) == (128, 256) and choose(512, 4096) == (128, 128)
    assert choose(300, 4096) == (64, 128) and choose(64, 4096) == choose(1, 4096) == (64, 32)
    assert choose(1, 28_672) == (64, 128) and choose(1, 1024) == (64, 16)
    assert choose(1, 151_936) == (64, 128)


def test_tiles_fit_the_shared_memory():
    for kilobytes in (99, 163, 227):
        for tile in tiles.fixed_order_tiles(2, kilobytes * 1024):
            size = 2 * (tile.tile_m + tile.tile_n) * tile.tile_k * tile.num_stages
            assert tile.num_stages >= 2 and size <= kilobytes * 1024
