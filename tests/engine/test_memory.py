"""How many pages fit."""

import gc

import pytest
import torch

from onchip import LLM
from onchip.engine import ByteTokenizer, Engine, Limits, SamplingParams, memory
from onchip.engine.runner import _used_bytes
from onchip.kvcache.swap import CHUNK_BYTES


def test_no_more_than_all_sequences_can_fill(tiny):
    limits = Limits(100, 64, 3)
    assert memory.device_pages(tiny.model(), limits, memory.Paging(16), 0.9) == 1 + 3 * 7


def test_a_quarter_of_what_the_host_has_free(tiny, monkeypatch):
    page = tiny.model().cache_spec(16).page_bytes
    free = {"SC_AVPHYS_PAGES": 400, "SC_PAGE_SIZE": page}
    monkeypatch.setattr(memory.os, "sysconf", free.__getitem__)
    assert memory.device_pages(tiny.model(), Limits(256, 256, 256), memory.Paging(16), 0.9) == 100
    free["SC_AVPHYS_PAGES"] = 7
    with pytest.raises(ValueError, match="there is no room for pages of 4,096 bytes on cpu"):
        memory.device_pages(tiny.model(), Limits(256, 256, 256), memory.Paging(16), 0.9)


def test_more_pages_of_8_bits_fit(tiny, monkeypatch):
    """A head of 8 and its scale are 12 bytes where fp32 takes 32."""
    page = tiny.model().cache_spec(16).page_bytes
    free = {"SC_AVPHYS_PAGES": 400, "SC_PAGE_SIZE": page}
    monkeypatch.setattr(memory.os, "sysconf", free.__getitem__)
    for kv_dtype in ("fp8", "int8"):
        paging = memory.Paging(16, kv_dtype)
        assert memory.device_pages(tiny.model(), Limits(256, 256, 256), paging, 0.9) == 266
        with tiny.engine(kv_dtype=kv_dtype, page_size=16) as one:
            assert one.stats().page_bytes * 32 == page * 12


def test_the_host_holds_what_it_is_given_and_no_more_than_the_device(tiny):
    spec = tiny.model().cache_spec(16)
    assert memory.host_pages(spec, 0, 50) == 0
    assert memory.host_pages(spec, 1e-4, 50) == int(1e-4 * 2**30) // spec.page_bytes < 50
    assert memory.host_pages(spec, 4, 50) == 50


class Device:
    """What torch.cuda says of a GPU: of 10 GB 2 are used by weights and others, and the largest
    step makes torch's memory grow from 100 to 400 MB.
    """

    total, free, held, peak = 10 * 10**9, 8 * 10**9, 100 * 10**6, 400 * 10**6

    def __init__(self, monkeypatch):
        for name, answer in {
            "mem_get_info": (self.free, self.total),
            "memory_reserved": self.held,
            "max_memory_reserved": self.peak,
            "empty_cache": None,
            "reset_peak_memory_stats": None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)


@pytest.mark.parametrize("graphs", [False, True])
def test_what_is_not_for_pages_is_counted(tiny, monkeypatch, graphs):
    """Steps with draws of every kind, graphs and the table that they share, staging of swaps."""
    monkeypatch.setattr(Engine, "graph_bytes", lambda self: 700 * 10**6)
    device, drawn, limits = Device(monkeypatch), [], Limits(250, 64, 12)
    add = Engine.add
    monkeypatch.setattr(Engine, "add", lambda *args: drawn.append(args[2]) or add(*args))
    room = memory._room_on_gpu(tiny.model(), limits, memory.Paging(16), 0.9, graphs)
    fixed = device.peak - device.held + 2 * CHUNK_BYTES
    table = 4 * 12 * -(-250 // 16)
    assert room == 9 * 10**9 - 2 * 10**9 - fixed - graphs * (700 * 10**6 + table)
    assert len(drawn) == 12 and all(one.logprobs and one.penalised for one in drawn)
    assert drawn[0].prompt_logprobs and not drawn[1].prompt_logprobs


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("max_num_seqs", [12, 300])
def test_graphs_take_what_was_estimated(tiny, max_num_seqs):
    """Not more, but for what a driver takes at a time, nor so much that pages are missed."""
    used, options = [], {"budget": 4096, "max_num_seqs": max_num_seqs}
    with tiny.engine("cuda", **options) as one:
        one.warm_up()  # what libraries take once is taken
    with tiny.engine("cuda", **options) as one:
        estimate = one.graph_bytes()
    for prepare in (lambda one: None, lambda one: one.warm_up()):
        gc.collect()
        with tiny.engine("cuda", **options) as one:
            prepare(one)
            used.append(_used_bytes(one.cache.device))
    grown = used[1] - used[0]
    assert grown - 32 * 2**20 <= estimate <= 3 * grown + 256 * 2**20


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("eager", [False, True])
def test_a_gpu_is_used_as_far_as_it_was_said(tiny, eager):
    """The cache, its graphs and its steps stay within the share, and fill most of it."""
    free, total = torch.cuda.mem_get_info()
    share = (total - free) / total + 0.05
    decoder = tiny.model("cuda")
    options = {"max_model_len": 256, "max_num_seqs": 4096 if eager else 512}
    options["max_num_batched_tokens"] = 8192
    options |= {"gpu_memory_utilization": share, "swap_space": 0}
    before = torch.cuda.memory_allocated()
    with LLM(decoder, tokenizer=ByteTokenizer(), enforce_eager=eager, **options) as llm:
        pool = torch.cuda.memory_allocated() - before
        outputs = llm.generate(["x"] * 50, SamplingParams(max_tokens=5))
        assert len(outputs) == 50 and pool < 0.06 * total
        free, total = torch.cuda.mem_get_info()
        assert (total - free) / total < share + 0.01
    with pytest.raises(ValueError, match="gpu_memory_utilization=1.5 must lie above 0"):
        LLM(decoder, tokenizer=ByteTokenizer(), gpu_memory_utilization=1.5)
