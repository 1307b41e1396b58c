"""Steps on the device: copies, graph replays, and no synchronization."""

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from onchip.engine import SamplingParams
from onchip.engine.cuda_graphs import StepGraphs, batch_sizes, chunk_sizes, fill_in_sampled
from onchip.engine.model_runner import _int32_tensor, _is_decode_only
from onchip.kvcache import KVCache
from onchip.kvcache import paged_batch as batches
from tests.engine.replayed import Replayed

WAYS = {
    "plain": {},
    "eager": {"graphs": False},
    "strict": {"overlap": False},
    "few_pages": {"num_pages": 40},
    "few_pages_and_a_host": {"num_pages": 40, "host_pages": 200},
    "small_chunks": {"budget": 13},
    "large_pages": {"page_size": 64, "num_pages": 60},
}


def test_tokens_sampled_last_are_filled_in():
    ids, last = _int32_tensor([5, ~2, 0, ~0, 7]), torch.tensor([10, 11, 12, 13])
    assert fill_in_sampled(ids, last).tolist() == [5, 12, 0, 10, 7]
    assert ids.tolist() == [5, -3, 0, -1, 7]


@pytest.mark.parametrize("most", [1, 2, 7, 8, 33, 128, 129, 256, 300, 1000])
def test_graphs_for_every_batch_size(most):
    sizes = batch_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for count in range(1, most + 1):
        size = next(s for s in sizes if s >= count)
        assert size - count < max(2, 0.5 * size)


def test_a_step_replays_the_graph_with_the_fewest_tokens(tiny, monkeypatch):
    """Chunks of at most 5 tokens have graphs for 1, 2, 4, 8, 12 sequences, other steps for 64, 128
    tokens and more. A chunk graph also takes a row of each token.
    """
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    assert chunk_sizes(12) == [1, 2, 4, 8, 12] and chunk_sizes(8) == [1, 2, 4, 8]
    cache = KVCache(tiny.model().cache_spec(4), 2000, max_seqs=12)
    graphs = Replayed(tiny.model(), cache, torch.zeros(12), chunk_lengths=[5])
    chunks = [s[:2] for s in graphs.shapes(19) if s.max_seqlen_q == 5]
    assert chunks == [(12, 60), (8, 40), (4, 20), (2, 10), (1, 5)]
    chosen = {}
    for counts in ((5,), (1, 3), (5, 5, 5), (6, 1), (1,) * 9, (5,) * 12, (1, 64), (70, 2000)):
        sequences = [cache.open() for _ in counts]
        assert cache.reserve_all(sequences, counts) is None
        shape = graphs._find_shape(sequences, len(counts))
        chosen[counts] = shape and shape[:2]
        has_rows = graphs.has_graph_for(sequences, sum(counts))
        assert has_rows == (sum(counts) <= 12 or max(counts) <= 5)
        for sequence in sequences:
            cache.free(sequence)
    assert list(chosen.values()) == [
        (1, 5),
        (2, 10),
        (4, 20),
        (12, 64),
        (12, 60),
        (12, 60),
        (12, 128),
        None,
    ]


@pytest.fixture(scope="module")
def expected(tiny):
    with tiny.engine("cuda", prefix_caching=False, overlap=False, graphs=False) as one:
        tiny.ask(one)
        return tiny.visible(tiny.drain(one)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_every_setting_gives_the_same_outputs_on_a_gpu(tiny, expected, way):
    """In fp32: with and without graphs and overlap, swapped over real streams."""
    with tiny.engine("cuda", **WAYS[way]) as one:
        if one.tier:
            one.costs.link_bytes_per_s = 1e30
        one.warm_up()
        tiny.ask(one)
        assert tiny.visible(tiny.drain(one)[0]) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("full_copy_pages", [8, 256])
def test_a_graph_serves_all_lengths(tiny, expected, monkeypatch, full_copy_pages):
    """After the start no graph is recorded for longer sequences, and sending the columns of a wide
    table does not synchronize.
    """
    monkeypatch.setattr(batches, "FULL_COPY_PAGES", full_copy_pages)
    with tiny.engine("cuda") as one:
        one.warm_up()
        tiny.ask(one)
        tiny.drain(one)  # everything is compiled
        one._num_accepted = 0
        tiny.ask(one)
        monkeypatch.setattr(StepGraphs, "_record", None)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            outputs = []
            while one.has_work:
                outputs += one.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert tiny.visible({output.request_id: output for output in outputs}) == expected


@pytest.mark.gpu
def test_a_gpu_samples_the_tokens_of_the_cpu(tiny):
    """Greedy, in fp32; a few tokens without near ties."""
    texts = []
    for device in ("cpu", "cuda"):
        with tiny.engine(device) as one:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            tiny.ask(one, params=[params])
            texts.append(tiny.visible(tiny.drain(one)[0]))
    assert texts[0] == texts[1]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU, or none")
def test_graphs_replay_on_a_gpu_that_is_not_current(tiny, expected):
    """Graphs are recorded on the model's device, which may not be the current one."""
    with torch.cuda.device(0), tiny.engine("cuda:1") as one:
        one.warm_up()
        tiny.ask(one)
        assert tiny.visible(tiny.drain(one)[0]) == expected


@pytest.mark.gpu
def test_two_engines_in_threads_record_and_serve(tiny, expected):
    def serve(_):
        with tiny.engine("cuda") as one:
            one.warm_up()
            tiny.ask(one)
            return tiny.visible(tiny.drain(one)[0])

    tiny.model("cuda")  # made once, for both
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(serve, range(2))) == [expected] * 2


@pytest.mark.gpu
def test_only_collect_waits_for_the_device(tiny):
    """Prompts, decoding and every sampling option, without synchronization."""
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
    """The host has queued the next step long before the device is free."""
    with tiny.engine("cuda") as one:
        one.warm_up()
        one.add("text", SamplingParams(max_tokens=40, ignore_eos=True))
        for _ in range(5):
            one.step()
        torch.cuda._sleep(200_000_000)  # some 0.1 s
        in_flight = one._runner.launch(one.scheduler.schedule())
        assert not in_flight.event.query()
        torch.cuda.synchronize()


@pytest.mark.gpu
def test_close_frees_gpu_memory(tiny):
    """Two engines in turn: libraries allocate their permanent memory with the first."""
    held = []
    for num_pages in (300, 200_000):
        one = tiny.engine("cuda", num_pages=num_pages, host_pages=100)
        one.warm_up()
        tiny.ask(one)
        for _ in range(6):
            one.step()
        pool = one.cache.pages.k.nbytes + one.cache.pages.v.nbytes
        assert torch.cuda.memory_allocated() >= pool
        one.close()
        del one
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert pool > 200e6
    assert held[1][0] - held[0][0] < 2**20 and held[1][1] - held[0][1] < 64 * 2**20


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("full_copy_pages", [3, 256])
def test_padded_batches_give_what_eager_steps_give(tiny, monkeypatch, overlap, full_copy_pages):
    """Batch sizes for 12 sequences are 1, 2, 4, 8 and 12, numbers of tokens 64, 128 ...; padding
    reads and writes nothing. All graphs are recorded at the start, for sequences of any length.
    """
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(batches, "FULL_COPY_PAGES", full_copy_pages)
    outputs = []
    for graphs in (False, True):
        with tiny.engine(overlap=overlap, num_pages=40, host_pages=90) as one:
            one.cache.pages.k.fill_(float("nan"))
            one.cache.pages.v.fill_(float("nan"))
            if graphs:
                one._runner._graphs = Replayed(one.model, one.cache, one._runner._last_tokens)
                one._runner._graphs.record_all(one.limits.max_num_batched_tokens)
                monkeypatch.setattr(Replayed, "_record", None)
            tiny.ask(one)
            outputs.append(tiny.visible(tiny.drain(one)[0]))
            used = one._runner._graphs.used if graphs else None
    assert outputs[0] == outputs[1] and used >= {(4, 4), (8, 8), (12, 64)}


@pytest.mark.parametrize("max_num_seqs", [12, 300, 3000])
def test_graph_memory_is_estimated_from_a_few_graphs(tiny, monkeypatch, max_num_seqs):
    """On a device where each graph takes 3 bytes, and all share 100 bytes per token of the largest,
    the estimate equals the memory of all graphs.
    """
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    with tiny.engine(budget=4096, max_num_seqs=max_num_seqs) as one:
        graphs = Replayed(one.model, one.cache, one._runner._last_tokens)
        shapes = lambda: graphs._recorded
        used = lambda: 100 * max((s.num_tokens for s in shapes()), default=0) + 3 * len(shapes())
        estimate = graphs.estimate_bytes(4096, used)
        assert len(shapes()) <= 4 and shapes().keys() == set(graphs.shapes(4096)[: len(shapes())])
        graphs.record_all(4096)
        assert estimate == used() and len(shapes()) == len(graphs.shapes(4096))
    assert max(shape.num_tokens for shape in shapes()) == max(2048, max_num_seqs)


def test_two_rows_of_one_chunk_make_no_decode_only_step(tiny):
    """One token per chunk and as many sampled rows as chunks, but not one row per chunk."""
    with tiny.engine(budget=12, max_num_seqs=3) as one:
        one.add("x", SamplingParams(n=2, max_tokens=2))
        one.add("y" * 30, SamplingParams(max_tokens=2))
        step = one.scheduler.schedule()
        assert [(chunk.num_tokens, len(chunk.sampled_by)) for chunk in step.chunks] == [
            (1, 2),
            (11, 0),
        ]
        short = replace(step, chunks=(step.chunks[0], step.chunks[1]._replace(stop=1)))
        assert len(short.rows_to_sample) == len(short.chunks) == short.num_tokens
        assert not _is_decode_only(short)
