"""Steps of any length: memory, slabs, and the cost of storage tiers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ring_prediction import (
    TIER,
    Slabs,
    predict,
    resident_bytes,
    six_blocks_bytes,
    stored_bytes,
)
from benchmarks.ring_timeline import Timeline
from onchip.parallel.machines import H200, LINKS, ROUNDS_PER_MERGE, Fabric, StorageTier
from onchip.parallel.simulate import LAYOUTS, LayerShape, RingStep

NODES = Fabric(LINKS["NVLink 4"], LINKS["InfiniBand NDR"])
steps = st.builds(
    RingStep,
    tokens=st.floats(1e5, 1e12),
    num_devices=st.sampled_from((1, 2, 8, 24)),
    layout=st.sampled_from(LAYOUTS),
    causal=st.booleans(),
    backward=st.booleans(),
    shape=st.just(LayerShape()),
)


def test_six_blocks_of_a_chunk():
    step = RingStep(8 * 1000, 8, shape=LayerShape(num_heads=4, num_kv_heads=2, head_dim=64))
    assert six_blocks_bytes(step) == 1000 * 2 * 64 * (4 + 4 + 2 + 2 + 2 + 2)


def test_bytes_that_fp32_adds_to_six_blocks():
    """Forward, the state and up to ROUNDS_PER_MERGE results are fp32; on one device out is not."""
    shape = LayerShape(num_heads=4, num_kv_heads=2, head_dim=64)
    out, lse = 1000 * 4 * 64, 1000 * 4
    for size, outs in ((2, 2), (3, 3), (8, 1 + ROUNDS_PER_MERGE)):
        step = RingStep(size * 1000, size, shape=shape)
        fp32 = outs * 4 * (out + lse)
        assert resident_bytes(step) == six_blocks_bytes(step) - 2 * out + fp32
    alone = RingStep(1000, 1, shape=shape)
    assert resident_bytes(alone) == 1000 * 2 * 64 * (4 + 4 + 2 + 2) + lse * 4


def test_bytes_of_a_backward_pass():
    """Q, O, dO; K, V twice; dQ twice; dK, dV three times; lse and delta."""
    step = RingStep(8 * 1000, 8, backward=True, shape=LayerShape(4, 2, 64))
    queries, keys, rows = 1000 * 4 * 64, 1000 * 2 * 64, 1000 * 4
    inputs = 2 * (3 * queries + 4 * keys) + 4 * 2 * rows
    assert resident_bytes(step) == inputs + 4 * (2 * queries + 6 * keys)


@given(step=steps)
def test_slabs_fit_and_cover_the_context(step):
    slabs = Slabs.cut(step, H200)
    assert resident_bytes(slabs.slab) <= H200.memory_bytes
    assert slabs.slab.tokens * slabs.num_slabs == pytest.approx(step.tokens)
    whole = slabs.slab._replace(causal=False)
    others = slabs.num_passes - slabs.num_slabs
    covered = slabs.num_slabs * slabs.slab.flops + others * whole.flops
    assert covered == pytest.approx(step.flops)
    assert (slabs.tier is None) == (slabs.num_slabs == 1) == (slabs.num_modules == 0)


@given(step=steps)
def test_no_step_beats_the_rate_of_its_kernels(step):
    prediction = predict(step, NODES)
    time = prediction.time
    assert 0 < prediction.efficiency <= 1
    assert time.exposed >= 0 and time.waiting >= 0
    assert sum(time.critical.values()) == pytest.approx(time.total)


def test_a_step_that_fits_is_one_pass_round_the_ring():
    step = RingStep(10**6, 8)
    line, time = Timeline(step, NODES), predict(step, NODES).time
    assert (time.total, time.exposed, time.waiting) == (line.seconds, line.exposed, 0)


def test_a_context_is_in_the_first_tier_that_holds_it():
    tier = lambda tokens: Slabs.cut(RingStep(tokens, 8), H200).tier
    assert tier(10**6) is None
    assert tier(10**8) is H200.tiers[0] and tier(10**9) is H200.tiers[1]
    slabs = Slabs.cut(RingStep(10**11, 8), H200)
    assert slabs.num_modules == -(-stored_bytes(slabs.step) // 15.36e12)


def test_a_slow_tier_costs_waiting_time():
    slow = replace(H200, tiers=(StorageTier("tape", 1e18, 1e6, 1e6),))
    step = RingStep(10**8, 8)
    prediction = predict(step, NODES, slow)
    assert prediction.efficiency < 0.9 < predict(step, NODES).efficiency
    assert prediction.time.waiting > 0.1 * prediction.time.total
    assert prediction.time.critical[TIER] > 0.1 * prediction.time.total


def test_reading_is_hidden_under_long_passes():
    """A slab of millions of queries hides any disk: 10^12 tokens cost their flops alone."""
    prediction = predict(RingStep(10**12, 1024), NODES)
    assert prediction.slabs.tier is H200.tiers[1]
    assert prediction.efficiency > 0.99 and prediction.time.waiting < 1e-6 * prediction.time.total
