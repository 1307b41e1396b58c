import pytest

from onchip.engine.stream_pacer import StreamingCosts, StreamPacer


def test_costs_follow_the_measured_link():
    costs = StreamingCosts(1000, link_bytes_per_s=1e6, time_share=0.2)
    assert costs.step_s(50) == pytest.approx(0.05)
    assert costs.pause_s(50) == pytest.approx(0.2), "four times as long"
    for _ in range(200):
        costs.observe(50, 0.1)
    assert costs.step_s(50) == pytest.approx(0.1)
    costs.observe(0, 5.0)
    assert costs.step_s(50) == pytest.approx(0.1), "a step without pages says nothing"


def test_steps_with_streamed_pages_take_their_share_of_the_time():
    now = 0.0
    pacer = StreamPacer(StreamingCosts(1000, 1e6, time_share=0.1), lambda: now)
    streamed = 0.0
    while now < 20:
        joined = pacer.is_due
        pacer.record(joined, 30)
        streamed += 0.03 * joined
        now += 0.03 if joined else 0.002
    assert 0.09 < streamed / now < 0.101


def test_long_requests_never_join_two_steps_in_a_row():
    pacer = StreamPacer(StreamingCosts(0), lambda: 0.0)
    joined = []
    for _ in range(6):
        joined.append(pacer.is_due)
        pacer.record(joined[-1], 9)
    assert joined == [True, False] * 3
