"""Every strategy on any number of ranks equals one device."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import onchip
from benchmarks.delta_accuracy import winning_ties
from onchip.parallel import context_parallel_attention
from onchip.parallel.comm import run_ranks
from onchip.parallel.sharding import zigzag
from onchip.parallel.strategy import STRATEGIES
from tests.parallel.cases import Case, check_in_process
from tests.parallel.test_ring import cases

HEADS = [(1, 1), (4, 2), (3, 1), (6, 6), (10, 5)]


@pytest.mark.slow
@given(cases(), st.sampled_from(STRATEGIES), st.sampled_from(HEADS), st.integers(1, 6))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_strategy_equals_one_device(case, strategy, heads, size):
    """Any layout, length, documents, options and heads."""
    check_in_process(replace(case, strategy=strategy, heads=heads), size)


def test_an_unknown_strategy_is_refused():
    with pytest.raises(ValueError, match="strategy='star' is not one of auto, ring"):
        check_in_process(Case(strategy="star"), 2)


def _gradients_of_ties(comm, inputs, strategy, precise):
    q, k, v, dout = (zigzag(comm.size).shard(t, comm.rank, 1).contiguous() for t in inputs)
    leaves = [t.requires_grad_() for t in (q, k, v, torch.zeros(q.shape[2]))]
    options = {"strategy": strategy, "seqlen": inputs.q.shape[1], "precise_delta": precise}
    out = context_parallel_attention(*leaves[:3], comm, sinks=leaves[3], **options)
    return torch.autograd.grad(out, leaves, dout)


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "auto"])
def test_precise_delta_keeps_the_residual_on_every_rank(strategy):
    """Relative errors of dq, dk and dsinks in a case where roundings of out add up in delta."""
    inputs = winning_ties((1, 111, 4, 32)).to(torch.bfloat16)
    leaves = [t.double().requires_grad_() for t in (*inputs[:3], torch.zeros(4))]
    out = onchip.attention(*leaves[:3], sinks=leaves[3])
    exact = torch.autograd.grad(out, leaves, inputs.dout.double())

    def errors(precise):
        ranks = run_ranks(4, _gradients_of_ties, inputs, strategy, precise)
        whole = [zigzag(4).unshard([rank[i] for rank in ranks], 1) for i in (0, 1)]
        results = (*whole, sum(rank[3] for rank in ranks))
        pairs = zip(results, (*exact[:2], exact[3]), strict=True)
        return [float((got - want).norm() / want.norm()) for got, want in pairs]

    plain, precise = errors(False), errors(True)
    assert plain[0] > 0.05 and max(precise) < 2e-3
    assert precise[2] < 0.1 * plain[2]
