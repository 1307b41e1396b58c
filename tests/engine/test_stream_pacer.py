import pytest

from onchip.engine.stream_pacer import StreamPacer


def test_steps_with_streamed_pages_take_their_share_of_the_time():
    now = 0.0
    pacer = StreamPacer(lambda: now, time_share=0.1)
    streamed = 0.0
    while now < 20:
        joined = pacer.is_due
        pacer.record(joined)
        now += 0.03 if joined else 0.002
        if joined:
            streamed += 0.03
            pacer.observe(0.03)
    assert 0.09 < streamed / now < 0.101


@pytest.mark.parametrize("seconds", [0.001, 0.5, 40.0])
def test_a_pause_follows_from_its_own_step(seconds):
    """A step that computes a prompt for 5 s and streams few pages says nothing about the next."""
    now = 0.0
    pacer = StreamPacer(lambda: now)
    for taken in (5.0, seconds):
        pacer.record(joined=True)
        pacer.observe(taken)
        pacer.record(joined=False)
    now = 10.9 * seconds
    assert not pacer.is_due
    now = 11.1 * seconds
    assert pacer.is_due


def test_long_requests_never_join_two_steps_in_a_row():
    pacer = StreamPacer(lambda: 0.0)
    joined = []
    for _ in range(6):
        joined.append(pacer.is_due)
        pacer.record(joined[-1])
    assert joined == [True, False] * 3
