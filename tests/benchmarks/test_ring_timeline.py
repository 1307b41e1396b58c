"""The simulated step against a second, recursive simulation, and against its invariants."""

import math
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.hide_condition import hide_factor, hide_length, hides, slowest_link, unhidden
from benchmarks.ring_timeline import COMPUTE, MERGE, SEND_DKV, SEND_KV, Timeline
from onchip.parallel.machines import H200, LINKS, Fabric, Link
from onchip.parallel.simulate import (
    LAYOUTS,
    LayerShape,
    RingStep,
    merge_seconds,
    rounds,
    seconds,
)

NODES = Fabric(LINKS["NVLink 4"], LINKS["InfiniBand NDR"], node=2)
BARE = replace(H200, memory_bytes_s=math.inf, call_s=0.0)  # kernels alone take time
steps = st.builds(
    RingStep,
    tokens=st.floats(1e3, 1e7),
    num_devices=st.integers(1, 9),
    layout=st.sampled_from(LAYOUTS),
    causal=st.booleans(),
    backward=st.booleans(),
    shape=st.builds(
        LayerShape,
        st.sampled_from((8, 32)),
        st.sampled_from((1, 8)),
        st.sampled_from((64, 128, 256)),
        st.sampled_from((2, 4)),
    ),
)
links = st.builds(Link, st.just("a link"), st.floats(1e9, 1e12), st.floats(0, 1e-4))


def simulate_recursively(step, fabric, machine):
    """Seconds of a step, recursively, device by device and event by event."""
    size = step.num_devices
    hop = lambda r, size_bytes: float(fabric.seconds(size, size_bytes)[r % size])
    kind = lambda r, i: rounds(step)[0 if i == 0 else 1 if r >= i else 2]

    @cache
    def begun(r, i):
        r %= size
        return max(merged(r, i - 1), kv(r, i - 1), kv(r - 1, i - 1)) if i else 0.0

    @cache
    def kv(r, i):
        r %= size
        free = dkv(r, i - 1) if step.backward and i else 0.0
        return max(begun(r, i), begun(r + 1, i), free) + hop(r, step.kv_bytes)

    @cache
    def dkv(r, i):
        r %= size
        free = kv(r, i) if i < size - 1 else 0.0  # sent before
        return max(merged(r, i), merged(r + 1, i), free) + hop(r, step.dkv_bytes)

    @cache
    def merged(r, i):
        r %= size
        done = begun(r, i) + seconds(step, kind(r, i), machine)
        if step.backward and i:
            done = max(done, dkv(r, i - 1), dkv(r - 1, i - 1))
        return done + merge_seconds(step, kind(r, i), machine)

    last_hop = dkv if step.backward and size > 1 else lambda r, i: 0.0
    return max(max(merged(r, size - 1), last_hop(r, size - 1)) for r in range(size))


@given(step=steps, link=links)
def test_all_devices_at_once_equal_one_by_one(step, link):
    for fabric in (Fabric(link), NODES):
        line = Timeline(step, fabric)
        assert line.seconds == pytest.approx(simulate_recursively(step, fabric, H200), rel=1e-9)


@given(step=steps, link=links)
def test_where_the_hide_condition_holds_only_latency_and_the_last_hop_are_exposed(step, link):
    line = Timeline(step, Fabric(link))
    if hides(step, link):
        assert line.exposed <= unhidden(step, link) * (1 + 1e-9)


@given(step=steps, link=links)
def test_where_the_hide_condition_fails_communication_is_exposed(step, link):
    """Without a mask all rounds are equal, and the condition is sharp."""
    step = step._replace(causal=False)
    line = Timeline(step, Fabric(link._replace(latency_s=0.0)), BARE)
    last_hop = step.dkv_bytes / link.bytes_s
    is_exposed = line.exposed > last_hop * (1 + 1e-6) + 1e-6 * line.seconds
    message = (step.kv_bytes + step.dkv_bytes) / link.bytes_s
    clearly = step.num_devices > 1 and message > 1.01 * seconds(step, rounds(step).own, BARE)
    assert is_exposed if clearly else not hides(step, link, BARE) or not is_exposed


def test_the_condition_is_the_papers_with_factors():
    """c >= F / B for 16 bits, MHA, no mask (2310.01889); and the factors of other cases."""
    link, mha = Link("", 1e12, 0.0), LayerShape(32, 32, 128)
    full = RingStep(1e6, causal=False, shape=mha)
    best = H200.best(False, 128)
    assert hide_length(full, link) == pytest.approx(best / 1e12)
    assert hide_length(full._replace(shape=mha._replace(num_kv_heads=4)), link) == best / 8e12
    assert [hide_factor(full._replace(causal=c)) for c in (False, True)] == [1, 2]
    assert hide_factor(full._replace(backward=True)) == pytest.approx(1.2)
    assert hide_factor(full._replace(shape=mha._replace(itemsize=4))) == 2


@pytest.mark.parametrize("link", LINKS.values(), ids=lambda link: link.name)
@pytest.mark.parametrize("backward", [False, True])
def test_above_the_length_of_the_formula_the_condition_holds(link, backward):
    for causal, layout in product((False, True), LAYOUTS):
        step = RingStep(1, 8, layout, causal, backward)
        tokens = 8 * (hide_length(step, link) + 1)  # a striped round may be without its diagonal
        assert hides(step._replace(tokens=tokens), link)


def test_the_slowest_link_is_one_that_the_ring_uses():
    fabric = Fabric(LINKS["NVLink 4"], LINKS["InfiniBand NDR"], node=2)
    assert [slowest_link(fabric, n).name for n in (2, 3)] == ["NVLink 4", "InfiniBand NDR"]


@given(step=steps, link=links)
def test_the_critical_path_explains_the_whole_step(step, link):
    line = Timeline(step, Fabric(link))
    path = line.critical_path()
    assert sum(path.values()) == pytest.approx(line.seconds)
    assert path.keys() <= {COMPUTE, MERGE, SEND_KV, SEND_DKV}


@given(step=steps)
def test_messages_are_counted(step):
    """P - 1 of K and V; backward as many, and P of dK and dV."""
    spans = list(Timeline(step, NODES).events.spans(0))
    count = lambda what: sum(span.what == what for span in spans)
    size = step.num_devices
    assert count(SEND_KV) == size - 1
    assert count(SEND_DKV) == (size if step.backward and size > 1 else 0)


@given(step=steps, link=links, factor=st.floats(1, 100))
def test_faster_links_never_slow_a_step_down(step, link, factor):
    faster = link._replace(bytes_s=link.bytes_s * factor)
    assert Timeline(step, Fabric(faster)).seconds <= Timeline(step, Fabric(link)).seconds


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="layout='spiral' must be one of: contiguous"):
        _ = Timeline(RingStep(1e6, 8, "spiral"), NODES).seconds
    with pytest.raises(ValueError, match="at least one token, got tokens=3, num_devices=8"):
        _ = Timeline(RingStep(3, 8), NODES).seconds
    with pytest.raises(ValueError, match=r"head_dim=80 was not measured on NVIDIA H200"):
        _ = Timeline(RingStep(1e6, shape=LayerShape(head_dim=80)), NODES).seconds
