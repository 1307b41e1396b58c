"""The number of pages that fit."""

import gc

import pytest
import torch

from onchip import LLM
from onchip.engine import (
    ByteTokenizer,
    Engine,
    ExecutionConfig,
    Limits,
    SamplingParams,
    memory,
)
from onchip.engine.model_runner import _used_bytes
from onchip.engine.speculation.config import SpeculativeConfig
from onchip.kvcache.swap import CHUNK_BYTES
from onchip.models import ModelConfig, random_model
from onchip.models.latent_attention import LatentAttention
from tests.models.conftest import fields


def test_no_more_pages_than_all_sequences_can_fill(tiny):
    limits = Limits(100, 64, 3)
    assert memory.device_pages(tiny.model(), limits, memory.Paging(16), 0.9) == 1 + 3 * 7


def test_a_cpu_cache_takes_a_quarter_of_the_free_memory(tiny, monkeypatch):
    page = tiny.model().cache_spec(16).page_bytes
    free = {"SC_AVPHYS_PAGES": 400, "SC_PAGE_SIZE": page}
    monkeypatch.setattr(memory.os, "sysconf", free.__getitem__)
    assert memory.device_pages(tiny.model(), Limits(256, 256, 256), memory.Paging(16), 0.9) == 100
    free["SC_AVPHYS_PAGES"] = 7
    with pytest.raises(ValueError, match="no page of 4,096 bytes fits on cpu"):
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


def test_host_pages_are_bounded_by_swap_space_and_device_pages(tiny):
    spec = tiny.model().cache_spec(16)
    assert memory.host_pages(spec, 0, 50) == 0
    assert memory.host_pages(spec, 1e-4, 50) == int(1e-4 * 2**30) // spec.page_bytes < 50
    assert memory.host_pages(spec, 4, 50) == 50


def test_host_memory_for_long_requests_is_larger_than_the_cache(tiny):
    spec = tiny.model().cache_spec(16)
    assert memory.offload_pages(spec, 0, 50) == 0
    size = 50 * spec.page_bytes / 2**30
    assert memory.offload_pages(spec, size, 50) == 50
    with pytest.raises(ValueError, match="hold 50 pages, but the cache has 50: a request longer"):
        memory.offload_pages(spec, size, 51)


def test_steps_that_stream_pages_hold_segments_and_unrounded_outputs(tiny):
    """4 heads of 8 numbers in fp32."""
    limits = Limits(256, 100, 4)
    assert memory._streaming_bytes(tiny.model(), limits) == 2 * 2**26 + 5 * 100 * 4 * 8 * 4


def test_steps_with_a_cascade_hold_unrounded_outputs(tiny):
    """4 heads over 2, of 8 numbers in fp32; 32 slots of 128 rows for each of the 2; tables of 4
    sequences with 16 pages.
    """
    limits = Limits(256, 100, 4)
    expected = 2 * (100 * 4 + 32 * 128 * 2) * 8 * 4 + 16 * 4 * 16
    assert memory._cascade_bytes(tiny.model(), limits, memory.Paging(16)) == expected


def test_steps_in_8_bits_hold_quantised_operands(tiny):
    """128 queries of 4 heads and 256 keys of 2 in blocks of 64 columns, and two outputs of 8."""
    limits = Limits(250, 100, 4)
    expected = 128 * 4 * 64 + 256 * 2 * 128 + 2 * 100 * 4 * 8 * 4
    assert memory._prefill_bytes(tiny.model(), limits) == expected


class Device:
    """A GPU as reported by torch.cuda: 2 of 10 GB are used, and the largest step grows torch's
    memory from 100 to 400 MB.
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
def test_memory_besides_pages_is_subtracted(tiny, monkeypatch, graphs):
    """Steps with every sampling option, graphs and their shared page table, and staging buffers."""
    monkeypatch.setattr(Engine, "graph_bytes", lambda self: 700 * 10**6)
    device, drawn, limits = Device(monkeypatch), [], Limits(250, 64, 12)
    add = Engine.add
    monkeypatch.setattr(Engine, "add", lambda *args: drawn.append(args[2]) or add(*args))
    recorded = ExecutionConfig(cascade="auto") if graphs else None
    room = memory._free_gpu_bytes(tiny.model(), limits, memory.Paging(16), 0.9, recorded)
    fixed = device.peak - device.held + 2 * CHUNK_BYTES
    table = (4 + 16) * 12 * -(-250 // 16)  # and the tables of a cascade
    assert room == 9 * 10**9 - 2 * 10**9 - fixed - graphs * (700 * 10**6 + table)
    assert len(drawn) == 12 and all(one.logprobs and one.has_penalties for one in drawn)
    assert drawn[0].prompt_logprobs and not drawn[1].prompt_logprobs


def test_latent_models_run_their_largest_step_in_both_ways(monkeypatch):
    """Prompts alone, and prompts that read their pages: which takes more depends on the heads."""
    Device(monkeypatch)
    model = random_model(ModelConfig.from_hf(fields("deepseek_v3")))
    tokens = {"_expanded": [], "_absorbed": []}
    for name, counts in tokens.items():
        way = getattr(LatentAttention, name)
        count = lambda self, q, *rest, way=way, counts=counts: (
            counts.append(len(q)) or way(self, q, *rest)
        )
        monkeypatch.setattr(LatentAttention, name, count)
    for max_num_seqs in (1, 4, 64):
        for counts in tokens.values():
            counts.clear()
        memory._step_bytes(model, Limits(128, 64, max_num_seqs), memory.Paging(16))
        assert max(tokens["_absorbed"]) >= max(tokens["_expanded"]) > 32


@pytest.mark.parametrize("graphs", [False, True])
def test_a_draft_model_takes_a_step_and_graphs(tiny, monkeypatch, graphs):
    """Of what is left, the draft's pages have half: both caches have equal pages."""
    held = {"_step_bytes": 5 * 10**6, "_graph_bytes": 3 * 10**6}
    for name, answer in held.items():
        monkeypatch.setattr(memory, name, lambda *_, answer=answer: answer)
    draft, spec = tiny.model(), tiny.model().cache_spec(16)
    limits, paging = Limits(250, 64, 12), memory.Paging(16)
    config = SpeculativeConfig(3, enforce_eager=not graphs)
    share = lambda: memory._share_with_draft(10**9, spec, draft, limits, paging, config)
    assert share() == 5 * 10**8
    monkeypatch.setattr(type(draft), "device", torch.device("cuda"))
    assert share() == (10**9 - 5 * 10**6 - graphs * 3 * 10**6) // 2


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("max_num_seqs", [12, 300])
def test_graphs_take_the_estimated_memory(tiny, max_num_seqs):
    """At most the estimate, up to the driver's granularity, and not so little that pages
    are lost.
    """
    used, options = [], {"budget": 4096, "max_num_seqs": max_num_seqs}
    with tiny.engine("cuda", **options) as one:
        one.warm_up()  # libraries now hold their permanent memory
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
def test_gpu_memory_utilization_is_kept(tiny, eager):
    """Cache, graphs and steps stay within the share and fill most of it."""
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
    with pytest.raises(ValueError, match="gpu_memory_utilization=1.5 must be above 0"):
        LLM(decoder, tokenizer=ByteTokenizer(), gpu_memory_utilization=1.5)
