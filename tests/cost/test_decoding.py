"""The number of tokens at which a decoding step becomes compute-bound."""

import math

import pytest
import torch

from onchip.cost.decoding import DecodeRoofline
from onchip.cost.hardware import H100, H200, HOST


@pytest.mark.parametrize("hardware", [H100, H200])
def test_products_take_as_long_as_reads_at_the_free_tokens(hardware):
    weights, token_bytes = 8_000_000_000, 131_072
    roofline = DecodeRoofline(hardware, torch.bfloat16, weights, token_bytes)
    for cached in (0, 799, 300_001):
        tokens = roofline.free_tokens(cached)
        read_s = (2 * weights + cached * token_bytes) / hardware.memory_bytes_s
        multiply_s = 2 * tokens * weights / hardware.flops(torch.bfloat16)
        assert math.isclose(read_s, multiply_s)


def test_without_cached_tokens_it_is_the_ridge_of_the_device():
    """A weight of 2 bytes takes part in 2 operations per token."""
    roofline = DecodeRoofline(H100, torch.bfloat16, 111, 63)
    assert math.isclose(roofline.free_tokens(0), H100.ridge(torch.bfloat16))


def test_unknown_rates_bound_nothing():
    assert math.isinf(DecodeRoofline(HOST, torch.float32, 111, 63).free_tokens(799))
