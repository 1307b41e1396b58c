"""Codes of E2M1: the list of the specification, torch's own conversion, and the bytes."""

import math

import pytest
import torch

from onchip.quant import fp4
from onchip.quant.formats import FP4, cast
from tests.quant import torch_fp4

CODES = torch.arange(16, dtype=torch.uint8)


def bfloat16s():
    """All of them but NaN."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return x[~x.isnan()]


def test_codes_are_those_of_the_specification():
    """OCP MX 1.0, table 5: sign, two bits of exponent with bias 1, one of mantissa."""
    for code, number in enumerate(fp4.decode(CODES).tolist()):
        sign, exponent, mantissa = (-1) ** (code >> 3), code >> 1 & 3, code & 1
        power = 2.0 ** (exponent - 1) if exponent else 1.0
        assert number == sign * power * (min(exponent, 1) + mantissa / 2)
        assert math.copysign(1, number) == sign


def test_codes_and_numbers_are_one_to_one():
    assert torch.equal(fp4.encode(fp4.decode(CODES)), CODES)


def test_ties_round_to_the_even_code():
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert fp4.encode(middle).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert fp4.encode(-middle).tolist() == [8, 10, 10, 12, 12, 14, 14]


def test_every_bfloat16_and_a_million_floats_are_encoded_as_torch_does():
    encode = torch_fp4.load()["_f32_to_floatx_unpacked"]
    normal = 3 * torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    for x in (bfloat16s(), normal):
        assert torch.equal(fp4.encode(x), encode(x.float(), 2, 1))


def test_bytes_are_those_of_torch():
    """The even element is in the low half, and torch's dtype takes the bytes as they are."""
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    packed = fp4.pack(fp4.encode(x))
    want = torch_fp4.load()["_bfloat16_to_float4_e2m1fn_x2"](x)
    assert torch.equal(packed, want.view(torch.uint8))
    assert torch.equal(packed.view(torch.float4_e2m1fn_x2).view(torch.uint8), packed)
    assert packed[0, 0] == fp4.encode(x)[0, 0] + 16 * fp4.encode(x)[0, 1]


@pytest.mark.parametrize("count", [0, 1, 2, 7, 16])
def test_unpacking_is_the_inverse_of_packing(count):
    codes = torch.randint(0, 16, (3, 2, count), generator=torch.Generator().manual_seed(2))
    packed = fp4.pack(codes.to(torch.uint8))
    assert packed.shape == (3, 2, (count + 1) // 2) and packed.dtype == torch.uint8
    assert torch.equal(fp4.unpack(packed, count), codes)
    if count % 2:
        assert (packed[..., -1] >> 4 == 0).all()


def test_encoding_rounds_as_the_cast():
    x = 3 * torch.randn(1000, generator=torch.Generator().manual_seed(3))
    dice = torch.rand(1000, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    assert torch.equal(fp4.decode(fp4.encode(x)), cast(x, FP4))
    assert torch.equal(fp4.decode(fp4.encode(x, dice)), cast(x, FP4, dice=dice))


def test_what_becomes_zero_keeps_its_sign():
    x, dice = torch.tensor([-0.0, -0.1, 0.1]), torch.full((3,), 0.0, dtype=torch.float64)
    assert fp4.encode(x).tolist() == [8, 8, 0]
    assert fp4.encode(x, dice).tolist() == [8, 8, 1]


def test_infinity_saturates_and_nan_is_refused():
    assert fp4.encode(torch.tensor([math.inf, -math.inf, 1e30])).tolist() == [7, 15, 7]
    with pytest.raises(ValueError, match="x holds NaN, which no FP4 number stands for"):
        fp4.encode(torch.tensor([1.0, math.nan]))
