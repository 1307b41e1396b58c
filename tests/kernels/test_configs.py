"""Rows of the tile tables that must agree with one another."""

import pytest

from onchip.kernels.configs import HOPPER_BACKWARD, HOPPER_GRADIENT, TRITON_CHUNK, TRITON_DECODE


@pytest.mark.parametrize("head_dim", HOPPER_BACKWARD)
def test_the_kernels_of_the_hopper_backward_share_lse_and_delta(head_dim):
    """prepare_kernel writes them once, tile by tile, for both."""
    assert HOPPER_GRADIENT[head_dim].tile == HOPPER_BACKWARD[head_dim].tile_m


@pytest.mark.parametrize("head_dim", HOPPER_BACKWARD)
def test_dq_leaves_in_one_part_of_each_consumer(head_dim):
    assert HOPPER_BACKWARD[head_dim].tile_m * head_dim == 2 * 64 * 64


def test_few_and_many_queries_have_rows_for_the_same_calls():
    assert TRITON_CHUNK.keys() == TRITON_DECODE.keys()
