"""A draft model with its own pages: outputs are those without drafts, and no page leaks."""

import logging
from collections import Counter
from itertools import count
from unittest.mock import Mock

import pytest
import torch

from onchip.engine import LLM, Limits, SamplingParams
from onchip.engine.engine import Engine
from onchip.engine.speculation.config import SpeculativeConfig
from onchip.models import ModelConfig, builtin, random_model

CONFIG = SpeculativeConfig(3, method="draft", model="given as draft_model")


@pytest.fixture(scope="module")
def plain(tiny):
    with tiny.engine(prefix_caching=False, budget=500, num_pages=900) as one:
        tiny.ask(one)
        return tiny.drain(one)[0]


def other(tiny):
    """A smaller model that rarely agrees."""
    torch.manual_seed(3)
    return random_model(ModelConfig.from_hf(tiny.CONFIG | {"num_hidden_layers": 1}))


def run(tiny, draft, **options):
    with tiny.engine(speculative_config=CONFIG, draft_model=draft, **options) as one:
        tiny.ask(one)
        outputs = tiny.drain(one)[0]
        one._draft.cache.check()
        one._draft._release_ended()
        pool = one._draft.cache.pool
        assert not pool.tables and pool.num_free == pool.capacity
        return outputs, one.stats()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": True},
        {"budget": 21, "num_pages": 40, "host_pages": 60},
        {"budget": 12, "num_pages": 36, "prefix_caching": False},
    ],
)
@pytest.mark.parametrize("same", [True, False])
def test_outputs_equal_those_without_drafts(tiny, plain, options, same):
    outputs, stats = run(tiny, tiny.model() if same else other(tiny), **options)
    assert tiny.visible(outputs) == tiny.visible(plain)
    drafts = stats.speculation
    assert drafts.num_drafts
    assert not same or drafts.acceptance_rate > 0.9  # but for tokens after an end


def test_a_seed_drafts_what_the_target_samples(tiny):
    """The same random numbers: a draft model that is the target is always right."""
    params = SamplingParams(seed=4, temperature=1.5, top_p=0.9, max_tokens=21, ignore_eos=True)
    with tiny.engine(speculative_config=CONFIG, draft_model=tiny.model()) as one:
        tiny.ask(one, ["x", "some text"], [params])
        tiny.drain(one)
        stats = one.stats()
    assert stats.speculation.acceptance_rate == 1
    assert stats.steps <= 2 + 21 / 4


def test_cancelled_requests_leave_nothing_in_the_draft_cache(tiny):
    with tiny.engine(speculative_config=CONFIG, draft_model=other(tiny)) as one:
        requests = tiny.ask(one)
        for _ in range(4):
            one.step()
        for request in requests[::2]:
            one.cancel(request.request_id)
        tiny.drain(one)
        one._draft._release_ended()
        assert not one._draft.cache.pool.tables


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("calls", [0, 1, 4, 9])
def test_a_draft_model_that_fails_ends_drafts_and_no_request(tiny, plain, calls, overlap, caplog):
    """In the MLP of its last layer: pages are allocated, and half written."""
    draft, calls_so_far = other(tiny), count()

    def fail_late(*_):
        if next(calls_so_far) == calls:
            raise RuntimeError("the draft died")

    draft.layers[-1].mlp.register_forward_pre_hook(fail_late)
    options = {"speculative_config": CONFIG, "draft_model": draft, "overlap": overlap}
    with tiny.engine(**options) as one, caplog.at_level(logging.WARNING, "onchip"):
        tiny.ask(one)
        outputs = tiny.drain(one)[0]
        drafts, cache = one.stats().speculation, one._draft.cache
        cache.check()
        assert not cache.pool.tables and cache.pool.num_free == cache.pool.capacity
        tiny.ask(one, ["one more"], [SamplingParams(max_tokens=3)])
        tiny.drain(one)
        assert one.stats().speculation == drafts  # no later request has drafts
    assert tiny.visible(outputs) == tiny.visible(plain)
    assert drafts.failure == "RuntimeError: the draft died" and drafts.failure in str(drafts)
    assert next(calls_so_far) == calls + 1
    (record,) = caplog.records
    assert "continue without drafts" in record.getMessage()
    assert record.exc_info and record.exc_info[2].tb_next  # a traceback into the model


def test_a_request_that_is_cancelled_during_verification_leaves_nothing(tiny, monkeypatch):
    """Its step runs on the device: drafts have slots, and their tokens arrive later."""
    with tiny.engine(speculative_config=CONFIG, draft_model=tiny.model()) as one:
        requests, collect = tiny.ask(one), one._runner.collect
        cancelled = []

        def cancel_one(in_flight):
            drafted = [c.sample.request for c in in_flight.step.chunks if c.drafts]
            alive = [r for r in drafted if not r.finished]
            if alive and len(cancelled) < 3:
                cancelled.append(alive[0])
                assert one.scheduler.abort(alive[0].request_id)
            return collect(in_flight)

        monkeypatch.setattr(one._runner, "collect", cancel_one)
        outputs = tiny.drain(one)[0]
        one._draft._release_ended()
        assert not one._draft.cache.pool.tables
        assert len(cancelled) == 3
    names = {request.request_id for request in requests} - {r.request_id for r in cancelled}
    assert names <= outputs.keys() and all(outputs[name].finished for name in names)


@pytest.mark.slow
def test_sampled_tokens_have_the_distribution_without_drafts(tiny):
    """Chi-square, with other seeds: equal seeds would give equal tokens. The draft model is the
    target with noise, so that some drafts are wrong.
    """
    torch.manual_seed(5)
    draft = random_model(ModelConfig.from_hf(tiny.CONFIG))
    with torch.no_grad():
        for weight, exact in zip(draft.parameters(), tiny.model().parameters(), strict=True):
            weight.copy_(exact + 0.05 * exact.std(unbiased=False) * torch.randn_like(exact))

    def draw(seeds, **options):
        counts = [Counter() for _ in range(4)]
        with tiny.engine(num_pages=900, budget=99, **options) as one:
            params = [
                SamplingParams(seed=s, max_tokens=4, top_k=3, temperature=1.3, ignore_eos=True)
                for s in seeds
            ]
            tiny.ask(one, ["the same"], params)
            for output in tiny.drain(one)[0].values():
                for place, token in enumerate(output.outputs[0].token_ids):
                    counts[place][token] += 1
            return counts, one.stats().speculation

    plain, _ = draw(range(240))
    drafted, stats = draw(range(1000, 1240), speculative_config=CONFIG, draft_model=draft)
    assert 0.2 < stats.acceptance_rate < 0.98
    for one, other in zip(plain, drafted, strict=True):
        tiny.assert_same_distribution(one, other)


def test_a_draft_cache_that_is_full_gives_no_drafts(tiny, plain):
    with tiny.engine(speculative_config=CONFIG, draft_model=tiny.model()) as one:
        cache = one._draft.cache
        for _ in range(4):
            cache.append(cache.open(), [1] * 256)
        assert cache.pool.num_free < 60
        tiny.ask(one)
        assert tiny.visible(tiny.drain(one)[0]) == tiny.visible(plain)
        cache.check()


def test_an_interrupt_resets_the_draft_cache(tiny, monkeypatch):
    with tiny.engine(speculative_config=CONFIG, draft_model=other(tiny)) as one:
        tiny.ask(one)
        for _ in range(3):
            one.step()
        with monkeypatch.context() as patch:
            patch.setattr(one._draft.model, "logits", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                one.step()
        assert all(output.finished for output in one.step())
        assert not one._draft.cache.pool.tables
        tiny.ask(one)
        tiny.drain(one)


def test_a_folder_drafts_for_the_built_in_model():
    config = {"method": "draft", "model": "tiny", "num_speculative_tokens": 3}
    params, prompts = SamplingParams(temperature=0, max_tokens=9), ["In the beginning", "And"]
    small = {"num_pages": 100, "max_model_len": 128, "device": "cpu"}
    with LLM("tiny", **small) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    with LLM("tiny", **small, speculative_config=config) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats().speculation.acceptance_rate == 1
    tokens = lambda outputs: [o.outputs[0].token_ids for o in outputs]
    assert tokens(outputs) == tokens(expected)


def test_the_built_in_draft_model_drafts_for_the_built_in_model():
    """A third of its greedy drafts and more are accepted, of texts as it was trained on."""
    config = {"method": "draft", "model": builtin.DRAFT, "num_speculative_tokens": 4}
    params = [SamplingParams(temperature=t, max_tokens=40, seed=1) for t in (0.0, 1.0)]
    prompts, small = ["And God said unto Moses, ", "Blessed are the "], {"num_pages": 100}
    with LLM(**small, device="cpu") as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    with LLM(**small, device="cpu", speculative_config=config) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats().speculation
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert stats.acceptance_rate > 0.33 and stats.mean_acceptance_length > 2


def test_the_built_in_draft_model_generates_by_itself():
    with LLM(builtin.DRAFT, num_pages=100, device="cpu") as llm:
        (output,) = llm.generate("And the LORD ", SamplingParams(max_tokens=5), use_tqdm=False)
    assert output.outputs[0].text


def test_models_that_do_not_fit_are_refused(tiny):
    draft = random_model(ModelConfig.from_hf(tiny.CONFIG | {"vocab_size": 300}))
    with pytest.raises(ValueError, match="the draft model has vocab_size=300"):
        tiny.engine(speculative_config=CONFIG, draft_model=draft)
    draft = random_model(ModelConfig.from_hf(tiny.CONFIG | {"max_position_embeddings": 99}))
    with pytest.raises(ValueError, match="the draft model has max_seqlen=99"):
        tiny.engine(speculative_config=CONFIG, draft_model=draft)
    with pytest.raises(ValueError, match="needs draft_model"):
        Engine(builtin.tiny(), None, limits=Limits(64), num_pages=9, speculative_config=CONFIG)
    for options in ({"method": "draft"}, {"method": "ngram", "model": "tiny"}):
        with pytest.raises(ValueError, match='needs a model for method="draft", and only'):
            SpeculativeConfig.parse({"num_speculative_tokens": 2} | options)
