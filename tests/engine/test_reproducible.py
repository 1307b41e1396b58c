"""An engine with reproducible=True: however requests are batched, chunked, cached, preempted,
swapped, forked and drafted for, their log probabilities have the bits of one forward of the
trainable model.
"""

import random

import pytest
import torch

import onchip
from onchip.engine import (
    Engine,
    ExecutionConfig,
    Limits,
    SamplingParams,
)
from onchip.engine.speculation.config import SpeculativeConfig
from onchip.models import ModelConfig, random_model
from tests.grids import mark_all_after

CONFIG = {
    "model_type": "gemma2",  # windows, softcaps, two kinds of layers
    "vocab_size": 67,
    "hidden_size": 128,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 20,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 9.0,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 66,
}
PREFIXES = [[1] * 9, [2, 3] * 12 + [4] * 30, list(range(3, 20))]
NGRAM = SpeculativeConfig(4, prompt_lookup_max=3, prompt_lookup_min=1)


def make_model(dtype=torch.float32, **changes):
    return random_model(ModelConfig.from_hf(CONFIG | changes), seed=1, dtype=dtype)


def make_engine(model, seed=0, num_pages=40, reproducible=True, budget=21, **options):
    execution = ExecutionConfig(reproducible=reproducible, overlap=bool(seed % 2))
    options = {"page_size": 4, "host_pages": 30, "speculative_config": NGRAM} | options
    limits = Limits(256, budget, 8)
    return Engine(model, None, limits=limits, num_pages=num_pages, execution=execution, **options)


class Coin:
    """Costs that choose at random."""

    def __init__(self, draw):
        self.draw = draw

    def prefers_swap(self, num_pages, num_tokens):
        return self.draw.random() < 0.6

    def observe(self, num_tokens, seconds):
        pass


def arrive(engine, draw):
    head = draw.choice(PREFIXES)
    tail = [draw.randrange(66) for _ in range(draw.randrange(1, 12))]
    params = SamplingParams(
        n=draw.choice((1, 1, 2, 3)),
        max_tokens=draw.randrange(1, 40),
        temperature=draw.choice((0, 0.6, 1.0)),
        top_p=draw.choice((1.0, 0.9)),
        seed=draw.randrange(1000),
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=draw.choice((None, None, 0)),
    )
    prompt = head[: draw.randrange(len(head) + 1)] + tail
    return engine.add(prompt, params, priority=draw.choice((0, 0, 1)))


def live(engine, seed, count):
    """The outputs of `count` requests that arrive at random, while others run and are preempted,
    and how often what happened.
    """
    draw, outputs, seen = random.Random(seed), [], {"swapped": 0, "recomputed": 0, "requests": 0}
    engine.scheduler._kv.costs = Coin(draw)
    while engine.has_work or seen["requests"] < count:
        if seen["requests"] < count and draw.random() < 0.4:
            arrive(engine, draw)
            seen["requests"] += 1
        if engine.scheduler.running and draw.random() < 0.1:
            victim = draw.choice(engine.scheduler.running)
            if not any(sample.pending for sample in victim.samples):
                engine.scheduler.preempt(victim)
                swapped = victim.host_group is not None
                seen["swapped" if swapped else "recomputed"] += 1
        outputs += [output for output in engine.step() if output.finished]
    seen["hit"] = sum(output.num_cached_tokens > 0 for output in outputs)
    seen["forked"] = sum(len(output.outputs) > 1 for output in outputs)
    return outputs, seen


def collect(outputs):
    """(tokens, first predicted, its log probabilities) of each sequence."""
    for output in outputs:
        prompt = list(output.prompt_token_ids)
        if output.prompt_logprobs is not None:
            rows = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
            yield prompt, 1, [row[token].logprob for token, row in rows]
        for choice in output.outputs:
            rows = zip(choice.token_ids, choice.logprobs, strict=True)
            logprobs = [row[token].logprob for token, row in rows]
            yield prompt + list(choice.token_ids), len(prompt), logprobs


def score(model, texts):
    """The log probabilities of all tokens but the first of each text, from one forward with
    gradients.
    """
    lengths = [len(text) for text in texts]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    packed = torch.tensor([token for text in texts for token in text])
    logits = model.logits(model.full(packed, cu_seqlens, max(lengths)))
    assert logits.requires_grad
    logprobs = logits.log_softmax(-1).split(lengths)
    return [
        rows[:-1].gather(1, torch.tensor(text[1:])[:, None])[:, 0]
        for rows, text in zip(logprobs, texts, strict=True)
    ]


def count_differences(model, outputs):
    """(tokens, log probabilities with other bits than in one forward)."""
    sequences = list(collect(outputs))
    expected = score(model, [text for text, _, _ in sequences])
    total = differ = 0
    for (_, first, logprobs), exact in zip(sequences, expected, strict=True):
        exact = exact[first - 1 : first - 1 + len(logprobs)]
        total += len(logprobs)
        differ += int((torch.tensor(logprobs, dtype=exact.dtype) != exact).sum())
    return total, differ


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [0, 1])
def test_any_life_of_an_engine_gives_the_bits_of_one_forward(dtype, seed):
    model = make_model(dtype)
    with make_engine(model, seed) as engine:
        outputs, seen = live(engine, seed, 40)
        seen["drafts"] = engine.scheduler.speculation.num_accepted_tokens
    total, differ = count_differences(model, outputs)
    assert total > 1000 and differ == 0
    assert all(seen.values()), seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", mark_all_after(2, range(2, 7)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_thousand_tokens(dtype, seed):
    """Of each seed, 10,000 of all."""
    model = make_model(dtype)
    with make_engine(model, seed) as engine:
        total, differ = count_differences(model, live(engine, seed, 80)[0])
    assert total > 2_000 and differ == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_default_has_other_bits(dtype):
    """Otherwise the tests above could not fail."""
    model = make_model(dtype)
    with make_engine(model, reproducible=False) as engine:
        total, differ = count_differences(model, live(engine, 0, 20)[0])
    assert differ > total / 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_those_of_a_request_alone(dtype):
    """Sampled by the same random numbers, together or not; without drafts, too."""
    model, draw = make_model(dtype), random.Random(4)
    requests = [
        (draw.choice(PREFIXES), SamplingParams(seed=i, max_tokens=12, top_p=0.95, logprobs=1))
        for i in range(5)
    ]
    alone = []
    for prompt, params in requests:
        with make_engine(model, speculative_config=None, budget=50) as engine:
            engine.add(prompt, params)
            alone += drain(engine)
    with make_engine(model) as engine:
        for prompt, params in requests:
            engine.add(prompt, params)
        together = sorted(drain(engine), key=lambda output: output.request_id)
    for one, other in zip(alone, together, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


def drain(engine):
    outputs = []
    while engine.has_work:
        outputs += [output for output in engine.step() if output.finished]
    return outputs


class TestRefusals:
    @pytest.mark.parametrize(
        "options",
        [
            {"cascade": "auto"},
            {"prefill_precision": "fp8"},
            {"lockstep": True},
            {"kv_dtype": "int8"},
            {"offload_pages": 50},
            {"speculative_config": SpeculativeConfig(2, speculative_token_tree="[(0,), (1,)]")},
        ],
        ids=str,
    )
    def test_options_that_sum_in_another_order(self, options):
        (name,) = options
        own = {} if name in ExecutionConfig.__dataclass_fields__ else options
        execution = ExecutionConfig(reproducible=True, **({} if own else options))
        limits = {"limits": Limits(64, 32, 4), "num_pages": 9}
        refusal = (
            f"{name.replace('_config', '_token_tree')}=.* is not served with reproducible=True"
        )
        with pytest.raises(onchip.UnsupportedError, match=refusal):
            Engine(make_model(), None, **limits, execution=execution, **own)

    def test_a_model_of_transformers(self):
        with pytest.raises(onchip.UnsupportedError, match="needs a native decoder"):
            make_engine(object())

    def test_several_ranks(self):
        with pytest.raises(onchip.UnsupportedError, match="tensor_parallel_size=2 is not served"):
            onchip.LLM("tiny", tensor_parallel_size=2, reproducible=True)


def test_the_llm_passes_the_option_on():
    with onchip.LLM("tiny", num_pages=40, max_model_len=64, reproducible=True) as llm:
        assert llm.engine.model.reproducible and llm.engine._runner._is_reproducible
        params = SamplingParams(max_tokens=9, logprobs=0, temperature=0.7)
        outputs = llm.generate(["In the beginning", "And the LORD said"], params)
        assert count_differences(llm.engine.model, outputs) == (18, 0)
