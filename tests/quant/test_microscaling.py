"""Blocks of 4-bit numbers: the rules of scales, torch's own MXFP4, and the ends of the range."""

import math
from dataclasses import replace

import pytest
import torch

from onchip.quant.formats import E4M3, FP4
from onchip.quant.microscaling import (
    BLOCK_FORMATS,
    MXFP4,
    MXFP4_CEIL,
    NVFP4,
    choose_tensor_scale,
    encode_e8m0,
    quantise_blocks,
    round_blocks,
)
from tests.quant import torch_fp4

EVERY_FORMAT = pytest.mark.parametrize("fmt", BLOCK_FORMATS.values(), ids=BLOCK_FORMATS)
E8M0 = pytest.mark.parametrize("fmt", [MXFP4, MXFP4_CEIL], ids=lambda f: f.name)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantise(x, fmt, **options):
    scale = choose_tensor_scale(x.abs().amax(), fmt) if fmt.has_tensor_scale else None
    return quantise_blocks(x, fmt, scale, **options)


def wide_range(*shape, seed=0):
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-100, 100, (*shape[:-1], 1), generator=generator)
    return normal(*shape, seed=seed) * torch.exp2(powers.float())


def test_every_power_of_two_is_encoded_as_torch_does():
    exponents = torch.arange(-127, 128)
    powers = torch.exp2(exponents.double())
    scales = encode_e8m0(exponents)
    want = powers.float().to(torch.float8_e8m0fnu)
    assert torch.equal(scales.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scales.double(), powers)
    ends = encode_e8m0(torch.tensor([-200, 200]))
    assert ends.view(torch.uint8).tolist() == [0, 254]


@pytest.mark.parametrize("rows", [normal(100, 96), wide_range(100, 96)], ids=["normal", "range"])
def test_scales_rounded_up_are_torchs(rows):
    """Scales and elements, bit for bit. torch rounds to bf16 before FP4, so the inputs are bf16."""
    x = rows.bfloat16()
    scales, codes = torch_fp4.load()["to_mxfp"](x, 32, "mxfp4")
    got = quantise_blocks(x, MXFP4_CEIL)
    assert torch.equal(got.scales.view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(got.codes, codes.view(torch.uint8))


def test_the_scale_of_the_specification():
    """OCP MX 1.0, section 6.3, written out: the largest power of two <= max |x|, over 4."""
    x = wide_range(200, 32, seed=1)
    got = quantise_blocks(x, MXFP4).scales.double()[:, 0]
    for scale, row in zip(got.tolist(), x.tolist(), strict=True):
        largest = max(map(abs, row))
        assert 4 * scale <= largest < 8 * scale


def test_nothing_saturates_if_scales_are_rounded_up():
    x = wide_range(200, 32, seed=2)
    largest = x.abs().amax(-1)
    up, down = (quantise_blocks(x, fmt).scales.float()[:, 0] for fmt in (MXFP4_CEIL, MXFP4))
    assert (largest <= 6 * up).all() and (largest > 3 * up).all()
    assert (largest > 6 * down).any()
    exact = torch.tensor([[6.0, 3.0], [0.375, 0.1]])  # 6 times a power of two
    assert quantise_blocks(exact, MXFP4_CEIL).scales.float().tolist() == [[1.0], [0.0625]]


def test_the_scales_of_nvfp4():
    """max |x| / 6 over the tensor's scale, to the nearest number of E4M3; the largest is 448."""
    x = normal(50, 64)
    got = quantise(x, NVFP4)
    assert got.tensor_scale == x.abs().amax() / 2688
    want = x.unflatten(-1, (4, 16)).abs().amax(-1) / 6 / got.tensor_scale
    assert torch.equal(got.scales.view(torch.uint8), want.to(E4M3.dtype).view(torch.uint8))
    assert got.scales.float().max() == 448


@EVERY_FORMAT
def test_the_error_of_an_element(fmt):
    """At most a quarter of it or of a scale, or what the largest is beyond the grid's end: 2 of 8
    in MXFP4, and what a scale loses by 4 bits in NVFP4.
    """
    x = normal(100, 96)
    got = quantise(x, fmt)
    scales = got.scales.float() * (1 if got.tensor_scale is None else got.tensor_scale)
    scales = scales.repeat_interleave(fmt.block, -1)
    error = (got.dequantise() - x).abs()
    rounding = torch.maximum(x.abs() / 4, scales / 4)
    saturation = (x.abs() - 6 * scales).clamp(min=0)
    assert (error <= (rounding + saturation) * (1 + 1e-6)).all()
    ends = {"mxfp4": 8, "mxfp4_ceil": 6, "nvfp4": 6 * (1 + 1 / 16)}
    assert (x.abs() <= ends[fmt.name] * scales * (1 + 1e-6)).all()


@EVERY_FORMAT
def test_numbers_of_the_format_stay(fmt):
    x = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).repeat(3, 8) * 0.125
    assert torch.equal(quantise_blocks(x, fmt).dequantise(), x)
    dice = torch.rand(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(quantise_blocks(x, fmt, dice=dice).dequantise(), x)


@EVERY_FORMAT
@pytest.mark.parametrize("count", [1, 15, 33, 111])
def test_the_last_block_may_be_shorter(fmt, count):
    """It equals the block alone, and takes no scale from zeros behind it."""
    x = normal(3, count)
    got = quantise_blocks(x, fmt)
    assert got.codes.shape == (3, (count + 1) // 2)
    assert got.scales.shape == (3, -(-count // fmt.block))
    blocks = [quantise_blocks(part, fmt).dequantise() for part in x.split(fmt.block, -1)]
    assert torch.equal(got.dequantise(), torch.cat(blocks, -1))


@EVERY_FORMAT
@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (2, 0, 3)])
def test_empty_tensors(fmt, shape):
    assert quantise_blocks(torch.zeros(shape), fmt).dequantise().shape == shape


@EVERY_FORMAT
def test_zero_blocks_have_the_smallest_scale(fmt):
    x = torch.cat([torch.zeros(1, 32), torch.ones(1, 32)])
    got = quantise(x, fmt)
    assert (got.dequantise()[0] == 0).all() and (got.codes[0] == 0).all()
    smallest = 2.0**-9 if fmt is NVFP4 else 2.0**-127
    assert (got.scales[0].double() == smallest).all()
    assert (quantise(torch.zeros(1, 32), fmt).dequantise() == 0).all()


@E8M0
def test_subnormal_blocks(fmt):
    """Scales end at 2^-127: smaller numbers become small codes, then 0."""
    x = torch.tensor([[6.0, 3.0, 1.0, 0.5, 0.24]]) * 2.0**-127
    got = quantise_blocks(x, fmt)
    assert got.scales.view(torch.uint8).item() == 0
    assert got.dequantise()[0].double().tolist() == [n * 2.0**-127 for n in (6, 3, 1, 0.5, 0)]
    assert (quantise_blocks(torch.full((1, 32), 1e-45), fmt).dequantise() == 0).all()


def test_blocks_far_below_the_tensors_largest():
    """In NVFP4 2^-9 is the smallest scale: 3 of it is a code, a quarter of it is 0."""
    tensor_scale = torch.tensor([[1.0]])
    x = torch.tensor([[3.0, 1.0, 0.5, 0.25, 0.2]]) * 2.0**-9
    got = quantise_blocks(x, NVFP4, tensor_scale)
    assert got.scales.float().item() == 2.0**-9
    assert (got.dequantise()[0] * 512).tolist() == [3, 1, 0.5, 0, 0]


@EVERY_FORMAT
def test_the_largest_floats(fmt):
    """They stay finite, but for those that round up to 4 * 2^126 = 2^128, if scales do."""
    for largest in (2.9e38, torch.finfo(torch.float32).max):
        back = quantise(torch.tensor([[largest, 1.0, -1e38]]), fmt).dequantise()
        if fmt is MXFP4_CEIL and largest > 2.9e38:
            assert back[0, 0] == math.inf
            continue
        assert back.isfinite().all() and abs(back[0, 0].item() / largest - 1) <= 0.25


@EVERY_FORMAT
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_make_their_block_nan(fmt, value):
    x = normal(2, 96)
    clean = quantise_blocks(x, fmt).dequantise()
    x[0, 40] = value
    got = quantise_blocks(x, fmt)
    at = 40 // fmt.block
    assert got.scales.view(torch.uint8)[0, at] == (127 if fmt is NVFP4 else 255)
    block = slice(at * fmt.block, (at + 1) * fmt.block)
    back = got.dequantise()
    assert back[0, block].isnan().all()
    clean[0, block] = math.nan
    torch.testing.assert_close(back, clean, rtol=0, atol=0, equal_nan=True)


@EVERY_FORMAT
def test_rounding_alone_equals_codes_and_back(fmt):
    x, dice = normal(7, 111), torch.rand(7, 111, dtype=torch.float64)
    assert torch.equal(round_blocks(x, fmt), quantise_blocks(x, fmt).dequantise())
    random = quantise_blocks(x, fmt, dice=dice).dequantise()
    assert torch.equal(round_blocks(x, fmt, dice), random)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@EVERY_FORMAT
def test_other_dtypes_are_widened_first(fmt, dtype):
    x = normal(3, 64).to(dtype)
    got, want = quantise(x, fmt).dequantise(), quantise(x.float(), fmt).dequantise()
    assert got.dtype == torch.float32
    assert (got - want).abs().max() <= 0.25 * x.abs().max()
    assert torch.equal(got, want) or dtype == torch.float64


@EVERY_FORMAT
def test_random_rounding_is_unbiased_where_nothing_saturates(fmt):
    """The mean of 500 draws is 1/500 of their variance from x, where nearest has a fixed error."""
    x = normal(4, 64)
    x[:, :: fmt.block] = 6.0  # the largest of each block is on the grid
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.rand(x.shape, generator=generator, dtype=torch.float64)
    mean = torch.stack([round_blocks(x, fmt, draw()) for _ in range(500)]).mean(0)
    nearest = round_blocks(x, fmt)
    assert (mean - x).square().mean() < (nearest - x).square().mean() / 50


def test_saturation_is_a_bias_that_random_rounding_keeps():
    """Why the specification's scale is not for random rounding: 7 of 8 becomes 6."""
    x = torch.full((1, 32), 7.0)
    dice = torch.rand(1, 32, dtype=torch.float64)
    assert (round_blocks(x, MXFP4, dice) == 6).all()
    up = round_blocks(x.expand(1000, 32), MXFP4_CEIL, torch.rand(1000, 32, dtype=torch.float64))
    assert up.mean().item() == pytest.approx(7, abs=0.05)


def test_the_tensor_scale_uses_the_range_of_e4m3():
    """A tensor of 1e6 saturates without it, and one of 1e-6 becomes 0."""
    for size in (1e6, 1e-6):
        x = size * normal(4, 64)
        alone = quantise_blocks(x, replace(NVFP4, has_tensor_scale=False)).dequantise()
        error = lambda back, x=x: ((back - x).norm() / x.norm()).item()
        assert error(quantise(x, NVFP4).dequantise()) < 0.12
        assert error(alone) > 0.9


def test_the_largest_number_of_a_format():
    assert NVFP4.max == 2688 and MXFP4.max == FP4.max * 2.0**127


@pytest.mark.gpu
@EVERY_FORMAT
def test_the_same_bits_on_a_gpu(fmt):
    x = wide_range(50, 111)
    x[3, 5], x[4] = math.nan, 0
    got, want = quantise_blocks(x.cuda(), fmt), quantise_blocks(x, fmt)
    assert torch.equal(got.codes.cpu(), want.codes)
    assert torch.equal(got.scales.view(torch.uint8).cpu(), want.scales.view(torch.uint8))
