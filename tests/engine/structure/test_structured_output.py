"""Texts of the built-in model follow their grammars: schemas that hypothesis writes, and those of
every keyword, at random temperatures, are validated by jsonschema_rs (draft 2020-12).
"""

import gc
import json
import re
import sys
import threading
import time
import weakref

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("llguidance")
jsonschema_rs = pytest.importorskip("jsonschema_rs")

from onchip.core.extras import MissingPackageError  # noqa: E402
from onchip.engine import LLM, SamplingParams  # noqa: E402
from onchip.engine.structure import automaton, compiler  # noqa: E402
from tests.engine.structure.keywords import SERVED  # noqa: E402
from tests.engine.structure.schemas import EVERY, WIDE  # noqa: E402
from tests.engine.structure.walks import parse_json  # noqa: E402

TREE = "[(0,), (1,), (0, 0), (1, 0), (0, 0, 0)]"
POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 99},
        "on": {"type": "boolean"},
    },
    "required": ["x", "on"],
    "additionalProperties": False,
}
# Optional properties cost quadratic time: several seconds, and hundreds of MiB.
EXPLODING = {"type": "object", "properties": {f"{i:x}": {} for i in range(5000)}}

ANY = st.one_of(EVERY, EVERY, WIDE, st.sampled_from(SERVED))


@pytest.fixture(scope="module")
def llm():
    with LLM(num_pages=257) as model:
        yield model


def generate(llm, prompts, params):
    return llm.generate(prompts, params, use_tqdm=False)


def structured(max_tokens=300, **outputs):
    return SamplingParams(max_tokens=max_tokens, structured_outputs=outputs)


def is_served(llm, schema):
    error = llm.engine.compile_grammar(structured(json=schema)).error
    assert error is None or error.startswith("the JSON schema is not served: "), error
    return error is None


def check_schemas(llm, schemas, temperature):
    """How many texts ended; all of them are valid."""
    params = [
        SamplingParams(
            temperature=temperature, max_tokens=200, seed=i, structured_outputs={"json": schema}
        )
        for i, schema in enumerate(schemas)
    ]
    finished = 0
    for schema, output in zip(schemas, generate(llm, ["a"] * len(params), params), strict=True):
        (choice,) = output.outputs
        assert choice.finish_reason in ("stop", "length"), choice
        if choice.finish_reason == "stop":
            finished += 1
            value = parse_json(choice.text)
            assert jsonschema_rs.is_valid(schema, value, validate_formats=True), choice.text
    return finished


@pytest.mark.slow
@settings(
    max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)
@given(st.lists(EVERY, min_size=5, max_size=5), st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_generated_schemas(llm, schemas, temperature):
    check_schemas(llm, schemas, temperature)


@pytest.mark.slow
@settings(
    max_examples=50, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)
@given(st.lists(ANY, min_size=20, max_size=20), st.floats(0, 2))
def test_a_thousand_generated_schemas(llm, schemas, temperature):
    """50 times 20 schemas; .ci/run draws 20 times 20."""
    served = [schema for schema in schemas if is_served(llm, schema)]
    check_schemas(llm, served, round(temperature, 3))


def test_most_texts_of_a_small_schema_end(llm):
    assert check_schemas(llm, [POINT] * 8, 1.0) == 8


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": r"\d{3}-[a-z]{4}"}, r"[0-9]{3}-[a-z]{4}"),
        ({"choice": ["yes", "né\n", '"quoted"']}, 'yes|né\n|"quoted"'),
        ({"grammar": 'start: "<" start ">" | "x"'}, "(<*)x(>*)"),
        ({"grammar": 'root ::= [a-c] ("-" [0-9]){2}'}, "[a-c](-[0-9]){2}"),
        ({"json_object": True}, r"\{.*\}"),
    ],
)
def test_other_grammars(llm, outputs, pattern):
    (output,) = generate(llm, "a", SamplingParams(n=3, max_tokens=120, structured_outputs=outputs))
    for choice in output.outputs:
        if choice.finish_reason == "stop":
            assert re.fullmatch(pattern, choice.text, re.DOTALL), choice.text
        else:
            assert choice.finish_reason == "length"


def test_response_format_with_logprobs_penalties_and_samples(llm):
    params = SamplingParams(
        n=3,
        max_tokens=200,
        logprobs=2,
        presence_penalty=1.0,
        repetition_penalty=1.3,
        logit_bias={32: -50},
        response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": POINT}},
    )
    (output,) = generate(llm, "a", params)
    for choice in output.outputs:
        assert choice.finish_reason == "stop" and len(choice.logprobs) == len(choice.token_ids)
        assert jsonschema_rs.is_valid(POINT, json.loads(choice.text))


def test_a_cut_text_is_unfinished(llm):
    (output,) = generate(llm, "a", structured(4, json=POINT))
    assert output.outputs[0].finish_reason == "length"
    with pytest.raises(ValueError):
        json.loads(output.outputs[0].text)


def test_free_requests_get_the_same_tokens_as_alone(llm):
    free = [SamplingParams(max_tokens=24, seed=i, temperature=i / 2) for i in range(4)]
    alone = [generate(llm, "In the", params)[0].outputs[0].token_ids for params in free]
    mixed = [p for params in free for p in (params, structured(json=POINT))]
    outputs = generate(llm, ["In the"] * len(mixed), mixed)
    assert [output.outputs[0].token_ids for output in outputs[::2]] == alone
    for output in outputs[1::2]:
        assert jsonschema_rs.is_valid(POINT, json.loads(output.outputs[0].text))


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3},
        {"method": "draft", "model": "tiny", "num_speculative_tokens": 3},
        {"method": "draft", "model": "tiny", "speculative_token_tree": TREE},
    ],
    ids=["ngram", "draft", "tree"],
)
def test_drafts_change_no_structured_text(llm, method):
    """Also drafts that the grammar does not allow, and drafts after its end."""
    schema = {"type": "array", "items": POINT, "minItems": 2, "maxItems": 2}
    outputs = [
        {"json": schema},
        {"regex": "(ab|ba){20,25}c"},
        {"choice": ["yes", "yesterday"]},
        None,
    ]
    params = [
        SamplingParams(temperature=i % 2, max_tokens=60, seed=3, structured_outputs=one)
        for i, one in enumerate([*outputs, *outputs[:3]])
    ]
    with LLM(num_pages=257, speculative_config=method) as drafted:
        # Grammars that are ready at the start: steps, and so drafts, do not depend on time.
        for pending in map(drafted.engine.compile_grammar, params):
            assert pending is None or pending.error is None
        found = generate(drafted, ["ab yes ab yes"] * len(params), params)
        stats = drafted.stats().speculation
        drafted.engine.scheduler.check()
    expected = generate(llm, ["ab yes ab yes"] * len(params), params)
    visible = lambda output: [(o.text, o.token_ids, o.finish_reason) for o in output.outputs]
    assert [visible(o) for o in found] == [visible(o) for o in expected]
    assert stats.num_accepted_tokens > 20 and stats.failure is None
    first, second, _ = stats.num_accepted_tokens_per_pos
    assert second > 5 and (method["method"] == "ngram" or first > 0.9 * stats.num_drafts)


@pytest.mark.slow
@pytest.mark.parametrize("swap_space", [0, 0.25])
def test_preempted_requests_continue_their_texts(swap_space):
    """Few pages: requests are preempted, and recomputed or swapped in again."""
    schema = {"type": "array", "items": POINT, "minItems": 2, "maxItems": 2}
    with LLM(num_pages=16, max_model_len=160, swap_space=swap_space) as llm:
        params = [SamplingParams(max_tokens=130, seed=i, structured_outputs={"json": schema})
                  for i in range(4)]  # fmt: skip
        outputs = generate(llm, ["a"] * 4, params)
        stats = llm.stats()
        assert stats.preempted_by_swap + stats.preempted_by_recompute > 0
        llm.engine.scheduler.check()
    for output in outputs:
        choice = output.outputs[0]
        assert choice.finish_reason == "length" or jsonschema_rs.is_valid(
            schema, json.loads(choice.text)
        )


@pytest.mark.parametrize(
    ("outputs", "sentence"),
    [
        ({"json": {"type": "frob"}}, "the JSON schema is not served: Invalid type: frob"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "#"}}, "the JSON schema is not served"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"grammar": "start: missing"}, "the grammar is not served"),
    ],
)
def test_grammars_that_are_not_served(llm, outputs, sentence):
    with pytest.raises(ValueError, match=sentence):
        generate(llm, "a", structured(**outputs))
    assert generate(llm, "a", structured(choice=["ok"]))[0].outputs[0].text == "ok"


def test_a_schema_that_explodes_is_refused_while_others_are_served(llm):
    generate(llm, "a", structured(choice=["ok"]))  # the worker runs
    pending = llm.engine.compile_grammar(structured(json=EXPLODING))
    started = time.monotonic()
    assert len(generate(llm, "a", SamplingParams(max_tokens=4))[0].outputs[0].token_ids) == 4
    assert "to compile" in pending.error or "too big" in pending.error
    assert time.monotonic() - started < 5  # 1 s on an idle machine
    assert generate(llm, "a", structured(choice=["ok"]))[0].outputs[0].text == "ok"


def test_a_request_waits_for_its_grammar_and_no_step_does(llm, monkeypatch):
    """Others overtake a request whose grammar is still being compiled."""
    release, build = threading.Event(), compiler.build_matcher

    def build_late(index, grammar):
        release.wait(30)
        return build(index, grammar)

    monkeypatch.setattr(compiler, "build_matcher", build_late)
    engine = llm.engine
    waiting = engine.add("a", structured(regex="late!"), request_id="waiting")
    other = engine.add("a", SamplingParams(max_tokens=3), request_id="other")
    while not other.finished:
        engine.step()
    assert not waiting.finished and waiting in engine.scheduler.waiting
    release.set()
    while not waiting.finished:
        engine.step()
    assert waiting.output().outputs[0].text == "late!"


def test_waiting_requests_can_be_cancelled_and_expire(llm, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(compiler, "build_matcher", lambda *_: release.wait(30))
    engine = llm.engine
    cancelled = engine.add("a", structured(regex="never 1"))
    late = engine.add("a", structured(regex="never 2"), deadline_s=0.05)
    engine.step()
    assert engine.cancel(cancelled.request_id)
    while not late.finished:
        engine.step()
    release.set()
    assert late.output().outputs[0].finish_reason == "abort" and not engine.has_work


def test_grammars_are_cached_up_to_a_bound(llm, monkeypatch):
    monkeypatch.setattr(compiler, "CACHED_GRAMMARS", 2)
    compile_one = lambda text: llm.engine.compile_grammar(structured(regex=text))
    first = compile_one("a1")
    assert compile_one("a1") is first
    compile_one("a2"), compile_one("a3")
    assert compile_one("a1") is first  # while anyone holds it
    forgotten = weakref.ref(first)
    assert first.error is None
    del first
    compile_one("a2"), compile_one("a3")
    gc.collect()
    assert forgotten() is None


def test_failures_are_kept_for_a_while(llm, monkeypatch):
    compile_bad = lambda: llm.engine.compile_grammar(structured(regex="(b"))
    first = compile_bad()
    assert "unclosed" in first.error and compile_bad() is first
    monkeypatch.setattr(compiler, "KEEP_FAILURE_S", 0.0)
    assert compile_bad() is not first


def test_without_the_package_a_sentence_names_the_extra(llm, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(
        MissingPackageError, match=r"needs the package llguidance: .*\[structured\]"
    ):
        automaton.load_package()
    with pytest.raises(MissingPackageError, match="structured"):
        generate(llm, "a", structured(regex="never compiled"))


def test_without_a_tokenizer_a_sentence_says_so(llm):
    params = structured(regex="a")
    with LLM(llm.engine.model, num_pages=17) as bare, pytest.raises(ValueError, match="tokenizer"):
        generate(bare, [[1, 2]], params)
