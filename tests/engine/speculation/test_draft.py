"""A draft model with its own pages: outputs are those without drafts, and no page leaks."""

import logging
from collections import Counter
from dataclasses import replace
from itertools import count
from unittest.mock import Mock

import pytest
import torch

from onchip.engine import LLM, Limits, SamplingParams
from onchip.engine.cuda_graphs import StepGraphs
from onchip.engine.engine import Engine
from onchip.engine.speculation.config import SpeculativeConfig
from onchip.models import ModelConfig, builtin, random_model
from tests.engine.replayed import Replayed

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


def count_reads(one, monkeypatch):
    """For each call of `propose`, the number of drafts that were read at a time."""
    reads, propose, read = [], one._draft.propose, one._draft._read_drafts

    def note(wanted):
        reads.append([])
        return propose(wanted)

    def note_read():
        unread = one._draft._num_last - one._draft._num_read
        reads[-1] += [unread] * bool(unread)
        read()

    monkeypatch.setattr(one._draft, "propose", note)
    monkeypatch.setattr(one._draft, "_read_drafts", note_read)
    return reads


@pytest.mark.parametrize("penalty, expected", [(1.0, [6]), (1.3, [2, 2, 2])])
def test_the_host_waits_once_for_all_drafts(tiny, monkeypatch, penalty, expected):
    """3 drafts of 2 samples. Penalties depend on their values: then it waits for each step."""
    params = SamplingParams(
        temperature=0, max_tokens=30, ignore_eos=True, repetition_penalty=penalty
    )
    with tiny.engine(speculative_config=CONFIG, draft_model=tiny.model()) as one:
        reads = count_reads(one, monkeypatch)
        tiny.ask(one, ["x", "some text"], [params])
        tiny.drain(one)
        assert one.stats().speculation.acceptance_rate == 1
    assert len([r for r in reads if r]) >= 7 and reads.count(expected) >= 6


def replay_on_the_cpu(one, draft_length=2):
    """Let an engine and its draft model replay graphs, all of which are recorded now."""
    runner, draft, most = one._runner, one._draft, one.limits.max_num_batched_tokens
    length = 1 + one._speculator.config.num_speculative_tokens
    runner._graphs = Replayed(one.model, one.cache, runner._last_tokens, chunk_lengths=[length])
    draft._graphs = Replayed(
        draft.model, draft.cache, draft._last_tokens, chunk_lengths=[draft_length]
    )
    runner._graphs.record_all(most)
    draft._graphs.record_all(most)
    return runner._graphs, draft._graphs


@pytest.mark.parametrize("same", [True, False])
def test_replayed_drafts_and_verifications_give_the_outputs_without(tiny, plain, monkeypatch, same):
    """Drafts: one token of 1, 2, 4 ... sequences, or two. Verification: four of each."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    draft = tiny.model() if same else other(tiny)
    options = {"num_pages": 60, "host_pages": 60} if same else {}
    with tiny.engine(speculative_config=CONFIG, draft_model=draft, **options) as one:
        graphs, draft_graphs = replay_on_the_cpu(one)
        monkeypatch.setattr(Replayed, "_record", None)
        tiny.ask(one)
        assert tiny.visible(tiny.drain(one)[0]) == tiny.visible(plain)
    assert sum([tokens == 4 * seqs for seqs, tokens in graphs.used]) >= 2
    assert {tokens / seqs for seqs, tokens in draft_graphs.used} >= {1, 2}


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_drafts_on_a_gpu_give_the_outputs_without(tiny, monkeypatch, graphs, same):
    """With graphs and without, in fp32. After the start no graph is recorded, and the host waits
    for the device only where it reads the drafts and where it collects a step.
    """
    with tiny.engine("cuda", overlap=False, graphs=False) as one:
        tiny.ask(one)
        expected = tiny.visible(tiny.drain(one)[0])
    draft = tiny.model("cuda") if same else other(tiny).cuda()
    config = replace(CONFIG, enforce_eager=not graphs)
    options = {"speculative_config": config, "draft_model": draft}
    with tiny.engine("cuda", **options) as one:
        one.warm_up()
        assert (one._draft._graphs is not None) == graphs
        tiny.ask(one)
        tiny.drain(one)  # everything is compiled
        monkeypatch.setattr(StepGraphs, "_record", None)
        read = one._draft._read_drafts

        def read_and_wait():
            torch.cuda.set_sync_debug_mode("default")
            read()
            torch.cuda.set_sync_debug_mode("error")

        monkeypatch.setattr(one._draft, "_read_drafts", read_and_wait)
        one._num_accepted, outputs = 0, []
        tiny.ask(one)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            while one.has_work:
                outputs += one.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert tiny.visible({output.request_id: output for output in outputs}) == expected
        assert one.stats().speculation.failure is None and one.stats().speculation.num_drafts


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
