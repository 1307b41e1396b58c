"""Whatever serves a call, on however many ranks, it is one device."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onchip.parallel.strategy import STRATEGIES
from tests.parallel.judge import Case, in_process
from tests.parallel.test_ring import cases

HEADS = [(1, 1), (4, 2), (3, 1), (6, 6), (10, 5)]


@given(cases(), st.sampled_from(STRATEGIES), st.sampled_from(HEADS), st.integers(1, 6))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_strategy_is_one_device(case, strategy, heads, size):
    """Any layout, length, documents, options and heads."""
    in_process(replace(case, strategy=strategy, heads=heads), size)


def test_a_strategy_that_is_none_is_refused():
    with pytest.raises(ValueError, match="strategy='star' is not one of auto, ring"):
        in_process(Case(strategy="star"), 2)
