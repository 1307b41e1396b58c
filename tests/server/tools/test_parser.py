"""Calls of tools in the text of a model: four dialects, whole and cut into pieces anywhere."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.server.tools import DIALECTS, ToolCallParser, find_dialect

ARGUMENTS = {"city": 'Kö"ln\\ }{', "days": [1, {"a": None}], "unit": "</tool_call>"}
CALL, OTHER = json.dumps(ARGUMENTS), json.dumps({})
NAMES = ("weather", "time")


def written(dialect, calls):
    """The text in which a model of this dialect writes calls."""
    key = DIALECTS[dialect].key
    objects = [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in calls]
    if dialect == "hermes":
        return "\n".join(f"<tool_call>\n{o}\n</tool_call>" for o in objects)
    if dialect == "llama3_json":
        return "; ".join(objects)
    listed = f"[{', '.join(objects)}]"
    return f"[TOOL_CALLS]{listed}" if dialect == "mistral" else listed


def parse(dialect, pieces, streams=True, **options):
    """The content, and (name, arguments) of each call."""
    parser = ToolCallParser(DIALECTS[dialect], NAMES, streams=streams, **options)
    parsed = [*(parser.push(piece) for piece in pieces), parser.finish()]
    calls: dict[int, list[str]] = {}
    for part in (call for p in parsed for call in p.calls):
        if part.name is not None:
            assert part.id and part.index == len(calls)
            calls[part.index] = [part.name, ""]
        calls[part.index][1] += part.arguments
    assert parser.num_calls >= len(calls) or not streams
    return "".join(p.content for p in parsed), [tuple(call) for call in calls.values()]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("streams", [False, True])
class TestEveryDialect:
    def test_one_call(self, dialect, streams):
        text = written(dialect, [("weather", CALL)])
        assert parse(dialect, [text], streams) == ("", [("weather", CALL)])

    def test_two_calls_character_by_character(self, dialect, streams):
        text = written(dialect, [("weather", CALL), ("time", OTHER)])
        assert parse(dialect, text, streams) == ("", [("weather", CALL), ("time", OTHER)])

    def test_a_text_without_calls_is_content(self, dialect, streams):
        for text in ("Hello {x}, [1] <tool", " [TOOL_CALL", "<tool_call> none", "{", "[", "12"):
            assert parse(dialect, text, streams) == (text, [])

    @pytest.mark.parametrize(
        "call",
        [
            '{"name": "weather", "arguments": {"a": }}',
            '{"name": "unknown", "arguments": {}}',
            '{"name": 5, "arguments": {}}',
            '{"arguments": {}}',
            '{"name": "weather", "arguments": 7}',
            '{"name" "weather"}',
            '{"name": "weather", "argum',
        ],
    )
    def test_a_malformed_call_is_content(self, dialect, streams, call):
        start, end = DIALECTS[dialect].start, DIALECTS[dialect].end
        text = f"{start}{call}{end}"
        content, calls = parse(dialect, text, streams)
        if not calls:
            assert content == text
        else:  # its beginning was streamed before it broke
            ((name, arguments),) = calls
            assert streams and name == "weather" and text.endswith(arguments + content)

    def test_calls_beyond_the_limit_are_content(self, dialect, streams):
        text = written(dialect, [("weather", CALL), ("time", OTHER)])
        content, calls = parse(dialect, text, streams, max_calls=1)
        assert calls == [("weather", CALL)] and '"time"' in content


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(DIALECTS)), st.lists(st.integers(0, 400), max_size=8), st.booleans())
def test_pieces_of_any_size_give_the_same_calls(dialect, cuts, streams):
    text = written(dialect, [("weather", CALL), ("time", OTHER)])
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    assert parse(dialect, pieces, streams) == ("", [("weather", CALL), ("time", OTHER)])


def test_text_before_and_after_calls_of_hermes_is_content():
    text = f"Let me see.\n{written('hermes', [('weather', CALL)])}\nDone."
    assert parse("hermes", text) == ("Let me see.\nDone.", [("weather", CALL)])


@pytest.mark.parametrize("form", ["[TOOL_CALLS]weather{}", "[TOOL_CALLS] weather[ARGS]{}</s>"])
def test_the_newer_forms_of_mistral(form):
    assert parse("mistral", form, hidden=["</s>"]) == ("", [("weather", "{}")])


def test_mistral_has_ids_of_nine_characters():
    parser = ToolCallParser(DIALECTS["mistral"], NAMES)
    (first, _) = parser.push(written("mistral", [("weather", CALL)])).calls
    assert len(first.id) == 9 and first.id.isalnum()


def test_arguments_grow_while_they_arrive():
    parser = ToolCallParser(DIALECTS["hermes"], NAMES)
    text = written("hermes", [("weather", '{"city": "Rome"}')])
    grown = [part.arguments for char in text for part in parser.push(char).calls if not part.name]
    assert grown == list('{"city": "Rome"}')


def test_arguments_before_the_name_and_as_a_text():
    assert parse("plain", '{"arguments": {"a": 1}, "name": "time"}')[1] == [("time", '{"a": 1}')]
    assert parse("plain", '{"name": "time", "arguments": "{\\"a\\": 1}"}')[1] == [
        ("time", '{"a": 1}')
    ]
    assert parse("plain", '{"name": "time"}')[1] == [("time", "{}")]


def test_the_dialect_follows_the_template_then_the_family():
    assert find_dialect("auto", "... <tool_call> ...", "llama").name == "hermes"
    assert find_dialect("auto", "... [TOOL_CALLS] ...", "").name == "mistral"
    assert find_dialect("auto", None, "llama").name == "llama3_json"
    assert find_dialect("auto", "none", "qwen3").name == "hermes"
    assert find_dialect("auto", None, "gemma3").name == "plain"
    assert find_dialect("hermes", "[TOOL_CALLS]", "llama").name == "hermes"
