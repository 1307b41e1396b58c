"""Calls of tools, by the official client: scripted texts in four dialects, and forced calls of the
built-in model.
"""

import json
from contextlib import contextmanager

import pytest

from tests.server.conftest import FakeEngine, serve

openai = pytest.importorskip("openai")

HELLO = [{"role": "user", "content": "hello"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}, "days": {"$ref": "#/$defs/days"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 7}},
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "time", "description": "The time."}}
ARGUMENTS = '{"city": "Rome", "days": 3}'
TEXTS = {
    "hermes": f'One.\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
    '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    "llama3_json": f'{{"name": "weather", "parameters": {ARGUMENTS}}};'
    ' {"name": "time", "parameters": {}}',
    "mistral": f'One.\n[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}},'
    ' {"name": "time", "arguments": {}}]',
    "plain": f'[{{"name": "weather", "arguments": {ARGUMENTS}}},'
    ' {"name": "time", "arguments": {}}]',
}


class ScriptedEngine(FakeEngine):
    """Every request gets the same text, three bytes at a step, and then stops."""

    def __init__(self, script):
        super().__init__(step_s=0.004)  # a client sees most steps
        self.script = list(script.encode())

    def grow(self, request):
        request.say = lambda index: self.script[: 3 * request.made]
        super().grow(request)
        if 3 * request.made >= len(self.script):
            request.end = "stop"
        return True


@contextmanager
def client_of(engine, dialect):
    """A client of a server whose model writes calls in this dialect."""
    with (
        serve(engine, tool_call_parser=dialect) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def collect(stream):
    """The content, the calls put together, and the reason of the end."""
    content, calls, reason = "", {}, None
    for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for part in choice.delta.tool_calls or ():
            if part.id:
                assert part.type == "function" and part.function.name
                calls[part.index] = [part.function.name, ""]
            calls[part.index][1] += part.function.arguments
    return content, [tuple(call) for call in calls.values()], reason


@pytest.mark.parametrize("dialect", TEXTS)
def test_four_dialects_whole_and_streamed(dialect):
    options = {"model": "fake", "messages": HELLO, "tools": [WEATHER, TIME], "max_tokens": 999}
    expected = [("weather", ARGUMENTS), ("time", "{}")]
    with client_of(ScriptedEngine(TEXTS[dialect]), dialect) as client:
        (choice,) = client.chat.completions.create(**options).choices
        chunks = list(client.chat.completions.create(**options, stream=True))
    message = choice.message
    assert choice.finish_reason == "tool_calls"
    assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == expected
    assert len({c.id for c in message.tool_calls}) == 2
    content, calls, reason = collect(chunks)
    assert calls == expected and reason == "tool_calls"
    shown = "One.\n" if TEXTS[dialect].startswith("One") else None
    assert message.content == shown and content == (shown or "")
    parts = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
    assert len(parts) > 4  # the arguments were streamed as they grew


def test_a_text_without_calls_and_a_malformed_one_are_content():
    options = {"model": "fake", "messages": HELLO, "tools": [WEATHER], "max_tokens": 999}
    for text in ("No tool is needed.", '<tool_call>{"name": "weather"</tool_call>'):
        with client_of(ScriptedEngine(text), "hermes") as client:
            (choice,) = client.chat.completions.create(**options).choices
            stream = client.chat.completions.create(**options, stream=True)
            content, calls, reason = collect(stream)
        assert choice.message.content == text and not choice.message.tool_calls
        assert (choice.finish_reason, reason) == ("stop", "stop")
        assert (content, calls) == (text, [])


def test_tool_choice_none_shows_calls_as_text():
    text = TEXTS["hermes"]
    options = {"model": "fake", "messages": HELLO, "tools": [WEATHER], "max_tokens": 999}
    with client_of(ScriptedEngine(text), "hermes") as client:
        done = client.chat.completions.create(**options, tool_choice="none")
    assert done.choices[0].message.content == text


@pytest.fixture(scope="module", params=TEXTS)
def forced(request):
    """A client of the built-in model."""
    pytest.importorskip("llguidance")
    from onchip.engine import LLM

    with LLM(num_pages=513) as llm, client_of(llm.engine, request.param) as client:
        yield client


def check_call(name, arguments):
    if name == "weather":
        assert json.loads(arguments)["city"] in ("Rome", "Paris")
        assert 1 <= json.loads(arguments)["days"] <= 7
    else:
        assert name == "time" and json.loads(arguments) == {}


@pytest.mark.slow
def test_required_calls_follow_the_schemas(forced):
    options = {"model": "fake", "messages": HELLO, "tools": [WEATHER, TIME], "max_tokens": 400}
    options |= {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0}
    (choice,) = forced.chat.completions.create(**options).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    check_call(call.function.name, call.function.arguments)
    content, calls, reason = collect(forced.chat.completions.create(**options, stream=True))
    assert content == "" and reason == "tool_calls" and len(calls) == 1
    check_call(*calls[0])


def test_a_named_function_is_called(forced):
    options = {"model": "fake", "messages": HELLO, "tools": [WEATHER, TIME], "max_tokens": 400}
    named = {"type": "function", "function": {"name": "weather"}}
    (choice,) = forced.chat.completions.create(**options, tool_choice=named).choices
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    check_call("weather", call.function.arguments)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice needs tools"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "is not among the tools",
        ),
        ({"tool_choice": "some"}, "tool_choice='some' is not served"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "not served together"),
    ],
)
def test_other_values_are_rejected_with_a_message(shared, ask, change, sentence):
    body = {"messages": HELLO, "tools": [WEATHER]} | change
    status, answer, _ = ask(shared, "/v1/chat/completions", body)
    assert status == 400 and sentence in answer["error"]["message"], answer
