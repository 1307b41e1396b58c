"""train() and serve(): one copy of the weights, no page of older weights, memory given back."""

import gc

import pytest
import torch

import onchip
from onchip.engine import SamplingParams
from onchip.kvcache import KVCache, Spec
from onchip.models import ModelConfig, random_model

PROMPT = list(range(40, 70))
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=0)


@pytest.fixture
def model(tiny):
    return random_model(ModelConfig.from_hf(tiny.CONFIG), seed=2)


@pytest.fixture
def llm(model):
    with onchip.LLM(model, num_pages=300, swap_space=0.001, reproducible=True) as one:
        yield one


def learn(model, steps=1):
    """Steps of an optimiser that makes the prompt more probable."""
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(steps):
        logits = model.logits(model.full(torch.tensor([PROMPT])))[0, :-1]
        torch.nn.functional.cross_entropy(logits, torch.tensor(PROMPT[1:])).backward()
        optimizer.step()
        optimizer.zero_grad()


def logprobs_of(llm, prompt=PROMPT):
    (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    choice = output.outputs[0]
    rows = zip(choice.token_ids, choice.logprobs, strict=True)
    return output, list(choice.token_ids), [row[token].logprob for token, row in rows]


def expected_logprobs(model, tokens):
    logits = model.logits(model.full(torch.tensor([PROMPT + tokens])))[0]
    rows = logits.log_softmax(-1)[len(PROMPT) - 1 : -1]
    return rows.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def tensor_bytes():
    """Bytes of all tensors that tests made in this process, each storage once."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def test_the_next_sample_uses_the_new_weights(llm, model):
    """It would fail with stale weights, and with a stale prefix: the prompt was cached."""
    _, tokens, before = logprobs_of(llm)
    assert before == expected_logprobs(model, tokens)
    assert logprobs_of(llm)[0].num_cached_tokens > 0
    for _ in range(2):
        assert llm.train() is model
        learn(model)
        llm.serve()
        output, tokens, after = logprobs_of(llm)
        assert output.num_cached_tokens == 0
        assert after == expected_logprobs(model, tokens) != before
        assert logprobs_of(llm)[0].num_cached_tokens > 0
        before = after


def test_weights_that_change_while_it_serves_empty_the_cache(llm, model):
    logprobs_of(llm)
    learn(model)
    output, tokens, after = logprobs_of(llm)
    assert output.num_cached_tokens == 0 and after == expected_logprobs(model, tokens)


def test_a_stale_page_gives_other_bits(llm, model, monkeypatch):
    """Otherwise the tests above could not fail."""
    logprobs_of(llm)
    monkeypatch.setattr(type(llm.engine._weights), "has_changed", False)
    learn(model)
    output, tokens, after = logprobs_of(llm)
    assert output.num_cached_tokens > 0 and after != expected_logprobs(model, tokens)


@pytest.mark.parametrize("overlap", [False, True])
def test_weights_may_not_change_under_requests(llm, model, overlap):
    llm.engine._overlap = overlap
    llm.engine.add(PROMPT, GREEDY)
    llm.engine.step()
    assert (llm.engine._in_flight is not None) == overlap
    with pytest.raises(ValueError, match=r"train\(\) while requests are unfinished"):
        llm.train()
    learn(model)
    for call in (llm.engine.step, lambda: llm.engine.add(PROMPT, GREEDY)):
        with pytest.raises(ValueError, match="the weights changed while requests are unfinished"):
            call()
    assert llm.engine.cancel("request-0")
    output, tokens, after = logprobs_of(llm)
    assert output.num_cached_tokens == 0 and after == expected_logprobs(model, tokens)


def test_calls_in_the_wrong_mode_are_refused(llm):
    with pytest.raises(ValueError, match=r"serve\(\) follows train\(\)"):
        llm.serve()
    llm.train()
    for call in (llm.train, lambda: llm.generate([PROMPT], GREEDY), llm.engine.step):
        with pytest.raises(ValueError, match=r"in training, without pages: call serve\(\)"):
            call()
    with pytest.raises(ValueError, match="the memory of the pages was released"):
        llm.engine.cache.layer(0)
    assert not llm.engine.cancel("request-0") and not llm.engine.has_work
    llm.serve()
    llm.close()
    with pytest.raises(ValueError, match="the engine was closed"):
        llm.train()
    with pytest.raises(ValueError, match="the engine was closed"):
        llm.serve()


def test_an_engine_can_be_closed_in_training(llm):
    llm.train()
    llm.close()


def test_there_is_one_copy_of_the_weights(model):
    """Serving takes the pages and their copies on the host, training gives them back."""
    own = sum(p.untyped_storage().nbytes() for p in model.parameters())
    before = tensor_bytes()
    with onchip.LLM(model, num_pages=300, swap_space=0.01) as llm:
        spec, tier = llm.engine.cache.spec, llm.engine.tier
        pages = (300 + tier.capacity) * spec.page_bytes
        assert pages > 5 * own
        assert pages <= tensor_bytes() - before < pages + own / 2
        llm.train()
        assert tensor_bytes() - before < own / 2
        llm.serve()
        logprobs_of(llm)
        assert pages <= tensor_bytes() - before < pages + own / 2


@pytest.mark.parametrize("method", ["draft", "ngram"])
def test_drafts_and_swaps_continue_afterwards(model, method):
    config = {"method": method, "num_speculative_tokens": 3}
    config |= {"model": model} if method == "draft" else {}
    with onchip.LLM(model, num_pages=60, speculative_config=config, reproducible=True) as llm:
        for _ in range(2):
            _, tokens, found = logprobs_of(llm)
            assert found == expected_logprobs(model, tokens)
            learn(llm.train())
            llm.serve()


def test_steps_with_graphs_are_refused(tiny, monkeypatch):
    with tiny.engine() as engine:
        monkeypatch.setattr(type(engine._runner), "has_graphs", True)
        with pytest.raises(onchip.UnsupportedError, match="CUDA graphs hold"):
            engine.train()


def test_released_pages_keep_their_views():
    cache = KVCache(Spec(2, 2, 8, 8, 4, torch.float32, "cpu"), 9)
    k, v = cache.layer(1)
    cache.release_memory()
    assert k.untyped_storage().nbytes() == 0
    with pytest.raises(ValueError, match="the memory of the pages was released"):
        cache.open()
    cache.take_memory()
    k.fill_(3)
    assert torch.equal(cache.layer(1)[0], k) and cache.layer(1)[0].data_ptr() == k.data_ptr()
