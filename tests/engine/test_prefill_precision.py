"""Attention of long prompts in 8 bits: which chunks, by which calls, with which error."""

import pytest
import torch

from onchip.core.device import DeviceInfo
from onchip.core.problem import UnsupportedError
from onchip.engine import LLM, Engine, ExecutionConfig, Limits, prefill_precision
from onchip.engine.layer_call import layer_call
from onchip.engine.prefill_precision import PrefillPlanner, make_prefill_planner
from onchip.engine.request import Request
from onchip.engine.sampling_params import PoolingParams, SamplingParams
from onchip.engine.step import Chunk
from onchip.kvcache import KVCache
from onchip.kvcache.prefill_chunks import PrefillChunk
from onchip.models import ModelConfig, attend, random_model

HOPPER, AMPERE = DeviceInfo("cuda", "NVIDIA H200", (9, 0)), DeviceInfo("cuda", "A100", (8, 0))
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)


@pytest.fixture
def short_chunks(monkeypatch):
    """Chunks of more than 8 tokens are long: the recipe is executed tile by tile."""
    monkeypatch.setattr(prefill_precision, "MOST_GRAPH_TOKENS", 8)


def planner(tiny, mode, device=HOPPER, **changes):
    model = tiny.model()
    cache = KVCache(model.cache_spec(16), 4)
    problem = layer_call(model, cache, 2049)._replace(precision=mode)
    changes = {"dtype": torch.bfloat16, "out_dtype": torch.bfloat16, "head_dim": 128} | changes
    return PrefillPlanner(problem._replace(**changes), device)


def chunks(*spans):
    sample = Request("", [1] * 9, None).samples[0]
    return [Chunk(sample, *span, ()) for span in spans]


def test_fp8_takes_every_chunk_of_more_tokens_than_a_graph_has(tiny):
    step = chunks((5, 6), (0, 2049), (7, 2055), (100_000, 105_000), (3, 4))
    assert planner(tiny, "fp8").plan(step) == (
        PrefillChunk(1, 1, 2050, 2049),
        PrefillChunk(3, 4098, 9098, 105_000),
    )
    assert planner(tiny, "fp8").plan(chunks((0, 2048))) == ()


def test_auto_takes_chunks_that_see_8192_keys_on_average(tiny):
    auto = planner(tiny, "auto")
    assert auto.plan(chunks((0, 8192))) == ()
    assert auto.plan(chunks((8192, 16_384))) == (PrefillChunk(0, 0, 8192, 16_384),)
    assert auto.plan(chunks((0, 16_384))) == (PrefillChunk(0, 0, 16_384, 16_384),)
    assert auto.plan(chunks((30_000, 30_500))) == ()
    assert planner(tiny, "auto", page_dtype=torch.int8).plan(chunks((0, 16_384)))
    for served in ({"device": AMPERE}, {"softcap": 5.0}, {"dtype": torch.float32}):
        with pytest.raises(UnsupportedError, match="no kernel serves this call"):
            planner(tiny, "auto", **served)


def test_what_is_not_served_is_refused(tiny, monkeypatch):
    model = tiny.model()
    cache = KVCache(model.cache_spec(16), 4)
    assert make_prefill_planner(model, cache, None) is None
    with pytest.raises(ValueError, match="prefill_precision='fp4' must be one of None, 'fp8', 'a"):
        make_prefill_planner(model, cache, "fp4")
    with pytest.raises(ValueError, match="prefill_precision='fp4' must be"):
        tiny.engine(prefill_precision="fp4")
    monkeypatch.setattr(prefill_precision, "device_info", lambda device: AMPERE)
    refusal = "prefill_precision='fp8' is not served: .*hopper: needs a Hopper GPU"
    with pytest.raises(UnsupportedError, match=refusal):
        make_prefill_planner(model, cache, "fp8")
    assert make_prefill_planner(model, cache, "auto") is None
    with pytest.raises(UnsupportedError, match="runs through transformers"):
        make_prefill_planner(object(), cache, "fp8")
    fields = tiny.CONFIG | {"model_type": "mistral", "sliding_window": 8, "rope_theta": 1e4}
    windowed = random_model(ModelConfig.from_hf(fields))
    with pytest.raises(UnsupportedError, match="every layer of the model has a window"):
        make_prefill_planner(windowed, cache, "fp8")
    assert make_prefill_planner(windowed, cache, "auto") is None


def test_the_llm_passes_the_option_on():
    with LLM("tiny", num_pages=8, max_model_len=64, prefill_precision="fp8") as llm:
        assert llm.engine._runner._prefill.kernel == "reference"
        llm.generate([[1, 2, 3]], GREEDY)
        assert llm.stats().tokens_prefilled_8bit == 0  # no chunk of more than 2,048 tokens
    with pytest.raises(ValueError, match="prefill_precision='int4' must be one of"):
        LLM("tiny", num_pages=8, prefill_precision="int4")


def spy(monkeypatch, module):
    """The calls of paged_attention of the first layer in a module: (precision, shape of the
    queries, shape of the page table, lengths).
    """
    calls, pages, attend = [], [], module.paged_attention

    def observed(q, k, v, table, seqlens, **options):
        pages.append(k.data_ptr())
        if pages[0] == pages[-1]:
            how = options.get("precision"), *(tuple(t.shape) for t in (q[..., 0, 0], table))
            calls.append((*how, seqlens.tolist()))
        return attend(q, k, v, table, seqlens, **options)

    monkeypatch.setattr(module, "paged_attention", observed)
    return calls


def test_the_calls_of_a_step(tiny, short_chunks, monkeypatch):
    """Two prompts, the second in three chunks beside a decode, and a short prompt. Pages of 4."""
    from onchip.models import prefill_8bit

    calls, others = spy(monkeypatch, prefill_8bit), spy(monkeypatch, attend)
    with tiny.engine(budget=31, prefill_precision="fp8", prefix_caching=False) as one:
        for token, count in ((1, 20), (2, 45), (3, 3)):
            one.add([token] * count, GREEDY)
        tiny.drain(one)
        stats = one.stats()
    assert calls == [
        ("fp8", (1, 20), (1, 5), [20]),
        ("fp8", (1, 11), (1, 3), [11]),
        (None, (1,), (1, 6), [21]),
        ("fp8", (1, 30), (1, 11), [41]),
    ]
    assert stats.tokens_prefilled_8bit == 61
    assert others[0] == (None, (8,), (3, 12), [22, 45, 3])  # no chunk of more than 8 tokens
    assert all(precision is None for precision, *_ in others)


def logprobs(tiny, prompts, params=GREEDY, **options):
    with tiny.engine(**options) as one:
        requests = [one.add(prompt, params) for prompt in prompts]
        tiny.drain(one)
        return requests, one.stats()


WAYS = {
    "plain": {},
    "chunks": {"budget": 17},
    "overlap": {"overlap": True},
    "few pages": {"num_pages": 34},
    "a host": {"num_pages": 34, "host_pages": 100},
    "no prefix caching": {"prefix_caching": False},
    "large pages": {"page_size": 16, "num_pages": 80},
    "8-bit pages": {"kv_dtype": "fp8"},
    "cascade": {"cascade": "always"},
}


@pytest.mark.parametrize("way", WAYS)
def test_log_probabilities_stay_close(tiny, short_chunks, way):
    """Of the first token, which follows from the whole prompt: prompts in chunks, with cached
    prefixes, beside decodes, preempted, over 8-bit pages, with a cascade.
    """
    prompts = [tiny.PREFIX + tail for tail in ("and", "or a tail of many more tokens", "x" * 30)]
    runs = [
        logprobs(tiny, prompts, prefill_precision=precision, **WAYS[way])
        for precision in (None, "fp8")
    ]
    (plain, before), (quantised, after) = runs
    assert before.tokens_prefilled_8bit == 0 < after.tokens_prefilled_8bit
    errors = [
        max(
            abs(a[t].logprob - b[t].logprob)
            for a, b in zip(*(r.output().outputs[0].logprobs[:1] for r in pair), strict=True)
            for t in a.keys() & b.keys()
        )
        for pair in zip(plain, quantised, strict=True)
    ]
    assert 1e-5 < max(errors) < 0.15  # 0.074 at most on 2026-11-18


def test_every_kind_of_request_runs(tiny, short_chunks):
    """Samples, beams, penalties, prompt logprobs, stop texts, with few pages. Two runs agree."""
    runs = []
    for _ in range(2):
        with tiny.engine(prefill_precision="fp8", num_pages=40, host_pages=60) as one:
            one.costs.link_bytes_per_s = 1e30
            tiny.ask(one)
            runs.append(tiny.visible(tiny.drain(one)[0]))
            assert one.stats().tokens_prefilled_8bit and one.stats().preempted_by_swap
    assert runs[0] == runs[1]


def test_embeddings(tiny, short_chunks):
    vectors = []
    for precision in (None, "fp8"):
        with tiny.engine(prefill_precision=precision) as one:
            one.add("a text of a few more tokens", PoolingParams("mean"))
            (output,) = tiny.drain(one)[0].values()
            vectors.append(torch.tensor(output.embedding))
    assert 1e-7 < 1 - float(vectors[0] @ vectors[1]) < 1e-2


def test_drafts(tiny, short_chunks):
    from onchip.engine.speculation.config import SpeculativeConfig

    config = SpeculativeConfig(4, prompt_lookup_max=3, prompt_lookup_min=1)
    outputs = []
    for drafts in (None, config):
        options = {"prefill_precision": "fp8", "speculative_config": drafts, "budget": 64}
        with tiny.engine(**options) as one:
            one.add("He said unto him, He said unto him, He said", GREEDY)
            outputs.append(tiny.visible(tiny.drain(one)[0]))
            assert one.stats().tokens_prefilled_8bit == 43
    assert outputs[0] == outputs[1]


def test_steps_that_read_host_memory_compute_in_16_bits(tiny, short_chunks):
    """A long request: none of its steps from the first offload on."""
    options = {"num_pages": 33, "offload_pages": 100, "page_size": 4, "prefix_caching": False}
    with tiny.engine(prefill_precision="fp8", **options) as one:
        one.add([7] * 200, GREEDY)
        tiny.drain(one)
        stats = one.stats()
    assert stats.pages_streamed and 0 < stats.tokens_prefilled_8bit <= 128


QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 16_384,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}


@pytest.mark.hopper
@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
def test_long_prompts_on_a_gpu(kv_dtype):
    """Two long prompts in chunks beside short ones and decodes, with graphs: log probabilities of
    the first token stay close to those in 16 bits.
    """
    model = random_model(ModelConfig.from_hf(QWEN3), device="cuda", dtype=torch.bfloat16)
    prompts = [[i * 37 % 997 for i in range(n)] for n in (9000, 40, 5000, 300)]
    limits, first = Limits(10_000, 4096, 8), []
    for precision in (None, "fp8"):
        execution = ExecutionConfig(prefill_precision=precision)
        options = {"limits": limits, "num_pages": 1200, "kv_dtype": kv_dtype}
        with Engine(model, None, execution=execution, **options) as one:
            one.warm_up()
            params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=5)
            requests = [one.add(prompt, params) for prompt in prompts]
            while one.has_work:
                one.step()
            first.append([r.output().outputs[0].logprobs[0] for r in requests])
            assert (one.stats().tokens_prefilled_8bit > 8000) == (precision is not None)
    for plain, fast in zip(*first, strict=True):
        common = plain.keys() & fast.keys()
        assert len(common) >= 3
        assert all(abs(plain[t].logprob - fast[t].logprob) < 0.2 for t in common)
