"""One engine on several ranks: messages of rank 0 make another engine do the same."""

import json
from dataclasses import replace

import pytest

from onchip.engine import (
    BeamSearchParams,
    ByteTokenizer,
    Engine,
    ExecutionConfig,
    Limits,
    RejectedRequest,
    SamplingParams,
)
from onchip.engine import followers as module
from onchip.engine.followers import LeaderEngine, decode_params, encode_params, follow
from onchip.engine.ranks import RankClock
from onchip.engine.speculation.config import SpeculativeConfig
from onchip.parallel.comm_base import ParallelError


class Messages:
    """Messages that were sent, to be received in this process."""

    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)

    def receive(self):
        return self.sent.pop(0)


class Recorder:
    """The outputs of an engine's steps."""

    def __init__(self, engine):
        self.steps, self._step = [], engine.step
        engine.step = self.run

    def run(self):
        outputs = self._step()
        self.steps.append(
            [
                (o.request_id, [(c.text, c.token_ids, c.finish_reason) for c in o.outputs])
                for o in outputs
            ]
        )
        return outputs


@pytest.fixture
def make(tiny):
    def build(**options):
        fixed = {"num_pages": 40, "page_size": 4, "eos_token_ids": tiny.EOS, "seed": 1} | options
        execution = ExecutionConfig(clock=RankClock(), lockstep=True, overlap=True)
        limits = Limits(256, 40, 12)
        return Engine(tiny.model(), ByteTokenizer(), limits=limits, execution=execution, **fixed)

    return build


def lead(engine, requests, cancel_at=()):
    """Run requests on rank 0. Return its messages and the outputs of its steps."""
    channel, recorder = Messages(), Recorder(engine)
    leader = LeaderEngine(engine, channel)
    for prompt, params in requests:
        assert not isinstance(leader.add(prompt, params), RejectedRequest)
    steps = 0
    while leader.has_work:
        leader.step()
        steps += 1
        if steps in cancel_at:
            assert leader.cancel(leader.scheduler.running[-1].request_id)
    totals = dict(engine.scheduler.totals)
    leader.close()
    return channel, recorder.steps, totals


@pytest.mark.parametrize("host_pages", [0, 40], ids=["recomputed", "swapped"])
def test_a_follower_makes_the_same_steps(make, tiny, host_pages):
    """Every sampling parameter, stop texts, beams, drafts, also as a tree, preemptions and
    cancels.
    """
    tree = {"speculative_token_tree": "[(0,), (1,), (0, 0), (1, 0)]", "prompt_lookup_min": 1}
    drafts = tree if host_pages else {"num_speculative_tokens": 3}
    speculation = SpeculativeConfig.parse({"method": "ngram"} | drafts)
    options = {"host_pages": host_pages, "speculative_config": speculation, "num_pages": 30}
    count = max(len(tiny.PROMPTS), len(tiny.PARAMS))
    requests = [
        (tiny.PROMPTS[i % len(tiny.PROMPTS)], tiny.PARAMS[i % len(tiny.PARAMS)])
        for i in range(3 * count)
    ]
    channel, expected, totals = lead(make(**options), requests, cancel_at=(5, 11))
    follower = make(**options)
    recorder = Recorder(follower)
    follow(follower, channel, 1)
    assert recorder.steps == expected and not channel.sent
    assert dict(follower.scheduler.totals) == totals
    assert totals["swapped_out" if host_pages else "recomputed"]


def test_grammars_are_compiled_on_rank_0_within_limits_and_elsewhere_without(make, monkeypatch):
    pytest.importorskip("llguidance")
    params = SamplingParams(
        temperature=0, max_tokens=40, structured_outputs={"regex": "[a-f]{3}-[0-9]{2}"}
    )
    channel, expected, _ = lead(make(), [("x", params)])
    follower = make()
    recorder = Recorder(follower)
    monkeypatch.setattr("onchip.engine.structure.compiler.COMPILE_S", 0.0)
    follow(follower, channel, 1)
    assert recorder.steps == expected
    (text, _, reason) = expected[-1][0][1][0]
    assert len(text) == 6 and text[3] == "-" and reason == "stop"


def test_a_refused_grammar_reaches_no_other_rank(make):
    pytest.importorskip("llguidance")
    channel = Messages()
    leader = LeaderEngine(make(), channel)
    refused = SamplingParams(structured_outputs={"grammar": "start: missing_rule"})
    with pytest.raises(ValueError, match="the grammar is not served"):
        leader.add([1], refused)
    leader.step()
    assert json.loads(channel.sent[0])["notes"] == []


def test_a_rejected_request_reaches_no_other_rank(make):
    channel = Messages()
    leader = LeaderEngine(make(), channel)
    assert isinstance(leader.add([1] * 300, SamplingParams()), RejectedRequest)
    leader.close()
    assert json.loads(channel.sent[0])["notes"] == [] and leader.has_ended_others


def test_deadlines_are_those_of_rank_0(make, monkeypatch):
    """The follower runs after all deadlines have passed here."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    channel, engine = Messages(), make()
    leader, recorder = LeaderEngine(engine, channel), Recorder(engine)
    forever = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    leader.add([1, 2, 3], forever, deadline_s=0.5)
    leader.add([1, 2, 4], forever, deadline_s=0.875)
    for _ in range(12):
        leader.step()
        now[0] += 0.125
    assert not leader.has_work
    leader.close()
    now[0] = 1e6
    follower = make()
    repeated = Recorder(follower)
    follow(follower, channel, 1)
    assert repeated.steps == recorder.steps
    ends = [i for i, outputs in enumerate(recorder.steps) for o in outputs if o[1][0][2] == "abort"]
    assert ends == [4, 7]


def test_a_rank_that_differs_says_where(make):
    """A token more on one rank than on rank 0."""
    channel, _, _ = lead(make(), [("abc", SamplingParams(temperature=0, max_tokens=9))])
    follower = make()
    add = follower.add
    follower.add = lambda prompt, params, **options: add([*prompt, 7] * 3, params, **options)
    with pytest.raises(
        ParallelError, match="the ranks do not agree: (free pages|tokens) is"
    ) as error:
        follow(follower, channel, 1)
    assert error.value.rank in (0, 1)


def test_a_rank_that_rejects_a_request_says_so(make):
    channel, _, _ = lead(make(), [([1] * 60, SamplingParams(max_tokens=90, ignore_eos=True))])
    with pytest.raises(ParallelError, match="this rank has not: 60 tokens of prompt"):
        follow(make(num_pages=9), channel, 1)


def test_many_requests_are_several_messages(make, monkeypatch):
    monkeypatch.setattr(module, "MAX_NOTES_BYTES", 2000)
    requests = [([i % 200] * 40, SamplingParams(temperature=0, max_tokens=3)) for i in range(20)]
    channel, expected, _ = lead(make(), requests)
    heads = [json.loads(message)["head"]["do"] for message in channel.sent]
    assert heads.count("wait") > 3 and max(map(len, channel.sent)) < 3000
    follower = make()
    recorder = Recorder(follower)
    follow(follower, channel, 1)
    assert recorder.steps == expected


def test_after_a_failed_step_the_others_get_no_message(make, monkeypatch):
    channel, engine, failures = Messages(), make(), []
    leader = LeaderEngine(engine, channel, lambda: failures.append(1))
    leader.add([1, 2], SamplingParams())
    monkeypatch.setattr(channel, "send", None)
    with pytest.raises(TypeError):
        leader.step()
    leader.close()
    assert failures == [1] and not leader.has_ended_others


SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}, "a": {"enum": ["\ud83d"]}}}
PARAMS = [
    SamplingParams(),
    SamplingParams(
        n=2, best_of=3, temperature=0.1 + 0.2, top_p=1 / 3, top_k=5, min_p=0.01, seed=-9
    ),
    SamplingParams(stop=["\ud800", "é"], stop_token_ids=[3], min_tokens=2, max_tokens=None),
    SamplingParams(logit_bias={3: 1, 200: -0.5}, logprobs=2, prompt_logprobs=0),
    SamplingParams(presence_penalty=1, frequency_penalty=-0.3, repetition_penalty=1.1),
    SamplingParams(use_beam_search=True, n=2, temperature=0, length_penalty=0.7),
    SamplingParams(skip_special_tokens=False, ignore_eos=True),
    BeamSearchParams(3, None, True, 0.5, 2.0),
]


@pytest.mark.parametrize("params", PARAMS)
def test_parameters_survive_a_message(params):
    decoded = decode_params(json.loads(json.dumps(encode_params(params))))
    assert decoded == params and type(decoded) is type(params)
    assert list(map(type, vars(decoded).values())) == list(map(type, vars(params).values()))


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"response_format": {"type": "text"}},
        {"structured_outputs": {"json": True}},
        {"structured_outputs": {"regex": r"\d+é"}},
        {"structured_outputs": {"choice": ["a", "b\n"]}},
        {"structured_outputs": {"grammar": 'start: "a"+'}},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_a_grammar_survives_a_message(fields):
    params = SamplingParams(**fields)
    decoded = decode_params(json.loads(json.dumps(encode_params(params))))
    assert decoded.grammar == params.grammar
    plain = {"response_format": None, "structured_outputs": None}
    assert replace(decoded, **plain) == replace(params, **plain)


def test_other_parameters_are_refused():
    with pytest.raises(ValueError, match="dict is not served with tensor parallelism"):
        encode_params({"temperature": 0})


def test_an_engine_with_its_own_clock_is_refused(tiny):
    with tiny.engine() as engine, pytest.raises(ValueError, match="a clock of its own"):
        LeaderEngine(engine, Messages())
