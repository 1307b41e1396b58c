"""Names of OpenAI and vLLM become one grammar, and sizes are checked before anything is built."""

import pytest

from onchip.engine import SamplingParams, StructuredOutputsParams
from onchip.engine.structure.grammar import Grammar, parse_grammar
from onchip.engine.structure.regex_size import count_states


def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_every_name_gives_a_grammar():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    text = '{"type": "object", "properties": {"b": {}, "a": {}}}'  # the order is kept
    formats = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert parse_grammar(formats, None) == Grammar("json", text)
    assert parse_grammar(None, {"json": schema}) == Grammar("json", text)
    assert parse_grammar(None, StructuredOutputsParams(json=text)) == Grammar("json", text)
    any_object = Grammar("json", '{"type": "object"}')
    assert parse_grammar({"type": "json_object"}, None) == any_object
    assert parse_grammar(None, {"json_object": True}) == any_object
    assert parse_grammar({"type": "text"}, {"regex": "a+"}) == Grammar("regex", "a+")
    assert parse_grammar(None, {"choice": ["a", "b"]}) == Grammar("choice", '["a", "b"]')
    assert parse_grammar(None, {"grammar": 'start: "a"'}) == Grammar("grammar", 'start: "a"')
    assert parse_grammar({"type": "text"}, None) is None and parse_grammar(None, None) is None


@pytest.mark.parametrize(
    ("response_format", "outputs", "sentence"),
    [
        ({"type": "xml"}, None, "must have a type"),
        ({"type": "json_schema"}, None, "needs json_schema with a schema"),
        ({"type": "json_object"}, {"regex": "a"}, "one kind of structured output"),
        (None, {"regex": "a", "choice": ["a"]}, "not choice and regex"),
        (None, {}, "needs one of json, regex"),
        (None, {"structural_tag": "x"}, "structured_outputs.structural_tag is not served"),
        (None, {"regex": ""}, "not empty"),
        (None, {"regex": "(a{1000}){1000}"}, "repeats its parts 1000000 times"),
        (None, {"choice": []}, "has 0 texts"),
        (None, {"choice": ["a", ""]}, "an empty text"),
        (None, {"choice": "ab"}, "must be a list of texts"),
        (None, {"json": "{"}, "is not JSON"),
        (None, {"json": [1]}, "must be an object"),
        (None, {"json": {"enum": [{1}]}}, "is not JSON"),
        (None, {"json": {"pattern": "(a{999}){999}"}}, "repeats its parts"),
        (None, {"json": {"patternProperties": {"(a{999}){999}": {}}}}, "repeats its parts"),
        (None, {"json": nested(70)}, "deeper than 64 levels"),
        (None, {"json": nested(100_000)}, "deeper than 64 levels"),
        (None, {"json": {"enum": ["x" * 70_000]}}, "up to 65536 are served"),
        (None, {"grammar": "a" * 70_000}, "up to 65536 are served"),
    ],
)
def test_other_values_are_refused_in_a_sentence(response_format, outputs, sentence):
    with pytest.raises(ValueError, match=sentence):
        parse_grammar(response_format, outputs)


@pytest.mark.parametrize(
    "more", [{"ignore_eos": True}, {"min_tokens": 2}, {"use_beam_search": True, "n": 2}]
)
def test_options_that_contradict_a_grammar_are_refused(more):
    with pytest.raises(ValueError, match="is not served with structured output"):
        SamplingParams(structured_outputs={"regex": "a"}, **more)


@pytest.mark.parametrize(
    ("pattern", "states"),
    [
        ("abc", 3),
        (r"a\{3}", 4),
        ("[a-z{9}]{4}", 4),
        ("(ab){3}c", 7),
        ("((a{10}){10}){10}", 1000),
        ("a{2,5}|b{7,}", 12),
        ("(a", 1),
        ("a)b", 2),
        ("[" * 60_000, 1),
    ],
    ids=lambda value: str(value)[:20],
)
def test_states_of_regular_expressions(pattern, states):
    assert count_states(pattern) == states
