"""Embeddings of prompts: hidden states of the model, whatever else runs."""

import math
import random

import pytest
import torch

from onchip.engine import PoolingParams, RejectedRequest, Request, SamplingParams
from onchip.engine.cuda_graphs import fill_in_sampled
from onchip.models import positions_of
from onchip.models.builtin import tiny as builtin

PROMPTS = ["x", "the prefix that many have in common, a", "the prefix that many have in common, bc"]


def expected(tiny, tokens, pooling):
    """By definition: all hidden states of the whole prompt, in one call without pages."""
    hidden = tiny.model().full(torch.tensor([tokens]))[0].double()
    vector = hidden[-1] if pooling == "last" else hidden.mean(0)
    return vector / vector.norm()


def check(tiny, output, pooling):
    vector = torch.tensor(output.embedding, dtype=torch.float64)
    assert vector.norm().item() == pytest.approx(1, abs=1e-6)
    wanted = expected(tiny, list(output.prompt_token_ids), pooling)
    assert torch.allclose(vector, wanted, atol=2e-6, rtol=0)
    (choice,) = output.outputs
    assert (choice.token_ids, choice.text, choice.finish_reason) == ((), "", "stop")


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_embedding_is_the_hidden_state_of_the_prompt(tiny, pooling, overlap):
    """In chunks of 12 tokens, beside a request that generates; twice, to find prefixes cached."""
    one, last, vectors = tiny.engine(budget=12, overlap=overlap), {}, []
    for _ in range(2):
        texts = [one.add("no prefix", SamplingParams(temperature=0, max_tokens=9))]
        vectors = [one.add(prompt, PoolingParams(pooling)) for prompt in PROMPTS]
        last, _ = tiny.drain(one)
        assert len(last[texts[0].request_id].outputs[0].token_ids) == 9
        for request in vectors:
            check(tiny, last[request.request_id], pooling)
    hits = [last[request.request_id].num_cached_tokens for request in vectors]
    assert all(hits[1:]) if pooling == "last" else not any(hits)


class EagerGraphs:
    """The interface of StepGraphs, computed without graphs."""

    def __init__(self, runner):
        self.model, self.cache, self.last = runner._model, runner._cache, runner._last_tokens
        self.num_rows = []

    def has_graph_for(self, sequences, num_rows, has_trees):
        return True

    def plan(self, batch, is_decode_only):
        return None

    def replay(self, sequences, ids, shared):
        return self.replay_mixed(sequences, ids, torch.arange(len(ids)), shared)

    def replay_mixed(self, sequences, ids, rows, shared, parents=None):
        self.num_rows.append(len(rows))
        batch = self.cache.view(sequences)
        tokens = fill_in_sampled(ids, self.last)
        return self.model(tokens, positions_of(batch), batch, self.cache, rows)


def test_a_graph_serves_embeddings_and_samples_of_one_step(tiny):
    one = tiny.engine(budget=60)
    one._runner._graphs = graphs = EagerGraphs(one._runner)
    text = one.add("no prefix", SamplingParams(temperature=0, max_tokens=9))
    vectors = [one.add(prompt, PoolingParams()) for prompt in PROMPTS]
    num_sampled, launch = [], one._runner.launch
    one._runner.launch = lambda step: num_sampled.append(len(step.rows_to_sample)) or launch(step)
    last, _ = tiny.drain(one)
    pairs = zip(num_sampled, graphs.num_rows, strict=True)
    assert any(rows > sampled > 0 for sampled, rows in pairs)
    for request in vectors:
        check(tiny, last[request.request_id], "last")
    alone = tiny.engine()
    again = alone.add("no prefix", SamplingParams(temperature=0, max_tokens=9))
    expected_text = tiny.drain(alone)[0][again.request_id].outputs[0].token_ids
    assert last[text.request_id].outputs[0].token_ids == expected_text


@pytest.mark.gpu
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_embedding_on_a_gpu(tiny, pooling):
    """Steps overlap, and those without a mean are replayed from graphs."""
    one = tiny.engine("cuda", budget=40)
    texts = [one.add("no prefix", SamplingParams(temperature=0, max_tokens=9)) for _ in range(3)]
    vectors = [one.add(prompt, PoolingParams(pooling)) for prompt in PROMPTS]
    last, _ = tiny.drain(one)
    assert all(len(last[r.request_id].outputs[0].token_ids) == 9 for r in texts)
    for request in vectors:
        vector = torch.tensor(last[request.request_id].embedding).double()
        wanted = expected(tiny, list(request.prompt_token_ids), pooling)
        assert torch.allclose(vector, wanted, atol=2e-3, rtol=0)  # TF32, at most


def test_embeddings_change_no_generated_token(tiny):
    outputs = []
    for also in (False, True):
        one = tiny.engine(budget=20)
        requests = tiny.ask(one)
        if also:
            for prompt in PROMPTS:
                one.add(prompt, PoolingParams("mean"))
        last, _ = tiny.drain(one)
        outputs.append(tiny.visible({r.request_id: last[r.request_id] for r in requests}))
    assert outputs[0] == outputs[1]


@pytest.mark.slow
@pytest.mark.parametrize("host_pages", [0, 60])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_survive_preemption_and_cancellation(tiny, pooling, host_pages):
    """A pool that holds a few requests at a time, random arrivals, preemptions and cancels."""
    choice = random.Random(7)
    for overlap in (False, True):
        one = tiny.engine(
            budget=8, num_pages=40, overlap=overlap, host_pages=host_pages, max_num_seqs=6
        )
        outputs, cancelled, requests = {}, set(), []
        for turn in range(200):
            if turn < 100 and choice.random() < 0.4:
                prompt = [choice.randrange(200) for _ in range(choice.randrange(1, 90))]
                how = (
                    PoolingParams(pooling)
                    if choice.random() < 0.7
                    else SamplingParams(max_tokens=20)
                )
                requests.append(one.add(prompt, how))
            running = one.scheduler.running
            if running and choice.random() < 0.5:
                one.scheduler.preempt(choice.choice(running))
            if requests and choice.random() < 0.05:
                victim = choice.choice(requests).request_id
                if one.cancel(victim):
                    cancelled.add(victim)
            if one.has_work:
                outputs |= {output.request_id: output for output in one.step()}
                tiny.check(one)
        last, _ = tiny.drain(one)
        outputs |= last
        done = [r for r in requests if r.pooling and r.request_id not in cancelled]
        assert len(done) > 10 and sum(r.metrics.num_preemptions for r in done) > 2
        for request in done:
            check(tiny, outputs[request.request_id], pooling)


def test_a_prompt_of_the_whole_length_has_an_embedding(tiny):
    one = tiny.engine()
    request = one.add([1] * 256, PoolingParams())
    last, _ = tiny.drain(one)
    check(tiny, last[request.request_id], "last")
    refused = one.add([1] * 257, PoolingParams())
    assert isinstance(refused, RejectedRequest) and "257 tokens of prompt exceed" in refused.reason


def test_no_logits_are_computed_and_no_token_is_sampled(tiny, monkeypatch):
    one = tiny.engine()
    monkeypatch.setattr(one._runner, "_sample", None)
    request = one.add("abc", PoolingParams())
    tiny.drain(one)
    stats = one.stats()
    assert request.finished and (stats.tokens_generated, stats.tokens_prefilled) == (0, 3)


def test_a_deadline_ends_it_without_an_embedding(tiny):
    now = 0.0
    one = tiny.engine(budget=12, clock=lambda: now)
    request = one.add("a long prompt for several steps", PoolingParams("mean"), deadline_s=1.0)
    one.step()
    now = 2.0
    last, _ = tiny.drain(one)
    output = last[request.request_id]
    assert output.embedding is None and output.outputs[0].finish_reason == "abort"


def test_hidden_states_that_are_not_finite_fail_the_request_alone(tiny, monkeypatch):
    one = tiny.engine()
    broken, whole = one.add("ab", PoolingParams("mean")), one.add("cd", PoolingParams("mean"))
    forward = one._runner._model

    def spoil(ids, *rest):
        hidden = forward(ids, *rest).clone()
        hidden[0] = math.nan
        return hidden

    monkeypatch.setattr(one._runner, "_model", spoil)
    last, _ = tiny.drain(one)
    assert last[broken.request_id].outputs[0].finish_reason == "error"
    assert last[broken.request_id].embedding is None
    assert "not finite" in last[broken.request_id].outputs[0].stop_reason
    check(tiny, last[whole.request_id], "mean")


def test_long_requests_have_embeddings(tiny):
    """A prompt with more tokens than the pool has slots."""
    one = tiny.engine(num_pages=20, offload_pages=80)
    request = one.add([i % 200 for i in range(200)], PoolingParams("mean"))
    last, _ = tiny.drain(one)
    assert request.is_long
    check(tiny, last[request.request_id], "mean")


def test_wrong_parameters_raise_a_sentence():
    with pytest.raises(ValueError, match="pooling='cls' is not one of last, mean"):
        PoolingParams("cls")
    with pytest.raises(ValueError, match="the prompt is empty"):
        Request("r", [], PoolingParams())


def test_the_built_in_model_finds_the_similar_text():
    """Not random weights: of two texts, the one with the same words is nearer."""
    from onchip.engine import LLM

    llm = LLM(builtin(), num_pages=99, swap_space=0)
    texts = ["And the king said unto him, Go.", "And the king said unto them, Go.", "12 3 9 qx zz"]
    for text in texts:
        llm.engine.add(list(text.encode()), PoolingParams("mean"), request_id=text)
    outputs = {}
    while llm.engine.has_work:
        outputs |= {o.request_id: torch.tensor(o.embedding) for o in llm.engine.step()}
    one, near, far = (outputs[text] for text in texts)
    assert one @ near > one @ far + 0.05
    llm.close()
