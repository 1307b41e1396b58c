"""With the real engine: responses over HTTP equal offline outputs."""

import inspect
import json
import re
from dataclasses import fields

import pytest

from onchip.engine import Engine, EngineStats, SamplingParams
from onchip.engine.llm import LLM
from onchip.engine.speculation.ngram import NgramProposer

PATH = "/v1/completions"
PROMPTS = ["Pages are lent, not given.", "a", "héllo " * 30]


def model():
    return LLM("tiny", num_pages=300, max_num_seqs=16, swap_space=0)


@pytest.fixture(scope="module")
def offline():
    """The offline outputs of each prompt."""
    llm = model()
    yield lambda **params: llm.generate(PROMPTS, SamplingParams(**params), use_tqdm=False)
    llm.close()


@pytest.fixture
def url(serving):
    with serving(model().engine) as (url, _):
        yield url


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0, "max_tokens": 21},
        {"temperature": 0.8, "top_p": 0.9, "seed": 7, "n": 3, "max_tokens": 13},
        {"temperature": 0, "max_tokens": 40, "stop": ["'", "9", "q"]},
        {"seed": 5, "n": 2, "best_of": 4, "max_tokens": 9},
        {"temperature": 0, "n": 3, "use_beam_search": True, "max_tokens": 7},
    ],
    ids=["greedy", "seeded", "stopped", "best", "beams"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_http_outputs_equal_offline_outputs(url, ask, offline, options, stream):
    streamable = "best_of" not in options and "use_beam_search" not in options
    body = {"prompt": PROMPTS, "stream": stream} | options
    status, answer, _ = ask(url, PATH, body)
    if stream and not streamable:
        assert status == 400
        return
    texts, reasons = joined(answer) if stream else whole(answer)
    outputs = [one for request in offline(**options) for one in request.outputs]
    assert texts == [one.text for one in outputs]
    assert reasons == [one.finish_reason for one in outputs]


def whole(answer):
    choices = answer["choices"]
    assert [c["index"] for c in choices] == list(range(len(choices)))
    return [c["text"] for c in choices], [c["finish_reason"] for c in choices]


def joined(answer):
    events = [e.removeprefix("data: ") for e in answer.split("\n\n") if e][:-1]
    texts, reasons = {}, {}
    for choice in (c for e in events for c in json.loads(e)["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
    return [texts[i] for i in sorted(texts)], [reasons[i] for i in sorted(reasons)]


def test_drafts_change_no_output_and_are_counted(serving, ask, offline):
    config = {"num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
    llm = LLM("tiny", num_pages=300, max_num_seqs=16, swap_space=0, speculative_config=config)
    options = {"temperature": 0, "max_tokens": 40, "stop": ["'", "9", "q"]}
    with serving(llm.engine) as (url, _):
        texts, reasons = joined(ask(url, PATH, {"prompt": PROMPTS, "stream": True} | options)[1])
        metrics, stats = ask(url, "/metrics")[1], ask(url, "/stats")[1]["speculation"]
    outputs = [one for request in offline(**options) for one in request.outputs]
    assert texts == [one.text for one in outputs]
    assert reasons == [one.finish_reason for one in outputs]
    accepted = stats["accepted_tokens"]
    assert 0 < accepted < stats["draft_tokens"] <= 3 * stats["drafts"]
    assert sum(stats["accepted_per_position"]) == accepted
    assert f"onchip_spec_decode_num_accepted_tokens_total {accepted:.1f}" in metrics
    assert 'onchip_spec_decode_num_accepted_tokens_per_pos_total{position="2"}' in metrics
    (line,) = re.findall("^onchip_spec_decode_acceptance_length (.*)$", metrics, re.MULTILINE)
    assert float(line) == pytest.approx(1 + accepted / stats["drafts"]) and not stats["failed"]
    assert "onchip_spec_decode_failed 0.0" in metrics


def test_drafts_that_fail_before_the_first_are_visible(serving, ask, monkeypatch):
    monkeypatch.setattr(NgramProposer, "propose", lambda self, wanted: 1 / 0)
    llm = LLM("tiny", num_pages=99, swap_space=0, speculative_config={"num_speculative_tokens": 3})
    with serving(llm.engine) as (url, _):
        assert ask(url, "/stats")[1]["speculation"] is None
        assert ask(url, PATH, {"prompt": "a", "max_tokens": 4})[0] == 200
        metrics, stats = ask(url, "/metrics")[1], ask(url, "/stats")[1]["speculation"]
    assert "onchip_spec_decode_failed 1.0" in metrics
    assert stats["failed"] and stats["drafts"] == 0 and stats["mean_acceptance_length"] is None


def test_a_scored_prompt_has_the_logprobs_of_its_tokens(url, ask, offline):
    body = {"prompt": PROMPTS[0], "max_tokens": 0, "echo": True, "logprobs": 2}
    choice = ask(url, PATH, body)[1]["choices"][0]
    request = offline(max_tokens=1, prompt_logprobs=2)[0]
    expected = [
        table[token].logprob
        for token, table in list(
            zip(request.prompt_token_ids, request.prompt_logprobs, strict=True)
        )[1:]
    ]
    assert choice["text"] == PROMPTS[0] and choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-5)
    assert choice["logprobs"]["text_offset"] == list(range(len(PROMPTS[0])))


def test_prefixes_are_shared_within_a_key_only(serving, ask):
    """Both halves matter: a cache that is never hit would pass the second."""
    anna, bert = ({"authorization": f"Bearer {name}-secret-key"} for name in ("anna", "bert"))
    body = {"prompt": "Only we know what stands here. " * 3, "max_tokens": 1}
    cached = lambda answer: answer[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    with serving(model().engine, keys=["anna-secret-key", "bert-secret-key"]) as (url, _):
        assert cached(ask(url, PATH, body, **anna)) == 0
        assert cached(ask(url, PATH, body, **anna)) == len(body["prompt"]) - 1
        assert cached(ask(url, PATH, body, **bert)) == 0


def test_the_fake_engine_has_the_interface_of_the_real_one(fake):
    names = lambda function: set(inspect.signature(function).parameters) - {"self"}
    assert names(fake.add) == names(Engine.add)
    assert set(vars(fake().stats())) == {field.name for field in fields(EngineStats)}
    members = ("has_work", "cancel", "step", "stats", "close")
    assert all(hasattr(fake, name) and hasattr(Engine, name) for name in members)


def test_a_deadline_frees_the_pages(serving, ask):
    with serving(model().engine) as (url, server):
        body = {"prompt": "abc", "max_tokens": 2000, "ignore_eos": True, "deadline_s": 0.3}
        status, answer, _ = ask(url, PATH, body)
        assert status == 408 and answer["error"]["code"] == "deadline"
        assert ask(url, PATH, {"prompt": "abc", "max_tokens": 2})[0] == 200
        stats = server.service.stats
        assert (stats.running, stats.pages_free) == (0, stats.pages_total)


def test_a_failed_step_fails_all_pending_calls(serving, ask, open_stream, until, monkeypatch):
    llm = model()
    with serving(llm.engine) as (url, server):
        streams = [open_stream(url, max_tokens=2000, ignore_eos=True) for _ in range(3)]
        until(lambda: server.service.stats.running == 3)

        def broken(*args):
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(llm.engine._runner, "launch", broken)
        for stream in streams:
            assert '"code":"engine_dead"' in stream.getresponse().read().decode()
        assert ask(url, "/health")[0] == 503 and ask(url, PATH, {"prompt": "a"})[0] == 503
