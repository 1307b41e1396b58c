"""Steps on the device: what travels, what is replayed, and that nobody waits."""

import pytest
import torch

from onchip.engine import SamplingParams
from onchip.engine.graphs import filled_in, sizes_up_to, widths_up_to
from onchip.engine.runner import _words

WAYS = {
    "plain": {},
    "eager": {"graphs": False},
    "strict": {"overlap": False},
    "few_pages": {"num_pages": 40},
    "few_pages_and_a_host": {"num_pages": 40, "host_pages": 200},
    "small_chunks": {"budget": 13},
    "large_pages": {"page_size": 64, "num_pages": 60},
}


def test_tokens_that_were_drawn_last_are_filled_in():
    ids, last = _words([5, ~2, 0, ~0, 7]), torch.tensor([10, 11, 12, 13])
    assert filled_in(ids, last).tolist() == [5, 12, 0, 10, 7]
    assert ids.tolist() == [5, -3, 0, -1, 7]


@pytest.mark.parametrize("most", [1, 2, 7, 8, 33, 128, 129, 256, 300, 1000])
def test_graphs_for_every_batch_size(most):
    sizes = sizes_up_to(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for count in range(1, most + 1):
        size = next(s for s in sizes if s >= count)
        assert size - count < max(2, 0.5 * size)


@pytest.mark.parametrize("most", [1, 255, 256, 257, 2560, 8192])
def test_graphs_for_every_length(most):
    widths = widths_up_to(most)
    assert widths == sorted(set(widths)) and widths[-1] == most
    assert all(b <= 4 * a for a, b in zip(widths, widths[1:], strict=False))


@pytest.fixture(scope="module")
def expected(tiny):
    with tiny.engine("cuda", prefix_caching=False, overlap=False, graphs=False) as one:
        tiny.ask(one)
        return tiny.told(tiny.drain(one)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_on_a_gpu(tiny, expected, way):
    """fp32: replayed or not, overlapped or not, swapped over real streams."""
    with tiny.engine("cuda", **WAYS[way]) as one:
        if one.tier:
            one.costs.link_bytes_per_s = 1e30
        one.warm_up()
        tiny.ask(one)
        assert tiny.told(tiny.drain(one)[0]) == expected


@pytest.mark.gpu
def test_a_gpu_draws_what_the_cpu_draws(tiny):
    """Greedy, in fp32; a handful of tokens, none of which is a near tie."""
    texts = []
    for device in ("cpu", "cuda"):
        with tiny.engine(device) as one:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            tiny.ask(one, params=[params])
            texts.append(tiny.told(tiny.drain(one)[0]))
    assert texts[0] == texts[1]


@pytest.mark.gpu
def test_no_step_waits_for_the_device_but_to_read_what_was_drawn(tiny):
    """Prompts, decoding, draws of every kind: with nothing else between the host and the queue."""
    with tiny.engine("cuda", host_pages=100) as one:
        one.warm_up()
        tiny.ask(one)
        tiny.drain(one)  # everything is compiled
        tiny.ask(one)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            while one.has_work:
                one.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        tiny.check_empty(one)


@pytest.mark.gpu
def test_a_step_is_queued_while_the_one_before_runs(tiny):
    """The device is kept busy, and the host has queued the next step long before it is free."""
    with tiny.engine("cuda") as one:
        one.warm_up()
        one.add("text", SamplingParams(max_tokens=40, ignore_eos=True))
        for _ in range(5):
            one.step()
        torch.cuda._sleep(200_000_000)  # some 0.1 s
        flight = one._runner.launch(one.scheduler.schedule())
        assert not flight.event.query()
        torch.cuda.synchronize()


@pytest.mark.gpu
def test_close_gives_the_memory_of_a_gpu_back(tiny):
    tiny.model("cuda")
    with tiny.engine("cuda"):
        pass  # what libraries allocate once
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    one = tiny.engine("cuda", num_pages=9000, host_pages=100)
    one.warm_up()
    tiny.ask(one)
    for _ in range(6):
        one.step()
    assert torch.cuda.memory_allocated() > before[0]
    one.close()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
