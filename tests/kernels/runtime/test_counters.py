"""Which launch gets which counter. Streams and captures are stand-ins; the test on a GPU is
tests/kernels/hopper/test_gpu_counters.py.
"""

from concurrent.futures import ThreadPoolExecutor

import torch

from onchip.kernels.runtime import counters

CPU = torch.device("cpu")


def draw():
    t = counters.counter(CPU)
    assert t.dtype == torch.int32 and t.data_ptr() % 16 == 0 and not t.any() and len(t) >= 2
    return t


def test_a_stream_has_one_counter(now):
    first = draw()
    now.stream = 17
    other = draw()
    assert draw() is other and other.data_ptr() != first.data_ptr()
    now.stream = 0
    assert draw() is first and counters.is_pooled(first) and counters.is_pooled(other)
    assert now.waits == 1  # until the zeros of all streams are there


def test_a_captured_launch_has_its_own_counter(now):
    eager = draw()
    now.capturing = True
    captured = [draw() for _ in range(5)]
    now.capturing = False
    assert draw() is eager
    assert all(map(counters.is_pooled, captured))
    assert len({t.data_ptr() for t in (eager, *captured)}) == 6


def test_no_pool_is_made_during_a_capture(now):
    now.capturing = True
    assert not counters.is_pooled(draw()) and not now.waits
    now.capturing = False
    assert counters.is_pooled(draw())


def test_without_a_free_counter_one_is_allocated_and_cleared(now, monkeypatch):
    monkeypatch.setattr(counters, "SLOTS", 3)
    first, now.capturing = draw(), True
    assert [counters.is_pooled(draw()) for _ in range(4)] == [True, True, False, False]
    now.capturing = False
    assert draw() is first
    now.stream = 1
    made = draw()
    assert not counters.is_pooled(made) and draw() is not made


def test_the_per_thread_stream_has_no_pooled_counter(now):
    now.stream = 2  # cudaStreamPerThread
    assert not counters.is_pooled(draw())


def test_threads_of_a_stream_share_its_counter(now):
    with ThreadPoolExecutor(8) as pool:
        tensors = list(pool.map(lambda _: counters.counter(CPU), range(200)))
    assert len({t.data_ptr() for t in tensors}) == 1


def test_a_device_without_streams_has_no_pooled_counter():
    assert not counters.is_pooled(draw())
