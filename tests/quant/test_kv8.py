"""8-bit keys and values: the error of quantising a token, and what is exact."""

import pytest
import torch

from onchip.quant import schemes
from onchip.quant.formats import E4M3, INT8
from onchip.quant.kv8 import FORMATS, MAX_VALUES, dequantise, parse_kv_dtype, quantise, widen

FORMS = list(MAX_VALUES)
# Half a step of the grid, in units of the largest element of a row: int8 has steps of 1 / 127; e4m3
# has 3 bits after the point, so that half a step is 1 / 16 of an element, and of its largest
# binade, 256 to 448, 16 units of 448.
STEP = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 16 / 448}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_element_is_off_by_more_than_half_a_step(form, dtype):
    x = torch.randn(799, 3, 63).to(dtype)
    values, scales = quantise(x, form)
    assert values.dtype == form and scales.dtype == torch.float32 and scales.shape == (799, 3)
    error = (dequantise(values, scales, torch.float64) - x.double()).abs()
    largest = x.double().abs().amax(-1, keepdim=True)
    rounding = 4 * 2.0**-24 * largest  # of the scale and of the quotient, in fp32
    assert (error <= largest * STEP[form] + rounding).all()


def test_small_elements_of_e4m3_keep_their_relative_precision():
    """Down to 2^-6 of the grid; int8 would round these to almost nothing."""
    x = torch.full((1, 64), 448.0 * 2**-14) * torch.linspace(1, 1.99, 64)
    x[0, 0] = 448.0
    got = dequantise(*quantise(x, torch.float8_e4m3fn), torch.float32)
    assert ((got - x).abs() <= x / 16).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("exponent", [-100, -20, 0, 20, 100])
def test_numbers_on_the_grid_are_exact(form, exponent):
    grid = torch.randint(-127, 128, (50, 32), dtype=torch.int8)
    grid = grid if form == torch.int8 else grid.view(form)
    x = widen(grid, torch.float32).nan_to_num_(1.0)
    x[:, 7] = -MAX_VALUES[form]
    values, scales = quantise(x * 2.0**exponent, form)
    assert torch.equal(scales, torch.full_like(scales, 2.0**exponent))
    assert torch.equal(dequantise(values, scales, torch.float32), x * 2.0**exponent)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_zeros_and_of_tiny_numbers(form):
    x = torch.zeros(4, 8)
    x[1], x[2, 0], x[3, 3] = 1e-45, 1e-40, 3e38
    got = dequantise(*quantise(x, form), torch.float32)
    assert got.isfinite().all() and torch.equal(got[0], x[0])
    torch.testing.assert_close(got, x, rtol=1e-6, atol=2.0**-126)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_only_a_row_that_is_not_finite_becomes_nan(form, poison):
    x = torch.randn(3, 16)
    x[1, 5] = poison
    values, scales = quantise(x, form)
    got = dequantise(values, scales, torch.float32)
    assert got[1].isnan().all() and got[0].isfinite().all() and got[2].isfinite().all()


@pytest.mark.parametrize("form, fmt", [(torch.int8, INT8), (torch.float8_e4m3fn, E4M3)])
def test_it_equals_the_scheme_with_a_scale_per_token(form, fmt):
    x = torch.randn(2, 33, 3, 40) * torch.exp2(torch.randint(-30, 30, (2, 33, 3, 1)).float())
    values, scales = quantise(x, form)
    want = schemes.quantise(x, schemes.Scheme(fmt, "token"))
    assert torch.equal(values.float(), want.values.float()) and torch.equal(scales, want.scales)
    assert MAX_VALUES[form] == fmt.max


def test_every_byte_converts_as_in_torch():
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    torch.testing.assert_close(
        widen(table, torch.float32), table.float(), rtol=0, atol=0, equal_nan=True
    )


def test_names_of_kv_dtypes():
    assert parse_kv_dtype(None) is None
    assert [parse_kv_dtype(name) for name in FORMATS] == FORMS
    with pytest.raises(ValueError, match=r"kv_dtype='fp4' must be None or one of 'fp8', 'int8'"):
        parse_kv_dtype("fp4")
