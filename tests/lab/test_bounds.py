"""No algorithm here moves less than the bound, and FlashAttention stays within a constant of it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onchip import masks
from onchip.cost import make_problem
from onchip.lab import bounds, traffic
from onchip.lab.traffic import Chip
from onchip.masks import Visibility

NUMBERS = torch.float32  # of which lse and l take as many bytes as all else


@given(
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.sampled_from([1, 8, 64, 128]),
    st.integers(1, 10**6),
    st.sampled_from([(1, 1), (4, 2)]),
    st.booleans(),
    st.sampled_from([(None, None), (0, 0), (300, None), (None, 20), (64, 7)]),
)
def test_nothing_moves_less_than_the_lower_bound(
    seqlen_q, seqlen_k, head_dim, sram, heads, causal, window_size
):
    band = {"causal": causal, "window_size": window_size}
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim}
    problem = make_problem(seqlen_q, seqlen_k, **sizes, dtype=NUMBERS, **band)
    least = 4 * bounds.lower_bound(problem, sram)
    for algorithm in (traffic.standard, traffic.v1):
        assert algorithm(problem, Chip(sram)).hbm_bytes >= least
    if sram >= 16:  # less does not hold the tiles of v2
        assert traffic.v2(problem, Chip(sram)).hbm_bytes >= least


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("sram", [2**14, 2**16, 2**18])
def test_flash_attention_is_within_a_constant_of_the_bound(head_dim, sram):
    """For M >= d^2 both are of order N^2 d^2 / M."""
    problem = make_problem(2**15, head_dim=head_dim, dtype=NUMBERS)
    least, order = bounds.lower_bound(problem, sram), bounds.theorem2(problem, sram)
    v1, v2 = (f(problem, Chip(sram)).hbm_bytes / 4 for f in (traffic.v1, traffic.v2))
    rows = (sram - 16 * 2 * head_dim) // (2 * head_dim + 16)  # q, out and s next to 16 of k and v
    assert least <= v2 <= 2**15 / (rows - 1) * 2 * 2**15 * head_dim + bounds.compulsory(problem)
    assert v2 <= 6 * order + bounds.compulsory(problem)
    assert v2 <= v1 <= 12.1 * order * (1 + 1 / head_dim) + 4 * bounds.compulsory(problem)
    assert least >= order / 3 - sram


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("sram", [2**8, 2**10, 2**12])
def test_small_chips_move_n_squared_d_over_the_root_of_m(head_dim, sram):
    """For M <= d^2: blocked products are within a constant of the bound, FlashAttention is not."""
    problem = make_problem(2**13, head_dim=head_dim, dtype=NUMBERS)
    least, order = bounds.lower_bound(problem, sram), 2**26 * head_dim / math.sqrt(sram)
    assert least >= order / 2 - sram
    blocked = traffic.standard(problem, Chip(sram)).hbm_bytes / 4
    assert least <= blocked <= 12 * order
    assert traffic.v1(problem, Chip(sram)).hbm_bytes / 4 > 3 * order * head_dim / math.sqrt(sram)


def test_a_larger_chip_moves_less_down_to_the_compulsory_bytes():
    problem = make_problem(4096, dtype=NUMBERS)
    moved = [traffic.v2(problem, Chip(2**n)).hbm_bytes for n in range(8, 24)]
    assert moved == sorted(moved, reverse=True)
    whole = traffic.v2(problem, Chip(math.inf))
    assert whole.hbm_bytes - whole.writes["lse"] == 4 * bounds.compulsory(problem)
    for sram in (10**9, math.inf):
        assert bounds.lower_bound(problem, sram) == bounds.compulsory(problem)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_size", [(None, None), (2, 1), (0, None), (None, 0)])
def test_hidden_keys_are_not_compulsory(causal, window_size):
    for seqlen_q, seqlen_k in ((1, 9), (9, 1), (4, 9), (9, 4), (5, 5), (0, 3), (3, 0)):
        problem = make_problem(seqlen_q, seqlen_k, causal=causal, window_size=window_size)
        rule = Visibility(seqlen_q, seqlen_k, causal, problem.window_size)
        visible = rule.tile(0, seqlen_q, 0, seqlen_k, torch.device("cpu"))
        visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool) if visible is None else visible
        assert problem.seen_queries == int(visible.any(1).sum())
        assert problem.seen_keys == int(visible.any(0).sum())
        rows, keys = seqlen_q + problem.seen_queries, 2 * problem.seen_keys
        assert bounds.compulsory(problem) == 64 * (rows + keys)
        assert problem.min_bytes == 2 * 64 * (rows + keys) + 4 * seqlen_q


def test_calls_without_a_valid_bound_are_refused():
    mask = masks.build(masks.window(9, 0), 1, 1, 256, 256)
    with pytest.raises(ValueError, match="has_mask=True, packed=False"):
        bounds.lower_bound(make_problem(256, mask=mask), 1000)
    with pytest.raises(ValueError, match="sram=0 must be at least 1 number"):
        bounds.lower_bound(make_problem(256), 0)


def test_standard_attention_is_quadratic_whatever_the_chip():
    problem = make_problem(4096, dtype=torch.float16)
    for sram in (64 * 64, 10**5, math.inf):  # from d^2 on
        elements = traffic.standard(problem, Chip(sram, torch.float16)).hbm_bytes / 2
        assert 4 <= elements / bounds.standard(problem) <= 11


def test_recomputing_beats_storing_below_recompute_below():
    """The same from the times of whole algorithms: at N >> d only terms in N^2 matter."""
    flops_per_s, bytes_per_s = 312e12, 1.555e12
    edge = bounds.recompute_below(2, flops_per_s / bytes_per_s)
    for factor in (0.9, 1.1):
        d = factor * edge
        again, stored = 2 * d / flops_per_s, 2 * 2 / bytes_per_s
        assert (again < stored) == (factor < 1)
    assert 256 < edge < 512  # on an A100 a stored P would save time for wider heads alone
